"""Ablations: what they are made of, and that a branch that fails costs no more than it must."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import UUID

import pytest
from click.testing import CliRunner

from flows.ablation.branch import sole_maker
from flows.ablation.plan import (
    AblationConfig,
    ablation_config,
    branch_pipeline,
    branches_at_once,
    pipeline_of,
    planned_branches,
)
from flows.ablation.records import sole_writer
from flows.ablation.results import cautions_of
from flows.ablation.samples import samples_of
from flows.cli.main import main
from flows.cli.pages import of_ablation
from flows.confirm import confirmed_samples
from kernels_eval.errors import UsageError
from tasks.benchmark.comparison.records import Branch
from tasks.benchmark.stage import Answers
from tasks.curation.config import CurationConfig
from tasks.curation.step import curate
from tasks.decontamination.deduplication import equal_kernels
from tasks.progress import observed_by
from tasks.store import Snapshot, SnapshotRef
from tasks.synthesis import sizing
from tasks.tables import CORRECT
from tests.support.cases import cases
from tests.support.quick_ablations import devices, profile, quick, samples
from tests.support.waiting import until

CASES = cases("flows")

__all__ = ["devices", "quick"]
STRATEGIES = ("concur", "random", "min_length")
REF = SnapshotRef(root="r", stage="verification", fingerprint="f")


# -- the plan --------------------------------------------------------------------------------------


def test_branches_are_strategies_by_sizes_by_seeds_each_with_its_seed_everywhere():
    config = AblationConfig(strategies=("concur", "random"), sizes=(None, 4), seeds=(0, 3))
    pipeline = pipeline_of(config)
    plans = planned_branches(config, pipeline.curation)
    assert [plan.name for plan in plans] == [
        *("concur-all-seed0", "concur-all-seed3", "concur-4-seed0", "concur-4-seed3"),
        *("random-all-seed0", "random-all-seed3", "random-4-seed0", "random-4-seed3"),
    ]
    own = branch_pipeline(pipeline, plans[-1])
    assert (own.curation.strategy, own.curation.size, own.curation.seed, own.training.seed) == (
        "random",
        4,
        3,
        3,
    )
    # which tasks are held out of training is no matter of the seed: losses of branches are of the
    # same tasks
    assert own.training.held_out == pipeline.training.held_out
    n = own.benchmark.samples_per_task
    drawn = [
        set(range(start, start + n))
        for start in (branch_pipeline(pipeline, plan).benchmark.sampling.seed for plan in plans[:2])
    ]
    assert drawn[0].isdisjoint(drawn[1])
    # where it runs decides nothing of what it is
    assert branch_pipeline(pipeline, plans[0], share=2).verification.workers == 2
    assert (
        branch_pipeline(pipeline, plans[0], share=2).synthesis.server.args
        == pipeline.synthesis.server.args
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
    plan = planned_branches(config, served.curation)[0]
    of_two = branch_pipeline(served, plan, share=2).synthesis.server
    assert (of_two.replicas, of_two.tensor_parallel) == (1, 2)


def test_a_strategy_file_is_called_by_its_name_and_its_size_holds_where_none_is_asked_for(tmp_path):
    path = tmp_path / "quick_ones.yaml"
    path.write_text("strategy: speedup\nsize: 7\n")
    config = AblationConfig(strategies=(str(path),), seeds=(1,))
    (plan,) = planned_branches(config, CurationConfig())
    assert (plan.name, plan.strategy, plan.size, plan.curation.strategy) == (
        "quick_ones-7-seed1",
        "quick_ones",
        7,
        "speedup",
    )


def test_a_branch_keeps_the_profile_s_curation_but_what_its_strategy_says(tmp_path):
    path = tmp_path / "fast_ones.yaml"
    path.write_text("strategy: concur\nmin_speedup: 3.0\n")
    keys = {"without_reasoning": True, "min_speedup": 2.0, "single_operator_quota": 0.25}
    config = AblationConfig(
        overrides=tuple(f"curation.{key}={value}" for key, value in keys.items()),
        strategies=("concur", "balanced_random", str(path)),
        seeds=(1,),
    )
    pipeline = pipeline_of(config)
    plans = planned_branches(config, pipeline.curation)
    made = [branch_pipeline(pipeline, plan).curation.model_dump() for plan in plans]
    wanted = CurationConfig(**keys, seed=1).model_dump()
    assert made == [
        wanted,
        wanted | {"strategy": "balanced_random"},
        wanted | {"min_speedup": 3.0},
    ]


@pytest.mark.parametrize("asked, words", CASES["bad_ablations"])
def test_bad_input_is_one_clear_error(asked, words):
    with pytest.raises(UsageError) as caught:
        config = ablation_config(**asked)
        planned_branches(config, pipeline_of(config).curation)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "option, value",
    [("--sizes", "0"), ("--sizes", "1all"), ("--sizes", "5,-1"), ("--sizes", ""), ("--seeds", "")],
)
def test_what_is_no_list_of_numbers_is_refused(option, value):
    refused = CliRunner().invoke(main, ["ablate", option, value])
    assert refused.exit_code == 2
    assert f"error: {option} " in refused.output and "is not a list of numbers" in refused.output


def test_sizes_hold_in_their_order_and_all_is_no_limit(monkeypatch):
    seen = {}

    def read(**given):
        seen.update(given)
        raise UsageError("seen", "stop here")

    monkeypatch.setattr("flows.ablation.plan.ablation_config", read)
    words = ["ablate", "--strategies", "concur, random", "--sizes", "7, all,7", "--seeds", "1,0"]
    CliRunner().invoke(main, words)
    assert (seen["sizes"], seen["seeds"]) == ([7, None], [1, 0])
    assert seen["strategies"] == ["concur", "random"]


# -- one at a time ---------------------------------------------------------------------------------


def test_one_ablation_runs_once_at_a_time(tmp_path):
    with sole_writer(tmp_path):
        with pytest.raises(UsageError, match="already running"), sole_writer(tmp_path):
            raise AssertionError("two at once")
    with sole_writer(tmp_path):
        pass


def test_one_at_a_time_makes_a_snapshot_and_whoever_waits_says_so_once(tmp_path, caplog):
    planned = Snapshot(str(tmp_path), "training", "0" * 32)
    order = []

    def second():
        with sole_maker(planned):
            order.append("second")

    with ThreadPoolExecutor(1) as pool:
        with sole_maker(planned):
            waiting = pool.submit(second)
            until(lambda: caplog.records, "the second says that it waits")
            order.append("first")
        waiting.result()
    assert order == ["first", "second"]
    (said,) = [each.getMessage() for each in caplog.records]
    assert "another branch or run makes the same" in said and planned.fingerprint in said


# -- which ablation it is --------------------------------------------------------------------------


def test_samples_named_by_their_verdicts_come_with_their_flags_and_profiles(tmp_path):
    """An ablation that starts from verdicts is the one that a refresh of them began."""
    verdicts = samples(tmp_path).open()
    candidates = verdicts.above("synthesis")
    made = {}
    for stage in ("trace-flags", "kernel-profiles"):
        snapshot = Snapshot(str(tmp_path), stage, f"of-{stage}")
        upstream = [verdicts.fingerprint, candidates.fingerprint]
        made[stage] = snapshot.publish(config={}, upstream=upstream, rows=0).ref
    _, found = samples_of(str(tmp_path), verdicts.fingerprint)
    assert (found.flags, found.profiles) == (made["trace-flags"], made["kernel-profiles"])
    assert (found.verdicts, found.candidates) == (verdicts.ref, candidates.ref)


@pytest.mark.slow
def test_a_resumed_ablation_of_profiled_samples_is_the_same_ablation(quick, home, monkeypatch):
    """The refresh gives the samples in every call: nothing of them is looked up on another way."""
    _, found = samples_of(str(home.root), home.verdicts)
    profiles = Snapshot(str(home.root), "kernel-profiles", "p").publish(config={}, rows=0).ref
    profiled = found.model_copy(update={"profiles": profiles})
    monkeypatch.setattr("flows.ablation.flow.verified_samples", lambda pipeline: profiled)
    asked = {
        "strategies": ("concur",),
        "seeds": (0,),
        "verdicts": None,
        "overrides": ("tracking.enabled=false", "profile.enabled=true"),
    }
    first, again = home.ablation(**asked), home.ablation(**asked)
    assert again.ablation.fingerprint == first.ablation.fingerprint
    assert (first.new, again.new) == (("concur-all-seed0",), ())
    without = found.model_copy(update={"profiles": None})
    monkeypatch.setattr("flows.ablation.flow.verified_samples", lambda pipeline: without)
    assert home.ablation(**asked).ablation.fingerprint != first.ablation.fingerprint


def test_sets_of_different_sizes_are_a_caution_that_names_them():
    def done(strategy, rows, seed=0):
        answers = Answers(model="tuned", candidates=REF, verdicts=REF)
        facts = {"strategy": strategy, "seed": seed, "rows": rows, "answers": answers}
        return Branch(name=f"{strategy}{seed}", state="done", **facts)

    equal = [done("concur", 9, 1), done("random", 9, 1)]
    assert cautions_of(equal) == ()
    (said,) = cautions_of([done("concur", 9), done("random", 7), *equal])
    assert "of seed 0" in said and "(concur 9, random 7)" in said


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
        for plan in planned_branches(home.config(), CurationConfig())
    }
    (broken,) = [branch for branch in first.ablation.branches if branch.state == "failed"]
    assert broken.error and broken.error.startswith("the device fell off the bus")
    assert "\n" not in broken.error and "\x1b" not in broken.error
    assert not first.complete and "1 of 6 branches failed" in first.ablation.cautions[0]
    assert quick.trained == {f"{name} seed {seed}": 1 for name in STRATEGIES for seed in (0, 1)}
    assert quick.answered["small"] == 1  # the base model, once for all branches
    runs = home.runs()
    (parent,) = [run for run in runs.values() if run.data.tags.get("concur.kind") == "ablation"]
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
    assert {"curated_rows", "loss", "held_out_loss", "exec_at_1_over_size"} <= shared
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
    files = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert {"comparison.html", "comparison.md", "comparison.json", "ablation.json"} <= files
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

    # the table is the comparison's: seeds pooled, differences to the first strategy, corrected
    table = {row["strategy"]: row for row in third.strategies}
    assert sorted(table) == sorted(STRATEGIES)
    assert table["concur"]["difference"] is None
    assert table["concur"]["seeds"] == 2
    for name in STRATEGIES[1:]:
        assert table[name]["difference"] == pytest.approx(
            table[name]["exec_at_1"] - table["concur"]["exec_at_1"]
        )
        assert 0 < table[name]["p_holm"] <= 1 and table[name]["baseline"] == "concur"
    data = third.model_dump(mode="json")
    charts = {"mlflow_page": "http://m/#/runs", "pages": "concur up --root r"}
    page = of_ablation(data | data["ablation"] | {"seconds": 61.0} | charts)
    assert all(each in page for each in charts.values())
    (shown,) = client.search_experiments(filter_string="name = 'concur'")
    view = json.loads(shown.tags[f"mlflow.sharedViewState.{parent.info.run_id}"])
    branches = client.search_runs([shown.experiment_id], view["searchFilter"])
    assert {run.info.run_name for run in branches} == set(states)
    assert page.splitlines()[0].endswith("branches done in 61 s")
    told = json.loads(Path(third.comparison).with_suffix(".json").read_text())
    assert third.finding == told["headline"] and third.finding[:60] in page
    assert all(name in page for name in (*STRATEGIES, "against concur", str(third.comparison)))
    assert (
        json.loads((Path(third.directory) / "ablation.json").read_text())["fingerprint"]
        == third.ablation.fingerprint
    )


@pytest.mark.slow
def test_what_any_branch_takes_is_confirmed_once_for_all(quick, home):
    """Samples that were only screened; a coin decides which of them hold."""
    home.verdicts = samples(home.root, level="screen").fingerprint
    notes = []
    with observed_by(lambda *told: notes.append(told)):
        result = home.ablation(overrides=("tracking.enabled=false",))
    scored_on = "scored on 3 held-out tasks: bundled (benchmark.tasks)"
    assert ("ablation", 0, 6, scored_on) in notes
    assert result.complete
    taken = set()
    for branch in result.ablation.branches:
        made = Snapshot(str(home.root), "curation", str(branch.curated))
        assert made.manifest["unconfirmed"] == 0
        taken |= set(made.read()["candidate_id"])
        answers = branch.answers.verdicts.open().read()
        assert set(answers.filter(CORRECT)["level"]) == {"confirm"}
    confirmed = {name: n for (name, level), n in quick.judged.items() if level == "confirm"}
    of_samples = {name for name in confirmed if name.startswith("task")}
    assert taken < of_samples and set(confirmed.values()) == {1}, "some did not hold"
    screened = {name for name, level in quick.judged if level == "screen"}
    assert confirmed.keys() - of_samples < screened, "every answer is screened first"
    before = quick.judged.copy()
    assert home.ablation(overrides=("tracking.enabled=false",)).new == ()
    assert quick.judged == before


@pytest.mark.slow
def test_a_branch_has_the_set_that_a_refresh_makes_by_its_strategy_and_concur_s_size(quick, home):
    """Whatever else it is compared with: what another branch confirms changes no set."""
    home.verdicts = samples(home.root, level="screen").fingerprint
    strategies = ("random", "concur", "min_length", "speedup")
    asked = {"strategies": strategies, "seeds": (0,)}
    asked["overrides"] = ("tracking.enabled=false", "curation.max_per_task=null")
    result = home.ablation(**asked)
    rows = {branch.strategy: branch.rows for branch in result.ablation.branches}
    assert list(rows) == list(strategies)
    assert set(rows.values()) == {rows["concur"]} and not result.ablation.cautions, rows
    pipeline = pipeline_of(home.config(**asked))
    _, screened = samples_of(pipeline.root, home.verdicts)
    equal = equal_kernels(pipeline.deduplication)
    plans = planned_branches(home.config(**asked), pipeline.curation)
    for branch, plan in zip(result.ablation.branches, plans, strict=True):
        size = None if plan.strategy == "concur" else rows["concur"]
        rule = plan.curation.model_copy(update={"size": size})
        own = confirmed_samples(pipeline, screened, [rule])
        made = curate.fn(own, rule, equal).open()
        found = Snapshot(str(home.root), "curation", str(branch.curated))
        assert set(found.read()["candidate_id"]) == set(made.read()["candidate_id"]), branch.name


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
def test_branches_are_subflows_side_by_side_and_a_failing_one_is_a_caution(
    devices, home, prefect_home
):
    import threading

    from prefect.artifacts import Artifact
    from prefect.client.orchestration import get_client

    from flows.ablation.flow import ablate

    devices.meet = threading.Barrier(3)
    devices.broken = {("random", 1)}
    # the broken one is tried three times, which would leave the others waiting: it breaks
    # before they meet
    result = ablate(home.config(max_parallel_branches=3))
    # other tests use the server, too
    pages = {branch.name: branch.prefect_url for branch in result.ablation.branches}
    ids = {name: UUID(url.rpartition("/")[2]) for name, url in pages.items()}
    with get_client(sync_client=True) as client:
        runs = {name: client.read_flow_run(each) for name, each in ids.items()}
        parent = client.read_flow_run(UUID(result.ablation.prefect_url.rpartition("/")[2]))
    shown = {key: Artifact.get(key) for key in ("ablation", "progress")}
    states = {branch.name: branch.state for branch in result.ablation.branches}
    assert [name for name, state in states.items() if state == "failed"] == ["random-all-seed1"]
    assert devices.most_at_once == 3
    assert parent.state_name == "Completed"
    assert {run.name: run.state_name for run in runs.values()} == {
        name: "Failed" if state == "failed" else "Completed" for name, state in states.items()
    }
    assert all(runs[name].parent_task_run_id for name in states)
    assert "exec_at_1" in shown["ablation"].data
    assert shown["progress"].description == "the run is done"
