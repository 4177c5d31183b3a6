"""The tasks of KernelBench's level 1 in other words: as modules and as functions (`forms.yaml`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

TABLE = Path(__file__).with_name("forms.yaml")
CODE = """\
import math
import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {layers}

    def forward(self, {names}):
        return {answer}


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""


class Form(NamedTuple):
    """One way to write a task; `problems` are the tasks of level 1 that compute the same."""

    task: str
    problems: tuple[int, ...]
    text: str
    code: str


def forms() -> Iterator[Form]:
    for task, row in yaml.safe_load(TABLE.read_text()).items():
        inputs = row.get("inputs", {"x": "torch.rand(24, 40)"})
        for text in row["forms"]:
            code = written(text, inputs, row.get("parameters", {}))
            yield Form(task, tuple(row["problems"]), text, code)


def written(text: str, inputs: Mapping[str, str], parameters: Mapping[str, Any]) -> str:
    """A task in KernelBench's form: `text` is a module that is called, or an expression."""
    names = ", ".join(inputs)
    layers = _parameters(parameters)
    answer = text
    if text.startswith("nn."):
        layers, answer = [f"self.layer = {text}"], f"self.layer({names})"
    return CODE.format(
        layers="\n        ".join(layers or ["pass"]),
        names=names,
        answer=answer,
        inputs=", ".join(inputs.values()),
    )


def _parameters(shapes: Mapping[str, Sequence[int]]) -> list[str]:
    return [
        f"self.{name} = nn.Parameter(torch.rand({list(shape)}))" for name, shape in shapes.items()
    ]
