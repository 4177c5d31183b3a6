"""A system call filter for processes that run untrusted code.

`REFUSED` calls fail under every numbering of the processor, `IGNORED` ones do nothing; only
unconnected Unix sockets; no System V memory or queues, which no resident set counts; no new process
or program unless asked for.
Does not cover ioctl on devices, such as the GPU.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from kernels_eval.sandbox.syscalls import MACHINE, PR_SET_SECCOMP, prctl

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000

MACHINES = ("x86_64", "aarch64")
# A call's number on either machine, "-" where it has none there. Source: the kernel's
# arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
_TABLE = """
    ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272,
    perf_event_open 298 241, bpf 321 280, userfaultfd 323 282, mount 165 40, umount2 166 39,
    pivot_root 155 41, chroot 161 51, setns 308 268, unshare 272 97, sethostname 170 161,
    setdomainname 171 162, init_module 175 105, finit_module 313 273, delete_module 176 106,
    kexec_load 246 104, kexec_file_load 320 294, reboot 169 142, swapon 167 224, swapoff 168 225,
    add_key 248 217, request_key 249 218, keyctl 250 219, name_to_handle_at 303 264,
    open_by_handle_at 304 265, fanotify_init 300 262, acct 163 89, quotactl 179 60, syslog 103 116,
    iopl 172 -, ioperm 173 -, settimeofday 164 170, clock_settime 227 112, adjtimex 159 171,
    clock_adjtime 305 266, personality 135 92, lookup_dcookie 212 18, vhangup 153 58,
    socket 41 198, connect 42 203, prlimit64 302 261, kill 62 129, tkill 200 130, tgkill 234 131,
    rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, fork 57 -, vfork 58 -, clone 56 220,
    execve 59 221, execveat 322 281, pidfd_send_signal 424 424, io_uring_setup 425 425,
    io_uring_enter 426 426, io_uring_register 427 427, open_tree 428 428, move_mount 429 429,
    fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, clone3 435 435,
    pidfd_getfd 438 438, process_madvise 440 440, mount_setattr 442 442, quotactl_fd 443 443,
    process_mrelease 448 448, open_tree_attr 467 467, memfd_create 319 279, memfd_secret 447 447,
    shmget 29 194, msgget 68 186, semget 64 190, mq_open 240 180, mmap 9 222,
    sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118,
    sched_setattr 314 274, setpriority 141 140, ioprio_set 251 30
"""
NUMBERS: dict[str, dict[str, int]] = {
    name: {machine: int(n) for machine, n in zip(MACHINES, numbers, strict=True) if n != "-"}
    for name, *numbers in (entry.split() for entry in _TABLE.split(","))
}
"""Call numbers by machine."""

_CONDITIONAL = frozenset(
    """socket connect prlimit64 kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo
    pidfd_send_signal fork vfork clone clone3 execve execveat mmap""".split()
)
"""Calls that depend on their arguments, or on what the process may do."""
IGNORED = tuple(name for name in NUMBERS if name.startswith("sched_") or "prio" in name)
"""Calls that succeed without effect: where and when its threads run is the judge's to say, and
libgomp ends a process whose threads cannot be placed."""
REFUSED = tuple(name for name in NUMBERS if name not in _CONDITIONAL and name not in IGNORED)
# Their first argument is a process.
SIGNALS = ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")

AF_UNIX = 1
CLONE_THREAD = 0x00010000
CLONE_NEW_ANY = 0x7E020000  # every flag that makes a namespace

LOAD, JUMP_EQUAL, JUMP_ABOVE, JUMP_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL = 0x7FFF0000, 0x80000000
NUMBER_AT, ARCH_AT, ARGUMENT_AT, MMAP_FLAGS_AT = 0, 4, 16, 40
MAP_SHARED, MAP_ANONYMOUS = 0x01, 0x20
MODE_FILTER = 2

Instruction = tuple[int, int, int, int]


def supported() -> bool:
    """Whether this machine's call numbers are known. Without kernel support `install` raises
    OSError.
    """
    return MACHINE in AUDIT_ARCH


def _fail(number: int) -> Instruction:
    return (RETURN, 0, 0, 0x00050000 | number)


def _if_argument(
    test: int, value: int, then: Instruction, otherwise: Instruction
) -> list[Instruction]:
    """Decide by the low word of the first argument: all values tested here have 32 bits."""
    return [(LOAD, 0, 0, ARGUMENT_AT), (test, 0, 1, value), then, otherwise]


def program(
    *,
    processes: bool,
    unix_sockets: bool = True,
    connects: bool = False,
    own_pid: int | None = None,
    shared_memory: bool = True,
    machine: str = MACHINE,
) -> bytes:
    """The filter program.

    `own_pid`: signals go to that process only. `processes`: it may start and signal others.
    `connects`: its sockets connect, so it should see none of the machine's. `shared_memory`: it may
    make some that no file holds.
    """
    permit, refuse = (RETURN, 0, 0, ALLOW), _fail(errno.EPERM)
    rules: dict[str, list[Instruction]] = {name: [refuse] for name in REFUSED}
    rules |= {name: [_fail(0)] for name in IGNORED}
    rules["socket"] = (
        _if_argument(JUMP_EQUAL, AF_UNIX, permit, refuse) if unix_sockets else [refuse]
    )
    # Landlock does not know Unix sockets with a path (a container daemon's, say). To a library a
    # daemon that refuses is one not running.
    rules["connect"] = [permit if connects else _fail(errno.ECONNREFUSED)]
    # Its flags are in memory, where no filter can look: libc falls back to clone.
    rules["clone3"] = [_fail(errno.ENOSYS)]
    if shared_memory:
        rules["memfd_create"] = rules["mmap"] = [permit]
    else:
        rules["mmap"] = [
            *((LOAD, 0, 0, MMAP_FLAGS_AT), (JUMP_SET, 1, 0, MAP_ANONYMOUS), permit),
            *((JUMP_SET, 0, 1, MAP_SHARED), refuse, permit),
        ]
    no_namespace = [(LOAD, 0, 0, ARGUMENT_AT), (JUMP_SET, 0, 1, CLONE_NEW_ANY), refuse]
    if processes:
        rules["clone"] = [*no_namespace, permit]
    else:
        rules["clone"] = [*no_namespace, *_if_argument(JUMP_SET, CLONE_THREAD, permit, refuse)]
        for name in ("fork", "vfork", "execve", "execveat", "tkill", "pidfd_send_signal"):
            rules[name] = [refuse]
    if own_pid is not None:
        mine = _if_argument(JUMP_EQUAL, own_pid, permit, refuse)
        rules["prlimit64"] = [(LOAD, 0, 0, ARGUMENT_AT), (JUMP_EQUAL, 0, 1, 0), permit, *mine]
        if not processes:
            rules |= {name: mine for name in SIGNALS}
    code: list[Instruction] = [
        (LOAD, 0, 0, ARCH_AT),
        (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
    ]
    if machine == "x86_64":
        code += [(JUMP_ABOVE, 0, 1, X32_BIT), refuse]
    for name, body in rules.items():
        if (number := NUMBERS[name].get(machine)) is not None:
            code += [(JUMP_EQUAL, 0, len(body), number), *body]  # every body ends in a return
    code.append(permit)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install(code: bytes) -> None:
    """Enforce the filter on this thread, permanently. Needs no_new_privs; other threads are not
    filtered.
    """
    prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(_Program(len(code) // 8, code)))
