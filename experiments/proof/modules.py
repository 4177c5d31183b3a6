"""Modules with inline C++ or CUDA for generated programs, in four styles, right or with one planted
fault.

Guarantees: the same program, language, style and fault give the same text. Without a fault the
kernel is meant to be right for every shape that the program takes. Says nothing of how a verifier
will judge it.

Styles: `naive` runs one loop nest (on cuda one kernel, with a thread a row or an element) per
operator; `tiled` keeps a row in a buffer (a block's shared memory) and runs one loop per operator;
`fused` puts neighbouring operators into one loop; `vectorised` does so with -march=native and
-ffast-math (on cuda with float4 for pointwise programs, else with a warp's shuffles).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from experiments.proof.kernels import TABLE, Form, Part, Rows, form_of, indented
from experiments.proof.options import Fault, Style
from experiments.proof.program import Program
from kernels_eval.records import Language
from kernels_eval.tables import table_beside

TEXTS: dict[str, str] = {
    name: text.strip("\n") for name, text in table_beside(__file__, "parts.toml").items()
}
FLAGS: dict[Style, str] = {
    "naive": '"-O2"',
    "tiled": '"-O3"',
    "fused": '"-O3"',
    "vectorised": '"-O3", "-march=native", "-ffast-math", "-mno-recip"',
}
POINTERS = ("x_data", "y_data", "scale_data", "bias_data", "weight_data")
INTEGERS = ("rows", "columns", "features", "pooled")
THREADS = 256


def faults_of(program: Program) -> list[Fault]:
    """The faults that can be planted into a kernel for this program."""
    kinds = {step.operator.kind for step in program.steps}
    table = [TABLE[step.name] for step in program.steps]
    possible: dict[Fault, bool] = {
        "tail": True,
        "axis": bool(kinds - {"pointwise"}),
        "epilogue": "pointwise" in kinds,
        "constant": any(_has_constant(part) for part in _parts(program)),
        "maximum": any("unsafe" in how for how in table),
        "compile": True,
        "shape": True,
        "no_code": True,
    }
    return [fault for fault, there in possible.items() if there]


def module_of(program: Program, language: Language, style: Style, fault: Fault | None) -> str:
    """The text of the answer's module."""
    parts = _planted(_parts(program), fault)
    code = WRITERS[language](program, parts, style, fault)
    if fault == "compile":
        code = code.replace("int64_t columns = ", "int64_t colums = ", 1)
    operands = [*program.arguments.split(", "), *(f"self.{name}" for name in program.parameters)]
    return TEXTS["module"].format(
        sources=TEXTS[f"{language}_sources"].format(code=code, prototype=_signature(program)),
        options=TEXTS[f"{language}_options"].format(flags=FLAGS[style]),
        entry_point="Model" if fault == "no_code" else "ModelNew",
        constructor=program.constructor,
        arguments=program.arguments,
        call=", ".join(operands),
    )


# -- what is computed ------------------------------------------------------------------------------


def _parts(program: Program) -> list[Part]:
    """The steps with the names of their widths."""
    found, width = list[Part](), "columns"
    for step in program.steps:
        width = {"linear": "features", "pool": "pooled"}.get(step.operator.kind, width)
        found.append(Part(step, TABLE[step.name], width))
    return found


def _has_constant(part: Part) -> bool:
    pointwise = part.step.operator.kind == "pointwise"
    return "wrong" in part.how or (pointwise and part.step.value is not None)


def _planted(parts: Sequence[Part], fault: Fault | None) -> list[Part]:
    """The parts with a fault in what is computed. Other faults are in how."""
    found = list(parts)
    match fault:
        case "epilogue":
            pointwise = [part for part in found if part.step.operator.kind == "pointwise"]
            found.remove(pointwise[-1])
        case "constant":
            index = max(index for index, part in enumerate(found) if _has_constant(part))
            step, how, width = found[index]
            if "wrong" in how:
                found[index] = Part(step, _replaced(how, [how["wrong"]]), width)
            else:
                found[index] = Part(step._replace(value=2 * (step.value or 0)), how, width)
        case "maximum":
            index = max(index for index, part in enumerate(found) if "unsafe" in part.how)
            step, how, width = found[index]
            safe = {**how, "passes": how["passes"][1:]}
            found[index] = Part(step, _replaced(safe, how["unsafe"].items()), width)
    return found


