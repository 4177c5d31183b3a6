"""Planted contamination: a task's source changed mechanically, so that it is the same task in other
words. What decontamination must find.

Guarantees: every change keeps the computation (`shapes` its sizes, `edited` one added operation); a
change that does not apply to a source gives None. Uses none of the project's own normalisation, so
that the measurement does not assume what it measures.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

_FUNCTIONAL = {
    "relu": "ReLU",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "gelu": "GELU",
    "mish": "Mish",
    "softplus": "Softplus",
}
_MODULES = {
    "ReLU": "torch.nn.functional.relu",
    "Sigmoid": "torch.sigmoid",
    "Tanh": "torch.tanh",
    "GELU": "torch.nn.functional.gelu",
    "Mish": "torch.nn.functional.mish",
    "Softplus": "torch.nn.functional.softplus",
    "Hardswish": "torch.nn.functional.hardswish",
}


def renamed(code: str) -> str | None:
    """Another name for every variable, parameter, attribute, helper class and constant of the
    module."""
    tree = ast.parse(code)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    own |= {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    own -= {"Model", "get_inputs", "get_init_inputs", "forward", "self"} | {
        name for name in own if name.startswith("__")
    }
    given = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    attributes = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and isinstance(node.ctx, ast.Store)
    }
    methods = own & {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    own -= given  # a keyword's name belongs to whoever is called
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in own:
            node.id = f"{node.id}_k"
        elif isinstance(node, ast.arg) and node.arg in own:
            node.arg = f"{node.arg}_k"
        elif isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in own:
            node.name = f"{node.name}_k"
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ) and (node.attr in attributes or node.attr in methods & own):
            node.attr = f"{node.attr}_k"
    return ast.unparse(tree)


def shapes(code: str) -> str | None:
    """Other sizes: every whole number above 4 in the module's constants and in get_inputs grows by
    a half."""
    tree = ast.parse(code)
    changed = False
    places = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign)
        or (isinstance(node, ast.FunctionDef) and node.name == "get_inputs")
    ]
    for place in places:
        for node in ast.walk(place):
            if isinstance(node, ast.Constant) and type(node.value) is int and node.value > 4:
                node.value, changed = node.value + node.value // 2, True
    return ast.unparse(tree) if changed else None


def wrapped(code: str) -> str | None:
    """The module inside another one that hands everything over."""
    tree = ast.parse(code)
    init, forward = _method(tree, "__init__"), _method(tree, "forward")
    if (
        init is None
        or forward is None
        or any(a.args.vararg or a.args.kwarg or a.args.kwonlyargs for a in (init, forward))
    ):
        return None
    _rename_class(tree, "Model", "Inner")
    head, given = copy.deepcopy(init.args), ", ".join(arg.arg for arg in init.args.args[1:])
    call, passed = ast.unparse(forward.args), ", ".join(arg.arg for arg in forward.args.args[1:])
    return (
        f"""{ast.unparse(tree)}

class Model(nn.Module):
    def __init__({ast.unparse(head)}):
        super().__init__()
        self.inner = Inner({given})

    def forward({call}):
        return self.inner({passed})
