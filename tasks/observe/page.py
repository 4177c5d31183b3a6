"""The observations as a directory: report.md (observations, numbers, figures, tables, and what
bounds them), analysis.json, figures.

Guarantees: everything in the page is in the JSON too; the same record gives the same bytes; names
from the data are shown as text.
"""

from __future__ import annotations

import os
from pathlib import Path

from markupsafe import Markup

from tasks.files import explain_write_errors
from tasks.observe.figures import all_figures
from tasks.observe.observations import Observations
from tasks.reporting.charts import save
from tasks.reporting.findings import findings_table
from tasks.reporting.page import block_markdown, rendered

REPORT, DATA = "report.md", "analysis.json"
TEMPLATE = Path(__file__).parent / "templates" / "report.md.j2"


def write(found: Observations, directory: str | os.PathLike[str]) -> Path:
    """Write the report, its data and its figures; return the report's path.

    Raises UsageError where the directory cannot be written.
    """
    out = Path(directory)
    figures = all_figures(found)
    pictures = {drawn.name: drawn.alt for drawn in figures}
    with explain_write_errors(out, "choose another directory with --out DIR"):
        out.mkdir(parents=True, exist_ok=True)
        for drawn in figures:
            save(drawn, out)
        (out / DATA).write_text(found.model_dump_json(indent=1) + "\n", encoding="utf-8")
        (out / REPORT).write_text(markdown(found, pictures), encoding="utf-8")
    return out / REPORT


def markdown(found: Observations, pictures: dict[str, str]) -> str:
    """Return the page, with these figures: the names of their files and what they show."""
    findings = Markup(block_markdown(findings_table(found.findings)))
    return rendered(TEMPLATE, found=found, findings=findings, pictures=pictures)
