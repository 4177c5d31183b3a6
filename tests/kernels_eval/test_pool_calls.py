"""Several candidates in one Ray call: still one verdict each, and whoever takes a worker down is
found. The workers here do nothing."""

import os
from collections import deque

import pytest

from kernels_eval.errors import GpuLostError
from kernels_eval.pool import worker
from kernels_eval.pool.pool import Pool, _Item, _together
from kernels_eval.pool.ray import start_ray
from kernels_eval.records import Language
from kernels_eval.sandbox.deaths import DEATHS, WORKER
from tests.support.pools import Quick, many, outcomes


@pytest.fixture(scope="module", autouse=True)
def _ray():
    import ray

    start_ray()
    yield
    ray.shutdown()


def quick_pool(log, fatal="", deaths=0, *, answered=None, seconds=0.0):
    """A pool whose workers do nothing. The one that runs `fatal` dies, `deaths` times; `log` gets
    every call of a run.

    A call answers the first `answered` of what it is asked, and says that it took `seconds`.
    """

    class Logged(Quick):
        def several(self, calls, *_):
            if len(calls[0]) == 3:
                names = [str(call[1].candidate_id) for call in calls]
                with open(log, "a") as handle:
                    handle.write(" ".join(names) + "\n")
                came = sum(fatal in line.split() for line in log.read_text().splitlines())
                if fatal in names and came <= deaths:
                    os._exit(1)
            return super().several(calls[:answered])[0], seconds

    return Pool(Language.CPP, workers=1, builders=1, builder=Logged, runner=Logged)


def test_quick_candidates_travel_together_and_each_has_one_verdict(tmp_path):
    asked = many(100)
    with quick_pool(tmp_path / "log") as quick:
        assert outcomes(asked, list(quick.verify(asked))) == ["ok"] * 100
    sizes = [len(line.split()) for line in (tmp_path / "log").read_text().splitlines()]
    assert sizes[0] == 1 and max(sizes) == quick.at_once and sum(sizes) == 100


@pytest.mark.parametrize("answered", [1, 3])
def test_what_a_call_leaves_undone_comes_back_in_order(tmp_path, answered):
    asked = many(50)
    with quick_pool(tmp_path / "log", answered=answered) as quick:
        verdicts = list(quick.verify(asked))
    assert outcomes(asked, verdicts) == ["ok"] * 50
    assert [verdict.candidate_id for verdict in verdicts] == [
        candidate.candidate_id for _, candidate in asked
    ]


def test_slow_candidates_travel_alone(tmp_path):
    asked = many(20)
    with quick_pool(tmp_path / "log", seconds=1.0) as slow:
        assert outcomes(asked, list(slow.verify(asked))) == ["ok"] * 20
    assert [len(line.split()) for line in (tmp_path / "log").read_text().splitlines()] == [1] * 20


@pytest.mark.slow
def test_a_candidate_that_takes_its_worker_down_is_found_among_those_it_travelled_with(tmp_path):
    asked = many(60)
    with quick_pool(tmp_path / "log", fatal="many-40", deaths=DEATHS) as quick:
        with pytest.raises(GpuLostError, match=f"died {DEATHS} times on candidate many-40"):
            list(quick.verify(asked))
    calls = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    fatal = [call for call in calls if "many-40" in call]
    assert len(fatal[0]) > 1 and fatal[1:] == [["many-40"]] * (DEATHS - 1)
    with quick_pool(tmp_path / "other", fatal="many-40", deaths=DEATHS - 1) as quick:
        assert outcomes(asked, list(quick.verify(asked))) == ["ok"] * 60


def test_one_that_lost_a_worker_before_travels_alone():
    queue = deque(_Item(*pair) for pair in many(6))
    for number in (2, 3):
        queue[number].deaths.note(WORKER)
    calls = []
    while queue:
        calls.append(
            [
                item.candidate.candidate_id
                for item in _together(8, lambda: queue.popleft() if queue else None, queue)
            ]
        )
    assert calls == [["many-0", "many-1"], ["many-2"], ["many-3"], ["many-4", "many-5"]]


def test_what_was_under_way_when_a_stream_ended_is_not_in_the_next(tmp_path):
    with quick_pool(tmp_path / "log") as quick:
        stream = quick.verify(many(50))
        assert next(stream).candidate_id == "many-0"
        assert any(slot.items for slot in (*quick._builders, *quick._runners))
        stream.close()
        asked = many(20, "others")
        assert outcomes(asked, list(quick.verify(asked))) == ["ok"] * 20


def test_slow_calls_hold_nothing_behind_them(monkeypatch):
    now = 0.0
    monkeypatch.setattr(worker.time, "monotonic", lambda: now)

    def takes(seconds):
        nonlocal now
        now += seconds
        return {"took": seconds}

    quick, slow = worker.TOGETHER_S / 10, worker.TOGETHER_S * 100
    assert worker.several(takes, [(quick,)] * 4) == (
        [{"took": quick}] * 4,
        pytest.approx(4 * quick),
    )
    assert worker.several(takes, [(slow,)] * 4) == ([{"took": slow}], pytest.approx(slow))
    answers, seconds = worker.several(takes, [(quick,), (slow,), (quick,)])
    assert len(answers) == 2 and seconds > worker.TOGETHER_S
