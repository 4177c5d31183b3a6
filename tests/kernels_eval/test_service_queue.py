"""The queue of the service and its journal: nothing is lost, nothing is judged twice, and everybody
gets a turn. No worker and no server: verdicts are given by the tests."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_eval.errors import UsageError
from kernels_eval.judge.messages import no_code_verdict
from kernels_eval.records import Candidate, Language, Reason, Verdict
from kernels_eval.service.queue import (
    FAULTS,
    ConflictError,
    Evaluations,
    QueueFullError,
    Submission,
)
from kernels_eval.service.schema import State
from tests.support.kernels import AFFINE


def submission(identity, key="", client="", **more):
    """A request for the verdict `key` (default: its own)."""
    candidate = Candidate(
        candidate_id=key or f"key-{identity}",
        task_id=AFFINE.task_id,
        language=Language.CPP,
        generator="tests",
        code="class ModelNew: pass",
    )
    fields = {"digest": key, "priority": 0, "deadline_s": None} | more
    return Submission(id=identity, task=AFFINE, candidate=candidate, client=client, **fields)


def verdict(key):
    return Verdict(
        candidate_id=key, task_id=AFFINE.task_id, language="cpp", status="correct", reason="ok"
    )


class Queue(Evaluations):
    """With a list of what became final, and short ways to ask."""

    def __init__(self, folder, limit=100):
        self.ended = []
        super().__init__(folder / "journal.sqlite3", limit, self.ended.append)

    def ask(self, *names, **more):
        return self.submit([submission(name, **more) for name in names])

    def taken(self):
        keys = []
        while pair := self.take():
            keys.append(pair[1].candidate_id)
        return keys

    def state(self, name):
        return self.get(name).state


@pytest.fixture
def queue(tmp_path):
    made = Queue(tmp_path)
    yield made
    made.close()


# -- whose turn it is ------------------------------------------------------------------------------


def order(queue, *asked):
    """Ask for (key, client, priority) in turn; the keys in the order in which they are begun."""
    for number, (key, client, priority) in enumerate(asked):
        queue.ask(f"{key}-{number}", key=key, client=client, priority=priority)
    return queue.taken()


def test_clients_take_turns_and_each_keeps_its_order(queue):
    asked = [(f"a{n}", "a", 0) for n in range(4)] + [(f"b{n}", "b", 0) for n in range(2)]
    assert order(queue, *asked) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_client_that_comes_late_waits_for_one_turn_of_each_other(queue):
    for key in ("a0", "a1", "a2", "b0", "b1"):
        queue.ask(key, client=key[0])
    began = [queue.take()[1].candidate_id, queue.take()[1].candidate_id]
    assert began == ["key-a0", "key-b0"]
    queue.ask("c0", "c1", client="c")
    assert sorted(queue.taken()[:3]) == ["key-a1", "key-b1", "key-c0"]


def test_a_client_that_was_away_has_saved_no_turns(queue):
    order(queue, *[(f"a{n}", "a", 0) for n in range(10)])
    asked = [(f"b{n}", "b", 0) for n in range(3)] + [(f"c{n}", "a", 0) for n in range(3)]
    assert order(queue, *asked) == ["b0", "c0", "b1", "c1", "b2", "c2"]


def test_a_higher_priority_goes_first_and_is_fair_among_its_own(queue):
    asked = [("a0", "a", 0), ("b0", "b", 5), ("b1", "b", 5), ("c0", "c", 5), ("d0", "d", -1)]
    assert order(queue, *asked) == ["b0", "c0", "b1", "a0", "d0"]


def test_a_candidate_moves_up_with_a_more_urgent_request_and_never_down(queue):
    asked = [("a0", "a", 0), ("a1", "a", 0), ("a1", "b", 3), ("a1", "c", -3)]
    assert order(queue, *asked) == ["a1", "a0"]


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abc"), st.integers(-2, 2))))
@settings(deadline=None, max_examples=30)
def test_whatever_is_asked_is_begun_once(asked):
    with TemporaryDirectory() as folder:
        queue = Queue(Path(folder), limit=1000)
        began = order(queue, *((f"{key}", client, urgency) for key, client, urgency in asked))
        assert sorted(began) == sorted({str(key) for key, _, _ in asked})
        queue.close()


# -- one verdict for one candidate -----------------------------------------------------------------


def test_an_evaluation_is_queued_then_running_then_done(queue):
    assert queue.ask("one")[0].state is State.QUEUED
    assert queue.taken() == ["key-one"] and queue.state("one") is State.RUNNING
    queue.reached(verdict("key-one"))
    found = queue.get("one")
    assert found == queue.ended[0] and found.verdict == verdict("key-one") and not found.cached
    assert found.submitted_s <= found.started_s <= found.finished_s
    assert (queue.queued, queue.running) == (0, 0)


def test_duplicates_at_the_same_time_share_one_evaluation(queue):
    first, second = queue.ask("one", "two", key="same")
    assert (first.cached, second.cached) == (False, True)
    assert queue.taken() == ["same"]
    [third] = queue.ask("three", key="same")
    assert third.state is State.RUNNING and third.cached and queue.taken() == []
    queue.reached(verdict("same"))
    assert [queue.state(name) for name in ("one", "two", "three")] == [State.DONE] * 3
    assert len(queue.ended) == 3


def test_a_verdict_for_many_takes_as_many_statements_as_for_one(queue):
    """Each commit of its own holds up who hands a request over."""
    ran = []
    queue.ask("one")
    queue.ask(*(f"many{number}" for number in range(30)), key="same")
    assert sorted(queue.taken()) == ["key-one", "same"]
    queue._db.set_trace_callback(ran.append)
    queue.reached(verdict("key-one"))
    needed = len(ran)
    queue.reached(verdict("same"))
    assert len(ran) == 2 * needed and len({each.id for each in queue.ended}) == 31


def test_a_later_duplicate_is_answered_from_the_journal(queue):
    queue.ask("one", key="same")
    queue.taken()
    queue.reached(verdict("same"))
    [later] = queue.ask("two", key="same")
    assert later.state is State.DONE and later.cached and later.verdict == verdict("same")
    assert queue.taken() == [] and len(queue.ended) == 2


def test_the_same_request_under_the_same_id_is_the_same_evaluation(queue):
    assert queue.ask("one") == queue.ask("one") and queue.taken() == ["key-one"]
    assert queue.ask("one")[0].state is State.RUNNING
    again = queue.submit([submission("two"), submission("two")])
    assert again[0] == again[1] and queue.taken() == ["key-two"]


def test_another_request_under_a_known_id_is_refused_with_its_whole_batch(queue):
    queue.ask("one")
    with pytest.raises(ConflictError, match="'one' stands for another"):
        queue.submit([submission("new"), submission("one", digest="other")])
    with pytest.raises(KeyError):
        queue.get("new")
    assert queue.taken() == ["key-one"]


def test_what_was_not_kept_is_not_there_and_nobody_is_told(queue):
    asked = submission("one")
    bare = asked.candidate.model_copy(update={"code": None, "parse_reason": Reason.TRUNCATED})
    settled = asked._replace(settled=no_code_verdict(AFFINE, bare))
    queue.ask("two")
    with pytest.raises(ConflictError):
        queue.submit([settled, submission("two", digest="other")])
    with pytest.raises(KeyError):
        queue.get("one")
    assert queue.ended == [] and queue.taken() == ["key-two"]


def test_what_needs_no_worker_is_done_at_once(queue):
    asked = submission("one")
    bare = asked.candidate.model_copy(update={"code": None, "parse_reason": Reason.TRUNCATED})
    settled = no_code_verdict(AFFINE, bare)
    [found] = queue.submit([asked._replace(candidate=bare, settled=settled)])
    assert found.verdict.reason == "truncated" and not found.cached and queue.taken() == []
    [again] = queue.submit([asked._replace(id="two", candidate=bare, settled=settled)])
    assert again.cached and len(queue.ended) == 2


# -- bounds, deadlines, giving up ------------------------------------------------------------------


def test_above_the_limit_a_batch_is_refused_as_a_whole_and_known_verdicts_are_not(tmp_path):
    queue = Queue(tmp_path, limit=4)
    queue.ask("a", "b", client="x")
    with pytest.raises(QueueFullError, match="at most 4 .* there are 5 and 3"):
        queue.ask("c", "d", "e", client="y")
    with pytest.raises(KeyError):
        queue.get("c")
    queue.ask("c", "d", client="y")
    queue.taken()
    queue.reached(verdict("key-a"))
    queue.ask("e", client="x")
    assert queue.ask("f", key="key-a", client="z")[0].state is State.DONE
    queue.close()


def test_one_client_cannot_fill_the_queue(tmp_path):
    queue = Queue(tmp_path, limit=4)
    queue.ask("a", "b", client="x")
    with pytest.raises(QueueFullError, match="2 of one client: with these there are 3 and 3"):
        queue.ask("c", client="x")
    queue.ask("c", client="y")
    queue.close()


def test_a_cancelled_evaluation_is_not_begun_and_the_others_go_on(queue):
    queue.ask("one", "two", key="same")
    queue.ask("three")
    for name in ("one", "three", "nobody"):
        queue.cancel(name)
    assert queue.state("one") is queue.state("three") is State.CANCELLED
    assert queue.taken() == ["same"]
    queue.reached(verdict("same"))
    queue.cancel("two")
    assert queue.state("two") is State.DONE and queue.state("one") is State.CANCELLED
    assert len(queue.ended) == 3  # final is final


def test_a_candidate_is_dropped_once_and_with_the_last_who_asked_for_it(queue):
    queue.ask("one", "two", key="same")
    queue.ask("three")
    queue.taken()
    queue.cancel("one")
    assert queue.dropped() == [] and queue.running == 2
    for _ in range(2):
        queue.cancel("two")
    assert queue.dropped() == ["same"] and queue.dropped() == [] and queue.running == 1
    (again,) = queue.ask("four", key="same")
    assert again.state is State.QUEUED and not again.cached
    assert queue.taken() == ["same"]


def test_a_verdict_that_nobody_waits_for_any_more_is_kept(queue):
    queue.ask("one", key="same")
    queue.taken()
    queue.cancel("one")
    assert queue.state("one") is State.CANCELLED and queue.running == 0
    queue.reached(verdict("same"))
    assert queue.state("one") is State.CANCELLED
    assert queue.ask("two", key="same")[0].verdict == verdict("same")


def test_past_its_deadline_an_evaluation_expires_and_others_of_its_candidate_do_not(queue):
    queue.ask("late", key="same", deadline_s=1e-9)
    queue.ask("patient", key="same", deadline_s=3600)
    queue.ask("alone", deadline_s=1e-9)
    time.sleep(0.001)  # the clock's own steps
    queue.expire()
    assert [queue.state(name) for name in ("late", "patient", "alone")] == [
        State.EXPIRED,
        State.QUEUED,
        State.EXPIRED,
    ]
    assert queue.taken() == ["same"]


# -- where the machine fails -----------------------------------------------------------------------


def test_what_a_lost_machine_had_under_way_is_queued_again_without_blame(queue):
    queue.ask("one", "two")
    for _ in range(2 * FAULTS):
        assert sorted(queue.taken()) == ["key-one", "key-two"]
        queue.returned("the head is gone", blame=False)
        assert queue.state("one") is State.QUEUED
    assert queue.ended == []


def test_the_candidate_at_fault_is_found_alone_and_the_others_get_their_verdicts(queue):
    queue.ask("good", "bad", "fine", "later")
    assert len(queue.taken()) == 4
    queue.returned("a worker died 5 times", blame=True)
    alone = []
    for _ in range(20):
        keys = queue.taken()
        assert len(keys) <= 1
        alone += keys
        if keys == ["key-bad"]:
            queue.returned("a worker died 5 times", blame=True)
        elif keys:
            queue.reached(verdict(keys[0]))
    assert alone.count("key-bad") == FAULTS - 1
    failed = queue.get("bad")
    assert failed.state is State.FAILED and failed.error == "a worker died 5 times"
    assert failed.verdict is None
    assert [queue.state(name) for name in ("good", "fine", "later")] == [State.DONE] * 3
    assert queue.ask("again", key="key-bad")[0].state is State.QUEUED  # a fault is never kept


def test_an_evaluation_cancelled_while_its_candidate_is_suspected_leaves_nothing(queue):
    queue.ask("one", "two")
    queue.taken()
    queue.returned("fault", blame=True)
    queue.cancel("one")
    assert queue.taken() == ["key-two"]
    queue.reached(verdict("key-two"))
    assert (queue.queued, queue.running) == (0, 0)


# -- starts after ends -----------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from tests.kernels_eval.test_service_queue import Queue, verdict
queue = Queue(Path(sys.argv[1]))
queue.ask("one", "two", "three", "twin", priority=1)
queue.ask("four", key="key-one", client="x")
queue.take(), queue.take()
queue.reached(verdict("key-one"))
os.kill(os.getpid(), signal.SIGKILL)
"""


