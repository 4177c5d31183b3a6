"""A function with test calls becomes a task: what TritonBench's files hold, in the form that the
verifier takes.

Guarantees: the text is parsed, never run. `Model.forward` makes the test calls in their order, so a
candidate is right where all of them are; `get_inputs()` makes the tensors, random ones anew for
every seed, on the device at hand; everything else that a call is given is a constant of `forward`.
What cannot be put so is refused with a reason, and a call that no candidate can be judged on (it
draws random numbers, is given no tensor, or is there to raise an exception) is left out with one. A
candidate's own text is not changed: its `ModelNew` is added after it.

Does not guarantee that the task works, which is for verification to say, nor that its answer is the
only right one: a decomposition is known up to signs. All inputs are made before the first call: one
that a test makes of a tensor that a call has changed in place is another here. Memory that a test
leaves uninitialised holds zeros: two processes must see the same.
"""

from __future__ import annotations

import ast
import builtins
import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from experiments.tritonbench.syntax import (
    ALWAYS_RANDOM,
    calls,
    cuda_as,
    draws,
    is_factory,
    last_name,
    names_cuda,
    on_default_device,
    rewritten,
    short,
    text_of,
    without_transfers,
)
from kernels_eval.source.syntax import UNPARSABLE, parse_source
from tasks.sources.syntax import names

RULE = re.compile(r"(?m)^#{20,}[ \t]*$")
IMPORTED = frozenset({"torch", "math", "typing", "numpy", "functools", "itertools"})
"""Packages whose imports a task keeps. Others are the operator's own file."""

PLAIN_ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "size", "dim", "numel", "stride"})
RANDOM_CALL = "draws random numbers, so two right answers differ"
NUMBERS_CALL = "is given no tensor"
EXCEPTION_CALL = "is there to raise an exception"
TASK = """\
# TritonBench-T's {title}: one forward call makes its test calls, in their order
{reference}

{imports}OPERATOR = {operator!r}


class Model(torch.nn.Module):
{place}    def forward({parameters}):
        results = {{}}
{forward}        return results


def get_inputs():
{inputs}    return [{names}]


def get_init_inputs():
    return []
"""
PLACE = """\
    def __init__(self):
        super().__init__()
        self.register_buffer("place", torch.zeros(()), persistent=False)

"""
"""Knows the device of the model, for a call that names one."""


class Refused(Exception):
    """A file that does not become a task; its text is the reason."""


@dataclass(frozen=True)
class Adapted:
    """A task's module, and what became of its test calls. `left_out` holds a key of the results (or
    what stands for one) and a reason; `fixed_inputs` says that no input is drawn at random."""

    operator: str
    code: str
    calls: int
    left_out: tuple[tuple[str, str], ...] = ()
    fixed_inputs: bool = False


def adapt(name: str, text: str, without: Mapping[str, str] = MappingProxyType({})) -> Adapted:
    """The task of a file: a reference function, a line of `#`, and a function that calls it.
    `without`: keys of results that are left out, and why. Raises Refused."""
    parts = RULE.split(text)
    if len(parts) != 2:
        raise Refused(
            f"holds {len(parts) - 1} lines of #; one line must separate the function from its test"
            " calls"
        )
    try:
        reference, tests = map(parse_source, parts)
    except UNPARSABLE as error:
        raise Refused(f"is not Python: {str(error) or type(error).__name__}") from None
    return _Reader(_operator(reference, name), tests, without).task(parts[0].strip(), name)


@dataclass
class _Value:
    """What a name of the test stands for: a constant, an input, something that a call made (random
    where the call draws), or the results. `expression` stands for it in `forward`."""

    kind: Literal["plain", "input", "output", "random", "results"]
    expression: ast.expr | None = None


