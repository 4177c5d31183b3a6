"""Ablations: what they are made of, what they cost, and that a branch that fails, a kill or an
empty budget costs no more than it must."""

import fcntl
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from flows.ablation.estimate import Work, estimate, require_within
from flows.ablation.plan import (
    AblationConfig,
    ablation_config,
    branch_pipeline,
    branches_at_once,
    parsed_list,
    pipeline_of,
    planned_branches,
)
from flows.ablation.records import BRANCH, Meter, alone_with, load_spent, sole_writer
from flows.cli.main import main
from kernels_eval.errors import EvalError, UsageError
from tasks.synthesis import sizing
from tests.support.cases import cases
from tests.support.quick_ablations import devices, profile, quick, samples

CASES = cases("flows")

__all__ = ["devices", "quick"]
STRATEGIES = ("concur", "random", "min_length")


# -- the plan --------------------------------------------------------------------------------------


def test_branches_are_strategies_by_sizes_by_seeds_each_with_its_seed_everywhere():
    config = AblationConfig(strategies=("concur", "random"), sizes=(None, 4), seeds=(0, 3))
    plans = planned_branches(config)
    assert [plan.name for plan in plans] == [
        *("concur-all-seed0", "concur-all-seed3", "concur-4-seed0", "concur-4-seed3"),
        *("random-all-seed0", "random-all-seed3", "random-4-seed0", "random-4-seed3"),
    ]
    pipeline = pipeline_of(config)
    own = branch_pipeline(pipeline, plans[-1])
    assert (own.curation.strategy, own.curation.size, own.curation.seed, own.training.seed) == (
        "random",
        4,
        3,
        3,
    )
    # which tasks are held out of training is no matter of the seed: losses of branches are of the
    # same tasks
    assert own.training.evaluation == pipeline.training.evaluation
    n = own.benchmark.samples_per_task
    drawn = [
        set(range(start, start + n))
        for start in (branch_pipeline(pipeline, plan).benchmark.sampling.seed for plan in plans[:2])
    ]
    assert drawn[0].isdisjoint(drawn[1])
    # where it runs decides nothing of what it is
    assert branch_pipeline(pipeline, plans[0], share=2).verification.workers == 2
    assert (
        branch_pipeline(pipeline, plans[0], share=2).synthesis.server.identity
        == pipeline.synthesis.server.identity
    )


def test_branches_that_serve_a_large_model_share_the_gpus_as_its_replicas_need(monkeypatch):
    """QwQ-32B in 16 bits on GPUs of 80 GB: two a replica."""
    gpu = sizing.H200.model_copy(update={"memory_bytes": 81_559 << 20})
    monkeypatch.setattr(sizing, "read_gpu", lambda: gpu)
    monkeypatch.setattr(sizing, "read_shape", lambda model: sizing.QWQ_32B)
    config = AblationConfig()
    served = pipeline_of(config)
    served = served.model_copy(
        update={"synthesis": served.synthesis.model_copy(update={"sampler": "vllm"})}
    )
    limit = served.benchmark.sampling.max_tokens
    each = sizing.planned_gpus("m", served.synthesis.server, limit, 8)
    assert each == 2 and branches_at_once(config, served, 8) == 4
    of_two = branch_pipeline(served, planned_branches(config)[0], share=2).synthesis.server
    assert (of_two.replicas, of_two.tensor_parallel) == (1, 2)


def test_a_strategy_file_is_called_by_its_name_and_its_size_holds_where_none_is_asked_for(tmp_path):
    path = tmp_path / "quick_ones.yaml"
    path.write_text("strategy: speedup\nsize: 7\n")
    (plan,) = planned_branches(AblationConfig(strategies=(str(path),), seeds=(1,)))
    assert (plan.name, plan.strategy, plan.size, plan.curation.strategy) == (
        "quick_ones-7-seed1",
        "quick_ones",
        7,
        "speedup",
    )


@pytest.mark.parametrize("asked, words", CASES["bad_ablations"])
def test_bad_input_is_one_clear_error(asked, words):
    with pytest.raises(UsageError) as caught:
        config = ablation_config(**asked)
        pipeline_of(config)
        planned_branches(config)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("text", ["", "1,,2", "1,x", "1.5"])
