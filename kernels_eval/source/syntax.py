"""Parses untrusted Python."""

from __future__ import annotations

import ast
import gc
import operator
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError, SystemError)
"""What parsing raises: ValueError for NUL and lone surrogates, the others for deep nesting."""
ATTEMPTS = 20
BYTE_ORDER_MARK = "\ufeff"
"""Python ignores one at the start of a file, but not of a string."""
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
"""What operators of small results do to numbers."""


def parse_source(code: str) -> ast.Module:
    """The syntax tree, without warnings. Raises UNPARSABLE. Use `ast.walk`, never recursion: it may
    be deep.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return _parsed(code)
        except SystemError:
            pass  # Python 3.11 counts the tree's depth for all code together: see `_parsed`
        except RecursionError:
            break
    # how deep a tree may be depends on how deep the caller is: in a thread of its own nobody is
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_parsed, code).result()


def name_path(node: ast.AST) -> list[str]:
    """["torch", "nn", "Linear"] of torch.nn.Linear; empty where its root is no name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []


def _parsed(code: str) -> ast.Module:
    collects = gc.isenabled()
    gc.disable()  # a callback of the collector that parses, too, upsets the count of the depth
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code.removeprefix(BYTE_ORDER_MARK))
    finally:
        if collects:
            gc.enable()
