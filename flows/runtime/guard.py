"""Guards of a flow: prompt end, workspace lock against `concur gc`, disk watch, failure report.

Guarantees: an error leaves the flow unchanged after a Prefect artifact `unfinished` with its fix; a
cancelled run writes nothing more; the artifact is escaped, as errors quote models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from prefect import Flow, flow
from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger

from flows.config import PipelineConfig
from flows.naming import run_name
from flows.runtime.disk import DiskWatch, require_room
from flows.runtime.lock import in_use
from flows.runtime.shutdown import stops_soon
from kernels_eval.pool.ray import interruptible
from tasks.progress import gathering, observed_by
from tasks.reporting.text import as_text

P = ParamSpec("P")
T = TypeVar("T")

GUARDED: ContextVar[bool] = ContextVar("concur_guarded", default=False)
"""Whether this thread works for an already guarded run."""
SHOWN_CHARS = 600


def guarded_flow(
    name: str, verb: str, *, strategy: bool = True
) -> Callable[
    [Callable[Concatenate[PipelineConfig, P], T]], Flow[Concatenate[PipelineConfig, P], T]
]:
    """Make a function of a configuration a guarded flow; its runs are named by `verb`
    (`run_name`)."""
    named = run_name(verb, strategy=strategy)

    def make_flow(
        body: Callable[Concatenate[PipelineConfig, P], T],
    ) -> Flow[Concatenate[PipelineConfig, P], T]:
        @wraps(body)
        def guarded_body(config: PipelineConfig, /, *args: P.args, **kwargs: P.kwargs) -> T:
            with guarding(config):
                return body(config, *args, **kwargs)

        # Prefect would look for the types of parameters among the names of this module.
        vars(guarded_body)["__signature__"] = inspect.signature(body, eval_str=True)
        guarded_body.__annotations__ = inspect.get_annotations(body, eval_str=True)
        return flow(name=name, flow_run_name=named)(guarded_body)

    return make_flow


@contextmanager
def guarding(config: PipelineConfig) -> Iterator[None]:
    """Guard a run once, however deep its flows nest. Raises DiskFullError, also later."""
    if GUARDED.get():
        yield
        return
    root, reserve_gib = config.root, config.guard.reserve_gib
    token = GUARDED.set(True)
    try:
        with stops_soon(), in_use(root), gathering() as cautions:
            try:
                require_room(root, reserve_gib)
                with observed_by(DiskWatch(root, reserve_gib)), interruptible():
                    yield
            except Exception as error:
                # Prefect itself may be what is down: the error must leave all the same.
                with suppress(Exception):
                    _report(error, cautions)
                raise
    finally:
        GUARDED.reset(token)


def _report(error: Exception, cautions: list[str]) -> None:
    get_run_logger().error("the run ended early: %s", shown(str(error)))
    create_markdown_artifact(
        key="unfinished",
        markdown=ending(error, cautions),
        description="Why this run ended early, and what to do",
    )


def ending(error: BaseException, cautions: list[str]) -> str:
    message = error.args[0] if error.args else ""
    lines = ["# This run ended early", f"**{type(error).__name__}**: {shown(message)}"]
    if hint := getattr(error, "hint", ""):
        lines.append(f"What to do: {shown(hint)}")
    lines.append(
        "Finished work is kept, including every answer and verdict so far. Start the same run again"
        " to resume."
    )
    lines += [f"- {shown(caution)}" for caution in cautions]
    return "\n\n".join(lines)


def shown(text: Any) -> str:
    """One line without markup for any Markdown: no HTML, links, tables or code."""
    return as_text(text, SHOWN_CHARS)


def optional(
    what: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> tuple[T | None, tuple[str, ...]]:
    """Do optional work inside a flow. Returns its result, or None and a caution on what is missing
    and why; the next run retries."""
    try:
        return work(*args, **kwargs), ()
    except Exception as error:  # whatever a model, a figure or a sandbox could not do
        caution = f"{what} are missing: {type(error).__name__}: {error}"
        get_run_logger().error("%s", caution)
        return None, (caution,)
