"""KernelBench tasks that cannot tell a right kernel from a wrong one: a named list, each with what
was seen and where it was measured.

Guarantees: every entry was measured by this project's verifier on a device (`python -m
benchmarks.degenerate_tasks`); its evidence names the page under benchmarks/results that holds the
measurement. Does not guarantee that the list is whole: levels 1 to 3 were looked at but for L1/95,
L2/99 and L2/100, level 4 was not. The verifier finds such tasks by itself
(`task_error/degenerate_task`); the list is for scores of verdicts that other harnesses gave, and
for scoring with and without the same tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_PAGE = "benchmarks/results/2026-11-21-degenerate-tasks-h200.md"
_EARLIER = "benchmarks/results/2026-11-21-recorded-verdicts-h200-x4.md"

DEGENERATE: Mapping[str, str] = MappingProxyType(
    {
        "kernelbench/L2/66": (
            f"random: dropout, so two runs of the reference on the same inputs differ ({_PAGE})"
        ),
        "kernelbench/L2/80": (
            f"constant: the reference's output is the same for all inputs, zero ({_PAGE})"
        ),
        "kernelbench/L2/83": (
            f"constant: the reference's output is the same for all inputs, zero ({_PAGE})"
        ),
        "kernelbench/L2/93": (
            "not repeatable: two runs of the reference on the same inputs differ by more than 0.1"
            f" % of its RMS, cause not known ({_PAGE})"
        ),
        "kernelbench/L3/35": (
            "random: the initial state is drawn in forward, so two runs of the reference differ"
            f" ({_PAGE})"
        ),
    }
)
"""No candidate can be judged on these: the verifier answers `task_error/degenerate_task`."""

WEAK: Mapping[str, str] = MappingProxyType(
    {
        "kernelbench/L2/9": (
            f"an output of zeros passes on the task's own weights, not on others ({_EARLIER})"
        ),
        "kernelbench/L2/23": (
            f"an output of zeros passes on the task's own weights, not on others ({_EARLIER})"
        ),
        "kernelbench/L2/36": f"the output does not depend on the first input ({_PAGE})",
        "kernelbench/L3/24": (
            f"an output of zeros passes on the task's own weights, not on others ({_PAGE})"
        ),
        "kernelbench/L3/28": f"the output does not depend on the first input ({_PAGE})",
    }
)
"""A harness that tries a task's own inputs and weights only can be fooled on these; the verifier
tries others and judges them."""


def degenerate_tasks() -> dict[str, str]:
    """task_id -> why no candidate can be judged on it, and where that was measured."""
    return dict(DEGENERATE)


def weak_tasks() -> dict[str, str]:
    """task_id -> what lets a wrong kernel pass there where only the task's own inputs and weights
    are tried."""
    return dict(WEAK)
