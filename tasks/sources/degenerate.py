"""KernelBench tasks that cannot tell a right kernel from a wrong one, each with the page under
benchmarks/results that measured it. For verdicts of other harnesses: the verifier finds such tasks
itself."""

from __future__ import annotations

from kernels_eval.tables import table_beside

_TABLES = table_beside(__file__)


def degenerate_tasks() -> dict[str, str]:
    """task_id -> why the verifier answers `task_error/degenerate_task`, and where that was
    measured."""
    return dict(_TABLES["degenerate"])
