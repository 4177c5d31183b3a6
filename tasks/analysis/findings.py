"""What the numbers support, as rows: the paper's claims with a verdict, then the numbers that they
rest on.

Guarantees: a verdict is `verdict.judge`'s and nothing else's; agreement with the paper is stated as
plainly as disagreement. Does not guarantee that an effect matters: sizes and intervals are in the
rows for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tasks.analysis.records import (
    Bin,
    Difficulty,
    Division,
    Observations,
    Population,
    SensitivityRow,
    WithinTask,
    bend,
)
from tasks.analysis.verdict import ADEQUATE_TASKS, Check, above, judge, negligible, shorter
from tasks.reporting.findings import Estimate, Finding
from tasks.reporting.text import interval

CORRECTNESS = "shorter reasoning is more often correct"
SPEED = "speedup is independent of length"
SENSITIVITY = "sensitivity/"  # keys of its rows
LIMITS_DIFFER = 1.1  # longest samples of two levels that differ by this factor


def findings(found: Observations) -> tuple[Finding, ...]:
    """The paper's two claims, then the numbers that they rest on."""
    rows = [*_claims(found), *population_rows(found.everything)]
    rows += population_rows(found.complete) if found.complete else []
    return (*rows, *sensitivity_rows(found), *speed_rows(found))


def headline(rows: tuple[Finding, ...]) -> str:
    """One sentence: each claim with its verdict."""
    said = "; ".join(f"{row.name}: {row.verdict} ({row.note})" for row in rows)
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
        " large effects only.": mixed < ADEQUATE_TASKS,
        f"The longest samples have {_longest(found)}: token limits seem to differ, so lengths over"
        " all tasks compare limits, and only comparisons within tasks count.": limits_differ(found),
        f"Samples of {len(found.generators)} generators are pooled. Their tokens and skills differ:"
        " analyse each separately.": len(found.generators) > 1,
        "Association, not cause: a sample may be long because it struggles. Intervals of the bins"
        " treat samples as independent.": True,
    }
    return tuple(text for text, holds in said.items() if holds)


def _longest(found: Observations) -> str:
    return ", ".join(
        f"{each.longest_tokens:,.0f} tokens in {each.name or 'no level'}" for each in found.strata
    )


def limits_differ(found: Observations) -> bool:
    longest = [each.longest_tokens for each in found.strata]
    return bool(longest) and max(longest) > LIMITS_DIFFER * min(longest)


def _claims(found: Observations) -> tuple[Finding, Finding]:
    """Main are all samples, and those that were not cut off; every other row of the sensitivity
    table has a say where it has enough tasks."""
    whole = [each.within for each in (found.everything, found.complete) if each]
    rows = [row.within for row in _other_rows(found)]
    adequate = [within for within in rows if within.tasks >= ADEQUATE_TASKS]
    main, others = (
        [check for within in part for check in shorter(within)] for part in (whole, adequate)
    )
    says, note = judge(main, others)
    if bend(found.everything.tenths) is not None:
        note += "; over all tasks accuracy is not monotone in length"
    return Finding(name=CORRECTNESS, verdict=says, note=note), _speed_claim(found)


def _other_rows(found: Observations) -> tuple[SensitivityRow, ...]:
    """The rows of the sensitivity table after those of the two populations."""
    return found.sensitivity[2 if found.complete else 1 :]


def _speed_claim(found: Observations) -> Finding:
    speed = found.speedup
    others = [speed.pearson, speed.pearson_log]
    others += [each for each in speed.strata.values() if each.tasks >= ADEQUATE_TASKS]
    main = [negligible(each) for each in (speed.spearman, speed.within_ranks)]
    says, note = judge(main, [negligible(each) for each in others])
    return Finding(name=SPEED, verdict=says, note=note)


def _row(key: str, name: str, estimate: Estimate, form: str = ".3f", note: str = "") -> Finding:
    return Finding(key=key, name=name, estimate=estimate, form=form, note=note)


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
    sides = {check.side for check in shorter(found.within)}
    note = "" if found.pooled.side(1.0) in (None, 0) else "differences between tasks may explain it"
    if note and sides == {found.pooled.side(1.0)}:
        note = "opposite sign than within tasks, where task difficulty cancels"
    name = f"odds ratio over all tasks, per {unit}"
    yield _row("odds_ratio_pooled", name, found.pooled, note=note)


def _within_rows(found: WithinTask) -> Iterator[Finding]:
    """Three statistics, the linear one in its three computations."""
    sd = "" if found.sd_tokens is None else f" ({found.sd_tokens:,.0f} tokens)"
    rank = "" if found.sd_rank is None else f" ({found.sd_rank:.2f} of the task's samples)"
    per_sd, per_unit = f"per standard deviation{sd}", f"per {found.unit_tokens:,.0f} tokens"
    prefix, linear = "odds_ratio_within_tasks", "the same linear statistic"
    ratio, share = "within tasks: odds ratio", "within tasks: change of the share correct"
    yield _row(f"{prefix}_per_sd", f"{ratio}, linear in tokens, {per_sd}", found.odds_ratio, ".2f")
    name = f"{ratio}, linear in tokens, {per_unit}"
    yield _row(f"{prefix}_per_unit", name, found.odds_ratio_per_unit, note=linear)
    key = "change_of_share_within_tasks_per_sd"
    yield _row(key, f"{share}, {per_sd}", found.slope, "+.1%", linear)
    if found.permutation_p is not None:
        test = Estimate(
            value=found.permutation_p,
            n=found.samples,
            tasks=found.tasks,
            method=f"{found.permutations} permutations",
        )
        name = "within tasks: p of the permutation test"
        yield _row("permutation_p_within_tasks", name, test, note=linear)
    name = f"{ratio}, by rank, per standard deviation{rank}"
    yield _row(f"{prefix}_by_rank", name, found.rank_odds_ratio, ".2f")
    name = f"{ratio}, above against below the task's median"
    yield _row(f"{prefix}_above_median", name, found.median_odds_ratio, ".2f")


