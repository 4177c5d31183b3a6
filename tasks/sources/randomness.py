"""Does a call of a function draw random numbers? Answered from the text of the function and of the
call, without running either.

Guarantees: a call is said to draw none only where every place that could is switched off by a
constant: a dropout that is not training, or with share 0. Does not look into functions that the
function calls by other names than torch's.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

ALWAYS_RANDOM = frozenset(
    """rand rand_like randn randn_like randint randint_like randperm bernoulli bernoulli_ binomial multinomial normal normal_ uniform_
    poisson exponential_ sample rsample fractional_max_pool2d fractional_max_pool3d gumbel_softmax""".split()
)
DROPOUTS = frozenset(
    "dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout".split()
)


def draws(function: ast.FunctionDef, call: ast.Call, constants: Mapping[str, ast.expr]) -> bool:
    """Does `function` draw random numbers in this call? `constants` are what names in the call
    stand for. Where it cannot be seen, yes."""
    given = _bound(function, call)

    def value_of(node: ast.expr | None, otherwise: object) -> object:
        if isinstance(node, ast.Name) and node.id in given:
            node = given[node.id]
        if isinstance(node, ast.Name) and node.id in constants:
            node = constants[node.id]
        return otherwise if node is None else node.value if isinstance(node, ast.Constant) else ...

    for site in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
        name = last_name(site.func)
        keywords = {keyword.arg: keyword.value for keyword in site.keywords}
        if name in DROPOUTS:
            share = value_of(keywords.get("p", site.args[1] if len(site.args) > 1 else None), 0.5)
            training = value_of(
                keywords.get("training", site.args[2] if len(site.args) > 2 else None), True
            )
            if training is not False and share != 0:
                return True
        elif name in ALWAYS_RANDOM and value_of(keywords.get("_random_samples"), None) is None:
            return True
    return False


def last_name(node: ast.expr) -> str:
    """The last part of a dotted name; empty where it is none."""
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def _bound(function: ast.FunctionDef, call: ast.Call) -> dict[str, ast.expr]:
    """Parameters and what a call gives them, else their defaults."""
    spec = function.args
    parameters = [argument.arg for argument in (*spec.posonlyargs, *spec.args)]
    given = dict(
        zip(parameters[len(parameters) - len(spec.defaults) :], spec.defaults, strict=True)
    )
    given |= {
        a.arg: default
        for a, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
        if default is not None
    }
    given |= dict(zip(parameters, call.args, strict=False))
    return given | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
