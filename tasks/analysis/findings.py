"""What the observations support, in plain sentences made from their numbers by rules.

Guarantees: a direction is claimed only where a 95 % interval (and, within tasks, the permutation
test) excludes none; where it does not, the sentence says so; agreement with the paper is said as
plainly as disagreement. Does not guarantee that an effect matters: sizes and intervals are in the
sentences for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasks.analysis.estimates import Estimate

if TYPE_CHECKING:
    from tasks.analysis.observations import Bin, Observations, Population
    from tasks.analysis.within import WithinTask

NEGLIGIBLE = 0.1  # |correlation| under which length explains less than 1 % of the variance
ALPHA = 0.05
FEW_TASKS = 30


def finding(found: Observations) -> tuple[str, ...]:
    """The sentences, most important first."""
    return (
        *_within(found),
        *_pooled(found.everything),
        *_lengths(found.everything),
        *_speedup(found),
        *_paper(found),
    )


def cautions(found: Observations) -> tuple[str, ...]:
    """What bounds the finding: data left out, truncation, few tasks, samples of tasks."""
    said = []
    if found.left_out:
        said.append(
            f"Of {found.rows:,} rows left out: "
            + ", ".join(f"{n:,} {why}" for why, n in found.left_out.items())
            + "."
        )
    if found.truncated is None:
        said.append(
            "Nothing says which samples the token limit cut off: if there are any, they plant an"
            " effect of length."
        )
    elif found.truncated:
        said.append(
            f"The token limit cut off {found.truncated:,} of {found.samples:,} samples"
            f" ({found.truncated_correct} of them correct); such are long and mostly wrong because"
            " of the limit. What is claimed within tasks is said with and without them."
        )
    mixed = found.everything.within.tasks
    if mixed < FEW_TASKS:
        said.append(
            f"Only {mixed} of {found.tasks} tasks have both outcomes: within tasks these data can"
            " show large effects only."
        )
    if len(found.generators) > 1:
        said.append(
            f"Samples of {len(found.generators)} generators are pooled, whose tokens and skills"
            " differ: analyse each by itself."
        )
    said.append(
        "Association, not cause: a sample may be long because it struggles. Intervals of the bins"
        " treat samples as independent."
    )
    return tuple(said)


def verdict(found: Population) -> str:
    """Within tasks: "shorter", "longer" (is more often correct), "open" (the data do not tell), or
    "unsayable"."""
    return _verdict(found.within)


def _verdict(within: WithinTask) -> str:
    if within.permutation_p is None:
        return "unsayable"
    # a perfectly separated regression has no interval; the linear model then gives the direction
    sides = [
        side
        for side in (_side(within.odds_ratio, 1.0), _side(within.slope, 0.0))
        if side is not None
    ]
    if not sides or within.permutation_p >= ALPHA or len(set(sides)) != 1 or sides[0] == 0:
        return "open"
    return "shorter" if sides[0] < 0 else "longer"


def interval(estimate: Estimate, form: str = ".2f") -> str:
    """ "0.71, 95 % 0.60 to 0.84", or why there is none."""
    if estimate.value is None:
        return f"cannot be said: {estimate.why_not}"
    if estimate.lower is None or estimate.upper is None:
        return f"{estimate.value:{form}}, too few tasks for an interval"
    return f"{estimate.value:{form}}, 95 % {estimate.lower:{form}} to {estimate.upper:{form}}"


def p_value(p: float | None) -> str:
    return "p unknown" if p is None else "p < 0.001" if p < 0.001 else f"p {p:.3f}"


def _side(estimate: Estimate, none: float) -> int | None:
    if estimate.lower is None or estimate.upper is None:
        return None
    return -1 if estimate.upper < none else 1 if estimate.lower > none else 0


def _within(found: Observations) -> list[str]:
    said = [_within_one(found.everything.within, ""), *_past_the_turn(found.everything)]
    if found.complete is not None:
        said.append(
            _within_one(found.complete.within, " Without the samples that the token limit cut off:")
        )
        said += _past_the_turn(found.complete)
        if verdict(found.everything) in ("shorter", "longer") and verdict(found.complete) == "open":
            said.append(
                "So what is seen within tasks rests on samples that were cut off: without them the"
                " data do not tell."
            )
    return [sentence.strip() for sentence in said]


def _past_the_turn(population: Population) -> list[str]:
    if population.past_turn is None or population.past_turn_from is None:
        return []
    return [
        _within_one(
            population.past_turn,
            f" Of these, among samples from {population.past_turn_from:,.0f} tokens on, where"
            " accuracy turns:",
        )
        + " Where it turns was read from these data, so this part explores and does not test."
    ]


def _within_one(within: WithinTask, opening: str) -> str:
    if within.permutation_p is None or within.sd_tokens is None:
        return (
            f"{opening} Whether length matters within a task cannot be said:"
            f" {within.odds_ratio.why_not}."
        )
    facts = (
        f"odds ratio {interval(within.odds_ratio)}"
        if within.odds_ratio.value is not None
        else f"odds ratio: {interval(within.odds_ratio)}"
    )
    if within.slope.value is not None:
        facts += f"; share correct {100 * within.slope.value:+.1f} points"
        if within.slope.lower is not None and within.slope.upper is not None:
            facts += f", 95 % {100 * within.slope.lower:+.1f} to {100 * within.slope.upper:+.1f}"
    facts += (
        f"; permutation {p_value(within.permutation_p)}; {within.tasks:,} tasks with both outcomes,"
        f" {within.samples:,} samples"
    )
    who = (
        f"a sample one standard deviation ({within.sd_tokens:,.0f} tokens) longer than its task's"
        " mean"
    )
    said = _verdict(within)
    if said == "open":
        return (
            f"{opening} Within tasks the data do not tell whether length matters: for {who},"
            f" {facts}."
        )
    return (
        f"{opening} Within tasks, {who} is correct {'less' if said == 'shorter' else 'more'} often"
        f" ({facts})."
    )


def _pooled(population: Population) -> list[str]:
    if population.correct in (0, population.samples):
        return [
            f"Accuracy against length cannot be said: {population.correct:,} of"
            f" {population.samples:,} samples are correct."
        ]
    said = []
    if len(population.tenths) > 1:
        first, last = population.tenths[0], population.tenths[-1]
        said.append(
            f"Over all tasks, accuracy is {_share(first)} in the shortest tenth (under"
            f" {first.to_tokens:,.0f} tokens) and {_share(last)} in the longest (from"
            f" {last.from_tokens:,.0f})."
        )
    if (turn := bend(population.tenths)) is not None:
        said.append(
            f"Accuracy is not monotone in length: it is {'highest' if turn[0] > 0 else 'lowest'} in"
            f" between ({_share(turn[1])} from {turn[1].from_tokens:,.0f} to"
            f" {turn[1].to_tokens:,.0f} tokens), so one slope, here and within tasks, is not the"
            " whole story."
        )
    side, inner = _side(population.pooled, 1.0), verdict(population)
    if side and inner in ("shorter", "longer") and (side < 0) != (inner == "shorter"):
        said.append(
            "Over all tasks the association has the opposite sign (odds ratio"
            f" {interval(population.pooled)}): tasks differ in both length and difficulty, and only"
            " the comparison within tasks is free of that."
        )
    elif side and inner == "open":
        said.append(
            f"Over all tasks there is an association (odds ratio {interval(population.pooled)}),"
            " which differences between tasks may explain."
        )
    return said


def bend(tenths: Sequence[Bin]) -> tuple[int, Bin] | None:
    """(1, the peak) or (-1, the trough) where a tenth lies beyond the intervals of both a shorter
    and a longer one."""
    for sign in (1, -1):
        place = max(range(len(tenths)), key=lambda at: sign * tenths[at].accuracy, default=0)
        before, after = tenths[:place], tenths[place + 1 :]
        if not before or not after:
            continue
        extreme = tenths[place]
        if sign > 0 and extreme.lower > max(
            min(each.upper for each in side) for side in (before, after)
        ):
            return 1, extreme
        if sign < 0 and extreme.upper < min(
            max(each.lower for each in side) for side in (before, after)
        ):
            return -1, extreme
    return None


def _share(found: Bin) -> str:
    return (
        f"{100 * found.accuracy:.0f} % ({100 * found.lower:.0f} to {100 * found.upper:.0f}, n"
        f" {found.samples:,})"
    )


def _lengths(population: Population) -> list[str]:
    right, wrong = population.correct_lengths, population.incorrect_lengths
    if right is None or wrong is None:
        return []
    return [
        f"The median correct sample has {right.median:,.0f} tokens, the median incorrect one"
        f" {wrong.median:,.0f}; a random incorrect sample is longer than a random correct one with"
        f" probability {interval(population.longer_if_incorrect)}."
    ]


def speed_verdict(estimate: Estimate) -> str:
    """ "none" (any correlation is negligible), "falls", "rises", or "open"; "unsayable" without an
    interval."""
    if estimate.lower is None or estimate.upper is None:
        return "unsayable"
    if estimate.lower > -NEGLIGIBLE and estimate.upper < NEGLIGIBLE:
        return "none"
    return "falls" if estimate.upper < 0 else "rises" if estimate.lower > 0 else "open"


def _speedup(found: Observations) -> list[str]:
    speed = found.speedup
    if speed.pearson.value is None:
        said = [
            "Whether length goes with speedup over all tasks cannot be said:"
            f" {speed.pearson.why_not}."
        ]
    else:
        facts = (
            f"Pearson {interval(speed.pearson, '.3f')}; Spearman {interval(speed.spearman, '.3f')};"
            f" n {speed.samples:,}"
        )
        words = {
            "none": (
                f"Length and {speed.label} are as good as uncorrelated: anything stronger than"
                f" {NEGLIGIBLE} is excluded"
            ),
            "falls": f"The longer, the smaller the {speed.label}",
            "rises": f"The longer, the larger the {speed.label}",
            "open": f"The data do not tell whether length goes with {speed.label}",
            "unsayable": f"The correlation of length and {speed.label} has no interval",
        }
        # ranks: a few speedups of 100 carry Pearson's r on the ratio
        said = [f"{words[speed_verdict(speed.spearman)]} ({facts})."]
    if speed.within.bounded:
        side = _side(speed.within, 1.0)
        how = "goes with" if side else "shows no clear change:"
        said.append(
            f"Within tasks, {speed.sd_tokens:,.0f} tokens more {how} a factor of"
            f" {interval(speed.within, '.3f')} on the speed ({speed.within.tasks:,} tasks with"
            " several correct samples)."
        )
    return said


def _paper(found: Observations) -> list[str]:
    """Three claims of the paper, each with what these data say of it."""
    both = {
        verdict(found.everything),
        verdict(found.complete if found.complete is not None else found.everything),
    }
    if both == {"shorter"}:
        first = "supported, also within tasks"
    elif "longer" in both:
        first = "contradicted within tasks"
    elif "shorter" in both:
        first = "supported only as long as samples that were cut off count"
    else:
        pooled = _side(found.everything.pooled, 1.0)
        first = {
            -1: "seen over all tasks, not shown within them",
            1: "contradicted over all tasks",
        }.get(pooled or 0, "neither shown nor refuted")
    second = {
        "none": "supported",
        "falls": "contradicted: it falls",
        "rises": "contradicted: it rises",
    }.get(speed_verdict(found.speedup.spearman), "neither shown nor refuted")
    if speed_verdict(found.speedup.spearman) == "unsayable" and found.speedup.within.bounded:
        second += " over all tasks; within tasks " + (
            "there is an effect" if _side(found.speedup.within, 1.0) else "no effect is seen"
        )
    if bend(found.everything.tenths) is not None and both & {"shorter", "longer"}:
        first += ", but accuracy is not monotone in length"
    return [
        f"The paper's claims: shorter reasoning is more often correct: {first}. Speedup is"
        f" independent of length: {second}."
    ]
