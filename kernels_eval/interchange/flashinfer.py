"""Definition, Workload, Solution and Trace of FlashInfer-Bench (flashinfer-ai/flashinfer-bench,
`flashinfer_bench/data`, commit 40e6ca7) and of SOL-ExecBench, which extends them
(NVIDIA/SOL-ExecBench, `src/sol_execbench/core/data`, commit 8d2237d).

Guarantees: a definition with a workload is a task, a solution with both a candidate, or a
ValueError says what cannot be taken over; a verdict becomes a trace only where the form has a
status for it, and numbers that were not measured are NaN there, never 0. Does not guarantee the
other suite's inputs: those that it names random are standard normal here, without SOL-ExecBench's
rules for names such as `norm_weight`, and its tolerances are not used.
"""

from __future__ import annotations

import ast
import json
import operator
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, ConfigDict, Field, NonNegativeInt, field_validator

from kernels_eval.records import (
    KernelTask,
    Language,
    Reason,
    Record,
    Status,
    Verdict,
    stable_hash,
)

Suite = Literal["flashinfer", "sol"]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Code = Annotated[str, Field(min_length=1, max_length=1_000_000)]
FLOATS = ("float32", "float16", "bfloat16", "float64")
MOST_EMBEDDED_BYTES = 262_144
"""Of a tensor that a file gives and a task's program then holds."""
_NAME = re.compile(r"[A-Za-z_]\w*")
MOST_DIGITS = 18
"""Of a size that an expression gives."""


class Finite(Record):
    """A record without NaN and infinities."""

    model_config = ConfigDict(allow_inf_nan=False)


class Axis(Finite):
    """A dimension: fixed, given by the workload, or an arithmetic expression of such."""

    type: Literal["const", "var", "expr"]
    value: NonNegativeInt | None = None
    expression: Name | None = None
    description: str | None = None


class TensorSpec(Finite):
    """A tensor by the names of its axes (or sizes as digits); a scalar where `shape` is None."""

    shape: tuple[Name, ...] | None
    dtype: Name
    description: str | None = None


class WorkloadInput(Finite):
    """How one input is made: drawn at random, a scalar's value, read from a file, or by the
    definition's `custom_inputs_entrypoint`."""

    type: Literal["random", "scalar", "safetensors", "custom"]
    value: bool | int | float | None = None
    path: Name | None = None
    tensor_key: Name | None = None


class Workload(Finite):
    """Values of the variable axes, and of scalar inputs."""

    axes: dict[Name, NonNegativeInt] = {}
    inputs: dict[Name, WorkloadInput] = {}
    uuid: str | None = None
    tolerance: dict[Name, float | bool | None] | None = None
    """SOL-ExecBench's; not used"""


