"""What verification leaves in MLflow: written by the real stage and the real sink, read back with
MLflow's own client."""

from datetime import datetime

import pyarrow as pa
import pytest

from flows.artifacts import mlflow_links
from flows.benchmark import Benchmarked
from flows.config import PipelineConfig
from flows.refresh import Refreshed
from flows.track import refresh_and_track, refresh_record, run_record, track
from kernels_eval.judge.messages import Finding, Prepared, VerdictDraft, verdict_of
from kernels_eval.pool import telemetry as telemetry_module
from kernels_eval.pool.telemetry import BUILDERS, DEVICES, Telemetry
from kernels_eval.records import Candidate, KernelTask, Language, Phases
from tasks.benchmark.report.files import Report
from tasks.observe import stage as analysis_stage
from tasks.reporting.text import moment
from tasks.store.snapshot import ADAPTER
from tasks.tables import CANDIDATES, SCORES, TASKS, VERDICTS
from tasks.tracking.stages import verification_record
from tasks.tracking.writing import PARENT_TAG
from tasks.training.stage import HISTORY
from tasks.verification import stage
from tasks.verification.config import VerificationConfig
from tests.support.cases import cases
from tests.support.planted import planted
from tests.support.pools import PoolAlone
from tests.support.programs import EMPTY
from tests.support.samples import finished
from tests.support.typed import data_of, typed

CASES = cases("flows")

TASK = KernelTask(task_id="t", name="t", code=EMPTY)
# (reason, tier, from the cache?, seconds with the device, phases); the last one has a reference
# that was there already
JUDGED = [
    ("wrong_output", "lite", False, 6.0, Phases(reference_s=3.0, load_s=1.0, correctness_s=2.0)),
    ("exception", "lite", True, 1.5, Phases(load_s=0.5, correctness_s=1.0)),
    ("wrong_shape", "full", False, 4.0, Phases(load_s=3.0, correctness_s=1.0)),
    ("build_failed", "full", False, 0.0, None),
    ("syntax_error", None, False, 0.0, None),
]


class Clock:
    now = 50.0

    def monotonic(self):
        return self.now


class Workers(PoolAlone):
    """A pool that knows its verdicts, and tells a real Telemetry what it would have told it."""

    def __init__(self, clock):
        super().__init__(builders=2)
        self.clock = clock

    def verify(self, pairs):
        self.telemetry.tick(2)
        for task, candidate in pairs:
            reason, tier, cached, run_s, phases = JUDGED[candidate.sample_index]
            self.clock.now += 10
            self.telemetry.worked(BUILDERS, 5.0)
            self.telemetry.worked(DEVICES, run_s)
            prepared = Prepared(
                candidate_id=candidate.candidate_id, tier=tier, cached=cached, seconds=5.0
            )
            verdict = verdict_of(
                task,
                candidate,
                prepared,
                Finding(reason=reason),
                VerdictDraft(run_s=run_s, phases=phases),
            )
            self.telemetry.reached(verdict)
            self.telemetry.tick(0)
            yield verdict


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "root"


def verified(root, monkeypatch):
    """Tasks, candidates, and the verdicts that the stage itself has written of them; one candidate
    has no code."""
    clock = Clock()
    monkeypatch.setattr(telemetry_module, "time", clock)
    tasks = finished(root, "tasks", [TASK.model_dump(mode="json")], TASKS)
    rows = []
    for number in range(len(JUDGED) + 1):
        code = "class ModelNew: pass" if number < len(JUDGED) else None
        fields = {
            "sample_index": number,
            "code": code,
            "parse_reason": None if code else "truncated",
            "generator": "test",
        }
        candidate = Candidate(
            candidate_id=f"c{number}", task_id="t", language=Language.CPP, response="r", **fields
        )
        rows.append(candidate.model_dump(mode="json") | {"request_key": f"r{number}"})
    candidates = finished(root, "synthesis", rows, CANDIDATES, requests=len(rows), generator="test")

    class Judged(stage.Verification):
        def pool(self):
            return Workers(clock)

    return (
        tasks,
        candidates,
        stage.run(candidates, tasks, VerificationConfig(), Language.CPP, verification=Judged),
    )


