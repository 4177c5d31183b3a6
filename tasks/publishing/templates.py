"""Markdown pages from the templates beside this file."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tasks.reporting.text import cell, fenced


def render(template: str, **facts: object) -> str:
    """Fill a template, in which `cell` and `fenced` make text of others harmless."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"cell": cell, "fenced": fenced, "number": "{:,}".format}
    return environment.get_template(template).render(facts)
