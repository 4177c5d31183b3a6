"""Lanes of one device, with real locks: who is alone excludes everybody, who waits comes next, a
process that ends leaves nothing locked, and what a candidate left running is stopped.
"""

import threading
from contextlib import contextmanager
from fcntl import LOCK_SH

import pytest

from kernels_eval import judge
from kernels_eval.judge.messages import Stop, VerdictDraft
from kernels_eval.judge.paired_timing import PairedClock
from kernels_eval.judge.reference_handle import Crowded, memory_shared
from kernels_eval.judge.turns import Turns
from kernels_eval.pool import worker
from kernels_eval.pool.worker import KernelWorker
from kernels_eval.protocol import ReadState
from kernels_eval.records import Reason
from kernels_eval.sandbox.child import Child
from tests.support import kernels
from tests.support.kernels import AFFINE, QUICK, SPINS, WEIGHTED, module, verifying
from tests.support.processes import started
from tests.support.waiting import until

LANE = """
import os, sys
from contextlib import contextmanager
from pathlib import Path
from kernels_eval.judge.turns import Turns

name, folder = sys.argv[1], Path(sys.argv[2])
log = os.open(folder / "log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

def note(what):
    os.write(log, f"{name} {what}\\n".encode())

@contextmanager
def aside():
    note("aside")
    yield

turns = Turns(folder / "turns", aside, lambda: note("aside"))
"""


def lane(name, folder, work):
    return started(LANE + work, name, folder)


ROUNDS = 40
TAKES_TURNS = f"""
print("ready", flush=True)
input()
for _ in range({ROUNDS}):
    with turns.shared():
        note("works")
        turns.give_way()
        with turns.alone():
            note("begins")
            note("ends")
        turns.give_way()
        note("works")
turns.end()
"""


def test_who_is_alone_excludes_the_others_and_all_get_their_turns(tmp_path):
    with lane("a", tmp_path, TAKES_TURNS) as a, lane("b", tmp_path, TAKES_TURNS) as b:
        for each in (a, b):
            assert each.stdout.readline() == "ready\n"
        for each in (a, b):
            each.stdin.write("\n")
            each.stdin.flush()
        assert [each.wait() for each in (a, b)] == [0, 0]
    notes = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    out = {"a": True, "b": True}
    for (name, what), (then, after) in zip(notes, [*notes[1:], ("", "")], strict=True):
        out[name] = what == "aside"
        if what == "begins":
            assert (then, after) == (name, "ends"), "nothing comes between"
            assert out["b" if name == "a" else "a"], "the other one is aside, or not there"
    assert sum(what == "ends" for _, what in notes) == 2 * ROUNDS


def test_a_process_that_is_killed_leaves_its_turn_to_the_others(tmp_path):
    holds = """
with turns.shared(), turns.alone():
    print("alone", flush=True)
    input()
"""
    got = []

    def take():
        mine = Turns(tmp_path / "turns")
        with mine.shared(), mine.alone():
            got.append(True)

    with lane("holder", tmp_path, holds) as holder:
        assert holder.stdout.readline() == "alone\n"
        waiting = threading.Thread(target=take)
        waiting.start()
        holder.kill()
        waiting.join()
    assert got


def test_who_waits_to_be_alone_comes_before_who_asks_again(tmp_path):
    """And who has waited goes on by a clock that stood still."""
    done, asides = threading.Event(), []

    @contextmanager
    def aside():
        asides.append("aside")
        yield
        asides.append("back")

    first, other = Turns(tmp_path / "turns", aside), Turns(tmp_path / "turns")

    def be_alone():
        with other.shared(), other.alone():
            assert asides == ["aside"]
        done.set()

    waiting = threading.Thread(target=be_alone)
    with first.shared():
        waiting.start()
        until(lambda: first.give_way() or asides)
        waited = first._waited_s
        assert asides == ["aside", "back"] and waited > 0
        until(lambda: first.give_way() or done.is_set())
    waiting.join()


def test_a_turn_lingers_for_the_next_and_ends_without_one(tmp_path, monkeypatch):
    settled = []
    mine = Turns(tmp_path / "turns", settle=lambda: settled.append(mine._held))
    other = Turns(tmp_path / "turns")
    monkeypatch.setattr(judge.turns, "LINGER_S", 600.0)
    for _ in range(100):
        with mine.shared():
            pass
    assert not settled
    monkeypatch.setattr(judge.turns, "LINGER_S", 0.0)
    with mine.shared():
        pass
    with other.shared(), other.alone():
        assert settled == [LOCK_SH]
    until(lambda: mine._held is None)


