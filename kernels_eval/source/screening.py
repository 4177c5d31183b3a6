"""Static checks on candidate source, Python as a syntax tree and C++ or CUDA as tokens, before
anything runs. Rejects only what no honest kernel needs and the text makes certain."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from kernels_eval.config import MOST_FLAGS, MOST_SOURCE_LETTERS
from kernels_eval.records import Reason
from kernels_eval.source.lexer import blank
from kernels_eval.source.syntax import UNPARSABLE, name_path, parse_source

FORBIDDEN_MODULES = frozenset(
    """subprocess socket ctypes gc multiprocessing signal pty ptrace resource urllib
    requests http ftplib asyncio _thread pickle marshal importlib.machinery cffi
    numpy.ctypeslib""".split()
)
REACHED_MODULES = frozenset("subprocess socket ctypes gc pickle _thread".split())
"""Forbidden modules whose names torch does not use itself: reached through torch, they are
meant.
"""
HARMLESS_PARTS = {"multiprocessing": {"cpu_count"}, "gc": {"collect"}}
"""What honest code uses of forbidden modules; a module used for nothing else may be imported."""
FORBIDDEN_CALLS = frozenset(
    """os.system os.popen os.fork os.kill os._exit os.exec os.execv os.execve os.spawnl
    os.spawnv os.abort sys._getframe sys._current_frames
    sys.settrace sys.setprofile inspect.currentframe inspect.stack inspect.trace
    inspect.getclosurevars""".split()
)
REMOVALS = ("os.remove", "os.unlink", "os.rmdir")
LEADING_OUT = frozenset(
    "tb_frame gi_frame cr_frame ag_frame __closure__ cell_contents __globals__".split()
)
"""Attributes of tracebacks, generators and functions that lead to the verifier's own code."""
UNRECORDED = frozenset(
    """redispatch _op_dk _get_operation_overload _enable_record_function
    _add_execution_trace_observer _remove_execution_trace_observer
    _enable_execution_trace_observer _disable_execution_trace_observer""".split()
)
"""Names that call an operator of torch without a record of it."""
IMPORTS = ("__import__", "import_module", "importlib.import_module")
PATCHED_ROOTS = {"torch", "time", "builtins", "sys"}
# Settings of torch that honest code writes by assignment.
HONEST_SETTINGS = tuple(
    """torch.backends. torch._dynamo.config. torch._inductor.config. torch._functorch.config.
    torch.utils.cpp_extension.CUDA_HOME torch.utils.cpp_extension.COMMON_NVCC_FLAGS
    sys.dont_write_bytecode sys.stdout sys.stderr""".split()
)


@dataclass(frozen=True)
class Screening:
    """`reason` is None where nothing certain was found; `flags` names what was noticed."""

    reason: Reason | None = None
    detail: str = ""
    flags: tuple[str, ...] = ()


def screen(code: str) -> Screening:
    """Screen Python source. Rejects only what is certain, with its line."""
    if len(code) > MOST_SOURCE_LETTERS:
        detail = f"a source of {len(code):,} characters; the limit is {MOST_SOURCE_LETTERS:,}"
        return Screening(Reason.SYNTAX_ERROR, detail)
    try:
        tree = parse_source(code)
    except UNPARSABLE as error:
        line = getattr(error, "lineno", None)
        said = getattr(error, "msg", str(error)) or "nested too deep for Python"
        detail = f"line {line}: {said}" if line else said
        return Screening(Reason.SYNTAX_ERROR, detail)
    nodes = list(_imported(tree))
    reader = _Reader(_harmless(nodes), PATCHED_ROOTS - _own_names(nodes))
    for node in nodes:
        reader.read(node)
    _, reason, detail = min(reader.found, default=(0, None, ""), key=lambda found: found[0])
    return Screening(reason, detail)


