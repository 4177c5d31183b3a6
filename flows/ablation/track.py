"""Writes an ablation to MLflow, from its snapshots, with equal metric names in all branches.
Failures are logged; the next call writes the rest."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from flows.ablation.plan import Plan
from flows.config import PipelineConfig
from flows.naming import typed_name
from flows.track import (
    adapter_record,
    dataset_of,
    destination_of,
    tags_of,
)
from kernels_eval.records import Json, stable_hash
from tasks.benchmark.comparison.records import Branch
from tasks.benchmark.shown import OWN_TRACK, metrics_of
from tasks.benchmark.stage import scores_of
from tasks.store import SnapshotRef
from tasks.tracking.connection import try_mlflow
from tasks.tracking.mlflow_sink import AblationSink
from tasks.tracking.records import Metrics, RunRecord, Series, StageRecord
from tasks.tracking.stages import times_of, training_headline, training_record
from tasks.tracking.writing import NOTE_TAG

CURVE = "exec_at_1_over_size"
"""Exec at pass@1; its step is the number of rows trained on."""
SCORE_COLUMNS = ("track", "metric", "k", "value", "lower", "upper", "tasks", "samples", "why_not")
T = TypeVar("T")


class AblationTracker:
    """Writes one ablation to MLflow from one thread. `failures` says what could not be written;
    never raises."""

    def __init__(
        self, pipeline: PipelineConfig, fingerprint: str, log: Callable[[str], None]
    ) -> None:
        self._pipeline, self._fingerprint, self._log = pipeline, fingerprint, log
        self.failures: list[str] = []
        self.run_id: str | None = None
        self.runs: dict[str, str] = {}
        self._sink = AblationSink(destination_of(pipeline))

    def open(self, plans: Sequence[Plan]) -> None:
        values = {
            "strategies": (plan.strategy for plan in plans),
            "sizes": (size_of(plan.size) for plan in plans),
            "seeds": (str(plan.seed) for plan in plans),
        }
        names = {name: ",".join(dict.fromkeys(each)) for name, each in values.items()}
        record = RunRecord(
            run_fingerprint=self._fingerprint,
            name=typed_name() or f"{self._pipeline.name} ablation: {names['strategies']}",
            tags=tags_of(self._pipeline),
            params={**names, "pipeline": self._pipeline},
        )
        self.run_id = self._try(lambda: self._sink.open(record))

    def branch(self, config: PipelineConfig, branch: Branch) -> None:
        if self.run_id is None:
            return
        record = branch_run(config, branch)
        run_id = self._try(lambda: self._sink.child(branch.name, record))
        if run_id:
            self.runs[branch.name] = run_id

    def close(
        self, branches: Sequence[Branch], rows: Sequence[Json], files: Sequence[Path]
    ) -> None:
        if self.run_id is None:
            return
        states = Counter(branch.state for branch in branches)
        done = states["done"]
        record = StageRecord(
            name="summary",
            metrics={"branches_done": float(done), "branches_failed": float(states["failed"])},
            series=curves(rows),
            tags={
                "concur.complete": str(done == len(branches)).lower(),
                NOTE_TAG: f"{done} of {len(branches)} branches are done.",
            },
            artifacts=tuple(path for path in files if path.is_file()),
        )
        self._try(lambda: self._sink.close(record))

    def url(self, branch: str | None = None) -> str | None:
        """Page of the parent run or of a branch, where MLflow is a server."""
        run_id = self.runs.get(branch) if branch else self.run_id
        return self._sink.url(run_id) if run_id else None

    def _try(self, call: Callable[[], T]) -> T | None:
        """Call MLflow; None where it failed, after which it is not called again."""
        if self.failures or not self._pipeline.tracking.enabled:
            return None

        def failed(line: str) -> None:
            self.failures.append(line)
            self._log(line)

        return try_mlflow(self._pipeline.tracking_uri, call, log=self._log, failed=failed)


def size_of(size: int | None) -> str:
    return "all" if size is None else str(size)


def branch_run(config: PipelineConfig, branch: Branch) -> RunRecord:
    plan = {"strategy": branch.strategy, "size": size_of(branch.size), "seed": str(branch.seed)}
    fingerprints = {name: getattr(branch, name) for name in ("curated", "trained", "scores")}
    tags = {f"fingerprint.{name}": value for name, value in fingerprints.items() if value}
    facts: Json = {
        "run_fingerprint": stable_hash([branch.name, fingerprints]),
        "name": branch.name,
        "tags": tags_of(config, state=branch.state, **plan) | tags,
        "params": {**plan, "curation": config.curation, "training": config.training},
        "metrics": {"curated_rows": branch.rows, "seconds": branch.seconds},
    }
    if branch.state == "failed":
        return RunRecord(**facts, error=branch.error)
    results = _results(config, branch)
    return RunRecord(**facts | results | {"metrics": facts["metrics"] | results["metrics"]})


def _results(config: PipelineConfig, branch: Branch) -> Json:
    curated, trained, scores = (
        SnapshotRef(root=config.root, stage=stage, fingerprint=str(fingerprint))
        for stage, fingerprint in (
            ("curation", branch.curated),
            ("training", branch.trained),
            ("benchmark", branch.scores),
        )
    )
    dataset = dataset_of(config, curated)
    metrics = training_headline(trained) | branch_scores(scores)
    series = dict(training_record(config.training, trained, dataset).series)
    if branch.rows and (exec_at_1 := metrics.get("exec_at_1")) is not None:
        series[CURVE] = ((branch.rows, exec_at_1),)
    ended = times_of(scores.open())[1]
    return {
        "times": (ended - int(1000 * (branch.seconds or 0.0)), ended),
        "metrics": {name: value for name, value in metrics.items() if name not in series},
        "series": series,
        "datasets": (dataset,),
        "tables": {"scores": scores_of(scores).select(SCORE_COLUMNS).to_dicts()},
        "adapter": adapter_record(config, curated, trained),
    }


def branch_scores(scores: SnapshotRef) -> Metrics:
    return metrics_of(scores_of(scores).filter(track=OWN_TRACK).iter_rows(named=True))


def curves(rows: Sequence[Json]) -> Series:
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row["rows"] and row["exec_at_1"] is not None:
            found[row["strategy"]][round(row["rows"])] = row["exec_at_1"]
    return {f"{CURVE}/{name}": tuple(sorted(points.items())) for name, points in found.items()}