def _replaced(how: object, pairs: Iterable[Sequence[str]]) -> Any:
    """Texts in a table with each first text of `pairs` replaced by its second."""
    if isinstance(how, dict):
        return {key: _replaced(value, pairs) for key, value in how.items()}
    if isinstance(how, list):
        return [_replaced(value, pairs) for value in how]
    for old, new in pairs:
        how = str(how).replace(old, new)
    return how


# -- functions -------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Parts that run together: from `source` to `target`, tensors by name. The row's length is
    called `before` at first."""

    parts: Sequence[Part]
    source: str
    target: str
    before: str
    last: bool

    @property
    def scalar(self) -> bool:
        return any(part.step.operator.kind == "reduction" for part in self.parts)

    @property
    def after(self) -> str:
        return self.parts[-1].width if self.parts else self.before

    @property
    def pointwise(self) -> bool:
        return all(part.step.operator.kind == "pointwise" for part in self.parts)

    def rows(self, form: Form, fault: Fault | None) -> Rows:
        rows = Rows(form, self.last and fault == "tail", width=self.before)
        for part in self.parts:
            if not form.fused:
                rows.flush()
            rows.add(part)
        return rows

    def row_lines(self, body: Sequence[str]) -> list[str]:
        """Pointers to row `r` of the tensors that `body` reads and writes."""
        found = [
            f"const float* in = {self.source}_data + r * {self.before};",
            f"float* to = {self.target}_data + r{'' if self.scalar else ' * ' + self.after};",
        ]
        if any("y_row" in line for line in body):
            width = next(part.width for part in self.parts if part.step.operator.reads_input)
            found.append(f"const float* y_row = y_data + r * {width};")
        return found


def _groups(parts: Sequence[Part], style: Style) -> list[Group]:
    """One group, or for `naive` one an operator; what follows a reduction stays with it."""
    cut = list[list[Part]]([[]])
    for part in parts:
        reduced = any(one.step.operator.kind == "reduction" for one in cut[-1])
        if style == "naive" and cut[-1] and not reduced:
            cut.append([])
        cut[-1].append(part)
    found = list[Group]()
    source, before = "x", "columns"
    for number, own in enumerate(cut, start=1):
        last = number == len(cut)
        group = Group(own, source, "out" if last else f"step{number}", before, last)
        found.append(group)
        source, before = group.target, group.after
    return found


def _head(program: Program, parts: Sequence[Part], fault: Fault | None) -> list[str]:
    """Sizes, and inputs without gaps."""
    sizes = ["x.size(0)", "x.size(1)"]
    if fault == "axis":
        sizes.reverse()
    if fault == "shape":
        sizes = [str(program.rows), str(program.columns)]
    lines = [f"{name} = {name}.contiguous();" for name in program.arguments.split(", ")]
    named = zip(("rows", "columns"), sizes, strict=True)
    lines += [f"const int64_t {name} = {size};" for name, size in named]
    width = "columns"
    for part in parts:
        if part.step.operator.kind == "linear":
            lines.append("const int64_t features = weight.size(0);")
        if part.step.operator.kind == "pool":
            lines.append(f"const int64_t pooled = {width} / {part.step.value};")
        width = part.width
    return lines


def _signature(program: Program) -> str:
    operands = [*program.arguments.split(", "), *program.parameters]
    return f"torch::Tensor run({', '.join(f'torch::Tensor {name}' for name in operands)})"


def _allocation(group: Group) -> str:
    sizes = "rows" if group.scalar else f"rows, {group.after}"
    return f"auto {group.target} = torch::empty({{{sizes}}}, x.options());"


def _function(program: Program, lines: Sequence[str]) -> str:
    return "\n".join([f"{_signature(program)} {{", *indented(lines), "    return out;", "}"])


def _cpp(program: Program, parts: Sequence[Part], style: Style, fault: Fault | None) -> str:
    lines = _head(program, parts, fault)
    operands = [*program.arguments.split(", "), *program.parameters]
    lines += [f"const float* {name}_data = {name}.data_ptr<float>();" for name in operands]
    for group in _groups(parts, style):
        rows = group.rows(form_of(Language("cpp"), style), fault)
        body = rows.finish()
        lines.append(_allocation(group))
        lines.append(f"float* {group.target}_data = {group.target}.data_ptr<float>();")
        for name, width in rows.buffers.items():
            lines.append(f"auto {name}_buffer = torch::empty({{{width}}}, x.options());")
            lines.append(f"float* {name} = {name}_buffer.data_ptr<float>();")
        loop = indented([*group.row_lines(body), *body])
        lines += ["for (int64_t r = 0; r < rows; ++r) {", *loop, "}"]
    return _function(program, lines)


def _cuda(program: Program, parts: Sequence[Part], style: Style, fault: Fault | None) -> str:
    groups = _groups(parts, style)
    kernels = [_kernel(group, index, style, fault) for index, group in enumerate(groups, start=1)]
    lines = _head(program, parts, fault)
    for group, kernel in zip(groups, kernels, strict=True):
        lines += [_allocation(group), kernel.launch]
    text = "\n\n".join(kernel.text for kernel in kernels)
    helpers = [TEXTS[name] for name in sorted(set(re.findall(r"\b(?:block|warp)_\w+", text)))]
    return "\n\n".join([*helpers, text, _function(program, lines)])


WRITERS = {"cpp": _cpp, "cuda": _cuda}
"""What writes the function that a module calls, by the language of the answer."""


class Kernel(NamedTuple):
    """A kernel's definition, and the line that launches it."""

    text: str
    launch: str