def test_lists_of_the_command_line_are_read_strictly(text):
    with pytest.raises(UsageError):
        parsed_list(text, "--seeds", int)
    assert parsed_list(" 1, all", "--sizes", int) == (1, None)


def test_the_form_is_readable():
    schema = AblationConfig.model_json_schema()
    for name, field in schema["properties"].items():
        assert (
            field["title"][0].isupper()
            and "_" not in field["title"]
            and len(field["description"]) > 20
        ), name


def test_the_command_answers_help_and_refuses_nonsense_without_a_traceback():
    runner = CliRunner()
    assert "--max-gpu-hours" in runner.invoke(main, ["ablate", "--help"]).output
    refused = runner.invoke(main, "ablate --strategies nothing --estimate".split())
    assert refused.exit_code == 2
    assert refused.output.startswith("error: there is no strategy 'nothing'")


# -- what it costs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("asked, said", CASES["ablation_names"])
def test_the_run_of_an_ablation_is_named_by_what_it_compares(asked, said, monkeypatch):
    from flows.naming import ablation_name

    now = SimpleNamespace(parameters={"config": AblationConfig(**asked)}, scheduled_start_time=None)
    monkeypatch.setattr("prefect.runtime.flow_run", now)
    assert ablation_name().startswith(said)
    now.parameters = {}
    assert ablation_name().startswith("ablate: 20")


def four_trainings(branches, rows):
    basis = f"{4 * rows:.0f} rows, counted"
    return Work(suite=3, branches=branches, rows=(rows,) * 4, rows_basis=basis, answered=4)


def test_an_estimate_counts_devices_and_says_what_it_rests_on(tmp_path):
    pipeline = pipeline_of(AblationConfig(profile=profile(tmp_path)))
    work = four_trainings(8, 10.0)
    alone, four = (estimate(pipeline, work, gpus=gpus, parallel=gpus) for gpus in (1, 4))
    assert alone.trainings == 4 and alone.steps == 4 * 5 * 2  # ten rows, two a step, two epochs
    assert alone.gpu_hours == pytest.approx(four.gpu_hours)
    assert alone.hours == pytest.approx(4 * four.hours)
    assert all("assumed" in part.basis for part in alone.parts)
    longer = work._replace(rows=(20.0,) * 4)
    assert estimate(pipeline, longer, gpus=1, parallel=1).gpu_hours > alone.gpu_hours


def test_the_estimate_of_a_night_is_made_from_memory_and_bandwidth(tmp_path, monkeypatch):
    """90,810 answers of 7,000 tokens: 111 GPU-hours measured with prompts of 600 tokens, and
    prompts are longer. At the speed of short answers it was 35."""
    monkeypatch.setattr("tasks.synthesis.sizing.read_gpu", lambda: None)
    asked = pipeline_of(AblationConfig(profile=profile(tmp_path)))
    sampling = asked.synthesis.sampling.model_copy(update={"max_tokens": 14_000})
    synthesis = asked.synthesis.model_copy(update={"sampling": sampling})
    asked = asked.model_copy(update={"synthesis": synthesis})
    work = Work(suite=3, candidates=90_810, sampled=90_810)
    (part,) = estimate(asked, work, gpus=8, parallel=1).parts
    verified = estimate(asked, work._replace(sampled=0), gpus=8, parallel=1).gpu_hours
    assert 111 < part.gpu_hours - verified < 1.15 * 111
    assert "7,000 tokens at once on 1 x NVIDIA H200" in part.basis and "bandwidth" in part.basis


def test_an_ablation_above_its_budget_is_refused_with_what_would_fit(tmp_path):
    pipeline = pipeline_of(AblationConfig(profile=profile(tmp_path)))
    work = four_trainings(4, 100.0)
    found = estimate(pipeline, work, gpus=1, parallel=1)
    require_within(found, found.gpu_hours * 1.01)
    with pytest.raises(
        UsageError, match="about 2 of 4 branches fit.*fewer strategies, sizes or seeds"
    ):
        require_within(found, found.gpu_hours * 0.6)
    with pytest.raises(UsageError, match="no branch fits"):
        require_within(found, found.gpu_hours * 1.01, spent=found.gpu_hours)


