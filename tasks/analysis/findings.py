"""What the numbers support, as rows by rule: one number a row, and what it says of a claim.

Guarantees: a direction is claimed only where a 95 % interval (and, within tasks, the permutation
test) excludes none; agreement with the paper is stated as plainly as disagreement. Does not
guarantee that an effect matters: sizes and intervals are in the rows for that.
"""

from __future__ import annotations

from collections.abc import Iterator

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


def verdict(found: Population) -> str:
    """Within tasks: "shorter" or "longer" (is more often correct), "open", or "unsayable"."""
    return _verdict(found.within)


def _verdict(within: WithinTask) -> str:
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
    return "falls" if estimate.upper < 0 else "rises" if estimate.lower > 0 else "open"


def _claims(found: Observations) -> tuple[Finding, Finding]:
    both = {verdict(each) for each in (found.everything, found.complete) if each is not None}
    pooled = found.everything.pooled.side(1.0)
    if both == {"shorter"}:
        said = SUPPORTS, "also within tasks"
    elif "longer" in both:
        said = CONTRADICTS, "within tasks"
    elif "shorter" in both:
        said = SUPPORTS, "only as long as samples that were cut off count"
    elif pooled:
        said = (
            (CONTRADICTS, "over all tasks")
            if pooled > 0
            else (UNDECIDED, "seen over all tasks, not shown within them")
        )
    else:
        said = UNDECIDED, ""
    if bend(found.everything.tenths) is not None and both & {"shorter", "longer"}:
        said = said[0], f"{said[1]}; accuracy is not monotone in length"
    speed = speed_verdict(found.speedup.spearman)
    note = {"falls": "it falls", "rises": "it rises"}.get(speed, "")
    if speed == "unsayable" and found.speedup.within.bounded:
        effect = "there is an effect" if found.speedup.within.side(1.0) else "no effect is seen"
        note = f"over all tasks; within tasks {effect}"
    return (
        Finding(name=CORRECTNESS, verdict=said[0], note=said[1]),
        Finding(name=SPEED, verdict=SPEED_SAYS.get(speed, UNDECIDED), note=note),
    )


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
    share = Estimate(
        value=found.correct / found.samples, n=found.samples, tasks=found.tasks, method="share"
    )
    yield Finding(key="share_correct", name="share correct", estimate=share, form=".1%")
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
            yield Finding(key=f"median_{outcome}_tokens", name=name, estimate=median, form=",.0f")
    yield Finding(
        key="longer_if_incorrect",
        name="chance that an incorrect sample is longer than a correct one",
        estimate=found.longer_if_incorrect,
        form=".3f",
    )
    side, inner, note = found.pooled.side(1.0), verdict(found), ""
    if side and inner == "open":
        note = "differences between tasks may explain it"
    elif side and inner in ("shorter", "longer") and (side < 0) != (inner == "shorter"):
        note = "opposite sign than within tasks, where task difficulty cancels"
    yield Finding(
        key="odds_ratio_pooled",
        name=f"odds ratio over all tasks, per {found.within.unit_tokens:,.0f} tokens",
        estimate=found.pooled,
        form=".3f",
        note=note,
    )


def _within_rows(within: WithinTask) -> Iterator[Finding]:
    per_sd = "per standard deviation" + (
        f" ({within.sd_tokens:,.0f} tokens)" if within.sd_tokens is not None else ""
    )
    for key, name, estimate, form in (
        ("odds_ratio_within_tasks_per_sd", f"odds ratio, {per_sd}", within.odds_ratio, ".2f"),
        (
            "odds_ratio_within_tasks_per_unit",
            f"odds ratio, per {within.unit_tokens:,.0f} tokens",
            within.odds_ratio_per_unit,
            ".3f",
        ),
        (
            "change_of_share_within_tasks_per_sd",
            f"change of the share correct, {per_sd}",
            within.slope,
            "+.1%",
        ),
    ):
        yield Finding(
            key=key,
            name=f"within tasks: {name}",
            estimate=estimate,
            form=form,
            verdict=SAYS[_verdict(within)],
        )
    if within.permutation_p is not None:
        test = Estimate(
            value=within.permutation_p,
            n=within.samples,
            tasks=within.tasks,
            method=f"{within.permutations} permutations",
        )
        yield Finding(
            key="permutation_p_within_tasks",
            name="within tasks: p of the permutation test",
            estimate=test,
            form=".3f",
        )


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
    row = _tenth(f"accuracy is {'highest' if sign > 0 else 'lowest'} in between ({place})", peak)
    yield row.model_copy(update={"note": "not monotone: one slope does not describe it"})
    for row in _within_rows(found.past_turn):
        name = f"{row.name}, from {found.past_turn_from:,.0f} tokens on"
        note = "explores and does not test: where accuracy turns was read from these data"
        yield row.model_copy(update={"name": name, "key": "", "note": note})


