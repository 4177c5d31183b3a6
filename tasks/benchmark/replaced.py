"""Which operators of a reference a candidate replaced, read from its source, against where the
reference spends its time.

Guarantees: static (nothing of a candidate is executed) and bounded by the size of the source; an
operator counts as still called where anything that `ModelNew.forward` reaches in the same file
names it: a layer, a function or method of torch, an arithmetic sign, `torch::` or `at::` in C++
text. Does not guarantee what runs. Counted as kept: what is called in a branch never taken, and
arithmetic that is only done with Python's numbers. Counted as replaced: what C++ code calls as a
method of a tensor, what is fetched by a computed name, and what a candidate writes with other
operators of torch. Names are compared, not meanings: `linear` and `matmul` are one (a matrix
product), `softmax` and `exp` are not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping

from kernels_eval.source.syntax import UNPARSABLE, name_path, parse_source
from kernels_eval.tables import table_beside

ENTRY = "ModelNew"
BUILDERS = frozenset({"load_inline", "load"})
BUILT = [[name] for name in BUILDERS]
TORCH = frozenset({"torch", "F", "nn", "functional"})
HOLDERS = frozenset({"Sequential", "ModuleList", "ModuleDict", "Parameter", "ParameterList"})
NAMES = table_beside(__file__, "operators.toml")
SIGNS: dict[str, str] = NAMES["signs"]
SAME: dict[str, str] = {name: key for key, names in NAMES["same"].items() for name in names.split()}
QUIET = frozenset(NAMES["quiet"].split())
_NATIVE = re.compile(r"\b(?:torch|at)::(?:\w+::)*(\w+)\s*\(")
_NORM_DIMENSIONS = re.compile(r"(batch|instance)norm[123]d$")


def operator_key(name: str) -> str:
    """What operators are compared by: "nn.BatchNorm2d", "batch_norm" and "native_batch_norm" are
    one."""
    plain = name.rsplit(".", 1)[-1].strip("_").replace("_", "").lower().removeprefix("native")
    plain = _NORM_DIMENSIONS.sub(r"\1norm", plain)
    plain = plain.removesuffix("loss") or plain
    return SAME.get(plain, plain)


def called_operators(code: str) -> frozenset[str] | None:
    """Keys of every operator that `ModelNew.forward` still leaves to torch. None where the
    source does not parse or lacks the class."""
    try:
        reader = _Reader(parse_source(code))
        if ENTRY not in reader.classes:
            return None
        reader.method(ENTRY, "forward")
    except UNPARSABLE:
        return None
    return frozenset(reader.called | {operator_key(name) for name in _NATIVE.findall(reader.text)})


def replaced_share(shares: Mapping[str, float], called: Iterable[str]) -> tuple[float, bool]:
    """The share of the reference's time in operators that are not called any more, and whether the
    one that takes most is among them.

    `shares` are those of a reference by operator (tasks.workload), `called` comes from
    `called_operators`.
    """
    still = set(called)
    computing = {name: share for name, share in shares.items() if operator_key(name) not in QUIET}
    if not computing:
        return 0.0, False
    gone = {name: share for name, share in computing.items() if operator_key(name) not in still}
    return sum(gone.values()), max(computing, key=lambda name: computing[name]) in gone


class _Reader:
    """Follows calls from one method through the file, each function once."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
        methods = {part for node in nodes if isinstance(node, ast.ClassDef) for part in node.body}
        self.classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        self.functions = {
            node.name: node
            for node in nodes
            if isinstance(node, ast.FunctionDef) and node not in methods
        }
        self.imported = _imported(tree)
        self.extensions = _extensions(tree)
        constants = (node.value for node in nodes if isinstance(node, ast.Constant))
        self.text = "\n".join(value for value in constants if isinstance(value, str))
        self.called: set[str] = set()
        self._seen: set[ast.FunctionDef] = set()

    def method(self, owner: str, name: str) -> None:
        """Read one method of a class, looked up in its bases within the file."""
        node = self.classes.get(owner)
        for _ in range(16):
            if node is None:
                return
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name == name:
                    self._read(part, owner)
                    return
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            node = self.classes.get(bases[0]) if bases else None

    def _read(self, function: ast.FunctionDef, owner: str) -> None:
        if function in self._seen:
            return
        self._seen.add(function)
        layers = self._layers(owner)
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                self._call(node.func, owner, layers)
            elif isinstance(node, ast.BinOp | ast.AugAssign | ast.UnaryOp):
                if not _is_number(node):
                    self._sign(node.op)
            elif isinstance(node, ast.Compare):
                for sign in node.ops:
                    self._sign(sign)

    def _call(self, called: ast.expr, owner: str, layers: Mapping[str, ast.expr]) -> None:
        if isinstance(called, ast.Name):
            if called.id in self.functions:
                self._read(self.functions[called.id], "")
            elif called.id in self.imported:
                self._name(called.id)
            return
        if not isinstance(called, ast.Attribute):
            return
        path = name_path(called)
        if path[:1] == ["self"] and len(path) == 2:
            if path[1] in layers:
                self._layer(layers[path[1]])
            else:
                self.method(owner, path[1])
        elif path and (path[0] in self.extensions or ".".join(path[:2]) in self.extensions):
            return  # a function of the candidate's own library, whatever it is called
        elif path[:2] == ["torch", "ops"] and path[2:3] != ["aten"]:
            return
        elif path and path[0] in self.classes and path[-1] == "apply":
            self.method(path[0], "forward")
        else:
            self._name(called.attr)

    def _layers(self, owner: str) -> dict[str, ast.expr]:
        """What the class assigns to attributes of itself by calling something."""
        if owner not in self.classes:
            return {}
        return {
            path[1]: value
            for path, value in _assigned(self.classes[owner])
            if isinstance(value, ast.Call) and len(path) == 2 and path[0] == "self"
        }

    def _layer(self, made: ast.expr) -> None:
        """A layer that is called: those of torch by their names, also inside a Sequential; a class
        of the file by its `forward`."""
        for node in ast.walk(made):
            path = name_path(node.func) if isinstance(node, ast.Call) else []
            if path and path[0] in self.classes:
                self.method(path[0], "forward")
            elif path and path[0] in TORCH | self.imported and path[-1] not in HOLDERS:
                self._name(path[-1])

    def _sign(self, sign: ast.AST) -> None:
        if name := SIGNS.get(type(sign).__name__):
            self._name(name)

    def _name(self, name: str) -> None:
        self.called.add(operator_key(name))


def _is_number(node: ast.AST) -> bool:
    """Is it arithmetic on literals, such as the -1 of `dim=-1`?"""
    operands = [
        getattr(node, name)
        for name in ("left", "right", "operand", "target", "value")
        if hasattr(node, name)
    ]
    return all(isinstance(each, ast.Constant) for each in operands)


def _imported(tree: ast.Module) -> set[str]:
    """Names that come from torch itself, as in `from torch.nn.functional import gelu`."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch"
        for alias in node.names
    } - BUILDERS


def _extensions(tree: ast.Module) -> set[str]:
    """Names and attributes ("ext", "self.ext") that hold a library which the candidate builds, or
    another name of one."""
    found: set[str] = set()
    for _ in range(3):  # a name of a name of a library
        for path, value in _assigned(tree):
            built = isinstance(value, ast.Call) and name_path(value.func)[-1:] in BUILT
            if built or ".".join(name_path(value)) in found:
                found.add(".".join(path))
    return found


def _assigned(tree: ast.AST) -> Iterator[tuple[list[str], ast.expr]]:
    """Names and attributes that are assigned anywhere in it, and what to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if path := name_path(target):
                    yield path, node.value
