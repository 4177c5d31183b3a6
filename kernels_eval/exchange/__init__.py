"""Other suites' forms of a task, a kernel and a verdict: one module per form. `templates/` has the
programs that are written.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


@cache
def _templates() -> Environment:
    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    return Environment(loader=loader, undefined=StrictUndefined)


def rendered(template: str, **values: object) -> str:
    return _templates().get_template(template).render(values)
