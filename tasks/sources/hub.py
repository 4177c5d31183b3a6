"""Rows of Hugging Face data sets, and local copies of them.

A load is of one commit; `$CONCUR_CACHE/hub` keeps each split's last few. An unreachable hub is
retried for seconds, then the newest copy is used with a caution.
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
    """Whether this is `owner/name`, not a path that begins with `.`, `/` or `~`."""
    return isinstance(location, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", location) is not None


def load_rows(hub_id: str, split: str, revision: str | None, columns: Sequence[str]) -> Rows:
    """A split's rows and named columns (none: all) at a commit (None: newest). Raises UsageError
    where neither hub nor disk has them."""
    return _Wanted(hub_id, split, revision, tuple(columns)).rows()


@dataclass(frozen=True)
class _Wanted:
    """Columns of a data set's split at a branch or commit (None: main)."""

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
        """A copy of the commit, or a branch's newest, with a caution, where the hub is unreachable;
        else None."""
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
    """Whether the network or the hub failed, not the request. Looks at causes: `datasets` wraps
    them."""
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
    from huggingface_hub import HfApi

    return HfApi().dataset_info(hub_id, revision=revision, timeout=10).sha


def _patiently(ask: Callable[[], T]) -> T:
    from huggingface_hub import constants

    return retry_until_back(
        ask,
        service="the Hugging Face hub",
        is_absent=lambda error: not constants.HF_HUB_OFFLINE and unreachable(error),
        log=log.warning,
        deadline_s=DEADLINE_S,
    )
