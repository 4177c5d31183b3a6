"""What an ablation comes to: each strategy at each size over its seeds, how it differs from the
first strategy, the comparison page, and what a reader must know before the numbers.

Guarantees: differences are paired by task (tasks.benchmark.comparing) and their p values corrected
by Holm over the strategies. Seeds are pooled: samples of all seeds of a strategy count as samples
of one model, so the interval is over tasks and says nothing of how much seeds differ;
`comparison.html` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.config import PipelineConfig
from flows.track import CUSTOM_KERNEL
from kernels_eval.errors import EvalError
from tasks.benchmark.comparing import compare_all
from tasks.benchmark.comparison.records import Ablation, Branch
from tasks.benchmark.scoring import ScoreRow, score
from tasks.benchmark.stage import answers_frame

ERROR_LENGTH = 300


def strategy_rows(branches: Sequence[Branch], pipeline: PipelineConfig) -> list[dict[str, Any]]:
    """One row per strategy and size with a branch that is done, in the order of the branches:
    exec_at_1 and fast_1_at_1 with 95 % intervals, and the difference of exec_at_1 to the first
    strategy at the same size."""
    groups: dict[str, list[Branch]] = {}
    for branch in branches:
        if branch.answers:
            groups.setdefault(label(branch), []).append(branch)
    if not groups:
        return []
    pooled = [
        branch.answers.model_copy(update={"model": name})
        for name, members in groups.items()
        for branch in members
        if branch.answers
    ]
    frame, resamples = answers_frame(pooled), pipeline.benchmark.resamples
    scores = {
        (row.model, row.metric): row
        for row in score(frame, ks=(1,), ps=(1.0,), resamples=resamples)
        if row.track == CUSTOM_KERNEL
    }
    firsts = {
        branch.size: label(branch)
        for branch in reversed(branches)
        if branch.strategy == branches[0].strategy
    }
    pairs = [
        (first, name)
        for name, members in groups.items()
        if (first := firsts.get(members[0].size)) in groups and first is not None and first != name
    ]
    compared = compare_all(frame, pairs=pairs, ks=(1,), ps=(), resamples=resamples) if pairs else []
    differences = {
        row.model: row for row in compared if (row.track, row.metric) == (CUSTOM_KERNEL, "exec")
    }
    return [_row(name, members, scores, differences.get(name)) for name, members in groups.items()]


def label(branch: Branch) -> str:
    """A strategy at a size."""
    return branch.strategy if branch.size is None else f"{branch.strategy} {branch.size}"


def _row(
    name: str,
    members: Sequence[Branch],
    scores: Mapping[tuple[str, str], ScoreRow],
    difference: Any,
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "strategy": members[0].strategy,
        "size": members[0].size,
        "seeds": len(members),
        "rows": max(branch.rows or 0 for branch in members),
    }
    for metric in ("exec", "fast_1"):
        found, named = scores[name, metric], f"{metric}_at_1"
        row |= {named: found.value, f"{named}_lower": found.lower, f"{named}_upper": found.upper}
    return row | {
        column: getattr(difference, attribute, None)
        for column, attribute in (
            ("difference", "difference"),
            ("difference_lower", "lower"),
            ("difference_upper", "upper"),
            ("p_holm", "p_holm"),
            ("baseline", "baseline"),
        )
    }


def cautions_of(branches: Sequence[Branch]) -> tuple[str, ...]:
    """What a reader must know before the numbers."""
    failed = [branch.name for branch in branches if branch.state == "failed"]
    out = [branch.name for branch in branches if branch.state == "left_out"]
    said = []
    if failed:
        said.append(
            f"{len(failed)} of {len(branches)} branches failed ({', '.join(failed)}): rerun the"
            " command to retry them"
        )
    if out:
        said.append(
            f"{len(out)} of {len(branches)} branches are left out, for the budget: a larger"
            " --max-gpu-hours continues with them"
        )
    return tuple(said)


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
