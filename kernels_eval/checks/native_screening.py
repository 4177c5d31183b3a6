"""Static checks on the C++ and CUDA sources of a candidate, as tokens: comments, string contents
and words in them are no evidence.

Rejects only calls that no kernel needs and that are certain from the tokens: starting programs,
opening sockets, tracing processes, loading libraries, leaving the process. What an honest kernel
may have is a flag at most. Does not see what macros and pointers hide: the run does.
"""

from __future__ import annotations

import re

from kernels_eval.checks.screening import Screening
from kernels_eval.records import Reason

# Functions of libc that end, leave, watch or talk to the outside of a process. As a call of a free
# function, they have no other meaning.
FORBIDDEN_FUNCTIONS = frozenset(
    """system popen fork vfork execl execlp execle execv execvp execve execvpe
    posix_spawn posix_spawnp ptrace process_vm_readv process_vm_writev dlopen dlsym
    dlmopen setenv putenv unsetenv getppid kill killpg tgkill syscall _exit _Exit
    quick_exit daemon unlink rmdir chmod chown mknod mount umount inotify_init
    io_uring_setup memfd_create shm_open mprotect prctl""".split()
)
# Names that are common words as well: forbidden only where their header is included.
WITH_HEADER = {
    "sys/socket.h": ("socket", "connect", "bind", "listen", "accept", "send", "recv", "sendto"),
    "netdb.h": ("getaddrinfo",),
}
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
LIBRARIES = re.compile(
    r"\b(cublas|cudnn|cusparse|cusolver|cufft|curand|mkl|cblas|dnnl)[A-Z_]\w*(?=\s*\()"
)
COMMENT_OR_LITERAL = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(?P<d>[^()\\\s]{0,16})\(.*?\)(?P=d)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""",
    re.DOTALL,
)
NO_TYPES = frozenset("return else do case throw co_return and or not goto".split())
INCLUDE = re.compile(r"""^\s*#\s*include\s*[<"]([^>"]+)[>"]""", re.MULTILINE)


def screen_native(text: str) -> Screening:
    """Read the native sources of one extension. Returns a rejection only where it is certain, with
    the line it stands on."""
    headers = set(INCLUDE.findall(COMMENT_OR_LITERAL.sub(_blank_comment, text)))
    code = COMMENT_OR_LITERAL.sub(_blank, text)
    forbidden = set(FORBIDDEN_FUNCTIONS)
    for header, names in WITH_HEADER.items():
        forbidden.update(names if header in headers else ())
    flags = {
        f"native:{flag}"
        for name, flag in FLAGGED_NAMES.items()
        if re.search(rf"\b{re.escape(name)}\b", code)
    }
    flags |= {f"library:{match.group(0)}" for match in LIBRARIES.finditer(code)}
    own = _defined_functions(code)
    for match in re.finditer(r"(?<![\w.>:])(?:(std)?\s*::\s*)?\b([A-Za-z_]\w*)\s*\(", code):
        name = match.group(2)
        if name in FLAGGED_FUNCTIONS:
            flags.add(f"native:{name}")
        if name in forbidden and name not in own and not _is_declared(code, match.start()):
            line = text.count("\n", 0, match.start()) + 1
            detail = f"native source, line {line}: calls {name}"
            return Screening(Reason.FORBIDDEN_CALL, detail, tuple(sorted(flags)))
    return Screening(flags=tuple(sorted(flags)))


def _defined_functions(code: str) -> set[str]:
    """Names that the source itself defines as functions or members: those may be
    called."""
    return {
        match.group(1)
        for match in re.finditer(
            r"\b\w[\w:<>,&*\s]*[\s&*]([A-Za-z_]\w*)\s*\([^;{}()]*\)\s*(?:const\s*)?\{", code
        )
    }


def _is_declared(code: str, position: int) -> bool:
    """Is the name at this place preceded by a type, as in a declaration?"""
    before = code[max(0, position - 80) : position].rstrip(" \t")
    word = re.search(r"(\w+)[*&]*$", before)
    return word is not None and word.group(1) not in NO_TYPES


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group(0))


def _blank_comment(match: re.Match[str]) -> str:
    return _blank(match) if match.group(0).startswith("/") else match.group(0)
