"""What a flow of the line works in: it ends soon when told to, holds its root against `concur gc`,
watches the disk, and reports what is kept if it ends early.

Guarantees: an error leaves the flow as it is, after a Prefect artifact `unfinished` that has the
error, its fix, and what each snapshot that this run worked on holds; a cancelled run writes nothing
more. Text in the artifact is escaped: an error may quote what a model wrote. Where Prefect does not
take the artifact, the error leaves all the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyarrow.parquet as pq
from prefect import Flow, flow
from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger

from flows.config import PipelineConfig
from flows.naming import run_name
from flows.runtime.config import GuardedRun
from flows.runtime.disk import DiskWatch, require_room
from flows.runtime.notices import NOTICES
from flows.runtime.root_lock import in_use
from flows.runtime.shutdown import stops_soon
from kernels_eval.pool.ray import interruptible
from tasks.progress import gathering, observed_by
from tasks.reporting.text import as_text
from tasks.store.snapshot import MANIFEST, SnapshotRef

P = ParamSpec("P")
T = TypeVar("T")

GUARDED: ContextVar[GuardedRun | None] = ContextVar("concur_guarded", default=None)
"""What the guards know of the run that this thread works for."""
SHOWN_CHARS = 600
TEMPLATE = Path(__file__).with_name("unfinished.md.j2")
STAGES = (
    "tasks",
    "training-tasks",
    "workloads",
    "synthesis",
    "search",
    "verification",
    "trace-flags",
    "curation",
    "analysis",
    "training",
    "benchmark",
)


def guarded(
    body: Callable[Concatenate[PipelineConfig, P], T],
) -> Callable[Concatenate[PipelineConfig, P], T]:
    """Make a function of a configuration one that guards its run."""

    @wraps(body)
    def guarded_body(config: PipelineConfig, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with guarding(config.guarded):
            return body(config, *args, **kwargs)

    return guarded_body


def guarded_flow(
    name: str, verb: str, *, strategy: bool = True
) -> Callable[
    [Callable[Concatenate[PipelineConfig, P], T]], Flow[Concatenate[PipelineConfig, P], T]
]:
    """Make a function of a configuration a flow of the line, which guards its run and gives notice
    of a bad end; its runs are named by `verb` (`run_name`)."""
    named = run_name(verb, strategy=strategy)
    return lambda body: flow(name=name, flow_run_name=named, **NOTICES)(guarded(body))


@contextmanager
def guarding(run: GuardedRun) -> Iterator[None]:
    """Guard a run once, however deep its flows are nested. Raises DiskFullError while it works."""
    if GUARDED.get():
        yield
        return
    began = time.time()
    with stops_soon(), in_use(run.root), checking(run), gathering() as cautions:
        try:
            with observed_by(DiskWatch(run)), interruptible():
                yield
        except Exception as error:
            # Prefect itself may be what is down: the error must leave all the same.
            with suppress(Exception):
                _report(error, ending(run.root, error, began, cautions))
            raise


@contextmanager
def checking(run: GuardedRun) -> Iterator[None]:
    """Inside the block `require_room_for` knows of this run."""
    token = GUARDED.set(run)
    try:
        yield
    finally:
        GUARDED.reset(token)


def require_room_for(tasks: SnapshotRef | None = None) -> None:
    """Check that the disk has room for the run, or for its stages on these tasks. Raises
    DiskFullError."""
    if run := GUARDED.get():
        require_room(run, tasks)


def _report(error: Exception, text: str) -> None:
    get_run_logger().error("the run ended early: %s", shown(str(error)))
    create_markdown_artifact(
        key="unfinished", markdown=text, description="Why this run ended early, and what is kept"
    )


def ending(root: str, error: BaseException, began: float, cautions: list[str]) -> str:
    """Markdown: why a run ended that began at `began` (seconds since the epoch), what is kept, and
    how to resume."""
    from tasks.reporting.templates import environment

    made = environment(TEMPLATE.parent, filters={"shown": shown})
    return made.get_template(TEMPLATE.name).render(
        kind=type(error).__name__,
        message=error.args[0] if error.args else "",
        hint=getattr(error, "hint", ""),
        rows=list(snapshots_since(root, began)),
        cautions=cautions,
    )


def snapshots_since(root: str, began: float) -> Iterator[tuple[str, str, int, str]]:
    """Stage, fingerprint, rows and state of every snapshot of a local root that was written to
    since `began`."""
    if "://" in root:
        return
    for stage in STAGES:
        for folder in sorted(Path(root).glob(f"{stage}/*/")):
            with suppress(OSError):
                if folder.stat().st_mtime >= began:
                    done = (folder / MANIFEST).exists()
                    state = "finished" if done else "unfinished: resumed by the next run"
                    yield stage, folder.name, _rows(folder, done), state


def _rows(folder: Path, finished: bool) -> int:
    if finished:
        return int(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["rows"])
    parts = sum(int(pq.read_metadata(part).num_rows) for part in folder.glob("part-*.parquet"))
    return parts + sum(
        journal.read_bytes().count(b"\n") for journal in folder.glob(".journal-*.jsonl")
    )


def shown(text: Any) -> str:
    """One line without markup, wherever markdown is rendered: no HTML, links, tables or code."""
    return as_text(text, SHOWN_CHARS)


def optional(
    what: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> tuple[T | None, tuple[str, ...]]:
    """Do work that a run can do without, inside a flow. Returns its result, or None and a caution
    that says what is missing and why; the next run of the same configuration tries again."""
    try:
        return work(*args, **kwargs), ()
    except Exception as error:  # whatever a model, a figure or a sandbox could not do
        caution = f"{what} are missing: {type(error).__name__}: {error}"
        get_run_logger().error("%s", caution)
        return None, (caution,)