def _tenth(name: str, found: Bin) -> Finding:
    share = Estimate(
        value=found.accuracy,
        lower=found.lower,
        upper=found.upper,
        n=found.samples,
        tasks=found.tasks,
        method="Wilson",
    )
    return Finding(name=name, estimate=share, form=".0%")


def speed_rows(found: Observations) -> list[Finding]:
    """The numbers of length against speedup."""
    speed = found.speedup
    more = f", per {speed.sd_tokens:,.0f} tokens" if speed.sd_tokens is not None else ""
    # ranks decide: a few speedups of 100 dominate Pearson's r on the ratio
    says = SPEED_SAYS.get(speed_verdict(speed.spearman), UNDECIDED)
    excluded = f"a correlation stronger than {NEGLIGIBLE} is excluded"
    notes = {"spearman": excluded if says == SUPPORTS else ""}
    table = (
        ("pearson", f"Pearson, length and {speed.label}", speed.pearson, ""),
        ("pearson_of_log", "Pearson, length and log speedup", speed.pearson_log, ""),
        ("spearman", f"Spearman, length and {speed.label}", speed.spearman, says),
        (
            "factor_within_tasks_per_sd",
            f"within tasks: factor on the speedup{more}",
            speed.within,
            {0: SUPPORTS, None: UNDECIDED}.get(speed.within.side(1.0), CONTRADICTS),
        ),
    )
    return [
        Finding(
            key=f"speedup/{key}",
            name=name,
            estimate=estimate,
            form=".3f",
            verdict=says,
            note=notes.get(key, ""),
        )
        for key, name, estimate, says in table
    ]


def difficulty_findings(found: Difficulty) -> tuple[Finding, ...]:
    """What dividing the tasks by ARL shows."""
    rows = [
        Finding(
            name="Spearman of ARL and the share correct",
            estimate=found.arl_exec,
            key="difficulty/spearman_of_arl_and_exec",
        ),
        Finding(
            name="Spearman of the ARLs of two halves of the samples",
            estimate=found.reliability,
            key="difficulty/reliability_of_arl",
        ),
    ]
    both = found.agreement
    one_generator = "one generator: whether another finds the same tasks hard is unknown"
    for name, division, missing in (
        ("Exec falls with ARL", found.tertiles, "too few tasks"),
        (
            "Exec falls with ARL of other samples of the task",
            found.split_half,
            "one sample a task: difficulty and luck cannot be told apart",
        ),
        (
            "Exec falls with the other generator's ARL",
            both.crossed if both else None,
            one_generator,
        ),
    ):
        rows.append(
            _monotone(name, division.exec_monotone, _execs(division))
            if division
            else Finding(name=name, note=missing)
        )
    if found.tertiles is not None:
        speeds = ", ".join(
            f"{group.name} {interval(group.speedup.value)}" for group in found.tertiles.groups
        )
        said = found.tertiles.speedup_monotone
        rows.append(_monotone("geometric-mean speedup falls with ARL", said, speeds))
        same = [
            each for each in found.sensitivity if each.exec_monotone == found.tertiles.exec_monotone
        ]
        rows.append(
            Finding(
                name="other divisions that say the same of Exec",
                note=f"{len(same)} of {len(found.sensitivity)}",
            )
        )
    if both is not None:
        names = f"{both.first} and {both.second}"
        rows += [
            Finding(name=f"Spearman of the ARLs of {names}", estimate=both.spearman),
            Finding(name=f"share of tasks in the same third, {names}", estimate=both.same_third),
            Finding(name=f"weighted kappa of the thirds, {names}", estimate=both.kappa),
        ]
    return tuple(rows)


def difficulty_headline(found: Difficulty) -> str:
    """One sentence: how Exec changes from easy to hard tasks."""
    if found.tertiles is None:
        return f"{found.tasks} tasks cannot be divided into easy, medium and hard."
    return f"By ARL, Exec {MEANING[found.tertiles.exec_monotone]}: {_execs(found.tertiles)}."


def _execs(division: Division) -> str:
    return ", ".join(
        f"{group.name} {interval(group.exec.value, form='.0%')}" for group in division.groups
    )


def _monotone(name: str, said: str, values: str) -> Finding:
    note = f"{MEANING[said]}: {values}"
    return Finding(name=name, verdict=FALLS.get(said, UNDECIDED), note=note)