def test_the_time_of_workers_and_phases_reads_back_and_is_written_once(root, monkeypatch):
    from mlflow.tracking import MlflowClient

    tasks, candidates, verdicts = verified(root, monkeypatch)
    curated = finished(
        root,
        "curation",
        [{"candidate_id": "c0"}],
        pa.schema([("candidate_id", pa.string())]),
        criterion_counts={"short": 1},
    )
    steps = CASES["training_log"]
    trained = finished(root, "training", steps, HISTORY, loss_first=2.0, loss_last=2.0, seconds=3.0)
    adapter = trained.open().local_dir("adapter")
    (adapter / "adapter_config.json").write_text("{}")
    (trained.open().local_dir() / ADAPTER).touch()
    score = {"model": "base", "track": "custom_kernel", "baseline": "eager", "metric": "exec"}
    scores = finished(root, "benchmark", [score | {"k": 1, "value": 0.5}], SCORES)
    (root / "report.html").write_text("report")
    analysis = analysis_stage.run(*planted(root / "others", 100))
    refreshed = Refreshed(
        tasks=tasks, candidates=candidates, verdicts=verdicts, curated=curated, analysis=analysis
    )
    report = Report(
        directory=str(root), files=(str(root / "report.html"),), markdown="", summary=()
    )
    config = PipelineConfig(root=str(root), name="tiny")

    benchmarked = Benchmarked(suite=tasks, answers=(), scores=scores)
    made = run_record, config, refreshed, trained, benchmarked, report
    first = track(*made)
    assert first
    monkeypatch.setenv(
        "MLFLOW_TRACKING_URI", config.tracking_uri
    )  # what load_table reads, whatever the client was given
    client = MlflowClient()
    experiment = client.get_experiment_by_name(config.tracking.experiment)

    def child(name="verification"):
        found = client.search_runs([experiment.experiment_id], f"tags.`{PARENT_TAG}` = '{first}'")
        (run,) = [run for run in found if run.info.run_name == name]
        return run

    metrics = child().data.metrics

    def under(prefix):
        return {name: value for name, value in metrics.items() if name.startswith(prefix)}

    # of the candidates that came to a phase: the reference was loaded once, and nothing was timed
    # or attributed
    for prefix, expected in CASES["verification_metrics"].items():
        assert under(prefix) == pytest.approx(expected), prefix

    told = {name.removeprefix("telemetry/"): value for name, value in under("telemetry/").items()}
    assert (told["candidates"], told["device_busy_share"], told["full_share"]) == (5, 0.23, 0.5)
    assert (told["built"], told["wall_s"], told["queue_depth_most"]) == (4, 50.0, 2)

    analysed, numbers = child("analysis"), analysis.open().read().to_dicts()
    known = {row["name"]: row["value"] for row in numbers if row["value"] is not None}
    known |= {f"{row['name']}_upper": row["upper"] for row in numbers if row["upper"] is not None}
    assert known.items() <= analysed.data.metrics.items()
    files = {
        file.path
        for folder in ("", "figures")
        for file in client.list_artifacts(analysed.info.run_id, folder)
    }
    assert {
        "report.md",
        "analysis.json",
        "figures/accuracy-by-length.svg",
        "figures/accuracy-by-length.png",
    } <= files

    # the same run again, from its snapshots: one value a metric, one run, tables no longer
    assert track(*made) == first
    assert child().data.metrics == metrics
    assert all(len(client.get_metric_history(child().info.run_id, name)) == 1 for name in metrics)
    shown = client.load_table(experiment.experiment_id, "tables/numbers.json")
    assert list(shown["name"]) == [row["name"] for row in numbers]

    # what nothing can be compared with yet leads to no chart of one bar
    monkeypatch.setenv("CONCUR_MLFLOW_URL", "http://mlflow")
    own, page = "This run in MLflow", "The report in MLflow"
    alone = f"{own} (from the second run on, a comparison too)"
    assert list(mlflow_links(config, first, "report.html")) == [alone, page]
    second = track(refresh_record, config, refreshed)
    compared = mlflow_links(config, second)
    assert list(compared) == [own, "Compare all runs in MLflow"] and second in compared[own]


