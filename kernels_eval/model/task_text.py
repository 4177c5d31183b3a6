"""A task's source: its code, and the structure that its docstrings promise of its arguments."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

MATRICES = ("symmetric", "triangular")
SENTENCE = re.compile(r"[.;!?](?:\s+|$)|\n\s*\n")
THINGS = "matrix|matrices|tensors?|factors?|weights?|operators?"
PROMISES = {
    word: re.compile(
        rf"(?<!and )(?<![\w-])(?:(?:lower|upper)[- ])?{word}"
        rf"(?:$|[:)]| \(| and positive|(?: (?!and\b|or\b)[\w-]+){{0,2}} (?:{THINGS})\b)"
    )
    for word in MATRICES
}
"""What a sentence says of an argument: that it is such a matrix."""
WIDER = "any|general|arbitrary|others?|otherwise|full|dense|directed|asymmetric|unstructured"
HEDGES = re.compile(
    rf"n't|\b(?:{WIDER}|not|no|non|nor|never|neither|without|need|may|might|can|could|if|when\w*"
    r"|whether|unless|or|either|as well|too|like|such|example|draws?|case|even|default|includ\w*"
    r"|typical\w*|usual\w*|often|most\w*|common\w*|some\w*|normal\w*"
    r"|accept\w*|support\w*|allow\w*|taken|takes|handle\w*|works?)\b"
)
"""Words of a sentence that denies a structure, or names more than one."""
WIDENS = re.compile(rf"\b(?:{WIDER})\b.*\b(?:{THINGS}|ones?|graphs?|inputs?)\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_of(source: str) -> str:
    """Without comments, docstrings and other strings."""
    tree = _parsed(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.unparse(tree)


def promised_by(source: str) -> set[str]:
    """The structures that a docstring plainly promises: no other sentence takes more. What
    `get_inputs` says of its own draws is no promise."""
    sentences = list(_sentences(_parsed(source)))
    named = [each for each in sentences if any(word in each for word in MATRICES)]
    if any(WIDENS.search(each) for each in sentences if each not in named):
        return set()
    plain = [each for each in named if not HEDGES.search(each)]
    return {word for word in MATRICES if any(map(PROMISES[word].search, plain))}


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError:  # in an encoding of its own
        return ast.Module([], [])


def _sentences(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and not getattr(node, "name", "").startswith("get_"):
            for sentence in SENTENCE.split(ast.get_docstring(node) or ""):
                yield " ".join(sentence.lower().split())
