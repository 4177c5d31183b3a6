"""The page a person reads first, and the same content as Markdown and JSON.

Guarantees: one HTML file that loads nothing (inline CSS, figures as data URIs) and runs no script,
readable in light and dark; everything that came from a task or a candidate is escaped in every
format, control characters shown instead of obeyed; the size is bounded (the figures and the quoted
code are cut, and say so); the same context gives the same bytes. Does not guarantee that the
numbers are right: they are whatever the context was filled with. Reads no snapshot itself.
"""

from __future__ import annotations

import json

from tasks.benchmark.report.caveats import caveats
from tasks.benchmark.report.figures import figures
from tasks.benchmark.report.records import ReportContext
from tasks.benchmark.report.sections import sections
from tasks.benchmark.report.summary import headline, published_table, summary_table
from tasks.reporting.page import markdown_of, page_of


def build_report(context: ReportContext) -> str:
    """Return the report as one self-contained HTML page."""
    return page_of(*_head(context), sections(context), figures(context))


def to_markdown(context: ReportContext) -> str:
    """Return the same content as Markdown; figures are named, not drawn."""
    return markdown_of(*_head(context), sections(context))


def to_json(context: ReportContext) -> str:
    """Return the same content as one JSON object (ASCII; a number that is not finite is null)."""
    content = {
        "headline": headline(context),
        "summary": [{"what": name, "value": value} for name, value in summary_table(context)],
        "caveats": list(caveats(context)),
        **json.loads(context.model_dump_json()),
        "published": [{"model": model} | cells for model, cells in published_table()],
    }
    return json.dumps(content, indent=2, allow_nan=False)


def _head(context: ReportContext) -> tuple[str, tuple[str, ...], str]:
    facts = (context.language, context.device, context.created_at)
    return f"concur: {context.run_name}", facts, headline(context)
