"""Programs and answers in the cells of foreign tables: text, bytes, chat messages and completions,
and lists of answers. A cell of another form is a UsageError that names its row."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kernels_eval.errors import UsageError
from kernels_eval.records import Json
from kernels_eval.source.syntax import UNPARSABLE, parse_source
from kernels_eval.written import json_of
from tasks.sources.syntax import defined_names

_FENCE = re.compile(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
ROLES = {"assistant": "assistant", "gpt": "assistant", "model": "assistant"}
WRAPPED = ("choices", "candidates", "body", "response", "messages", "message")
FORMS = (
    "text, bytes, messages with role and content, a chat completion, what OpenAI's Responses or"
    " Gemini's API gives, or a list of these"
)
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
ENDED = {"STOP": "stop", "completed": "stop", "MAX_TOKENS": "length", "incomplete": "length"}
"""Why an answer ended, as OpenAI's chats say it: of Gemini's words and a response's status."""


class Answer(NamedTuple):
    """What a model said, as its table has it. `reasoning` only where the table separates it."""

    text: str
    reasoning: str | None = None
    finish_reason: str | None = None


def samples_of(cell: object, where: str) -> list[list[Answer]]:
    """The samples in a cell, each with its turns. None where there is no answer."""
    value = _plain(cell, where)
    if isinstance(value, str):
        return [[Answer(value)]] if value.strip() else []
    if isinstance(value, Sequence):
        if value and all(_role(each) for each in value):
            said = [each for each in value if _role(each) == "assistant" and not _only_calls(each)]
            turns = [_answer(each, where) for each in said]
            return [turns] if turns else []
        return [sample for each in value for sample in samples_of(each, where)]
    if isinstance(value, Mapping):
        for name in ("choices", "candidates"):
            if isinstance(value.get(name), Sequence):
                return [[_answer(each, where)] for each in value[name]]
        if _is_response(value):
            return [[_answer(_message_of(value), where)]]
        if wrapped := [value[name] for name in WRAPPED if name in value]:
            return samples_of(wrapped[0], where)
        return [[_answer(value, where)]]
    if value is None:
        return []
    raise _unknown(value, where)


def text_of(cell: object, where: str) -> str:
    """The text of a program's cell: of messages, those that ask."""
    value = _plain(cell, where)
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(_role(each) for each in value):
        asked = [each for each in value if _role(each) != "assistant"]
        return "\n\n".join(_content(each, where) for each in asked)
    raise _unknown(value, where)


class HasProgram(Protocol):
    """A program and its class, such as kernels_eval.records.KernelTask."""

    @property
    def code(self) -> str: ...
    @property
    def entry_point(self) -> str: ...


class Program(NamedTuple):
    """A task's program, its class, and the form of what `get_init_inputs` returns."""

    code: str
    entry_point: str
    init_form: str


def program_in(text: str, entry_point: str | None) -> Program | None:
    """The program of a task: the text itself, else the last fenced block that defines one. Its
    class is `entry_point` where it is given, else Model, else the last one."""
    for block in (text, *reversed(_FENCE.findall(text))):
        try:
            body = parse_source(block).body
        except UNPARSABLE:
            continue
        functions = defined_names(body, ast.FunctionDef, ast.Assign)
        classes = [node.name for node in body if isinstance(node, ast.ClassDef)]
        chosen = entry_point or ("Model" if "Model" in classes else "".join(classes[-1:]))
        if chosen in classes and "get_inputs" in functions:
            return Program(str(block), chosen, "args_kwargs" if _has_kwargs(body) else "args")
    return None


def with_model_new(code: str, program: HasProgram) -> str:
    """A module that does not define ModelNew, with that name for the one class that it has beside
    the task's: the class of the same name, else the only one."""
    if "ModelNew" in code:
        return code
    try:
        own, asked = (parse_source(text).body for text in (code, program.code))
    except UNPARSABLE:
        return code
    repeated = {ast.dump(node) for node in asked}
    added = [
        node.name
        for node in own
        if isinstance(node, ast.ClassDef)
        and ast.dump(node) not in repeated
        and not any(ast.unparse(base).endswith("Function") for base in node.bases)
    ]
    meant = [program.entry_point] if program.entry_point in added else added
    return f"{code.rstrip()}\n\n\nModelNew = {meant[0]}\n" if len(meant) == 1 else code


