"""Curation from snapshot to snapshot: what a training set's rows hold, that a killed run goes on,
and that texts stay on the disk."""

import random
import shutil

import pytest

from kernels_eval.errors import UsageError
from tasks.curation import stage
from tasks.curation.config import CurationConfig
from tasks.curation.decisions import curate
from tasks.curation.tables import deciding_of
from tasks.progress import gathering
from tasks.samples import Samples
from tasks.tables import CURATED, KERNEL_PROFILES, TRACE_FLAGS, VERDICTS, WORKLOADS
from tests.support.samples import FUSION, SINGLE, finished, frame, line_of, sample, samples


def rows(tasks=30):
    rng = random.Random(3)
    return [
        sample(
            f"t{task:02d}",
            index,
            rng.randint(10, 99),
            rng.choice([0.5, 1.0, 2.0, 6.0]),
            ops=FUSION if task % 3 else SINGLE,
        )
        | {
            "answer": f"answer {task}-{index}",
            "code": f"# {task}-{index}",
            "language": "cpp",
            "reason": "verified",
        }
        for task in range(tasks)
        for index in range(3)
    ]


@pytest.mark.parametrize("strategy", ["concur", "shuffled_reasoning", "random"])
def test_every_row_of_a_training_set(tmp_path, strategy):
    samples = rows()
    config = CurationConfig(strategy=strategy)
    made = stage.run(line_of(tmp_path, samples), config).open()
    curated = made.read()
    expected = curate(frame(*samples), config)
    assert curated.columns == CURATED.names
    assert curated["candidate_id"].equals(expected["candidate_id"])
    assert made.manifest["criterion_counts"] == dict(
        sorted(expected["criterion"].value_counts().iter_rows())
    )
    of = {row["candidate_id"]: row for row in samples}
    for row in curated.iter_rows(named=True):
        own = of[row["candidate_id"]]
        giver = of[row["reasoning_from"] or row["candidate_id"]]
        assert (row["reasoning_from"] is None) == (strategy != "shuffled_reasoning")
        assert (row["reasoning"], row["reasoning_tokens"]) == (
            giver["reasoning"],
            giver["reasoning_tokens"],
        )
        assert (row["answer"], row["code"], row["language"]) == (own["answer"], own["code"], "cpp")
        assert (row["speedup"], row["speedup_lower"]) == (
            own["timing"]["speedup"],
            own["timing"]["speedup_lower"],
        )
        assert (row["task_name"], row["task_code"]) == (
            f"name {own['task_id']}",
            f"code {own['task_id']}",
        )
        assert row["operator_kind"] == (
            "single_operator" if own["reference_operators"] == SINGLE else "fusion"
        )


def test_a_killed_run_goes_on_and_a_finished_one_is_served(tmp_path):
    refs = line_of(tmp_path, rows())
    config = CurationConfig()
    half = stage.planned(refs, config)
    whole = curate(deciding_of(refs), config)["candidate_id"].to_list()
    half.append(
        [{"candidate_id": name, "criterion": "there already"} for name in whole[:4]], CURATED
    )
    made = stage.run(refs, config).open()
    assert made.read()["candidate_id"].to_list() == whole and made.manifest["rows"] == len(whole)
    assert stage.decisions_of(made).filter("taken")["candidate_id"].to_list() == sorted(whole)
    before = made.parts()
    assert stage.run(refs, config) == made.ref and made.parts() == before


def test_strategies_lie_side_by_side(tmp_path):
    refs = line_of(tmp_path, rows())
    names = ("concur", "min_length", "random")
    assert len({stage.run(refs, CurationConfig(strategy=name)).fingerprint for name in names}) == 3


def workloads(root, operators):
    """Finished workloads; None: a task that could not be counted."""
    rows = [{"task_id": name, "operators": found or []} for name, found in operators.items()]
    return finished(root, "workloads", rows, WORKLOADS, "w")


def test_operators_are_the_verdicts_where_it_names_any_else_those_that_were_counted(tmp_path):
    samples = [
        sample("a", 0, 10, 2.0, ops=SINGLE),
        sample("b", 0, 10, 2.0, ops=[]),
        sample("c", 0, 10, 2.0) | {"reference_operators": None},
        sample("d", 0, 10, 2.0, ops=[]),
        sample("e", 0, 10, None, status="incorrect", ops=[]),
    ]
    refs = line_of(tmp_path, samples)
    counted = workloads(tmp_path, {"a": FUSION, "b": SINGLE, "c": FUSION, "d": None})
    config = CurationConfig(strategy="random", size=9)
    made = stage.run(refs.model_copy(update={"workloads": counted}), config).open()
    kinds = dict(made.read().select("task_id", "operator_kind").iter_rows())
    assert kinds == {"a": "single_operator", "b": "single_operator", "c": "fusion", "d": "fusion"}
    assert made.manifest["operators_from"] == {"unknown": 1, "verdict": 1, "workload": 2}
    assert made.manifest["upstream"] == "x x x w".split()
    without = stage.run(refs, config).open()
    assert without.fingerprint != made.fingerprint
    assert without.manifest["operators_from"] == {"unknown": 3, "verdict": 1}
    assert dict(without.read().select("task_id", "operator_kind").iter_rows())["b"] == "fusion"


