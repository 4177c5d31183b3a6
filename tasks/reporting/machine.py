"""The report as one JSON object, for a machine."""

from __future__ import annotations

import json

from tasks.reporting.caveats import caveats
from tasks.reporting.numbers import headline, published_table, summary_table
from tasks.reporting.records import ReportContext


def to_json(context: ReportContext) -> str:
    """The same content as one JSON object (ASCII; a number that is not finite is null)."""
    content = {
        "headline": headline(context),
        "summary": [{"what": name, "value": value} for name, value in summary_table(context)],
        "caveats": list(caveats(context)),
        **json.loads(context.model_dump_json()),
        "published": [{"model": model} | cells for model, cells in published_table()],
    }
    return json.dumps(content, indent=2, allow_nan=False)
