"""Models' verified answers on held-out tasks in, scores with intervals out."""

from __future__ import annotations

import polars as pl

from kernels_eval.records import Record
from tasks.benchmark.config import PS, BenchmarkConfig
from tasks.benchmark.remarks import remarks, unknown_lengths, within_tokens
from tasks.scores import TRACKS, Baseline, baselines_of, excluded_tasks, scores
from tasks.store import Snapshot, SnapshotRef
from tasks.tables import SCORES
from tasks.versions import SCORING_VERSION

STAGE = "benchmark"
READ = """candidate_id task_id status reason outputs_match timing device
    custom_kernel_time_share library_calls detail log_tail""".split()


class Answers(Record):
    """A model's verified answers on the suite."""

    model: str
    candidates: SnapshotRef
    verdicts: SnapshotRef


def answers_frame(answers: list[Answers]) -> pl.DataFrame:
    """One row per verdict with model and answer tokens, for scoring and the report."""
    lengths = ["candidate_id", "completion_tokens"]
    frames = []
    for each in answers:
        verdicts = each.verdicts.open().read(columns=READ, unique="candidate_id")
        tokens = each.candidates.open().read(columns=lengths, unique="candidate_id")
        joined = verdicts.join(tokens, on="candidate_id", how="left", maintain_order="left")
        frames.append(joined.with_columns(model=pl.lit(each.model)))
    frame = pl.concat(frames, how="diagonal_relaxed")
    if lengths[1] in frame.columns:
        return frame
    return frame.with_columns(completion_tokens=pl.lit(None, pl.Int64))


def planned(answers: list[Answers], config: BenchmarkConfig) -> Snapshot:
    """The snapshot that `run` fills."""
    key = [config.model_dump(mode="json"), [a.model for a in answers]]
    return Snapshot.planned(STAGE, key, (a.verdicts for a in answers), SCORING_VERSION)


def run(answers: list[Answers], config: BenchmarkConfig) -> SnapshotRef:
    """A finished snapshot of `all_scores`; its manifest has `remarks` and `excluded_tasks`."""
    snapshot = planned(answers, config)
    if not snapshot.finished:
        frame = answers_frame(answers)
        rows = all_scores(frame, config)
        snapshot.append([] if snapshot.parts() else rows.to_dicts(), SCORES)
        extra = {"remarks": remarks(frame), "excluded_tasks": excluded_tasks(frame)}
        snapshot.publish(config=config, rows=rows.height, extra=extra)
    return snapshot.ref


def all_scores(frame: pl.DataFrame, config: BenchmarkConfig) -> pl.DataFrame:
    """`tasks.scores.scores` for both tracks and timed baselines, unlimited (`token_limit` null) and
    under each token limit."""
    parts = []
    for limit in (None, *config.token_limits):
        part = frame if limit is None else within_tokens(frame, limit)
        for baseline in baselines_of(frame):
            for track in TRACKS:
                rows = scores(
                    part,
                    ks=config.ks,
                    ps=PS,
                    track=track,
                    baseline=baseline,
                )
                parts.append(rows.with_columns(token_limit=pl.lit(limit, pl.Int64)))
    rows = pl.concat(parts)
    if not config.token_limits:
        return rows
    return _without_unknown_lengths(rows, unknown_lengths(frame))


def _without_unknown_lengths(rows: pl.DataFrame, unknown: dict[str, int]) -> pl.DataFrame:
    """Under a limit, models with right answers of unknown length have no value."""
    count = pl.col("model").replace_strict(unknown, default=None, return_dtype=pl.Int64)
    cut = pl.col("token_limit").is_not_null() & count.is_not_null()
    why = pl.format("{} of its right answers have no token count", count)
    return rows.with_columns(
        *(pl.when(~cut).then(name).alias(name) for name in ("value", "lower", "upper")),
        pl.when(cut).then(why).otherwise("why_not").alias("why_not"),
    )


def scores_of(
    ref: SnapshotRef, baseline: Baseline = "eager", limit: int | None = None
) -> pl.DataFrame:
    """Scores against one baseline under one token limit (None: unlimited)."""
    rows = ref.open().read()
    return rows.filter(baseline=baseline).filter(pl.col("token_limit").eq_missing(limit))
