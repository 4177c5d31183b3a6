"""The agent sampler: a scripted model, the tools of `concur mcp` over HTTP, scripted verdicts."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager

import polars as pl
import pytest

pytest.importorskip("mcp")

import anyio
import uvicorn
from mcp import Client

from flows.tools.server import make_server
from kernels_eval.errors import EvalError, ServiceError, UsageError
from kernels_eval.records import STATUS_OF, Language, Verdict
from kernels_eval.service.client import AsyncVerifierClient
from kernels_eval.service.schema import Evaluation, State
from tasks.store import SnapshotRef
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.stage import Synthesis
from tests.support.chat_server import completion, serving
from tests.support.processes import ROOT
from tests.support.requests import tasks_snapshot, without_proxies

MODULE = "import torch\nclass ModelNew(torch.nn.Module):\n    version = {!r}\n"
KERNELS = ("wrong", "right")


class Service(AsyncVerifierClient):
    """Judges by the name in a module; `away` says why there is none."""

    away = ""

    async def health(self):
        if self.away:
            raise ServiceError(self.away)
        return {"status": "ok"}

    async def submit(self, request):
        right = "'right'" in request.code
        reason = "ok" if right else "build_failed"
        found = Verdict(
            candidate_id="c",
            task_id="source/x",
            language="cpp",
            status=STATUS_OF[reason],
            reason=reason,
        )
        return Evaluation(id="e", state=State.DONE, verdict=found, submitted_s=0.0)


@contextmanager
def tools_of(service):
    app = make_server(service).streamable_http_app()
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp"
    finally:
        server.should_exit = True
        thread.join()


def model(number, body):
    """Verifies both kernels, one a step, and answers; without tools at once."""
    done = sum(each["role"] == "tool" for each in body["messages"])
    if "tools" not in body or done == len(KERNELS):
        return 200, completion("Done.")
    arguments = json.dumps({"code": MODULE.format(KERNELS[done])})
    call = {"id": f"c{done}", "type": "function"}
    call["function"] = {"name": "verify_kernel", "arguments": arguments}
    return 200, completion("Next.", finish="tool_calls", tool_calls=[call])


def config(tools, url, **options):
    return SynthesisConfig(
        sampler="agent",
        model="org/model",
        base_url=url,
        samples_per_task=1,
        concurrency=3,
        options={"tools": tools, **options},
    )


def rows_of(ref):
    return ref.open().read(columns=["candidate_id", "task_id", "turn", "parent", "code"])


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    without_proxies(monkeypatch)


def test_a_transcript_is_kept_as_turns_and_the_best_kernel_is_the_answer(tmp_path):
    tasks = tasks_snapshot(tmp_path)
    with tools_of(Service("http://127.0.0.1:1")) as tools, serving(model) as server:
        for calls, codes in ((8, ("wrong", "right", "right")), (1, ("wrong", None))):
            made = Synthesis(tasks, config(tools, server.url, calls=calls), Language.CPP).run()
            rows = rows_of(made).sort("turn").to_dicts()
            wanted = [name and MODULE.format(name).strip() for name in codes]
            assert [row["code"] and row["code"].strip() for row in rows] == wanted
            names = [row["candidate_id"] for row in rows]
            assert [row["parent"] for row in rows] == [None, *names[:-1]]
        body = server.bodies[0]
    offered = {each["function"]["name"]: each["function"] for each in body["tools"]}
    assert set(offered) == {"verify_kernel", "profile_kernel", "search_parameters"}
    assert set(offered["verify_kernel"]["parameters"]["properties"]) == {"code"}
    said = [each["content"] for each in server.bodies[1]["messages"] if each["role"] == "tool"]
    assert "build_failed" in said[0]


def test_a_call_that_is_given_up_gives_its_evaluation_up():
    begun, ended = threading.Event(), threading.Event()

    class Endless(Service):
        async def submit(self, request):
            return Evaluation(id="e7", state=State.RUNNING, submitted_s=0.0)

        async def result(self, identity, wait_s=0.0):
            begun.set()
            await anyio.sleep_forever()

        async def cancel(self, identity):
            assert identity == "e7"
            ended.set()

    async def give_up(url):
        async with Client(url) as client, anyio.create_task_group() as group:
            arguments = {"code": MODULE.format("x"), "task_id": "source/x"}
            group.start_soon(client.call_tool, "verify_kernel", arguments)
            await anyio.to_thread.run_sync(begun.wait)
            group.cancel_scope.cancel()

    with tools_of(Endless("http://127.0.0.1:1")) as url:
        anyio.run(give_up, url)
        ended.wait()


def test_faults_end_the_run_with_the_fix(tmp_path):
    tasks = tasks_snapshot(tmp_path)
    service = Service("http://127.0.0.1:1")
    service.away = "ConnectError"
    with serving(model) as server:
        with tools_of(service) as tools, pytest.raises(EvalError, match="start `concur serve"):
            Synthesis(tasks, config(tools, server.url), Language.CPP).run()
        with pytest.raises(EvalError, match="start `concur mcp --port PORT`"):
            Synthesis(tasks, config("http://127.0.0.1:9/mcp", server.url), Language.CPP).run()
        with pytest.raises(UsageError, match=re.escape("give tools, the address")):
            Synthesis(tasks, config("x", server.url, calls=0), Language.CPP).run()


RUN = """
import json, sys
from kernels_eval.records import Language
from tasks.store import SnapshotRef
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.stage import Synthesis

ref, config = map(json.loads, sys.argv[1:])
Synthesis(SnapshotRef(**ref), SynthesisConfig(**config), Language.CPP).run()
"""


@pytest.mark.slow
def test_twenty_tasks_are_answered_exactly_once_under_a_kill(tmp_path):
    """SIGKILL amid the conversations of the eighth task or later."""
    tasks, running = tasks_snapshot(tmp_path, 20), []
    asked = []

    def answer(number, body):
        asked.append((len(body["messages"]), body["messages"][0]["content"]))
        if number == 25:
            os.kill(running[0].pid, signal.SIGKILL)
        return model(number, body)

    with tools_of(Service("http://127.0.0.1:1")) as tools, serving(answer) as server:
        given = config(tools, server.url)
        plain = tasks.model_dump_json(), given.model_dump_json()
        for status in (-signal.SIGKILL, 0):
            command = [sys.executable, "-c", RUN, *plain]
            running[:] = [subprocess.Popen(command, env={**os.environ, "PYTHONPATH": ROOT})]
            assert running[0].wait() == status
            if status:
                before = Counter(prompt for steps, prompt in asked if steps == 1)
                kept = {prompt for steps, prompt in asked if steps == 5}
    rows = rows_of(SnapshotRef(**finished(tmp_path)))
    assert rows.height == 60 == rows["candidate_id"].n_unique()
    turns = rows.group_by("task_id").agg(pl.col("turn").sort())
    assert turns.height == 20 and all(each == [1, 2, 3] for each in turns["turn"].to_list())
    begun = Counter(prompt for steps, prompt in asked if steps == 1)
    again = {prompt for prompt, count in begun.items() if count > 1}
    assert len(begun) == 20 and len(again) <= 3 and again <= set(before)
    assert len(kept - again) >= 5


def finished(root):
    from tasks.store import snapshots

    (found,) = [each for each in snapshots(str(root), "synthesis") if each.finished]
    return found.ref.model_dump()
