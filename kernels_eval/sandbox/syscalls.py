"""System calls that Python lacks, through libc; they raise OSError. `namespaces`, `landlock`,
`seccomp` and `confinement` decide what is called, and in which order.
"""

from __future__ import annotations

import ctypes
import os
import platform

MACHINE = platform.machine()
LIBC = ctypes.CDLL(None, use_errno=True)  # loaded once, before the first fork

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38


def checked(result: int, what: str) -> int:
    """`result`, or errno's OSError where it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: object, what: str = "syscall") -> int:
    """A raw system call. Integers are passed as machine words, ctypes objects unchanged."""
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return checked(LIBC.syscall(ctypes.c_long(number), *words), what)


def prctl(option: int, value: int = 0, third: object = 0) -> None:
    words = [ctypes.c_ulong(word) if isinstance(word, int) else word for word in (value, third)]
    zero = ctypes.c_ulong(0)
    checked(LIBC.prctl(ctypes.c_int(option), *words, zero, zero), f"prctl {option}")
