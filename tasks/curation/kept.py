"""The candidates on whose verdicts a choice of training sets rests, which the line confirms."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import polars as pl

from kernels_eval.errors import UsageError
from tasks.curation.config import CurationConfig
from tasks.curation.criteria import SPEEDUP
from tasks.curation.decisions import curate
from tasks.curation.kernels import EqualKernels, with_kernels
from tasks.curation.pool import eligible_samples
from tasks.curation.strategies import strategy_of
from tasks.curation.tables import deciding_of
from tasks.samples import Samples


def kept(
    samples: Samples,
    configs: Iterable[CurationConfig],
    equal: EqualKernels | None,
    verdicts: pl.DataFrame,
) -> set[str]:
    """Ids of all samples that any of the configurations takes by these verdicts (columns
    `tasks.curation.tables.READ`) instead of the samples' own, and of those that are faster than a
    confirmed sample of their task.

    A configuration that refuses the verdicts takes nothing.
    """
    frame, candidates = deciding_of(samples, verdicts), samples.candidates.open()
    ids: set[str] = set()
    for config in configs:
        with suppress(UsageError):
            compared = with_kernels(frame, config, candidates, equal)
            ids.update(curate(compared, config)["candidate_id"])
            ids.update(_faster_than_confirmed(compared, config))
    return ids


def _faster_than_confirmed(frame: pl.DataFrame, config: CurationConfig) -> pl.Series:
    pool = eligible_samples(frame, config)
    if "speed" not in strategy_of(config.strategy).compares or "level" not in frame.columns:
        return pool["candidate_id"].clear()
    pool = pool.with_columns(confirmed=frame["level"].gather(pool["_row"]) == "confirm")
    fastest = SPEEDUP.max().over("task_id") == SPEEDUP
    return pool.filter(fastest, pl.col("confirmed").any().over("task_id"))["candidate_id"]
