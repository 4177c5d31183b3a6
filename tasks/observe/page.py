"""The observations as a directory: report.md, analysis.json and the figure. Names from the data are
escaped."""

from __future__ import annotations

import os
from pathlib import Path

from markupsafe import Markup

from tasks.files import explain_write_errors
from tasks.observe.figure import accuracy_figure
from tasks.observe.observations import Observations
from tasks.reporting.charts import Drawn, save
from tasks.reporting.findings import findings_table
from tasks.reporting.page import block_markdown, rendered

REPORT, DATA = "report.md", "analysis.json"
TEMPLATE = Path(__file__).parent / "templates" / "report.md.j2"


def write(found: Observations, directory: str | os.PathLike[str]) -> Path:
    """Write the report, its data and its figure; return the report's path. Raises UsageError where
    the directory cannot be written."""
    out = Path(directory)
    drawn = accuracy_figure(found)
    with explain_write_errors(out, "choose another directory with --out DIR"):
        out.mkdir(parents=True, exist_ok=True)
        save(drawn, out)
        (out / DATA).write_text(found.model_dump_json(indent=1) + "\n", encoding="utf-8")
        (out / REPORT).write_text(markdown(found, drawn), encoding="utf-8")
    return out / REPORT


def markdown(found: Observations, drawn: Drawn) -> str:
    findings = Markup(block_markdown(findings_table(found.findings)))
    return rendered(TEMPLATE, found=found, findings=findings, drawn=drawn)
