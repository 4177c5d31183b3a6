"""Rows of a data set on the Hugging Face hub.

Guarantees: what is loaded is of one commit, and a copy of it is kept (tasks.sources.pinned); a hub
that cannot be reached is asked again a few times, then the newest copy is used and a caution says
so (tasks.progress); a hub that cannot be reached where there is no copy, or does not hold what was
asked, is one UsageError that says how to go on from a file. A hub that answers that something is
not there is believed: no copy stands in for it.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from kernels_eval.errors import UsageError
from tasks.progress import caution
from tasks.sources import pinned

ATTEMPTS = 3
BACKOFF_S = 2.0
"""Before the second attempt; doubles, with jitter."""
log = logging.getLogger(__name__)


def is_hub_id(location: object) -> bool:
    """True for `owner/name`: a path written with a leading `.`, `/` or `~` never is one."""
    return isinstance(location, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", location) is not None


def load_rows(
    hub_id: str, split: str, revision: str | None, columns: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows of a split at a commit (the newest where None), those columns only. Raises UsageError
    where neither hub nor disk has them."""
    import datasets

    commit, fault = _commit(hub_id, revision)
    if fault is not None and (rows := _copy(hub_id, split, revision, columns, fault)) is not None:
        return rows
    try:
        rows = _patiently(
            lambda: (
                datasets.load_dataset(hub_id, split=split, revision=commit or revision)
                .select_columns(list(columns))
                .to_list()
            )
        )
    except Exception as error:
        if not (
            unreachable(error)
            or isinstance(error, OSError | ValueError | datasets.exceptions.DatasetsError)
        ):
            raise
        if (
            unreachable(error)
            and (rows := _copy(hub_id, split, revision, columns, error)) is not None
        ):
            return rows
        raise UsageError(
            f"cannot load {hub_id} (split {split}, revision {revision or 'newest'}) from the hub:"
            f" {_line(error)}",
            "check the id and the network (this disk has no copy), or download its Parquet file and"
            " give the path as tasks.location",
        ) from error
    if commit is not None:
        pinned.keep(hub_id, split, commit, columns, rows)
    else:
        caution(
            f"The hub did not tell the commit of {hub_id} (split {split}, revision"
            f" {revision or 'newest'}): no copy of it was pinned."
        )
    return rows


def _copy(
    hub_id: str, split: str, revision: str | None, columns: Sequence[str], fault: Exception
) -> list[dict[str, Any]] | None:
    """The copy of this disk, with a caution that it is one; None where there is none."""
    found = pinned.find(hub_id, split, revision, columns)
    if found is None:
        return None
    pin, rows = found
    caution(
        f"The hub could not be reached ({_line(fault)}): the tasks are those of the copy on this"
        f" disk of {hub_id}, split {split}, commit {pin.commit}, fetched {pin.fetched_at},"
        f" {pin.rows} rows."
    )
    return rows


def _commit(hub_id: str, revision: str | None) -> tuple[str | None, Exception | None]:
    """The commit that is meant, or what kept the hub from telling it. A hub that is asked for
    nonsense says so when the rows are."""
    if pinned.is_commit(revision):
        return revision, None
    try:
        return _patiently(lambda: _commit_of(hub_id, revision)), None
    except Exception as error:  # httpx's and the hub client's own
        return None, error if unreachable(error) else None


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def unreachable(error: BaseException) -> bool:
    """Is it the network or the hub itself, and not what was asked of it? Looks at the causes too:
    `datasets` wraps them."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(
            seen, ConnectionError | TimeoutError | LocalEntryNotFoundError
        ) or _is_of_transport(seen):
            return True
        if isinstance(seen, HfHubHTTPError):
            status = seen.response.status_code if seen.response is not None else 0
            return status >= 500 or status == 429
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def _is_of_transport(error: BaseException) -> bool:
    """httpx's TransportError, or that of httpx2, which newer clients of the hub use: neither is an
    OSError."""
    return any(
        kind.__name__ == "TransportError" and kind.__module__.startswith("httpx")
        for kind in type(error).__mro__
    )


def _commit_of(hub_id: str, revision: str | None) -> str | None:
    """The commit that a branch (the main one where None) is at. Raises as the hub's client does."""
    from huggingface_hub import HfApi

    return HfApi().dataset_info(hub_id, revision=revision, timeout=10).sha


def _patiently(ask: Callable[[], Any]) -> Any:
    """The answer, asked for again where the hub is at fault; pauses double, with jitter. Raises
    what the last attempt raised."""
    from huggingface_hub import constants

    for attempt in range(1, ATTEMPTS + 1):
        try:
            return ask()
        except Exception as error:
            if attempt == ATTEMPTS or constants.HF_HUB_OFFLINE or not unreachable(error):
                raise
            pause_s = BACKOFF_S * 2 ** (attempt - 1) * random.uniform(0.75, 1.25)
            log.warning(
                "the hub does not answer (%s); asked again in %.0f s", type(error).__name__, pause_s
            )
            time.sleep(pause_s)
    raise AssertionError("unreachable")
