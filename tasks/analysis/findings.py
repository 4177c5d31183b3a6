"""What the numbers support, as rows: the paper's claims with a verdict, then the numbers that they
rest on.

Guarantees: a verdict is `verdict.judge`'s and nothing else's; agreement with the paper is stated as
plainly as disagreement. Does not guarantee that an effect matters: sizes and intervals are in the
rows for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kernels_eval.tables import table_beside
from tasks.analysis.estimates import Basis
from tasks.analysis.records import (
    Bin,
    Difficulty,
    Division,
    LengthAndSpeedup,
    Observations,
    Population,
    SensitivityRow,
    Spread,
    bend,
)
from tasks.analysis.verdict import ADEQUATE_TASKS, Check, above, judge, negligible, shorter
from tasks.reporting.findings import Estimate, Finding
from tasks.reporting.page import rendered
from tasks.reporting.text import interval

CORRECTNESS = "shorter reasoning is more often correct"
SPEED = "speedup is independent of length"
SENSITIVITY = "sensitivity/"  # keys of its rows
TABLES: Mapping[str, Mapping[str, Mapping[str, str]]] = table_beside(__file__)
CAUTIONS = Path(__file__).parent / "templates" / "cautions.txt.j2"
LIMITS_DIFFER = 1.1  # longest samples of two levels that differ by this factor


def findings(found: Observations) -> tuple[Finding, ...]:
    """The paper's two claims, then the numbers that they rest on."""
    rows = [*_claims(found), *population_rows(found.everything)]
    rows += population_rows(found.complete) if found.complete else []
    return (*rows, *sensitivity_rows(found), *speed_rows(found.speedup))


def headline(rows: Sequence[Finding]) -> str:
    """One sentence: each claim with its verdict."""
    said = "; ".join(f"{row.name}: {row.verdict} ({row.note})" for row in rows)
    return f"{said[0].upper()}{said[1:]}."


def cautions(found: Observations) -> tuple[str, ...]:
    """What bounds the findings: data left out, truncation, few tasks, several generators."""
    differ = limits_differ(found)
    text = rendered(CAUTIONS, found=found, adequate=ADEQUATE_TASKS, limits_differ=differ)
    return tuple(text.splitlines())


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


def _rows(
    table: str,
    estimates: Mapping[str, Estimate | None],
    prefix: str | None = "",
    which: str = "",
    **values: object,
) -> list[Finding]:
    """Rows of a table of findings.toml, those with an estimate. `prefix` is that of their keys,
    None where they have none; `which` begins their names; `values` fill names and notes."""
    return [
        Finding(
            key="" if prefix is None else prefix + key,
            name=which + row["name"].format(**values),
            estimate=estimate,
            form=row.get("form", ".3f"),
            note=row.get("note", "").format(**values),
        )
        for key, row in TABLES[table].items()
        if (estimate := estimates.get(key))
    ]


def population_rows(found: Population) -> list[Finding]:
    """The numbers of one population, in the order in which runs record them."""
    within, p = found.within, found.within.permutation_p
    all_samples, compared = Basis(found.samples, found.tasks), Basis(within.samples, within.tasks)
    share, shuffled = found.correct / found.samples, f"{within.permutations} permutations"
    test = None if p is None else compared.estimate(p, None, shuffled)
    which = "" if found.name == "all" else "without samples cut off: "
    rows = _rows(
        "population",
        {
            "share_correct": all_samples.estimate(share, None, "share"),
            "median_correct_tokens": _median(found.correct_lengths),
            "median_incorrect_tokens": _median(found.incorrect_lengths),
            "longer_if_incorrect": found.longer_if_incorrect,
            "odds_ratio_pooled": found.pooled,
            "odds_ratio_within_tasks_per_sd": within.odds_ratio,
            "odds_ratio_within_tasks_per_unit": within.odds_ratio_per_unit,
            "change_of_share_within_tasks_per_sd": within.slope,
            "permutation_p_within_tasks": test,
            "odds_ratio_within_tasks_by_rank": within.rank_odds_ratio,
            "odds_ratio_within_tasks_above_median": within.median_odds_ratio,
        },
        f"{found.name}/",
        which,
        unit=within.unit_tokens,
        pooled_note=_pooled_note(found),
        sd="" if within.sd_tokens is None else f" ({within.sd_tokens:,.0f} tokens)",
        rank="" if within.sd_rank is None else f" ({within.sd_rank:.2f} of the task's samples)",
    )
    return rows + _shape_rows(found.tenths, which)


