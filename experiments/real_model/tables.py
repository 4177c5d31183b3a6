"""The experiment's tasks as tables that `tasks.source: files` reads.

    python -m experiments.real_model.tables --language cpp --out real-tasks

writes `heldout.jsonl` (level 1: operators.toml; level 2: generated programs of the held-out side),
`train.jsonl` (modules.toml, and generated programs of the training side) and `taught.jsonl`, what
the proof's scripted teacher answers to the latter. Nothing is decontaminated here: a run does that.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from experiments.proof import generated
from experiments.proof.generated import Sizes
from experiments.proof.modules import module_of
from experiments.proof.options import Style
from experiments.proof.program import parse
from kernels_eval.records import Json, KernelTask, Language
from kernels_eval.tables import table_beside
from tasks.sources.files import OPTIONAL_COLUMNS
from tasks.synthesis.prompts import block

SIZES: dict[str, dict[str, int]] = table_beside(__file__, "sizes.toml")
HELD_OUT, TRAINED = 100, 1200
"""Generated programs of either side."""
STYLES: tuple[Style, ...] = ("fused",)
"""Of the teacher's kernels; a program has an answer in each."""
COLUMNS = {"code", *OPTIONAL_COLUMNS}
PROGRAM = """\
import torch
import torch.nn as nn
import torch.nn.functional as F


class {name}(nn.Module):
    def __init__({parameters}):
        super().__init__()
{attributes}
    def forward({inputs}):
{body}


def get_inputs():
    return [{tensors}]


def get_init_inputs():
    return {constructed}
"""


def heldout(language: Sizes) -> list[KernelTask]:
    """The published operators, and generated programs."""
    drawn = generated.load(2, HELD_OUT, "heldout", language)
    return [*published(language), *(task.model_copy(update={"level": 2}) for task in drawn)]


def train(language: Sizes) -> list[KernelTask]:
    """Modules in KernelBook's form, and generated programs."""
    return [*modules(language), *generated.load(1, TRAINED, "train", language)]


def taught(language: Sizes) -> list[Json]:
    """Answers meant to be right to the generated programs for training, without any thoughts."""
    made = []
    for task in train(language):
        if program := parse(task.code):
            modules = [module_of(program, Language(language), style, None) for style in STYLES]
            told = {"language": language, "generator": "scripted", "finish_reason": "stop"}
            made += [{"task_id": task.task_id, "response": block(text), **told} for text in modules]
    return made


def published(language: Sizes) -> list[KernelTask]:
    return [
        KernelTask(
            task_id=f"published/{row['number']}_{name}",
            name=name,
            code=program("Model", row, "[]", SIZES[language]),
            source="published",
            level=1,
        )
        for name, row in table_beside(__file__, "operators.toml").items()
    ]


def modules(language: Sizes) -> list[KernelTask]:
    return [
        KernelTask(
            task_id=f"module/{name}",
            name=name,
            code=program(name, row, f"[[], {{{keywords(row)}}}]", SIZES[language]),
            entry_point=name,
            init_form="args_kwargs",
            source="module",
        )
        for name, row in table_beside(__file__, "modules.toml").items()
    ]


def program(name: str, row: Mapping[str, Any], constructed: str, sizes: Mapping[str, int]) -> str:
    """The module of a table's row, with sizes for letters. `constructed` is what `get_init_inputs`
    returns."""
    arguments = row.get("arguments", {})
    kept = {name: name for name, value in arguments.items() if not isinstance(value, str)}
    attributes = kept | row.get("layers", {})
    *steps, last = row["forward"].strip().splitlines()
    text = PROGRAM.format(
        name=name,
        parameters=", ".join(["self", *arguments]),
        attributes=indented(f"self.{name} = {value}\n" for name, value in attributes.items()),
        inputs=", ".join(["self", *row["inputs"]]),
        body=indented([*(f"{step}\n" for step in steps), f"return {last}"]),
        tensors=", ".join(row["inputs"].values()),
        constructed=constructed,
    )
    for letter, size in sizes.items():
        text = text.replace(f"{{{letter}}}", str(size))
    return text


def keywords(row: Mapping[str, Any]) -> str:
    return ", ".join(f'"{name}": {value}' for name, value in row.get("arguments", {}).items())


def indented(lines: Iterable[str]) -> str:
    return "".join(f"        {line}" for line in lines)


def write(language: Sizes, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, tasks in (("heldout", heldout(language)), ("train", train(language))):
        write_lines(out / name, (task.model_dump(mode="json", include=COLUMNS) for task in tasks))
    write_lines(out / "taught", taught(language))


def write_lines(place: Path, rows: Iterable[Json]) -> None:
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    place.with_suffix(".jsonl").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--language", choices=get_args(Sizes), default="cpp")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    write(given.language, given.out)


if __name__ == "__main__":
    main()
