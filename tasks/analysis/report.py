"""The analysis as a directory: report.md (the findings first, then figures, tables, and what
bounds them), analysis.json, figures.

Guarantees: everything in the page is in the JSON too; the same records give the same bytes; names
from the data are shown as text. Does not guarantee anything about the numbers: they are the
records'.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kernels_eval.errors import UsageError
from tasks.analysis.figures import all_figures
from tasks.analysis.records import Bin, Difficulty, Division, Observations, Population
from tasks.reporting.charts import Drawn, save
from tasks.reporting.findings import Estimate, findings_table
from tasks.reporting.page import (
    Block,
    Bullets,
    Picture,
    Section,
    Table,
    Text,
    block_markdown,
    markdown_of,
)
from tasks.reporting.text import interval

REPORT, DATA, SCHEMA_VERSION = "report.md", "analysis.json", 1


def as_json(observations: Observations, difficulty: Difficulty) -> dict[str, Any]:
    """Return both records and a schema version, as JSON holds them."""
    return {
        "schema_version": SCHEMA_VERSION,
        "observations": observations.model_dump(mode="json"),
        "difficulty": difficulty.model_dump(mode="json"),
    }


def write(
    observations: Observations, difficulty: Difficulty, directory: str | os.PathLike[str]
) -> Path:
    """Write the report, its data and its figures; return the report's path.

    Raises UsageError where the directory cannot be written.
    """
    out = Path(directory)
    figures = all_figures(observations, difficulty)
    data = json.dumps(as_json(observations, difficulty), indent=1)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for drawn in figures:
            save(drawn, out)
        (out / DATA).write_text(f"{data}\n", encoding="utf-8")
        (out / REPORT).write_text(markdown(observations, difficulty, figures), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write to {out}: {error.strerror}", "choose another directory with --out DIR"
        ) from error
    return out / REPORT


def markdown(
    observations: Observations, difficulty: Difficulty, figures: Sequence[Drawn] = ()
) -> str:
    """Return the page. It shows the figures that are given, by the names of their files."""
    pictures = {
        drawn.name: Picture(drawn.name, drawn.alt, f"{drawn.name}.svg") for drawn in figures
    }
    facts = (
        f"{observations.samples:,} samples of {observations.tasks:,} tasks",
        f"written by {', '.join(observations.generators)}" if observations.generators else "",
        f"lengths are {observations.length_unit}",
    )
    populations = [each for each in (observations.everything, observations.complete) if each]
    content: list[tuple[str, list[str], Iterable[Block]]] = [
        ("Findings", [], [findings_table(observations.findings)]),
        ("Difficulty of tasks", [], [findings_table(difficulty.findings)]),
        ("Limits of the findings", [], [Bullets(observations.cautions)]),
        (
            "Accuracy against length",
            ["accuracy-by-length", "lengths-by-outcome"],
            (block for each in populations for block in _population(each)),
        ),
        ("Length against speedup", ["speedup-by-length"], _speedup(observations)),
        ("Difficulty by ARL", ["difficulty"], _difficulty(difficulty)),
        ("Accuracy in the fixed bins", [], [_bins(observations.everything.bins)]),
    ]
    sections = [
        Section(title, (*(pictures[name] for name in names if name in pictures), *blocks))
        for title, names, blocks in content
    ]
    sentence = " ".join((*observations.finding, *difficulty.finding))
    return markdown_of("Reasoning length: what these samples show", facts, sentence, sections)


def in_words(sentences: Sequence[str]) -> str:
    """Return sentences as a Markdown list, for another page."""
    return f"{block_markdown(Bullets(tuple(sentences)))}\n"


def _population(found: Population) -> Iterable[Block]:
    every = found.name == "all"
    name = "All samples" if every else "Without the samples that the token limit cut off"
    yield Text(f"{name}: {found.correct:,} of {found.samples:,} correct")
    yield _bins(found.tenths)
    header = ("outcome", "samples", "mean", "10 %", "25 %", "median (95 %)", "75 %", "90 %")
    rows = []
    lengths = {"correct": found.correct_lengths, "incorrect": found.incorrect_lengths}
    for outcome, spread in lengths.items():
        if spread is None:
            rows.append((outcome, "0", *[""] * 6))
            continue
        median = interval(spread.median, spread.median_lower, spread.median_upper, ",.0f")
        numbers = [
            f"{value:,.0f}"
            for value in (spread.mean, spread.p10, spread.p25, spread.p75, spread.p90)
        ]
        rows.append((outcome, f"{spread.samples:,}", *numbers[:3], median, *numbers[3:]))
    yield Table(header, tuple(rows))


def _speedup(found: Observations) -> Iterable[Block]:
    speed = found.speedup
    yield Text(f"The speedup is: {speed.label}. {speed.samples:,} correct samples have one.")
    if speed.tenths:
        rows = tuple(
            (
                f"{each.from_tokens:,.0f} to {each.to_tokens:,.0f}",
                f"{each.samples:,}",
                f"{each.geometric_mean:.3g}",
                f"{each.p25:.3g} to {each.p75:.3g}",
            )
            for each in speed.tenths
        )
        yield Table(("tokens", "samples", "geometric mean", "middle half"), rows)


def _difficulty(found: Difficulty) -> Iterable[Block]:
    crossed = found.agreement.crossed if found.agreement else None
    for division in (found.tertiles, found.split_half, crossed):
        if division is not None:
            yield from _division(division)
    rows = tuple(
        (
            division.label,
            division.exec_monotone,
            ", ".join(_short(group.exec, ".0%") for group in division.groups),
            division.speedup_monotone,
            ", ".join(_short(group.speedup, ".2f") for group in division.groups),
        )
        for division in found.sensitivity
    )
    yield Table(("other divisions", "Exec", "Exec by group", "speedup", "speedup by group"), rows)
    if found.agreement is not None:
        both = found.agreement
        yield Text(f"{both.first} and {both.second} share {both.tasks:,} tasks.")


def _division(division: Division) -> Iterable[Block]:
    yield Text(
        f"{division.label}. Exec: {division.exec_monotone}. Speedup: {division.speedup_monotone}."
    )
    rows = tuple(
        (
            group.name,
            f"{group.from_arl:,.0f} to {group.to_arl:,.0f}",
            f"{group.tasks:,}",
            f"{group.samples:,}",
            group.exec.shown(".2f"),
            group.speedup.shown(".2f"),
        )
        for group in division.groups
    )
    yield Table(("group", "ARL", "tasks", "samples", "Exec", "geometric-mean speedup"), rows)


def _bins(bins: Sequence[Bin]) -> Table:
    rows = tuple(
        (
            f"{each.from_tokens:,.0f} and more"
            if each.to_tokens is None
            else f"{each.from_tokens:,.0f} to {each.to_tokens - 1:,.0f}",
            f"{each.samples:,}",
            f"{each.tasks:,}",
            f"{each.correct:,}",
            interval(each.accuracy, each.lower, each.upper, ".3f"),
        )
        for each in bins
    )
    return Table(("tokens", "samples", "tasks", "correct", "accuracy (95 % Wilson)"), rows)


def _short(estimate: Estimate, form: str) -> str:
    return interval(estimate.value, form=form) if estimate.value is not None else "none"