def _median(found: Spread | None) -> Estimate | None:
    if found is None:
        return None
    return Estimate(
        value=found.median,
        lower=found.median_lower,
        upper=found.median_upper,
        n=found.samples,
        method="order statistics",
    )


def _pooled_note(found: Population) -> str:
    """Why the odds ratio over all tasks may differ from those within tasks."""
    side = found.pooled.side(1.0)
    if not side:
        return ""
    if {check.side for check in shorter(found.within)} == {side}:
        return "opposite sign than within tasks, where task difficulty cancels"
    return "differences between tasks may explain it"


def _shape_rows(tenths: Sequence[Bin], which: str) -> list[Finding]:
    """Accuracy in the shortest and the longest tenth, and where it turns."""
    sign, peak = bend(tenths) or (0, None)
    first, last = (tenths[0], tenths[-1]) if len(tenths) > 1 else (None, None)
    shown = {"shortest": first, "longest": last, "highest" if sign > 0 else "lowest": peak}
    shares = {
        name: Basis(each.samples, each.tasks).estimate(
            each.accuracy, (each.lower, each.upper), "Wilson"
        )
        for name, each in shown.items()
        if each
    }
    return _rows("shape", shares, None, which, first=first, last=last, peak=peak)


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
        rows.append(
            Finding(
                key=SENSITIVITY + each.name.replace(" ", "_").replace(",", ""),
                name=f"{each.name}: odds ratio by rank within tasks",
                estimate=within.rank_odds_ratio,
                note=note,
            )
        )
    return rows


def speed_rows(found: LengthAndSpeedup) -> list[Finding]:
    """The numbers of length against speedup."""
    pooled = {
        "pearson": found.pearson,
        "pearson_of_log": found.pearson_log,
        "spearman": found.spearman,
    }
    within = {
        "factor_within_tasks_per_sd": found.within,
        "ranks_within_tasks": found.within_ranks,
    }
    sd = "" if found.sd_tokens is None else f", per {found.sd_tokens:,.0f} tokens"
    rows = _rows("speedup", pooled, "speedup/", label=found.label)
    strata = [
        Finding(name=f"{rows[-1].name}, {name}", estimate=each, form=".3f")
        for name, each in found.strata.items()
    ]
    return [*rows, *strata, *_rows("speedup_within", within, "speedup/", sd=sd)]


def difficulty_findings(found: Difficulty) -> tuple[Finding, ...]:
    """What dividing the tasks by ARL shows: the claims first."""
    both = found.agreement
    known = {
        "spearman_of_arl_and_exec": found.arl_exec,
        "reliability_of_arl": found.reliability,
    }
    trust: dict[str, Estimate] = {}
    if found.tertiles is not None and found.split_half is None:
        trust["one_sample"] = Estimate()
    if both is None:
        trust["one_generator"] = Estimate()
    else:
        trust |= {"spearman": both.spearman, "same_third": both.same_third, "kappa": both.kappa}
    names = f"{both.first} and {both.second}" if both else ""
    return (
        *_difficulty_claims(found),
        *_rows("difficulty", known, "difficulty/"),
        *_rows("trust", trust, None, names=names),
    )


def difficulty_headline(found: Difficulty, rows: Sequence[Finding]) -> str:
    """One sentence: how Exec changes from easy to hard tasks, by the first of the `rows`."""
    if found.tertiles is None:
        return f"{found.tasks} tasks cannot be divided into easy, medium and hard."
    return headline(rows[:1])


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