class Definition(Finite):
    """A task. `reference` defines `run`, which takes the inputs in their order and returns the
    outputs.

    Inputs that are drawn are standard normal, of a floating type, or random booleans: integers are
    indices or lengths, for which no random value is known to be valid. The task refuses inputs in
    which a fixed axis has another size, so verification varies the variable ones alone.
    """

    name: Name
    op_type: Name | None = None
    axes: dict[Name, Axis]
    inputs: dict[Name, TensorSpec]
    outputs: dict[Name, TensorSpec]
    reference: Code
    custom_inputs_entrypoint: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] | None = None
    tags: tuple[str, ...] | None = None
    description: str | None = None
    constraints: tuple[str, ...] | None = None
    hf_id: str | None = None

    def task(self, workload: Workload, root: Path | None = None) -> KernelTask:
        """The task of this definition for one workload. Files that inputs are read from lie under
        `root`; None: there are none. Raises ValueError where an axis or a scalar has no value, or
        an input cannot be drawn or read."""
        sizes = self.sizes(workload)
        made = [
            self._made(name, spec, sizes, workload.inputs.get(name), root)
            for name, spec in self.inputs.items()
        ]
        custom = ""
        if self.custom_inputs_entrypoint:
            scalars = {name: x.value for name, x in workload.inputs.items() if x.type == "scalar"}
            custom = f"    _drawn = {self.custom_inputs_entrypoint}({sizes | scalars!r}, "
            custom += "torch.get_default_device())\n"
        code = _PROGRAM.format(
            reference=self.reference,
            outputs=self.collected(),
            refusal=self._refusal(workload),
            custom=custom,
            inputs=", ".join(made),
        )
        identity = f"definition/{self.name}/{stable_hash(code)[:16]}"
        return KernelTask(task_id=identity, name=self.name, code=code, source="definition")

    def sizes(self, workload: Workload) -> dict[str, int]:
        """The size of every axis that has one. Raises ValueError for an expression that gives
        none."""
        sizes = {name: axis.value for name, axis in self.axes.items() if axis.value is not None}
        sizes |= workload.axes
        for name, axis in self.axes.items():
            if axis.expression:
                sizes[name] = _evaluated(axis.expression, sizes)
        return sizes

    def places(self, workload: Workload) -> dict[str, str]:
        """The size of every axis as source text: a variable one is that of the first of `inputs`
        that has it."""
        places = {name: repr(size) for name, size in self.sizes(workload).items()}
        for index, dim, name in reversed(list(self._dimensions())):
            if name in self.axes and self.axes[name].type == "var":
                places[name] = f"inputs[{index}].shape[{dim}]"
        for name, axis in self.axes.items():
            if axis.expression:
                text = _NAME.sub(lambda found: places[found[0]], axis.expression)
                places[name] = f"int({text})"
        return places

    def _dimensions(self) -> Iterator[tuple[int, int, str]]:
        for index, spec in enumerate(self.inputs.values()):
            for dim, name in enumerate(spec.shape or ()):
                yield index, dim, name

    def _refusal(self, workload: Workload) -> str:
        """Lines that raise for inputs of sizes that the definition does not allow: what is fixed
        stays what it is, for a kernel may rely on it."""
        places = self.places(workload)
        found = (
            (f"inputs[{index}].shape[{dim}]", _place(name, places))
            for index, dim, name in self._dimensions()
        )
        rules = " and ".join(f"{here} == {there}" for here, there in found if here != there)
        if not rules:
            return ""
        return f"        if not ({rules}):\n            raise ValueError('sizes of another task')\n"

    def collected(self) -> str:
        """Source of `_collected`, which turns what `run` returns into a tensor, or a tuple of them
        in the order of the outputs."""
        dtypes = ", ".join(f"{n!r}: torch.{_torch_name(x)}" for n, x in self.outputs.items())
        return _COLLECTED.format(dtypes=dtypes)

    def _made(
        self,
        name: str,
        spec: TensorSpec,
        sizes: Mapping[str, int],
        given: WorkloadInput | None,
        root: Path | None,
    ) -> str:
        """The expression that makes one input."""
        if given and given.type == "scalar":
            return repr(given.value)
        if self.custom_inputs_entrypoint and (given is None or given.type == "custom"):
            return f"_drawn[{name!r}]"
        if given and given.type == "safetensors":
            return _embedded(name, given, root)
        if spec.shape is None:
            raise ValueError(f"scalar input {name!r} has no value: give it in workload.inputs")
        shape = tuple(_size(axis, sizes) for axis in spec.shape)
        if spec.dtype == "bool":
            return f"torch.randint(0, 2, {shape}, dtype=torch.bool)"
        if spec.dtype not in FLOATS:
            raise ValueError(
                f"input {name!r} is {spec.dtype[:20]!r}, and only {', '.join(FLOATS)} and bool can"
                " be drawn: give the task by its source"
            )
        return f"torch.randn({shape}, dtype=torch.{spec.dtype})"


_COLLECTED = """
def _collected(found, dtypes={{{dtypes}}}):
    if isinstance(found, dict):
        found = [found[name] for name in dtypes]
    if not isinstance(found, (list, tuple)):
        found = [found]
    found = [
        value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=dtype)
        for value, dtype in zip(found, dtypes.values())
    ]
    return found[0] if len(found) == 1 else tuple(found)
"""
_PROGRAM = """{reference}

import torch

{outputs}

class Model(torch.nn.Module):
    def forward(self, *inputs):
{refusal}        return _collected(run(*inputs))


def get_inputs():
{custom}    return [{inputs}]


def get_init_inputs():
    return []
"""


