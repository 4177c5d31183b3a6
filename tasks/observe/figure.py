"""The figure of accuracy by reasoning length, drawn from the observations.

Guarantees: what `charts` guarantees; how many samples are drawn is said under it.
"""

from __future__ import annotations

import numpy as np

from kernels_eval.records import Json
from tasks.observe.observations import Observations
from tasks.reporting.charts import (
    FIRST,
    SIZE_INCHES,
    Drawn,
    caption,
    labelled,
    new_figure,
    style,
)
from tasks.reporting.text import interval

FULL_BIN = 20
"""Fewest samples of a full bin: below, its interval would cover half of the figure."""


@style()
def accuracy_figure(found: Observations) -> Drawn:
    """The paper's figure 2: the share correct by reasoning length, with Wilson's intervals."""
    figure, (axes,) = new_figure(*SIZE_INCHES)
    labelled(axes, "reasoning length (tokens)", "share correct")
    full = [row for row in found.bins if row["samples"] >= FULL_BIN]
    few = [row for row in found.bins if row["samples"] < FULL_BIN]
    known = [(row["accuracy"], row["lower"], row["upper"]) for row in full]
    values, lower, upper = np.array(known, dtype=float).reshape(-1, 3).T
    reach = np.stack([values - lower, upper - values])
    middles = [_middle(row) for row in full]
    axes.errorbar(middles, values, reach, fmt="o-", capsize=3, markersize=4, color=FIRST)
    accuracies = [row["accuracy"] for row in few]
    axes.plot([_middle(row) for row in few], accuracies, "o", color=FIRST, alpha=0.3, markersize=3)
    axes.set_ylim(0, 1)
    axes.set_xlim(left=0)
    caption(
        figure,
        f"n {found.samples:,} samples of {found.tasks:,} tasks, {found.correct:,} correct."
        f" Bars: 95 % Wilson intervals; pale: bins of fewer than {FULL_BIN} samples.",
    )
    shares = [
        f"from {row['from_tokens']:,} tokens {interval(row['accuracy'], form='.0%')}"
        for row in full
    ]
    description = "Share correct against reasoning length, with 95 % Wilson intervals"
    return Drawn("accuracy-by-length", figure, f"{description}: {'; '.join(shares) or 'few'}.")


def _middle(row: Json) -> float:
    return float(row["from_tokens"] + (row["to_tokens"] or row["from_tokens"])) / 2
