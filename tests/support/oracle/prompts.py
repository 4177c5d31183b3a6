"""The text of the prompts: every task, language and turn, by hash."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.support.oracle.inputs import Inputs, NotGiven, digest

HARDWARE = (None, "NVIDIA H100 80GB HBM3")
SOURCES = {
    "bundled": None,
    "kernelbench": "kernelbench",
    "kernelbook": "kernelbook_sample",
    "tritonbench": "tritonbench_t",
}
TIMING = {
    "reference_ms": 2.0,
    "candidate_ms": 1.5,
    "clock_bound_ms": 1.6,
    "speedup": 1.33,
    "speedup_lower": 1.2,
    "speedup_upper": 1.4,
    "pairs": 50,
    "calls_per_sample": 1,
    "drift": 0.0,
    "throttled": False,
}


def tasks_of(source: str, location: str | None) -> list[Any]:
    """Adapter: the tasks of a source."""
    from tasks.sources.config import TasksConfig
    from tasks.sources.stage import load_tasks

    split = "all" if source == "bundled" else "train"
    config = {"source": source, "location": location, "split": split}
    return load_tasks(TasksConfig.model_validate(config))


def first_prompts(task: Any) -> Iterator[tuple[str, str]]:
    """Adapter: the first prompt by language and hardware."""
    from kernels_eval.languages import registered
    from tasks.synthesis.prompts import render

    for name, language in registered().items():
        for hardware in HARDWARE:
            yield f"{name} {hardware or ''}".strip(), render(task, language, hardware)


def verdicts() -> Iterator[tuple[str, Any]]:
    """Adapter: one verdict a reason."""
    from kernels_eval.records import STATUS_OF, Verdict

    for reason, status in STATUS_OF.items():
        facts: dict[str, Any] = {"candidate_id": "c", "task_id": "t", "language": "cuda"}
        facts |= {"status": status.value, "reason": str(reason), "outputs_match": None}
        facts |= {"detail": "the words of the tools", "log_tail": "line 1\nline 2"}
        if status.value == "correct":
            facts |= {"timing": TIMING, "outputs_match": True}
        yield str(reason), Verdict.model_validate(facts)


def second_prompt(prompt: str, code: str | None, verdict: Any) -> str:
    """Adapter: the prompt that follows up on an answer."""
    from tasks.synthesis.refine import follow_up_prompt, said_of

    return follow_up_prompt(prompt, code, said_of(verdict), verdict.status.value == "correct")


def section(inputs: Inputs) -> Any:
    found: dict[str, Any] = {}
    for source, table in SOURCES.items():
        try:
            location = str(inputs.path(table)) if table else None
        except NotGiven:
            continue
        for task in tasks_of(source, location):
            found[task.task_id] = {name: digest(text) for name, text in first_prompts(task)}
    return {"first": found, "second": dict(_second())}


def _second() -> Iterator[tuple[str, str | None]]:
    for reason, verdict in verdicts():
        if verdict.status.value == "task_error":
            continue
        for name, code in (("code", "class ModelNew:\n    pass\n"), ("no code", None)):
            yield f"{reason}, {name}", digest(second_prompt("The prompt.", code, verdict))
