"""The pipeline over real Ray: exactly one verdict each, whatever fails, and workers that die are replaced."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from kernels_eval.errors import DeviceError, GpuLostError
from kernels_eval.pool import Pool
from kernels_eval.records import Candidate, KernelTask, Language, Verdict
from kernels_eval.worker import require_device
from tests.support import kernels
from tests.support.kernels import AFFINE, WEIGHTED, load_inline, module

CONFIG = kernels.QUICK.model_copy(update={"time_correct": False})


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    import ray

    from kernels_eval.build.extensions import Builder

    Builder(CONFIG.build).warm()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        with Pool(Language.CPP, CONFIG, workers=1, builders=1) as made:
            yield made
    finally:
        ray.shutdown()


def broken(number: int) -> str:
    source = f"torch::Tensor broken(torch::Tensor x) {{ return missing_{number}(x); }}"
    return module("return ext.broken(x)", extension=load_inline(source, ["broken"], name="pool_broken"))


def pairs(*sources: tuple[KernelTask, str | None]) -> list[tuple[KernelTask, Candidate]]:
    return [(task, kernels.candidate(task, code, parse_reason=None if code else "truncated")) for task, code in sources]


def outcomes(asked: list[tuple[KernelTask, Candidate]], verdicts: list[Verdict]) -> list[str]:
    """The reasons in the order of asking; fails unless every candidate has exactly one verdict."""
    assert sorted(v.candidate_id for v in verdicts) == sorted(c.candidate_id for _, c in asked)
    found = {v.candidate_id: v for v in verdicts}
    assert all(found[c.candidate_id].task_id == task.task_id for task, c in asked)
    return [found[c.candidate_id].reason for _, c in asked]


def test_every_candidate_gets_exactly_one_verdict(pool: Pool) -> None:
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
    assert outcomes(asked, verdicts) == ["ok", "build_failed", "build_failed", "ok", "crashed", "syntax_error"]


def test_a_queue_of_failures_only_ends(pool: Pool) -> None:
    asked = pairs((AFFINE, broken(1)), (AFFINE, None), (WEIGHTED, "def (\n"), (AFFINE, "import subprocess"), (WEIGHTED, broken(2)))
    assert outcomes(asked, list(pool.verify(asked))) == ["build_failed", "truncated", "syntax_error", "forbidden_call", "build_failed"]


def test_an_empty_queue_ends(pool: Pool) -> None:
    assert list(pool.verify([])) == []


def test_candidates_are_taken_only_as_fast_as_they_are_done(pool: Pool) -> None:
    taken = 0

    def endless() -> Iterator[tuple[KernelTask, Candidate]]:
        nonlocal taken
        while True:
            taken += 1
            yield AFFINE, kernels.candidate(AFFINE, f"import subprocess  # {taken}")

    stream = pool.verify(endless())
    for _ in range(5):
        assert next(stream).reason == "forbidden_call"
    stream.close()
    assert taken <= 5 + 2 * len(pool._builders) + 4 * len(pool._runners) + pool.at_once * len(pool._builders)


def test_a_worker_killed_in_the_middle_is_replaced(pool: Pool) -> None:
    """The first candidate is slow enough to be caught at work; its worker's process is killed, and every verdict still arrives."""
    slow = module("time.sleep(0.4)\nreturn ext.affine(x)", before="import time")
    asked = pairs((AFFINE, slow), (AFFINE, module("return ext.affine(x)")), (WEIGHTED, None), (AFFINE, broken(1)))
    before = pool._runners[0].actor
    killed: list[int] = []

    def kill_when_busy() -> None:
        deadline = time.monotonic() + 60
        while not killed and time.monotonic() < deadline:
            for process in worker_processes() if pool._runners[0].items else []:
                os.kill(process.pid, signal.SIGKILL)
                killed.append(process.pid)
            time.sleep(0.02)

    killer = threading.Thread(target=kill_when_busy)
    killer.start()
    verdicts = list(pool.verify(asked))
    killer.join()
    assert len(killed) == 1, "the worker was caught at work"
    assert outcomes(asked, verdicts) == ["ok", "ok", "truncated", "build_failed"]
    assert pool._runners[0].actor is not before
    assert not psutil.pid_exists(killed[0])


def worker_processes() -> list[psutil.Process]:
    """Processes of KernelWorker actors of this Ray, by the title Ray gives them."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "KernelWorker" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue  # a compiler that has just ended
    return found


def test_leaving_a_pool_stops_its_workers() -> None:
    import ray

    assert ray.is_initialized()
    with Pool(Language.CPP, CONFIG, workers=1, builders=1) as other:
        actor = other._runners[0].actor
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.run.remote({}, {}, {}), timeout=30)


def failing_pool(broken_workers: int, workers: int) -> Pool:
    """A pool whose first workers have a device that answers once, and whose canaries fail after that."""
    from kernels_eval.isolation.canary import Pulse

    class FlakyPool(Pool):
        started = 0

        def _new_runner(self) -> object:
            import ray

            from kernels_eval.worker import KernelWorker

            self.started += 1
            sung: list[int] = []
            broken = self.started <= broken_workers

            def pulse(*_: object, **__: object) -> Pulse:
                sung.append(1)
                return Pulse(right=not broken or len(sung) == 1, free_bytes=1)

            return ray.remote(KernelWorker).options(num_cpus=0).remote(self.config, "cpu", None, pulse)

    return FlakyPool(Language.CPP, CONFIG, workers=workers, builders=1)


def test_a_worker_that_fails_its_canary_is_put_aside_and_the_others_go_on() -> None:
    asked = pairs(*[(AFFINE, module(f"return ext.aborts(x)  # {n}")) for n in range(3)], (AFFINE, module("return ext.affine(x)")))
    with failing_pool(broken_workers=1, workers=2) as pool:
        verdicts = list(pool.verify(asked))
        assert len(pool._runners) == 1 and len(pool.quarantined) == 1
        assert "failed its canary twice" in pool.quarantined[0] and "was wrong" in pool.quarantined[0]
        assert outcomes(asked, verdicts) == ["crashed", "crashed", "crashed", "ok"]
        assert outcomes(asked, list(pool.verify(asked))) == ["crashed", "crashed", "crashed", "ok"], "it stays aside"


def test_a_pool_without_a_working_device_says_so() -> None:
    with failing_pool(broken_workers=2, workers=2) as pool:
        with pytest.raises(GpuLostError, match="failed its canary twice") as fault:
            list(pool.verify(pairs(*[(AFFINE, module(f"return ext.aborts(x)  # {n}")) for n in range(4)])))
        assert fault.value.hint and len(pool.quarantined) == 2 and not pool._runners
        with pytest.raises(GpuLostError, match="no worker is left.*failed its canary twice"):
            next(pool.verify(pairs((AFFINE, None))))  # a retry says so at once


@pytest.mark.parametrize("language", [Language.CUDA, Language.TRITON])
def test_a_missing_gpu_is_said_before_any_work(language: Language, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DeviceError) as fault:
        require_device(language)
    assert "GPU" in str(fault.value) and "cpp" in fault.value.hint
    with pytest.raises(DeviceError):
        Pool(language, CONFIG).__enter__()


def test_cpp_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    require_device(Language.CPP)
