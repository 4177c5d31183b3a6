"""What MLflow is told of an ablation, read from snapshots. Off the line: MLflow that fails is
logged, and the ablation goes on.

Guarantees: metrics of all branches have the same names, without a model or a strategy in them, so
that MLflow's own comparison of runs is useful at once; params `strategy`, `size` and `seed` are
flat. An ablation that failed to be written is written by the next call of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from flows.ablation.plan import AblationConfig, Plan
from flows.ablation.records import BranchRecord
from flows.config import PipelineConfig
from flows.track import adapter_fields, dataset_of, train_headline, training_record
from kernels_eval.errors import EvalError
from kernels_eval.records import stable_hash
from tasks.benchmark.scoring import ScoreRow
from tasks.benchmark.stage import scores_of
from tasks.store.snapshot import SnapshotRef
from tasks.tracking.ablation_sink import AblationSink, ChildRecord
from tasks.tracking.connection import retry_mlflow
from tasks.tracking.records import RunRecord, flatten

CURVE = "exec_at_1_over_size"
"""Exec at pass@1, at the step that is the number of rows trained on."""
TRACK = "custom_kernel"
Refs = Mapping[str, SnapshotRef | None]


class AblationTracker:
    """Writes one ablation to MLflow from one thread. `told` says what could not be written; nothing
    is raised."""

    def __init__(
        self,
        config: AblationConfig,
        pipeline: PipelineConfig,
        fingerprint: str,
        log: Callable[[str], None],
    ) -> None:
        self._config, self._pipeline, self._log = config, pipeline, log
        self.fingerprint = fingerprint
        self.told: list[str] = []
        self.run_id: str | None = None
        self.runs: dict[str, str] = {}
        tracking = pipeline.tracking
        root = None if tracking.uri else str(Path(pipeline.root).absolute() / "mlartifacts")
        sink = AblationSink(
            fingerprint,
            tracking_uri=pipeline.tracking_uri,
            artifact_root=root,
            experiment=tracking.experiment,
        )
        self._sink: AblationSink | None = sink if tracking.enabled else None

    def open(self, plans: Sequence[Plan]) -> None:
        params = {
            "strategies": ",".join(dict.fromkeys(plan.strategy for plan in plans)),
            "sizes": ",".join(dict.fromkeys(size_of(plan.size) for plan in plans)),
            "seeds": ",".join(dict.fromkeys(str(plan.seed) for plan in plans)),
            "pipeline": self._pipeline.model_dump(mode="json"),
        }
        name = f"{self._pipeline.name} ablation: {params['strategies']}"
        tags = {"language": self._pipeline.language.value, "profile": self._pipeline.name}
        self.run_id = self._tried(lambda sink: sink.open(name, tags, flatten(params)))

    def branch(
        self,
        config: PipelineConfig,
        record: BranchRecord,
        refs: Refs,
        spent: tuple[int, float] | None,
    ) -> None:
        """One branch that is done or failed. `refs` are its snapshots `curated`, `trained` and
        `scores`, as far as they are there; `spent` is how many branches have ended and the
        GPU-hours by then, where the branch did anything new.
        """
        if self.run_id is None:
            return
        run_id = self._tried(
            lambda sink: sink.child(record.branch.name, child_record(config, record, refs))
        )
        if run_id:
            self.runs[record.branch.name] = run_id
        if spent:
            self._tried(
                lambda sink: sink.progress(
                    {"branches_ended": float(spent[0]), "gpu_hours_spent": spent[1]}, spent[0]
                )
            )

    def close(
        self,
        records: Sequence[BranchRecord],
        rows: Sequence[dict[str, Any]],
        files: Sequence[Path],
        gpu_hours: float,
    ) -> None:
        if self.run_id is None:
            return
        states = [record.branch.state for record in records]
        metrics: dict[str, float | None] = {
            f"branches_{state}": float(states.count(state))
            for state in ("done", "failed", "left_out")
        }
        metrics |= {"gpu_hours": round(gpu_hours, 6)}
        whole = all(state == "done" for state in states)
        tables = {"branches": [_flat(record) for record in records], "strategies": list(rows)}
        self._tried(
            lambda sink: sink.close(
                metrics=metrics,
                series=curves(records),
                tags={"concur.complete": str(whole).lower()},
                files=[path for path in files if path.is_file()],
                tables=tables,
            )
        )

    def url(self, branch: str | None = None) -> str | None:
        run_id = self.runs.get(branch) if branch else self.run_id
        return self._sink.url(run_id) if self._sink and run_id else None

    def _tried(self, call: Callable[[AblationSink], Any]) -> Any:
        """None where MLflow failed. One that died is waited for, once: after that it is left alone,
        so that it costs the ablation no more."""
        if self._sink is None or self.told:
            return None
        try:
            sink = self._sink
            return retry_mlflow(self._pipeline.tracking_uri, lambda: call(sink), self._log)
        except Exception as error:
            # whatever a tracking server does, the snapshots are complete, and the same command
            # writes this again
            text = str(error).splitlines()[0] if isinstance(error, EvalError) or str(error) else ""
            self.told.append(
                f"MLflow was not written ({type(error).__name__}: {text}); the same command"
                " writes it"
            )
            self._log(self.told[-1])
            return None


def size_of(size: int | None) -> str:
    return "all" if size is None else str(size)


def child_record(config: PipelineConfig, record: BranchRecord, refs: Refs) -> ChildRecord:
    """One branch as MLflow gets it. A branch that failed has what it came to."""
    branch = record.branch
    curated, trained, scores = (refs.get(name) for name in ("curated", "trained", "scores"))
    metrics: dict[str, float | None] = {
        "curated_rows": branch.rows,
        "gpu_hours": branch.gpu_hours,
        "seconds": branch.seconds,
    }
    metrics |= {f"{phase}_s": seconds for phase, seconds in record.phases_s.items()}
    series: dict[str, tuple[tuple[int, float], ...]] = {}
    fields: dict[str, Any] = {}
    tables: dict[str, Any] = {}
    if trained:
        metrics |= train_headline(trained.open().manifest, trained.open())
        series |= training_record(config, curated, trained).series if curated else {}
    if scores:
        rows = scores_of(scores)
        metrics |= score_metrics(rows)
        tables["scores"] = tuple(row.model_dump(include=set(SCORE_COLUMNS)) for row in rows)
        if branch.rows and (found := metrics.get("exec_at_1")) is not None:
            series[CURVE] = ((branch.rows, found),)
    if curated and trained and not record.shares_with:
        fields = adapter_fields(config, curated, trained)
    tags = {
        "strategy": branch.strategy,
        "size": size_of(branch.size),
        "seed": str(branch.seed),
        "language": config.language.value,
    }
    tags |= {"profile": config.name, "state": branch.state} | (
        {"shares_training_with": record.shares_with} if record.shares_with else {}
    )
    fingerprints = {"curated": branch.curated, "trained": branch.trained, "scores": branch.scores}
    tags |= {f"fingerprint.{name}": value for name, value in fingerprints.items() if value}
    params = {"strategy": branch.strategy, "size": size_of(branch.size), "seed": str(branch.seed)}
    nested = {
        "curation": config.curation.model_dump(mode="json"),
        "training": config.training.model_dump(mode="json"),
    }
    run = RunRecord(
        run_fingerprint=stable_hash([branch.name, fingerprints]),
        run_name=branch.name,
        tags=tags,
        params={**params, **nested},
        metrics={name: value for name, value in metrics.items() if name not in series},
        datasets=(dataset_of(config, curated.open()),) if curated else (),
        **fields,
    )
    return ChildRecord(
        run=run,
        series=series,
        tables=tables,
        error=branch.error if branch.state == "failed" else None,
    )


SCORE_COLUMNS = ("track", "metric", "k", "value", "lower", "upper", "tasks", "samples", "why_not")


def score_metrics(rows: Sequence[ScoreRow]) -> dict[str, float | None]:
    """`exec_at_1`, `fast_1_at_1`, each with `_lower` and `_upper`, on the track of custom kernels.
    What has no value is left out."""
    found: dict[str, float | None] = {}
    for row in rows:
        if row.track == TRACK and row.value is not None:
            name = row.metric + (f"_at_{row.k}" if row.k else "")
            found |= {name: row.value, f"{name}_lower": row.lower, f"{name}_upper": row.upper}
    return found


def exec_at_1(record: BranchRecord, root: str) -> float | None:
    if record.branch.scores is None:
        return None
    scores = SnapshotRef(root=root, stage="benchmark", fingerprint=record.branch.scores)
    return score_metrics(scores_of(scores)).get("exec_at_1")


def curves(records: Sequence[BranchRecord]) -> dict[str, tuple[tuple[int, float], ...]]:
    """`exec_at_1_over_size/STRATEGY`: the mean over seeds at each number of rows."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        branch = record.branch
        if branch.state == "done" and branch.rows and branch.answers:
            value = exec_at_1(record, branch.answers.verdicts.root)
            if value is not None:
                found[branch.strategy][branch.rows].append(value)
    return {
        f"{CURVE}/{name}": tuple((rows, fmean(values)) for rows, values in sorted(at.items()))
        for name, at in found.items()
    }


def _flat(record: BranchRecord) -> dict[str, Any]:
    branch = record.branch
    names = (
        "name",
        "strategy",
        "size",
        "seed",
        "state",
        "error",
        "rows",
        "loss_last",
        "held_out_loss_last",
        "gpu_hours",
        "seconds",
    )
    return {name: getattr(branch, name) for name in names} | {
        "shares_training_with": record.shares_with
    }