class _Reader:
    def __init__(self, harmless: set[str], roots: set[str]) -> None:
        """`harmless`: forbidden modules that are used harmlessly here; `roots`: module names that
        must not be patched."""
        self.harmless, self.roots = harmless, roots
        self.found: list[tuple[int, Reason, str]] = []

    def read(self, node: ast.AST) -> None:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    if alias.name not in self.harmless:
                        self._module(alias.name, node)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                self._import_from(module, names, node)
            case ast.Attribute():
                self._attribute(node)
            case ast.Subscript(slice=ast.Constant(value=str(name))):
                if _dotted(node.value) == "sys.modules":
                    self._module(name, node)
            case ast.Constant(value=str(name)) if name in UNRECORDED:
                self._reject(Reason.FORBIDDEN_CALL, node, f"names {name}")
            case ast.Call():
                self._call(node)
            case ast.Assign(targets=targets):
                for target in targets:
                    self._target(target)
            case ast.AugAssign(target=target):
                self._target(target)

    def _reject(self, reason: Reason, node: ast.stmt | ast.expr, what: str) -> None:
        self.found.append((node.lineno, reason, f"line {node.lineno}: {what}"))

    def _module(self, name: str, node: ast.stmt | ast.expr) -> None:
        root = name.split(".")[0]
        if root == "kernels_eval":
            self._reject(Reason.HARNESS_TAMPERING, node, f"imports {name}")
        elif {name, root} & FORBIDDEN_MODULES:
            self._reject(Reason.FORBIDDEN_CALL, node, f"imports {name}")

    def _import_from(self, module: str, names: list[ast.alias], node: ast.ImportFrom) -> None:
        if not {alias.name for alias in names} <= HARMLESS_PARTS.get(module, set()):
            self._module(module, node)
        for alias in names:
            reached = module.startswith("torch") and alias.name in REACHED_MODULES
            hidden = alias.name in LEADING_OUT | UNRECORDED
            if reached or hidden or f"{module}.{alias.name}" in FORBIDDEN_CALLS:
                self._reject(Reason.FORBIDDEN_CALL, node, f"imports {module}.{alias.name}")

    def _attribute(self, node: ast.Attribute) -> None:
        path = _dotted(node)
        through = path.startswith("torch.") or "ctypeslib" in path.split(".")
        if through and node.attr in REACHED_MODULES:
            self._reject(Reason.FORBIDDEN_CALL, node, f"reaches {path}")
        elif node.attr in LEADING_OUT | UNRECORDED:
            self._reject(Reason.FORBIDDEN_CALL, node, f"reads {node.attr}")

    def _call(self, node: ast.Call) -> None:
        name = _dotted(node.func)
        match node.args:
            case [ast.Constant(value=str(imported)), *_] if name in IMPORTS:
                self._module(imported, node)
            case [_, ast.Constant(value=str(read)), *_] if name == "getattr":
                if read in LEADING_OUT | UNRECORDED:
                    self._reject(Reason.FORBIDDEN_CALL, node, f"reads {read}")
        if ".".join(name.split(".")[-2:]) in FORBIDDEN_CALLS:  # torch's modules hold some, too
            self._reject(Reason.FORBIDDEN_CALL, node, f"calls {name}")
        elif name in REMOVALS and node.args and _is_not_its_own(node.args[0]):
            what = f"calls {name} for a file that it has not made; only its own may be removed"
            self._reject(Reason.FORBIDDEN_CALL, node, what)
        elif name == "setattr" and node.args and self._patched(_dotted(node.args[0])):
            what = f"sets an attribute of {_dotted(node.args[0])}"
            self._reject(Reason.HARNESS_TAMPERING, node, what)

    def _target(self, target: ast.expr) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = _dotted(node)
                if self._patched(name) and not name.startswith(HONEST_SETTINGS):
                    self._reject(Reason.HARNESS_TAMPERING, node, f"assigns to {name}")

    def _patched(self, name: str) -> bool:
        return name.split(".")[0] in self.roots


def _harmless(nodes: list[ast.AST]) -> set[str]:
    imports = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    bound = {(each.asname or each.name, each.name) for each in imports}
    names, named, harmless = dict(bound), Counter[str](), Counter[str]()
    for node in nodes:
        match node:
            case ast.Name(id=name):
                named[names.get(name, "")] += 1
            case ast.Attribute(value=ast.Name(id=name), attr=part) if part in HARMLESS_PARTS.get(
                names.get(name, ""), ()
            ):
                harmless[names[name]] += 1
    alone = len(names) == len(bound)  # no name stands for two modules
    return {name for name, count in harmless.items() if alone and count == named[name]}


