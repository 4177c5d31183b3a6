"""Results of an ablation: comparison, table, page, and cautions for the reader."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kernels_eval.errors import EvalError
from kernels_eval.records import Json
from tasks.benchmark.comparison.records import Ablation, Branch

ERROR_LENGTH = 300


class Results(NamedTuple):
    """The table of strategies, the comparison's files, and cautions for what could not be made."""

    strategies: list[Json]
    files: list[Path]
    cautions: tuple[str, ...]


def cautions_of(branches: Sequence[Branch]) -> tuple[str, ...]:
    failed = [branch.name for branch in branches if branch.state == "failed"]
    if not failed:
        return ()
    names = ", ".join(failed)
    return (
        f"{len(failed)} of {len(branches)} branches failed ({names}): rerun the command to retry"
        " them",
    )


def results_of(ablation: Ablation, directory: Path) -> Results:
    """Compare finished branches and write the comparison. Failures become cautions, so that
    finished branches are not lost."""
    if not any(branch.state == "done" for branch in ablation.branches):
        return Results([], [], ())
    from tasks.benchmark.comparison.numbers import compared
    from tasks.benchmark.comparison.page import write_comparison

    rows: list[Json] = []
    try:
        found = compared(ablation)
        rows = list(found.strategies)
        return Results(rows, write_comparison(found, directory), ())
    except Exception as error:
        return Results(rows, [], (f"the comparison is missing: {one_line(error)}",))


def one_line(error: BaseException) -> str:
    text = str(error) if isinstance(error, EvalError) else f"{type(error).__name__}: {error}"
    line = next((part.strip() for part in text.splitlines() if part.strip()), type(error).__name__)
    return "".join(c if c.isprintable() else " " for c in line)[:ERROR_LENGTH]
