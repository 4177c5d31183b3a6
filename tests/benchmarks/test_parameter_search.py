"""The benchmark of the parameter search: resumable, equal code measured once, tables of what is
there."""

import json
import re
import threading
from argparse import Namespace

import pytest

from benchmarks import parameter_search as benchmark
from benchmarks.parameter_search import (
    Asked,
    Begin,
    OutOfTime,
    TakingTurns,
    Work,
    begins_of,
    bytes_of,
    code_key,
    first_correct,
    in_order,
    read_verdicts,
    report,
)
from kernels_eval.evaluator import Evaluator
from kernels_eval.records import Candidate, KernelTask
from tests.support.searched import verdict

ARGUMENTS = {
    **{"language": "cpp", "limit": 2, "evaluations": 6, "max_s": 0.1, "seed": 0},
    **{"builders": 1, "compile": False, "operators": "parameters", "methods": "evolution,random"},
    **{"only": None, "rounds": 3, "part": 0, "gpus": 1, "lanes": 1, "most_gb": 16.0, "per_task": 1},
}


class Unbuilt:
    """Stands in for the evaluator: the speed of a kernel is how short its source is."""

    waited_s = 0.0

    def __init__(self, *_): ...

    def close(self): ...

    def run(self, task, candidate, prepared):
        asked.append(candidate.candidate_id)
        if len(asked) == Unbuilt.stops_at:
            raise OutOfTime
        return verdict(task, candidate, 1.0 + (len(candidate.code) % 7) / 10)


asked = []


