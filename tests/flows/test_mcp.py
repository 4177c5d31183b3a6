"""`concur mcp`, asked by the official client: over stdio as an agent starts it, and over HTTP."""

import signal
import subprocess
import sys

import anyio
import pytest

pytest.importorskip("mcp")

from mcp import Client, MCPError, StdioServerParameters

from kernels_eval.service.client import VerifierClient
from tests.kernels_eval.test_service_real import until_healthy
from tests.support import kernels
from tests.support.kernels import AFFINE
from tests.support.processes import ROOT
from tests.support.servers import clean_environment, free_port
from tests.support.services import serving

TOOLS = ["list_tasks", "verify_kernel", "explain_verdict", "profile_kernel", "search_parameters"]
TASK = {"code": AFFINE.code}
GOOD = kernels.module("return ext.affine(x)")
WRONG = kernels.module("return ext.affine(x) + 1")
BROKEN = GOOD.replace("#include", "#includes", 1)
COMMAND = [sys.executable, "-m", "flows.cli", "mcp"]
ENVIRONMENT = clean_environment() | {"PYTHONPATH": ROOT}


def over_stdio(*words):
    return Client(
        StdioServerParameters(command=COMMAND[0], args=[*COMMAND[1:], *words], env=ENVIRONMENT)
    )


async def asked(client, tool, **arguments):
    found = await client.call_tool(tool, arguments)
    assert not found.is_error, found.content[0].text
    return found.structured_content


def telling(said):
    async def told(progress, total, message):
        said.append(progress)

    return told


def test_without_a_service_the_error_says_how_to_start_it():
    async def ask():
        async with over_stdio("--url", f"http://127.0.0.1:{free_port()}") as client:
            assert [each.name for each in (await client.list_tools()).tools] == TOOLS
            with pytest.raises(MCPError, match="start `concur serve --tasks TASKS`"):
                await client.call_tool("verify_kernel", {"code": GOOD, "task": TASK})
            found = await client.call_tool("verify_kernel", {"task": TASK})
            assert found.is_error and "code" in found.content[0].text

    anyio.run(ask)


@pytest.mark.parametrize(
    "number, status",
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, -15, marks=pytest.mark.slow)],
)
def test_an_interrupt_ends_it_without_a_traceback(number, status):
    process = subprocess.Popen(
        COMMAND, env=ENVIRONMENT, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert "tools for agents" in process.stderr.readline()
    process.send_signal(number)
    assert process.wait() == status and "Traceback" not in process.stderr.read()
    process.stdin.close()
    process.stderr.close()


@pytest.mark.slow
def test_an_agent_verifies_profiles_and_improves_a_kernel(tmp_path):
    port, tools_port = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    (tmp_path / "affine.py").write_text(AFFINE.code)

    async def over_both():
        async with over_stdio("--url", url) as client:
            await work(client)
        async with Client(f"http://127.0.0.1:{tools_port}/mcp") as client:
            assert [each.name for each in (await client.list_tools()).tools] == TOOLS
            assert (await asked(client, "verify_kernel", code=GOOD, task=TASK))["correct"]

    async def work(client):
        listed = await asked(client, "list_tasks", match="AFF", sources=True)
        assert [each["code"] for each in listed["tasks"]] == [AFFINE.code]
        task_id = listed["tasks"][0]["task_id"]
        broken = await asked(client, "verify_kernel", code=BROKEN, task_id=task_id)
        assert broken["reason"] == "build_failed" and "includes" in broken["feedback"]
        wrong = await asked(client, "verify_kernel", code=WRONG, task_id=task_id)
        assert wrong["reason"] == "wrong_output" and not wrong["correct"]
        told = await asked(client, "explain_verdict", evaluation_id=wrong["evaluation_id"])
        assert "differs" in told["rule"] and "RMS" in told["feedback"]
        said = []
        fenced = {"code": f"```python\n{GOOD}\n```", "task_id": task_id}
        good = await client.call_tool("verify_kernel", fenced, progress_callback=telling(said))
        good = good.structured_content
        assert good["correct"] and good["speedup_lower"] > 0
        assert said == sorted(set(said)) != []
        profile = await asked(client, "profile_kernel", code=GOOD, task_id=task_id)
        assert profile["problem"] is None and profile["kernels_us"] and profile["least_ms"]
        assert (await asked(client, "profile_kernel", code=WRONG, task=TASK))["problem"]
        tuned = GOOD.replace("#include", r"constexpr int BLOCK = 64;\n#include", 1)
        assert tuned != GOOD
        found = await asked(client, "search_parameters", code=tuned, task_id=task_id, variants=2)
        assert len(found["variants"]) == 2 and found["best"]["correct"]
        assert found["best"]["speedup"] >= found["original"]["speedup"]
        plain = await client.call_tool("search_parameters", {"code": GOOD, "task_id": task_id})
        assert plain.is_error and "no parameter to change" in plain.content[0].text
        neither = await client.call_tool("verify_kernel", {"code": GOOD})
        assert neither.is_error and "one of task_id and task" in neither.content[0].text
        faulty = await asked(client, "verify_kernel", code=GOOD, task={"code": "class Model:"})
        assert faulty["status"] == "task_error" and "line 1" in faulty["feedback"]
        unknown = await client.call_tool("verify_kernel", {"code": GOOD, "task_id": "none"})
        assert unknown.is_error and "--tasks" in unknown.content[0].text

    with serving(tmp_path, port, "--tasks", str(tmp_path / "affine.py")):
        until_healthy(VerifierClient(url, timeout_s=500))
        words = [*COMMAND, "--url", url, "--port", str(tools_port)]
        server = subprocess.Popen(words, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
        assert "/mcp" in server.stderr.readline()
        try:
            anyio.run(over_both)
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate()
        assert server.returncode == 130
