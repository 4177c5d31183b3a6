"""A run's report as HTML, Markdown, JSON and terminal summary.

Guarantees: files are atomic and bounded (cuts are marked); HTML is self-contained and runs no
script; text of tasks and candidates is escaped in every format.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

from kernels_eval.records import Record
from tasks.benchmark.report.content import cautions, headline, sections, summary_table
from tasks.benchmark.report.context import ReportContext
from tasks.benchmark.report.figures import figures
from tasks.files import atomic_write
from tasks.reporting.page import Form, write_page
from tasks.reporting.text import moment

P = ParamSpec("P")

FILES = ("report.html", "report.md", "report.json")
MADE_OF = "made_of.txt"


class Report(Record):
    """A report's place and summary."""

    directory: str
    files: tuple[str, ...]
    markdown: str
    summary: tuple[tuple[str, str], ...]


def write_once(
    directory: Path,
    made_of: str,
    fill: Callable[P, ReportContext],
    *args: P.args,
    **kwargs: P.kwargs,
) -> Report:
    """Write the report that `fill` describes, unless the existing one is `made_of` the same; return
    it."""
    marker = directory / MADE_OF  # written last: then the others are whole
    if not marker.exists() or marker.read_text(encoding="utf-8") != made_of:
        context = fill(*args, **kwargs)
        texts = {
            FILES[0]: build_report(context),
            FILES[1]: to_markdown(context),
            FILES[2]: to_json(context),
            MADE_OF: made_of,
        }
        for name, text in texts.items():
            atomic_write(directory / name, text)
    return Report(
        directory=str(directory),
        files=tuple(str(directory / name) for name in FILES),
        markdown=(directory / FILES[1]).read_text(encoding="utf-8"),
        summary=tuple(read_summary(str(directory))),
    )


def read_summary(directory: str) -> list[tuple[str, str]]:
    data = json.loads((Path(directory) / FILES[2]).read_text(encoding="utf-8"))
    return [(row["what"], row["value"]) for row in data["summary"]]


def build_report(context: ReportContext) -> str:
    return _page(context, "html", figures(context))


def to_markdown(context: ReportContext) -> str:
    """The report as Markdown; figures are only named."""
    return _page(context, "md", {})


def to_json(context: ReportContext) -> str:
    """The report as one JSON object (ASCII; non-finite numbers are null)."""
    data = {
        "headline": headline(context),
        "summary": [{"what": name, "value": value} for name, value in summary_table(context)],
        "cautions": list(cautions(context)),
        **json.loads(context.model_dump_json()),
    }
    return json.dumps(data, indent=2, allow_nan=False)


def _page(context: ReportContext, form: Form, drawn: dict[str, str]) -> str:
    return write_page(
        form,
        title=f"concur: {context.run_name}",
        facts=(context.language, context.device, moment(context.created_at)),
        sentence=headline(context),
        sections=sections(context),
        drawn=drawn,
    )
