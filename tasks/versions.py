"""Versions of the stages' logic, part of a snapshot's identity.

Raise a constant when the same inputs may give other rows; a nightly refresh then does that stage
again. Docstrings, pages and error messages do not count. `versions.toml` names the code of each
constant (LOGIC) and the constants of each stage (STAGES); `tests/support/protocol_lock.py` keeps
its hashes. `kernels_eval.versions.PROTOCOL_VERSION` is the verifier's.
"""

from __future__ import annotations

from kernels_eval.tables import table_beside

SOURCES_VERSION = 1
"""Conversion of foreign tasks. In no key: a tasks snapshot is its content."""
SYNTHESIS_VERSION = 2
"""Requests made of tasks, and what is kept of answers."""
PARSER_VERSION = 2
"""Division of an answer into reasoning, text and code. Raw answers do not depend on it."""
CANDIDATE_TABLE_VERSION = 3
"""Reading of candidate tables from elsewhere."""
DECONTAMINATION_VERSION = 4
WORKLOAD_VERSION = 4
"""Work and traffic of a task's reference."""
PROFILE_VERSION = 1
"""Operator times of a task's reference."""
KERNEL_PROFILE_VERSION = 2
"""Limits of a correct kernel, with their numbers."""
TRACE_FLAG_VERSION = 1
"""Flaws of a reasoning trace."""
CURATION_VERSION = 3
ANALYSIS_VERSION = 4
SEARCH_VERSION = 3
"""Proposed candidates, and confirmation of a winner."""
TRAINING_VERSION = 5
SCORING_VERSION = 3
"""Numbers that the benchmark makes of verdicts."""
REPORT_VERSION = 9
"""Content of a run's report."""
VIEWER_VERSION = 2
"""Content of the viewer of candidates."""
PUBLISHING_VERSION = 5
"""Content of a published data set."""

_TOLD: dict[str, dict[str, list[str]]] = table_beside(__file__)
LOGIC, STAGES = _TOLD["logic"], _TOLD["stages"]


def modules_of(stage: str) -> tuple[str, ...]:
    """Modules whose logic a stage's manifest records; none for foreign stages."""
    return tuple(name for constant in STAGES.get(stage, ()) for name in LOGIC[constant])
