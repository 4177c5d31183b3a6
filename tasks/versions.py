"""Versions of the stages' logic: what a snapshot's identity says of the code that made it.

Raise a constant when the same inputs may give other rows, and a nightly refresh does that stage
again. Editing a docstring, a page or an error message changes nothing. `versions.toml` names the
code that each constant stands for (LOGIC) and each stage's constants (STAGES);
`tests/support/protocol_lock.py` keeps its hashes and reminds whoever edits it.
`kernels_eval.versions.PROTOCOL_VERSION` is the verifier's.
"""

from __future__ import annotations

from kernels_eval.tables import table_beside

SOURCES_VERSION = 1
"""How tasks of other formats become ours. In no key: a tasks snapshot is its content."""
SYNTHESIS_VERSION = 2
"""Which requests are made of tasks, and what is kept of an answer."""
PARSER_VERSION = 2
"""How an answer is divided into reasoning, text and code. Raw answers do not depend on it."""
CANDIDATE_TABLE_VERSION = 3
"""How a table of candidates from elsewhere is read."""
DECONTAMINATION_VERSION = 4
WORKLOAD_VERSION = 4
"""What a task's reference computes and moves."""
PROFILE_VERSION = 1
"""Where a task's reference spends its time."""
KERNEL_PROFILE_VERSION = 2
"""What limits a correct kernel, and by which numbers."""
TRACE_FLAG_VERSION = 1
"""What is wrong with a trace of reasoning."""
CURATION_VERSION = 3
ANALYSIS_VERSION = 4
SEARCH_VERSION = 3
"""Which candidates are proposed, and what confirms a winner."""
TRAINING_VERSION = 5
SCORING_VERSION = 3
"""Which numbers the benchmark makes of verdicts."""
REPORT_VERSION = 9
"""What the report of a run shows."""
VIEWER_VERSION = 2
"""What the viewer of candidates shows."""
PUBLISHING_VERSION = 5
"""What a published data set holds."""

_TOLD: dict[str, dict[str, list[str]]] = table_beside(__file__)
LOGIC, STAGES = _TOLD["logic"], _TOLD["stages"]


def modules_of(stage: str) -> tuple[str, ...]:
    """The modules whose logic a stage's manifest records; none for a stage that is not ours."""
    return tuple(name for constant in STAGES.get(stage, ()) for name in LOGIC[constant])