def _own_names(nodes: list[ast.AST]) -> set[str]:
    """Names bound as arguments or by calls of the source's own classes, never to a module."""
    classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    own: set[str] = set()
    modules: set[str] = set()
    for node in nodes:
        match node:
            case ast.arg(arg=name):
                own.add(name)
            case ast.Assign(value=ast.Call(func=ast.Name(id=made))) if made in classes:
                own.update(each.id for each in node.targets if isinstance(each, ast.Name))
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                modules.update((each.asname or each.name).split(".")[0] for each in names)
            case ast.Constant(value=str(name)):  # of `__import__`, `sys.modules`, say
                modules.add(name)
    return set() if "*" in modules else own - modules


def _imported(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes that an import may run: no `if __name__ == "__main__":` bodies, unless it sets that
    name.
    """
    named = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    renamed = any(node.id == "__name__" and isinstance(node.ctx, ast.Store) for node in named)
    yield tree
    for node in tree.body:
        match node:
            case ast.If(
                test=ast.Compare(
                    left=ast.Name("__name__"),
                    ops=[ast.Eq()],
                    comparators=[ast.Constant("__main__")],
                )
            ) if not renamed:
                kept = node.orelse
            case _:
                kept = [node]
        for each in kept:
            yield from ast.walk(each)


def _is_not_its_own(path: ast.expr) -> bool:
    """Whether this certainly names a file outside the working directory and /tmp, or the module."""
    match path:
        case ast.Constant(value=str(name)):
            place = PurePosixPath(name)
            outside = place.is_absolute() and not place.is_relative_to("/tmp")
            return outside or ".." in place.parts or place.name == "candidate.py"
    return isinstance(path, ast.Name) and path.id == "__file__"


def _dotted(node: ast.AST) -> str:
    return ".".join(name_path(node))


# Functions of libc that end, leave, watch or talk to the outside of a process. As a call of a free
# function, they have no other meaning.
FORBIDDEN_FUNCTIONS = frozenset(
    """system popen fork vfork execl execlp execle execv execvp execve execvpe
    posix_spawn posix_spawnp ptrace process_vm_readv process_vm_writev dlopen dlsym
    dlvsym dlmopen dlinfo dl_iterate_phdr setenv putenv unsetenv getppid kill killpg
    tgkill syscall _exit _Exit quick_exit daemon unlink rmdir chmod chown mknod
    mount umount inotify_init io_uring_setup memfd_create shm_open mprotect prctl""".split()
)
# Names that are common words as well: forbidden only where their header is included.
WITH_HEADER = {
    "sys/socket.h": ("socket", "connect", "bind", "listen", "accept", "send", "recv", "sendto"),
    "netdb.h": ("getaddrinfo",),
}
# Named at all: Python inside a native source, which nothing reads, and tables of the loader.
UNNEEDED = re.compile(
    r"\b(?:PyRun_\w+|PyImport_\w+|Py_CompileString\w*|PyEval_(?:Eval\w*|GetBuiltins)"
    r"|PyMarshal_\w+|getauxval|dlv?sym\b|dlm?open\b|dl_iterate_phdr"
    r"|(?:py|pybind11)\s*::\s*(?:exec|eval|eval_file)\b|_r_debug)"
)
# The same by way of pybind11 or of a dictionary: modules by their names, which are literals.
UNNEEDED_MODULES = re.compile(
    r"\bmodule_?\s*::\s*import\s*\(\s*\"(?:builtins|sys|os|ctypes|gc|inspect|importlib|subprocess"
    r"|marshal|kernels_eval)\b|\"(?:builtins|__builtins__|__import__)\""
)
UNNEEDED_HEADERS = frozenset(("link.h", "sys/auxv.h"))
FLAGGED_FUNCTIONS = frozenset(
    "fopen open ifstream ofstream getenv pthread_create signal sigaction mmap exit abort".split()
)
FLAGGED_NAMES = {
    "std::thread": "threads",
    "std::async": "threads",
    "std::jthread": "threads",
    "cudaStreamCreate": "own_stream",
    "cudaStreamCreateWithFlags": "own_stream",
    "cudaGraphLaunch": "cuda_graph",
    "cudaDeviceSetLimit": "device_limit",
    "cudaDeviceReset": "device_reset",
    "cudaHostAlloc": "host_memory",
}
# Every pattern here takes time that grows with the text only: none looks for the end of something
# again and again where there is none.
CALL = re.compile(r"(?<![\w.:])(?<!->)(?:(?:std\s*)?::\s*)?\b([A-Za-z_]\w*)\s*\(")
BODY = re.compile(r"[^;{}()]*\)\s*(?:(?:const|noexcept)\s*)*(?:->[\w\s:<>,*&]{1,80})?\{")
LAMBDA = re.compile(r"\bauto\b[\s&]*+(\w++)\s*+=\s*+\[")
TYPE = re.compile(r"\b(?:struct|class|using|typename)\s++(\w++)")
VARIABLE = re.compile(r"(?:\b(\w++)[\s&*]++|>[\s&*]*+)(?:\(\s*+\*\s*+)?(\w++)\s*+[,;={)]")
OF_TEMPLATE = re.compile(r"[;{}]\s*+(?:const\s+)?(?:\w+::)*\w+<[\w\s:,*&<]++>+$")
"""A statement that begins with a type such as std::vector<float>."""
NO_TYPES = frozenset("return else do case throw co_return and or not goto".split())
OWN_OF_TORCH = re.compile(
    r"(?:\bTORCH_LIBRARY\w*\s*\(|#\s*define[\s\\]+\w+)[\s\\]*+(?:aten|prims?)\b"
)
"""Registers operators among torch's own, replaces their code, or hides that behind a macro."""
INCLUDE = re.compile(r"""^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]""", re.MULTILINE)


def screen_native(text: str) -> Screening:
    if len(text) > MOST_SOURCE_LETTERS:
        detail = f"native sources of {len(text):,} characters; the limit is {MOST_SOURCE_LETTERS:,}"
        return Screening(Reason.BUILD_FAILED, detail)
    with_literals = blank(text, literals=False)
    headers, code = set(INCLUDE.findall(with_literals)), blank(text)
    forbidden = set(FORBIDDEN_FUNCTIONS)
    for header, names in WITH_HEADER.items():
        forbidden.update(names if header in headers else ())
    flags = {
        f"native:{flag}"
        for name, flag in FLAGGED_NAMES.items()
        if re.search(rf"\b{re.escape(name)}\b", code)
    }
    calls = [match for match in CALL.finditer(code) if match[1] in forbidden | FLAGGED_FUNCTIONS]
    flags |= {f"native:{match[1]}" for match in calls if match[1] in FLAGGED_FUNCTIONS}
    found = Screening(flags=tuple(sorted(flags)[:MOST_FLAGS]))
    own = {match[1] for match in calls if _is_defined(code, match)}
    own.update(LAMBDA.findall(code), TYPE.findall(code), _variables(code))
    for match in calls:
        name = match[1]
        if name in forbidden and name not in own and not _is_declared(code, match.start()):
            line = text.count("\n", 0, match.start()) + 1
            detail = f"native source, line {line}: calls {name}"
            return replace(found, reason=Reason.FORBIDDEN_CALL, detail=detail)
    if named := UNNEEDED.search(code) or UNNEEDED_MODULES.search(with_literals):
        line = text.count("\n", 0, named.start()) + 1
        detail = f"native source, line {line}: names {named[0]}"
        return replace(found, reason=Reason.FORBIDDEN_CALL, detail=detail)
    if unneeded := sorted(headers & UNNEEDED_HEADERS):
        detail = f"native source: includes {unneeded[0]}"
        return replace(found, reason=Reason.FORBIDDEN_CALL, detail=detail)
    if tampering := OWN_OF_TORCH.search(code):
        line = text.count("\n", 0, tampering.start()) + 1
        detail = f"native source, line {line}: registers operators in a namespace of torch"
        return replace(found, reason=Reason.HARNESS_TAMPERING, detail=detail)
    return found


def _is_defined(code: str, match: re.Match[str]) -> bool:
    before = code[max(0, match.start(1) - 80) : match.start(1)]
    kind = before.rstrip(" \t\r\n*&")
    typed = kind != before and (kind[-1:].isalnum() or kind[-1:] in ("_", ">"))
    return typed and BODY.match(code, match.end()) is not None


def _variables(code: str) -> Iterator[str]:
    for match in VARIABLE.finditer(code):
        if match[1] not in NO_TYPES:
            yield match[2]


def _is_declared(code: str, position: int) -> bool:
    before = code[max(0, position - 80) : position].rstrip(" \t")
    word = re.search(r"(\w+)[*&]*$", before)
    if word is None:
        return OF_TEMPLATE.search(before) is not None
    return word.group(1) not in NO_TYPES
