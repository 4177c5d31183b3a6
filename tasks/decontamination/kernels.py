"""Kernels that are the same program apart from comments, layout, own names and the names of
extensions. Annotations, which are part of Triton kernels, count verbatim."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator

from kernels_eval.source.syntax import UNPARSABLE, name_path, parse_source
from tasks.decontamination.native import defined_functions, is_native, native_program

ENTRY_POINT = "ModelNew"
KEPT = {ENTRY_POINT, "forward"}
"""What PyTorch calls by name."""
EXTENSION = "$extension"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def program_key(code: str) -> str | None:
    """Digest of the program without comments, docstrings and layout, also in native sources; own
    names, those of native functions too, are numbered as they appear, and extensions have none.
    None where it does not parse or ModelNew is absent or empty."""
    try:
        tree = parse_source(code)
        _drop_docstrings(tree)
        if not any(isinstance(node, ast.ClassDef) and _is_entry(node) for node in tree.body):
            return None
        _drop_names_of_extensions(tree)
        text = ast.dump(_Numbered(tree).visit(tree), annotate_fields=False)
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
    return {name for name in found if not name.startswith("__")} - KEPT


def _drop_names_of_extensions(tree: ast.AST) -> None:
    names: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node) in ("load", "load_inline"):
            names += [each.value for each in node.keywords if each.arg == "name"] or node.args[:1]
            node.keywords = [each for each in node.keywords if each.arg != "name"]
            node.args = [each for each in node.args if each not in names]
        elif isinstance(node, ast.Attribute) and name_path(node.value) == ["torch", "ops"]:
            node.attr = EXTENSION
    variables = {node.id for node in names if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        match node:
            case ast.Assign([ast.Name(name)], ast.Constant() as given) if name in variables:
                given.value = EXTENSION


def _called(call: ast.Call) -> str:
    return next(iter(name_path(call.func)[-1:]), "")


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


class _Numbered(ast.NodeTransformer):
    def __init__(self, tree: ast.AST) -> None:
        self._own, self._numbers = _own_names(tree), dict[str, str]()
        self._imported = {
            alias.asname or alias.name.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        sources = filter(is_native, _texts(tree))
        self._native = {name for text in sources for name in defined_functions(text)} - KEPT

    def visit(self, node: ast.AST) -> ast.AST:
        match node:
            case ast.Name(name):
                node.id = self._number(name)
            case ast.Attribute(_, name):
                if name in self._own or self._may_be_native(node):
                    node.attr = self._numbered(name)
            case ast.arg(name):
                node.arg = self._number(name)
            case ast.ClassDef(name) | ast.FunctionDef(name):
                node.name = self._number(name)
            case ast.alias(name, other):
                node.asname = self._number(other or name)
            case ast.Constant(str(text)) if text in self._native:
                node.value = self._numbered(text)
            case ast.Constant(str(text)) if is_native(text):
                node.value = native_program(text, self._native_number, EXTENSION)
        return self.generic_visit(node)

    def _may_be_native(self, node: ast.Attribute) -> bool:
        """Of an extension, not of a module such as torch, which may have a function of this
        name."""
        return node.attr in self._native and self._imported.isdisjoint(name_path(node)[:1])

    def _number(self, name: str) -> str:
        return self._numbered(name) if name in self._own else name

    def _native_number(self, name: str) -> str:
        return self._numbered(name) if name in self._native else name

    def _numbered(self, name: str) -> str:
        return self._numbers.setdefault(name, f"${len(self._numbers)}")
