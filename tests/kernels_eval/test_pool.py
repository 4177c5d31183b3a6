"""The pipeline over real Ray: exactly one verdict each, whatever fails, and workers that die are
replaced."""

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

import kernels_eval
from kernels_eval.devices import require_device
from kernels_eval.errors import BusyError, ClusterError, DeviceError, GpuLostError, SandboxError
from kernels_eval.pool import pool as pool_module
from kernels_eval.pool import ray as cluster
from kernels_eval.pool.pool import Pool
from kernels_eval.records import Language
from kernels_eval.sandbox.deaths import DEATHS
from tests.support import kernels
from tests.support.kernels import AFFINE, WEIGHTED, load_inline, module
from tests.support.pools import Quick, many, outcomes
from tests.support.waiting import until

ROOT = Path(kernels_eval.__file__).parent.parent
CONFIG = kernels.UNTIMED


@pytest.fixture(scope="module")
def pool(joined_ray):
    with Pool(Language.CPP, CONFIG, workers=1, builders=1) as made:
        yield made


def broken(number):
    source = f"torch::Tensor broken(torch::Tensor x) {{ return missing_{number}(x); }}"
    return module("return ext.broken(x)", extension=load_inline(source, name="pool_broken"))


def pairs(*sources):
    return [
        (task, kernels.candidate(task, code, parse_reason=None if code else "truncated"))
        for task, code in sources
    ]


def test_every_candidate_gets_exactly_one_verdict(pool):
    gain = "self.gain = nn.Parameter(torch.randn(64))"
    asked = pairs(
        (AFFINE, module("return ext.affine(x)")),
        (WEIGHTED, broken(1)),
        (AFFINE, broken(2)),
        (WEIGHTED, module("return ext.times_row(x, self.gain)", init=gain)),
        (AFFINE, module("return ext.aborts(x)")),
        (WEIGHTED, "class ModelNew(\n"),
    )
    verdicts = list(pool.verify(iter(asked)))
    assert outcomes(asked, verdicts) == [
        "ok",
        "build_failed",
        "build_failed",
        "ok",
        "crashed",
        "syntax_error",
    ]


def test_a_queue_of_failures_only_ends(pool):
    assert list(pool.verify([])) == []
    asked = pairs(
        (AFFINE, broken(1)),
        (AFFINE, None),
        (WEIGHTED, "def (\n"),
        (AFFINE, "import subprocess"),
        (WEIGHTED, broken(2)),
    )
    assert outcomes(asked, list(pool.verify(asked))) == [
        "build_failed",
        "truncated",
        "syntax_error",
        "forbidden_call",
        "build_failed",
    ]


def test_candidates_are_taken_only_as_fast_as_they_are_done(pool):
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield AFFINE, kernels.candidate(AFFINE, f"import subprocess  # {taken}")

    stream = pool.verify(endless())
    for _ in range(5):
        assert next(stream).reason == "forbidden_call"
    stream.close()
    assert taken <= 5 + 3 * len(pool._builders) + 4 * len(pool._runners)


def test_a_worker_killed_in_the_middle_is_replaced(pool):
    """The first candidate is slow enough to be caught at work; its worker's process is killed, and
    every verdict still arrives."""
    import ray

    slow = module("time.sleep(0.4)\nreturn ext.affine(x)", before="import time")
    asked = pairs(
        (AFFINE, slow),
        (AFFINE, module("return ext.affine(x)")),
        (WEIGHTED, None),
        (AFFINE, broken(1)),
    )
    before = pool._runners[0].actor
    victim = ray.get(before.__ray_call__.remote(lambda _: os.getpid()))
    killed = []

    def kill_when_busy():
        def kill():
            if pool._runners[0].item:
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)
            return bool(killed)

        until(kill)

    killer = threading.Thread(target=kill_when_busy)
    killer.start()
    verdicts = list(pool.verify(asked))
    killer.join()
    assert len(killed) == 1, "the worker was caught at work"
    assert outcomes(asked, verdicts) == ["ok", "ok", "truncated", "build_failed"]
    assert pool._runners[0].actor is not before
    assert not psutil.pid_exists(killed[0])


def test_leaving_a_pool_stops_its_workers(pool):
    import ray

    assert ray.is_initialized()
    with Pool(Language.CPP, CONFIG, workers=1, builders=1) as other:
        actor = other._runners[0].actor
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.run.remote({}, {}, {}), timeout=300)


def failing_pool(broken_workers, workers):
    """A pool whose first workers have a device that answers once, and whose health checks fail
    after that."""
    from kernels_eval.sandbox.health import HealthReport

    class FlakyPool(Pool):
        started = 0

        def _new_runner(self):
            import ray

            from kernels_eval.pool.worker import KernelWorker

            self.started += 1
            checks = []
            broken = self.started <= broken_workers

            def check(*_, **__):
                checks.append(1)
                return HealthReport(right=not broken or len(checks) == 1, free_bytes=1)

            return (
                ray.remote(KernelWorker).options(num_cpus=0).remote(self.config, "cpu", None, check)
            )

    return FlakyPool(Language.CPP, CONFIG, workers=workers, builders=1)


