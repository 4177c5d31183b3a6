"""What the numbers support, as rows by rule: one number a row, and what it says of a claim.

Guarantees: a direction is claimed only where a 95 % interval (and, within tasks, the permutation
test) excludes none; agreement with the paper is stated as plainly as disagreement. Does not
guarantee that an effect matters: sizes and intervals are in the rows for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from tasks.analysis.records import (
    Bin,
    Difficulty,
    Division,
    Observations,
    Population,
    WithinTask,
    bend,
)
from tasks.reporting.findings import Estimate, Finding
from tasks.reporting.text import interval

NEGLIGIBLE = 0.1  # |correlation| under which length explains less than 1 % of the variance
ALPHA = 0.05
FEW_TASKS = 30
SUPPORTS, CONTRADICTS, UNDECIDED = "supports", "contradicts", "undecided"
CORRECTNESS = "shorter reasoning is more often correct"
SPEED = "speedup is independent of length"
SAYS = {"shorter": SUPPORTS, "longer": CONTRADICTS, "open": UNDECIDED, "unsayable": UNDECIDED}
SPEED_SAYS = {"none": SUPPORTS, "falls": CONTRADICTS, "rises": CONTRADICTS}
MEANING = {
    "falls": "falls with every step, with 95 % confidence",
    "not refuted": "falls with every step, though not with 95 % confidence in each",
    "refuted": "does not fall monotonically: a step rises, with 95 % confidence",
    "not shown": "does not fall with every step, though no rise is certain",
    "unsayable": "cannot be compared between the groups",
}
FALLS = {"falls": SUPPORTS, "refuted": CONTRADICTS}


def findings(found: Observations) -> tuple[Finding, ...]:
    """The paper's two claims, then the numbers that they rest on."""
    rows = [*_claims(found), *population_rows(found.everything)]
    rows += population_rows(found.complete) if found.complete else []
    return (*rows, *speed_rows(found))


def headline(rows: tuple[Finding, ...]) -> str:
    """One sentence: each claim with its verdict."""
    past = {SUPPORTS: "supported", CONTRADICTS: "contradicted", UNDECIDED: "undecided"}
    said = "; ".join(
        f"{row.name}: {past[row.verdict]}" + (f" ({row.note})" if row.note else "") for row in rows
    )
    return f"{said[0].upper()}{said[1:]}."


def cautions(found: Observations) -> tuple[str, ...]:
    """What bounds the findings: data left out, truncation, few tasks, several generators."""
    mixed, left = found.everything.within.tasks, found.left_out.items()
    said = {
        f"{found.rows:,} rows, left out: {', '.join(f'{n:,} {why}' for why, n in left)}.": left,
        "No column states which samples the token limit cut off. Such samples would cause an"
        " apparent effect of length.": found.truncated is None,
        f"The token limit cut off {found.truncated or 0:,} of {found.samples:,} samples"
        f" ({found.truncated_correct} of them correct). Such samples are long, and mostly wrong"
        " because of the limit; results within tasks are given with and without"
        " them.": found.truncated,
        f"Only {mixed} of {found.tasks} tasks have both outcomes: within tasks these data can show"
        " large effects only.": mixed < FEW_TASKS,
        f"Samples of {len(found.generators)} generators are pooled. Their tokens and skills differ:"
        " analyse each separately.": len(found.generators) > 1,
        "Association, not cause: a sample may be long because it struggles. Intervals of the bins"
        " treat samples as independent.": True,
    }
    return tuple(text for text, holds in said.items() if holds)


def direction(within: WithinTask) -> str:
    """Within tasks: "shorter" or "longer" (is more often correct), "open", or "unsayable"."""
    if within.permutation_p is None:
        return "unsayable"
    # a perfectly separated regression has no interval; the linear model then gives the direction
    sides = {within.odds_ratio.side(1.0), within.slope.side(0.0)} - {None}
    if within.permutation_p >= ALPHA or len(sides) != 1 or sides == {0}:
        return "open"
    return "shorter" if sides == {-1} else "longer"


def speed_verdict(estimate: Estimate) -> str:
    """ "none" (any correlation is negligible), "falls", "rises", "open", or "unsayable"."""
    if estimate.lower is None or estimate.upper is None:
        return "unsayable"
    if estimate.lower > -NEGLIGIBLE and estimate.upper < NEGLIGIBLE:
        return "none"
    return {-1: "falls", 0: "open", 1: "rises"}[estimate.side(0.0) or 0]


