"""Records of FlashInfer-Bench (flashinfer-ai/flashinfer-bench, `flashinfer_bench/data`, commit
40e6ca7) and SOL-ExecBench (NVIDIA/SOL-ExecBench, `src/sol_execbench/core/data`, commit 8d2237d).

A definition with a workload is a task, a solution with both a candidate, or a ValueError. Random
inputs are standard normal here; SOL-ExecBench's tolerances are not used.
"""

from __future__ import annotations

import ast
import operator
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, NonNegativeInt, field_validator

from kernels_eval.exchange import rendered
from kernels_eval.records import KernelTask, Language, Record, stable_hash
from kernels_eval.source.syntax import ARITHMETIC
from kernels_eval.tables import table_beside
from kernels_eval.written import json_of

Suite = Literal["flashinfer", "sol"]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Code = Annotated[str, Field(min_length=1, max_length=1_000_000)]
_TABLE = table_beside(__file__)
FLOATS = ("float32", "float16", "bfloat16", "float64")
MOST_EMBEDDED_BYTES = 262_144
"""Of a file's tensor that a task's program embeds."""
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
MOST_DIGITS = 18
"""Of a size that an expression gives."""


class Finite(Record, allow_inf_nan=False):
    """A record without NaN and infinities."""


class Axis(Finite):
    """A dimension: fixed, given by the workload, or an arithmetic expression of such."""

    type: Literal["const", "var", "expr"]
    value: NonNegativeInt | None = None
    expression: Name | None = None
    description: str | None = None


class TensorSpec(Finite):
    """A tensor by its axes' names (or sizes as digits); a scalar where `shape` is None."""

    shape: tuple[Name, ...] | None
    dtype: Annotated[str, Field(pattern=r"^[a-z]\w{0,40}$")]
    description: str | None = None


