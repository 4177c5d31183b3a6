"""What a task's constructor is called with, put in its places.

Guarantees: static, nothing is executed; `[4, 8]`, `[[], {"width": 4, "depth": 8}]` and defaults
lead to the same class; an attribute that only ever holds one constant is that constant; a condition
that constants decide is its branch. Numbers that come from the constructor's arguments are marked
(`kind` of their node). Does not follow loops, dictionaries that are filled step by step,
or arguments that are objects other than KernelBook's `_mock_config`; then the program stays as it
was and its `get_init_inputs` is compared as text.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from tasks.decontamination.program import (
    Function,
    Program,
    attributes_stored,
    bound_names,
    parameters_of,
)

ARGUMENT = "argument"
"""`kind` of a constant that was an argument of the constructor."""
CONFIGS = ("_mock_config", "SimpleNamespace", "Namespace", "dict")
MAX_NODES = 500  # of an expression that is put in several places
COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}

Constants = Mapping[str, ast.expr]
Given = tuple[Sequence[ast.expr], Constants]
"""Positional and keyword arguments of a call."""


def specialise(program: Program) -> None:
    """Write the constructor's arguments into the class that does the work, in place, and its
    constant attributes where they are read. Where the arguments cannot be read, `constructed`
    stays False and only the attributes are written."""
    chain = program.chain
    values = _constructed(program, chain)
    init = program.functions.get(f"{chain[-1]}.__init__")
    attributes = _class_constants(program, chain[-1])
    if init:
        if values is not None:
            owner = [*init.args.posonlyargs, *init.args.args][:1]
            init.args = ast.arguments([], owner, None, [], [], None, [])
        places = _Places(program, init, dict(values or {}), attributes)
        init.body = places.run(init.body)
    for unit, function in program.functions.items():
        if unit.startswith(f"{chain[-1]}.") and function is not init:
            places = _Places(program, function, {}, attributes)
            function.body = places.blocks(function.body)
    program.constructed = values is not None


def _constructed(program: Program, chain: Sequence[str]) -> Constants | None:
    """The last class's parameters and what they are given, through the wrappers before it."""
    given = _given(program)
    values: Constants | None = {} if given == ([], {}) else None
    for name in chain:
        init = program.functions.get(f"{name}.__init__")
        if given is None or init is None:
            continue
        if init.args.vararg and name != chain[-1]:
            continue  # a wrapper hands over what it gets
        values = _bound(init.args, given)
        if values is None:
            return None
        given = (list(values.values()), {})
    return None if given is None else values


def _given(program: Program) -> Given | None:
    """What get_init_inputs returns: `[a, b]`, or KernelBook's `[[a], {"b": b}]`."""
    function = program.functions.get("get_init_inputs")
    if function is None:
        return [], {}
    result = returned(program, function)
    match result:
        case ast.List([args, second]) | ast.Tuple([args, second]) if (
            isinstance(args, ast.List | ast.Tuple) and (named := _keywords(second)) is not None
        ):
            given, names = args.elts, named
        case ast.List(elts) | ast.Tuple(elts):
            given, names = elts, {}
        case _:
            return None
    if any(isinstance(each, ast.Starred) for each in given):
        return None

    def placed(node: ast.expr) -> ast.expr:
        return _marked(_constant(program, node, frozenset()) or node)

    return [*map(placed, given)], {name: placed(each) for name, each in names.items()}


def returned(program: Program, function: Function) -> ast.expr | None:
    """What a function without branches returns, its variables in their places."""
    places = _Places(program, function, {}, {})
    for statement in function.body:
        match statement:
            case ast.Expr(ast.Constant()):
                continue
            case ast.Assign([ast.Name(name)], value):
                places.names[name] = places.visit(value)
                if _large(places.names[name]):
                    return None
            case ast.Return(ast.expr() as value):
                result = places.visit(value)
                while isinstance(result, ast.Name) and result.id in program.variables:
                    result = program.variables[result.id]
                return result if isinstance(result, ast.expr) else None
            case _:
                return None
    return None