def _has_kwargs(body: Sequence[ast.stmt]) -> bool:
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == "get_init_inputs":
            match node.body[-1]:
                case ast.Return(ast.List([ast.List(), ast.Dict()])):
                    return True
    return False


def _plain(cell: object, where: str) -> Any:
    """The cell, with bytes as text and text of JSON as what it says."""
    if isinstance(cell, bytes):
        try:
            cell = cell.decode("utf-8")
        except UnicodeDecodeError as error:
            fault = f"{where} holds bytes that are not UTF-8: {error}"
            raise UsageError(fault, f"known are {FORMS}") from None
    if isinstance(cell, str) and re.match(r"\s*(\[\s*)?\{", cell):
        try:
            value = json_of(cell)
        except ValueError:
            return cell
        return value if _speaks(value) else cell
    return cell


def _speaks(value: object) -> bool:
    if isinstance(value, Mapping):
        wrapped = not value.keys().isdisjoint(WRAPPED)
        return wrapped or _role(value) is not None or _is_response(value)
    return isinstance(value, list) and bool(value) and all(map(_speaks, value))


def _role(message: object) -> str | None:
    if not isinstance(message, Mapping):
        return None
    role = message.get("role", message.get("from"))
    return ROLES.get(str(role), str(role)) if role is not None else None


def _only_calls(message: Mapping[str, Any]) -> bool:
    """Whether a message calls tools and says nothing."""
    return bool(message.get("tool_calls")) and not message.get("content")


def _answer(value: object, where: str) -> Answer:
    if not isinstance(value, Mapping):
        raise _unknown(value, where)
    inner = [value[name] for name in ("message", "content") if isinstance(value.get(name), Mapping)]
    message = inner[0] if inner else value
    thoughts = [message[name] for name in THOUGHTS if isinstance(message.get(name), str)]
    thoughts.append("".join(_thought(each) for each in message.get("parts") or ()))
    ended = value.get("finish_reason", value.get("finishReason"))
    return Answer(
        _content(message, where),
        next(filter(None, thoughts), None),
        ENDED.get(ended, ended) if isinstance(ended, str) else None,
    )


def _is_response(value: Mapping[str, Any]) -> bool:
    """Whether it is an object of OpenAI's Responses API."""
    output = value.get("output")
    return isinstance(output, list) and any(
        isinstance(each, Mapping) and each.get("type") == "message" for each in output
    )


def _message_of(response: Mapping[str, Any]) -> Json:
    """A response as a chat's message; the texts of its parts in order."""
    items = [each for each in response["output"] if isinstance(each, Mapping)]
    parts: dict[str, list[Any]] = {"message": [], "reasoning": []}
    for each in items:
        found = parts.get(str(each.get("type")), [])
        found += [*(each.get("summary") or ()), *(each.get("content") or ())]
    return {
        "content": parts["message"],
        "reasoning": "".join(_text(each) for each in parts["reasoning"]),
        "finish_reason": response.get("status"),
    }


def _text(part: object) -> str:
    return str(part.get("text") or "") if isinstance(part, Mapping) else ""


def _thought(part: object) -> str:
    """The text of a part that Gemini marks as a thought."""
    return _text(part) if isinstance(part, Mapping) and part.get("thought") else ""


def _content(message: Mapping[str, Any], where: str) -> str:
    names = [name for name in ("content", "parts", "value", "text") if name in message]
    if not names:
        raise _unknown(message, where)
    content = message[names[0]]
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(_text(each) for each in content if not _thought(each))
    if content is not None and not isinstance(content, str):
        raise _unknown(content, where)
    return content or ""


def _unknown(value: object, where: str) -> UsageError:
    kind = type(value).__name__
    names = f" with {', '.join(map(str, list(value)[:5]))}" if isinstance(value, Mapping) else ""
    return UsageError(f"{where} holds {kind}{names}, which is no answer", f"known are {FORMS}")