def test_the_meter_counts_devices_while_they_are_held_and_remembers(tmp_path):
    meter = Meter(budget_gpu_hours=1.0)
    meter.keep_in(tmp_path)
    BRANCH.set("a")
    entered = time.monotonic()
    with meter.held("train", 3):
        begun = time.monotonic()
        while time.monotonic() - begun < 0.05:
            spent = meter.gpu_hours * 3600
            assert spent <= 3 * (time.monotonic() - entered) + 0.001
    spent = meter.phases_of("a")["train"]
    assert 0.15 <= spent <= 3 * (time.monotonic() - entered) + 0.001
    assert load_spent(tmp_path)["a", "train"] == pytest.approx(spent, abs=0.01)
    BRANCH.set("")
    later = Meter(budget_gpu_hours=1.0)
    later.keep_in(tmp_path)
    assert later.gpu_hours == pytest.approx(spent / 3600, rel=0.01)
    assert later.fits(3500, []) and not later.fits(3600, [])
    assert not later.fits(1800, ["b"])  # b has begun and is expected to take as much
    assert later.fits(1700, ["b"])


def test_one_ablation_runs_once_at_a_time(tmp_path):
    with (
        sole_writer(tmp_path),
        pytest.raises(UsageError, match="already running"),
        sole_writer(tmp_path),
    ):
        raise AssertionError("two at once")


def test_whoever_waits_for_another_run_says_so_once(tmp_path, caplog):
    path = tmp_path / "lock"
    polls = iter([False, False, True])
    stopped = SimpleNamespace(wait=lambda _: next(polls))
    with alone_with(path, stopped), pytest.raises(EvalError, match="stopped"):
        with alone_with(path, stopped):
            raise AssertionError("two at once")
    (said,) = [each.getMessage() for each in caplog.records]
    assert "another run is making the same" in said and str(path) in said


def test_one_process_at_a_time_makes_a_model_s_answers(tmp_path, monkeypatch):
    """Two ablations under one root need the same answers of the base model."""
    from flows.ablation import branch
    from tasks.store import SnapshotRef

    config = pipeline_of(AblationConfig(profile="local", overrides=(f"root={tmp_path}",)))
    suite = SnapshotRef(root=str(tmp_path), stage="tasks", fingerprint="0" * 32)
    held = []

    def call_stage(stage, *_):
        (lock,) = (tmp_path / "ablations" / "locks").iterdir()
        with lock.open("a") as handle, pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append(stage)

    asked = SimpleNamespace(
        snapshot=SimpleNamespace(finished=False, fingerprint="1" * 32),
        config=config.synthesis,
        adapter=None,
    )
    answers = SimpleNamespace(verdicts=SimpleNamespace(open=lambda: asked.snapshot))
    monkeypatch.setattr(branch, "planned_answers", lambda *_: (asked, answers))
    monkeypatch.setattr(branch, "call_stage", call_stage)
    resources = branch.SharedResources(Meter(None), gpus=0, share=1, in_process=True)
    token = branch.RESOURCES.set(resources)
    try:
        assert branch.answered(config, suite, "base") is answers
    finally:
        branch.RESOURCES.reset(token)
    assert held == [branch.synthesise, branch.verify]


# -- whole ablations, with a real MLflow -----------------------------------------------------------


