"""A generated program: a list of operators on a matrix, and its PyTorch text.

Guarantees: the same program gives the same text; `parse` gives the program of any text that
`render` wrote, and None for every other. Values are matrices (rows, columns) of float32 until a
reduction makes a vector (rows,) of them.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Literal, NamedTuple

from kernels_eval.records import Record
from kernels_eval.tables import table_beside

Kind = Literal["pointwise", "row", "reduction", "linear", "pool"]
WEIGHTS = {"scale": "rand", "bias": "rand", "weight": "randn"}
"""Parameters by name, and how their values are drawn."""


class Operator(Record):
    """An operator of `operators.toml`, which says what the fields mean."""

    kind: Kind
    torch: str
    values: tuple[float | int, ...] = ()
    family: str = "elementwise"
    never_on: frozenset[str] = frozenset()
    keeps: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset()

    @cached_property
    def parameter(self) -> str | None:
        """The parameter that it reads."""
        found = re.search(r"self\.(\w+)", self.torch)
        return found[1] if found else None

    @cached_property
    def reads_input(self) -> bool:
        """Does it read the second input?"""
        return "y" in re.findall(r"\w+", self.torch)


def _operators() -> dict[str, Operator]:
    table = table_beside(__file__, "operators.toml")
    sets = ("never_on", "keeps", "gives")
    return {
        name: Operator(**{key: row[key].split() if key in sets else row[key] for key in row})
        for name, row in table.items()
    }


OPERATORS = _operators()
FAMILIES = ("elementwise", "reduction", "normalisation", "softmax", "pooling", "matmul")
"""Of several families in a program, the last of these is its own."""


def family_of(names: tuple[str, ...]) -> str:
    """The family of a program with these operators."""
    return max((OPERATORS[name].family for name in names), key=FAMILIES.index)


class Step(NamedTuple):
    """One operator of a program and its number, where it has one."""

    name: str
    value: float | int | None = None

    @property
    def operator(self) -> Operator:
        return OPERATORS[self.name]

    @property
    def torch(self) -> str:
        return self.operator.torch.format(value=self.value)


class Program(Record):
    """`steps` on a matrix of `rows` x `columns`."""

    rows: int
    columns: int
    steps: tuple[Step, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The operators in order: what makes a program another one; sizes and numbers do not."""
        return tuple(step.name for step in self.steps)

    @property
    def family(self) -> str:
        return family_of(self.names)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Columns before each step, and after the last one; 1 after a reduction."""
        found = [self.columns]
        for step in self.steps:
            found.append(_width_after(step, found[-1]))
        return tuple(found)

    @property
    def input_width(self) -> int | None:
        """Columns of the second input `y`; None without one."""
        steps = zip(self.steps, self.widths, strict=False)
        return next((width for step, width in steps if step.operator.reads_input), None)

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name, in the order of the steps."""
        found = dict[str, tuple[int, ...]]()
        for index, step in enumerate(self.steps):
            if name := step.operator.parameter:
                matrix = (self.widths[index + 1], self.widths[index])
                found[name] = matrix if step.operator.kind == "linear" else matrix[1:]
        return found

    @property
    def arguments(self) -> str:
        return "x" if self.input_width is None else "x, y"

    @property
    def constructor(self) -> str:
        """`__init__` of the module; empty without parameters."""
        lines = [_parameter_line(name, shape) for name, shape in self.parameters.items()]
        opening = ["    def __init__(self):", "        super().__init__()"]
        return "\n".join([*opening, *lines, "", ""]) if lines else ""

    def render(self) -> str:
        """The task: `Model`, `get_inputs()` and `get_init_inputs()` (KernelBench's form)."""
        sizes = [(self.rows, self.columns)]
        if self.input_width is not None:
            sizes.append((self.rows, self.input_width))
        return _TASK.format(
            constructor=self.constructor,
            arguments=self.arguments,
            lines="\n".join(f"        x = {step.torch}" for step in self.steps),
            inputs=", ".join(f"torch.randn({rows}, {width})" for rows, width in sizes),
        )


def parse(code: str) -> Program | None:
    """The program whose text this is; None where `render` did not write it."""
    sizes = re.search(r"return \[torch\.randn\((\d{1,9}), (\d{1,9})\)", code)
    steps = [_step(line[1], code) for line in re.finditer(r"^        x = (.+)$", code, re.M)]
    if sizes is None or not steps or None in steps:
        return None
    read = [step for step in steps if step]
    program = Program(rows=int(sizes[1]), columns=int(sizes[2]), steps=tuple(read))
    return program if program.render() == code else None


def _step(text: str, code: str) -> Step | None:
    for name, operator in OPERATORS.items():
        if operator.kind == "linear" and text == operator.torch:
            found = re.search(r"self\.weight = nn\.Parameter\(torch\.randn\((\d{1,9}),", code)
            return Step(name, int(found[1])) if found else None
        for value in operator.values or (None,):
            if text == operator.torch.format(value=value):
                return Step(name, value)
    return None


def _width_after(step: Step, width: int) -> int:
    match step.operator.kind:
        case "linear":
            return int(step.value or 0)
        case "pool":
            return width // int(step.value or 1)
        case "reduction":
            return 1
        case _:
            return width


def _parameter_line(name: str, shape: tuple[int, ...]) -> str:
    sizes = ", ".join(map(str, shape))
    drawn = f"torch.{WEIGHTS[name]}({sizes})"
    scaled = f"{drawn} / {shape[1]} ** 0.5" if len(shape) == 2 else f"{drawn} + 0.5"
    return f"        self.{name} = nn.Parameter({scaled})"


_TASK = """\
import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
{constructor}    def forward(self, {arguments}):
{lines}
        return x


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""
