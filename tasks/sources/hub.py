"""Rows of a data set on the Hugging Face hub, and the copies of them that are kept on this disk.

Guarantees: what is loaded is of one commit, and the last few commits of a data set and split are
kept beside each other (`$CONCUR_CACHE/hub`), each a Parquet file with the name of its commit; a
hub that cannot be reached is asked again for a few seconds, then the newest copy is used and a
caution says so (tasks.progress); a hub that cannot be reached where there is no copy, or does not
hold what was asked, is one UsageError that says how to use a file instead. Where a hub answers that
something does not exist, no copy stands in for it. A copy that cannot be read is skipped.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from kernels_eval.errors import UsageError, cause_of
from kernels_eval.records import Json
from kernels_eval.toolchain import default_cache
from tasks.files import atomic_write
from tasks.progress import caution
from tasks.retry import retry_until_back

DEADLINE_S = 6.0
"""How long an absent hub is asked again."""
KEPT = 3
log = logging.getLogger(__name__)
T = TypeVar("T")
Rows = list[Json]


def is_hub_id(location: object) -> bool:
    """True for `owner/name`: a path written with a leading `.`, `/` or `~` never is one."""
    return isinstance(location, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", location) is not None


def load_rows(hub_id: str, split: str, revision: str | None, columns: Sequence[str]) -> Rows:
    """Rows of a split at a commit (the newest where None), those columns only (all where none is
    named). Raises UsageError where neither hub nor disk has them."""
    return _Wanted(hub_id, split, revision, tuple(columns)).rows()


@dataclass(frozen=True)
class _Wanted:
    """Some columns of a split of a data set, at a revision (a branch, a commit, None: the main
    branch)."""

    hub_id: str
    split: str
    revision: str | None
    columns: tuple[str, ...]

    def rows(self) -> Rows:
        import datasets

        commit, rows = self.revision if self._is_commit else None, None
        try:
            commit = commit or _patiently(lambda: _commit_of(self.hub_id, self.revision))
        except Exception as error:  # httpx's and the hub client's own; a wrong id is an error below
            rows = self._copied_rows(error)
        if rows is not None:
            return rows
        try:
            rows = _patiently(lambda: self._fetched_rows(commit))
        except Exception as error:
            known = (OSError, ValueError, datasets.exceptions.DatasetsError)
            if not unreachable(error) and not isinstance(error, known):
                raise
            rows = self._copied_rows(error)
            if rows is not None:
                return rows
            raise UsageError(
                f"cannot load {self} from the hub: {cause_of(error)[:300]}",
                "check the id (there is no local file of that name) and the network (there is no"
                " local copy), or download its Parquet file and give its path",
            ) from error
        if commit is None:
            caution(f"The hub did not name the commit of {self}: no copy was kept.")
        else:
            self._keep(commit, rows)
        return rows

    def __str__(self) -> str:
        return f"{self.hub_id} (split {self.split}, revision {self.revision or 'newest'})"

    @property
    def _is_commit(self) -> bool:
        return re.fullmatch(r"[0-9a-f]{40}", self.revision or "") is not None

    @property
    def _folder(self) -> Path:
        content = "-".join([self.split, *self.columns])
        name = re.sub(r"[^\w.-]", "_", content)
        return default_cache() / "hub" / self.hub_id.replace("/", "--") / name

    def _fetched_rows(self, commit: str | None) -> Rows:
        import datasets

        found = datasets.load_dataset(
            self.hub_id, split=self.split, revision=commit or self.revision
        )
        return list((found.select_columns(list(self.columns)) if self.columns else found).to_list())

    # -- copies ------------------------------------------------------------------------------------

    def _copies(self) -> list[Path]:
        """The newest first."""
        return sorted(self._folder.glob("*.parquet"), key=_written_at, reverse=True)

    def _copied_rows(self, fault: Exception) -> Rows | None:
        """The copy of this commit or, for a branch, the newest one, where the hub is unreachable;
        None where there is none. A caution says that it is a copy."""
        import polars as pl

        for path in self._copies() if unreachable(fault) else ():
            if self._is_commit and path.stem != self.revision:
                continue
            try:
                rows = pl.read_parquet(path).to_dicts()
            except (OSError, pl.exceptions.PolarsError) as error:
                log.error("the copy %s cannot be read: %s", path, error)
                continue
            written = datetime.fromtimestamp(_written_at(path) / 1e9, UTC)
            caution(
                f"The hub could not be reached ({cause_of(fault)[:300]}): the tasks are those of"
                f" the copy on this disk of {self.hub_id}, split {self.split}, commit {path.stem},"
                f" fetched {written.isoformat(timespec='seconds')}, {len(rows)} rows."
            )
            return rows
        return None

    def _keep(self, commit: str, rows: Rows) -> None:
        """Write a copy beside earlier ones. A failure to write is only logged."""
        import polars as pl

        target = self._folder / f"{commit}.parquet"
        try:
            frame = pl.DataFrame(rows, infer_schema_length=None)
            atomic_write(target, lambda path: frame.write_parquet(path, compression="zstd"))
            for old in self._copies()[KEPT:]:
                old.unlink(missing_ok=True)
        except (OSError, pl.exceptions.PolarsError) as error:
            log.warning("no copy of %s at %s was kept: %s", self.hub_id, commit, error)


def _written_at(path: Path) -> int:
    return path.stat().st_mtime_ns


# -- the hub ---------------------------------------------------------------------------------------


def unreachable(error: BaseException) -> bool:
    """Whether it is the network or the hub itself, and not what was asked of it. Looks at the
    causes too: `datasets` wraps them."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ConnectionError | TimeoutError | LocalEntryNotFoundError):
            return True
        # httpx's TransportError, or httpx2's, which newer clients of the hub use: no OSErrors
        if any(
            kind.__name__ == "TransportError" and kind.__module__.startswith("httpx")
            for kind in type(seen).__mro__
        ):
            return True
        if isinstance(seen, HfHubHTTPError):
            status = seen.response.status_code if seen.response is not None else 0
            return status >= 500 or status == 429
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def _commit_of(hub_id: str, revision: str | None) -> str | None:
    """The commit that a branch (the main one where None) is at. Raises as the hub's client does."""
    from huggingface_hub import HfApi

    return HfApi().dataset_info(hub_id, revision=revision, timeout=10).sha


def _patiently(ask: Callable[[], T]) -> T:
    """What `ask` returns, called again while the hub is at fault."""
    from huggingface_hub import constants

    return retry_until_back(
        ask,
        service="the Hugging Face hub",
        is_absent=lambda error: not constants.HF_HUB_OFFLINE and unreachable(error),
        log=log.warning,
        deadline_s=DEADLINE_S,
    )
