"""Results of an ablation: comparison, table, page, and cautions for the reader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kernels_eval.errors import EvalError
from kernels_eval.grouping import grouped
from kernels_eval.records import Json
from tasks.benchmark.comparison.records import Ablation, Branch
from tasks.reporting.text import printable, shortened

ERROR_LENGTH = 300


def cautions_of(branches: Sequence[Branch]) -> tuple[str, ...]:
    failed = [branch.name for branch in branches if branch.state == "failed"]
    found = []
    if failed:
        names = ", ".join(failed)
        found.append(
            f"{len(failed)} of {len(branches)} branches failed ({names}): rerun the command to"
            " retry them"
        )
    return (*found, *_unequal([branch for branch in branches if branch.state == "done"]))


def _unequal(done: Sequence[Branch]) -> Iterator[str]:
    for (_, seed), compared in grouped(((each.size, each.seed), each) for each in done).items():
        if len({branch.rows for branch in compared}) > 1:
            rows = ", ".join(f"{branch.strategy} {branch.rows}" for branch in compared)
            yield (
                f"training sets of seed {seed} differ in rows ({rows}): no more samples fit the"
                " smaller ones"
            )


def results_of(ablation: Ablation, directory: Path) -> tuple[list[Json], list[Path]]:
    """Compare finished branches. Returns the table of strategies, and the comparison's files."""
    from tasks.benchmark.comparison.numbers import compared
    from tasks.benchmark.comparison.page import write_comparison

    if not any(branch.state == "done" for branch in ablation.branches):
        return [], []
    found = compared(ablation)
    return list(found.strategies), write_comparison(found, directory)


def one_line(error: BaseException) -> str:
    text = str(error) if isinstance(error, EvalError) else f"{type(error).__name__}: {error}"
    line = next((part.strip() for part in text.splitlines() if part.strip()), type(error).__name__)
    return shortened(printable(line), ERROR_LENGTH)