def sensitivity_rows(found: Observations) -> list[Finding]:
    """One row per part of the samples: ranks, with the other two statistics in the note."""
    rows = []
    for each in _other_rows(found):
        within = each.within
        note = (
            f"linear in tokens {within.odds_ratio.shown('.2f')}; above against below the median"
            f" {within.median_odds_ratio.shown('.2f')}"
        )
        if within.tasks < ADEQUATE_TASKS:
            note += f"; under {ADEQUATE_TASKS} tasks with both outcomes: not counted in the verdict"
        name, key = f"{each.name}: odds ratio by rank within tasks", each.name.replace(" ", "_")
        key = f"{SENSITIVITY}{key.replace(',', '')}"
        rows.append(_row(key, name, within.rank_odds_ratio, ".2f", note))
    return rows


def _shape_rows(found: Population) -> Iterator[Finding]:
    """Accuracy in the shortest and the longest tenth, and where it turns."""
    if len(found.tenths) > 1:
        first, last = found.tenths[0], found.tenths[-1]
        yield _tenth(f"accuracy in the shortest tenth (under {first.to_tokens:,.0f} tokens)", first)
        yield _tenth(f"accuracy in the longest tenth (from {last.from_tokens:,.0f} tokens)", last)
    turn = bend(found.tenths)
    if turn is None:
        return
    sign, peak = turn
    place = f"from {peak.from_tokens:,.0f} to {peak.to_tokens:,.0f} tokens"
    name = f"accuracy is {'highest' if sign > 0 else 'lowest'} in between ({place})"
    yield _tenth(name, peak, "not monotone: one slope does not describe it")


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
    spearman = f"Spearman, length and {speed.label}"
    return [
        _row("speedup/pearson", f"Pearson, length and {speed.label}", speed.pearson),
        _row("speedup/pearson_of_log", "Pearson, length and log speedup", speed.pearson_log),
        _row("speedup/spearman", spearman, speed.spearman),
        *(_row("", f"{spearman}, {name}", each) for name, each in speed.strata.items()),
        _row(
            "speedup/factor_within_tasks_per_sd",
            f"within tasks: factor on the speedup{more}",
            speed.within,
        ),
        _row(
            "speedup/ranks_within_tasks",
            "within tasks: correlation of the ranks of length and speedup",
            speed.within_ranks,
        ),
    ]


def difficulty_findings(found: Difficulty) -> tuple[Finding, ...]:
    """What dividing the tasks by ARL shows."""
    both, thirds = found.agreement, found.tertiles
    rank, halves = "difficulty/spearman_of_arl_and_exec", "difficulty/reliability_of_arl"
    rows = [
        *_difficulty_claims(found),
        _row(rank, "Spearman of ARL and the share correct", found.arl_exec, ".2f"),
        _row(halves, "Spearman of the ARLs of two halves of the samples", found.reliability, ".2f"),
    ]
    missing = "one sample a task: difficulty and luck cannot be told apart"
    if thirds is not None and found.split_half is None:
        rows.append(Finding(name="ARL and outcomes of different samples", note=missing))
    if both is None:
        missing = "one generator: whether another finds the same tasks hard is unknown"
        rows.append(Finding(name="another generator's ARL", note=missing))
    else:
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
    claim = _difficulty_claims(found)[0]
    return f"{claim.name}: {claim.verdict} ({claim.note})."


def steps_checks(steps: Sequence[Estimate]) -> list[Check]:
    """What the drops from group to group say of "falls with every step"."""
    return [above(step, 0.0) for step in steps]


def _difficulty_claims(found: Difficulty) -> list[Finding]:
    """Main are the steps between thirds, and between thirds by other samples of the task (wrong
    samples are long, so a task's own would make it look hard); of other divisions the drop from
    the first group to the last has a say."""
    crossed = found.agreement and found.agreement.crossed
    others = [each for each in (*found.sensitivity, crossed) if each]
    claims = []
    for name, what in (
        ("Exec falls with ARL", "exec"),
        ("geometric-mean speedup falls with ARL", "speedup"),
    ):
        main = [_steps(each, what) for each in (found.tertiles, found.split_half) if each]
        says, note = judge(
            [check for steps in main for check in steps_checks(steps)],
            [above(_drop(each, what), 0.0) for each in others],
        )
        if found.tertiles is not None:
            note = f"{_by_group(found.tertiles, what)}; {note}"
        claims.append(Finding(name=name, verdict=says, note=note))
    return claims


def _steps(division: Division, what: str) -> tuple[Estimate, ...]:
    return division.steps if what == "exec" else division.speed_steps


def _drop(division: Division, what: str) -> Estimate:
    """The sum of the steps, which have the same scale, without an interval."""
    values = [step.value for step in _steps(division, what)]
    known = [value for value in values if value is not None]
    return Estimate(value=sum(known) if len(known) == len(values) else None)


def _by_group(division: Division, what: str) -> str:
    form = ".0%" if what == "exec" else ".2f"
    return ", ".join(
        f"{group.name} {interval(getattr(group, what).value, form=form)}"
        for group in division.groups
    )
