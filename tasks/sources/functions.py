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
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tasks.sources.randomness import ALWAYS_RANDOM, draws, last_name
from tasks.sources.syntax import (
    assigned_names,
    brought_home,
    defined_names,
    is_factory,
    on_device,
    on_place,
    short,
    statement_of,
    text_of,
)

RULE = re.compile(r"(?m)^#{20,}[ \t]*$")
IMPORTED = frozenset({"torch", "math", "typing", "numpy", "functools", "itertools"})
"""Packages whose imports a task keeps. Others are the operator's own file."""

PLAIN_ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "size", "dim", "numel", "stride"})
RANDOM_CALL = "draws random numbers, so two right answers differ"
NUMBERS_CALL = "is given no tensor"
EXCEPTION_CALL = "is there to raise an exception"


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
            f"holds {len(parts) - 1} lines of # where one parts the function from its test calls"
        )
    reference, tests = (_parsed(part) for part in parts)
    operator = _operator(reference, name)
    return _Reader(operator, reference, tests, without).task(parts[0].strip(), name)


def with_model_new(candidate: str, task_code: str) -> str | None:
    """The candidate's text with a `ModelNew` after it that makes the task's calls of the
    candidate's function; None where it has no such function. `task_code` is the code of an adapted
    task. Text that is no Python comes back as it is: that is for the verdict to say.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # invalid escapes in somebody's docstring are not ours to report
            there = ast.parse(candidate)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return candidate
    if operator_of(task_code) not in defined_names(there.body):
        return None
    module = ast.parse(task_code)
    model = next(
        node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "Model"
    )
    model.name = "ModelNew"
    body = [
        *(node for node in module.body if isinstance(node, ast.Import | ast.ImportFrom)),
        model,
        statement_of("return ModelNew"),
    ]
    arguments = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    factory = ast.FunctionDef(
        name="_model_new", args=arguments, body=body, decorator_list=[], type_params=[]
    )
    added = ast.unparse(ast.fix_missing_locations(ast.Module(body=[factory], type_ignores=[])))
    return f"{candidate.rstrip()}\n\n\n{added}\n\n\nModelNew = _model_new()\n"


def operator_of(task_code: str) -> str:
    """The name of the function that an adapted task calls."""
    for node in ast.parse(task_code).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == "OPERATOR"
        ):
            return str(ast.literal_eval(node.value))
    raise ValueError("not the code of an adapted task")


@dataclass
class _Value:
    """What a name of the test stands for: a constant's expression, an input, or something that a
    call made."""

    kind: str  # "plain", "input", "output", "random", "results"
    expression: ast.expr | None = None


@dataclass
class _Reader:
    """Reads a test function from top to bottom and writes `get_inputs` and `forward` beside it."""

    operator: str
    reference: ast.Module
    tests: ast.Module
    without: Mapping[str, str]
    known: dict[str, _Value] = field(default_factory=dict)
    made: list[tuple[str, ast.expr]] = field(default_factory=list)
    forward: list[ast.stmt] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    calls: int = 0

    def task(self, reference: str, name: str) -> Adapted:
        if any(isinstance(node, ast.ClassDef) for node in ast.walk(self.tests)):
            raise Refused("its tests hand over modules of their own, not tensors")
        function = self._test_function()
        self._inputs: set[str] = set()
        self._taken = {self.operator, "self", "results", "torch", *dir(builtins)}
        self._taken |= {
            node.id
            for node in ast.walk(function)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        self._taken -= (own := assigned_names(function))
        self._outputs = own & {
            target for node in ast.walk(function) for target in self._targets_of_calls(node)
        }
        for statement in function.body:
            self._statement(statement)
        if not any(
            isinstance(node, ast.Subscript)
            for statement in self.forward
            for node in ast.walk(statement)
        ):
            reasons = {reason for _, reason in self.left_out}
            raise Refused(
                f"every test call {' or '.join(sorted(reasons))}"
                if reasons
                else "makes no test call"
            )
        return self._written(reference, name)

    # -- statements --------------------------------------------------------------------------------

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._assign(node.targets[0], node.value)
        elif isinstance(node, ast.Return):
            if node.value is not None and not self._is(node.value, "results"):
                self._result(ast.Constant("result"), node.value)
        elif isinstance(node, ast.Try):
            if self._calls_operator(node):
                keys = [
                    ast.unparse(part.slice)
                    for part in ast.walk(node)
                    if isinstance(part, ast.Subscript)
                ]
                self.left_out.append(
                    (keys[0].strip("'\"") if keys else "a try statement", EXCEPTION_CALL)
                )
        elif isinstance(node, ast.Expr) and self._calls_operator(node):
            self._call(None, node.value)
        elif isinstance(node, ast.With):
            raise Refused("its test calls stand in a `with` statement, which is no argument")
        elif not (
            isinstance(node, ast.Assert | ast.Pass)
            or (isinstance(node, ast.Expr) and _is_idle(node.value))
        ):
            raise Refused(f"cannot place `{short(node)}`")

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Subscript) and self._is(target.value, "results"):
            self._result(target.slice, value)
        elif isinstance(target, ast.Name) and isinstance(value, ast.Dict) and not value.keys:
            self.known[target.id] = _Value("results")
        elif self._calls_operator(value) or self._mentions(value, "output", "random"):
            self._call(target, value)
        elif isinstance(target, ast.Name):
            self._define(target.id, value)
        elif (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Tuple)
            and len(target.elts) == len(value.elts)
        ):
            for each, part in zip(target.elts, value.elts, strict=True):
                self._assign(each, part)
        else:
            raise Refused(f"cannot place `{short(target)} = {short(value)}`")

    def _define(self, name: str, value: ast.expr) -> None:
        if self._makes_tensor(value):
            self.known[name] = _Value("input", ast.Name(self._hoisted(value, name), ast.Load()))
        else:
            self.known[name] = _Value("plain", self._expression(value))

    def _call(self, target: ast.expr | None, value: ast.expr) -> None:
        """A statement that makes a call, or uses what one made."""
        names = (
            [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]
            if target is not None
            else []
        )
        random = self._random(value) or self._mentions(value, "random")
        for name in names:
            self.known[name] = _Value("random" if random else "output", ast.Name(name, ast.Load()))
        if random:
            return
        expression = self._expression(value, own=frozenset(names))
        self.calls += self._count(expression)
        self.forward.append(
            ast.Expr(expression)
            if target is None
            else ast.Assign([copy.deepcopy(target)], expression)
        )

    def _result(self, key: ast.expr, value: ast.expr) -> None:
        shown = str(key.value) if isinstance(key, ast.Constant) else short(key)
        if self._random(value) or self._mentions(value, "random"):
            self.left_out.append((shown, RANDOM_CALL))
            return
        if shown in self.without:
            self.left_out.append((shown, self.without[shown]))
            return
        value = brought_home(value)
        self._check_result(value)
        expression = self._expression(value)
        if self._count(expression) and not any(
            isinstance(part, ast.Name) and part.id in self._inputs for part in ast.walk(expression)
        ):
            self.left_out.append((shown, NUMBERS_CALL))
            return
        self.calls += self._count(expression)
        place = ast.Subscript(ast.Name("results", ast.Load()), copy.deepcopy(key), ast.Store())
        self.forward.append(ast.Assign([place], expression))

    def _check_result(self, node: ast.expr) -> None:
        if isinstance(node, ast.Tuple | ast.List):
            for part in node.elts:
                self._check_result(part)
        elif isinstance(node, ast.Subscript):
            self._check_result(node.value)
        elif not (
            isinstance(node, ast.Name) or (isinstance(node, ast.Call) and self._is_operator(node))
        ):
            raise Refused(f"its result is `{short(node)}`, not what the operator returns")

    # -- expressions -------------------------------------------------------------------------------

    def _expression(self, node: ast.expr, own: frozenset[str] = frozenset()) -> ast.expr:
        """As it stands in `forward`: constants in place, tensors taken out to be inputs."""
        reader = self

        class InForward(ast.NodeTransformer):
            def visit(self, node: ast.AST) -> ast.AST:
                return (
                    reader._as_input(node)
                    if isinstance(node, ast.expr) and reader._makes_tensor(node)
                    else super().visit(node)
                )

            def visit_Name(self, node: ast.Name) -> ast.AST:
                value = reader.known.get(node.id)
                return (
                    copy.deepcopy(value.expression)
                    if value and value.expression and node.id not in own
                    else node
                )

        return InForward().visit(copy.deepcopy(node))

    def _as_input(self, node: ast.expr) -> ast.expr:
        return ast.Name(self._hoisted(node, "given"), ast.Load())

    def _hoisted(self, node: ast.expr, hint: str) -> str:
        """The name of a new input that holds this tensor."""
        expression = on_device(self._substituted(node))
        name, number = hint, 1
        while name in self._taken or name in self._outputs:
            number += 1
            name = f"{hint}_{number}"
        self._taken.add(name)
        self.made.append((name, expression))
        self._inputs.add(name)
        return name

    def _substituted(self, node: ast.expr) -> ast.expr:
        reader = self

        class InInputs(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.AST:
                value = reader.known.get(node.id)
                return copy.deepcopy(value.expression) if value and value.expression else node

        return InInputs().visit(copy.deepcopy(node))

    def _makes_tensor(self, node: ast.expr) -> bool:
        """Does this compute a tensor without any call of the operator?"""
        if isinstance(node, ast.Attribute) and node.attr in PLAIN_ATTRIBUTES:
            return False
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in PLAIN_ATTRIBUTES
        ):
            return False
        if not isinstance(node, ast.Call | ast.BinOp | ast.UnaryOp | ast.Subscript | ast.Attribute):
            return False
        if self._calls_operator(node) or self._mentions(node, "output", "random", "results"):
            return False
        return self._mentions(node, "input") or any(is_factory(part) for part in ast.walk(node))

    def _is(self, node: ast.expr, kind: str) -> bool:
        return (
            isinstance(node, ast.Name)
            and node.id in self.known
            and self.known[node.id].kind == kind
        )

    def _mentions(self, node: ast.AST, *kinds: str) -> bool:
        return any(
            self._is(part, kind)
            for part in ast.walk(node)
            if isinstance(part, ast.Name)
            for kind in kinds
        )

    def _is_operator(self, node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == self.operator
        )

    def _calls_operator(self, node: ast.AST) -> bool:
        return any(self._is_operator(part) for part in ast.walk(node))

    def _count(self, node: ast.AST) -> int:
        return sum(self._is_operator(part) for part in ast.walk(node))

    def _targets_of_calls(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Assign) and self._calls_operator(node.value):
            yield from (
                part.id
                for target in node.targets
                for part in ast.walk(target)
                if isinstance(part, ast.Name)
            )

    # -- random numbers ----------------------------------------------------------------------------

    def _random(self, node: ast.AST) -> bool:
        function = next(
            part
            for part in self.reference.body
            if isinstance(part, ast.FunctionDef) and part.name == self.operator
        )
        constants = {
            name: value.expression
            for name, value in self.known.items()
            if value.kind == "plain" and value.expression
        }
        return any(
            draws(function, part, constants)
            for part in ast.walk(node)
            if isinstance(part, ast.Call) and self._is_operator(part)
        )

    # -- writing -----------------------------------------------------------------------------------

    def _test_function(self) -> ast.FunctionDef:
        functions = [
            node
            for node in self.tests.body
            if isinstance(node, ast.FunctionDef) and self._calls_operator(node)
        ]
        if len(functions) != 1 or functions[0].args.args:
            raise Refused(
                f"holds {len(functions)} test functions without arguments that call"
                f" {self.operator}, not one"
            )
        return functions[0]

    def _written(self, reference: str, name: str) -> Adapted:
        forward = [on_place(statement) for statement in self.forward]
        placed = any(a is not b for a, b in zip(forward, self.forward, strict=True))
        used = {
            node.id
            for statement in self.forward
            for node in ast.walk(statement)
            if isinstance(node, ast.Name)
        }
        names = [made for made, _ in self.made if made in used]
        needed: list[tuple[str, ast.expr]] = []
        for made, expression in reversed(self.made):
            if made in used:
                used |= {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
                needed.append((made, expression))
        needed.reverse()
        imports = [
            node
            for node in self.tests.body
            if isinstance(node, ast.Import | ast.ImportFrom) and _is_kept(node)
        ]
        told = dict.fromkeys(["import torch", *(text_of(node) for node in imports)])
        place = ["    def __init__(self):", "        super().__init__()"]
        place += ['        self.register_buffer("place", torch.zeros(()), persistent=False)', ""]
        lines = [
            (
                f"# TritonBench-T's {' '.join(name.split())}: one forward call makes its test"
                " calls, in their order"
            ),
            reference,
            "",
            *(line for line in told if line not in reference.splitlines()),
            f"OPERATOR = {self.operator!r}",
            "",
            "",
            "class Model(torch.nn.Module):",
            *(place if placed else ()),
            f"    def forward({', '.join(['self', *names])}):",
            "        results = {}",
            *(f"        {text_of(statement)}" for statement in forward),
            "        return results",
            "",
            "",
            "def get_inputs():",
            *(f"    {made} = {text_of(expression)}" for made, expression in needed),
            f"    return [{', '.join(names)}]",
            "",
            "",
            "def get_init_inputs():",
            "    return []",
            "",
        ]
        drawn = any(
            last_name(part.func) in ALWAYS_RANDOM
            for _, made in needed
            for part in ast.walk(made)
            if isinstance(part, ast.Call)
        )
        return Adapted(self.operator, "\n".join(lines), self.calls, tuple(self.left_out), not drawn)


def _operator(reference: ast.Module, name: str) -> str:
    functions = [node.name for node in reference.body if isinstance(node, ast.FunctionDef)]
    last = name.rpartition(".")[2]
    if last in functions:
        return last
    if len(functions) != 1:
        raise Refused(f"defines {len(functions)} functions, none of them {last}")
    return functions[0]


def _parsed(text: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Refused(f"is not Python: {str(error) or type(error).__name__}") from None


def _is_idle(node: ast.expr) -> bool:
    """Documentation, a print, or the seed of a generator: a call that uses one draws random
    numbers."""
    return isinstance(node, ast.Constant) or (
        isinstance(node, ast.Call) and last_name(node.func) in ("print", "manual_seed")
    )


def _is_kept(node: ast.Import | ast.ImportFrom) -> bool:
    names = (
        [node.module or ""]
        if isinstance(node, ast.ImportFrom)
        else [alias.name for alias in node.names]
    )
    return all(name.split(".")[0] in IMPORTED for name in names)
