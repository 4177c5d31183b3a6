"""`concur serve` itself: real kernels, a real pool, and SIGTERM and SIGKILL in between."""

import json
import os
import signal
import time

import psutil
import pytest

from kernels_eval.errors import ServiceError
from kernels_eval.service.client import VerifierClient
from kernels_eval.service.schema import EvaluationRequest, State, TaskSource
from tests.support import kernels
from tests.support.kernels import AFFINE
from tests.support.servers import free_port
from tests.support.services import serving

pytestmark = pytest.mark.slow
TASK = TaskSource(code=AFFINE.code)
GOOD = kernels.module("return ext.affine(x)")
WRONG = kernels.module("return ext.affine(x) + 1")


def until_healthy(client):
    until = time.monotonic() + 300
    while time.monotonic() < until:
        try:
            if (health := client.health())["status"] == "ok":
                return health
        except ServiceError:
            pass
        time.sleep(0.2)  # what ends the wait is the answer
    raise AssertionError("not healthy within 300 s")


def test_kernels_are_judged_and_nothing_is_lost_by_kills_or_an_end(tmp_path):
    port = free_port()
    task = tmp_path / "tasks" / "affine.py"
    task.parent.mkdir()
    task.write_text(AFFINE.code)
    options = ("--tasks", str(task))
    client = VerifierClient(f"http://127.0.0.1:{port}", timeout_s=500)
    definition = {
        "name": "affine",
        "op_type": "elementwise",
        "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": 64}},
        "inputs": {"x": {"shape": ["M", "N"], "dtype": "float32"}},
        "outputs": {"y": {"shape": ["M", "N"], "dtype": "float32"}},
        "reference": "def run(x):\n    return x * 2.0 + 1.0",
    }
    with serving(tmp_path, port, *options) as process:
        health = until_healthy(client)
        assert health["tasks"] == 1 and health["languages"] == ["cpp"]
        found = client.evaluate_batch(
            [
                EvaluationRequest(task=TASK, code=GOOD),
                EvaluationRequest(task=TASK, response=f"<think>x</think>\n```python\n{GOOD}\n```"),
                EvaluationRequest(task=TASK, code=WRONG),
                EvaluationRequest(task_id="user/affine", response="I cannot"),
                EvaluationRequest(definition=definition, workload={"axes": {"M": 64}}, code=GOOD),
            ]
        )
        reasons = [each.verdict.reason if each.verdict else each.error for each in found]
        assert reasons == ["ok", "ok", "wrong_output", "no_code_block", "ok"]
        assert [each.cached for each in found] == [False, True, False, False, False]
        assert found[0].verdict == found[1].verdict and found[0].verdict.timing

        # the process of the pool is killed with work under way, and then the service is ended
        asked = [
            client.submit(EvaluationRequest(task=TASK, code=f"{GOOD}\n# {n}", id=f"n{n}"))
            for n in range(6)
        ]
        while client.result("n0").state is State.QUEUED:
            time.sleep(0.05)
        [pool] = [
            child
            for child in psutil.Process(process.pid).children()
            if "spawn_main" in " ".join(child.cmdline())
        ]
        pool.kill()
        assert client.result("n0", 60).state is not State.FAILED
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    with serving(tmp_path, port, *options) as process:
        states = {each.id: client.result(each.id) for each in asked}
        assert {each.state for each in states.values()} <= {State.DONE, State.QUEUED, State.RUNNING}
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with serving(tmp_path, port, *options):
        ended = [client.result(each.id) for each in asked]
        while not all(each.state.final for each in ended):
            ended = [client.result(each.id, 30) for each in ended]
        assert [each.verdict.reason if each.verdict else each.error for each in ended] == ["ok"] * 6
        assert len({each.verdict.candidate_id for each in ended}) == 6
        again = client.evaluate(EvaluationRequest(task=TASK, code=GOOD))
        assert again.cached and again.verdict == found[0].verdict
    client.close()
    leaks = [line for line in (tmp_path / "log").read_text().splitlines() if "Traceback" in line]
    assert leaks == [], json.dumps(leaks)
