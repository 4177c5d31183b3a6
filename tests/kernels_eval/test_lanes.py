"""A pool with two lanes on a device: what a neighbour may have spoilt is judged again alone, and a
lost device ends both. The workers here do nothing."""

import os
from pathlib import Path

import pytest

from kernels_eval.errors import GpuLostError
from kernels_eval.pool.pool import Pool
from kernels_eval.records import Language, Verdict
from tests.support.pools import Quick, many, outcomes
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("joined_ray")


class Lane(Quick):
    """Notes when each call begins and ends in the file that a subclass names."""

    log = Path()

    def note(self, *words):
        with open(self.log, "a") as handle:
            handle.write(" ".join(map(str, words)) + "\n")

    def run(self, task, candidate, prepared, *_):
        name = candidate.candidate_id
        self.note("begins", name, "alone" if prepared.alone else "beside")
        found = self.judge(task, candidate, prepared)
        self.note("ends", name, os.getpid())
        return found

    def judge(self, task, candidate, prepared):
        return Quick.run(self, task, candidate)

    def vacate(self):
        self.note("vacates")

    def has_company(self, name):
        """Whether another candidate has begun since."""
        lines = self.log.read_text().splitlines()
        own = lines.index(f"begins {name} beside")
        return any(line.startswith("begins") for line in lines[own + 1 :])


def two_lanes(runner, log, **options):
    lane = type("LaneHere", (runner,), {"log": log})
    return Pool(Language.CPP, workers=1, builders=1, lanes=2, builder=Quick, runner=lane, **options)


def overlapping(log):
    """Candidates that were under way when one began that must be alone, or began meanwhile."""
    under_way, found, alone = set(), set(), None
    for what, *words in map(str.split, log.read_text().splitlines()):
        if what == "begins":
            if words[1] == "alone":
                alone = words[0]
                found |= under_way
            elif alone:
                found.add(words[0])
            under_way.add(words[0])
        elif what == "ends":
            under_way.discard(words[0])
            alone = None if words[0] == alone else alone
    return found


class Spoilt(Lane):
    """One candidate fails for this reason while a neighbour is at work."""

    reason, status = "cuda_error", "runtime_error"

    def judge(self, task, candidate, prepared):
        found = super().judge(task, candidate, prepared)
        if candidate.candidate_id != "many-3" or prepared.alone:
            return found
        until(lambda: self.has_company("many-3"))
        of = {"candidate_id": found.candidate_id, "task_id": task.task_id}
        return Verdict(**of, language=Language.CPP, status=self.status, reason=self.reason)


class Full(Spoilt):
    reason = "out_of_memory"


class Large(Lane):
    """One candidate says that its task leaves no room."""

    def judge(self, task, candidate, prepared):
        if candidate.candidate_id == "many-3" and not prepared.alone:
            until(lambda: self.has_company("many-3"))
            return prepared.model_copy(update={"alone": True})
        return super().judge(task, candidate, prepared)


@pytest.mark.parametrize(
    "runner, vacates",
    [
        (Full, True),
        pytest.param(Spoilt, False, marks=pytest.mark.slow),
        pytest.param(Large, True, marks=pytest.mark.slow),
    ],
)
def test_a_candidate_is_judged_again_alone(tmp_path, runner, vacates):
    log, asked = tmp_path / "log", many(20)
    log.touch()
    with two_lanes(runner, log) as pool:
        assert outcomes(asked, list(pool.verify(asked))) == ["ok"] * 20
        assert pool.telemetry.summary()["devices"] == 1
    lines = log.read_text().splitlines()
    assert "begins many-3 beside" in lines and "begins many-3 alone" in lines
    assert not overlapping(log)
    assert ("vacates" in lines) == vacates


def test_a_lost_device_ends_all_of_its_lanes(tmp_path):
    class Lost(Lane):
        def judge(self, task, candidate, prepared):
            if candidate.candidate_id == "many-3":
                raise GpuLostError("cuda:0 failed its health check twice", "dmesg")
            return super().judge(task, candidate, prepared)

    log, asked = tmp_path / "log", many(20)
    log.touch()
    with two_lanes(Lost, log) as pool:
        with pytest.raises(GpuLostError, match="health check twice"):
            list(pool.verify(asked))
        assert not pool._runners and len(pool._lost) == 2 and len(pool.quarantined) == 1
