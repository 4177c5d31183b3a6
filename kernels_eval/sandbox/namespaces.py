"""Namespaces, the mounts inside them, and capabilities. Mounts made here are visible to this
process and its descendants only. A refused namespace raises OSError: callers probe first."""

from __future__ import annotations

import ctypes
import os

from kernels_eval.sandbox.syscalls import LIBC, PR_CAPBSET_DROP, checked, prctl, syscall

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
# A PID namespace comes with a mount namespace and a /proc of its own: without it the CUDA driver
# fails (error 304), and the child could read its parents' environments.
NAMESPACES = {
    "user": CLONE_NEWUSER,
    "pid": CLONE_NEWPID | CLONE_NEWNS,
    "net": CLONE_NEWNET,
    "ipc": CLONE_NEWIPC,
}
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
CAPSET = {"x86_64": 126, "aarch64": 91}
CAPABILITY_VERSION_3 = 0x20080522
LOWEST_PID_MAX = 301  # the kernel refuses less


def enter(flags: int) -> None:
    """Enter new namespaces. A user namespace maps only the present user and group, to
    themselves.
    """
    uid, gid = os.geteuid(), os.getegid()
    checked(LIBC.unshare(ctypes.c_int(flags)), "unshare")
    if flags & CLONE_NEWUSER:
        with open("/proc/self/setgroups", "w") as handle:
            handle.write("deny")
        for name, identity in (("uid_map", uid), ("gid_map", gid)):
            with open(f"/proc/self/{name}", "w") as handle:
                handle.write(f"{identity} {identity} 1")


def mount_proc() -> None:
    _mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    _mount(b"proc", b"/proc", b"proc", 0, None)


def mount_scratch(path: str, size_mb: int, files: int) -> None:
    """Mount a file system in memory, limited to `size_mb` and a number of files, that ends with the
    mount namespace."""
    options = f"size={size_mb}m,nr_inodes={files},mode=700".encode()
    _mount(b"tmpfs", os.fsencode(path), b"tmpfs", MS_NOSUID | MS_NODEV, options)


def show_at(folder: str, place: str) -> None:
    """Bind-mount this folder at `place`."""
    _mount(os.fsencode(folder), os.fsencode(place), None, MS_BIND, None)


def _mount(
    source: bytes, target: bytes, kind: bytes | None, flags: int, options: bytes | None
) -> None:
    checked(
        LIBC.mount(source, target, kind, ctypes.c_ulong(flags), options),
        f"mount {os.fsdecode(target)}",
    )


def limit_pids(count: int) -> None:
    """Allow at most `count` processes and threads (301 at least) in this PID namespace: kernels
    from 6.14 keep a limit for each. Needs its own /proc, or the machine's limit changes.
    """
    with open("/proc/sys/kernel/pid_max", "w") as handle:
        handle.write(str(max(LOWEST_PID_MAX, count)))


def drop_capabilities() -> None:
    """Give up every capability for this process and what it executes (empties the bounding set)."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            break  # past the last one that this kernel knows, or without any capability to drop
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()
    syscall(CAPSET[os.uname().machine], header, sets, what="capset")
