"""Who takes a worker down is found, and a stream that ended leaves nothing. The workers here do
nothing."""

import os

import pytest

from kernels_eval.errors import GpuLostError
from kernels_eval.pool.pool import Pool
from kernels_eval.records import Language
from kernels_eval.sandbox.deaths import DEATHS
from kernels_eval.source.spec import Build, ExtensionSpec
from tests.support.pools import Quick, many, outcomes

pytestmark = pytest.mark.usefixtures("joined_ray")


def quick_pool(log, fatal="", deaths=0):
    """A pool whose workers do nothing. The one that runs `fatal` dies, `deaths` times; `log` gets
    the candidate of every run."""

    class Logged(Quick):
        def run(self, task, candidate, *_):
            with open(log, "a") as handle:
                handle.write(f"{candidate.candidate_id}\n")
            if candidate.candidate_id == fatal and log.read_text().count(fatal) <= deaths:
                os._exit(1)
            return super().run(task, candidate)

    return Pool(Language.CPP, workers=1, builders=1, builder=Logged, runner=Logged)


@pytest.mark.slow
def test_a_candidate_that_takes_its_worker_down_is_named_and_the_others_are_run_once(tmp_path):
    asked = many(60)
    with quick_pool(tmp_path / "log", fatal="many-40", deaths=DEATHS) as quick:
        with pytest.raises(GpuLostError, match=f"died {DEATHS} times on candidate many-40"):
            list(quick.verify(asked))
    ran = (tmp_path / "log").read_text().split()
    assert ran == [f"many-{n}" for n in range(40)] + ["many-40"] * DEATHS
    with quick_pool(tmp_path / "other", fatal="many-40", deaths=DEATHS - 1) as quick:
        assert outcomes(asked, list(quick.verify(asked))) == ["ok"] * 60


def test_a_build_that_is_asked_for_late_goes_back_to_the_builders(tmp_path):
    """Meanwhile the device takes the next one; a candidate that asks twice is built twice."""
    ran = tmp_path / "ran"

    class Late(Quick):
        def build(self, task, candidate, prepared=None, *_):
            made = prepared or super().build(task, candidate)
            late = (*made.late, Build(ok=True, key="k")) if made.asked else made.late
            return made.model_copy(update={"asked": None, "late": late})

        def run(self, task, candidate, prepared, *_):
            with open(ran, "a") as handle:
                handle.write(f"{candidate.candidate_id} {len(prepared.late)}\n")
            if candidate.candidate_id == "many-0" and len(prepared.late) < 2:
                return prepared.model_copy(update={"asked": ExtensionSpec(name="late")})
            return super().run(task, candidate)

    asked = many(8)
    with Pool(Language.CPP, workers=1, builders=1, builder=Late, runner=Late) as pool:
        assert outcomes(asked, list(pool.verify(asked))) == ["ok"] * 8
    calls = ran.read_text().splitlines()
    assert [call for call in calls if call.startswith("many-0")] == [
        f"many-0 {n}" for n in range(3)
    ]
    assert len(calls) == 10 and calls.index("many-0 1") > 1


def test_what_was_under_way_when_a_stream_ended_is_not_in_the_next(tmp_path):
    with quick_pool(tmp_path / "log") as quick:
        stream = quick.verify(many(50))
        assert next(stream).candidate_id == "many-0"
        assert any(slot.item for slot in (*quick._builders, *quick._runners))
        stream.close()
        asked = many(20, "others")
        assert outcomes(asked, list(quick.verify(asked))) == ["ok"] * 20
