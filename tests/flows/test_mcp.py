"""`concur mcp`, asked by the official client: over stdio as an agent starts it, and over HTTP."""

import signal
import subprocess
import sys

import anyio
import pytest

pytest.importorskip("mcp")

from mcp import Client, MCPError, StdioServerParameters

from tests.support import kernels
from tests.support.kernels import AFFINE
from tests.support.processes import ROOT
from tests.support.servers import clean_environment, free_port

TOOLS = ["list_tasks", "verify_kernel", "explain_verdict", "profile_kernel", "search_parameters"]
TASK = {"code": AFFINE.code}
GOOD = kernels.module("return ext.affine(x)")
COMMAND = [sys.executable, "-m", "flows.cli", "mcp"]
ENVIRONMENT = clean_environment() | {"PYTHONPATH": ROOT}


def over_stdio(*words):
    return Client(
        StdioServerParameters(command=COMMAND[0], args=[*COMMAND[1:], *words], env=ENVIRONMENT)
    )


def test_without_a_service_the_error_says_how_to_start_it():
    async def ask():
        async with over_stdio("--url", f"http://127.0.0.1:{free_port()}") as client:
            assert [each.name for each in (await client.list_tools()).tools] == TOOLS
            with pytest.raises(MCPError, match="start `concur serve --tasks TASKS`"):
                await client.call_tool("verify_kernel", {"code": GOOD, "task": TASK})
            found = await client.call_tool("verify_kernel", {"task": TASK})
            assert found.is_error and "code" in found.content[0].text

    anyio.run(ask)


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_an_interrupt_ends_it_without_a_traceback(number, status):
    process = subprocess.Popen(
        COMMAND, env=ENVIRONMENT, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert "tools for agents" in process.stderr.readline()
    process.send_signal(number)
    assert process.wait() == status and "Traceback" not in process.stderr.read()
    process.stdin.close()
    process.stderr.close()
