"""The analysis as a directory: report.md (the finding first, then figures, tables, and what to
trust), analysis.json, figures.

Guarantees: everything in the page is in the JSON too; the same records give the same bytes; names
from the data are shown as text. Does not guarantee anything about the numbers: they are the
records'.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from kernels_eval.errors import UsageError
from tasks.analysis.difficulty import Difficulty, Division
from tasks.analysis.estimates import Estimate
from tasks.analysis.figures import Drawn, all_figures, save
from tasks.analysis.findings import interval, p_value
from tasks.analysis.observations import Bin, Observations, Population, Spread

REPORT, DATA, SCHEMA_VERSION = "report.md", "analysis.json", 1


def as_json(observations: Observations, difficulty: Difficulty) -> dict:
    """Both records and a schema version, as JSON holds them."""
    records = {
        "observations": observations.model_dump(mode="json"),
        "difficulty": difficulty.model_dump(mode="json"),
    }
    return {"schema_version": SCHEMA_VERSION, **records}


def write(
    observations: Observations, difficulty: Difficulty, directory: str | os.PathLike[str]
) -> Path:
    """Write the report, its data and its figures; returns the report's path. Raises UsageError
    where the directory cannot be written."""
    out = Path(directory)
    figures = all_figures(observations, difficulty)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for drawn in figures:
            save(drawn, out)
        (out / DATA).write_text(
            json.dumps(as_json(observations, difficulty), indent=1) + "\n", encoding="utf-8"
        )
        (out / REPORT).write_text(markdown(observations, difficulty, figures), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write to {out}: {error.strerror}", "choose another directory with --out DIR"
        ) from error
    return out / REPORT


def markdown(
    observations: Observations, difficulty: Difficulty, figures: Sequence[Drawn] = ()
) -> str:
    """The page. Figures are referred to by name; none are named where `figures` is empty."""
    shown = {drawn.name: f"![{_plain(drawn.alt)}]({drawn.name}.svg)" for drawn in figures}
    head = f"{observations.samples:,} samples of {observations.tasks:,} tasks"
    by = (
        f", written by {', '.join(_plain(name) for name in observations.generators)}"
        if observations.generators
        else ""
    )
    lines = [
        "# Reasoning length: what these samples say",
        "",
        f"{head}{by}. Lengths are {_plain(observations.length_unit)}.",
        "",
    ]
    lines += [
        "## Finding",
        "",
        *_bullets(observations.finding),
        "",
        "Difficulty:",
        "",
        *_bullets(difficulty.finding),
    ]
    lines += ["", "## What bounds it", "", *_bullets(observations.cautions)]
    lines += ["", "## Accuracy against length", "", *_figure(shown, "accuracy-by-length")]
    for population in (observations.everything, observations.complete):
        if population is not None:
            lines += [*_population(population, observations.unit_tokens), ""]
    lines += [
        *_figure(shown, "lengths-by-outcome"),
        "## Length against speedup",
        "",
        *_figure(shown, "speedup-by-length"),
        *_speedup(observations),
    ]
    lines += ["", "## Difficulty", "", *_figure(shown, "difficulty"), *_difficulty(difficulty)]
    lines += ["", "## Accuracy in the fixed bins", "", *_bins(observations.everything.bins)]
    return "\n".join(lines) + "\n"


def in_words(sentences: Sequence[str]) -> str:
    """Sentences as a Markdown list, for somebody else's page."""
    return "".join(f"{line}\n" for line in _bullets(sentences))


def _population(found: Population, unit: float) -> list[str]:
    name = (
        "All samples" if found.name == "all" else "Without the samples that the token limit cut off"
    )
    within = found.within
    rows = [
        ("odds ratio within tasks, per standard deviation", within.odds_ratio, ".2f"),
        (f"odds ratio within tasks, per {unit:,.0f} tokens", within.odds_ratio_per_unit, ".3f"),
        ("change of the share correct within tasks, per standard deviation", within.slope, ".3f"),
        (f"odds ratio over all tasks, per {unit:,.0f} tokens", found.pooled, ".3f"),
        (
            "chance that an incorrect sample is longer than a correct one",
            found.longer_if_incorrect,
            ".3f",
        ),
    ]
    if found.past_turn is not None and found.past_turn_from is not None:
        rows.append(
            (
                (
                    f"odds ratio within tasks, per {unit:,.0f} tokens, from"
                    f" {found.past_turn_from:,.0f} tokens on"
                ),
                found.past_turn.odds_ratio_per_unit,
                ".3f",
            )
        )
    lines = [
        f"### {name}: {found.correct:,} of {found.samples:,} correct",
        "",
        *_bins(found.tenths),
        "",
    ]
    lines += [
        "| outcome | samples | mean | 10 % | 25 % | median (95 %) | 75 % | 90 % |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        *_spread("correct", found.correct_lengths),
        *_spread("incorrect", found.incorrect_lengths),
        "",
        *_estimates(rows),
        "",
    ]
    if within.permutation_p is not None and within.sd_tokens is not None:
        lines.append(
            f"Within tasks a standard deviation is {within.sd_tokens:,.0f} tokens. Shuffling"
            f" outcomes within tasks {within.permutations:,} times:"
            f" {p_value(within.permutation_p)}."
        )
    return lines


