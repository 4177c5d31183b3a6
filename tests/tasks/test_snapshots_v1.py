"""Snapshots written before versions replaced code hashes: every stage still reads them.

tests/data/snapshots_v1 holds a few rows a stage of the demo run of commit c3c5930, and the journal
of a killed synthesis.
"""

import shutil
from pathlib import Path

import pytest

from kernels_eval.records import Verdict
from tasks.analysis import stage as analysis
from tasks.analysis.config import ObservationConfig
from tasks.benchmark import stage as benchmark
from tasks.benchmark.config import BenchmarkConfig
from tasks.curation import stage as curation
from tasks.curation.config import CurationConfig
from tasks.samples import Samples
from tasks.sources.stage import read_tasks
from tasks.store import known_rows, snapshots
from tasks.tables import CANDIDATES
from tasks.versions import STAGES

WRITTEN = Path(__file__).parents[1] / "data" / "snapshots_v1"
KEPT = (
    *("tasks", "training-tasks", "synthesis", "verification", "workloads", "trace-flags"),
    *("curation", "training", "benchmark", "analysis"),
)


@pytest.fixture
def root(tmp_path):
    return str(shutil.copytree(WRITTEN, tmp_path / "root"))


def of(root, stage):
    (found,) = [each for each in snapshots(root, stage) if each.finished]
    return found


@pytest.mark.parametrize("stage", KEPT)
def test_rows_and_manifest_are_read(root, stage):
    assert stage in STAGES
    snapshot = of(root, stage)
    assert snapshot.read().height == snapshot.manifest["rows"] > 0
    assert snapshot.manifest["fingerprint"] == snapshot.fingerprint


def test_records_are_made_of_the_rows(root):
    rows = of(root, "verification").read().drop("verdict_key").to_dicts()
    verdicts = [Verdict.model_validate(row) for row in rows]
    assert {each.status.value for each in verdicts} > {"correct"}
    assert all(each.timing for each in verdicts if each.status.value == "correct")
    tasks = read_tasks(of(root, "training-tasks").ref)
    assert {each.task_id for each in verdicts} == {task.task_id for task in tasks}
    assert benchmark.scores_of(of(root, "benchmark").ref)
    assert analysis.found_in(of(root, "analysis").ref).finding


def test_answers_are_reused_those_of_a_journal_too(root):
    keys = of(root, "synthesis").keys("request_key")
    (unfinished,) = [each for each in snapshots(root, "synthesis") if not each.finished]
    assert not unfinished.parts() and list(Path(unfinished.path).glob(".journal-*"))
    unfinished.save_journals(CANDIDATES)
    keys |= unfinished.keys("request_key")
    rows = list(known_rows(root, "synthesis", "request_key", keys, CANDIDATES))
    assert len(rows) == len(keys) == 4


def test_curation_analysis_and_scoring_accept_them(root):
    names = ("verification", "synthesis", "training-tasks", "workloads", "trace-flags")
    verdicts, candidates, tasks, workloads, flags = (of(root, name).ref for name in names)
    chosen = CurationConfig.model_validate(of(root, "curation").manifest["config"])
    taken_then = of(root, "curation").read()["candidate_id"].to_list()
    samples = Samples(
        tasks=tasks, candidates=candidates, verdicts=verdicts, workloads=workloads, flags=flags
    )
    made = curation.run(samples, chosen)
    assert sorted(made.open().read()["candidate_id"]) == sorted(taken_then)
    assert analysis.run(verdicts, candidates, ObservationConfig()).open().finished
    answers = [benchmark.Answers(model="m", candidates=candidates, verdicts=verdicts)]
    scored = benchmark.run(answers, BenchmarkConfig(samples_per_task=2, resamples=100))
    assert benchmark.scores_of(scored)