def _large(node: ast.AST) -> bool:
    return next(islice(ast.walk(node), MAX_NODES, None), None) is not None


def _keywords(node: ast.expr) -> dict[str, ast.expr] | None:
    """Names and values of `{"a": 1}`, `dict(a=1)` and `_mock_config(a=1)`."""
    match node:
        case ast.Dict(keys, values):
            names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
            if all(isinstance(name, str) for name in names):
                return {str(name): value for name, value in zip(names, values, strict=True)}
        case ast.Call(ast.Name(name) | ast.Attribute(attr=name), [], keywords) if name in CONFIGS:
            return {word.arg or "": word.value for word in keywords}
    return None


def _bound(declared: ast.arguments, given: Given) -> dict[str, ast.expr] | None:
    """Parameters without `self` and their values; None where the call does not fit."""
    args, words = given
    positional = [arg.arg for arg in (*declared.posonlyargs, *declared.args)][1:]
    keyword_only = [arg.arg for arg in declared.kwonlyargs]
    defaults = dict(zip(positional[::-1], declared.defaults[::-1], strict=False))
    pairs = zip(keyword_only, declared.kw_defaults, strict=True)
    defaults |= {name: value for name, value in pairs if value}
    names = [*positional, *keyword_only]
    values = {name: _marked(value) for name, value in defaults.items()}
    values |= dict(zip(positional, args, strict=False)) | dict(words)
    if len(args) > len(positional) or set(values) != set(names):
        return None
    return {name: values[name] for name in names}


def _marked(node: ast.expr) -> ast.expr:
    """The expression with its constants marked as arguments."""
    for each in ast.walk(node):
        if isinstance(each, ast.Constant):
            each.kind = ARGUMENT
    return node


def is_argument(node: ast.expr) -> bool:
    """Whether a number of this expression was an argument of the constructor."""
    return any(isinstance(each, ast.Constant) and each.kind == ARGUMENT for each in ast.walk(node))


def _constant(
    program: Program, node: ast.expr, bound: frozenset[str], kind: str | None = None
) -> ast.expr | None:
    """A node for the constant that an expression is; None for anything else."""
    if _large(node):
        return None
    kind = kind or (ARGUMENT if is_argument(node) else None)
    match node:
        case ast.Constant():
            return ast.Constant(node.value, kind)
        case ast.List(elts) | ast.Tuple(elts):
            items = [_constant(program, each, bound, kind) for each in elts]
            whole = [each for each in items if each is not None]
            return ast.Tuple(whole, ast.Load()) if len(whole) == len(items) else None
        case ast.Call() | ast.Dict() if _keywords(node) is not None:
            return node
    value = program.fold(node, bound)
    return None if value is None else _node(value, kind)


def _node(value: Any, kind: str | None) -> ast.expr:
    if isinstance(value, tuple):
        return ast.Tuple([_node(each, kind) for each in value], ast.Load())
    return ast.Constant(value, kind)


def _class_constants(program: Program, name: str) -> dict[str, ast.expr]:
    """Constants of the class's body that no method changes."""
    node, found = program.classes.get(name), dict[str, ast.expr]()
    for statement in node.body if node else ():
        match statement:
            case ast.Assign([ast.Name(target)], value) if not program.stored[target]:
                if constant := _constant(program, value, frozenset()):
                    found[target] = constant
    return found


