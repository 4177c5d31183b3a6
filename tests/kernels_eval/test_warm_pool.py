"""Processes that are started before there is work for them: the same verdicts, and nothing is lost
with one that dies."""

import os
import signal
import time

import pytest

from kernels_eval.errors import SandboxError
from kernels_eval.records import Candidate, Language
from kernels_eval.sandbox.process_tree import has_ended
from kernels_eval.sandbox.server_handle import ForkServer
from kernels_eval.sandbox.warm_pool import COMPILING, WANTED, WarmPool
from tasks.synthesis.prompts import EXAMPLE_TASK
from tests.support import kernels
from tests.support.kernels import AFFINE, WEIGHTED, kernel_task, module
from tests.support.waiting import until

CONFIG = kernels.QUICK
CODES = {
    "ok": (AFFINE, module("return ext.affine(x)")),
    "wrong_output": (AFFINE, module("return ext.affine(x) + 1.0")),
    "exception": (AFFINE, module("raise ValueError('no')")),
    "wrong_shape": (WEIGHTED, module("return x[:1]")),
}


class Verifier(kernels.Verifier):
    def __call__(self, task, code):
        return super().__call__(task, code).reason

    def warm(self, role):
        return self.runner.warm_pool.starting[role][0][1].result()


@pytest.fixture(scope="module")
def verify():
    made = Verifier(CONFIG)
    made.runner.warm_pool.ahead = True
    with made.evaluator:
        yield made


@pytest.mark.slow
def test_verdicts_are_those_of_processes_that_are_started_when_they_are_needed(verify, monkeypatch):
    taken = []
    take = WarmPool.warm_child

    def watched(self, server, role):
        child = take(self, server, role)
        taken.append((role, child is not None))
        return child

    monkeypatch.setattr(WarmPool, "warm_child", watched)
    for _ in range(2):
        for reason, (task, code) in CODES.items():
            assert verify(task, code) == reason
    # started while the first reference computed
    assert all(there for role, there in taken if role == "candidate")
    assert [there for role, there in taken if role == "reference"].count(False) == 1


@pytest.mark.parametrize("role", ["candidate", pytest.param("reference", marks=pytest.mark.slow)])
def test_a_warm_child_that_is_killed_while_it_waits_costs_no_verdict(verify, role):
    task, code = CODES["ok"]
    assert verify(task, code) == "ok"
    verify.runner.warm_pool.settle()
    child = verify.warm(role)
    os.kill(child.pid, signal.SIGKILL)
    until(lambda: child.gone)
    assert verify(WEIGHTED, CODES["wrong_shape"][1]) == "wrong_shape"
    assert verify(task, code) == "ok"


@pytest.mark.slow
def test_warm_children_of_a_fork_server_that_is_gone_are_forgotten():
    task, code = CODES["ok"]
    verify = Verifier(CONFIG, own_server=True)
    verify.runner.warm_pool.ahead = True
    with verify.evaluator:
        assert verify(task, code) == "ok"
        verify.runner.server.process.kill()
        verify.runner.server.process.wait()
        assert verify(task, code) == "ok"


def test_nothing_is_under_way_once_settled_and_nothing_is_left_once_closed():
    server, pool, late = ForkServer(), *(WarmPool(CONFIG, "cpu", ahead=True) for _ in range(2))
    try:
        closed = []
        pool.close_async(lambda: closed.append(time.monotonic()))
        pool.replenish(server)
        pool.settle()
        children = [starting.result() for kind in WANTED for _, starting in pool.starting[kind]]
        assert len(children) == sum(WANTED.values()) - WANTED[COMPILING]
        assert closed and not any(child.owed for child in children)
        pids = [child.pid for child in children]
        pool.close()
        assert all(map(has_ended, pids))
        assert not any(child.scratch.exists() for child in children)
    finally:
        server.close()
    late.replenish(server)
    late.settle()
    with pytest.raises(SandboxError):
        late.start_child(server, "candidate")  # an error of the one who needs a child
    late.close()


@pytest.mark.slow
def test_what_timing_alone_needs_is_given_back(verify):
    assert verify(*CODES["ok"]) == "ok"
    reference = verify.runner._reference
    held = set(reference.memory._descriptors)
    assert "candidate" in held and not {"own", "unseen"} & held


@pytest.mark.gpu
def test_a_kept_kernel_is_unpacked_beside_what_a_warm_process_has_compiled(tmp_path):
    task, triton = kernel_task(EXAMPLE_TASK, "bias"), Language("triton")
    made = Candidate(
        candidate_id="c",
        task_id=task.task_id,
        language=triton,
        generator="t",
        code=triton.example,
    )
    with Verifier(CONFIG, "cuda:0", own_server=True, cache=tmp_path).evaluator as judge:
        for _ in range(3):
            verdict = judge(task, made)
            assert verdict.reason == "ok", verdict.detail
            judge.runner.warm_pool.settle()
            assert judge.runner.warm_pool.starting[COMPILING], "the next one's compiler is ready"