def test_a_run_without_workers_reports_no_pool(root):
    """Every verdict was there before: whose time it took is not invented."""
    candidate = Candidate(
        candidate_id="c",
        task_id="t",
        language=Language.CPP,
        response="",
        generator="g",
        code="class ModelNew: pass",
    )
    prepared, finding = Prepared(candidate_id="c"), Finding(reason="exception")
    draft = VerdictDraft(run_s=2.0, phases=Phases(load_s=2.0))
    row = verdict_of(TASK, candidate, prepared, finding, draft)
    rows = [row.model_dump(mode="json") | {"verdict_key": "k"}]
    common = {"status_counts": {"runtime_error": 1}, "device": "cpu"}
    reused = verification_record(
        VerificationConfig(),
        finished(root, "verification", rows, VERDICTS, telemetry=None, **common),
    )
    shown = {name: value for name, value in reused.metrics.items() if value is not None}
    assert {name: value for name, value in shown.items() if "/" in name} == {
        "status_counts/runtime_error": 1,
        **{
            f"phases/{name}_{kind}_s": 2.0
            for name in ("load", "run")
            for kind in ("median", "mean")
        },
    }


def test_a_refresh_that_confirmed_has_a_stage_of_it(root):
    told = {"proposed": 3, "confirmed": 2, "failed": {"wrong_output": 1}}
    common = {"status_counts": {"correct": 1}, "device": "cpu"}
    tasks = finished(root, "tasks", [], VERDICTS)
    screened = finished(root, "verification", [], VERDICTS, quarantined=[], **common)
    confirmed = finished(
        root, "verification", [], VERDICTS, "confirmed", confirmation=told, **common
    )
    curated = finished(root, "curation", [], VERDICTS, criterion_counts={})
    refreshed = Refreshed(
        tasks=tasks, candidates=tasks, screened=screened, verdicts=confirmed, curated=curated
    )
    stages = refresh_record(PipelineConfig(root=str(root)), refreshed).stages
    assert [stage.name for stage in stages] == [
        *("synthesis", "verification", "confirmation", "curation")
    ]
    assert stages[2].metrics["confirmation/failed/wrong_output"] == 1
    assert (stages[1].tags["fingerprint"], stages[2].tags["fingerprint"]) == (
        screened.fingerprint,
        "confirmed",
    )


def test_nothing_built_has_no_share_of_builds(root):
    common = {"status_counts": {}, "device": "cpu", "telemetry": Telemetry(1, 1).summary()}
    metrics = verification_record(
        VerificationConfig(), finished(root, "verification", [], VERDICTS, **common)
    ).metrics
    assert metrics["telemetry/built"] == 0 and metrics["telemetry/candidates"] == 0
    assert not {"telemetry/lite_share", "telemetry/cache_hit_share"} & set(metrics)
    assert metrics.get("phases/load_median_s") is None


@pytest.mark.slow  # a Prefect server
@pytest.mark.parametrize("name", ["first-click", "jasper-cuttlefish"])
def test_a_refresh_has_one_name_and_one_beginning_everywhere(root, prefect_home, monkeypatch, name):
    """The name that a person types, or the configuration's and when the refresh began; not when
    its snapshots were made, which may be days before."""
    from mlflow.tracking import MlflowClient
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow

    config = PipelineConfig(root=str(root), name="mine")
    tasks = finished(root, "tasks", [], VERDICTS)
    told = {"status_counts": {"correct": 1}, "quarantined": [], "device": "cpu"}
    ids = pa.schema([("candidate_id", pa.string())])
    rows = [{"candidate_id": "c0"}]
    made = Refreshed(
        tasks=tasks,
        candidates=tasks,
        verdicts=finished(root, "verification", [], VERDICTS, **told),
        curated=finished(root, "curation", rows, ids, criterion_counts={}),
    )
    monkeypatch.setattr("flows.refresh.run_stages", lambda config: made)
    asked = {"config": config}
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(refresh_and_track, parameters=asked, name=name)
    _, run_id = run_flow(refresh_and_track, flow_run=run, parameters=asked)

    info = MlflowClient(config.tracking_uri).get_run(run_id).info
    (listed,) = data_of(f"ls --root {root}")["refreshes"]
    assert info.start_time == 1000 * datetime.fromisoformat(listed["began_at"]).timestamp()
    began = moment(listed["began_at"])
    if name == "first-click":
        assert info.run_name == listed["run_name"] == "first-click"
        assert typed(f"morning --root {root}").startswith(f"first-click, mine, {began}: ")
        assert (root / "morning.md").read_text().startswith(f"# first-click, mine, {began}")
        assert "first-click" in typed(f"ls --root {root}")
    else:
        assert info.run_name == f"{began[5:].removesuffix(' UTC')} mine refresh"
        assert listed["run_name"] == ""
        assert typed(f"morning --root {root}").startswith(f"mine, {began}: ")
