"""What a comparison supports: what won and how sure that is, and what to trust.

Guarantees: everything follows from the numbers; no strategy is called better where a corrected test
does not say so, and a difference that seeds overlap in is said to be one. Does not escape: strings
are raw.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from tasks.benchmark.comparing import ComparisonRow
from tasks.benchmark.comparison.numbers import EXEC, SIGNIFICANT, TRACK, Arm, Compared
from tasks.benchmark.report.caveats import EVIDENCE, FEW_TASKS
from tasks.reporting.text import clean, interval, p_value, plural

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
    """How sure the first place is, in one word.

    It is of the best against the baseline, or of the baseline against the next best.
    """
    if not found.arms:
        return "nothing"
    rows = [found.score(arm.name, EXEC) for arm in found.arms]
    if all(row is None or not row.value for row in rows):
        return "no_correct_kernel"
    row = _decisive(found)
    return judged(found, row) if row else "one_strategy"


def judged(found: Compared, row: ComparisonRow) -> Verdict:
    """A difference against both kinds of chance: which tasks, and which seeds of training."""
    if row.p_holm is None or row.p_holm >= SIGNIFICANT:
        return "not_distinguishable"
    # the best may stand as the baseline's row turned round: its test is the same one
    test = found.seed_test(row) or found.seed_test(turned(row))
    if test is None or test.p_holm is None:
        return "seed_spread_unknown"
    return "distinguishable" if test.p_holm < SIGNIFICANT else "within_seed_spread"


def headline(found: Compared) -> str:
    """What won, by how much, and whether that can be told from chance, in one sentence."""
    return clean(_headline(found), one_line=True)


def _headline(found: Compared) -> str:
    verdict, branches = verdict_of(found), found.ablation.branches
    if verdict == "nothing":
        failed = sum(branch.state == "failed" for branch in branches)
        left = len(branches) - failed
        return f"No branch finished ({failed} failed, {left} left out): nothing to compare."
    best = found.arms[0]
    if verdict == "no_correct_kernel":
        several = len(found.arms) > 1
        whose = f"any of {len(found.arms)} strategies" if several else best.name
        return f"No correct kernel from {whose} on {plural(found.tasks, 'task')}."
    score = found.score(best.name, EXEC)
    assert score is not None  # an ablation with a correct kernel has scores
    value = interval(score.value, score.lower, score.upper, ".1%")
    said = f"{best.name} has the highest Exec@1 on {plural(score.tasks, 'task')}: {value}"
    row = _decisive(found)
    if row is None:
        return f"{said}; no other strategy finished."
    baseline = found.difference(best.name) is not None
    role = "the baseline " if baseline else "the next best, "
    points = interval(row.difference, row.lower, row.upper, "+.1p")
    return (
        f"{said}; {points} points against {role}{row.baseline}, corrected p"
        f" {p_value(row.p_holm) or 'not known'}: {READS[verdict]}."
    )


def _decisive(found: Compared) -> ComparisonRow | None:
    """The best arm minus the one it is measured against.

    That is its baseline; where the best is the baseline, the best of the others.
    """
    best = found.arms[0]
    row = found.difference(best.name)
    if row is not None:
        return row
    others = (found.difference(arm.name) for arm in found.arms[1:])
    return next((turned(row) for row in others if row and row.baseline == best.name), None)


def turned(row: ComparisonRow) -> ComparisonRow:
    """The same difference seen from the other side."""
    change: dict[str, object] = {
        "model": row.baseline,
        "baseline": row.model,
        "difference": -row.difference,
    }
    if row.lower is not None and row.upper is not None:
        change |= {"lower": -row.upper, "upper": -row.lower}
    return row.model_copy(update=change)


def trust(found: Compared) -> Iterator[str]:
    """What to trust and what not, from the numbers; the ablation's own cautions last."""
    if found.arms:
        cautions = (*_about_data(found), *_about_seeds(found), *_about_method(found))
        yield from (text for holds, text in cautions if holds)
    lost = [branch for branch in found.ablation.branches if branch.state != "done"]
    if lost and found.arms:
        yield (
            f"{len(lost)} of {len(found.ablation.branches)} branches did not finish and are in no"
            " number: see below why."
        )
    yield from found.ablation.cautions