def _kernel(group: Group, index: int, style: Style, fault: Fault | None) -> Kernel:
    if group.pointwise:
        return _pointwise_kernel(group, index, style == "vectorised", fault)
    form, name = form_of(Language("cuda"), style), f"kernel{index}"
    rows = group.rows(form, fault)
    body = rows.finish()
    inside = group._replace(source="x", target="out")
    if form.group:
        start = ["const int64_t r = blockIdx.x;"]
    else:
        start = ["const int64_t r = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;"]
        start.append("if (r >= rows) return;")
    previous = ""
    for buffer, width in rows.buffers.items():
        start.append(
            f"float* {buffer} = {previous};" if previous else f"extern __shared__ float {buffer}[];"
        )
        previous = f"{buffer} + {width}"
    lines = indented([*start, *inside.row_lines(body), *body])
    parameters, arguments = _passed(group, "\n".join(lines))
    text = "\n".join([f"__global__ void {name}({parameters}) {{", *lines, "}"])
    if not form.group:
        grid = f"(rows + {THREADS - 1}) / {THREADS}, {THREADS}"
    else:
        grid = f"rows, {32 if style == 'vectorised' else THREADS}"
        if rows.buffers:
            grid += f", ({' + '.join(rows.buffers.values())}) * sizeof(float)"
    return Kernel(text, f"{name}<<<{grid}>>>({arguments});")


def _pointwise_kernel(group: Group, index: int, vectors: bool, fault: Fault | None) -> Kernel:
    name, width = f"kernel{index}", group.before
    rows = group.rows(Form(), fault)
    body = [line.replace("y_row[i]", "y_data[index]") for line in rows.pending[1:]]
    needs_column = any("[i]" in line for line in body)
    less = " - 1" if rows.off_by_one else ""
    fields = {
        "name": name,
        "count": f"rows * {width}{less}",
        "column": f"    const int64_t i = index % {width};\n" if needs_column else "",
        "body": "\n".join(indented(body)),
    }
    inner = _names("\n".join([fields["column"], *body]))
    fields["apply_parameters"] = "".join(f", {_declared(each)}" for each in inner)
    fields["apply_arguments"] = "".join(f", {each}" for each in inner)
    template = TEXTS["float4" if vectors else "flat"]
    used = " ".join(["x_data out_data", fields["count"], *inner])
    fields["parameters"], arguments = _passed(group, used)
    share = 4 * THREADS if vectors else THREADS
    grid = f"(rows * {width} + {share - 1}) / {share}, {THREADS}"
    return Kernel(template.format(**fields), f"{name}<<<{grid}>>>({arguments});")


def _names(text: str) -> list[str]:
    """The pointers and sizes that a text names."""
    return [name for name in (*POINTERS, *INTEGERS) if re.search(rf"\b{name}\b", text)]


def _declared(name: str) -> str:
    return f"int64_t {name}" if name in INTEGERS else f"const float* {name}"


def _passed(group: Group, text: str) -> tuple[str, str]:
    """Parameters of a kernel with this text, and arguments of its launch."""
    names = _names(text)
    parameters = [*map(_declared, names), "float* out_data"]
    tensors = {"x_data": group.source} | {name: name.removesuffix("_data") for name in POINTERS[1:]}
    arguments = [
        f"{tensors[name]}.data_ptr<float>()" if name in tensors else name for name in names
    ]
    return ", ".join(parameters), ", ".join([*arguments, f"{group.target}.data_ptr<float>()"])
