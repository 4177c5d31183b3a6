"""The profile of references on its way into the report: asked for by configuration, joined with the
code that was verified."""

import pytest

from flows.benchmark import Benchmarked, _profiles
from flows.config import load_profile
from flows.report import time_by_operator
from kernels_eval.devices import conditions
from tasks.benchmark.diagnosis import Evidence, diagnose
from tasks.benchmark.report.inputs import with_code
from tasks.benchmark.scoring import ScoreRow
from tasks.benchmark.stage import Answers, answers_frame
from tasks.sources import bundled
from tasks.sources.stage import keep
from tasks.store.snapshot import Snapshot
from tasks.synthesis.parsing import parse_response
from tasks.tables import CANDIDATES, PROFILES, VERDICTS
from tasks.workload import operator_times as profiling
from tasks.workload.config import ProfilingConfig
from tasks.workload.record import OperatorTime, Profile

TASK = next(task for task in bundled.load() if task.name == "group_norm_swish")
SPENT = Profile(
    task_id=TASK.task_id,
    operators=(
        OperatorTime(name="sigmoid", us=70.0, calls=1),
        OperatorTime(name="group_norm", us=30.0, calls=1),
    ),
    total_us=100.0,
    clock="cpu",
)


def snapshot(root, stage, name, rows, schema):
    made = Snapshot(str(root), stage, name)
    made.append(rows, schema)
    return made.publish(config={}, rows=len(rows)).ref


@pytest.fixture
def benchmarked(tmp_path):
    """The five recorded answers to one task, all of them called correct, by one model."""
    codes = [parse_response(response).code for response in bundled.responses(TASK.name, "cpp")]
    facts = {"task_id": TASK.task_id, "language": "cpp"}
    candidates = [
        facts | {"candidate_id": f"c{n}", "generator": "m", "sample_index": n, "code": code}
        for n, code in enumerate(codes)
    ]
    verdicts = [
        facts | {"candidate_id": f"c{n}", "status": "correct", "reason": "ok", "device": "cpu"}
        for n in range(len(codes))
    ]
    answers = Answers(
        model="m",
        candidates=snapshot(tmp_path, "synthesis", "c", candidates, CANDIDATES),
        verdicts=snapshot(tmp_path, "verification", "v", verdicts, VERDICTS),
    )
    suite = keep([TASK], str(tmp_path), {})
    return Benchmarked(suite=suite, answers=(answers,), scores=answers.verdicts)


def test_without_a_profile_nothing_is_read(benchmarked):
    assert time_by_operator(benchmarked) == {}
    assert not load_profile("local", []).benchmark.operator_times, (
        "off unless somebody asks: seconds a task"
    )


def test_what_a_profile_says_reaches_the_findings(benchmarked, monkeypatch):
    """The stage's own snapshot, filled by hand, so that nothing is run here: the step finds it
    finished, and needs no Prefect server."""
    monkeypatch.setattr("flows.benchmark.call_stage", lambda step, *args: step.fn(*args))
    config = load_profile("local", ["benchmark.operator_times=true"])
    assert config.benchmark.operator_times
    asked = ProfilingConfig(threads=config.verification.eval.threads)
    planned = profiling.planned(benchmarked.suite, asked, "cpu", conditions(config.language).device)
    planned.append([SPENT.model_dump(mode="json") | {"profile_key": "k"}], PROFILES)
    planned.publish(config=asked, rows=1)
    ref = _profiles(config, benchmarked.suite)
    assert ref == planned.ref
    with_it = benchmarked.model_copy(update={"profiles": ref})
    spent = time_by_operator(with_it)
    assert spent == {TASK.task_id: {"sigmoid": 0.7, "group_norm": 0.3}}
    frame = with_code(answers_frame(list(with_it.answers)), with_it.answers)
    assert frame.height == 5 and frame["code"].null_count() == 0
    scored = ScoreRow(model="m", track="any", metric="exec", tasks=1, samples=5)
    (finding,) = diagnose([scored], Evidence(verdicts=frame, time_by_operator=spent))
    assert finding.sign == "replaced" and finding.numbers["share"] == pytest.approx(4 / 5)
    assert finding.numbers["answers_count"] == 5
