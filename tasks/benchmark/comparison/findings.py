"""A comparison in sentences: what won and how sure that is, and what to trust.

Guarantees: every sentence follows from the numbers; no strategy is called better where a corrected
test does not say so, and a difference that seeds overlap in is said to be one. Does not escape:
strings are raw.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from tasks.benchmark.comparing import ComparisonRow
from tasks.benchmark.comparison.numbers import EXEC, SIGNIFICANT, Arm, Compared
from tasks.benchmark.report.caveats import FEW_TASKS
from tasks.benchmark.report.summary import p_value
from tasks.reporting.text import clean, plural

Verdict = Literal[
    "nothing",
    "one_strategy",
    "no_correct_kernel",
    "not_distinguishable",
    "seed_spread_unknown",
    "within_seed_spread",
    "distinguishable",
]

READS: dict[Verdict, str] = {
    "distinguishable": "more than chance",
    "within_seed_spread": "within what seeds can make",
    "seed_spread_unknown": "more than chance between tasks, seeds unknown",
    "not_distinguishable": "not distinguishable from chance",
}


def verdict_of(found: Compared) -> Verdict:
    """How sure the first place is, in one word: of the best against the baseline, or the baseline
    against the next best."""
    if not found.arms:
        return "nothing"
    if _none_correct(found):
        return "no_correct_kernel"
    _, other, row = _decisive(found)
    if other is None or row is None:
        return "one_strategy"
    return judged(found, row)


def judged(found: Compared, row: ComparisonRow) -> Verdict:
    """A difference against both kinds of chance: which tasks there are, and which seeds were
    trained with."""
    if row.p_holm is None or row.p_holm >= SIGNIFICANT:
        return "not_distinguishable"
    # the best may stand as the baseline's row turned round: its test is the same one
    test = found.seed_test(row) or found.seed_test(turned(row))
    if test is None or test.p_holm is None:
        return "seed_spread_unknown"
    return "distinguishable" if test.p_holm < SIGNIFICANT else "within_seed_spread"


def headline(found: Compared) -> str:
    """What won, by how much, and whether that can be told from chance, in one or two sentences."""
    return clean(_headline(found), one_line=True)


def _headline(found: Compared) -> str:
    verdict, ablation = verdict_of(found), found.ablation
    if verdict == "nothing":
        failed = sum(branch.state == "failed" for branch in ablation.branches)
        return (
            f"No branch finished ({failed} failed, {len(ablation.branches) - failed} left out):"
            " there is nothing to compare."
        )
    if verdict == "no_correct_kernel":
        of = (
            f"from any of {len(found.arms)} strategies"
            if len(found.arms) > 1
            else f"from {found.arms[0].name}"
        )
        return (
            f"Not one correct kernel {of} on {plural(found.tasks, 'task')}: nothing can be told"
            " apart."
        )
    best, other, row = _decisive(found)
    score = found.score(best.name, EXEC)
    assert (
        score is not None and score.value is not None
    )  # an ablation with a correct kernel has scores
    bounds = (
        ""
        if score.lower is None or score.upper is None
        else f" ({_percent(score.lower)} to {_percent(score.upper)})"
    )
    said = (
        f"{best.name} has the highest Exec@1 on {plural(score.tasks, 'task')}:"
        f" {_percent(score.value)} %{bounds}"
    )
    if other is None or row is None:
        return (
            f"{said}. No other strategy finished, so there is nothing to compare it"
            f" with.{_base_too(found, best)}"
        )
    known = (
        ""
        if row.lower is None or row.upper is None
        else f" ({_points(row.lower)} to {_points(row.upper)})"
    )
    role = (
        "the baseline "
        if other.name == row.baseline and _is_baseline(found, other)
        else "the next best, "
    )
    said += (
        f", {_points(row.difference)} points against {role}{other.name}{known}, corrected p"
        f" {_equals(row.p_holm)}"
    )
    return f"{said}. {_judged(found, verdict, best, other)}{_base_too(found, best)}"


def _judged(found: Compared, verdict: Verdict, best: Arm, other: Arm) -> str:
    ours, theirs = (_range(found.by_seed(arm.name, EXEC)) for arm in (best, other))
    chance = "That is more than chance between these tasks"
    match verdict:
        case "not_distinguishable":
            return "That is not distinguishable from chance on these tasks."
        case "seed_spread_unknown":
            return (
                f"{chance}, but without a spread between seeds nothing says whether training again"
                " repeats it."
            )
        case "within_seed_spread":
            return (
                f"{chance}, but within what seeds alone can make ({ours} against {theirs}): it may"
                " be the seeds' doing."
            )
        case _:
            return f"{chance} and between seeds ({ours} against {theirs})."


def _base_too(found: Compared, best: Arm) -> str:
    row = next(
        (
            row
            for row in found.against_base
            if (row.model, row.metric, row.track) == (best.name, EXEC, "custom_kernel")
        ),
        None,
    )
    if row is None:
        return ""
    known = (
        ""
        if row.lower is None or row.upper is None
        else f" ({_points(row.lower)} to {_points(row.upper)})"
    )
    return (
        f" Against the untuned model: {_points(row.difference)} points{known},"
        f" {READS[judged(found, row)]}."
    )


def _decisive(found: Compared) -> tuple[Arm, Arm | None, ComparisonRow | None]:
    """The best arm, whom it is measured against, and the difference best minus other.

    The best against its baseline; where the best is the baseline, it against the best of the
    others.
    """
    best = found.arms[0]
    row = found.difference(best.name)
    if row is not None:
        return best, found.arm(row.baseline), row
    for other in found.arms[1:]:
        row = found.difference(other.name)
        if row is not None and row.baseline == best.name:
            return best, other, turned(row)
    return best, None, None


def turned(row: ComparisonRow) -> ComparisonRow:
    """The same difference seen from the other side."""
    lower, upper = (
        (None, None) if row.lower is None or row.upper is None else (-row.upper, -row.lower)
    )
    change = {
        "model": row.baseline,
        "baseline": row.model,
        "difference": -row.difference,
        "lower": lower,
        "upper": upper,
    }
    return row.model_copy(update=change)


def trust(found: Compared) -> Iterable[str]:
    """What to trust and what not, from the numbers; the ablation's own cautions last."""
    if found.arms:
        yield from _about_data(found)
        yield from _about_seeds(found)
        yield from _about_method(found)
    yield from _about_branches(found)
    yield from found.ablation.cautions


