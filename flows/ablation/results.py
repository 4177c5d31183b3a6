"""What an ablation comes to: each strategy at each size over its seeds, how it differs from the
first strategy, the comparison page, and what a reader must know before the numbers.

Guarantees: differences are paired by task (tasks.benchmark.comparing) and their p values corrected
by Holm over the strategies. Seeds are pooled: samples of all seeds of a strategy count as samples
of one model, so the interval is over tasks and says nothing of how much seeds differ;
`comparison.html` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flows.track import CUSTOM_KERNEL
from kernels_eval.errors import EvalError
from kernels_eval.grouping import grouped
from kernels_eval.records import Json, Row
from tasks.benchmark.comparing import paired_differences
from tasks.benchmark.comparison.records import Ablation, Branch
from tasks.benchmark.stage import answers_frame
from tasks.scores import scores

ERROR_LENGTH = 300


def strategy_rows(branches: Sequence[Branch]) -> list[Json]:
    """One row per strategy and size with a branch that is done, in the order of the branches:
    exec_at_1 and fast_1_at_1 with 95 % intervals, and the difference of exec_at_1 to the first
    strategy at the same size."""
    groups = grouped((label(branch), branch) for branch in branches if branch.answers)
    if not groups:
        return []
    pooled = [
        branch.answers.model_copy(update={"model": name})
        for name, members in groups.items()
        for branch in members
        if branch.answers
    ]
    frame = answers_frame(pooled)
    own = scores(frame, resamples=0)
    found = own.rows_by_key(("model", "metric"), named=True, unique=True)
    baseline = branches[0].strategy
    firsts = {each.size: label(each) for each in branches if each.strategy == baseline}
    pairs = [
        (firsts[members[0].size], name)
        for name, members in groups.items()
        if members[0].strategy != baseline and firsts.get(members[0].size) in groups
    ]
    compared = paired_differences(frame, pairs=pairs, ps=()).filter(track=CUSTOM_KERNEL)
    differences = compared.rows_by_key("model", named=True, unique=True)
    rows: list[Json] = []
    for name, members in groups.items():
        row: Json = {
            "strategy": members[0].strategy,
            "size": members[0].size,
            "seeds": len(members),
            "rows": max(branch.rows or 0 for branch in members),
        }
        for metric in ("exec", "fast_1"):
            row |= bounded(f"{metric}_at_1", found[name, metric], "value")
        difference = differences.get(name, {})
        row |= bounded("difference", difference, "difference")
        for column in ("p_holm", "baseline"):
            row[column] = difference.get(column)
        rows.append(row)
    return rows


def bounded(name: str, found: Row, value: str) -> Json:
    """A number and its interval as three columns, null where there is none."""
    names = {name: value, f"{name}_lower": "lower", f"{name}_upper": "upper"}
    return {column: found.get(key) for column, key in names.items()}


def label(branch: Branch) -> str:
    """A strategy at a size."""
    return branch.strategy if branch.size is None else f"{branch.strategy} {branch.size}"


def cautions_of(branches: Sequence[Branch]) -> tuple[str, ...]:
    """What a reader must know before the numbers."""
    failed = [branch.name for branch in branches if branch.state == "failed"]
    if not failed:
        return ()
    names = ", ".join(failed)
    return (
        f"{len(failed)} of {len(branches)} branches failed ({names}): rerun the command to retry"
        " them",
    )


def compared(ablation: Ablation, directory: Path) -> tuple[list[Path], tuple[str, ...]]:
    """The comparison's files, or the caution that stands in their place: finished branches are not
    lost to a page that cannot be made."""
    if not any(branch.state == "done" for branch in ablation.branches):
        return [], ()
    from tasks.benchmark.comparison.page import write_comparison

    try:
        written = write_comparison(ablation, directory)
    except Exception as error:
        return [], (f"the comparison page is missing: {one_line(error)}",)
    return [written.html, written.markdown, written.json_file], ()


def one_line(error: BaseException) -> str:
    """What an error says, as one line without what a terminal would act on."""
    text = str(error) if isinstance(error, EvalError) else f"{type(error).__name__}: {error}"
    line = next((part.strip() for part in text.splitlines() if part.strip()), type(error).__name__)
    return "".join(c if c.isprintable() else " " for c in line)[:ERROR_LENGTH]