class _Places(ast.NodeTransformer):
    """Puts constants in the places of one function's names and of its object's attributes."""

    def __init__(
        self,
        program: Program,
        function: Function,
        names: dict[str, ast.expr],
        attributes: dict[str, ast.expr],
    ) -> None:
        self.program, self.names, self.attributes = program, names, attributes
        self.bound = bound_names(function)
        self.self_name = next(iter(parameters_of(function)), "")

    def run(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """A constructor's statements in order, without those that only name constants."""
        out: list[ast.stmt] = []
        waiting = list(body)
        while waiting:
            statement = waiting.pop(0)
            if isinstance(statement, ast.If) and (chosen := self._branch(statement)) is not None:
                waiting = [*chosen, *waiting]
                continue
            statement, constant = self._assigned(statement)
            match statement:
                case ast.Assign([ast.Name(name)]) if constant:
                    self.names[name] = constant
                case ast.Assign([ast.Attribute(ast.Name(self.self_name), name)]) if (
                    constant and self.program.stored[name] == 1
                ):
                    self.attributes[name] = constant
                case _:
                    out += [*self._settled(statement), statement]
        return out

    def _assigned(self, statement: ast.stmt) -> tuple[ast.stmt, ast.expr | None]:
        """The statement as a plain assignment with constants in their places, and the constant that
        it assigns."""
        match statement:
            case ast.AnnAssign(target, value=ast.expr() as value):
                statement = ast.Assign([target], value)
        if not isinstance(statement, ast.Assign):
            return statement, None
        statement.value = self.visit(statement.value)
        return statement, _constant(self.program, statement.value, self.bound)

    def _settled(self, statement: ast.stmt) -> list[ast.stmt]:
        """Assign the constants that a statement may change, which are no constants from here on,
        and put the others in their places."""
        changed = bound_names(statement) & self.names.keys() if self.names else ()
        out: list[ast.stmt] = []
        for name in sorted(changed):
            value = self.names.pop(name)
            if not isinstance(statement, ast.Assign):
                out.append(ast.Assign([ast.Name(name, ast.Store())], value))
        self.visit(statement)
        return out

    def blocks(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Statements with constants in their places."""
        out: list[ast.stmt] = []
        for statement in body:
            done = self.visit(statement)
            out += done if isinstance(done, list) else [done]
            if isinstance(out[-1], ast.Return):
                break
        return out

    def _branch(self, node: ast.If) -> list[ast.stmt] | None:
        test = self.visit(node.test)
        node.test = test
        truth = self._truth(test)
        if truth is None:
            return None
        taken, left = (node.body, node.orelse) if truth else (node.orelse, node.body)
        self.program.stored.subtract(attributes_stored(left))
        return taken

    def _truth(self, test: ast.expr) -> bool | None:
        match test:
            case ast.Constant(value):
                return bool(value)
            case ast.UnaryOp(ast.Not(), operand):
                truth = self._truth(operand)
                return None if truth is None else not truth
            case ast.Compare(ast.Constant(left), [op], [ast.Constant(right)]):
                try:
                    return COMPARED[type(op)](left, right)
                except (KeyError, TypeError):
                    return None
            case ast.BoolOp(op, values):
                truths = [self._truth(each) for each in values]
                decisive = isinstance(op, ast.Or)
                if decisive in truths:
                    return decisive
                return None if None in truths else not decisive
        return None

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        chosen = self._branch(node)
        if chosen is None:
            return self.generic_visit(node)
        return self.blocks(chosen) or [ast.Pass()]

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        truth = self._truth(node.test)
        return node if truth is None else node.body if truth else node.orelse

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        truth = self._truth(node) if isinstance(node.op, ast.Not) else None
        return node if truth is None else ast.Constant(truth)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self.names.get(node.id, node) if isinstance(node.ctx, ast.Load) else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load):
            if isinstance(node.value, ast.Name) and node.value.id == self.self_name:
                return self.attributes.get(node.attr, node)
            return (_keywords(node.value) or {}).get(node.attr, node)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        match node.value, self.program.fold(node.slice, self.bound):
            case ast.Tuple(elts), int(index) if -len(elts) <= index < len(elts):
                return elts[index]
        match node.slice:
            case ast.Constant(str(name)) if isinstance(node.ctx, ast.Load):
                return (_keywords(node.value) or {}).get(name, node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Name("len"), [ast.Tuple(elts)], []):
                return ast.Constant(len(elts))
        return node
