"""Requests, answers and reports.

The judge sends a `Request`, whose class gives the command and the answer's type; a process serves
it by the method that `handles` it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Annotated, Any, ClassVar, Generic, TypeVar, get_args, get_type_hints

from pydantic import FailFast, Field, field_validator

from kernels_eval.config import MOST_ITEMS, MOST_NS, MOST_TEXT_LETTERS
from kernels_eval.records import Record

A = TypeVar("A", bound=Record)
H = TypeVar("H", bound=Callable[..., object])


class Payload(Record, use_attribute_docstrings=False):
    """Base of what processes send each other. What its fields' docstrings say is for readers: to
    find them takes seconds of each import beside a large library."""


class Request(Payload, Generic[A]):
    """A command for a process, which answers with `A`."""

    answer: ClassVar[type[Any]]
    """the type of the answer"""
    command: ClassVar[str]
    """its name on the wire"""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        arguments = cls.__pydantic_generic_metadata__["args"]
        if arguments:  # `Request[A]` itself
            cls.answer = arguments[0] if isinstance(arguments[0], type) else Record
        else:
            cls.command = cls.__name__

    def message(self) -> dict[str, object]:
        return {"command": self.command, **self.model_dump(mode="json")}


def parsed(request: Request[A], answer: object) -> A:
    """The answer as its request's type. Raises ValidationError."""
    found: A = request.answer.model_validate(answer)
    return found


def handles(request: type[Request[Any]]) -> Callable[[H], H]:
    """Mark the method, or the function, that answers this request."""

    def mark(handler: H) -> H:
        handler.__dict__["handles"] = request
        return handler

    return mark


Routes = dict[str, tuple[type[Request[Any]], str]]
"""By command: its request, and the name of the method or function that answers it."""


@cache
def routes_of(owner: Any) -> Routes:
    """What a class or module of functions serves. Raises TypeError for a wrong answer type."""
    routes: Routes = {}
    for name in dir(owner):
        handler = getattr(owner, name)
        request = getattr(handler, "handles", None)
        if not (isinstance(request, type) and issubclass(request, Request)):
            continue
        promised = get_type_hints(handler).get("return")
        if request.answer not in (promised, *get_args(promised)):
            raise TypeError(f"{owner.__name__}.{name} answers {request.command} otherwise")
        routes[request.command] = request, name
    return routes


def answer_message(parts: Sequence[object], message: dict[str, Any]) -> Record:
    """Answer a message by the first of a role's parts that serves it. Raises KeyError for no part,
    ValidationError for a bad request, and what its handler raises.
    """
    command = message.pop("command")
    for part in parts:
        owner: Any = part if isinstance(part, ModuleType) else type(part)
        if command in routes_of(owner):
            request, name = routes_of(owner)[command]
            handler: Callable[[Any], Record] = getattr(part, name)
            return handler(request.model_validate(message))
    raise KeyError(command)


class Done(Payload):
    """The answer of a command that only does something."""


Count = Annotated[int, Field(ge=0, lt=1 << 62)]
Text = Annotated[str, Field(max_length=MOST_TEXT_LETTERS)]
Finite = Annotated[float, Field(ge=-1e9, le=1e9)]
Item = TypeVar("Item")
Several = Annotated[list[Item], FailFast(), Field(max_length=MOST_ITEMS)]
"""A list, validated up to its first wrong item."""
Shape = Annotated[list[Count], FailFast(), Field(max_length=64)]
Nanoseconds = Annotated[int, Field(ge=0, le=MOST_NS)]


def storable(text: str) -> str:
    """Text that a record can hold and a terminal print: without lone surrogates."""
    return text.encode("utf-8", "replace").decode()


class Report(Payload, extra="ignore", strict=True):
    """Base of a candidate process's reports: unknown fields ignored, strict types, bounded
    values.
    """


class ErrorReport(Report):
    """An error that a process reports of itself; `error` is a reason, or empty."""

    error: str = ""
    detail: str = ""
    trace: str = ""

    @field_validator("*", mode="before")
    @classmethod
    def _as_text(cls, said: object) -> object:
        return storable(said) if isinstance(said, str) else said
