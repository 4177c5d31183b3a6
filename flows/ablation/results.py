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
from kernels_eval.records import Json
from tasks.benchmark.comparing import compare_all
from tasks.benchmark.comparison.records import Ablation, Branch
from tasks.benchmark.scoring import score
from tasks.benchmark.stage import answers_frame

ERROR_LENGTH = 300


def strategy_rows(branches: Sequence[Branch], resamples: int) -> list[Json]:
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
    scores = {
        (row.model, row.metric): row
        for row in score(frame, ks=(1,), ps=(1.0,), resamples=resamples)
        if row.track == CUSTOM_KERNEL
    }
    baseline = branches[0].strategy
    firsts = {each.size: label(each) for each in branches if each.strategy == baseline}
    pairs = [
        (firsts[members[0].size], name)
        for name, members in groups.items()
        if members[0].strategy != baseline and firsts.get(members[0].size) in groups
    ]
    compared = compare_all(frame, pairs=pairs, ks=(1,), ps=(), resamples=resamples) if pairs else []
    differences = {
        row.model: row for row in compared if (row.track, row.metric) == (CUSTOM_KERNEL, "exec")
    }
    rows: list[Json] = []
    for name, members in groups.items():
        row: Json = {
            "strategy": members[0].strategy,
            "size": members[0].size,
            "seeds": len(members),
            "rows": max(branch.rows or 0 for branch in members),
        }
        for metric in ("exec", "fast_1"):
            row |= bounded(f"{metric}_at_1", scores[name, metric], "value")
        row |= bounded("difference", differences.get(name), "difference")
        for column in ("p_holm", "baseline"):
            row[column] = getattr(differences.get(name), column, None)
        rows.append(row)
    return rows


def bounded(name: str, found: object, value: str) -> Json:
    """A number and its interval as three columns, null where there is none."""
    names = {name: value, f"{name}_lower": "lower", f"{name}_upper": "upper"}
    return {column: getattr(found, attribute, None) for column, attribute in names.items()}


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


def compared(
    ablation: Ablation, directory: Path, resamples: int
) -> tuple[list[Path], tuple[str, ...]]:
    """The comparison's files, or the caution that stands in their place: finished branches are not
    lost to a page that cannot be made."""
    if not any(branch.state == "done" for branch in ablation.branches):
        return [], ()
    from tasks.benchmark.comparison.page import write_comparison

    try:
        written = write_comparison(ablation, directory, resamples=resamples)
    except Exception as error:
        return [], (f"the comparison page is missing: {one_line(error)}",)
    return [written.html, written.markdown, written.json_file], ()


def one_line(error: BaseException) -> str:
    """What an error says, as one line without what a terminal would act on."""
    text = str(error) if isinstance(error, EvalError) else f"{type(error).__name__}: {error}"
    line = next((part.strip() for part in text.splitlines() if part.strip()), type(error).__name__)
    return "".join(c if c.isprintable() else " " for c in line)[:ERROR_LENGTH]