@dataclass
class _Reader:
    """Reads a test function from top to bottom and writes `get_inputs` and `forward` beside it."""

    operator: ast.FunctionDef
    tests: ast.Module
    without: Mapping[str, str]
    known: dict[str, _Value] = field(default_factory=dict)
    made: dict[str, ast.expr] = field(default_factory=dict)
    """Inputs by name, in the order of making."""
    forward: list[ast.stmt] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def task(self, reference: str, name: str) -> Adapted:
        if any(isinstance(node, ast.ClassDef) for node in ast.walk(self.tests)):
            raise Refused("its tests pass modules of their own, not tensors")
        function = self._test_function()
        own = names(function, stored=True)
        self._taken = {self.operator.name, "self", "results", "torch", *dir(builtins)}
        self._taken = (self._taken | names(function, stored=False)) - own
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and self._count(node.value):
                self._taken |= own & names(*node.targets)
        for statement in function.body:
            self._statement(statement)
        if not any(
            isinstance(node, ast.Subscript) for part in self.forward for node in ast.walk(part)
        ):
            reasons = " or ".join(sorted({reason for _, reason in self.left_out}))
            raise Refused(f"every test call {reasons}" if reasons else "makes no test call")
        return self._written(reference, name)

    def _test_function(self) -> ast.FunctionDef:
        functions = [
            node
            for node in self.tests.body
            if isinstance(node, ast.FunctionDef) and self._count(node)
        ]
        if len(functions) != 1 or functions[0].args.args:
            raise Refused(
                f"holds {len(functions)} test functions without arguments that call"
                f" {self.operator.name}, not one"
            )
        return functions[0]

    # -- statements --------------------------------------------------------------------------------

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=[target]):
                self._assign(target, node.value)
            case ast.Return():
                if node.value is not None and not self._is(node.value, "results"):
                    self._result(ast.Constant("result"), node.value)
            case ast.Try():
                if self._count(node):
                    self.left_out.append((_first_key(node), EXCEPTION_CALL))
            case ast.Expr(value=value) if self._count(value):
                self._call(None, value)
            case ast.With():
                raise Refused(
                    "its test calls are inside a `with` statement, which is not an argument"
                )
            case ast.Assert() | ast.Pass() | ast.Expr(value=ast.Constant()):
                pass
            case ast.Expr(value=ast.Call(func=f)) if last_name(f) in ("print", "manual_seed"):
                pass  # a call that uses the generator's seed draws random numbers
            case _:
                raise Refused(f"cannot place `{short(node)}`")

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case ast.Subscript(value=place), _ if self._is(place, "results"):
                self._result(target.slice, value)
            case ast.Name(id=name), ast.Dict(keys=[]):
                self.known[name] = _Value("results")
            case _ if self._count(value) or self._mentions(value, "output", "random"):
                self._call(target, value)
            case ast.Name(id=name), _ if self._makes_tensor(value):
                self.known[name] = _Value("input", self._input(value, name))
            case ast.Name(id=name), _:
                self.known[name] = _Value("plain", self._expression(value))
            case ast.Tuple(elts=left), ast.Tuple(elts=right) if len(left) == len(right):
                for each, part in zip(left, right, strict=True):
                    self._assign(each, part)
            case _:
                raise Refused(f"cannot place `{short(target)} = {short(value)}`")

    def _call(self, target: ast.expr | None, value: ast.expr) -> None:
        """A statement that makes a call, or uses what one made."""
        own = names(target) if target else set()
        random = self._random(value)
        for name in own:
            self.known[name] = _Value("random" if random else "output", ast.Name(name, ast.Load()))
        if not random:
            found = self._expression(value, own)
            made = ast.Assign([copy.deepcopy(target)], found) if target else ast.Expr(found)
            self.forward.append(made)

    def _result(self, key: ast.expr, value: ast.expr) -> None:
        shown = str(key.value) if isinstance(key, ast.Constant) else short(key)
        reason = RANDOM_CALL if self._random(value) else self.without.get(shown)
        if reason is None:
            value = without_transfers(value)
            self._check_result(value)
            value = self._expression(value)
            if self._count(value) and not names(value) & self.made.keys():
                reason = NUMBERS_CALL
        if reason is not None:
            self.left_out.append((shown, reason))
            return
        place = ast.Subscript(ast.Name("results", ast.Load()), copy.deepcopy(key), ast.Store())
        self.forward.append(ast.Assign([place], value))

    def _check_result(self, node: ast.expr) -> None:
        if isinstance(node, ast.Tuple | ast.List):
            for part in node.elts:
                self._check_result(part)
        elif isinstance(node, ast.Subscript):
            self._check_result(node.value)
        elif not (isinstance(node, ast.Name) or self._is_operator(node)):
            raise Refused(f"its result is `{short(node)}`, not what the operator returns")

    # -- expressions -------------------------------------------------------------------------------

    def _expression(self, node: ast.expr, own: set[str] | None = None) -> ast.expr:
        """As it stands in `forward`: constants in place, tensors taken out to be inputs. Names of
        `own` stay."""

        def change(part: ast.AST) -> ast.AST | None:
            if isinstance(part, ast.expr) and self._makes_tensor(part):
                return self._input(part, "given")
            return self._meaning(part, own or set())

        return rewritten(node, change)

    def _meaning(self, node: ast.AST, own: set[str]) -> ast.expr | None:
        if not isinstance(node, ast.Name) or node.id not in self.known or node.id in own:
            return None
        return copy.deepcopy(self.known[node.id].expression)

    def _input(self, node: ast.expr, hint: str) -> ast.Name:
        """A new input that holds this tensor."""
        name, number = hint, 1
        while name in self._taken:
            number += 1
            name = f"{hint}_{number}"
        made = rewritten(node, lambda part: self._meaning(part, set()))
        self._taken.add(name)
        self.made[name] = on_default_device(made)
        return ast.Name(name, ast.Load())

    def _makes_tensor(self, node: ast.expr) -> bool:
        """Whether this computes a tensor without any call of the operator."""
        attribute = node.func if isinstance(node, ast.Call) else node
        if isinstance(attribute, ast.Attribute) and attribute.attr in PLAIN_ATTRIBUTES:
            return False
        if not isinstance(node, ast.Call | ast.BinOp | ast.UnaryOp | ast.Subscript | ast.Attribute):
            return False
        if self._count(node) or self._mentions(node, "output", "random", "results"):
            return False
        return self._mentions(node, "input") or any(map(is_factory, ast.walk(node)))

    def _is(self, node: ast.AST, *kinds: str) -> bool:
        known = self.known.get(node.id) if isinstance(node, ast.Name) else None
        return known is not None and known.kind in kinds

    def _mentions(self, node: ast.AST, *kinds: str) -> bool:
        return any(self._is(part, *kinds) for part in ast.walk(node))

    def _is_operator(self, node: ast.AST) -> bool:
        called = node.func if isinstance(node, ast.Call) else None
        return isinstance(called, ast.Name) and called.id == self.operator.name

    def _count(self, node: ast.AST) -> int:
        """How many calls of the operator this makes."""
        return sum(map(self._is_operator, ast.walk(node)))

    def _random(self, node: ast.AST) -> bool:
        constants = {
            name: value.expression
            for name, value in self.known.items()
            if value.kind == "plain" and value.expression
        }
        return self._mentions(node, "random") or any(
            draws(self.operator, call, constants) for call in calls(node) if self._is_operator(call)
        )

    # -- writing -----------------------------------------------------------------------------------

    def _written(self, reference: str, name: str) -> Adapted:
        used = names(*self.forward)
        parameters = [made for made in self.made if made in used]
        needed: dict[str, ast.expr] = {}
        for made, expression in reversed(self.made.items()):
            if made in used:
                used |= names(expression)
                needed[made] = expression
        imports = [text_of(node) for node in self.tests.body if _is_kept(node)]
        told = dict.fromkeys(["import torch", *imports])
        named = any(names_cuda(part) for node in self.forward for part in ast.walk(node))
        forward = [text_of(cuda_as(node, "self.place.device")) for node in self.forward]
        inputs = [f"{made} = {text_of(needed[made])}" for made in reversed(needed)]
        code = TASK.format(
            title=" ".join(name.split()),
            reference=reference,
            imports=_lines([line for line in told if line not in reference.splitlines()]),
            operator=self.operator.name,
            place=PLACE if named else "",
            parameters=", ".join(["self", *parameters]),
            forward=_lines(forward, 8),
            inputs=_lines(inputs, 4),
            names=", ".join(parameters),
        )
        made_calls = (call for made in needed.values() for call in calls(made))
        drawn = any(last_name(call.func) in ALWAYS_RANDOM for call in made_calls)
        count = sum(map(self._count, self.forward))
        return Adapted(self.operator.name, code, count, tuple(self.left_out), not drawn)


def _operator(reference: ast.Module, name: str) -> ast.FunctionDef:
    functions = {node.name: node for node in reference.body if isinstance(node, ast.FunctionDef)}
    last = name.rpartition(".")[2]
    if last in functions:
        return functions[last]
    if len(functions) != 1:
        raise Refused(f"defines {len(functions)} functions, none of them {last}")
    return next(iter(functions.values()))


def _first_key(node: ast.AST) -> str:
    keys = [part.slice for part in ast.walk(node) if isinstance(part, ast.Subscript)]
    return ast.unparse(keys[0]).strip("'\"") if keys else "a try statement"


def _lines(lines: list[str], indent: int = 0) -> str:
    return "".join(f"{' ' * indent}{line}\n" for line in lines)


def _modules(node: ast.stmt) -> list[str]:
    """The modules that a statement imports; none for other statements."""
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def _is_kept(node: ast.stmt) -> bool:
    """Whether this imports nothing but packages that a task keeps."""
    packages = {module.split(".")[0] for module in _modules(node)}
    return bool(packages) and packages <= IMPORTED