def test_a_device_of_one_lane_has_no_turns():
    turns = Turns()
    with turns.shared(), turns.alone():
        turns.give_way()


BURNS = module("return ext.affine(x)", before=SPINS)


def states(child):
    found = [file.read_text().rpartition(")")[2].split()[0] for file in child.thread_files("stat")]
    return found[1:]  # without its keeper


@pytest.mark.slow
def test_what_a_candidate_left_running_is_stopped_while_it_is_aside_and_goes_on(verify):
    runner, made = verify.runner, kernels.candidate(AFFINE, BURNS)
    prepared = verify.preparer.prepare(made, AFFINE)
    reference = runner.reference(AFFINE)
    reference.declare()
    with runner.candidate(made, prepared, reference, VerdictDraft()) as process:
        process.load()
        with runner._aside():
            until(lambda: set(states(process.child)) == {"T"})
            before = process.child.processor_ns()
        until(lambda: process.child.processor_ns() > before)
        process.request(ReadState())


def test_a_task_that_leaves_no_room_beside_a_neighbour_is_judged_alone(verify, monkeypatch):
    runner, made = verify.runner, kernels.candidate(WEIGHTED, module("return ext.affine(x)"))
    prepared = verify.preparer.prepare(made, WEIGHTED)
    runner.reference(WEIGHTED)
    large = runner._reference.loaded.model_copy(update={"memory_share": 0.11})
    monkeypatch.setattr(runner._reference, "loaded", large)
    monkeypatch.setattr(runner, "neighbours", 1)
    needed = verify.evaluator.run_once(WEIGHTED, made, prepared)
    assert needed.alone and needed.run_s > 0
    monkeypatch.setattr(runner, "neighbours", 0)
    kept = runner._reference
    assert verify.evaluator.run_once(WEIGHTED, made, needed).reason == "wrong_output"
    assert runner._reference is kept


@pytest.mark.parametrize("crowded, raised", [(True, Crowded), (False, Stop)])
def test_memory_that_runs_out_beside_a_neighbour_is_no_failure_of_the_task(crowded, raised):
    with pytest.raises(raised), memory_shared(crowded):
        raise Stop(Reason.REFERENCE_FAILED, "the reference: out of memory: 80 GB")


@pytest.mark.slow
def test_nothing_of_a_neighbour_is_asked_while_a_candidate_is_timed(tmp_path, monkeypatch):
    """Two workers judge on one device; their verdicts are those of one."""
    events = []
    begin, measure = Child.begin, PairedClock.measure

    def heard(self, *rest):
        events.append((threading.current_thread().name.partition("_")[0], "asks"))
        begin(self, *rest)

    def timed(self):
        name = threading.current_thread().name
        events.append((name, "begins"))
        found = measure(self)
        events.append((name, "ends"))
        return found

    monkeypatch.setattr(worker, "turns_file", lambda _: tmp_path / "turns")
    monkeypatch.setattr(Child, "begin", heard)
    monkeypatch.setattr(PairedClock, "measure", timed)
    codes = [(AFFINE, module("return ext.affine(x)")), (AFFINE, module("return ext.shifted(x)"))]
    with verifying() as verify:
        asked = [(task, kernels.candidate(task, code)) for task, code in codes]
        ready = [(*pair, verify.preparer.prepare(pair[1], pair[0])) for pair in asked]
    found = {}

    def judge():
        mine = KernelWorker(QUICK, "cpu", None, None, 2)
        found[threading.current_thread().name] = [mine.run(*each).reason for each in 2 * ready]
        mine._evaluator.close()

    lanes = [threading.Thread(target=judge, name=name) for name in ("a", "b")]
    for each in lanes:
        each.start()
    for each in lanes:
        each.join()
    assert found == dict.fromkeys("ab", 2 * ["ok", "wrong_output"])
    timing = ""
    for name, what in events:
        assert timing in ("", name), "the other one is being timed"
        timing = {"begins": name, "ends": ""}.get(what, timing)
    assert sum(what == "ends" for _, what in events) == 4