class WorkloadInput(Finite):
    """How an input is made: drawn, a scalar, from a file, or by `custom_inputs_entrypoint`."""

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
    """A task. `reference` defines `run`, which takes the inputs in order and returns the outputs.

    Drawn inputs are standard normal floats or random booleans: for integers no random value is
    known to be valid. The task refuses other sizes of fixed axes.
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
        """The task for one workload. `root`: folder of input files, if any. Raises ValueError for a
        missing axis, scalar or input.
        """
        sizes, places = self.sizes(workload), self.places(workload)
        scalars = {name: x.value for name, x in workload.inputs.items() if x.type == "scalar"}
        code = rendered(
            "task.py.j2",
            definition=self,
            scalars=sizes | scalars,
            inputs=[
                self._made(name, spec, sizes, workload.inputs.get(name), root)
                for name, spec in self.inputs.items()
            ],
            # what is fixed stays what it is, for a kernel may rely on it
            rules=[
                f"{here} == {places[name]}"
                for here, name in self._dimensions()
                if here != places[name]
            ],
        )
        identity = f"definition/{self.name}/{stable_hash(code)[:16]}"
        return KernelTask(task_id=identity, name=self.name, code=code, source="definition")

    def sizes(self, workload: Workload) -> dict[str, int]:
        """Every known axis size. Raises ValueError for a bad expression or a resized fixed axis."""
        sizes = {name: axis.value for name, axis in self.axes.items() if axis.value is not None}
        for name, size in workload.axes.items():
            if sizes.setdefault(name, size) != size:
                raise ValueError(f"axis {name!r} is {sizes[name]}, and {size} in the workload")
        for name, axis in self.axes.items():
            if axis.expression:
                sizes[name] = _evaluated(axis.expression, sizes)
        return sizes

    def places(self, workload: Workload) -> dict[str, str]:
        """Axis sizes as source text, variable ones read from the first of `inputs` that has them.
        Raises ValueError.
        """
        sizes = self.sizes(workload)
        specs = (*self.inputs.values(), *self.outputs.values())
        used = {axis for spec in specs for axis in spec.shape or ()}
        places = {name: str(_size(name, sizes)) for name in {*used, *sizes}}
        for here, name in reversed(list(self._dimensions())):
            if name in self.axes and self.axes[name].type == "var":
                places[name] = here
        for name, axis in self.axes.items():
            if axis.expression:
                text = _NAME.sub(lambda found: places[found[0]], axis.expression)
                places[name] = f"int({text})"
        return places

    def _dimensions(self) -> Iterator[tuple[str, str]]:
        for index, spec in enumerate(self.inputs.values()):
            for dim, name in enumerate(spec.shape or ()):
                yield f"inputs[{index}].shape[{dim}]", name

    def _made(
        self,
        name: str,
        spec: TensorSpec,
        sizes: Mapping[str, int],
        given: WorkloadInput | None,
        root: Path | None,
    ) -> str:
        kind = given.type if given else "custom" if self.custom_inputs_entrypoint else "random"
        if given and kind == "scalar":
            return repr(given.value)
        if kind == "custom" and self.custom_inputs_entrypoint:
            return f"_drawn[{name!r}]"
        if given and kind == "safetensors":
            return _embedded(name, given, root)
        if spec.shape is None:
            raise ValueError(f"scalar input {name!r} has no value: give it in workload.inputs")
        shape = tuple(_size(axis, sizes) for axis in spec.shape)
        if spec.dtype == "bool":
            return f"torch.randint(0, 2, {shape}, dtype=torch.bool)"
        if spec.dtype in FLOATS:
            return f"torch.randn({shape}, dtype=torch.{spec.dtype})"
        raise ValueError(
            f"input {name!r} is {spec.dtype[:20]!r}, and only {', '.join(FLOATS)} and bool can"
            " be drawn: give the task by its source"
        )


def _size(axis: str, sizes: Mapping[str, int]) -> int:
    if axis.isdigit():
        return int(axis)
    if axis not in sizes:
        raise ValueError(f"axis {axis!r} has no value: give it in workload.axes")
    return sizes[axis]


_OPERATORS = ARITHMETIC | {ast.Pow: operator.pow}


def _evaluated(expression: str, sizes: Mapping[str, int]) -> int:
    """The size from an expression of axes. Raises ValueError, also for too large a part."""

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=int(found) | float(found)):
                pass
            case ast.Name(id=name):
                found = _size(name, sizes)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                found = -value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                one, other = value(left), value(right)
                if isinstance(op, ast.Pow) and abs(other) > MOST_DIGITS:
                    raise ValueError("a power of more than 18")
                found = _OPERATORS[type(op)](one, other)
            case _:
                raise ValueError(f"{type(node).__name__} is no arithmetic")
        if abs(found) >= 10**MOST_DIGITS:
            raise ValueError(f"a number of more than {MOST_DIGITS} digits")
        return found

    try:
        found = value(ast.parse(expression, mode="eval").body)
        if found < 0 or found != int(found):
            raise ValueError(f"it gives {found!r:.40}")
    except (ArithmeticError, SyntaxError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"axis expression {expression!r:.80}: {error}") from error
    return int(found)


def _embedded(name: str, given: WorkloadInput, root: Path | None) -> str:
    """A tensor of a safetensors file under `root`, as source. Raises ValueError, also for its
    size.
    """
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
            told = json_of(file.read(length))[given.tensor_key]
            shape, dtype, (start, end) = tuple(told["shape"]), told["dtype"], told["data_offsets"]
            if end - start > MOST_EMBEDDED_BYTES:
                raise ValueError(f"{end - start:,} bytes; the limit is {MOST_EMBEDDED_BYTES:,}")
            file.seek(8 + length + start)
            held, dtype = file.read(end - start), _TABLE["stored"][dtype]
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"input {name!r} cannot be read from {given.path}: {error}") from error
    if not held:
        return f"torch.empty({shape}, dtype=torch.{dtype})"
    values = f"torch.frombuffer(bytearray.fromhex({held.hex()!r}), dtype=torch.{dtype})"
    return f"{values}.reshape({shape})"


# -- solutions -------------------------------------------------------------------------------------

NATIVE = (".cu", ".cpp", ".cc", ".cxx", ".c")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"[^\n]*$', re.MULTILINE)


class SourceFile(Finite):
    path: Name
    content: Code


class BuildSpec(Finite):
    """How a solution is built and called: `language` (FlashInfer-Bench) or `languages`
    (SOL-ExecBench), and `entry_point`, FILE::FUNCTION.
    """

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
    name: Name
    definition: Name
    author: Name
    spec: BuildSpec
    sources: Annotated[tuple[SourceFile, ...], Field(min_length=1)]
    description: str | None = None

    @property
    def language(self) -> Language | None:
        """Our language; None where the source decides. Raises ValueError where there is none."""
        known = _TABLE["languages"]
        unknown = [name for name in self.spec.languages if name not in known]
        if unknown:
            raise ValueError(f"solution {self.name!r} is in {unknown[0]!r}, which is not verified")
        found = next(filter(None, map(known.get, self.spec.languages)), "")
        return Language(found) if found else None

    def code(self, definition: Definition, workload: Workload) -> str:
        """The module with ModelNew. Raises ValueError for several Python files, or a need of
        tvm-ffi.
        """
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
        return rendered(
            "candidate.py.j2",
            head=head,
            entry=entry,
            definition=definition,
            places=definition.places(workload),
            into_outputs=self.spec.destination_passing_style,
        )

    def _native(self, files: Mapping[str, str]) -> str:
        of_sol = {"cuda_cpp", "cutlass", "cudnn", "cublas"} & set(self.spec.languages)
        bound = self.spec.binding or ("torch" if of_sol else "tvm-ffi")
        if bound != "torch":
            raise ValueError(f"solution {self.name!r} binds by {bound}: only torch is built here")
        units = {name: _flattened(name, files) for name in files if name.endswith(NATIVE)}
        cuda = [text for name, text in units.items() if name.endswith(".cu")]
        cpp = [text for name, text in units.items() if not name.endswith(".cu")]
        theirs = {"cflags": "cflags", "cuda_cflags": "cuda_cflags", "ld_flags": "ldflags"}
        asked = self.spec.compile_options or {}
        flags = {f"extra_{ours}": [*asked.get(name, ())] for name, ours in theirs.items()}
        name = f"solution_{stable_hash(dict(files))[:16]}"
        every = {"name": name, "cpp_sources": cpp, "cuda_sources": cuda, **flags}
        given = ", ".join(f"{key}={value!r}" for key, value in every.items() if value)
        return (
            f"from torch.utils.cpp_extension import load_inline\n_extension = load_inline({given})"
        )


def _flattened(name: str, files: Mapping[str, str], seen: frozenset[str] = frozenset()) -> str:
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
