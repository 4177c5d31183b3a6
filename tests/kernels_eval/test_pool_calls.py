"""Who takes a worker down is found, and a stream that ended leaves nothing. The workers here do
nothing."""

import os

import pytest

from kernels_eval.errors import GpuLostError
from kernels_eval.pool.pool import Pool
from kernels_eval.records import Language
from kernels_eval.sandbox.deaths import DEATHS
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


def test_what_was_under_way_when_a_stream_ended_is_not_in_the_next(tmp_path):
    with quick_pool(tmp_path / "log") as quick:
        stream = quick.verify(many(50))
        assert next(stream).candidate_id == "many-0"
        assert any(slot.item for slot in (*quick._builders, *quick._runners))
        stream.close()
        asked = many(20, "others")
        assert outcomes(asked, list(quick.verify(asked))) == ["ok"] * 20