def _torch_name(spec: TensorSpec) -> str:
    if not re.fullmatch(r"[a-z]\w*", spec.dtype):
        raise ValueError(f"{spec.dtype[:40]!r} is no dtype")
    return spec.dtype


def _place(axis: str, places: Mapping[str, str]) -> str:
    return places.get(axis) or str(_size(axis, {}))


def _size(axis: str, sizes: Mapping[str, int]) -> int:
    if axis.isdigit():
        return int(axis)
    if axis not in sizes:
        raise ValueError(f"axis {axis!r} has no value: give it in workload.axes")
    return sizes[axis]


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def _evaluated(expression: str, sizes: Mapping[str, int]) -> int:
    """The size that an expression of axes gives. Raises ValueError where it gives none."""

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=int(number) | float(number)):
                return number
            case ast.Name(id=name):
                return _size(name, sizes)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                one, other = value(left), value(right)
                if isinstance(op, ast.Pow) and abs(other) > MOST_DIGITS:
                    raise ValueError("a power of more than 18")
                return _OPERATORS[type(op)](one, other)
        raise ValueError(f"{type(node).__name__} is no arithmetic")

    try:
        found = value(ast.parse(expression, mode="eval").body)
        if not 0 <= found < 10**MOST_DIGITS or found != int(found):
            raise ValueError(f"it gives {found!r:.40}")
    except (ArithmeticError, SyntaxError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"axis expression {expression!r:.80}: {error}") from error
    return int(found)


_STORED = {
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{"BF16": "bfloat16", "U8": "uint8", "BOOL": "bool"},
}
"""dtypes of a safetensors file."""


def _embedded(name: str, given: WorkloadInput, root: Path | None) -> str:
    """The expression of a tensor in a safetensors file, whose path may begin above `root`. Raises
    ValueError where it cannot be read from under `root`, or is too large for a program."""
    if root is None:
        raise ValueError(
            f"input {name!r} is in a file, which cannot be sent: give it by its source"
        )
    parts = Path(str(given.path)).parts
    near = [root.joinpath(*parts[start:]) for start in range(len(parts))]
    path = next((each for each in near if each.is_file()), root / str(given.path)).resolve()
    try:
        if not path.is_relative_to(root.resolve()):
            raise ValueError(f"it is not under {root}")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            told = json.loads(file.read(length))[given.tensor_key]
            start, end = told["data_offsets"]
            if end - start > MOST_EMBEDDED_BYTES:
                raise ValueError(f"{end - start:,} bytes; the limit is {MOST_EMBEDDED_BYTES:,}")
            file.seek(8 + length + start)
            held, shape, dtype = (
                file.read(end - start),
                tuple(told["shape"]),
                _STORED[told["dtype"]],
            )
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"input {name!r} cannot be read from {given.path}: {error}") from error
    if not held:
        return f"torch.empty({shape}, dtype=torch.{dtype})"
    values = f"torch.frombuffer(bytearray.fromhex({held.hex()!r}), dtype=torch.{dtype})"
    return f"{values}.reshape({shape})"


# -- solutions -------------------------------------------------------------------------------------

LANGUAGES = {
    **dict.fromkeys(("cuda", "cuda_cpp", "cutlass", "cudnn", "cublas"), Language("cuda")),
    **{"triton": Language("triton"), "cpp": Language("cpp"), "python": None, "pytorch": None},
}
"""Their languages as ours; None: what the source shows. Those that are not here have no
counterpart."""
NATIVE = (".cu", ".cpp", ".cc", ".cxx", ".c")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"[^\n]*$', re.MULTILINE)


class SourceFile(Finite):
    """A file of a solution, by its path in the solution."""

    path: Name
    content: Code


