"""What a least share of the time in own kernels (`min_kernel_share`) would leave out of a set."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import polars as pl

from kernels_eval.records import Record
from tasks.reporting.parts import Cell
from tasks.reporting.text import interval, number
from tasks.scores import SHARE_COLUMN

LEAST = (0.01, 0.1, 0.5)


class LeftOut(Record):
    """What goes with a threshold. `unknown` samples, whose share was not measured, go with every
    one; `speedup_share` is theirs of the sum of all speedups; `rest` is the geometric mean of what
    stays, None where nothing was timed."""

    min_kernel_share: float
    samples: int
    unknown: int
    of_samples: float
    speedup_share: float | None
    rest: float | None


def left_out(rows: pl.DataFrame) -> list[LeftOut]:
    """By each of LEAST, of a set's samples with `speedup` (null or 0: not timed) and, where it was
    measured, SHARE_COLUMN."""
    share = rows[SHARE_COLUMN] if SHARE_COLUMN in rows.columns else pl.Series([None] * rows.height)
    share = share.cast(pl.Float64)
    speedup = rows["speedup"].cast(pl.Float64).fill_null(0.0)
    total, found = float(speedup.sum()), []
    for least in LEAST:
        goes = share.fill_null(0.0) < least
        rest = speedup.filter(~goes & (speedup > 0))
        found.append(
            LeftOut(
                min_kernel_share=least,
                samples=int(goes.sum()),
                unknown=share.null_count(),
                of_samples=goes.sum() / max(1, rows.height),
                speedup_share=float(speedup.filter(goes).sum()) / total if total else None,
                rest=math.exp(rest.log().sum() / len(rest)) if len(rest) else None,
            )
        )
    return found


LEFT_OUT_COLUMNS: Mapping[str, Callable[[LeftOut], Cell]] = {
    "least share of the time in own kernels": lambda each: f"{each.min_kernel_share:g}",
    "samples that would go": lambda each: f"{each.samples:,} ({each.of_samples:.1%})",
    "of unknown share": lambda each: f"{each.unknown:,}",
    "of the sum of speedups": lambda each: number(each.speedup_share, ".1%"),
    "geometric mean speedup of the rest": lambda each: interval(each.rest, form=".2x"),
}
