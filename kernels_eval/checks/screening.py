"""Static checks on candidate source, before anything runs.

Guarantees: rejects only what no honest kernel needs and what is certain from the text (a
subprocess, a socket, ctypes, the garbage collector, frame walking, patching torch or time);
everything else is at most a flag. Comments, docstrings and words are not evidence: Python is read
as a syntax tree. Does not guarantee that what passes is honest: the run finds that out.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from kernels_eval.records import Reason

FORBIDDEN_MODULES = frozenset(
    """subprocess socket ctypes gc multiprocessing signal pty ptrace resource urllib
    requests http ftplib asyncio _thread pickle marshal importlib.machinery cffi""".split()
)
FLAGGED_MODULES = frozenset(
    "threading inspect sys os time importlib concurrent tempfile shutil pathlib".split()
)
FORBIDDEN_CALLS = frozenset(
    """os.system os.popen os.fork os.kill os._exit os.exec os.execv os.execve os.spawnl
    os.spawnv os.remove os.unlink os.abort sys._getframe sys._current_frames
    sys.settrace sys.setprofile inspect.currentframe inspect.stack""".split()
)
HARNESS_MODULES = {"kernels_eval"}
PATCHED_ROOTS = {"torch", "time", "builtins", "sys"}
# Settings of torch that honest code writes by assignment.
HONEST_SETTINGS = ("torch.backends.",)


@dataclass(frozen=True)
class Screening:
    """`reason` is None where nothing certain was found; `flags` names what was noticed."""

    reason: Reason | None = None
    detail: str = ""
    flags: tuple[str, ...] = ()


def screen(code: str) -> Screening:
    """Read a candidate's Python source. Returns a rejection only where it is certain, with the line
    it stands on."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        detail = f"line {line}: {getattr(error, 'msg', error)}" if line else str(error)
        return Screening(Reason.SYNTAX_ERROR, detail)
    visitor = _Visitor()
    visitor.visit(tree)
    classes = (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    if "ModelNew" not in classes:
        visitor.flags.add("no_static_model_new")
    reason, detail = visitor.found[0] if visitor.found else (None, "")
    return Screening(reason, detail, tuple(sorted(visitor.flags)))


class _Visitor(ast.NodeVisitor):
    def __init__(self) -> None:
        self.found: list[tuple[Reason, str]] = []
        self.flags: set[str] = set()

    def _reject(self, reason: Reason, node: ast.stmt | ast.expr, what: str) -> None:
        self.found.append((reason, f"line {node.lineno}: {what}"))

    def _module(self, name: str, node: ast.stmt) -> None:
        root = name.split(".")[0]
        if root in HARNESS_MODULES:
            self._reject(Reason.HARNESS_TAMPERING, node, f"imports {name}")
        elif name in FORBIDDEN_MODULES or root in FORBIDDEN_MODULES:
            self._reject(Reason.FORBIDDEN_CALL, node, f"imports {name}")
        elif root in FLAGGED_MODULES:
            self.flags.add(f"imports:{root}")

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._module(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module and not node.level:
            self._module(node.module, node)
            for alias in node.names:
                if f"{node.module}.{alias.name}" in FORBIDDEN_CALLS:
                    self._reject(Reason.FORBIDDEN_CALL, node, f"imports {node.module}.{alias.name}")

    def visit_Call(self, node: ast.Call) -> None:
        name = _dotted(node.func)
        if name in FORBIDDEN_CALLS:
            self._reject(Reason.FORBIDDEN_CALL, node, f"calls {name}")
        elif name == "setattr" and node.args and _patched(_dotted(node.args[0])):
            what = f"sets an attribute of {_dotted(node.args[0])}"
            self._reject(Reason.HARNESS_TAMPERING, node, what)
        elif name in ("exec", "eval", "__import__", "open", "compile"):
            self.flags.add(f"calls:{name}")
        self.generic_visit(node)

    def _target(self, target: ast.expr) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = _dotted(node)
                if _patched(name) and not name.startswith(HONEST_SETTINGS):
                    self._reject(Reason.HARNESS_TAMPERING, node, f"assigns to {name}")
                elif node.attr == "__class__":
                    self.flags.add("assigns:__class__")

    def visit_Assign(self, node: ast.Assign | ast.AugAssign) -> None:
        for target in node.targets if isinstance(node, ast.Assign) else (node.target,):
            self._target(target)
        self.generic_visit(node)

    visit_AugAssign = visit_Assign

    def visit_Try(self, node: ast.Try) -> None:
        self.flags.add("try")
        self.generic_visit(node)


def _dotted(node: ast.AST) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _patched(name: str) -> bool:
    return bool(name) and name.split(".")[0] in PATCHED_ROOTS