"""
        if "torch.nn as nn" in code
        else None
    )


def other_form(code: str) -> str | None:
    """Activations: functions become modules, modules become functions."""
    tree = ast.parse(code)
    kinds = {
        ast.unparse(node.targets[0]): node.value.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr in _MODULES
        and not node.value.args
        and all(word.arg == "inplace" for word in node.value.keywords)
    }
    changed = False
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = ast.unparse(node.func)
        if name in kinds:
            node.func, changed = ast.parse(_MODULES[kinds[name]], mode="eval").body, True
        elif (
            name.rpartition(".")[0] in ("torch", "F", "torch.nn.functional")
            and node.func.attr in _FUNCTIONAL
            and len(node.args) == 1
        ):
            node.func, changed = (
                ast.parse(f"torch.nn.{_FUNCTIONAL[node.func.attr]}()", mode="eval").body,
                True,
            )
    return ast.unparse(tree) if changed else None


def commutative(code: str) -> str | None:
    """The operands of every sum and product of `forward` exchanged."""
    tree, changed = ast.parse(code), False
    forward = _method(tree, "forward")
    for node in ast.walk(forward) if forward else ():
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            if any(isinstance(side, ast.Constant | ast.List | ast.Tuple) for side in _sides(node)):
                continue
            node.left, node.right, changed = node.right, node.left, True
    return ast.unparse(tree) if changed else None


def _sides(node: ast.BinOp) -> tuple[ast.expr, ast.expr]:
    return node.left, node.right


def in_place(code: str) -> str | None:
    """Activations write in place, on a copy of what `forward` was given."""
    tree, changed = ast.parse(code), False
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(ast.Name("torch"), "relu" | "sigmoid" | "tanh" as name)):
                node.func, changed = ast.parse(f"torch.{name}_", mode="eval").body, True
                node.args = [_cloned(node.args[0])]
            case ast.Call(ast.Attribute(ast.Name("nn"), "ReLU" | "Hardswish" | "Mish"), []):
                node.keywords, changed = [ast.keyword("inplace", ast.Constant(True))], True
    forward = _method(tree, "forward")
    if changed and forward:
        for argument in reversed(forward.args.args[1:]):
            copied = f"{argument.arg} = {argument.arg}.clone()"
            forward.body.insert(0, ast.parse(copied).body[0])
    return ast.unparse(ast.fix_missing_locations(tree)) if changed else None


def _cloned(node: ast.expr) -> ast.expr:
    return ast.Call(ast.Attribute(node, "clone", ast.Load()), [], [])


def dead_code(code: str) -> str | None:
    """`forward` computes something that it throws away, and what no input reaches."""
    tree = ast.parse(code)
    forward = _method(tree, "forward")
    if forward is None or len(forward.args.args) < 2:
        return None
    first = forward.args.args[1].arg
    unused = f"unused = torch.exp({first} * 2) + torch.ones(3).sum()"
    forward.body.insert(0, ast.parse(unused).body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


def reshaped(code: str) -> str | None:
    """The inputs go through a helper that flattens them and gives them their shape again."""
    tree = ast.parse(code)
    forward = _method(tree, "forward")
    if forward is None or len(forward.args.args) < 2:
        return None
    for argument in reversed(forward.args.args[1:]):
        moved = f"{argument.arg} = as_it_was({argument.arg})"
        forward.body.insert(0, ast.parse(moved).body[0])
    helper = """
def as_it_was(x):
    if not isinstance(x, torch.Tensor):
        return x
    return x.contiguous().view(-1).reshape(x.shape)
"""
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n\n" + helper


def edited(code: str) -> str | None:
    """One operation and one attribute more: another program, nearly."""
    tree = ast.parse(code)
    forward, init = _method(tree, "forward"), _method(tree, "__init__")
    if forward is None or init is None or len(forward.args.args) < 2:
        return None
    first = forward.args.args[1].arg
    init.body.append(ast.parse("self.offset = 0.125").body[0])
    forward.body.insert(0, ast.parse(f"{first} = {first} + self.offset").body[0])
    return ast.unparse(tree)


def broken(code: str) -> str | None:
    """Text behind the program that is no Python."""
    return code + "\n\nthis is where the download was cut (\n"


def kernelbook_form(code: str) -> str | None:
    """The class as it stands; `get_inputs` and `get_init_inputs` as KernelBook writes them. None
    where an input is no tensor of floats."""
    return _as_kernelbook(code, lambda size: size)


def kernelbook_sizes(code: str) -> str | None:
    """The same at KernelBook's sizes: every whole number above 4 is 4."""
    return _as_kernelbook(code, lambda size: min(size, 4))