@pytest.fixture(scope="module")
def empty_mlflow(tmp_path_factory):
    """An MLflow database with its tables: making them takes seconds."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


class Home:
    def __init__(self, path, database):
        self.path, self.root = path, path / "root"
        self.root.mkdir()
        (self.root / "mlflow.db").write_bytes(database.read_bytes())
        self.verdicts = samples(self.root).fingerprint

    def config(self, **changes):
        asked = {
            "profile": profile(self.path),
            "strategies": STRATEGIES,
            "seeds": (0, 1),
            "verdicts": self.verdicts,
        }
        return AblationConfig(**(asked | changes))

    def ablation(self, **changes):
        from flows.ablation.flow import ablate

        return ablate.fn(self.config(**changes))

    def runs(self):
        """MLflow's runs by name; a name that is there twice fails."""
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=f"sqlite:///{self.root}/mlflow.db")
        found = client.search_runs([client.get_experiment_by_name("concur").experiment_id])
        assert len({run.info.run_name for run in found}) == len(found)
        return {run.info.run_name: run for run in found}


@pytest.fixture
def home(tmp_path, empty_mlflow):
    return Home(tmp_path, empty_mlflow)


@pytest.mark.slow
def test_a_failing_branch_stops_no_other_and_the_same_ablation_again_does_only_that(quick, home):
    from mlflow.tracking import MlflowClient

    quick.broken = {("random", 1)}
    first = home.ablation()
    states = {branch.name: branch.state for branch in first.ablation.branches}
    assert states == {
        plan.name: "failed" if plan.name == "random-all-seed1" else "done"
        for plan in planned_branches(home.config())
    }
    (broken,) = [branch for branch in first.ablation.branches if branch.state == "failed"]
    assert broken.error and broken.error.startswith("the device fell off the bus")
    assert "\n" not in broken.error and "\x1b" not in broken.error
    assert not first.complete and "1 of 6 branches failed" in first.ablation.cautions[0]
    assert quick.trained == {f"{name} seed {seed}": 1 for name in STRATEGIES for seed in (0, 1)}
    assert quick.answered["small"] == 1  # the base model, once for all branches
    runs = home.runs()
    (parent,) = [run for run in runs.values() if run.data.tags.get("concur.kind") == "sweep"]
    children = {
        name: run
        for name, run in runs.items()
        if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id
    }
    assert set(children) == set(states)
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["concur.complete"] == "false"
    assert children["random-all-seed1"].info.status == "FAILED"
    assert children["random-all-seed1"].data.tags["concur.error"] == broken.error

    quick.broken = set()
    before = quick.trained.copy(), quick.answered.copy()
    second = home.ablation()
    assert second.complete and second.new == ("random-all-seed1",)
    assert quick.trained - before[0] == {"random seed 1": 1}
    assert sum((quick.answered - before[1]).values()) == 1
    again = home.runs()
    assert again[parent.info.run_name].info.run_id == parent.info.run_id
    assert again[parent.info.run_name].data.tags["concur.complete"] == "true"
    assert {name: run.info.run_id for name, run in again.items() if name != broken.name} == {
        name: run.info.run_id for name, run in runs.items() if name != broken.name
    }
    assert again[broken.name].info.status == "FINISHED"

    # what charts compare: the same names in all branches, no model's and no strategy's among them
    done = [again[name] for name in states]
    shared = set.intersection(*(set(run.data.metrics) for run in done))
    assert {
        "exec_at_1",
        "exec_at_1_lower",
        "exec_at_1_upper",
        "fast_1_at_1",
        "train_loss_last",
        "held_out_loss_last",
    } <= shared
    assert {"curated_rows", "gpu_hours", "loss", "held_out_loss", "exec_at_1_over_size"} <= shared
    # what is not in all is a bound that some data do not give
    assert {name for run in done for name in run.data.metrics} - shared <= {
        "geometric_mean_speedup_lower",
        "geometric_mean_speedup_upper",
    }
    assert not [
        name for name in shared if any(word in name for word in (*STRATEGIES, "tuned", "base."))
    ]
    assert {
        (run.data.params["strategy"], run.data.params["size"], run.data.params["seed"])
        for run in done
    } == {(name, "all", seed) for name in STRATEGIES for seed in ("0", "1")}
    client = MlflowClient(tracking_uri=f"sqlite:///{home.root}/mlflow.db")
    losses = client.get_metric_history(again["concur-all-seed0"].info.run_id, "loss")
    assert [(point.step, point.value) for point in losses] == [
        (step, 3.0 / step) for step in (1, 2, 3, 4)
    ]
    rows = next(branch.rows for branch in second.ablation.branches if branch.strategy == "concur")
    curve = client.get_metric_history(parent.info.run_id, "exec_at_1_over_size/concur")
    assert {point.step for point in curve} == {rows}
    assert again["concur-all-seed0"].inputs.dataset_inputs
    assert "concur.model_version" in again["concur-all-seed0"].data.tags
    tables = {file.path for file in client.list_artifacts(parent.info.run_id, "tables")}
    assert tables == {"tables/branches.json", "tables/strategies.json"}
    files = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert {"comparison.html", "comparison.md", "comparison.json", "sweep.json"} <= files
    assert second.comparison and "min_length" in Path(second.comparison).read_text(encoding="utf-8")

    # once more: nothing is done, and MLflow holds what it held
    points = {
        name: len(client.get_metric_history(parent.info.run_id, name))
        for name in again[parent.info.run_name].data.metrics
    }
    third = home.ablation()
    assert third.new == () and third.complete and quick.trained - before[0] == {"random seed 1": 1}
    assert {name: run.info.run_id for name, run in home.runs().items()} == {
        name: run.info.run_id for name, run in again.items()
    }
    assert points == {
        name: len(client.get_metric_history(parent.info.run_id, name)) for name in points
    }

    # the table: seeds pooled, differences to the first strategy, corrected over the strategies
    table = {row["strategy"]: row for row in third.strategies}
    assert list(table) == list(STRATEGIES)
    assert table["concur"]["difference"] is None
    assert table["concur"]["seeds"] == 2
    for name in STRATEGIES[1:]:
        assert table[name]["difference"] == pytest.approx(
            table[name]["exec_at_1"] - table["concur"]["exec_at_1"]
        )
        assert 0 < table[name]["p_holm"] <= 1 and table[name]["baseline"] == "concur"
    assert (
        json.loads((Path(third.directory) / "sweep.json").read_text())["fingerprint"]
        == third.ablation.fingerprint
    )