def _claims(found: Observations) -> tuple[Finding, Finding]:
    both = {direction(each.within) for each in (found.everything, found.complete) if each}
    pooled, within = found.everything.pooled.side(1.0), found.speedup.within
    rules = (
        (both == {"shorter"}, SUPPORTS, "also within tasks"),
        ("longer" in both, CONTRADICTS, "within tasks"),
        ("shorter" in both, SUPPORTS, "only as long as samples that were cut off count"),
        (pooled == 1, CONTRADICTS, "over all tasks"),
        (pooled == -1, UNDECIDED, "seen over all tasks, not shown within them"),
        (True, UNDECIDED, ""),
    )
    says, note = next((says, note) for holds, says, note in rules if holds)
    if bend(found.everything.tenths) is not None and both & {"shorter", "longer"}:
        note += "; accuracy is not monotone in length"
    speed = speed_verdict(found.speedup.spearman)
    of_speed = {"falls": "it falls", "rises": "it rises"}.get(speed, "")
    if speed == "unsayable" and within.bounded:
        effect = "there is an effect" if within.side(1.0) else "no effect is seen"
        of_speed = f"over all tasks; within tasks {effect}"
    return (
        Finding(name=CORRECTNESS, verdict=says, note=note),
        Finding(name=SPEED, verdict=SPEED_SAYS.get(speed, UNDECIDED), note=of_speed),
    )


def _row(
    key: str, name: str, estimate: Estimate, form: str = ".3f", says: str = "", note: str = ""
) -> Finding:
    return Finding(key=key, name=name, estimate=estimate, form=form, verdict=says, note=note)


def population_rows(found: Population) -> list[Finding]:
    """The numbers of one population, in the order in which runs record them."""
    which = "" if found.name == "all" else "without samples cut off: "
    rows = [*_length_rows(found), *_within_rows(found.within), *_shape_rows(found)]
    return [
        row.model_copy(
            update={"name": which + row.name, "key": f"{found.name}/{row.key}" if row.key else ""}
        )
        for row in rows
    ]


def _length_rows(found: Population) -> Iterator[Finding]:
    n, tasks, unit = found.samples, found.tasks, f"{found.within.unit_tokens:,.0f} tokens"
    share = Estimate(value=found.correct / n, n=n, tasks=tasks, method="share")
    yield _row("share_correct", "share correct", share, ".1%")
    lengths = {"correct": found.correct_lengths, "incorrect": found.incorrect_lengths}
    for outcome, spread in lengths.items():
        if spread is not None:
            median = Estimate(
                value=spread.median,
                lower=spread.median_lower,
                upper=spread.median_upper,
                n=spread.samples,
                method="order statistics",
            )
            name = f"median tokens of {outcome} samples"
            yield _row(f"median_{outcome}_tokens", name, median, ",.0f")
    name = "chance that an incorrect sample is longer than a correct one"
    yield _row("longer_if_incorrect", name, found.longer_if_incorrect)
    side, inner, note = found.pooled.side(1.0), direction(found.within), ""
    if side and inner == "open":
        note = "differences between tasks may explain it"
    elif side and inner == {-1: "longer", 1: "shorter"}[side]:
        note = "opposite sign than within tasks, where task difficulty cancels"
    name = f"odds ratio over all tasks, per {unit}"
    yield _row("odds_ratio_pooled", name, found.pooled, note=note)


def _within_rows(found: WithinTask) -> Iterator[Finding]:
    sd = "" if found.sd_tokens is None else f" ({found.sd_tokens:,.0f} tokens)"
    per_sd, per_unit = f"per standard deviation{sd}", f"per {found.unit_tokens:,.0f} tokens"
    ratio, change = (
        "within tasks: odds ratio",
        f"within tasks: change of the share correct, {per_sd}",
    )
    says, prefix = SAYS[direction(found)], "odds_ratio_within_tasks_per"
    yield _row(f"{prefix}_sd", f"{ratio}, {per_sd}", found.odds_ratio, ".2f", says)
    yield _row(f"{prefix}_unit", f"{ratio}, {per_unit}", found.odds_ratio_per_unit, ".3f", says)
    yield _row("change_of_share_within_tasks_per_sd", change, found.slope, "+.1%", says)
    if found.permutation_p is not None:
        test = Estimate(
            value=found.permutation_p,
            n=found.samples,
            tasks=found.tasks,
            method=f"{found.permutations} permutations",
        )
        yield _row("permutation_p_within_tasks", "within tasks: p of the permutation test", test)