def _as_kernelbook(code: str, resize: Callable[[int], int]) -> str | None:
    """The two functions are called on torch's meta device, which holds no numbers."""
    import torch

    with torch.device("meta"):
        names = _executed(code)
        if names is None:
            return None
        inputs, given = names["get_inputs"](), names["get_init_inputs"]()
    if not all(isinstance(each, torch.Tensor) and each.is_floating_point() for each in inputs):
        return None
    drawn = ", ".join(f"torch.rand({[resize(size) for size in each.shape]})" for each in inputs)
    parameters = list(inspect.signature(names["Model"]).parameters)[: len(given)]
    arguments = {
        name: value if "dim" in name else _resized(value, resize)
        for name, value in zip(parameters, given, strict=True)
    }
    tree = ast.parse(code)
    kept = [node for node in tree.body if not isinstance(node, ast.Assign | ast.FunctionDef)]
    tree.body = kept
    return (
        f"{ast.unparse(tree)}\n\n\ndef get_inputs():\n    return [{drawn}]\n\n\n"
        f"def get_init_inputs():\n    return [[], {arguments}]\n"
    )


def _executed(code: str) -> dict[str, Any] | None:
    """The names that the benchmark's own program defines; None where it imports what is not
    installed."""
    names: dict[str, Any] = {}
    try:
        exec(code, names)
    except ImportError:
        return None
    return names


def _resized(value: object, resize: Callable[[int], int]) -> object:
    """KernelBook has lists where there are tuples."""
    if isinstance(value, tuple | list):
        return [_resized(item, resize) for item in value]
    return resize(value) if type(value) is int else value


def _chain(*changes: Callable[[str], str | None]) -> Callable[[str], str | None]:
    def chained(code: str) -> str | None:
        for change in changes:
            code = change(code)
            if code is None:
                return None
        return code

    return chained


PLANTED: dict[str, tuple[str, Callable[[str], str | None]]] = {
    "verbatim": ("exact", lambda code: code + "  \n\n"),
    "renamed": ("normalised", renamed),
    "wrapped": ("normalised", wrapped),
    "renamed and wrapped": ("normalised", _chain(renamed, wrapped)),
    "shapes": ("shapes", shapes),
    "shapes, renamed and wrapped": ("shapes", _chain(shapes, renamed, wrapped)),
    "KernelBook's form": ("normalised", kernelbook_form),
    "KernelBook's form and sizes": ("shapes", kernelbook_sizes),
    "wrapped, KernelBook's sizes": ("shapes", _chain(wrapped, kernelbook_sizes)),
    "commutative": ("normalised", commutative),
    "in place": ("normalised", in_place),
    "dead code": ("normalised", dead_code),
    "reshaped": ("normalised", reshaped),
    "functional or module form": ("normalised", other_form),
    "other form, shapes and renamed": ("shapes", _chain(other_form, shapes, renamed)),
    "edited": ("near", edited),
    "edited and renamed": ("near", _chain(edited, renamed)),
    "broken text": ("near", broken),
}
"""The change, and the level that is there for it."""


def _method(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Model":
            return next(
                (
                    child
                    for child in node.body
                    if isinstance(child, ast.FunctionDef) and child.name == name
                ),
                None,
            )
    return None


def _rename_class(tree: ast.Module, old: str, new: str) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == old:
            node.name = new
        elif isinstance(node, ast.Name) and node.id == old:
            node.id = new


def near_misses() -> Iterator[tuple[str, str, str]]:
    """Pairs of hand-written tasks that are not duplicates (`near_misses.yaml`): a name, and the
    code of both in KernelBench's form."""
    pairs = yaml.safe_load(Path(__file__).with_name("near_misses.yaml").read_text())
    for name, pair in pairs.items():
        yield name, _task(**pair["task"]), _task(**pair["task"] | pair["near"])


def _task(
    forward: str,
    parameters: str = "",
    layers: str = "pass",
    inputs: str = "x",
    arguments: Sequence[int] = (),
) -> str:
    return f"""import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, {parameters}):
        super().__init__()
        {layers}

    def forward(self, {inputs}):
        return {forward}


batch_size = 16
width = 64


def get_inputs():
    return [{", ".join("torch.rand(batch_size, width, 32, 32)" for _ in inputs.split(", "))}]


def get_init_inputs():
    return {list(arguments)}
"""
