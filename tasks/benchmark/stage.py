"""Models' verified answers on held-out tasks in, scores with intervals out."""

from __future__ import annotations

import polars as pl

from kernels_eval.records import Record
from tasks.benchmark.config import PS, BenchmarkConfig
from tasks.benchmark.remarks import remarks
from tasks.scores import TRACKS, Baseline, baselines_of, excluded_tasks, scores, without_fig_leaves
from tasks.store import Snapshot, SnapshotRef
from tasks.tables import SCORES
from tasks.versions import SCORING_VERSION

STAGE = "benchmark"
READ = """candidate_id task_id status level reason outputs_match timing device
    custom_kernel_time_share library_calls detail log_tail""".split()


class Answers(Record):
    """A model's verified answers on the suite."""

    model: str
    candidates: SnapshotRef
    verdicts: SnapshotRef


def answers_frame(answers: list[Answers], min_kernel_share: float | None = None) -> pl.DataFrame:
    frames = [
        each.verdicts.open()
        .read(columns=READ, unique="candidate_id")
        .with_columns(model=pl.lit(each.model))
        for each in answers
    ]
    return without_fig_leaves(pl.concat(frames, how="diagonal_relaxed"), min_kernel_share)


def planned(answers: list[Answers], config: BenchmarkConfig) -> Snapshot:
    key = [config.model_dump(mode="json"), [a.model for a in answers]]
    return Snapshot.planned(STAGE, key, (a.verdicts for a in answers), SCORING_VERSION)


def run(answers: list[Answers], config: BenchmarkConfig) -> SnapshotRef:
    """A finished snapshot of `all_scores`; its manifest has `remarks` and `excluded_tasks`."""
    snapshot = planned(answers, config)
    if not snapshot.finished:
        frame = answers_frame(answers, config.min_kernel_share)
        rows = all_scores(frame, config)
        snapshot.append([] if snapshot.parts() else rows.to_dicts(), SCORES)
        extra = {"remarks": remarks(frame), "excluded_tasks": excluded_tasks(frame)}
        snapshot.publish(config=config, rows=rows.height, extra=extra)
    return snapshot.ref


def all_scores(frame: pl.DataFrame, config: BenchmarkConfig) -> pl.DataFrame:
    return pl.concat(
        scores(frame, ks=config.ks, ps=PS, track=track, baseline=baseline)
        for baseline in baselines_of(frame)
        for track in TRACKS
    )


def scores_of(ref: SnapshotRef, baseline: Baseline = "eager") -> pl.DataFrame:
    return ref.open().read().filter(baseline=baseline)
