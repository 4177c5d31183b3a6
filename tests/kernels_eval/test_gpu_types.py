"""A cluster of two types of GPU: real Ray nodes on this machine, each with an nvidia-smi of its
own, and workers that do nothing but say where they are."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from kernels_eval.errors import UsageError
from kernels_eval.pool.pool import Pool
from kernels_eval.pool.ray import gpu_types, place, shortage
from kernels_eval.records import Language
from tasks.verification.config import VerificationConfig
from tasks.verification.stage import conditions_of, pool_of
from tests.support.pools import Quick, many

pytestmark = pytest.mark.slow
SMI = """#!/bin/sh
case "$*" in
*compute_cap*) said="NVIDIA {name}, {capability}" ;;
*) said="NVIDIA {name}, 580.1" ;;
esac
echo "0, GPU-0a, $said"
echo "1, GPU-1b, $said"
"""


class Placed(Quick):
    def run(self, *asked):
        import ray

        node = ray.get_runtime_context().get_node_id()
        return super().run(*asked).model_copy(update={"detail": node})


def path_with(folder: Path, name: str, capability: str) -> str:
    script = folder / name / "nvidia-smi"
    script.parent.mkdir()
    script.write_text(SMI.format(name=name, capability=capability))
    script.chmod(0o755)
    return f"{script.parent}:{os.environ['PATH']}"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Two A100s where the driver is, one H100 elsewhere."""
    import ray
    from ray.cluster_utils import Cluster

    folder = tmp_path_factory.mktemp("smi")
    here, there = path_with(folder, "A100", "8.0"), path_with(folder, "H100", "9.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", here)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        ray.shutdown()
        head = {"num_cpus": 3, "num_gpus": 2, "resources": {"accelerator_type:A100": 1}}
        found = Cluster(initialize_head=True, head_node_args=head | {"include_dashboard": False})
        more = {"resources": {"accelerator_type:H100": 1}, "env_vars": {"PATH": there}}
        other = found.add_node(num_cpus=2, num_gpus=1, **more)
        ray.init(address=found.address, log_to_driver=False, configure_logging=False)
        yield found.head_node.node_id, other.node_id
        ray.shutdown()
        found.shutdown()


@pytest.mark.parametrize(
    ("asked", "node", "workers", "arch", "device"),
    [(None, 0, 2, "8.0", "NVIDIA A100"), ("H100", 1, 1, "9.0", "NVIDIA H100")],
)
def test_workers_are_of_one_type_and_verdicts_are_its_own(
    nodes, asked, node, workers, arch, device
):
    import ray

    config = VerificationConfig(gpu_type=asked, builders=1, lanes=2)
    assert conditions_of(Language.CUDA, config).device == device
    pool = pool_of(Language.CUDA, config)
    pool.builder, pool.runner = Quick, Placed
    with pool:
        verdicts = list(pool.verify(many(6)))
        assert (pool.telemetry.devices, pool.cuda_arch) == (workers, arch)
        found = ray.get([slot.actor.__ray_call__.remote(place) for slot in pool._runners])
        lanes = Counter((each.node, each.device) for each in found)
        assert sorted(lanes.values()) == [2] * workers, "so many on each GPU"
    assert {verdict.detail for verdict in verdicts} == {nodes[node]}


def test_a_type_that_is_not_there_is_refused_with_those_that_are(nodes):
    assert gpu_types() == {"A100": 2, "H100": 1}
    said = r"no GPU of the type B200: A100 \(2\), H100 \(1\).*--gpu-type"
    with pytest.raises(UsageError, match=said), Pool(Language.CUDA, gpu_type="B200"):
        pass
    assert shortage(2, "GPU", 60, "H100")[0] == 1 and shortage(2, "GPU", 60)[0] == 0


def test_kernels_for_the_cpu_run_anywhere(nodes):
    with Pool(Language.CPP, builder=Quick, runner=Quick, workers=1, builders=1) as pool:
        assert len(list(pool.verify(many(2)))) == 2 and pool.gpu_type is None
