"""Verified answers of several models on held-out tasks in, scores with intervals out.

Guarantees: the same answers, configuration and scoring code give the same snapshot; how scores are
shown plays no part. Does not look at how the answers came about.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from kernels_eval.records import Json, Record
from tasks.benchmark.config import BenchmarkConfig
from tasks.benchmark.samples import (
    Baseline,
    baselines_of,
    excluded_tasks,
    remarks,
    unknown_lengths,
    within_tokens,
)
from tasks.benchmark.scoring import ScoreRow, score
from tasks.store import Snapshot, SnapshotRef
from tasks.tables import SCORES
from tasks.versions import SCORING_VERSION

STAGE = "benchmark"
READ = """candidate_id task_id status reason outputs_match timing device correctness custom_kernels
    custom_kernel_time_share library_calls detail log_tail""".split()


class Answers(Record):
    """What one model answered on the suite, verified."""

    model: str
    candidates: SnapshotRef
    verdicts: SnapshotRef


def answers_frame(answers: list[Answers]) -> pl.DataFrame:
    """One row per verdict with its model and the tokens of its answer: what scoring and diagnosis
    read."""
    lengths = ["candidate_id", "completion_tokens"]
    frames = [
        a.verdicts.open()
        .read(columns=READ, unique="candidate_id")
        .with_columns(model=pl.lit(a.model))
        .join(
            a.candidates.open().read(columns=lengths, unique="candidate_id"),
            on="candidate_id",
            how="left",
            maintain_order="left",
        )
        for a in answers
    ]
    frame = pl.concat(frames, how="diagonal_relaxed")
    if lengths[1] in frame.columns:
        return frame
    return frame.with_columns(completion_tokens=pl.lit(None, pl.Int64))  # as tables may come


def planned(answers: list[Answers], config: BenchmarkConfig) -> Snapshot:
    """The snapshot that `run` with the same arguments fills."""
    key = [config.model_dump(mode="json"), [a.model for a in answers]]
    return Snapshot.planned(STAGE, key, (a.verdicts for a in answers), SCORING_VERSION)


def run(answers: list[Answers], config: BenchmarkConfig) -> SnapshotRef:
    """A finished snapshot of scores, one row per model, track, metric and k, and where verdicts
    have times against the compiled reference, per baseline; all of that again for each token limit.

    Its manifest has `remarks` (`samples.remarks`) and the `excluded_tasks`.
    """
    snapshot = planned(answers, config)
    if not snapshot.finished:
        frame = answers_frame(answers)
        rows = [
            row
            for limit in (None, *config.token_limits)
            for baseline in baselines_of(frame)
            for row in _scored(frame, baseline, limit, config)
        ]
        snapshot.append([row.model_dump() for row in rows] if not snapshot.parts() else [], SCORES)
        snapshot.publish(
            config=config,
            rows=len(rows),
            extra={"remarks": remarks(frame), "excluded_tasks": excluded_tasks(frame)},
        )
    return snapshot.ref


def _scored(
    frame: pl.DataFrame, baseline: Baseline, limit: int | None, config: BenchmarkConfig
) -> list[ScoreRow]:
    asked: Json = {"ks": config.ks, "ps": config.ps, "resamples": config.resamples}
    if limit is None:
        return score(frame, baseline=baseline, **asked)
    unknown, found = unknown_lengths(frame), []
    for row in score(within_tokens(frame, limit), baseline=baseline, **asked):
        change: Json = {"token_limit": limit}
        if row.model in unknown:
            change |= dict.fromkeys(("value", "lower", "upper", "interval"))
            change["why_not"] = f"{unknown[row.model]:,} of its right answers have no token count"
        found.append(row.model_copy(update=change))
    return found


def scores_of(
    ref: SnapshotRef, baseline: Baseline = "eager", limits: Sequence[int | None] = (None,)
) -> list[ScoreRow]:
    """The scores against one baseline with these token limits (None: answers as they are). Tables
    from before there were several are all against eager PyTorch."""
    rows = [
        {name: value for name, value in row.items() if (name, value) != ("baseline", None)}
        for row in ref.open().read().to_dicts()
    ]
    known = map(ScoreRow.model_validate, rows)
    return [row for row in known if row.baseline == baseline and row.token_limit in limits]