@pytest.mark.slow
def test_branches_of_the_same_rows_share_a_training_per_seed(quick, home):
    # sizes above what there is give the same rows; so does, by another rule, a file of the same
    # strategy
    same = home.path / "shortest.yaml"
    same.write_text("strategy: min_length\nmin_speedup: 3.0\nsize: 50\n")
    untracked = ("tracking.enabled=false",)
    result = home.ablation(
        strategies=("min_length", str(same)),
        sizes=(60, 70),
        overrides=untracked,
        max_parallel_branches=3,
    )
    assert len(result.ablation.branches) == 8 and result.complete and result.mlflow_run is None
    assert quick.trained == {"min_length seed 0": 1, "min_length seed 1": 1}
    by_seed = {
        seed: {branch.trained for branch in result.ablation.branches if branch.seed == seed}
        for seed in (0, 1)
    }
    assert len(by_seed[0]) == len(by_seed[1]) == 1 and by_seed[0] != by_seed[1]
    answers = {branch.answers.candidates.fingerprint for branch in result.ablation.branches}
    assert len(answers) == 2  # seeds answer differently, branches of one seed alike
    assert {row["difference"] for row in result.strategies if row["baseline"]} == {0.0}


@pytest.mark.slow
def test_branches_run_side_by_side_where_there_is_room(quick, home):
    import threading

    quick.meet = threading.Barrier(
        3
    )  # three trainings go on only together: fewer at once would never end
    result = home.ablation(overrides=("tracking.enabled=false",), max_parallel_branches=3)
    assert result.complete and quick.most_at_once == 3


