"""A finding: one number with its interval and its meaning.

Guarantees: an estimate without a value says why. Holds no formula."""

from __future__ import annotations

from collections.abc import Iterable

from kernels_eval.records import Record
from tasks.reporting.parts import Table
from tasks.reporting.text import interval


class Estimate(Record):
    """One number: `lower` and `upper` bound `value` with 95 % confidence by `method`, from `n`
    samples of `tasks` tasks. `why_not` says why `value` is None; bounds alone are None where tasks
    are too few."""

    value: float | None = None
    lower: float | None = None
    upper: float | None = None
    n: int = 0
    tasks: int = 0
    method: str = ""
    why_not: str = ""

    def found(
        self, value: float, lower: float | None = None, upper: float | None = None
    ) -> Estimate:
        return self.model_copy(update={"value": value, "lower": lower, "upper": upper})

    def unknown(self, why_not: str) -> Estimate:
        return self.model_copy(update={"why_not": why_not})

    def shown(self, form: str) -> str:
        if self.value is None:
            return f"n/a: {self.why_not}"
        return interval(self.value, self.lower, self.upper, form)


class Finding(Record):
    """A row of a table of findings. `form` formats the number as in `text.interval`; `key`
    identifies it when runs are compared."""

    key: str
    name: str
    estimate: Estimate
    form: str = ".2f"


def findings_table(rows: Iterable[Finding]) -> Table:
    cells = []
    for row in rows:
        estimate = row.estimate
        counts = [f"{count:,}" if count else "" for count in (estimate.n, estimate.tasks)]
        cells.append((row.name, estimate.shown(row.form), *counts, estimate.method))
    return Table(("finding", "value (95 % interval)", "samples", "tasks", "method"), cells)
