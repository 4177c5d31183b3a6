"""Landlock: restricts the files a process and its descendants may touch.

After `Ruleset.restrict` only allowed paths can be opened or changed (stat still works); no TCP with
ABI 4; no outside abstract Unix sockets or signals with ABI 6. Not covered: open descriptors, path
sockets, UDP, memory.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kernels_eval.sandbox import seccomp
from kernels_eval.sandbox.syscalls import PR_SET_NO_NEW_PRIVS, prctl, syscall

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every architecture
RULE_PATH_BENEATH = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
MAKE_DEVICES = 1 << 6 | 1 << 11  # character and block devices: never granted
READ = EXECUTE | READ_FILE | READ_DIR
EVERYTHING = (1 << 16) - 1
CHANGE = EVERYTHING & ~(EXECUTE | IOCTL_DEV | MAKE_DEVICES)
DEVICE = READ_FILE | WRITE_FILE | READ_DIR | IOCTL_DEV
ON_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
BIND_TCP, CONNECT_TCP = 1 << 0, 1 << 1
SCOPE_ABSTRACT_UNIX, SCOPE_SIGNAL = 1 << 0, 1 << 1

SYSTEM = "/usr /lib /lib32 /lib64 /libx32 /bin /sbin /nix/store /gnu/store".split()
ETC = (
    "ld.so.cache ld.so.conf ld.so.conf.d ld.so.preload localtime timezone alternatives"
    " ssl/openssl.cnf"
).split()
PLAIN_DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))


class _RulesetAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("fs", "net", "scoped"))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("access", ctypes.c_uint64), ("parent", ctypes.c_int32))


def abi() -> int:
    """This kernel's version; 0 where Landlock is absent or off."""
    try:
        return syscall(CREATE_RULESET, None, 0, 1, what="landlock")
    except OSError:
        return 0


class Ruleset:
    """Allowed paths, collected and then enforced. Needs `abi()` of at least 1."""

    def __init__(self) -> None:
        version = abi()
        unknown = ((2, REFER), (3, TRUNCATE), (5, IOCTL_DEV))
        self._handled = EVERYTHING & ~sum(right for known, right in unknown if version < known)
        attributes = _RulesetAttributes(
            fs=self._handled,
            net=BIND_TCP | CONNECT_TCP if version >= 4 else 0,
            scoped=SCOPE_ABSTRACT_UNIX | SCOPE_SIGNAL if version >= 6 else 0,
        )
        # An older kernel refuses fields that it does not know.
        size, given = 24 if version >= 6 else 16 if version >= 4 else 8, ctypes.byref(attributes)
        self.fd = syscall(CREATE_RULESET, given, size, 0, what="landlock_create_ruleset")

    def allow(self, access: int, paths: Iterable[str | os.PathLike[str]]) -> Ruleset:
        """Grant `access` to each path and what is below it; missing paths are skipped."""
        for path in paths:
            try:
                opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                granted = access & self._handled
                if not stat.S_ISDIR(os.fstat(opened).st_mode):
                    granted &= ON_FILES
                if granted:
                    rule = ctypes.byref(_PathBeneath(granted, opened))
                    syscall(ADD_RULE, self.fd, RULE_PATH_BENEATH, rule, 0, what="landlock_add_rule")
            finally:
                os.close(opened)
        return self

    def restrict(self) -> None:
        """Enforce. The process must have no_new_privs."""
        syscall(RESTRICT_SELF, self.fd, 0, what="landlock_restrict_self")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


def system_files() -> list[str]:
    """What any program needs to start (libraries, tools, the loader's files); nothing of users."""
    return [*SYSTEM, *(f"/etc/{name}" for name in ETC)]


def compiler_confinement(read: Sequence[Path], write: Sequence[Path]) -> Callable[[], None] | None:
    """A `preexec_fn` for compilers, or None without Landlock: they read `read` and the system's
    files, write below `write`, which must hold TMPDIR, and have no sockets.

    Opens all in the parent; only four system calls follow the fork. Keep the result while it is
    used: it holds a descriptor.
    """
    if not abi():
        return None
    rules = Ruleset().allow(READ, [*system_files(), "/sys/devices/system/cpu", *read])
    # of devices no other: one that never ends can be included
    rules.allow(READ | CHANGE, write).allow(READ_FILE | WRITE_FILE, ["/dev/null"])
    program = seccomp.program(processes=True, unix_sockets=False) if seccomp.supported() else None

    def confine() -> None:
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        rules.restrict()
        if program:
            seccomp.install(program)

    return confine
