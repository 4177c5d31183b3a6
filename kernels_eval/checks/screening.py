"""Static checks on candidate source, before anything runs.

Guarantees: rejects only what no honest kernel needs and what is certain from the text (a
subprocess, a socket, ctypes, the garbage collector, frame walking, patching torch or time);
everything else is at most a flag. Comments, docstrings and words are not evidence: Python is read
as a syntax tree. Does not guarantee that what passes is honest: the run finds that out.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from kernels_eval.checks.syntax import UNPARSABLE, name_path, parse_source
from kernels_eval.records import Reason

MOST_LETTERS = 1_000_000
"""Of a source that is looked at. Time to screen it grows with its length, and with nothing else."""

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
    if len(code) > MOST_LETTERS:
        detail = f"a source of {len(code):,} characters; the limit is {MOST_LETTERS:,}"
        return Screening(Reason.SYNTAX_ERROR, detail)
    try:
        tree = parse_source(code)
    except UNPARSABLE as error:
        line = getattr(error, "lineno", None)
        said = getattr(error, "msg", str(error)) or "nested too deep for Python"
        detail = f"line {line}: {said}" if line else said
        return Screening(Reason.SYNTAX_ERROR, detail)
    reader = _Reader()
    for node in ast.walk(tree):
        reader.read(node)
    if not reader.has_model:
        reader.flags.add("no_static_model_new")
    _, reason, detail = min(reader.found, default=(0, None, ""), key=lambda found: found[0])
    return Screening(reason, detail, tuple(sorted(reader.flags)))


class _Reader:
    def __init__(self) -> None:
        self.found: list[tuple[int, Reason, str]] = []
        self.flags: set[str] = set()
        self.has_model = False

    def read(self, node: ast.AST) -> None:
        """Look at one node, whatever is below it."""
        match node:
            case ast.Import(names=names):
                for alias in names:
                    self._module(alias.name, node)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                self._import_from(module, names, node)
            case ast.Call():
                self._call(node)
            case ast.Assign(targets=targets):
                for target in targets:
                    self._target(target)
            case ast.AugAssign(target=target):
                self._target(target)
            case ast.Try():
                self.flags.add("try")
            case ast.ClassDef(name="ModelNew"):
                self.has_model = True

    def _reject(self, reason: Reason, node: ast.stmt | ast.expr, what: str) -> None:
        self.found.append((node.lineno, reason, f"line {node.lineno}: {what}"))

    def _module(self, name: str, node: ast.stmt) -> None:
        root = name.split(".")[0]
        if root in HARNESS_MODULES:
            self._reject(Reason.HARNESS_TAMPERING, node, f"imports {name}")
        elif name in FORBIDDEN_MODULES or root in FORBIDDEN_MODULES:
            self._reject(Reason.FORBIDDEN_CALL, node, f"imports {name}")
        elif root in FLAGGED_MODULES:
            self.flags.add(f"imports:{root}")

    def _import_from(self, module: str, names: list[ast.alias], node: ast.ImportFrom) -> None:
        self._module(module, node)
        for alias in names:
            if f"{module}.{alias.name}" in FORBIDDEN_CALLS:
                self._reject(Reason.FORBIDDEN_CALL, node, f"imports {module}.{alias.name}")

    def _call(self, node: ast.Call) -> None:
        name = _dotted(node.func)
        if name in FORBIDDEN_CALLS:
            self._reject(Reason.FORBIDDEN_CALL, node, f"calls {name}")
        elif name == "setattr" and node.args and _patched(_dotted(node.args[0])):
            what = f"sets an attribute of {_dotted(node.args[0])}"
            self._reject(Reason.HARNESS_TAMPERING, node, what)
        elif name in ("exec", "eval", "__import__", "open", "compile"):
            self.flags.add(f"calls:{name}")

    def _target(self, target: ast.expr) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = _dotted(node)
                if _patched(name) and not name.startswith(HONEST_SETTINGS):
                    self._reject(Reason.HARNESS_TAMPERING, node, f"assigns to {name}")
                elif node.attr == "__class__":
                    self.flags.add("assigns:__class__")


def _dotted(node: ast.AST) -> str:
    return ".".join(name_path(node))


def _patched(name: str) -> bool:
    return bool(name) and name.split(".")[0] in PATCHED_ROOTS