class BuildSpec(Finite):
    """How a solution is built and called. `language` is FlashInfer-Bench's, `languages` are
    SOL-ExecBench's; `entry_point` is FILE::FUNCTION."""

    languages: Annotated[
        tuple[Name, ...],
        Field(min_length=1, validation_alias=AliasChoices("languages", "language")),
    ]
    target_hardware: tuple[str, ...] = ()
    entry_point: Annotated[str, Field(pattern=r"^[^:]+::[A-Za-z_]\w*$")]
    dependencies: tuple[str, ...] = ()
    destination_passing_style: bool = True
    binding: Literal["tvm-ffi", "torch"] | None = None
    compile_options: dict[str, tuple[str, ...]] | None = None

    @field_validator("languages", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class Solution(Finite):
    """A kernel for a definition."""

    name: Name
    definition: Name
    author: Name
    spec: BuildSpec
    sources: Annotated[tuple[SourceFile, ...], Field(min_length=1)]
    description: str | None = None

    @property
    def language(self) -> Language | None:
        """Ours; None where the source says. Raises ValueError where there is none."""
        unknown = [name for name in self.spec.languages if name not in LANGUAGES]
        if unknown:
            raise ValueError(f"solution {self.name!r} is in {unknown[0]!r}, which is not verified")
        return next(filter(None, map(LANGUAGES.get, self.spec.languages)), None)

    def code(self, definition: Definition, workload: Workload) -> str:
        """The module with ModelNew. Raises ValueError for a solution of several Python files, or
        one that needs tvm-ffi."""
        path, _, entry = self.spec.entry_point.partition("::")
        files = {file.path: file.content for file in self.sources}
        if path not in files:
            raise ValueError(f"solution {self.name!r} has no file {path!r}")
        if path.endswith(".py"):
            others = [name for name in files if name.endswith(".py") and name != path]
            if others:
                raise ValueError(f"solution {self.name!r} has several Python files: join them")
            head = files[path]
        else:
            head, entry = self._native(files), f"_extension.{entry}"
        arguments, empty = "*inputs", ""
        if self.spec.destination_passing_style:
            arguments, empty = "*inputs, *outputs", _empty_outputs(definition, workload)
        return _CANDIDATE.format(
            head=head,
            collected=definition.collected(),
            empty=empty,
            call=f"{entry}({arguments})",
            found="outputs" if empty else "found",
        )

    def _native(self, files: Mapping[str, str]) -> str:
        """Python that builds and loads the sources, each a translation unit with its own headers in
        their places."""
        bound = self.spec.binding or ("tvm-ffi" if self._of_flashinfer else "torch")
        if bound != "torch":
            raise ValueError(f"solution {self.name!r} binds by {bound}: only torch is built here")
        units = {name: _flattened(name, files) for name in files if name.endswith(NATIVE)}
        cuda = [text for name, text in units.items() if name.endswith(".cu")]
        cpp = [text for name, text in units.items() if not name.endswith(".cu")]
        flags = self.spec.compile_options or {}
        asked = {
            "name": f"solution_{stable_hash(dict(files))[:16]}",
            "cpp_sources": cpp,
            "cuda_sources": cuda,
            "extra_cflags": list(flags.get("cflags", ())),
            "extra_cuda_cflags": list(flags.get("cuda_cflags", ())),
            "extra_ldflags": list(flags.get("ld_flags", ())),
        }
        given = ", ".join(f"{key}={value!r}" for key, value in asked.items() if value)
        return (
            f"from torch.utils.cpp_extension import load_inline\n_extension = load_inline({given})"
        )

    @property
    def _of_flashinfer(self) -> bool:
        return not {"cuda_cpp", "cutlass", "cudnn", "cublas"} & set(self.spec.languages)


_LOADER = "from torch.utils.cpp_extension import load_inline\n"
_CANDIDATE = """{head}

import torch

{collected}

class ModelNew(torch.nn.Module):
    def forward(self, *inputs):
{empty}        found = {call}
        return _collected({found})
"""


def _empty_outputs(definition: Definition, workload: Workload) -> str:
    """Lines that make empty outputs, their sizes those of the inputs that come."""
    places, made = definition.places(workload), []
    for spec in definition.outputs.values():
        shape = "".join(f"{_place(name, places)}, " for name in spec.shape or ())
        made.append(f"torch.empty(({shape}), dtype=torch.{_torch_name(spec)}, device=device)")
    device = "next(x.device for x in inputs if isinstance(x, torch.Tensor))"
    return f"        device = {device}\n        outputs = [{', '.join(made)}]\n"


def _flattened(name: str, files: Mapping[str, str], seen: frozenset[str] = frozenset()) -> str:
    """A source with the solution's own headers in the place of their includes, each once a unit."""
    done = {name, *seen}

    def included(found: re.Match[str]) -> str:
        near = posixpath.normpath(posixpath.join(posixpath.dirname(name), found[1]))
        other = next((path for path in (near, found[1]) if path in files), None)
        if other is None:
            return found[0]
        if other in done:
            return ""
        text = _flattened(other, files, frozenset(done))
        done.add(other)
        return text

    return _INCLUDE.sub(included, files[name])


# -- traces ----------------------------------------------------------------------------------------

_STATUSES = {
    Status.CORRECT: "PASSED",
    Status.INCORRECT: "INCORRECT_NUMERICAL",
    Status.COMPILE_ERROR: "COMPILE_ERROR",
    Status.RUNTIME_ERROR: "RUNTIME_ERROR",
    Status.TIMEOUT: "TIMEOUT",
    Status.REJECTED: "REWARD_HACK",
    Status.TASK_ERROR: "INVALID_REFERENCE",
    Reason.WRONG_SHAPE: "INCORRECT_SHAPE",
    Reason.WRONG_DTYPE: "INCORRECT_DTYPE",
}
_OF_SOL = {"REWARD_HACK": "RUNTIME_ERROR", "INVALID_REFERENCE": None}
"""Statuses that SOL-ExecBench alone has, and what stands for them in FlashInfer-Bench."""
_SAID = re.compile(r"(\w+) \((\w+)\)")


def evaluation_of(
    verdict: Verdict, suite: Suite, timestamp: str, libs: Mapping[str, str]
) -> dict[str, Any] | None:
    """A verdict as their Evaluation, whose log begins with the verdict in words. None where the
    suite has no status for it, and for a correct kernel that was not timed."""
    status = _STATUSES.get(verdict.reason, _STATUSES.get(verdict.status))
    if suite == "flashinfer" and status in _OF_SOL:
        status = _OF_SOL[status]
    timing, found = verdict.timing, verdict.correctness
    if status is None or (status == "PASSED" and timing is None):
        return None
    measured = None
    if status in ("PASSED", "INCORRECT_NUMERICAL"):
        known = found.model_dump(mode="json") if found else {}
        error = known.get("max_error")
        measured = {
            "max_relative_error": "NaN" if error is None else error,
            "max_absolute_error": "NaN",
            "extra": known,
        }
    said = f"{verdict.status.value} ({verdict.reason.value}): {verdict.detail}"
    return {
        "status": status,
        "environment": {"hardware": verdict.device or "none", "libs": dict(libs)},
        "timestamp": timestamp,
        "log": f"{said}\n{verdict.log_tail}".strip(),
        "correctness": measured,
        "performance": timing
        and {
            "latency_ms": timing.candidate_ms,
            "reference_latency_ms": timing.reference_ms,
            "speedup_factor": timing.speedup,
        },
    }


def verdict_row(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """What an Evaluation says, as columns of a verdict: `status`, `reason` (null where another
    harness judged), `outputs_match`, `timing` (without intervals), `device`, `detail`."""
    theirs, log = str(evaluation.get("status")), str(evaluation.get("log") or "")
    statuses = {name: key for key, name in reversed(_STATUSES.items())}
    key = statuses.get(theirs)
    if key is None:
        raise ValueError(f"{theirs[:40]!r} is no status of an evaluation")
    reason = key if isinstance(key, Reason) else None
    status = reason.status if reason else key
    if (said := _SAID.match(log)) and said[2] in set(Reason) and Reason(said[2]).status == said[1]:
        reason, status = Reason(said[2]), Status(said[1])
    performance = evaluation.get("performance") or {}
    times = {
        "reference_ms": performance.get("reference_latency_ms") or None,
        "candidate_ms": performance.get("latency_ms") or None,
        "speedup": performance.get("speedup_factor") or None,
    }
    return {
        "status": status.value,
        "reason": reason and reason.value,
        "outputs_match": status is Status.CORRECT or None,
        "timing": times,
        "device": (evaluation.get("environment") or {}).get("hardware") or "",
        "detail": log.partition("\n")[0][:500],
    }
