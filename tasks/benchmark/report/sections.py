"""The content of a report, once, for all renderers.

Guarantees: reading order; a section without data is left out; what was cut is said. Strings are
raw: escaping happens in the renderers.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from typing import Any

from kernels_eval.records import STATUS_OF
from tasks.benchmark.published import PAPER
from tasks.benchmark.report.caveats import caveats
from tasks.benchmark.report.records import MAX_EXAMPLES, ReportContext
from tasks.benchmark.report.scores import looking_section, scores_section
from tasks.benchmark.report.summary import (
    lengths_by_status,
    published_table,
    ratio,
    summary_table,
    timed,
)
from tasks.reporting.blocks import Block, Bullets, Code, Folded, Picture, Section, Table, Text
from tasks.reporting.text import by_count, cut, plural, share, spread

EXAMPLE_CHARS = 3000
MAX_POINTS = 1500  # of the reasoning figure: 90,000 candidates would make a page of 10 MB
MAX_BARS = 30  # of the speedup figure: more do not fit a screen


def sections(context: ReportContext) -> list[Section]:
    """The report's content in reading order. Strings are raw: escaping is the renderers' work and
    happens there for all of them."""
    found = [
        Section("The run in one table", (Table(("what", "value"), tuple(summary_table(context))),)),
        scores_section(context),
        looking_section(context),
        Section("What to trust, and what not", (Bullets(tuple(caveats(context))),)),
        _training_section(context),
        _verdicts_section(context),
        _findings_section(context),
        _reasoning_section(context),
        _speedup_section(context),
        _examples_section(context),
        published_section(),
        _provenance_section(context),
    ]
    return [section for section in found if section.blocks]


def _training_section(context: ReportContext) -> Section:
    blocks: list[Block] = []
    if context.criterion_counts:
        rows = tuple(
            (name, f"{n:,}", share(n, context.curated))
            for name, n in context.criterion_counts.items()
        )
        blocks.append(Table(("criterion that took the sample", "samples", "share"), rows))
    if context.trace_flags:
        flags = tuple(
            (name, f"{correct:,}", f"{taken:,}")
            for name, (correct, taken) in context.trace_flags.items()
        )
        blocks.append(
            Table(("flag of a reasoning trace", "correct samples", "of these taken"), flags)
        )
    if context.losses:
        base = f" on {context.base_model}" if context.base_model else ""
        blocks.append(
            Text(
                f"{plural(len(context.history), 'optimiser step')}{base}; mean loss"
                f" {context.losses[0]:.3f} in the first epoch, {context.losses[1]:.3f} in the last."
            )
        )
        blocks.append(Picture("training_loss", "Training loss at each optimiser step."))
    return Section("Curation and training", tuple(blocks))


def _verdicts_section(context: ReportContext) -> Section:
    if not context.reason_counts:
        return Section("Verdicts", ())
    status_total = {status: count for status, count in by_count(context.status_counts)}
    order = sorted(
        context.reason_counts.items(),
        key=lambda item: (
            -status_total.get(_status_of(item[0]), 0),
            _status_of(item[0]),
            -item[1],
            item[0],
        ),
    )
    rows = tuple(
        (_status_of(reason), reason, f"{count:,}", share(count, context.candidates))
        for reason, count in order
    )
    return Section(
        "Verdicts of all candidates", (Table(("status", "reason", "candidates", "share"), rows),)
    )


def _status_of(reason: str) -> str:
    return STATUS_OF[reason].value if reason in STATUS_OF else ""


def _findings_section(context: ReportContext) -> Section:
    title = "What reasoning length says"
    bounds = (
        (Text("What bounds it:"), Bullets(context.findings_bounded_by))
        if context.findings_bounded_by
        else ()
    )
    return Section(title, (Bullets(context.findings), *bounds) if context.findings else bounds[1:])


def _reasoning_section(context: ReportContext) -> Section:
    title = "Reasoning length"
    lengths = lengths_by_status(context)
    if not lengths:
        return Section(
            title,
            (
                (Text("No reasoning lengths: the generator's tokenizer was not given."),)
                if context.points
                else ()
            ),
        )
    rows = tuple(
        (
            status,
            f"{len(values):,}",
            f"{statistics.median(values):,.0f}",
            f"{min(values):,}",
            f"{max(values):,}",
        )
        for status, values in lengths.items()
    )
    counted = sum(map(len, lengths.values()))
    blocks: list[Block] = [
        Picture(
            "reasoning_length",
            "Reasoning length of each candidate by status, in tokens; the bar marks the median.",
        ),
        Table(("status", "candidates", "median tokens", "shortest", "longest"), rows),
    ]
    if counted > MAX_POINTS:
        blocks.insert(
            1,
            Text(
                f"The figure shows {MAX_POINTS:,} of {counted:,} candidates, evenly taken; the"
                " table counts them all."
            ),
        )
    if counted < len(context.points):
        blocks.append(
            Text(
                f"{plural(len(context.points) - counted, 'candidate')} without a token count left"
                " out."
            )
        )
    return Section(title, tuple(blocks))


def _speedup_section(context: ReportContext) -> Section:
    points = timed(context)
    if not points:
        return Section("Speedups", ())
    faster = sum(point.lower is not None and point.lower > 1 for point in points)
    blocks: list[Block] = [
        Text(
            f"{faster:,} of {plural(len(points), 'correct candidate')} are faster than PyTorch with"
            " 95 % confidence (interval above 1)."
        ),
        Picture(
            "speedup",
            "Speedup over PyTorch eager of correct candidates with 95 % intervals, fastest first;"
            " the line is 1.",
        ),
    ]
    if len(points) > MAX_BARS:
        blocks.append(
            Text(
                f"The figure shows {MAX_BARS} of {len(points):,}, evenly taken from the fastest to"
                " the slowest."
            )
        )
    rows = tuple(
        (point.task_name, point.generator, ratio(point.speedup, point.lower, point.upper))
        for point in spread(points, MAX_BARS)
    )
    blocks.append(Folded("The same as a table", (Table(("task", "generator", "speedup"), rows),)))
    return Section("Speedups", tuple(blocks))


def _examples_section(context: ReportContext) -> Section:
    folded = []
    for example in context.examples[:MAX_EXAMPLES]:
        speed = f", {ratio(example.speedup)}" if example.speedup else ""
        title = f"{example.status} ({example.reason}{speed}): {cut(example.task_name, 80)}"
        facts = [f"written by {cut(example.generator, 80)}"] if example.generator else []
        blocks: list[Text | Table | Code] = [
            Text("; ".join([*facts, cut(example.detail, 500)] if example.detail else facts))
        ]
        folded.append(
            Folded(
                title,
                (
                    *[block for block in blocks if block != Text("")],
                    Code(cut(example.code, EXAMPLE_CHARS)),
                ),
            )
        )
    return Section("Examples", tuple(folded))


def published_section() -> Section:
    table = published_table()
    columns = tuple(dict.fromkeys(column for _, cells in table for column in cells))
    rows = tuple((model, *(cells.get(column, "") for column in columns)) for model, cells in table)
    note = (
        f"For reference only, not measured here and not comparable with the scores above: {PAPER},"
        " KernelBench levels 1 and 2 on an RTX 5090, percent of tasks. (r) marks figures as quoted"
        " by public reviews of the paper. Empty cells are not published."
    )
    return Section(
        "Published results of others",
        (Text(note), Folded("The published table", (Table(("model", *columns), rows),))),
    )


def _provenance_section(context: ReportContext) -> Section:
    def table(header: tuple[str, str], values: Mapping[str, Any]) -> list[Block]:
        return (
            [Table(header, tuple((str(name), str(value)) for name, value in values.items()))]
            if values
            else []
        )

    blocks = table(("snapshot of", "fingerprint"), context.fingerprints)
    machine = {"language": context.language, "device": context.device} | context.hardware
    blocks += table(
        ("hardware", "value"), {name: value for name, value in machine.items() if value != ""}
    )
    blocks += table(("tool", "version"), context.tool_versions)
    if context.config:
        blocks.append(
            Folded("Configuration", (Code(json.dumps(context.config, indent=2, default=str)),))
        )
    return Section("Where it came from", tuple(blocks))
