"""Kernels that are the same program apart from comments, layout and own names. Sources in strings
and annotations, which are part of Triton kernels, count verbatim."""

from __future__ import annotations

import ast
import hashlib

from kernels_eval.source.syntax import UNPARSABLE, parse_source

ENTRY_POINT = "ModelNew"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def program_key(code: str) -> str | None:
    """Digest of the program without comments, docstrings and layout, own names numbered as they
    appear. None where it does not parse or ModelNew is absent or empty."""
    try:
        tree = parse_source(code)
        _drop_docstrings(tree)
        if not any(isinstance(node, ast.ClassDef) and _is_entry(node) for node in tree.body):
            return None
        text = ast.dump(_Numbered(_own_names(tree)).visit(tree), annotate_fields=False)
    except UNPARSABLE:
        return None
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _is_entry(node: ast.ClassDef) -> bool:
    return node.name == ENTRY_POINT and not all(isinstance(x, ast.Pass) for x in node.body)


def _drop_docstrings(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            node.body = [each for each in node.body if not _is_text(each)] or [ast.Pass()]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _own_names(tree: ast.AST) -> set[str]:
    found = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Name(name, ast.Store()) | ast.Attribute(_, name, ast.Store()):
                found.add(name)
            case ast.arg(name) | ast.ClassDef(name) | ast.FunctionDef(name):
                found.add(name)
            case ast.alias(name, other):
                found.add(other or name)
    # PyTorch calls these by name
    return {name for name in found if not name.startswith("__")} - {ENTRY_POINT, "forward"}


class _Numbered(ast.NodeTransformer):
    def __init__(self, own: set[str]) -> None:
        self._own, self._numbers = own, dict[str, str]()

    def visit(self, node: ast.AST) -> ast.AST:
        match node:
            case ast.Name(name):
                node.id = self._number(name)
            case ast.Attribute(_, name):
                node.attr = self._number(name)
            case ast.arg(name):
                node.arg = self._number(name)
            case ast.ClassDef(name) | ast.FunctionDef(name):
                node.name = self._number(name)
            case ast.alias(name, other):
                node.asname = self._number(other or name)
        return self.generic_visit(node)

    def _number(self, name: str) -> str:
        if name not in self._own:
            return name
        return self._numbers.setdefault(name, f"${len(self._numbers)}")