def _about_data(found: Compared) -> Iterator[str]:
    least, most = found.samples
    samples = f"{least}" if least == most else f"{least} to {most}"
    yield (
        f"The scores rest on {plural(found.tasks, 'task')} with {samples} samples each from every"
        " seed."
    )
    if found.tasks < FEW_TASKS:
        yield (
            f"That is too few tasks to rank strategies: below {FEW_TASKS}, an interval is wider"
            " than most differences."
        )
    if found.devices:
        yield (
            f"All verdicts were measured on {', '.join(found.devices)}. Speedups on another device"
            " may order the strategies otherwise."
        )
    if found.excluded:
        yield (
            "Left out for everybody, because the reference fails or is degenerate:"
            f" {', '.join(found.excluded)}."
        )
    for row in (
        row
        for row in found.scores
        if row.metric == EXEC and row.track == "custom_kernel" and row.missing
    ):
        yield (
            f"{row.model} has no sample on {plural(row.missing, 'task')} that another model"
            " answered; differences are over shared tasks."
        )
    silent = [
        arm.name
        for arm in found.arms
        if (row := found.score(arm.name, EXEC, "any")) and row.value == 0
    ]
    if silent:
        yield (
            f"Not one correct answer from: {', '.join(silent)}. The zero is measured, not missing."
        )


def _about_seeds(found: Compared) -> Iterator[str]:
    single = [arm.name for arm in found.arms if len(arm.branches) == 1]
    if single:
        yield (
            f"One seed only: {', '.join(single)}. What another training run of the same recipe"
            " would give is unknown."
        )
    widest = max(found.arms, key=lambda arm: _spread(found.by_seed(arm.name, EXEC)))
    if len(widest.branches) > 1:
        apart = _percent(_spread(found.by_seed(widest.name, EXEC)))
        yield (
            f"Seeds of one strategy differ by up to {apart} points of Exec@1 ({widest.name}). No"
            " interval here holds this: they pool seeds and draw tasks. The p of seeds asks"
            " whether that spread alone could make a difference; with few seeds it rarely says no."
        )


def _about_method(found: Compared) -> Iterator[str]:
    if len(found.arms) > 2:
        yield (
            "The best of several was chosen by looking at the scores, so its lead is on the high"
            " side. p values are corrected for all comparisons of a track (Holm), intervals are"
            " not. Strategies are compared with the baseline, not with one another."
        )
    rows = {arm.name: arm.rows for arm in found.arms if arm.rows}
    if rows and max(rows.values()) > 1.1 * min(rows.values()):
        yield (
            "Strategies were trained on different numbers of rows, which is another explanation of"
            " a difference."
        )
    if any(arm.loss("loss_last") for arm in found.arms):
        yield (
            "Training losses are of other data for every strategy and do not compare; nor do losses"
            " on tasks held out of different sets."
        )
    wanted = found.ablation.baseline or "random"
    if found.baseline and found.arm(found.baseline).strategy != wanted:
        yield (
            f"There is no finished branch of {wanted}: {found.arm(found.baseline).strategy} is the"
            " baseline in its place."
        )
    for row in (
        row for row in found.differences if row.metric == EXEC and row.track == "custom_kernel"
    ):
        if found.arm(row.model).size != found.arm(row.baseline).size:
            yield (
                f"{row.model} is compared with {row.baseline}, which has another size: no branch of"
                " that size finished."
            )
    yield (
        "'correct' means that outputs matched on all inputs tried and that checks for known cheats"
        " found nothing: evidence, not proof."
    )


def _about_branches(found: Compared) -> Iterator[str]:
    lost = [branch for branch in found.ablation.branches if branch.state != "done"]
    if lost and found.arms:
        yield (
            f"{len(lost)} of {len(found.ablation.branches)} branches did not finish and are in no"
            " number: see below why."
        )


def _is_baseline(found: Compared, arm: Arm) -> bool:
    return bool(found.baseline) and arm.strategy == found.arm(found.baseline or "").strategy


def _none_correct(found: Compared) -> bool:
    rows = [found.score(arm.name, EXEC) for arm in found.arms]
    return all(row is None or not row.value for row in rows)


def _spread(values: tuple[float, ...]) -> float:
    return max(values) - min(values) if values else 0.0


def _range(values: tuple[float, ...]) -> str:
    return f"{_percent(min(values))} to {_percent(max(values))} %"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


def _equals(p: float | None) -> str:
    return p_value(p) or "not known"
