"""Names in Python's syntax trees, which are never run."""

from __future__ import annotations

import ast
from collections.abc import Sequence


def names(*nodes: ast.AST, stored: bool | None = None) -> set[str]:
    """Names in these trees; with `stored`, only assigned (True) or read (False) ones."""
    return {
        part.id
        for node in nodes
        for part in ast.walk(node)
        if isinstance(part, ast.Name)
        and (stored is None or isinstance(part.ctx, ast.Store) == stored)
    }


def defined_names(body: Sequence[ast.stmt], *kinds: type[ast.stmt]) -> set[str]:
    """Names that importing a module defines, also under `if` and `try`.

    `kinds` are ast.FunctionDef, ast.ClassDef and ast.Assign (none: all).
    """
    found = set()
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            inner = [*node.body, *node.orelse, *getattr(node, "finalbody", [])]
            found |= defined_names(inner, *kinds)
        elif kinds and not isinstance(node, kinds):
            continue
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= names(*node.targets)
    return found