@pytest.mark.slow
def test_a_worker_whose_device_fails_is_quarantined_and_the_others_continue(joined_ray):
    asked = pairs(
        *[(AFFINE, module(f"return ext.aborts(x)  # {n}")) for n in range(3)],
        (AFFINE, module("return ext.affine(x)")),
    )
    with failing_pool(broken_workers=1, workers=2) as pool:
        verdicts = list(pool.verify(asked))
        assert len(pool._runners) == 1 and len(pool.quarantined) == 1
        assert (
            "failed its health check twice" in pool.quarantined[0]
            and "was wrong" in pool.quarantined[0]
        )
        assert outcomes(asked, verdicts) == ["crashed", "crashed", "crashed", "ok"]
        assert outcomes(asked, list(pool.verify(asked))) == [
            "crashed",
            "crashed",
            "crashed",
            "ok",
        ], "it stays aside"


@pytest.mark.slow
def test_a_pool_without_a_working_device_says_so(joined_ray):
    with failing_pool(broken_workers=2, workers=2) as pool:
        with pytest.raises(GpuLostError, match="failed its health check twice") as fault:
            list(
                pool.verify(
                    pairs(*[(AFFINE, module(f"return ext.aborts(x)  # {n}")) for n in range(4)])
                )
            )
        assert fault.value.hint and len(pool.quarantined) == 2 and not pool._runners
        with pytest.raises(GpuLostError, match="no worker has a working.*health check twice"):
            next(pool.verify(pairs((AFFINE, None))))  # a retry says so at once


# -- workers that do not start, as those of a node that is lost ------------------------------------


class Fated(Quick):
    """One that "hangs" when it is given work, or "dies" as it starts."""

    def __init__(self, config, fate):
        if fate == "dies":
            os._exit(1)
        self._hangs = fate == "hangs"

    def run(self, *asked):
        while self._hangs:
            time.sleep(1)  # until it is killed
        return super().run(*asked)


class LossyPool(Pool):
    """With two places for workers. What is started there, in turn: one that "works", one of another
    fate (`Fated`), one that Ray can place "nowhere"."""

    def __init__(self, *fates):
        super().__init__(Language.CPP, CONFIG, workers=2, builders=1, builder=Quick)
        self.fates = iter(fates)

    def _new_runner(self):
        import ray

        fate = next(self.fates)
        resources = {"a node that is lost": 1} if fate == "nowhere" else {}
        return ray.remote(Fated).options(num_cpus=0, resources=resources).remote(CONFIG, fate)


def test_nothing_waits_for_a_worker_that_cannot_be_placed(joined_ray):
    asked = many(20)
    with LossyPool("works", "nowhere") as lossy:
        for _ in range(2):
            assert set(outcomes(asked, list(lossy.verify(asked)))) == {"ok"}


@pytest.mark.slow
def test_a_worker_that_is_lost_with_its_node_leaves_its_candidate_to_the_others(joined_ray):
    import ray

    asked = many(20)
    with LossyPool("works", "hangs", "nowhere") as lossy:
        hanging = lossy._runners[1]

        def lose_it():
            until(lambda: bool(hanging.item))
            ray.kill(hanging.actor)

        def once_it_is_there():
            while not hanging.idle:
                yield None
            yield from asked

        killer = threading.Thread(target=lose_it)
        killer.start()
        verdicts = list(lossy.verify(once_it_is_there()))
        killer.join()
        assert set(outcomes(asked, verdicts)) == {"ok"}
        assert not hanging.idle and not hanging.item, (
            "its successor was never placed, and never given work"
        )


def test_where_no_worker_starts_the_pool_says_so(joined_ray, monkeypatch):
    monkeypatch.setattr(pool_module, "START_S", 1.0)
    with (
        LossyPool("nowhere", "nowhere") as lossy,
        pytest.raises(GpuLostError, match="no worker has started") as fault,
    ):
        list(lossy.verify(many(3)))
    assert "ray status" in fault.value.hint


@pytest.mark.slow
def test_while_others_use_the_cluster_it_is_said_and_the_pool_goes_on(joined_ray, monkeypatch):
    import ray

    monkeypatch.setattr(pool_module, "SAY_S", 0.5)
    cores = int(ray.cluster_resources()["CPU"])
    options = {"builders": 1, "builder": Quick, "runner": Quick}
    other = Pool(Language.CPP, workers=cores, **options).__enter__()
    assert list(other.verify(many(2 * cores)))
    start_s = pool_module.START_S
    monkeypatch.setattr(pool_module, "START_S", 1.0)
    said = []

    def wait(text):
        said.append(text)
        if len(said) == 6:  # longer than is waited for what the cluster lacks
            other.__exit__()
            monkeypatch.setattr(pool_module, "START_S", start_s)

    with Pool(Language.CPP, workers=1, waiting=wait, **options) as pool:
        asked = many(3)
        assert set(outcomes(asked, list(pool.verify(asked)))) == {"ok"}
    assert said[1].startswith("waits for a CPU of the cluster; another driver of the cluster")
    assert said.index("a worker has started") == len(said) - 1 or said[-1].startswith("judges"), (
        "it is not said to wait any more"
    )


