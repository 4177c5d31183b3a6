"""Bundled tasks and recorded responses, for demo and tests without network or model.

Guarantees: fixed content and order, `task_id` = `bundled/{name}`; held-out tasks never enter
training data. Responses are deliberately mixed: correct, slow, wrong and broken.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import get_args

from kernels_eval.errors import UsageError
from kernels_eval.records import KernelTask
from tasks.sources.bundled import pairs
from tasks.sources.config import Split, TasksConfig
from tasks.sources.files import check_task_source

HELD_OUT = frozenset({"cosine_similarity", "upsample_bilinear2d", "masked_softmax", "swiglu_gate"})
"""Tasks kept for the benchmark: two of one operator and two fusions, none a variant of a training
task."""

NOT_IN_DEMO = frozenset({"cumulative_sum", "layer_norm", "scale_shift_silu"})
"""Training tasks whose verdicts take longest, and which others are like."""

SPLITS: tuple[Split, ...] = get_args(Split)
PAIRS = {"demo": pairs.TRAIN, "demo_heldout": pairs.HELD_OUT}
"""Splits with pairs: beside training tasks, and alone."""


def from_config(config: TasksConfig) -> list[KernelTask]:
    """The configured split."""
    return load(config.split)


def load(split: Split = "all") -> list[KernelTask]:
    """A split's bundled tasks, by name. "gradients" holds the tasks that ask for them, and no other
    split does; "demo" holds pairs and most of "train", "demo_heldout" other pairs. Raises
    UsageError for an unknown split."""
    if split not in SPLITS:
        raise UsageError(
            f"the bundled tasks have no split {split!r}", f"choose one of {', '.join(SPLITS)}"
        )
    if split == "gradients":
        return list(_tasks(split))
    if split in PAIRS:
        tasks = [_task(pair.name, pair.code) for pair in PAIRS[split]]
        if split == "demo":
            tasks += [task for task in load("train") if task.name not in NOT_IN_DEMO]
        return sorted(tasks, key=lambda task: task.name)
    return [
        task
        for task in _tasks()
        if split == "all" or (task.name in HELD_OUT) == (split == "heldout")
    ]


def responses(task_name: str, language: str) -> list[str]:
    """Recorded responses to a bundled task in a language, by number; may be empty.

    `language` is a `Language` or its value. Raises UsageError for a task that is not bundled.
    """
    if task_name in _recorded_pairs():
        return [_recorded_pairs()[task_name].response] * (str(language) == str(pairs.LANGUAGE))
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


def prompt(code: str) -> str:
    """The pipeline's prompt for a program, in the language of pairs."""
    text = files(__name__).joinpath("prompt.txt").read_text(encoding="utf-8")
    return text.replace("{code}", code.rstrip())


@cache
def recorded_names() -> dict[str, str]:
    """The names, by `task_id`, of all tasks that have recordings."""
    return {task.task_id: task.name for split in SPLITS for task in load(split)}


def recordings() -> list[str]:
    """`texts`, and the answers to pairs."""
    return texts() + [pair.response for pair in _recorded_pairs().values()]


@cache
def _recorded_pairs() -> dict[str, pairs.Pair]:
    return {pair.name: pair for split in PAIRS.values() for pair in split}


def _task(name: str, code: str) -> KernelTask:
    return KernelTask(task_id=f"bundled/{name}", name=name, code=code, source="bundled")


@cache
def _tasks(kind: str = "") -> tuple[KernelTask, ...]:
    folder = files(__name__).joinpath("tasks", kind)
    found = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".py"):
            name, code = entry.name.removesuffix(".py"), entry.read_text(encoding="utf-8")
            check_task_source(code, "Model", entry.name)
            found.append(_task(name, code))
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
