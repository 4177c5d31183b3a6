"""The observations as a directory: report.md, analysis.json and the figure. Names from the data are
escaped."""

from __future__ import annotations

import os
from pathlib import Path

from tasks.files import explain_write_errors
from tasks.observe.figure import accuracy_figure
from tasks.observe.observations import Observations
from tasks.reporting.charts import Drawn, save
from tasks.reporting.findings import findings_table
from tasks.reporting.page import write_page
from tasks.reporting.parts import Bullets, Picture, Section, fields_table
from tasks.reporting.text import plural

REPORT, DATA = "report.md", "analysis.json"
THIRDS = (
    *("third", "from_arl", "to_arl", "tasks", "samples"),
    *("exec", "exec_lower", "exec_upper", "speedup", "speedup_lower", "speedup_upper"),
)
BINS = ("from_tokens", "to_tokens", "samples", "correct", "accuracy", "lower", "upper")


def write(found: Observations, directory: str | os.PathLike[str]) -> Path:
    """Write the report, its data and its figure; return the report's path. Raises UsageError where
    the directory cannot be written."""
    out = Path(directory)
    drawn = accuracy_figure(found)
    with explain_write_errors(out, "choose another directory with --out DIR"):
        out.mkdir(parents=True, exist_ok=True)
        save(drawn, out)
        (out / DATA).write_text(found.model_dump_json(indent=1) + "\n", encoding="utf-8")
        (out / REPORT).write_text(report(found, drawn), encoding="utf-8")
    return out / REPORT


def report(found: Observations, drawn: Drawn) -> str:
    figure = Picture(drawn.name, drawn.alt, f"{drawn.name}.svg")
    return write_page(
        "md",
        title="Reasoning length: what these samples show",
        facts=(f"{found.samples:,} samples of {plural(found.tasks, 'task')}", *found.generators),
        sentence="Lengths are tokens of the generator's own tokenizer",
        sections=[
            Section("Findings", (Bullets(found.finding), findings_table(found.findings))),
            Section("What bounds this", (Bullets(found.cautions), figure)),
            Section("Thirds of the tasks by ARL", (fields_table(found.thirds, *THIRDS),)),
            Section("Accuracy by reasoning length", (fields_table(found.bins, *BINS),)),
        ],
    )
