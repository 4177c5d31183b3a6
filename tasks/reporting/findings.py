"""A finding: one number with its interval, what it says of a claim, and a note.

Guarantees: an estimate without a value says why. Holds no formula.
"""

from __future__ import annotations

from collections.abc import Iterable

from kernels_eval.records import Record
from tasks.reporting.page import Table
from tasks.reporting.text import interval, p_value


class Estimate(Record):
    """One number: `lower` and `upper` bound `value` with 95 % confidence by `method`.

    `p` tests no effect, two-sided; `n` samples of `tasks` tasks went in. Where `value` is None,
    `why_not` says why; where only the bounds are, the tasks were too few.
    """

    value: float | None = None
    lower: float | None = None
    upper: float | None = None
    p: float | None = None
    n: int = 0
    tasks: int = 0
    method: str = ""
    why_not: str = ""

    @property
    def bounded(self) -> bool:
        return self.lower is not None and self.upper is not None

    def side(self, none: float) -> int | None:
        """-1 or 1 where the interval lies below or above "no effect", 0 where it holds it."""
        if self.lower is None or self.upper is None:
            return None
        return -1 if self.upper < none else 1 if self.lower > none else 0

    def shown(self, form: str) -> str:
        """The value with its interval, or why there is none."""
        if self.value is None:
            return f"n/a: {self.why_not}"
        return interval(self.value, self.lower, self.upper, form)


class Finding(Record):
    """A row of a table of findings. `form` is how `text.interval` shows the numbers.

    `key` names the number for machines, where runs are compared by it. `verdict`, of a claim that
    `name` states: "supported", "contradicted" or "not robust"; empty for a number.
    """

    name: str
    estimate: Estimate = Estimate()
    form: str = ".2f"
    verdict: str = ""
    note: str = ""
    key: str = ""


def findings_table(rows: Iterable[Finding]) -> Table:
    """The findings as a table, one per row."""
    header = (
        *("finding", "value (95 % interval)", "verdict", "p", "samples", "tasks", "method", "note"),
    )
    cells = []
    for row in rows:
        found = row.estimate
        known = found.value is not None or bool(found.why_not)
        counts = [f"{count:,}" if count else "" for count in (found.n, found.tasks)]
        cells.append(
            (
                *(row.name, found.shown(row.form) if known else "", row.verdict),
                *(p_value(found.p), *counts, found.method, row.note),
            )
        )
    return Table(header, tuple(cells))
