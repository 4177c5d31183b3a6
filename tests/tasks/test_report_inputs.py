"""What the report adds to the scores: groups of tasks, thirds by another model's reasoning, and how
outputs and training traces read."""

import polars as pl
import pyarrow as pa
import pytest

from flows.benchmark import Benchmarked
from tasks.benchmark.report.inputs import (
    grouped_scores,
    single_operators,
    thirds_of,
    traces_of,
    training_traces,
)
from tasks.benchmark.stage import Answers, answers_frame
from tasks.curation.flags import flagged
from tasks.tables import CANDIDATES, CURATED, TASKS, VERDICTS, WORKLOADS
from tests.support.ablations import verdict
from tests.support.samples import finished

DOUBT = (
    "Wait, let me check. Hmm, that is wrong. Actually, I made a mistake. Let me start over. " * 8
)
TASK_COUNT = 12


def answered(root, model, *, tokens=lambda task: None, right=lambda task: True, text="short"):
    candidates = [
        {
            "candidate_id": f"task-{i:03}-0",
            "task_id": f"task-{i:03}",
            "reasoning": text,
            "response": text,
            "reasoning_tokens": tokens(i),
        }
        for i in range(TASK_COUNT)
    ]
    verdicts = [verdict(f"task-{i:03}", 0, 2.0 if right(i) else None) for i in range(TASK_COUNT)]
    return Answers(
        model=model,
        candidates=finished(root, "synthesis", candidates, CANDIDATES, model),
        verdicts=finished(root, "verification", verdicts, VERDICTS, model),
    )


@pytest.fixture
def benchmarked(tmp_path):
    """The tuned model fails on what the base model thinks long about; the tuned one's own lengths
    say the opposite."""
    levels = [{"task_id": f"task-{i:03}", "level": 1 + i % 2} for i in range(TASK_COUNT)]
    suite = finished(tmp_path, "tasks", levels, TASKS)
    work = [
        {
            "task_id": f"task-{i:03}",
            "operator_kind": "fusion" if i % 3 else "single_operator",
            "families": ["matmul", "norm"][: 1 + i % 2],
        }
        for i in range(TASK_COUNT)
    ]
    base = answered(tmp_path, "base", tokens=lambda i: 100 + i, right=lambda i: False)
    tuned = answered(
        tmp_path, "tuned", tokens=lambda i: 1000 - i, right=lambda i: i < 4, text=DOUBT
    )
    scores = finished(tmp_path, "benchmark", [{"x": 1}], pa.schema([("x", pa.int64())]))
    return Benchmarked(
        suite=suite,
        answers=(base, tuned),
        scores=scores,
        workloads=finished(tmp_path, "workloads", work, WORKLOADS),
    )


def values(rows, by, model):
    own = rows.filter(by=by, model=model, metric="exec", k=1)
    return dict(own.select("group", "value").iter_rows())


def groups_of(made):
    frame = answers_frame(list(made.answers))
    return grouped_scores(made.suite, made.workloads, made.answers, frame, ks=(1,))


def test_thirds_are_by_the_base_models_reasoning_and_never_score_it(benchmarked):
    rows, whose = groups_of(benchmarked)
    assert whose == "base"
    assert values(rows, "arl_third", "tuned") == {"short": 1.0, "middle": 0.0, "long": 0.0}
    assert values(rows, "arl_third", "base") == {}
    assert values(rows, "level", "base") == {"1": 0.0, "2": 0.0}
    assert values(rows, "operator_kind", "tuned") == {
        "fusion": pytest.approx(2 / 8),
        "single_operator": pytest.approx(2 / 4),
    }
    assert values(rows, "operator_family", "tuned") == {
        "matmul": pytest.approx(4 / 12),
        "norm": pytest.approx(2 / 6),
    }


def test_recorded_answers_go_before_the_base_model_and_few_tasks_have_no_thirds(
    benchmarked, tmp_path
):
    recorded = answered(tmp_path, "recorded", tokens=lambda i: 50 - i)
    assert thirds_of((*benchmarked.answers, recorded))[0] == "recorded"
    few = answered(tmp_path, "recorded-few", tokens=lambda i: 5 if i < 8 else None).model_copy(
        update={"model": "recorded"}
    )
    assert thirds_of((*benchmarked.answers, few))[0] == "base"
    whose, thirds = thirds_of((benchmarked.answers[1],))
    assert whose == "" and thirds.is_empty(), "the tuned model's own lengths are nobody's thirds"
    alone = benchmarked.model_copy(update={"answers": benchmarked.answers[:1], "workloads": None})
    rows, whose = groups_of(alone)
    assert whose == "" and set(rows["by"]) == {"level"}


def test_outputs_are_read_for_flags_and_lengths(benchmarked):
    base, tuned = (traces_of(each.candidates, flagged) for each in benchmarked.answers)
    assert (tuned.samples, tuned.flagged["self_doubting"], tuned.median_tokens) == (
        TASK_COUNT,
        TASK_COUNT,
        994.5,
    )
    assert base.flagged == dict.fromkeys(tuned.flagged, 0) and base.median_tokens == 105.5


def test_the_training_set_says_what_it_holds(tmp_path):
    kinds = ("single_operator", "fusion", "fusion", "fusion")
    rows = [
        {"candidate_id": f"c{i}", "reasoning_tokens": 10 * i, "operator_kind": kind}
        for i, kind in enumerate(kinds)
    ]
    taken = {"self_doubting": 2, "repetitive": 1, "truncated": 4}
    flags = {"correct": {"self_doubting": 9}, "taken": taken, "left_out": 0}
    curated = finished(tmp_path, "curation", rows, CURATED, trace_flags=flags).open()
    found = training_traces(curated)
    assert (found.samples, found.median_tokens) == (4, 15)
    assert found.flagged["self_doubting"] == 2 and single_operators(curated) == (1, 4)
    schema = pa.schema([("candidate_id", pa.string())])
    bare = finished(tmp_path, "curation", [{"candidate_id": "c"}], schema, "bare").open()
    assert training_traces(bare) is None and single_operators(bare) is None


def test_a_frame_of_answers_says_where_kernels_spent_their_time(benchmarked):
    frame = answers_frame(list(benchmarked.answers))
    assert {"custom_kernel_time_share", "library_calls"} <= set(frame.columns)
    assert frame["model"].n_unique() == 2
    assert isinstance(frame.schema["library_calls"], pl.List)
