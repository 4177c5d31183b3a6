"""The MCP server: tools for coding agents over a running `concur serve`.

Guarantees: a kernel's fault is an answer; unusable arguments are a tool's error, which a model can
mend; a fault of the service or of the machine is an error of the protocol with its fix.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Annotated

import anyio
from mcp import MCPError
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import AfterValidator, Field, ValidationError

from flows.tools.answers import (
    Explanation,
    Profiled,
    Searched,
    TaskEntry,
    TaskList,
    Variant,
    Verification,
    explanation_of,
    verification_of,
)
from kernels_eval.config import EvalConfig
from kernels_eval.devices import device_for, gpu_arch, require_device
from kernels_eval.errors import DeviceError, EvalError, ServiceError, UsageError, first_problem
from kernels_eval.profile.bottleneck import findings
from kernels_eval.profile.profiler import Profiler
from kernels_eval.profile.records import KernelProfile
from kernels_eval.records import (
    Candidate,
    KernelTask,
    Language,
    SamplingParams,
    Verdict,
    candidate_id,
)
from kernels_eval.service.client import AsyncVerifierClient
from kernels_eval.service.schema import Evaluation, EvaluationRequest, State, TaskSource
from tasks.search.parameters import changed
from tasks.synthesis.parsing import parse_response
from tasks.workload.measure import Measurer

INTERNAL_ERROR = -32603
"""JSON-RPC's code."""
NAME = "agent"
MOST_VARIANTS = 64
TOLD_EVERY_S, GIVE_UP_S = 10.0, 5.0
INSTRUCTIONS = (
    "Tools to write fast GPU or C++ kernels. Read a task with list_tasks, write a Python module"
    " that defines ModelNew (built with load_inline, or Triton), verify_kernel it, follow the"
    " feedback, profile_kernel what is correct, and verify each improvement. Only a verdict"
    " `correct` counts, and its speedup_lower is the time that is claimed."
)


def _unfenced(code: str) -> str:
    return parse_response(code).code or code if code.lstrip().startswith("```") else code


Code = Annotated[
    str,
    AfterValidator(_unfenced),
    Field(description="a whole Python module that defines ModelNew"),
]
TaskId = Annotated[str | None, Field(description="a task of list_tasks; else give `task`")]
Source = Annotated[TaskSource | None, Field(description="a program with Model; else `task_id`")]
Spoken = Annotated[Language | None, Field(description="default: read from the source")]


class Tools:
    """The tools. `client` asks the service; kernels are profiled on this machine, one at a time."""

    def __init__(self, client: AsyncVerifierClient) -> None:
        self.client = client
        self._profiling = anyio.Lock()
        self._began_s = time.monotonic()

    async def list_tasks(
        self,
        match: Annotated[str, Field(description="part of an id or name")] = "",
        sources: Annotated[bool, Field(description="with the programs")] = False,
        offset: Annotated[int, Field(ge=0)] = 0,
        limit: Annotated[int, Field(ge=1, le=200)] = 50,
    ) -> TaskList:
        """List the tasks that kernels can be written for."""
        async with self._asking():
            tasks = await self.client.tasks()
        found = [each for each in tasks if match.lower() in f"{each.task_id} {each.name}".lower()]
        page = [
            TaskEntry(task_id=each.task_id, name=each.name, code=each.code if sources else None)
            for each in found[offset : offset + limit]
        ]
        return TaskList(total=len(found), tasks=page)

    async def verify_kernel(
        self,
        code: Code,
        ctx: Context,
        task_id: TaskId = None,
        task: Source = None,
        language: Spoken = None,
    ) -> Verification:
        """Build a kernel, compare it with its task on many inputs, and time both."""
        async with self._asking():
            return _verification(await self._judged(ctx, code, task_id, task, language))

    async def explain_verdict(self, evaluation_id: str) -> Explanation:
        """Explain a verdict: the rule, the feedback, and what each flag means."""
        async with self._asking():
            found = await self.client.result(evaluation_id)
        return explanation_of(_verdict(found))

    async def profile_kernel(
        self,
        code: Code,
        ctx: Context,
        task_id: TaskId = None,
        task: Source = None,
        language: Spoken = None,
    ) -> Profiled:
        """Verify a kernel and, where it is correct, say what limits its speed."""
        async with self._asking():
            evaluation = await self._judged(ctx, code, task_id, task, language)
            verdict, verification = _verdict(evaluation), _verification(evaluation)
            if not verification.correct:
                problem = "only a correct kernel is profiled: follow the feedback"
                return Profiled(verification=verification, problem=problem)
            asked = task.task() if task else await self._task(task_id)
            require_device(verdict.language)
            async with self._profiling:
                profile = await anyio.to_thread.run_sync(profile_of, asked, code, verdict)
        return _profiled(verification, profile)

    async def search_parameters(
        self,
        code: Code,
        ctx: Context,
        task_id: TaskId = None,
        task: Source = None,
        language: Spoken = None,
        variants: Annotated[int, Field(ge=1, le=MOST_VARIANTS)] = 8,
    ) -> Searched:
        """Verify a kernel with other block sizes, unroll factors and constants; return the fastest
        correct module."""
        async with self._asking():
            first = _verification(await self._judged(ctx, code, task_id, task, language))
            tried: dict[str, Variant] = {}
            for module, change in _variants(code, first.language, variants).items():
                found = await self._judged(ctx, module, task_id, task, language)
                tried[module] = Variant(change=change, verification=_verification(found))
        results = {code: first, **{name: each.verification for name, each in tried.items()}}
        fastest = max(results, key=lambda name: results[name].speedup or 0.0)
        ordered = sorted(tried.values(), key=lambda each: -(each.verification.speedup or 0.0))
        return Searched(code=fastest, best=results[fastest], original=first, variants=ordered)

    # -- the service -------------------------------------------------------------------------------

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        """Ask whether the service is there, and turn errors into those of the protocol."""
        try:
            try:
                await self.client.health()
            except ServiceError as error:
                raise ServiceError(
                    f"no service at {self.client.url}: {error.args[0]}",
                    "start `concur serve --tasks TASKS`, or give its address: `concur mcp --url`",
                ) from error
            yield
        except ValidationError as error:
            raise ToolError(": ".join(filter(None, first_problem(error)))) from error
        except (UsageError, DeviceError) as error:
            raise ToolError(str(error)) from error
        except EvalError as error:
            raise MCPError(INTERNAL_ERROR, str(error)) from error

    async def _judged(
        self,
        ctx: Context,
        code: str,
        task_id: str | None,
        task: TaskSource | None,
        language: Language | None,
    ) -> Evaluation:
        """The final evaluation. Many clients give a call up that is silent for a minute, so it says
        that it goes on; a call that is given up gives its evaluation up."""
        if (task_id is None) is (task is None):
            raise ToolError("give exactly one of task_id and task")
        request = EvaluationRequest(
            task_id=task_id, task=task, code=code, language=language, client=NAME
        )
        found = await self.client.submit(request)
        try:
            while not found.state.final:
                elapsed_s = time.monotonic() - self._began_s  # never falls, as the protocol asks
                await ctx.report_progress(elapsed_s, message=f"the evaluation is {found.state}")
                found = await self.client.result(found.id, TOLD_EVERY_S)
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(GIVE_UP_S, shield=True), suppress(EvalError):
                await self.client.cancel(found.id)
            raise
        return found

    async def _task(self, task_id: str | None) -> KernelTask:
        return next(each for each in await self.client.tasks() if each.task_id == task_id)


