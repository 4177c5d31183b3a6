"""Write an ablation to MLflow, read from its snapshots.

Guarantees: metrics of all branches have the same names, without a model or a strategy in them, so
that MLflow's own comparison of runs is useful at once; params `strategy`, `size` and `seed` are
flat. MLflow that fails is logged and the ablation continues: the next call of it writes the rest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TypeVar, get_args

from flows.ablation.branch import Trained
from flows.ablation.plan import Plan
from flows.ablation.records import BranchRecord
from flows.config import PipelineConfig
from flows.track import (
    CUSTOM_KERNEL,
    adapter_record,
    dataset_of,
    destination_of,
    score_metrics,
    tags_of,
)
from kernels_eval.records import Json, stable_hash
from tasks.benchmark.comparison.records import BranchState
from tasks.benchmark.stage import scores_of
from tasks.store import SnapshotRef
from tasks.tracking.connection import try_mlflow
from tasks.tracking.mlflow_sink import AblationSink
from tasks.tracking.records import Metrics, RunRecord, Series, StageRecord
from tasks.tracking.stages import times_of, training_headline, training_record
from tasks.tracking.writing import NOTE_TAG

CURVE = "exec_at_1_over_size"
"""Exec at pass@1, at the step that is the number of rows trained on."""
SCORE_COLUMNS = set("track metric k value lower upper tasks samples why_not".split())
BRANCH_COLUMNS = """name strategy size seed state error rows loss_last held_out_loss_last gpu_hours
    seconds""".split()
T = TypeVar("T")


class AblationTracker:
    """Writes one ablation to MLflow from one thread. `failures` says what could not be written;
    nothing is raised."""

    def __init__(
        self, pipeline: PipelineConfig, fingerprint: str, log: Callable[[str], None]
    ) -> None:
        self._pipeline, self._fingerprint, self._log = pipeline, fingerprint, log
        self.failures: list[str] = []
        self.run_id: str | None = None
        self.runs: dict[str, str] = {}
        self._sink = AblationSink(destination_of(pipeline))

    def open(self, plans: Sequence[Plan]) -> None:
        """Make the parent run, or continue that of an earlier call."""
        values = {
            "strategies": (plan.strategy for plan in plans),
            "sizes": (size_of(plan.size) for plan in plans),
            "seeds": (str(plan.seed) for plan in plans),
        }
        names = {name: ",".join(dict.fromkeys(each)) for name, each in values.items()}
        record = RunRecord(
            run_fingerprint=self._fingerprint,
            name=f"{self._pipeline.name} ablation: {names['strategies']}",
            tags=tags_of(self._pipeline),
            params={**names, "pipeline": self._pipeline},
        )
        self.run_id = self._try(lambda: self._sink.open(record))

    def branch(
        self,
        config: PipelineConfig,
        record: BranchRecord,
        rows: SnapshotRef | None,
        made: Trained | None,
        spent: tuple[int, float] | None,
    ) -> None:
        """Write one branch that is done or failed. `rows` is the set that it trains on; `spent` is
        how many branches have ended and the GPU-hours by then, where the branch did anything new.
        """
        if self.run_id is None:
            return
        name = record.branch.name
        run_id = self._try(lambda: self._sink.child(name, branch_run(config, record, rows, made)))
        if run_id:
            self.runs[name] = run_id
        if spent:
            metrics: Metrics = {"branches_ended": float(spent[0]), "gpu_hours_spent": spent[1]}
            self._try(lambda: self._sink.progress(metrics, spent[0]))

    def close(
        self,
        records: Sequence[BranchRecord],
        rows: Sequence[Json],
        files: Sequence[Path],
        gpu_hours: float,
    ) -> None:
        """End the parent run with its summary, tables and files."""
        if self.run_id is None:
            return
        states = Counter(f"branches_{record.branch.state}" for record in records)
        branches = [
            {name: getattr(record.branch, name) for name in BRANCH_COLUMNS}
            | {"shares_training_with": record.shares_with}
            for record in records
        ]
        counts: Metrics = {
            name: float(states[name]) for name in map("branches_{}".format, get_args(BranchState))
        }
        tables = {"branches": branches, "strategies": list(rows)}
        record = StageRecord(
            name="summary",
            metrics=counts | {"gpu_hours": round(gpu_hours, 6)},
            series=curves(records),
            tags={
                "concur.complete": str({*states} <= {"branches_done"}).lower(),
                NOTE_TAG: f"{counts['branches_done']:.0f} of {len(records)} branches are done.",
            },
            artifacts=tuple(path for path in files if path.is_file()),
            tables={name: table for name, table in tables.items() if table},
        )
        self._try(lambda: self._sink.close(record))

    def url(self, branch: str | None = None) -> str | None:
        """The page of the parent run or of a branch, where MLflow is a server."""
        run_id = self.runs.get(branch) if branch else self.run_id
        return self._sink.url(run_id) if run_id else None

    def _try(self, call: Callable[[], T]) -> T | None:
        """None where MLflow failed. After that it is left alone: the ablation waits for it once."""
        if self.failures or not self._pipeline.tracking.enabled:
            return None

        def failed(line: str) -> None:
            self.failures.append(line)
            self._log(line)

        return try_mlflow(self._pipeline.tracking_uri, call, log=self._log, failed=failed)


def size_of(size: int | None) -> str:
    """A size as MLflow's params and tags have it."""
    return "all" if size is None else str(size)


