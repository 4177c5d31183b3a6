"""The analysis as a directory: report.md (the findings first, then figures, tables, and what
bounds them), analysis.json, figures.

Guarantees: everything in the page is in the JSON too; the same records give the same bytes; names
from the data are shown as text. Does not guarantee anything about the numbers: they are the
records'.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from kernels_eval.records import Json
from tasks.analysis.figures import all_figures
from tasks.analysis.findings import SENSITIVITY
from tasks.analysis.records import Difficulty, Observations
from tasks.analysis.verdict import ADEQUATE_TASKS
from tasks.files import explain_write_errors
from tasks.reporting.charts import Drawn, save
from tasks.reporting.findings import Finding, findings_table
from tasks.reporting.page import block_markdown, rendered

REPORT, DATA, SCHEMA_VERSION = "report.md", "analysis.json", 2
TEMPLATE = Path(__file__).parent / "templates" / "report.md.j2"


def as_json(observations: Observations, difficulty: Difficulty) -> Json:
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
    with explain_write_errors(out, "choose another directory with --out DIR"):
        out.mkdir(parents=True, exist_ok=True)
        for drawn in figures:
            save(drawn, out)
        (out / DATA).write_text(f"{data}\n", encoding="utf-8")
        (out / REPORT).write_text(markdown(observations, difficulty, figures), encoding="utf-8")
    return out / REPORT


def markdown(
    observations: Observations, difficulty: Difficulty, figures: Sequence[Drawn] = ()
) -> str:
    """Return the page. It shows the figures that are given, by the names of their files."""
    return rendered(
        TEMPLATE,
        observations=observations,
        difficulty=difficulty,
        adequate=ADEQUATE_TASKS,
        pictures={drawn.name: drawn.alt for drawn in figures},
        findings=findings_markdown,
    )


def findings_markdown(rows: Sequence[Finding]) -> Markup:
    """Return the findings as a Markdown table, without the rows that have a table of their own."""
    shown = [row for row in rows if not row.key.startswith(SENSITIVITY)]
    return Markup(block_markdown(findings_table(shown)))
