"""Markdown pages from the templates beside this file."""

from __future__ import annotations

from pathlib import Path

from tasks.reporting.templates import environment
from tasks.reporting.text import cell, fenced


def render(template: str, **facts: object) -> str:
    """Fill a template, in which `cell` and `fenced` make text of others harmless."""
    filters = {"cell": cell, "fenced": fenced, "number": "{:,}".format}
    return environment(Path(__file__).parent, filters=filters).get_template(template).render(facts)