def test_who_times_is_alone_and_all_who_wait_time_before_anybody_begins_anew(tmp_path, monkeypatch):
    """Each of three asks for its phases in turn; flock knows them apart by their open files."""
    running, events, lock = set(), [], threading.Lock()

    def phases(self, task, candidate, prepared):
        for phase in ("load_s", "correctness_s", "timing_s", "attribution_s"):
            with lock:
                running.discard(task)
            self.on_phase(phase)
            with lock:
                running.add(task)
                events.append((task, phase, set(running)))
            if phase == "correctness_s" and candidate == 0:
                started.wait(60)  # nobody times before all are in a phase
        with lock:
            running.discard(task)

    def verdicts(each, name):
        for number in range(5):
            each.run(name, number, None)

    monkeypatch.setattr(Evaluator, "run", phases)
    started = threading.Barrier(3)
    made = [object.__new__(TakingTurns) for _ in range(3)]
    threads = []
    for name, each in zip("abc", made, strict=True):
        each.turns = tmp_path / "turns-0"
        threads.append(threading.Thread(target=verdicts, args=(each, name)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert len(events) == 60
    assert all(others == {name} for name, phase, others in events if phase == "timing_s")
    # the first three timings follow one another: who has timed waits for those who wait to time
    first = [phase for _, phase, _ in events if phase in ("timing_s", "attribution_s")][:3]
    assert first == ["timing_s"] * 3


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "TakingTurns", Unbuilt)
    monkeypatch.setattr(Work, "_prepare", lambda *_: "prepared")
    asked.clear()
    Unbuilt.stops_at = None

    def made():
        return Work(Namespace(**ARGUMENTS), tmp_path / "part-0", deadline=float("inf"))

    return made


def test_it_resumes_where_it_was_stopped_and_measures_nothing_twice(work, tmp_path, capsys):
    begins = list(begins_of(Namespace(**ARGUMENTS)))
    assert len(begins) == 2
    Unbuilt.stops_at = 9
    with work() as first, pytest.raises(OutOfTime):
        first.run(begins)
    Unbuilt.stops_at = None
    with work() as rest:
        rest.run(begins)
    measured = asked[:8] + asked[9:]
    assert len(measured) == len(set(measured)) == len(read_verdicts(rest.file))
    assert report(Namespace(**ARGUMENTS, out=str(tmp_path))) == 0
    table = capsys.readouterr().out
    told = json.loads((tmp_path / "report.json").read_text())
    assert told["evolution"]["tasks"] == told["random"]["tasks"] == 2
    assert told["evolution"]["evaluations"] <= 12 and len(told["random"]["curve"]) == 6
    assert re.search(r"\| confirmed gain, geometric mean \(95 %\) \| \d\.\d+ \(", table)
    assert told["evolution"]["gain"]["value"] == pytest.approx(told["evolution"]["curve"][-1])


def test_tables_hold_only_finished_tasks_and_another_process_goes_on(work, tmp_path, capsys):
    begins = list(begins_of(Namespace(**ARGUMENTS)))
    Unbuilt.stops_at = 9
    with work() as first, pytest.raises(OutOfTime):
        first.run(begins)
    assert report(Namespace(**ARGUMENTS, out=str(tmp_path))) == 3
    told = json.loads((tmp_path / "report.json").read_text())
    assert told["finished"] < told["begun"] == 2
    assert told["evolution"]["tasks"] == told["random"]["tasks"] == told["finished"]
    (tmp_path / "part-0").rename(tmp_path / "part-9")
    Unbuilt.stops_at = None
    with work() as rest:
        rest.run(begins)
    assert len(asked[:8] + asked[9:]) == len(set(asked[:8] + asked[9:]))
    assert report(Namespace(**ARGUMENTS, out=str(tmp_path))) == 0
    assert "2 of 2 candidates done" in capsys.readouterr().out


def test_verdicts_that_take_minutes_come_last(work, monkeypatch):
    """While one process runs compute-sanitizer, the others of its GPU cannot time."""

    def needed(self, begin):
        for part, sanitized in (("start", False), ("winner", True), ("after", False)):
            yield [Asked(f"{begin.code} {part}", begin.task, begin.code, sanitized=sanitized)]

    monkeypatch.setattr(Work, "needed", needed)
    monkeypatch.setattr(Work, "_candidate", lambda self, each: each)
    monkeypatch.setattr(Work, "evaluator", lambda self, each: Judged(each.key))
    task = KernelTask(task_id="t", name="t", code="x")
    names = [str(number) for number in range(benchmark.AT_ONCE + 2)]
    with work() as one:
        one.run([Begin(task, name) for name in names])
    kinds = [key.split()[1] for key in asked]
    assert len(asked) == len(set(asked)) == 3 * len(names)
    assert set(kinds[: len(names)]) == {"start"}
    # the rest of a task follows as soon as it may
    assert kinds[len(names) :] == ["winner", "after"] * len(names)


class Judged:
    """Stands in for the evaluator of one verdict, and notes its key."""

    waited_s = 0.0

    def __init__(self, key):
        self.key = key

    def run(self, task, candidate, prepared):
        asked.append(self.key)
        made = Candidate(
            candidate_id="c", task_id="t", language="cpp", generator="g", code=candidate.code
        )
        return verdict(task, made, 1.0)


def test_large_tasks_go_to_the_first_process_of_a_gpu_and_long_searches_come_first(monkeypatch):
    begins = [
        Begin(name, "", settings) for name, settings in zip("aBcD", (1, 9, 5, 7), strict=True)
    ]
    monkeypatch.setattr(benchmark, "bytes_of", lambda name: 3e9 if name.isupper() else 1e6)
    first, other = ([each.task for each in in_order(begins, large=large)] for large in (1, 0))
    assert (first, other) == (["B", "D", "c", "a"], ["c", "a"])


def test_the_next_candidate_of_a_task_takes_the_place_of_one_that_is_not_correct():
    task = KernelTask(task_id="t", name="t", code="x")
    begin = Begin(task, "a", 0, ("b", "c"))
    wrong, right = {"status": "incorrect"}, {"status": "correct"}
    known = {}
    for code, row, next_one in (("a", wrong, "b"), ("b", wrong, "c"), ("c", right, "c")):
        assert first_correct(begin, known).code == code
        known[code_key(task, code)] = row
        assert first_correct(begin, known).code == next_one
    assert first_correct(begin._replace(others=("b",)), known).code == "a"  # none is correct


def test_more_candidates_a_task_share_those_that_take_their_places_and_weigh_as_one_task(
    monkeypatch,
):
    task = KernelTask(task_id="a", name="a", code="x = 1")
    texts = ["1", "2", "2", "3", "4", "5"]
    monkeypatch.setattr(benchmark, "recorded", lambda *_: [(task, text) for text in texts])
    monkeypatch.setattr(benchmark, "parse_response", lambda text: Namespace(code=text))
    monkeypatch.setattr(
        benchmark, "parameters_of", lambda *_: [Namespace(name="BLOCK", values=(1, 2))]
    )
    begins = begins_of(Namespace(**ARGUMENTS | {"per_task": 2}))
    assert [(each.code, each.others) for each in begins] == [("1", ("3", "5")), ("2", ("4",))]
    mean = benchmark.mean_of([("a", 4.0), ("a", 1.0), ("b", 2.0), ("b", None), ("c", 2.0)])
    assert mean == pytest.approx({"value": 2.0, "lower": 2.0, "upper": 2.0})


def test_two_processes_share_the_tasks_and_repeat_nothing(work, tmp_path):
    begins = list(begins_of(Namespace(**ARGUMENTS)))
    with work() as one, work() as other:
        other.folder, other.file = tmp_path / "part-1", tmp_path / "part-1" / "verdicts.jsonl"
        other.folder.mkdir()
        assert one.claim(begins[0]) and not other.claim(begins[0])
        other.run(begins)  # the second task only
        assert not one.claim(begins[1])
        mine = len(asked)
        one.claims.pop().close()
        one.run(begins)
    assert len(asked) == len(set(asked)) > mine > 0
    assert report(Namespace(**ARGUMENTS, out=str(tmp_path))) == 0


def test_the_size_of_a_task_needs_no_memory():
    huge = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x + 1
def get_inputs():
    return [torch.rand(1 << 20, 1 << 20)]
def get_init_inputs():
    return []
"""
    assert bytes_of(KernelTask(task_id="t", name="t", source="s", code=huge)) == 8 << 40
    assert bytes_of(KernelTask(task_id="t", name="t", source="s", code="x = 1\n")) == 0


def test_a_line_that_a_kill_cut_is_left_out(tmp_path):
    file = tmp_path / "verdicts.jsonl"
    file.write_text('{"key": "a", "run_s": 1}\n{"key": "b", "ru')
    assert read_verdicts(file) == {"a": {"run_s": 1}}
    assert read_verdicts(tmp_path / "none") == {}