def test_verdicts_of_a_version_without_operators_are_balanced_by_workloads_or_refused(tmp_path):
    line = line_of(tmp_path, rows(4))
    fewer = VERDICTS.remove(VERDICTS.get_field_index("reference_operators"))
    verdicts = finished(tmp_path, "verification", rows(4), fewer, "older")
    older = line.model_copy(update={"verdicts": verdicts})
    with pytest.raises(UsageError, match="needs the columns reference_operators"):
        stage.run(older, CurationConfig())
    counted = workloads(tmp_path, {f"t0{i}": SINGLE for i in range(4)})
    made = stage.run(older.model_copy(update={"workloads": counted}), CurationConfig()).open()
    assert set(made.read()["operator_kind"]) == {"single_operator"}


def test_nothing_taken_is_an_error_that_says_why(tmp_path):
    wrong = [sample("a", 0, 10, None, status="incorrect")]
    with pytest.raises(UsageError, match="took none of 1 candidate: none is correct"):
        stage.run(line_of(tmp_path / "wrong", wrong), CurationConfig())
    slow = [sample("a", 0, 10, 0.5), sample("a", 1, 20, 0.8)]
    said = "2 correct, at most 0.8 times as fast as the reference; 1: .* shorter.*if_empty=shortest"
    with pytest.raises(UsageError, match=said):
        stage.run(line_of(tmp_path / "slow", slow), CurationConfig())
    later = [
        sample("a", 0, 10, None, status="incorrect"),
        sample("a", 1, 10, 2.0) | {"turn": 2, "parent": "a-0"},
    ]
    refs = line_of(tmp_path / "later", later)
    with pytest.raises(UsageError, match="1 correct.*later_turns=true"):
        stage.run(refs, CurationConfig())
    assert stage.run(refs, CurationConfig(later_turns=True)).open().read()[
        "candidate_id"
    ].to_list() == ["a-1"]


def test_a_first_set_of_few_tasks_need_not_be_empty(tmp_path):
    """Of two tasks no sample is both the shortest and the fastest: where that is asked for, the
    shortest are taken, and the set says so."""
    of_two = samples("a-0 10 0.5; a-1 20 0.8; a-2 30 -; b-0 9 -; b-1 10 3.0")
    line = line_of(tmp_path, of_two)
    with gathering() as cautions:
        made = stage.run(line, CurationConfig(if_empty="shortest")).open()
    assert made.manifest["criterion_counts"] == {"shortest_instead": 2}
    assert set(made.read()["candidate_id"]) == {"a-0", "b-1"}, "timed ones"
    assert "the shortest correct, timed sample of each task instead" in made.manifest["instead"]
    assert cautions[0] == made.manifest["instead"] and "slower than the reference" in cautions[1]
    assert "slower" not in cautions[0]
    for refused in ({}, {"if_empty": "shortest", "require_speedup_lower_above": 5.0}):
        advice = "lower curation.require" if "if_empty" in refused else "if_empty=shortest"
        with pytest.raises(UsageError, match=f"took none of 5.*{advice}"):
            stage.run(line, CurationConfig(**refused))
    fast = stage.run(
        line_of(tmp_path / "fast", samples("a-0 10 2.0")), CurationConfig(if_empty="shortest")
    ).open()
    assert fast.manifest["instead"] == ""


def test_the_samples_of_a_set_are_all_that_it_was_made_from(tmp_path):
    """A set that is made again of another's samples lacks none of their measurements."""
    line = line_of(tmp_path, rows())
    measured = {
        "workloads": workloads(tmp_path, {"t00": SINGLE}),
        "flags": finished(tmp_path, "trace-flags", [], TRACE_FLAGS, "f"),
        "profiles": finished(tmp_path, "kernel-profiles", [], KERNEL_PROFILES, "k"),
    }
    samples = line.model_copy(update=measured)
    made = stage.run(samples, CurationConfig()).open()
    assert Samples.above(made) == samples
    again = CurationConfig(strategy="random")
    assert stage.planned(Samples.above(made), again) == stage.planned(samples, again)
    shutil.rmtree(samples.verdicts.open().path)
    with pytest.raises(UsageError, match="the verdicts that .* was made from are gone"):
        Samples.above(made)
