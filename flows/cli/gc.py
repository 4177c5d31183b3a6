"""`concur gc`: list the snapshots that nothing refers to, and remove them on request."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from flows.cli.common import command, emit


@command
def gc(
    refreshes: int, younger_than_days: float, unfinished_days: float, as_json: bool, **options: Any
) -> None:
    """List the snapshots that nothing refers to; with --delete, remove them.

    What a finished run, a registered model or a published folder refers to is kept, with everything
    it was made from.
    """
    from flows.ops.gc import collect
    from flows.ops.gc_plan import Keep

    keep = Keep(
        refreshes=refreshes, younger_than_days=younger_than_days, unfinished_days=unfinished_days
    )
    data = collect(keep=keep, **options)
    emit(data, as_json, "gc", groups=grouped(data))


def grouped(data: dict[str, Any]) -> list[tuple[str, str, str, int, int]]:
    """Verb, stage, reason, number and bytes of what stays and goes, what goes first."""
    went = "gone" if data["deleted"] else "would go"
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for one in data["snapshots"]:
        needed = one["reason"].endswith(" needs it")
        reason = "needed by another snapshot that stays" if needed else one["reason"]
        groups["stays" if one["stays"] else went, one["stage"], reason].append(one["bytes"])
    for one in data["others"]:
        stage = Path(one["path"]).parent.name if "log" in one["reason"] else "training"
        groups[went, stage, one["reason"]].append(one["bytes"])
    if data["trash_bytes"]:
        groups[went, ".gc-trash", "left by a gc that was interrupted"].append(data["trash_bytes"])
    order = sorted(groups.items(), key=lambda item: (item[0][0] != went, item[0]))
    return [(*group, len(sizes), sum(sizes)) for group, sizes in order]
