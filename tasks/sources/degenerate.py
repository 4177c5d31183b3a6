"""KernelBench tasks that cannot tell a right kernel from a wrong one: a named list, each with what
was seen and where it was measured.

Guarantees: every entry was measured by this project's verifier on a device; its evidence names
the page under benchmarks/results that holds the measurement. Does not guarantee that the list is
whole: levels 1 to 3 were looked at but for L1/95, L2/99 and L2/100, level 4 was not. The verifier
finds such tasks by itself (`task_error/degenerate_task`); the list is for scores of verdicts that
other harnesses gave, and for scoring with and without the same tasks.
"""

from __future__ import annotations

from kernels_eval.tables import table_beside

_TABLES = table_beside(__file__)


def degenerate_tasks() -> dict[str, str]:
    """task_id -> why no candidate can be judged on it (the verifier answers
    `task_error/degenerate_task`), and where that was measured."""
    return dict(_TABLES["degenerate"])
