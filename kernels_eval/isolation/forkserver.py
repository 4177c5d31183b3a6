"""The fork server and the isolation of its children (run as `python -m kernels_eval.isolation.forkserver FD`).

Imports torch once and never touches CUDA. Each child gets, as far as this kernel allows: namespaces of its own (user, PID with its own
/proc, network, IPC), no_new_privs, resource limits, a scratch directory as its working directory and home, and no descriptors but its
channel, its log and the exchange buffer. Layers are probed once at start and reported.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
import time
from typing import Any

from kernels_eval.isolation.channel import Channel, ChannelClosed

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWIPC = 0x00020000, 0x10000000, 0x20000000, 0x40000000, 0x08000000
# A PID namespace comes with a mount namespace and a /proc of its own: without it the CUDA driver fails (error 304), and the child could
# read its parents' environments.
NAMESPACES = {"user": CLONE_NEWUSER, "pid": CLONE_NEWPID | CLONE_NEWNS, "net": CLONE_NEWNET, "ipc": CLONE_NEWIPC}
MS_REC_PRIVATE = 0x4000 | 0x40000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38


def main(fd: int) -> None:
    channel = Channel(socket.socket(fileno=fd))
    import torch
    import torch.utils.cpp_extension  # imported before the first fork: 1 s that no child pays again

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    from kernels_eval import child
    from kernels_eval.build import spec
    from kernels_eval.checks import correctness, inputs, operators

    assert child and correctness and inputs and spec  # their imports are what is wanted
    operators.warm_modes()
    layers = probe_layers()
    channel.send({"isolation": layers})
    while True:
        try:
            header, fds, _, _ = socket.recv_fds(channel.sock, 1 << 16, 8)
        except OSError:
            return
        if not header:
            return
        channel._buffer += header
        try:
            message = channel.receive(30)
        except ChannelClosed:
            return
        if "wait" in message:
            channel.send({"status": _wait(int(message["wait"]))})
            continue
        pid = os.fork()
        if pid == 0:
            channel.sock.close()
            _child(message, fds, layers)
        for descriptor in fds:
            os.close(descriptor)
        channel.send({"pid": pid})


REAP_S = 1.0


def _wait(pid: int) -> int | None:
    """Exit status of a child that has ended or is about to; one that goes on is killed, and None says so. Never blocks for long."""
    deadline = time.monotonic() + REAP_S
    killed = False
    while True:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if done:
            return None if killed else os.waitstatus_to_exitcode(status)
        if not killed and time.monotonic() > deadline:
            killed = True
            for kill in (os.killpg, os.kill):
                try:
                    kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(0.002)  # between two looks at a condition: waitpid has no time-out of its own


def _child(message: dict[str, Any], fds: list[int], layers: list[str]) -> None:
    """Runs in the forked process; never returns."""
    status = 1
    try:
        command, log, exchange = fds
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        _enter_namespaces(layers)
        # The process that entered a PID namespace is not in it: its child is, as PID 1, and takes every descendant with it when it dies.
        if "namespace:pid" in layers and (inner := os.fork()) != 0:
            os.close(command)
            _mirror(inner)
        if "namespace:pid" in layers:
            _mount_proc()
        scratch = message["scratch"]
        os.chdir(scratch)
        os.environ.update(HOME=scratch, TMPDIR=scratch, TRITON_CACHE_DIR=f"{scratch}/triton", TORCH_EXTENSIONS_DIR=f"{scratch}/extensions")
        _limit(message["limits"])
        if sys.platform == "linux":
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            _prctl(PR_SET_NO_NEW_PRIVS, 1)
        _close_others({0, 1, 2, command, exchange})
        from kernels_eval.child import serve

        serve(message["spawn"], Channel(socket.socket(fileno=command)), exchange)
        status = 0
    except BaseException as error:
        sys.stderr.write(f"child failed to start or serve: {type(error).__name__}: {error}\n")
    finally:
        os._exit(status)


def _mirror(inner: int) -> None:
    """Die as the inner process dies, so that the parent sees its signal or status."""
    if sys.platform == "linux":
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _, status = os.waitpid(inner, 0)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _limit(limits: dict[str, Any]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    size = int(limits["file_mb"]) << 20
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write above the limit fails with EFBIG instead of killing
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), min(4096, hard)))


def _close_others(keep: set[int]) -> None:
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else map(str, range(3, 1024)):
        if int(name) not in keep:
            try:
                os.close(int(name))
            except OSError:
                continue


# -- layers ------------------------------------------------------------------------------------------------------------------------


def probe_layers() -> list[str]:
    """Which isolation layers work here, found by trying each in a child of its own."""
    layers = ["fresh_process", "own_session", "rlimits", "clean_environment", "closed_descriptors", "memory_watch", "deadlines"]
    if sys.platform != "linux":
        return layers
    layers.append("no_new_privs")
    if _works(CLONE_NEWUSER):
        layers.append("namespace:user")
    base = CLONE_NEWUSER if "namespace:user" in layers else 0
    layers += [f"namespace:{name}" for name, flag in NAMESPACES.items() if name != "user" and _works(base | flag)]
    return layers


def _works(flags: int) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            _unshare(flags)
            if flags & CLONE_NEWPID:
                inner = os.fork()
                if inner == 0:
                    _mount_proc()
                    os._exit(0)
                os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]))
            os._exit(0)
        except OSError:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _enter_namespaces(layers: list[str]) -> None:
    flags = 0
    for name, flag in NAMESPACES.items():
        if f"namespace:{name}" in layers:
            flags |= flag
    if flags:
        _unshare(flags)


def _unshare(flags: int) -> None:
    uid, gid = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    if flags & CLONE_NEWUSER:
        with open("/proc/self/setgroups", "w") as handle:
            handle.write("deny")
        for name, identity in (("uid_map", uid), ("gid_map", gid)):
            with open(f"/proc/self/{name}", "w") as handle:
                handle.write(f"{identity} {identity} 1")


def _mount_proc() -> None:
    """Give this PID namespace its own /proc; nothing mounted here is seen outside."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None) != 0 or libc.mount(b"proc", b"/proc", b"proc", 0, None) != 0:
        raise OSError(ctypes.get_errno(), "mount /proc")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