def _speedup(found: Observations) -> list[str]:
    speed = found.speedup
    rows = [
        ("Pearson, length and speedup", speed.pearson, ".3f"),
        ("Pearson, length and log speedup", speed.pearson_log, ".3f"),
        ("Spearman", speed.spearman, ".3f"),
        ("factor on the speedup within tasks, per standard deviation", speed.within, ".3f"),
    ]
    lines = [
        f"The speedup is: {_plain(speed.label)}. {speed.samples:,} correct samples have one.",
        "",
        *_estimates(rows),
    ]
    if speed.tenths:
        lines += [
            "",
            "| tokens | samples | geometric mean | middle half |",
            "| --- | ---: | ---: | --- |",
        ]
        for each in speed.tenths:
            middle = f"{each.geometric_mean:.3g} | {each.p25:.3g} to {each.p75:.3g}"
            lines.append(
                f"| {each.from_tokens:,.0f} to {each.to_tokens:,.0f} | {each.samples:,} |"
                f" {middle} |"
            )
    return lines


def _difficulty(found: Difficulty) -> list[str]:
    lines = [
        f"ARL and the share correct over {found.tasks:,} tasks: Spearman"
        f" {interval(found.arl_exec)}."
    ]
    lines.append(f"ARLs of two halves of the samples: Spearman {interval(found.reliability)}.")
    for division in (
        found.tertiles,
        found.split_half,
        found.agreement.crossed if found.agreement else None,
    ):
        if division is not None:
            lines += ["", *_division(division)]
    lines += [
        "",
        "| other divisions | Exec | Exec by group | speedup | speedup by group |",
        "| --- | --- | --- | --- | --- |",
    ]
    for division in found.sensitivity:
        execs = ", ".join(_short(group.exec, 100, ".0f") for group in division.groups)
        speeds = ", ".join(_short(group.speedup, 1, ".2f") for group in division.groups)
        lines.append(
            f"| {_plain(division.label)} | {division.exec_monotone} | {execs} % |"
            f" {division.speedup_monotone} | {speeds} |"
        )
    if found.agreement is not None:
        both = found.agreement
        rows = [
            ("Spearman", both.spearman, ".2f"),
            ("share in the same third", both.same_third, ".2f"),
            ("weighted kappa", both.kappa, ".2f"),
        ]
        lines += [
            "",
            f"Agreement of {_plain(both.first)} and {_plain(both.second)} on {both.tasks:,} tasks:",
            "",
            *_estimates(rows),
        ]
    return lines


def _division(division: Division) -> list[str]:
    lines = [
        f"### {_plain(division.label)}",
        "",
        f"Exec: {division.exec_monotone}. Speedup: {division.speedup_monotone}.",
        "",
    ]
    lines += [
        "| group | ARL | tasks | samples | Exec | geometric-mean speedup |",
        "| --- | --- | ---: | ---: | --- | --- |",
    ]
    for group in division.groups:
        facts = (
            f"{group.from_arl:,.0f} to {group.to_arl:,.0f} | {group.tasks:,} | {group.samples:,}"
        )
        lines.append(
            f"| {group.name} | {facts} | {interval(group.exec)} | {interval(group.speedup)} |"
        )
    return lines


def _bins(bins: Sequence[Bin]) -> list[str]:
    lines = [
        "| tokens | samples | tasks | correct | accuracy (95 % Wilson) |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for each in bins:
        tokens = (
            f"{each.from_tokens:,.0f} and more"
            if each.to_tokens is None
            else f"{each.from_tokens:,.0f} to {each.to_tokens - 1:,.0f}"
        )
        share = f"{each.accuracy:.3f} ({each.lower:.3f} to {each.upper:.3f})"
        lines.append(
            f"| {tokens} | {each.samples:,} | {each.tasks:,} | {each.correct:,} | {share} |"
        )
    return lines


def _spread(name: str, found: Spread | None) -> list[str]:
    if found is None:
        return [f"| {name} | 0 | | | | | | |"]
    bounds = (
        ""
        if found.median_lower is None or found.median_upper is None
        else f" ({found.median_lower:,.0f} to {found.median_upper:,.0f})"
    )
    values = (
        f"{found.mean:,.0f} | {found.p10:,.0f} | {found.p25:,.0f} | {found.median:,.0f}{bounds} |"
        f" {found.p75:,.0f} | {found.p90:,.0f}"
    )
    return [f"| {name} | {found.samples:,} | {values} |"]


def _estimates(rows: Sequence[tuple[str, Estimate, str]]) -> list[str]:
    lines = [
        "| figure | value and interval | p | samples | tasks | by |",
        "| --- | --- | --- | ---: | ---: | --- |",
    ]
    for name, estimate, form in rows:
        p = p_value(estimate.p) if estimate.p is not None else ""
        lines.append(
            f"| {name} | {interval(estimate, form)} | {p} | {estimate.n:,} | {estimate.tasks:,} |"
            f" {estimate.method} |"
        )
    return lines


def _short(estimate: Estimate, times: float, form: str) -> str:
    return f"{times * estimate.value:{form}}" if estimate.value is not None else "none"


def _bullets(sentences: Sequence[str]) -> list[str]:
    return [f"- {_plain(sentence)}" for sentence in sentences]


def _figure(shown: dict[str, str], name: str) -> list[str]:
    return [shown[name], ""] if name in shown else []


def _plain(text: str) -> str:
    """Text from data as text: one line, no markup."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split()))
