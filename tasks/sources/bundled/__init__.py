"""Bundled tasks and recorded responses, for demo and tests without network or model.

Guarantees: fixed content and order, `task_id` = `bundled/{name}`; held-out tasks never enter
training data. Responses are deliberately mixed: correct, slow, wrong and broken.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Literal

from kernels_eval.errors import UsageError
from kernels_eval.records import KernelTask
from tasks.sources.config import TasksConfig
from tasks.sources.files import check_task_source

HELD_OUT = frozenset({"cosine_similarity", "upsample_bilinear2d", "masked_softmax", "swiglu_gate"})
"""Tasks kept for the benchmark: two of one operator and two fusions, none a variant of a training
task."""

SPLITS = ("all", "train", "heldout", "gradients")


def from_config(config: TasksConfig) -> list[KernelTask]:
    """The configured split."""
    return load(config.split)


def load(split: Literal["all", "train", "heldout", "gradients"] = "all") -> list[KernelTask]:
    """A split's bundled tasks, by name. "gradients" holds the tasks that ask for them, and no other
    split does. Raises UsageError for an unknown split."""
    if split not in SPLITS:
        raise UsageError(
            f"the bundled tasks have no split {split!r}", f"choose one of {', '.join(SPLITS)}"
        )
    if split == "gradients":
        return list(_tasks(split))
    return [
        task
        for task in _tasks()
        if split == "all" or (task.name in HELD_OUT) == (split == "heldout")
    ]


def responses(task_name: str, language: str) -> list[str]:
    """Recorded responses to a bundled task in a language, by number; may be empty.

    `language` is a `Language` or its value. Raises UsageError for a task that is not bundled.
    """
    if task_name not in {task.name for task in (*_tasks(), *_tasks("gradients"))}:
        raise UsageError(
            f"there is no bundled task {task_name!r}", "`load()` lists the bundled tasks"
        )
    return list(_responses(task_name, str(language)))


def texts() -> list[str]:
    """All task sources and responses that the demo's small model reads, in a fixed order."""
    recorded = [
        text
        for task in _tasks()
        for language in ("cpp", "cuda")
        for text in _responses(task.name, language)
    ]
    return [task.code for task in _tasks()] + recorded


@cache
def _tasks(kind: str = "") -> tuple[KernelTask, ...]:
    folder = files(__name__).joinpath("tasks", kind)
    found = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".py"):
            name, code = entry.name.removesuffix(".py"), entry.read_text(encoding="utf-8")
            check_task_source(code, "Model", entry.name)
            found.append(
                KernelTask(task_id=f"bundled/{name}", name=name, code=code, source="bundled")
            )
    return tuple(found)


@cache
def _responses(task_name: str, language: str) -> tuple[str, ...]:
    folder = files(__name__).joinpath("responses", language, task_name)
    if not folder.is_dir():
        return ()
    numbered = {
        int(entry.name.removesuffix(".md")): entry
        for entry in folder.iterdir()
        if entry.name.endswith(".md")
    }
    return tuple(numbered[number].read_text(encoding="utf-8") for number in sorted(numbered))