@pytest.mark.slow
def test_patience_with_a_cluster_in_use_ends(joined_ray, monkeypatch):
    import ray

    monkeypatch.setattr(pool_module, "SAY_S", 0.2)
    cores = int(ray.cluster_resources()["CPU"])
    options = {"builders": 1, "builder": Quick, "runner": Quick}
    with Pool(Language.CPP, workers=cores, **options) as other:
        list(other.verify(many(2 * cores)))
        with (
            pytest.raises(BusyError, match="not free after 1 s: another driver.*--timeout"),
            Pool(Language.CPP, workers=1, patience_s=1, **options) as pool,
        ):
            list(pool.verify(many(1)))


@pytest.mark.slow
def test_a_worker_that_dies_whenever_it_starts_is_no_endless_loop(joined_ray):
    with (
        LossyPool("nowhere", *["dies"] * 2 * DEATHS) as lossy,
        pytest.raises(GpuLostError, match="times while it started"),
    ):
        list(lossy.verify(many(3)))


def test_a_lost_node_of_its_own_is_a_clear_error(joined_ray, monkeypatch):
    """Where Ray's own process on this node is killed, calls are never answered: seen after some
    seconds, not never."""
    import ray

    monkeypatch.setattr(pool_module, "SAY_S", 0.5)
    monkeypatch.setattr(cluster, "WATCH_S", 0.5)
    here = ray.get_runtime_context().get_node_id()
    monkeypatch.setattr(
        ray,
        "nodes",
        lambda: [{"NodeID": here, "Alive": False}, {"NodeID": "another", "Alive": True}],
    )
    with (
        LossyPool("nowhere", "nowhere") as lossy,
        pytest.raises(ClusterError, match="lost the node") as fault,
    ):
        list(lossy.verify(many(3)))
    assert "rerun the same command" in fault.value.hint


@pytest.mark.parametrize(
    "given, variable, used",
    [
        (None, "", "local"),
        (None, "10.0.0.7:6379", "10.0.0.7:6379"),
        ("ray-head:6379", "other:1", "ray-head:6379"),
    ],
)
def test_a_cluster_is_joined_only_where_it_is_named(monkeypatch, given, variable, used):
    """Left to itself Ray joins the last cluster that was started on the machine by anybody, or
    fails where that one was killed."""
    import ray

    asked = []
    monkeypatch.delenv(cluster.NICENESS[0], raising=False)
    monkeypatch.setenv("RAY_ADDRESS", variable)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(
        cluster, "require_cluster", lambda address: asked.append(f"is there one at {address}?")
    )
    monkeypatch.setattr(ray, "init", lambda **options: asked.append(options["address"]))
    cluster.start_ray(given)
    assert asked == ([f"is there one at {used}?"] if used != "local" else []) + [used]
    assert os.environ.pop(cluster.NICENESS[0]) == "0", "workers are as nice as what starts them"


def test_a_ray_that_does_not_start_is_tried_again_then_a_clear_error(monkeypatch):
    import ray

    ended = []

    def refuse(**_):
        raise Exception(
            "The current node timed out during startup."
        )  # what it raises on a machine under load

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append("what had started"))
    with pytest.raises(
        ClusterError, match="did not start here: The current node timed out"
    ) as fault:
        cluster.start_ray()
    assert fault.value.hint
    assert len(ended) == cluster.ATTEMPTS - 1


@pytest.mark.parametrize("times", [DEATHS - 1, pytest.param(DEATHS, marks=pytest.mark.slow)])
def test_a_sandbox_that_fails_is_tried_again_a_few_times(joined_ray, tmp_path, times):
    class Fragile(Quick):
        """Its fork server fails so many times on each candidate that is marked for it, in whichever
        worker."""

        def run(self, task, candidate, *_):
            left = tmp_path / str(candidate.candidate_id)
            if left.exists() and (times := int(left.read_text())):
                left.write_text(str(times - 1))
                raise SandboxError("the fork server is gone", "mend it")
            return super().run(task, candidate)

    asked = many(4)
    (tmp_path / asked[1][1].candidate_id).write_text(str(times))
    with Pool(Language.CPP, workers=1, builders=1, builder=Quick, runner=Fragile) as made:
        if times < DEATHS:
            assert set(outcomes(asked, list(made.verify(asked)))) == {"ok"}
        else:
            with pytest.raises(SandboxError) as fault:
                list(made.verify(asked))
            assert fault.value.hint == "mend it"


@pytest.mark.parametrize("language", [Language.CUDA, Language.TRITON])
def test_a_missing_gpu_is_said_before_any_work(language, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DeviceError) as fault:
        require_device(language)
    assert "GPU" in str(fault.value) and "cpp" in fault.value.hint
    with pytest.raises(DeviceError):
        Pool(language, CONFIG).__enter__()
