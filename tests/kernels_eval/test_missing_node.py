"""A node that is missing from the start, or lost in mid-run: real Ray nodes on this machine,
workers that do nothing.

Where no worker is left at all, test_pool.py has the one error after a stated wait.
"""

import time

import pytest

from kernels_eval.pool import pool as pool_module
from kernels_eval.pool.pool import Pool
from kernels_eval.records import Language
from tests.support.pools import Quick, many

pytestmark = pytest.mark.slow
SHORT_S = 2.0


class Working(Quick):
    def run(self, *asked):
        time.sleep(0.1)  # what a kernel takes: the work itself, not a wait for something
        return super().run(*asked)


@pytest.fixture
def cluster(monkeypatch):
    """Two nodes: two CPU slots where the driver is, one elsewhere."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setattr(pool_module, "SHORT_S", SHORT_S)
    found = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    found.add_node(num_cpus=1)
    ray.init(address=found.address, log_to_driver=False, configure_logging=False)
    try:
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


def pool(workers):
    # the build worker takes no share of a CPU where all of them are asked for by workers
    return Pool(Language.CPP, workers=workers, builders=1, builder=Working, runner=Working)


def test_fewer_devices_than_asked_for_are_said_and_the_run_goes_on(cluster):
    with pool(workers=5) as few:
        asked = many(200)
        verdicts = list(few.verify(asked))
        assert sorted(v.candidate_id for v in verdicts) == sorted(c.candidate_id for _, c in asked)
        assert len(few.cautions) == 1
        assert (
            "2 of 5 workers have had no device for 2 s" in few.cautions[0]
            and "3 CPUs on 2 nodes" in few.cautions[0]
        )


def test_a_node_that_is_lost_in_mid_run_is_said_and_costs_no_verdict(cluster):
    with pool(workers=3) as three:
        asked, verdicts = many(400), []
        for verdict in three.verify(asked):
            verdicts.append(verdict)
            if len(verdicts) == 20:
                assert three.cautions == []  # whoever starts slowly lacks no device
                cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        assert sorted(v.candidate_id for v in verdicts) == sorted(
            c.candidate_id for _, c in asked
        ), "each once"
        assert any(
            "on 1 node (a node is missing or was lost)" in line for line in three.cautions
        ), three.cautions


def test_the_stage_hands_the_caution_on():
    from tasks.progress import gathering
    from tasks.verification.stage import Verification

    class Short:
        quarantined: list[str] = []
        cautions = ["1 of 2 workers have had no device"]

    work = Verification.__new__(Verification)
    work._pool, work._logged, work._stream = Short(), 0, (each for each in ())
    work._keys = {}
    work.reached = work.planned = work.total = 0
    work.config = type("Config", (), {"chunk_size": 1})()
    with gathering() as cautions:
        work.verify_chunk(1)
    assert cautions == Short.cautions