def _verdict(found: Evaluation) -> Verdict:
    """Raises ToolError for an evaluation without a verdict, ServiceError where it failed."""
    if found.state is State.FAILED:
        raise ServiceError(f"evaluation {found.id} failed: {found.error}", "verify it again")
    if found.verdict is None:
        raise ToolError(f"evaluation {found.id} is {found.state}: there is no verdict")
    return found.verdict


def _verification(found: Evaluation) -> Verification:
    return verification_of(found.id, _verdict(found))


def _variants(code: str, language: Language, count: int) -> dict[str, str]:
    """Up to `count` other modules, each with its change in words. Raises UsageError."""
    draw = Random(code)
    found: dict[str, str] = {}
    for _ in range(4 * count):
        variant = changed(code, language, draw)
        if variant and variant[0] != code and len(found) < count:
            found.setdefault(*variant)
    if not found:
        raise UsageError(
            "the source has no parameter to change",
            "name block sizes, tiles or unroll factors as constants (constexpr int BLOCK = 256)",
        )
    return found


# -- profiles --------------------------------------------------------------------------------------


def profile_of(task: KernelTask, code: str, verdict: Verdict) -> KernelProfile:
    """Count the task's work and profile its correct kernel on this machine. Raises EvalError."""
    language = verdict.language
    candidate = Candidate(
        candidate_id=candidate_id(task, NAME, SamplingParams(), 0, code),
        task_id=task.task_id,
        language=language,
        generator=NAME,
        code=code,
    )
    with Measurer() as measurer:
        work = measurer.measure(task)
    arch = gpu_arch() if language.needs_gpu else None
    with Profiler(EvalConfig(), device_for(language), cuda_arch=arch) as profiler:
        return profiler.profile(
            task, candidate, verdict, flops=work.flops, bytes_min=work.bytes_min
        )


def _profiled(verification: Verification, profile: KernelProfile) -> Profiled:
    if profile.problem:
        return Profiled(verification=verification, problem=profile.problem)
    return Profiled(
        verification=verification,
        bottlenecks=list(findings(profile)),
        kernels_us={each.name: each.us for each in profile.kernels},
        operators_us={each.name: each.us for each in profile.operators},
        least_ms=profile.least_ms,
        speed_of_light=profile.speed_of_light,
    )


# -- the server ------------------------------------------------------------------------------------


def make_server(client: AsyncVerifierClient) -> MCPServer:
    server = MCPServer("concur", instructions=INSTRUCTIONS, log_level="ERROR")
    tools = Tools(client)
    for tool in (
        tools.list_tasks,
        tools.verify_kernel,
        tools.explain_verdict,
        tools.profile_kernel,
        tools.search_parameters,
    ):
        server.add_tool(tool, structured_output=True)
    return server


def run(url: str, token: str | None, port: int | None) -> None:
    """Serve on stdin and stdout or, with a `port`, over HTTP at /mcp of this machine alone."""
    server = make_server(AsyncVerifierClient(url, token))
    if port is None:
        server.run()
    else:
        server.run("streamable-http", port=port)