@pytest.mark.slow
def test_what_the_budget_does_not_hold_is_left_out_and_done_with_a_larger_one(
    quick, home, monkeypatch
):
    asked = {"overrides": ("tracking.enabled=false",)}
    plain = home.ablation(**asked, max_gpu_hours=100.0, strategies=("concur",))
    assert plain.complete
    held = Meter.held

    def long(self, phase, devices=1):
        return held(
            self, phase, devices * 1_000_000 if phase == "train" else devices
        )  # a clock that runs fast

    monkeypatch.setattr(Meter, "held", long)
    short = home.ablation(**asked, max_gpu_hours=0.5)
    states = [branch.state for branch in short.ablation.branches]
    assert states[:2] == ["done", "done"]
    assert states.count("left_out") >= 2  # those of concur are there already
    left = [branch for branch in short.ablation.branches if branch.state == "left_out"]
    assert all("larger --max-gpu-hours to continue" in (branch.error or "") for branch in left)
    assert any("left out" in caution for caution in short.ablation.cautions) and not short.complete
    trained = sum(quick.trained.values())
    same = home.ablation(
        **asked, max_gpu_hours=0.5
    )  # nothing is left of it, which is no reason to refuse what is done
    assert [branch.state for branch in same.ablation.branches] == states
    assert same.new == ()
    assert sum(quick.trained.values()) == trained
    monkeypatch.setattr(Meter, "held", held)
    rest = home.ablation(**asked, max_gpu_hours=1e6)
    assert rest.complete and set(rest.new) >= {branch.name for branch in left}
    assert sum(quick.trained.values()) == trained + len(left)


def test_a_budget_too_small_is_refused_before_anything_is_trained(quick, home):
    with pytest.raises(UsageError, match="estimated at .* GPU-hours and the budget is"):
        home.ablation(max_gpu_hours=1e-6)
    assert not quick.trained and not quick.answered


@pytest.mark.slow
def test_an_mlflow_that_is_down_is_a_caution(quick, home):
    result = home.ablation(
        strategies=("concur",),
        seeds=(0,),
        overrides=("tracking.uri=sqlite:////proc/nowhere/mlflow.db",),
    )
    assert result.complete
    assert result.mlflow_run is None
    assert "MLflow was not written" in result.ablation.cautions[-1]
    written = home.ablation(strategies=("concur",), seeds=(0,))
    assert written.mlflow_run and written.new == () and "concur-all-seed0" in home.runs()


# -- with a real Prefect ---------------------------------------------------------------------------


@pytest.mark.slow
def test_branches_are_subflows_side_by_side_and_a_failing_one_is_a_caution(devices, home):
    import threading

    from prefect import settings
    from prefect.artifacts import Artifact
    from prefect.client.orchestration import get_client
    from prefect.testing.utilities import prefect_test_harness

    from flows.ablation.flow import ablate

    devices.meet = threading.Barrier(3)
    devices.broken = {("random", 1)}
    updates = {
        settings.PREFECT_HOME: home.path / "prefect",
        settings.PREFECT_LOCAL_STORAGE_PATH: home.path / "storage",
    }
    with (
        settings.temporary_settings(updates=updates),
        prefect_test_harness(server_startup_timeout=120),
    ):
        # the broken one is tried three times, which would leave the others waiting: it breaks
        # before they meet
        result = ablate(home.config(max_parallel_branches=3, max_gpu_hours=100.0))
        with get_client(sync_client=True) as client:
            runs = {run.name: run for run in client.read_flow_runs()}
        shown = {
            key: Artifact.get(key) for key in ("ablation", "ablation-estimate", "ablation-progress")
        }
    states = {branch.name: branch.state for branch in result.ablation.branches}
    assert [name for name, state in states.items() if state == "failed"] == ["random-all-seed1"]
    assert devices.most_at_once == 3
    parent = next(run for name, run in runs.items() if name.startswith("ablate "))
    assert parent.state_name == "Completed"
    assert {name: run.state_name for name, run in runs.items() if name in states} == {
        name: "Failed" if state == "failed" else "Completed" for name, state in states.items()
    }
    assert all(runs[name].parent_task_run_id for name in states)
    for branch in result.ablation.branches:
        assert branch.prefect_url
        assert branch.prefect_url.endswith(f"/runs/flow-run/{runs[branch.name].id}")
    assert "exec_at_1" in shown["ablation"].data and "trainings" in shown["ablation-estimate"].data
    assert "6 of 6 branches ended" in shown["ablation-progress"].description
    assert "left" in shown["ablation-progress"].description
