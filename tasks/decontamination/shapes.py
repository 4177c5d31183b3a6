"""The shapes of a task's inputs, read from its get_inputs.

Guarantees: static, nothing is executed; the same shape however a tensor is drawn or written.
"""

from __future__ import annotations

import ast

from tasks.decontamination.arguments import returned
from tasks.decontamination.program import Program

CREATION = frozenset("rand randn zeros ones empty full randint normal".split())
LIKE = frozenset(f"{name}_like" for name in CREATION)
KEEPING = frozenset(
    "float double half bfloat16 long int bool to cuda cpu softmax log_softmax sigmoid abs clamp"
    " requires_grad_ contiguous detach clone exp log tril triu".split()
)
"""Methods that leave the shape of a tensor as it is."""


def input_shapes(program: Program) -> tuple[str, ...] | None:
    """The shapes of what get_inputs returns, as the tokens `[ #4 #8 ]`, however its tensors are
    drawn; a number is itself. None where they cannot be read."""
    function = program.functions.get("get_inputs")
    drawn = returned(program, function) if function else None
    if not isinstance(drawn, ast.List | ast.Tuple):
        return None
    out: list[str] = []
    for each in drawn.elts:
        shape = _shape(program, each)
        number = program.fold(each, ())
        if shape is not None:
            out += ["[", *(f"#{size!r}" for size in shape), "]"]
        elif isinstance(number, int | float):
            out.append(f"#{number!r}")
        else:
            return None
    return tuple(out)


def _shape(program: Program, node: ast.expr, depth: int = 0) -> tuple[object, ...] | None:
    """The shape of a tensor, of sizes that are numbers."""
    if depth > 20:
        return None
    match node:
        case ast.BinOp(left, _, right):
            sides = [_shape(program, side, depth + 1) for side in (left, right)]
            return max((side for side in sides if side is not None), key=len, default=None)
        case ast.UnaryOp(operand=operand):
            return _shape(program, operand, depth + 1)
        case ast.Attribute(value, "T"):
            shape = _shape(program, value, depth + 1)
            return shape[::-1] if shape else None
        case ast.Call(func, args):
            called = (program.dotted(func) or "").removeprefix("torch.")
            if called in CREATION:
                return _created(program, called, node, depth)
            if called in LIKE or called in ("tril", "triu", "abs", "sigmoid", "softmax"):
                return _shape(program, args[0], depth + 1) if args else None
            match func:
                case ast.Attribute(value) if not called and func.attr in KEEPING:
                    return _shape(program, value, depth + 1)
    return None


def _created(
    program: Program, called: str, node: ast.Call, depth: int
) -> tuple[object, ...] | None:
    """The shape of a created tensor: its sizes one by one, as a list, or by the keyword `size`."""
    given = [word.value for word in node.keywords if word.arg == "size"]
    if not given and called in ("full", "randint", "normal"):
        given = [each for each in node.args if _is_sequence(program, each)][:1]
    args: list[ast.expr] = given or list(node.args)
    sizes: list[object] = []
    for each in args:
        value = each.value if isinstance(each, ast.Starred) else each
        sequence = isinstance(each, ast.Starred) or len(args) == 1
        if sequence and isinstance(value, ast.Attribute) and value.attr == "shape":
            shape = _shape(program, value.value, depth + 1)
            if shape is None:
                return None
            sizes += shape
            continue
        number = program.fold(value, ())
        if number is None:
            return None
        sizes += number if isinstance(number, tuple) else [number]
    return tuple(sizes)


def _is_sequence(program: Program, node: ast.expr) -> bool:
    return isinstance(program.fold(node, ()), tuple) or (
        isinstance(node, ast.Attribute) and node.attr == "shape"
    )
