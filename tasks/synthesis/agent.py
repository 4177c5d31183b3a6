"""An agent: a model behind an OpenAI-compatible endpoint that verifies, profiles and improves its
kernel with the tools of `concur mcp` until it answers, or its calls are spent.

Guarantees: each kernel that it verified is an attempt of its response, in order. A fault of the
tools' service ends the run with an error, and no answer.
"""

from __future__ import annotations

import json
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from kernels_eval.errors import EvalError, UsageError
from kernels_eval.records import Json, stable_hash
from tasks.synthesis.client import OpenAISampler
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.parsing import parse_response
from tasks.synthesis.prompts import block
from tasks.synthesis.sampler import Request, Response

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from mcp import Client
    from openai import AsyncOpenAI

AGENT_VERSION = 1
"""Raised with every change of what an agent is told."""
CALLS, MOST_CALLS = 8, 64
VERIFY = "verify_kernel"
OFFERED = (VERIFY, "profile_kernel", "search_parameters")
GIVEN = ("task", "task_id", "language")
"""Arguments that the request decides, not the model."""
ADVICE = """

You have tools that judge a module for this task; each takes the whole module as `code`. Verify it,
follow the feedback, profile it once it is correct, and improve it. You have {calls} calls. At the
end answer with the complete module in a single code block.
"""


@dataclass(repr=False)
class AgentSampler(OpenAISampler):
    """`tools`: the address of `concur mcp --port`; `calls`: the tools' calls of one answer."""

    tools: str = ""
    calls: int = CALLS
    answers_follow_ups: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.generator = f"{self.model}+tools"
        self.most_attempts = self.calls

    @classmethod
    def from_config(cls, config: SynthesisConfig, root: str, adapter: Path | None = None) -> Self:
        tools, calls = _options(config)
        return replace(super().from_config(config, root), tools=tools, calls=calls)

    @classmethod
    def data_version(cls, config: SynthesisConfig) -> str:
        return stable_hash([AGENT_VERSION, _options(config)[1]])

    async def _ask(self, client: AsyncOpenAI, request: Request) -> Response:
        attempts: list[Response] = []
        best_code, best_speedup = "", -1.0
        prompt = request.prompt + ADVICE.format(calls=self.calls)
        messages: list[Json] = [{"role": "user", "content": prompt}]
        left = self.calls
        async with self._connected() as tools:
            offered = [_function(each) for each in (await tools.list_tools()).tools]
            offered = [each for each in offered if each["function"]["name"] in OFFERED]
            while True:
                body = self.body(request) | {"messages": messages}
                body |= {"tools": offered} if left > 0 else {}
                message, said = await self._complete(client, request, body)
                calls = message.get("tool_calls") or []
                if not calls or left <= 0:
                    break
                calls = calls[:left]
                left -= len(calls)
                messages.append(message | {"tool_calls": calls})
                for call in calls:
                    name, code = call["function"]["name"], _code(call)
                    answer, found = await self._use(tools, request, call)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
                    if name == VERIFY and code:
                        text = f"{said.text}\n\n{block(code)}".strip()
                        attempts.append(said.model_copy(update={"text": text}))
                    if found.get("correct") and (found.get("speedup") or 0.0) > best_speedup:
                        best_code, best_speedup = code, found.get("speedup") or 0.0
        if best_code and parse_response(said.text).code is None:
            text = f"{said.text}\n\n{block(best_code)}".strip()
            said = said.model_copy(update={"text": text, "finish_reason": "stop"})
        return said.model_copy(update={"attempts": tuple(attempts)})

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Client]:
        from mcp import Client, MCPError

        fix = f"start `concur mcp --port PORT` and `concur serve`; the tools are at {self.tools}"
        try:
            async with Client(self.tools) as tools:
                yield tools
        except MCPError as error:
            raise EvalError(f"the tools fail: {error.message}", fix) from error
        except ExceptionGroup as errors:
            first: BaseException = errors
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            if isinstance(first, EvalError):
                raise first from None
            if isinstance(first, MCPError):
                raise EvalError(f"the tools fail: {first.message}", fix) from errors
            raise EvalError(f"the tools do not answer: {first}", fix) from errors

    async def _use(self, tools: Client, request: Request, call: Json) -> tuple[str, Json]:
        name = call["function"]["name"]
        if name not in OFFERED:
            return f"There is no tool {name!r}.", {}
        task = request.task.model_dump(include={"code", "entry_point", "init_form"}, mode="json")
        arguments = _arguments(call) | {"task": task, "language": request.language.value}
        found = await tools.call_tool(name, arguments)
        text = "\n".join(each.text for each in found.content if each.type == "text")
        return text, found.structured_content or {}


def _options(config: SynthesisConfig) -> tuple[str, int]:
    given = dict(config.options)
    tools, calls = given.pop("tools", None), given.pop("calls", CALLS)
    if given or not isinstance(tools, str) or calls not in range(1, MOST_CALLS + 1):
        raise UsageError(
            f"synthesis.options of the sampler agent: tools={tools!r}, calls={calls!r}"
            + "".join(f", and unknown {name}" for name in given),
            "give tools, the address of `concur mcp --port 8701` (http://127.0.0.1:8701/mcp), and"
            f" calls, 1 to {MOST_CALLS}",
        )
    return tools, calls


def _function(tool: Any) -> Json:
    schema = tool.input_schema
    shown = {name: each for name, each in schema["properties"].items() if name not in GIVEN}
    parameters = {"type": "object", "properties": shown, "required": ["code"]}
    about = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": about}


def _arguments(call: Json) -> Json:
    with suppress(ValueError, TypeError):
        found = json.loads(call["function"]["arguments"])
        if isinstance(found, dict):
            return {name: value for name, value in found.items() if name not in GIVEN}
    return {}


def _code(call: Json) -> str:
    code = _arguments(call).get("code")
    return code if isinstance(code, str) else ""
