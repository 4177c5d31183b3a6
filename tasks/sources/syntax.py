"""Small questions about Python's syntax trees, and the rewrites that `tasks.sources.functions`
needs. Nothing here runs what it reads."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Sequence

PLAIN_OF_TORCH = frozenset(
    "Size device dtype Generator finfo iinfo get_default_dtype is_available manual_seed".split()
)
BROUGHT_HOME = frozenset({"item", "cpu", "numpy", "detach", "tolist"})
"""Methods that only carry a result to the reader: the task's output is the tensor itself."""


def defined_names(body: Sequence[ast.stmt]) -> set[str]:
    """Names that a module defines when it is imported, those under `if` and `try` included."""
    found = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {
                part.id
                for target in node.targets
                for part in ast.walk(target)
                if isinstance(part, ast.Name)
            }
        elif isinstance(node, ast.If | ast.Try):
            found |= defined_names([*node.body, *node.orelse, *getattr(node, "finalbody", [])])
    return found


def assigned_names(function: ast.FunctionDef) -> set[str]:
    return {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def is_factory(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    parts = ast.unparse(node.func).split(".")
    return parts[0] == "torch" and len(parts) > 1 and parts[-1] not in PLAIN_OF_TORCH


def names_cuda(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"cuda(:\d+)?", node.value) is not None
    )


def brought_home(node: ast.expr) -> ast.expr:
    class Home(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            if (
                isinstance(node.func, ast.Attribute)
                and node.func.attr in BROUGHT_HOME
                and not node.args
            ):
                return self.visit(node.func.value)
            return node

    return Home().visit(copy.deepcopy(node))


def on_device(node: ast.expr) -> ast.expr:
    """Inputs are made under torch's default device: a device that the text names is taken out, or
    becomes that one."""

    class OnDevice(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if method == "cuda" or (
                method == "to"
                and len(node.args) == 1
                and not node.keywords
                and is_here(node.args[0])
            ):
                return node.func.value if isinstance(node.func, ast.Attribute) else node
            dropped = [
                k
                for k in node.keywords
                if k.arg == "requires_grad" or (k.arg == "device" and is_here(k.value))
            ]
            node.keywords = [keyword for keyword in node.keywords if keyword not in dropped]
            if ast.unparse(node.func) in ("torch.empty", "torch.empty_like"):
                node.func = expression_of(ast.unparse(node.func).replace("empty", "zeros"))
            return node

        def visit_Constant(self, node: ast.Constant) -> ast.AST:
            return expression_of("torch.empty(0).device") if names_cuda(node) else node

    return OnDevice().visit(copy.deepcopy(node))


def on_place(node: ast.stmt) -> ast.stmt:
    """In `forward`, a device that the text names is the one of the buffer `place`. The same node
    where it names none."""

    class OnPlace(ast.NodeTransformer):
        def visit_Constant(self, node: ast.Constant) -> ast.AST:
            return expression_of("self.place.device") if names_cuda(node) else node

    return (
        OnPlace().visit(copy.deepcopy(node))
        if any(names_cuda(part) for part in ast.walk(node))
        else node
    )


def is_here(node: ast.expr) -> bool:
    return ast.unparse(node) == "torch.empty(0).device"


def expression_of(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def statement_of(text: str) -> ast.stmt:
    return ast.parse(f"def f():\n    {text}").body[0].body[0]  # type: ignore[attr-defined]


def text_of(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node))


def short(node: ast.AST) -> str:
    text = " ".join(text_of(copy.deepcopy(node)).split())
    return text if len(text) <= 80 else text[:77] + "..."
