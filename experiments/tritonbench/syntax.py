"""Questions about the syntax trees of operators and their tests, and how they are rewritten.
Nothing here runs what it reads."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar, cast

NOT_TENSORS = frozenset(
    "Size device dtype Generator finfo iinfo get_default_dtype is_available manual_seed".split()
)
"""What is called on torch without making a tensor."""
TRANSFERS = frozenset({"item", "cpu", "numpy", "detach", "tolist"})
"""Methods that only carry a result to the reader: the task's output is the tensor itself."""
DEFAULT_DEVICE = "torch.empty(0).device"
ALWAYS_RANDOM = frozenset(
    """rand rand_like randn randn_like randint randint_like randperm bernoulli bernoulli_ binomial
    multinomial normal normal_ uniform_ poisson exponential_ sample rsample fractional_max_pool2d
    fractional_max_pool3d gumbel_softmax""".split()
)
DROPOUTS = frozenset(
    "dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout".split()
)
Node = TypeVar("Node", bound=ast.AST)


# -- reading ---------------------------------------------------------------------------------------


def calls(node: ast.AST) -> Iterator[ast.Call]:
    """Every call in a tree."""
    return (part for part in ast.walk(node) if isinstance(part, ast.Call))


def last_name(node: ast.expr) -> str:
    """The last part of a dotted name; empty where it is none."""
    return str(getattr(node, "attr", "") or getattr(node, "id", ""))


def is_factory(node: ast.AST) -> bool:
    """Whether this calls something of torch that makes a tensor."""
    if not isinstance(node, ast.Call):
        return False
    parts = ast.unparse(node.func).split(".")
    return parts[0] == "torch" and len(parts) > 1 and parts[-1] not in NOT_TENSORS


def names_cuda(node: ast.AST) -> bool:
    """Whether this is the text "cuda" or "cuda:N"."""
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, str) and re.fullmatch(r"cuda(:\d+)?", value) is not None


def text_of(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node))


def short(node: ast.AST) -> str:
    """The code in one line of at most 80 characters, for a message."""
    text = " ".join(text_of(copy.deepcopy(node)).split())
    return text if len(text) <= 80 else text[:77] + "..."


# -- rewriting -------------------------------------------------------------------------------------


def rewritten(node: Node, change: Callable[[ast.AST], ast.AST | None]) -> Node:
    """A copy in which every outermost node that `change` has a replacement for is replaced."""

    class Rewrite(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            found = change(node)
            return self.generic_visit(node) if found is None else found

    return cast(Node, Rewrite().visit(copy.deepcopy(node)))


def expression_of(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def without_transfers(node: ast.expr) -> ast.expr:
    """A result without the calls that only carry it to the reader."""

    def change(node: ast.AST) -> ast.AST | None:
        if not isinstance(node, ast.Call):
            return None
        if isinstance(node.func, ast.Attribute) and node.func.attr in TRANSFERS and not node.args:
            return rewritten(node.func.value, change)
        return node

    return rewritten(node, change)


def cuda_as(node: Node, device: str) -> Node:
    """A copy in which `device` (an expression) stands wherever the text names a CUDA device."""
    return rewritten(node, lambda part: expression_of(device) if names_cuda(part) else None)


def on_default_device(node: ast.expr) -> ast.expr:
    """How an input is made under torch's default device: a device that the text names is taken out,
    or becomes that one."""

    class OnDefaultDevice(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            moved = [ast.unparse(each) for each in (*node.args, *node.keywords)] == [DEFAULT_DEVICE]
            if isinstance(node.func, ast.Attribute) and (
                node.func.attr == "cuda" or (node.func.attr == "to" and moved)
            ):
                return node.func.value
            node.keywords = [
                keyword
                for keyword in node.keywords
                if keyword.arg != "requires_grad"
                and (keyword.arg != "device" or ast.unparse(keyword.value) != DEFAULT_DEVICE)
            ]
            # two processes must see the same in memory that a test leaves uninitialised
            if ast.unparse(node.func) in ("torch.empty", "torch.empty_like"):
                node.func = expression_of(ast.unparse(node.func).replace("empty", "zeros"))
            return node

        def visit_Constant(self, node: ast.Constant) -> ast.AST:
            return expression_of(DEFAULT_DEVICE) if names_cuda(node) else node

    return cast(ast.expr, OnDefaultDevice().visit(copy.deepcopy(node)))


# -- random numbers --------------------------------------------------------------------------------


def draws(function: ast.FunctionDef, call: ast.Call, constants: Mapping[str, ast.expr]) -> bool:
    """Whether `function` draws random numbers in this call, as far as its own text says.

    `constants` are what names in the call stand for. False only where every place that could draw
    is switched off by a constant: a dropout that is not training, or with share 0. Functions that
    it calls by other names than torch's are not looked into.
    """
    given = _bound(function, call)

    def value_of(node: ast.expr | None, otherwise: object) -> object:
        for meanings in (given, constants):
            if isinstance(node, ast.Name):
                node = meanings.get(node.id, node)
        return otherwise if node is None else node.value if isinstance(node, ast.Constant) else ...

    for site in calls(function):
        name = last_name(site.func)
        options = dict(zip((None, "p", "training"), site.args, strict=False))
        options |= {keyword.arg: keyword.value for keyword in site.keywords}
        if name in DROPOUTS:
            training = value_of(options.get("training"), True)
            if training is not False and value_of(options.get("p"), 0.5) != 0:
                return True
        elif name in ALWAYS_RANDOM and value_of(options.get("_random_samples"), None) is None:
            return True
    return False


def _bound(function: ast.FunctionDef, call: ast.Call) -> dict[str, ast.expr]:
    """Parameters and what a call gives them, else their defaults."""
    spec = function.args
    parameters = [argument.arg for argument in (*spec.posonlyargs, *spec.args)]
    defaults = parameters[len(parameters) - len(spec.defaults) :]
    given = dict(zip(defaults, spec.defaults, strict=True))
    for argument, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        if default is not None:
            given[argument.arg] = default
    given |= dict(zip(parameters, call.args, strict=False))
    return given | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
