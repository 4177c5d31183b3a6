"""Rows of a data set on the Hugging Face hub.

Guarantees: a hub that cannot be reached, or does not hold what was asked, is a UsageError that says how to go on from a file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kernels_eval.errors import UsageError


def is_hub_id(location: object) -> bool:
    """True for `owner/name`: a path written with a leading `.`, `/` or `~` never is one."""
    return isinstance(location, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", location) is not None


def load_rows(hub_id: str, split: str, revision: str | None, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of a split at a commit (the newest where None), those columns only. Raises UsageError where the hub does not give them."""
    import datasets

    try:
        return datasets.load_dataset(hub_id, split=split, revision=revision).select_columns(list(columns)).to_list()
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"cannot load {hub_id} (split {split}, revision {revision or 'newest'}) from the hub: {cause}",
            "check the id and the network, or download its Parquet file and give the path as tasks.location",
        ) from error
