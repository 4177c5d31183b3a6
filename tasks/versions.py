"""Versions of the stages' logic, part of a snapshot's identity.

Raise a constant when the same inputs may give other rows. `versions.toml` names each constant's
code (LOGIC) and each stage's constants (STAGES); `tests/support/protocol_lock.py` keeps hashes.
"""

from __future__ import annotations

from kernels_eval.tables import table_beside

SOURCES_VERSION = 4
"""Conversion of foreign tasks. In no key: a tasks snapshot is its content."""
SYNTHESIS_VERSION = 3
"""Requests made of tasks, and what is kept of answers."""
PARSER_VERSION = 4
"""Division of an answer into reasoning, text and code. Raw answers do not depend on it."""
CANDIDATE_TABLE_VERSION = 5
DECONTAMINATION_VERSION = 5
WORKLOAD_VERSION = 4
PROFILE_VERSION = 1
KERNEL_PROFILE_VERSION = 2
TRACE_FLAG_VERSION = 2
CURATION_VERSION = 4
ANALYSIS_VERSION = 7
SEARCH_VERSION = 4
TRAINING_VERSION = 8
SCORING_VERSION = 6
REPORT_VERSION = 19
VIEWER_VERSION = 9
PUBLISHING_VERSION = 9

_TOLD: dict[str, dict[str, list[str]]] = table_beside(__file__)
LOGIC, STAGES = _TOLD["logic"], _TOLD["stages"]


def modules_of(stage: str) -> tuple[str, ...]:
    """Modules whose logic a stage's manifest records; none for foreign stages."""
    return tuple(name for constant in STAGES.get(stage, ()) for name in LOGIC[constant])
