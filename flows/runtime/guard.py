"""Guards of a flow: prompt end, workspace lock against `concur gc`, disk watch, progress artifact,
failure report.

Guarantees: an error leaves the flow unchanged after a Prefect artifact `unfinished` (escaped) with
its fix; a cancelled run writes nothing more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeVar

from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from flows.runtime.disk import DiskWatch, require_room
from flows.runtime.lock import in_use
from flows.runtime.log import tasks_named, under_way
from flows.runtime.shutdown import stops_soon
from kernels_eval.pool.held import call_it
from kernels_eval.pool.ray import interruptible
from tasks.policy import ProgressArtifact
from tasks.progress import gathering, observed_by
from tasks.reporting.text import as_text

P = ParamSpec("P")
T = TypeVar("T")

SHOWN_CHARS = 600


@contextmanager
def guarding(root: str) -> Iterator[None]:
    """Guard a run in a root, and show its progress. Raises DiskFullError, also later."""
    call_it(f"flow run {flow_run.name}")
    with stops_soon(), in_use(root), tasks_named(), gathering() as cautions:
        try:
            require_room(root)
            progress = ProgressArtifact()
            with (
                observed_by(DiskWatch(root)),
                observed_by(progress),
                under_way(get_run_logger().info),
                interruptible(),
            ):
                yield
            progress.end()
        except Exception as error:
            # Prefect itself may be what is down: the error must leave all the same.
            with suppress(Exception):
                _report(error, cautions)
            raise


def _report(error: Exception, cautions: list[str]) -> None:
    get_run_logger().error("the run ended early: %s", shown(str(error)))
    create_markdown_artifact(
        key="unfinished",
        markdown=ending(error, cautions),
        description="Why it ended, and what to do",
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
    and why."""
    try:
        return work(*args, **kwargs), ()
    except Exception as error:  # whatever a model, a figure or a sandbox could not do
        caution = f"{what} are missing: {type(error).__name__}: {error}"
        get_run_logger().error("%s", caution)
        return None, (caution,)