def branch_run(
    config: PipelineConfig, record: BranchRecord, rows: SnapshotRef | None, made: Trained | None
) -> RunRecord:
    """One branch as MLflow gets it; a branch that failed has what it came to. `config` is the
    branch's own."""
    branch = record.branch
    dataset = dataset_of(config, rows) if rows else None
    metrics: Metrics = {
        "curated_rows": branch.rows,
        "gpu_hours": branch.gpu_hours,
        "seconds": branch.seconds,
        **{f"{phase}_s": seconds for phase, seconds in record.phases_s.items()},
    }
    series: Series = {}
    tables: Json = {}
    adapter = None
    if made and rows and dataset:
        scores = branch_scores(made.scores)
        metrics |= training_headline(made.trained) | scores
        series = training_record(config.training, made.trained, dataset).series
        tables["scores"] = [row.model_dump(include=SCORE_COLUMNS) for row in scores_of(made.scores)]
        if branch.rows and (exec_at_1 := scores.get("exec_at_1")) is not None:
            series = {**series, CURVE: ((branch.rows, exec_at_1),)}
        if not record.shares_with:
            adapter = adapter_record(config, rows, made.trained)
    sorts = {"strategy": branch.strategy, "size": size_of(branch.size), "seed": str(branch.seed)}
    made_of = {name: getattr(branch, name) for name in ("curated", "trained", "scores")}
    tags = {f"fingerprint.{name}": value for name, value in made_of.items() if value}
    if record.shares_with:
        tags["shares_training_with"] = record.shares_with
    return RunRecord(
        run_fingerprint=stable_hash([branch.name, made_of]),
        name=branch.name,
        times=_times(made, branch.seconds),
        tags=tags_of(config, state=branch.state, **sorts) | tags,
        params={**sorts, "curation": config.curation, "training": config.training},
        metrics={name: value for name, value in metrics.items() if name not in series},
        series=series,
        datasets=(dataset,) if dataset else (),
        tables=tables,
        adapter=adapter,
        error=branch.error if branch.state == "failed" else None,
    )


def _times(made: Trained | None, seconds: float | None) -> tuple[int, int] | None:
    """When a branch worked, ms since 1970: until its scores were there."""
    if made is None:
        return None
    ended = times_of(made.scores.open())[1]
    return ended - int(1000 * (seconds or 0.0)), ended


def branch_scores(scores: SnapshotRef) -> Metrics:
    """`exec_at_1`, `fast_1_at_1` and so on of a branch, on the track of custom kernels."""
    return score_metrics(row for row in scores_of(scores) if row.track == CUSTOM_KERNEL)


def curves(records: Sequence[BranchRecord]) -> Series:
    """`exec_at_1_over_size/STRATEGY`: the mean over seeds at each number of rows."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for branch in (record.branch for record in records):
        if branch.state == "done" and branch.rows and branch.answers and branch.scores:
            root = branch.answers.verdicts.root
            ref = SnapshotRef(root=root, stage="benchmark", fingerprint=branch.scores)
            if (value := branch_scores(ref).get("exec_at_1")) is not None:
                found[branch.strategy][branch.rows].append(value)
    return {
        f"{CURVE}/{name}": tuple((rows, fmean(values)) for rows, values in sorted(at.items()))
        for name, at in found.items()
    }
