"""What an ablation leaves when it ends: the comparison page, links, and errors as one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefect.context import FlowRunContext

from kernels_eval.errors import EvalError
from tasks.benchmark.comparison.records import Ablation, Branch

ERROR_LENGTH = 300


def cautions_of(branches: Sequence[Branch]) -> tuple[str, ...]:
    """What a reader must know before the numbers."""
    failed = [branch.name for branch in branches if branch.state == "failed"]
    out = [branch.name for branch in branches if branch.state == "left_out"]
    said = []
    if failed:
        said.append(
            f"{len(failed)} of {len(branches)} branches failed ({', '.join(failed)}): the same"
            " command tries them again"
        )
    if out:
        said.append(
            f"{len(out)} of {len(branches)} branches are left out, for the budget: a larger"
            " --max-gpu-hours goes on with them"
        )
    return tuple(said)


def compared(
    ablation: Ablation, directory: Path, resamples: int
) -> tuple[list[Path], tuple[str, ...]]:
    """The comparison's files, or the caution that stands in their place: the branches are done, and
    are not given up for a page."""
    if not any(branch.state == "done" for branch in ablation.branches):
        return [], ()
    from tasks.benchmark.comparison.page import write_comparison

    try:
        written = write_comparison(ablation, directory, resamples=resamples)
    except Exception as error:
        return [], (f"the comparison page is missing: {one_line(error)}",)
    return [written.html, written.markdown, written.json_file], ()


def prefect_url() -> str | None:
    """The page of the flow run that this thread works for, where Prefect is a server that says
    where its pages are."""
    from prefect.settings import get_current_settings
    from prefect.utilities.urls import url_for

    context = FlowRunContext.get()
    if context is None or context.flow_run is None or not get_current_settings().api.url:
        return None
    return url_for(context.flow_run)


def one_line(error: BaseException) -> str:
    """What an error says, as one line without what a terminal would act on."""
    text = str(error) if isinstance(error, EvalError) else f"{type(error).__name__}: {error}"
    line = next((part.strip() for part in text.splitlines() if part.strip()), type(error).__name__)
    return "".join(c if c.isprintable() else " " for c in line)[:ERROR_LENGTH]
