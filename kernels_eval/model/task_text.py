"""What a task's source says of its arguments."""

from __future__ import annotations

import ast
import re

SENTENCE = re.compile(r"[.;!?](?:\s+|$)|\n\s*\n")
DENIES = re.compile(r"\b(not|no|non|nor|never|neither|without|need|may|might)\b|n't", re.IGNORECASE)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def told_by(source: str) -> str:
    """The code, without comments and strings, and the sentences of docstrings that deny nothing."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # in an encoding of its own
        return ""
    sentences = []
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED):
            sentences += SENTENCE.split(ast.get_docstring(node) or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    told = [each for each in sentences if not DENIES.search(each)]
    return "\n".join([ast.unparse(tree), *told])
