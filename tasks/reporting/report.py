"""The page a person reads first, and the same content as markdown and JSON.

Guarantees: one HTML file that loads nothing (inline CSS, figures as data URIs) and runs no script,
readable in light and dark; everything that came from a task or a candidate is escaped in every
format, control characters shown instead of obeyed; the size is bounded (the figures and the quoted
code are cut, and say so); the same context gives the same bytes. Does not guarantee that the
numbers are right: they are whatever the context was filled with. Reads no snapshot itself.
"""

from tasks.reporting.drawing import figures
from tasks.reporting.machine import to_json
from tasks.reporting.markdown import to_markdown
from tasks.reporting.numbers import headline, published_table, summary_table
from tasks.reporting.page import build_report
from tasks.reporting.records import (
    CandidatePoint,
    Example,
    ReportContext,
    TrainingStep,
    examples_of,
    points_of,
)
from tasks.reporting.text import clean

__all__ = [
    "CandidatePoint",
    "Example",
    "ReportContext",
    "TrainingStep",
    "build_report",
    "clean",
    "examples_of",
    "figures",
    "headline",
    "points_of",
    "published_table",
    "summary_table",
    "to_json",
    "to_markdown",
]