def key_of(task, candidate):
    return candidate.candidate_id


def test_after_sigkill_nothing_is_lost_and_nothing_is_judged_again(tmp_path):
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert done.returncode == -signal.SIGKILL
    queue = Queue(tmp_path)
    assert queue.state("one") is queue.state("four") is State.DONE
    assert queue.resume(key_of) == 3
    assert queue.taken() == ["key-two", "key-three", "key-twin"]
    assert queue.ask("one", priority=1)[0].verdict == verdict("key-one")
    queue.close()


def test_under_another_protocol_what_waits_gets_another_key(tmp_path):
    before = Queue(tmp_path)
    before.ask("one", "two")
    before.close()
    queue = Queue(tmp_path)
    assert queue.resume(lambda _, candidate: f"new-{candidate.candidate_id}") == 2
    assert queue.taken() == ["new-key-one", "new-key-two"]
    queue.reached(verdict("new-key-one"))
    assert queue.state("one") is State.DONE
    assert queue.ask("three", key="key-one")[0].state is State.QUEUED
    queue.close()


def test_what_cannot_be_judged_any_more_fails_and_says_why(tmp_path):
    before = Queue(tmp_path)
    before.ask("one")
    before.close()

    def refuse(*_):
        raise UsageError("cpp candidates are not judged here")

    queue = Queue(tmp_path)
    queue.resume(refuse)
    assert queue.get("one").error == "cpp candidates are not judged here" and queue.taken() == []
    queue.close()


def test_two_services_cannot_share_a_journal(tmp_path, queue):
    with pytest.raises(UsageError, match="as the journal: database is locked"):
        Queue(tmp_path)


@pytest.mark.parametrize("content", [b"no database", b"\x00" * 5000])
def test_a_file_that_is_no_journal_is_refused(tmp_path, content):
    (tmp_path / "journal.sqlite3").write_bytes(content)
    with pytest.raises(UsageError, match="cannot use .* as the journal"):
        Queue(tmp_path)


def test_nobody_else_may_read_the_journal(tmp_path, queue):
    queue.ask("one")
    modes = {path.name: path.stat().st_mode & 0o077 for path in tmp_path.iterdir()}
    assert modes and set(modes.values()) == {0}, modes