def _about_data(found: Compared) -> Iterator[tuple[object, str]]:
    least, most = found.samples
    samples = f"{least}" if least == most else f"{least} to {most}"
    yield (
        True,
        f"The scores rest on {plural(found.tasks, 'task')} with {samples} samples each from every"
        " seed.",
    )
    yield (
        found.tasks < FEW_TASKS,
        f"That is too few tasks to rank strategies: below {FEW_TASKS}, an interval is wider than"
        " most differences.",
    )
    yield (
        found.devices,
        f"All verdicts were measured on {', '.join(found.devices)}. Speedups on another device may"
        " order the strategies otherwise.",
    )
    yield (
        found.excluded,
        "Left out for every model, because the reference fails or is degenerate:"
        f" {', '.join(found.excluded)}.",
    )
    for row in found.scores:
        if (row.metric, row.track) == (EXEC, TRACK):
            yield (
                row.missing,
                f"{row.model} has no sample on {plural(row.missing, 'task')} that another model"
                " answered; differences are over shared tasks.",
            )
    scores = {arm.name: found.score(arm.name, EXEC, "any") for arm in found.arms}
    silent = [name for name, score in scores.items() if score and score.value == 0]
    yield (
        silent,
        f"Not one correct answer from: {', '.join(silent)}. The zero is measured, not missing.",
    )


def _about_seeds(found: Compared) -> Iterator[tuple[object, str]]:
    single = [arm.name for arm in found.arms if len(arm.branches) == 1]
    yield (
        single,
        f"One seed only: {', '.join(single)}. What another training run of the same recipe would"
        " give is unknown.",
    )
    spreads = {arm.name: _spread(found.by_seed(arm.name, EXEC)) for arm in found.arms}
    widest: Arm = max(found.arms, key=lambda arm: spreads[arm.name])
    yield (
        len(widest.branches) > 1,
        f"Seeds of one strategy differ by up to {100 * spreads[widest.name]:.1f} points of Exec@1"
        f" ({widest.name}). No interval here holds this: they pool seeds and draw tasks. The p of"
        " seeds asks whether that spread alone could make a difference; with few seeds it rarely"
        " says no.",
    )


def _about_method(found: Compared) -> Iterator[tuple[object, str]]:
    yield (
        len(found.arms) > 2,
        "The best of several was chosen by looking at the scores, so its lead is on the high side."
        " p values are corrected for all comparisons of a track (Holm), intervals are not."
        " Strategies are compared with the baseline, not with one another.",
    )
    rows = [arm.rows for arm in found.arms if arm.rows]
    yield (
        rows and max(rows) > 1.1 * min(rows),
        "Strategies were trained on different numbers of rows, which is another explanation of a"
        " difference.",
    )
    yield (
        any(arm.loss("loss_last") for arm in found.arms),
        "Training losses are of other data for every strategy and do not compare; nor do losses on"
        " tasks held out of different sets.",
    )
    wanted = found.ablation.baseline or "random"
    if found.baseline and (strategy := found.arm(found.baseline).strategy) != wanted:
        yield (
            True,
            f"There is no finished branch of {wanted}: {strategy} is the baseline in its place.",
        )
    for row in found.differences:
        if (row.metric, row.track) == (EXEC, TRACK):
            yield (
                found.arm(row.model).size != found.arm(row.baseline).size,
                f"{row.model} is compared with {row.baseline}, which has another size: no branch of"
                " that size finished.",
            )
    yield True, f"{EVIDENCE} cheats found nothing: evidence, not proof."


def _spread(values: tuple[float, ...]) -> float:
    return max(values) - min(values) if values else 0.0
