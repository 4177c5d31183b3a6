"""Loops that compute one row of a generated program, in C++ and CUDA alike.

A row is read by loops, each of which may read what the one before it stored. Fused: neighbouring
operators share a loop. Guarantees: the same operators give the same names and the same order of
lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from experiments.proof.options import Style
from experiments.proof.program import Step
from kernels_eval.records import Language, Row
from kernels_eval.tables import table_beside

TABLE: Mapping[str, Row] = table_beside(__file__)


class Part(NamedTuple):
    """A step, how it is computed (a row of `kernels.toml`), and what its output's width is
    called."""

    step: Step
    how: Row
    width: str


@dataclass(frozen=True)
class Form:
    """How a row is looped over: `loop` opens a loop, `group` are the threads that share a row (a
    block or a warp; None: one thread), `buffer` is where rows are kept."""

    loop: str = "for (int64_t i = 0; i < {width}; ++i) {{"
    group: str | None = None
    buffer: str = "row"
    fused: bool = True


def form_of(language: Language, style: Style) -> Form:
    fused = style in ("fused", "vectorised")
    if not language.needs_gpu or style == "naive":
        return Form(fused=fused, buffer="to" if style == "naive" else "row")
    return Form(
        loop="for (int64_t i = threadIdx.x; i < {width}; i += blockDim.x) {{",
        group="warp" if style == "vectorised" else "block",
        fused=fused,
    )


@dataclass
class Rows:
    """Lines that compute one row, from `in` to `to`. `width` is what the row's length is called,
    `pending` the body of the loop that is being written, `changed` whether it changes the row,
    `scalar` whether a reduction has made a number of it. `off_by_one` leaves out the last
    element."""

    form: Form
    off_by_one: bool = False
    lines: list[str] = field(default_factory=list)
    source: str = "in"
    width: str = "columns"
    pending: list[str] = field(default_factory=lambda: ["float v = in[i];"])
    changed: bool = False
    scalar: bool = False
    buffers: dict[str, str] = field(default_factory=dict)
    moves: int = 0

    def add(self, part: Part) -> None:
        """One more operator."""
        step, how, width = part
        kind = step.operator.kind
        if kind in ("linear", "pool"):
            self.flush()
            self.pending = _window(step, self.source, self.width)
            self.width, self.changed, self.moves = width, True, self.moves + 1
            return
        passes = how.get("passes", ())
        for number, one in enumerate(passes, start=1):
            self._pass(one, last=kind == "reduction" and number == len(passes))
        value = self._filled(how["c"], step)
        if kind == "reduction" or self.scalar:
            self.lines.append(f"v = {value};" if self.scalar else f"float v = {value};")
            self.scalar = True
            return
        self.pending.append(f"v = {value};")
        self.changed = True

    def _pass(self, one: dict[str, str], last: bool) -> None:
        self.lines.append(f"float {one['name']} = {one['start']};")
        if "store" in one:
            self.pending.append(f"v = {one['store']};")
            self.changed = True
        self.pending.append(one["each"])
        target = self._buffer() if self.changed and not last else None
        self._loop(target, shorter=last and self.off_by_one)
        if group := self.form.group:
            sign, how = ("-", "max") if one["combine"] == "min" else ("", one["combine"])
            self.lines.append(f"{one['name']} = {sign}{group}_{how}({sign}{one['name']});")
        if "then" in one:
            self.lines.append(one["then"].replace("{n}", self.width))

    def flush(self) -> None:
        """Store the row if it has changed."""
        if self.changed and not self.scalar:
            self._loop(self._buffer())

    def finish(self) -> list[str]:
        if self.scalar:
            guard = "if (threadIdx.x == 0) " if self.form.group else ""
            return [*self.lines, f"{guard}to[0] = v;"]
        self._loop("to", shorter=self.off_by_one)
        return self.lines

    def _buffer(self) -> str:
        if self.form.buffer == "to":
            return "to"
        name = f"row{self.moves + 1}"
        self.buffers[name] = self.width
        return name

    def _loop(self, target: str | None, shorter: bool = False) -> None:
        bound = f"{self.width} - 1" if shorter else self.width
        body = [*self.pending, *([f"{target}[i] = v;"] if target else [])]
        self.lines += [self.form.loop.format(width=bound), *indented(body), "}"]
        if target and target != "to" and self.form.group:
            self.lines.append("__syncthreads();")
        self.source, self.changed = target or self.source, False
        self.pending = [f"float v = {self.source}[i];"]

    def _filled(self, text: str, step: Step) -> str:
        operands = {"y": "y_row[i]", "scale": "scale_data[i]", "bias": "bias_data[i]"}
        return text.format(value=step.value, n=self.width, **operands)


def _window(step: Step, source: str, width: str) -> list[str]:
    """Lines that compute element `i` of a matrix product or a pool."""
    if step.name == "linear":
        each = f"v += {source}[k] * weight_data[i * {width} + k];"
        return ["float v = 0.0f;", f"for (int64_t k = 0; k < {width}; ++k) {{", f"    {each}", "}"]
    first, after = f"{source}[i * {step.value}]", f"{source}[i * {step.value} + k]"
    largest = f"v = {after} > v ? {after} : v;"
    return [
        f"float v = {first};",
        f"for (int64_t k = 1; k < {step.value}; ++k) {{",
        f"    {largest if step.name == 'max_pool' else f'v += {after};'}",
        "}",
        *([f"v = v / {step.value}.0f;"] if step.name == "avg_pool" else []),
    ]


def indented(lines: Sequence[str]) -> list[str]:
    return ["    " + line for line in lines]
