"""The content of a report, once, for all renderers.

Guarantees: reading order; a section without data is left out; what was cut is said. Strings are
raw: `tasks.reporting.page` escapes them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from kernels_eval.records import STATUS_OF
from tasks.benchmark.published import PAPER
from tasks.benchmark.report.caveats import caveats
from tasks.benchmark.report.records import MAX_EXAMPLES, ReportContext
from tasks.benchmark.report.scores import looking_section, scores_section
from tasks.benchmark.report.summary import (
    lengths_by_status,
    published_table,
    summary_table,
    timed,
)
from tasks.reporting.blocks import Block, Bullets, Code, Folded, Picture, Section, Table, Text
from tasks.reporting.findings import findings_table
from tasks.reporting.text import by_count, cut, interval, plural, share, spread

EXAMPLE_CHARS = 3000
MAX_POINTS = 1500  # of the reasoning figure: 90,000 candidates would make a page of 10 MB
MAX_BARS = 30  # of the speedup figure: more do not fit a screen


def sections(context: ReportContext) -> list[Section]:
    """Return the report's content in reading order. Strings are raw."""
    content = (
        Section("The run in one table", (Table(("what", "value"), tuple(summary_table(context))),)),
        scores_section(context),
        looking_section(context),
        Section("What to trust, and what not", (Bullets(tuple(caveats(context))),)),
        Section("Curation and training", tuple(_training(context))),
        Section("Verdicts of all candidates", tuple(_verdicts(context))),
        Section("Reasoning length: findings", tuple(_findings(context))),
        Section("Reasoning length", tuple(_reasoning(context))),
        Section("Speedups", tuple(_speedups(context))),
        Section("Examples", tuple(_examples(context))),
        published_section(),
        Section("Where it came from", tuple(_provenance(context))),
    )
    return [section for section in content if section.blocks]


def _training(context: ReportContext) -> Iterator[Block]:
    if context.criterion_counts:
        rows = tuple(
            (name, f"{count:,}", share(count, context.curated))
            for name, count in context.criterion_counts.items()
        )
        yield Table(("criterion that took the sample", "samples", "share"), rows)
    if context.trace_flags:
        rows = tuple((name, f"{a:,}", f"{b:,}") for name, (a, b) in context.trace_flags.items())
        yield Table(("flag of a reasoning trace", "correct samples", "of these taken"), rows)
    if context.losses:
        base = f" on {context.base_model}" if context.base_model else ""
        yield Text(
            f"{plural(len(context.history), 'optimiser step')}{base}; mean loss"
            f" {context.losses[0]:.3f} in the first epoch, {context.losses[1]:.3f} in the last."
        )
        yield Picture("training_loss", "Training loss at each optimiser step.")


def _verdicts(context: ReportContext) -> Iterator[Block]:
    place = {status: n for n, (status, _) in enumerate(by_count(context.status_counts))}
    statuses = {reason.value: status.value for reason, status in STATUS_OF.items()}
    rows = [
        (statuses.get(reason, ""), reason, count)
        for reason, count in by_count(context.reason_counts)
    ]
    rows.sort(key=lambda row: (place.get(row[0], len(place)), row[0]))
    if rows:
        yield Table(
            ("status", "reason", "candidates", "share"),
            tuple((s, r, f"{count:,}", share(count, context.candidates)) for s, r, count in rows),
        )


def _findings(context: ReportContext) -> Iterator[Block]:
    if context.findings:
        yield Bullets(context.findings)
    if context.finding_rows:
        yield findings_table(context.finding_rows)
    if context.findings_bounded_by:
        yield Text("Limits of the findings:")
        yield Bullets(context.findings_bounded_by)


def _reasoning(context: ReportContext) -> Iterator[Block]:
    lengths = lengths_by_status(context)
    if not lengths:
        if context.points:
            yield Text("No reasoning lengths: the generator's tokenizer was not given.")
        return
    counted = sum(map(len, lengths.values()))
    yield Picture(
        "reasoning_length",
        "Reasoning length of each candidate by status, in tokens; the bar marks the median.",
    )
    if counted > MAX_POINTS:
        yield Text(
            f"The figure shows {MAX_POINTS:,} of {counted:,} candidates, evenly taken; the table"
            " counts them all."
        )
    rows = []
    for status, values in lengths.items():
        numbers = (len(values), statistics.median(values), min(values), max(values))
        rows.append((status, *(f"{number:,.0f}" for number in numbers)))
    header = ("status", "candidates", "median tokens", "shortest", "longest")
    yield Table(header, tuple(rows))
    if left := len(context.points) - counted:
        yield Text(f"{plural(left, 'candidate')} without a token count left out.")


def _speedups(context: ReportContext) -> Iterator[Block]:
    points = timed(context)
    if not points:
        return
    faster = sum(point.lower is not None and point.lower > 1 for point in points)
    yield Text(
        f"{faster:,} of {plural(len(points), 'correct candidate')} are faster than PyTorch with"
        " 95 % confidence (interval above 1)."
    )
    yield Picture(
        "speedup",
        "Speedup over PyTorch eager of correct candidates with 95 % intervals, fastest first; the"
        " line is 1.",
    )
    if len(points) > MAX_BARS:
        yield Text(
            f"The figure shows {MAX_BARS} of {len(points):,}, evenly taken from the fastest to the"
            " slowest."
        )
    rows = tuple(
        (p.task_name, p.generator, interval(p.speedup, p.lower, p.upper, ".2x"))
        for p in spread(points, MAX_BARS)
    )
    yield Folded("The same as a table", (Table(("task", "generator", "speedup"), rows),))


def _examples(context: ReportContext) -> Iterator[Block]:
    for example in context.examples[:MAX_EXAMPLES]:
        speed = f", {interval(example.speedup, form='.2x')}" if example.speedup else ""
        facts = [f"written by {cut(example.generator, 80)}"] if example.generator else []
        facts += [cut(example.detail, 500)] if example.detail else []
        yield Folded(
            f"{example.status} ({example.reason}{speed}): {cut(example.task_name, 80)}",
            (
                *([Text("; ".join(facts))] if facts else []),
                Code(cut(example.code, EXAMPLE_CHARS)),
            ),
        )


def published_section() -> Section:
    """The paper's main table, folded."""
    table = published_table()
    columns = tuple(dict.fromkeys(column for _, cells in table for column in cells))
    rows = tuple((model, *(cells.get(column, "") for column in columns)) for model, cells in table)
    note = (
        f"For reference only, not measured here and not comparable with the scores above: {PAPER},"
        " KernelBench levels 1 and 2 on an RTX 5090, percent of tasks. (r) marks figures as quoted"
        " by public reviews of the paper. Empty cells are not published."
    )
    folded = Folded("The published table", (Table(("model", *columns), rows),))
    return Section("Published results of others", (Text(note), folded))


def _provenance(context: ReportContext) -> Iterator[Block]:
    machine = {"language": context.language, "device": context.device} | context.hardware
    machine = {name: value for name, value in machine.items() if value != ""}
    tables: tuple[tuple[tuple[str, str], Mapping[str, Any]], ...] = (
        (("snapshot of", "fingerprint"), context.fingerprints),
        (("hardware", "value"), machine),
        (("tool", "version"), context.tool_versions),
    )
    for header, values in tables:
        if values:
            yield Table(header, tuple((str(name), str(value)) for name, value in values.items()))
    if context.config:
        text = json.dumps(context.config, indent=2, default=str)
        yield Folded("Configuration", (Code(text),))
