"""Rows of Hugging Face data sets, by way of the hub client's own cache of files.

Guarantees: a load is of one commit, whole. Where the hub cannot be reached, a branch's newest copy
on this disk is used with a caution, never where the hub says that it does not exist.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from kernels_eval.errors import UsageError, cause_of
from kernels_eval.records import Json
from tasks.progress import caution
from tasks.retry import retry_until_back

DEADLINE_S = 6.0
"""How long an absent hub is asked again for a branch's commit."""
log = logging.getLogger(__name__)


def is_hub_id(location: object) -> bool:
    """Whether this is `owner/name`, not a path that begins with `.`, `/` or `~`."""
    return isinstance(location, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", location) is not None


def load_rows(hub_id: str, split: str, revision: str | None, columns: Sequence[str]) -> list[Json]:
    """A split's rows and named columns (none: all) at a branch or commit (None: main). Raises
    UsageError where neither hub nor disk has them."""
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    try:
        found = datasets.load_dataset(_downloaded(hub_id, revision), split=split)
    except Exception as error:
        known = (OSError, ValueError, HfHubHTTPError, datasets.exceptions.DatasetsError)
        if not unreachable(error) and not isinstance(error, known):
            raise
        raise UsageError(
            f"cannot load {hub_id} (split {split}, revision {revision or 'newest'}) from the hub:"
            f" {cause_of(error)[:300]}",
            "check the id (there is no local file of that name) and the network (there is no"
            " local copy), or download its Parquet file and give its path",
        ) from error
    return list((found.select_columns(list(columns)) if columns else found).to_list())


def _downloaded(hub_id: str, revision: str | None) -> str:
    """The folder of a data set's files. Of a branch the client silently takes the last one where
    the hub is away."""
    from huggingface_hub import HfApi, constants, snapshot_download

    fault: Exception | None = None
    if re.fullmatch("[0-9a-f]{40}", revision or "") is None:
        try:
            retry_until_back(
                lambda: HfApi().dataset_info(hub_id, revision=revision, timeout=10),
                service="the Hugging Face hub",
                is_absent=lambda error: not constants.HF_HUB_OFFLINE and unreachable(error),
                log=log.warning,
                deadline_s=DEADLINE_S,
            )
        except Exception as error:
            if not unreachable(error):
                raise
            fault = error
    folder: str = snapshot_download(hub_id, repo_type="dataset", revision=revision)
    if fault is not None:
        caution(
            f"The hub could not be reached ({cause_of(fault)[:300]}): the rows are those of the"
            f" copy on this disk of {hub_id}, commit {Path(folder).name}."
        )
    return folder


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