def _shape_rows(found: Population) -> Iterator[Finding]:
    """Accuracy in the shortest and the longest tenth, and where it turns."""
    if len(found.tenths) > 1:
        first, last = found.tenths[0], found.tenths[-1]
        yield _tenth(f"accuracy in the shortest tenth (under {first.to_tokens:,.0f} tokens)", first)
        yield _tenth(f"accuracy in the longest tenth (from {last.from_tokens:,.0f} tokens)", last)
    turn = bend(found.tenths)
    if turn is None or found.past_turn is None:
        return
    sign, peak = turn
    place = f"from {peak.from_tokens:,.0f} to {peak.to_tokens:,.0f} tokens"
    name = f"accuracy is {'highest' if sign > 0 else 'lowest'} in between ({place})"
    yield _tenth(name, peak, "not monotone: one slope does not describe it")
    for row in _within_rows(found.past_turn):
        name = f"{row.name}, from {found.past_turn_from:,.0f} tokens on"
        note = "explores and does not test: where accuracy turns was read from these data"
        yield row.model_copy(update={"name": name, "key": "", "note": note})


def _tenth(name: str, found: Bin, note: str = "") -> Finding:
    share = Estimate(
        value=found.accuracy,
        lower=found.lower,
        upper=found.upper,
        n=found.samples,
        tasks=found.tasks,
        method="Wilson",
    )
    return _row("", name, share, ".0%", note=note)


def speed_rows(found: Observations) -> list[Finding]:
    """The numbers of length against speedup."""
    speed = found.speedup
    more = f", per {speed.sd_tokens:,.0f} tokens" if speed.sd_tokens is not None else ""
    # ranks decide: a few speedups of 100 dominate Pearson's r on the ratio
    ranks = SPEED_SAYS.get(speed_verdict(speed.spearman), UNDECIDED)
    within = {0: SUPPORTS, None: UNDECIDED}.get(speed.within.side(1.0), CONTRADICTS)
    excluded = f"a correlation stronger than {NEGLIGIBLE} is excluded" if ranks == SUPPORTS else ""
    factor = f"within tasks: factor on the speedup{more}"
    return [
        _row("speedup/pearson", f"Pearson, length and {speed.label}", speed.pearson),
        _row("speedup/pearson_of_log", "Pearson, length and log speedup", speed.pearson_log),
        _row(
            *("speedup/spearman", f"Spearman, length and {speed.label}", speed.spearman),
            says=ranks,
            note=excluded,
        ),
        _row("speedup/factor_within_tasks_per_sd", factor, speed.within, says=within),
    ]


def difficulty_findings(found: Difficulty) -> tuple[Finding, ...]:
    """What dividing the tasks by ARL shows."""
    both, thirds = found.agreement, found.tertiles
    one_generator = "one generator: whether another finds the same tasks hard is unknown"
    rank, halves = "difficulty/spearman_of_arl_and_exec", "difficulty/reliability_of_arl"
    rows = [
        _row(rank, "Spearman of ARL and the share correct", found.arl_exec, ".2f"),
        _row(halves, "Spearman of the ARLs of two halves of the samples", found.reliability, ".2f"),
    ]
    for name, division, missing in (
        ("Exec falls with ARL", thirds, "too few tasks"),
        (
            "Exec falls with ARL of other samples of the task",
            found.split_half,
            "one sample a task: difficulty and luck cannot be told apart",
        ),
        ("Exec falls with the other generator's ARL", both and both.crossed, one_generator),
    ):
        rows.append(
            _monotone(name, division, "exec") if division else Finding(name=name, note=missing)
        )
    if thirds is not None:
        rows.append(_monotone("geometric-mean speedup falls with ARL", thirds, "speedup"))
        same = [each for each in found.sensitivity if each.exec_monotone == thirds.exec_monotone]
        note = f"{len(same)} of {len(found.sensitivity)}"
        rows.append(Finding(name="other divisions that say the same of Exec", note=note))
    if both is not None:
        names = f"{both.first} and {both.second}"
        rows += [
            _row("", f"Spearman of the ARLs of {names}", both.spearman, ".2f"),
            _row("", f"share of tasks in the same third, {names}", both.same_third, ".2f"),
            _row("", f"weighted kappa of the thirds, {names}", both.kappa, ".2f"),
        ]
    return tuple(rows)


def difficulty_headline(found: Difficulty) -> str:
    """One sentence: how Exec changes from easy to hard tasks."""
    if found.tertiles is None:
        return f"{found.tasks} tasks cannot be divided into easy, medium and hard."
    return f"By ARL, Exec {_monotone('', found.tertiles, 'exec').note}."


def _monotone(name: str, division: Division, what: Literal["exec", "speedup"]) -> Finding:
    said = division.exec_monotone if what == "exec" else division.speedup_monotone
    form = ".0%" if what == "exec" else ".2f"
    values = ", ".join(
        f"{group.name} {interval(getattr(group, what).value, form=form)}"
        for group in division.groups
    )
    note = f"{MEANING[said]}: {values}"
    return Finding(name=name, verdict=FALLS.get(said, UNDECIDED), note=note)
