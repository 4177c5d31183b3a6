"""The layers of isolation: their names, how each is probed, and how to get a missing one. `python
-m kernels_eval.sandbox.layers` prints those of this machine. Names are stable: every verdict keeps
them."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Collection

from kernels_eval.sandbox import landlock, namespaces, seccomp
from kernels_eval.sandbox.syscalls import PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, prctl

WITHOUT = "CONCUR_ISOLATION_WITHOUT"
"""Environment variable: comma-separated layers to leave out, for tests. Verdicts then lack them."""

ALWAYS = (
    "fresh_process",
    "own_session",
    "rlimits",
    "clean_environment",
    "closed_descriptors",
    "memory_watch",
    "process_watch",
    "deadlines",
)

FIXES = {
    "no_new_privs": "use Linux 3.5 or newer",
    "subreaper": "use Linux 3.4 or newer",
    "no_capabilities": "use Linux",
    "oom_first": "mount /proc writable in this container",
    "namespace:user": (
        "sysctl -w kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000"
        " kernel.apparmor_restrict_unprivileged_userns=0 (those your kernel has); in a container,"
        " allow unshare in its seccomp profile"
    ),
    "namespace:pid": (
        "allow user namespaces (see namespace:user); in a container, leave /proc unmasked "
        "(docker run --security-opt systempaths=unconfined)"
    ),
    "namespace:net": "allow user namespaces (see namespace:user)",
    "namespace:ipc": "allow user namespaces (see namespace:user)",
    "tmpfs_scratch": (
        "allow user namespaces (see namespace:user); until then the scratch directory's size is"
        " watched"
    ),
    "pid_limit": (
        "use Linux 6.14 or newer, with namespace:pid; until then processes are counted and killed"
    ),
    "landlock": (
        "use Linux 5.13 or newer, booted with lsm=landlock,... ; in a container, allow landlock_*"
        " in its seccomp profile"
    ),
    "seccomp": "use Linux on x86_64 or aarch64 with CONFIG_SECCOMP_FILTER",
}
"""Every layer that a machine may lack, and how to get it."""


def left_out() -> list[str]:
    return [name for name in os.environ.get(WITHOUT, "").split(",") if name]


def probe(without: Collection[str] = ()) -> list[str]:
    """The layers that work here, less `without`. Raises ValueError for an unknown name."""
    if unknown := set(without) - set(FIXES):
        raise ValueError(
            f"there are no such layers to disable: {', '.join(sorted(unknown))}; there are"
            f" {', '.join(FIXES)}"
        )
    layers = list(ALWAYS)

    def add(name: str, attempt: Callable[..., object], *arguments: object) -> None:
        if name not in without and _works(attempt, *arguments):
            layers.append(f"landlock:{landlock.abi()}" if name == "landlock" else name)

    add("no_new_privs", prctl, PR_SET_NO_NEW_PRIVS, 1)
    add("subreaper", prctl, PR_SET_CHILD_SUBREAPER, 1)
    add("oom_first", prefer_as_victim)
    add("no_capabilities", namespaces.drop_capabilities)
    add("namespace:user", namespaces.enter, namespaces.CLONE_NEWUSER)
    base = namespaces.CLONE_NEWUSER if "namespace:user" in layers else 0
    for name in ("net", "ipc"):
        add(f"namespace:{name}", namespaces.enter, base | namespaces.NAMESPACES[name])
    flags = base | namespaces.NAMESPACES["pid"]
    add("namespace:pid", _inside, flags, object)
    if "namespace:pid" in layers:
        add("tmpfs_scratch", _inside, flags, namespaces.mount_scratch, "/tmp", 1, 16)
        add("pid_limit", _inside, flags, _try_pid_limit)
    if "tmpfs_scratch" not in layers:
        layers.append("scratch_watch")
    add("landlock", _try_landlock)
    add("seccomp", _try_seccomp)
    return layers


def missing(layers: Collection[str]) -> dict[str, str]:
    named = {"landlock" if layer.startswith("landlock:") else layer for layer in layers}
    return {name: fix for name, fix in FIXES.items() if name not in named}


def prefer_as_victim() -> None:
    with open("/proc/self/oom_score_adj", "w") as handle:
        handle.write("1000")


def _works(attempt: Callable[..., object], *arguments: object) -> bool:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            attempt(*arguments)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _inside(flags: int, attempt: Callable[..., object], *arguments: object) -> None:
    """Try something as the first process of a new PID namespace with its own /proc."""

    def first() -> None:
        namespaces.mount_proc()
        attempt(*arguments)

    namespaces.enter(flags)
    if not _works(first):
        raise OSError("does not work inside the namespace")


def _try_pid_limit() -> None:
    namespaces.limit_pids(0)
    with open("/proc/sys/kernel/pid_max") as handle:
        if int(handle.read()) != namespaces.LOWEST_PID_MAX:
            raise OSError("the limit was not applied")


def _try_landlock() -> None:
    if not landlock.abi():
        raise OSError("no Landlock")
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    landlock.Ruleset().allow(landlock.READ, ["/proc"]).restrict()
    try:
        os.listdir("/")
    except PermissionError:
        return
    raise OSError("Landlock is not enforced")


def _try_seccomp() -> None:
    if not seccomp.supported():
        raise OSError("no filter for this machine")
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(seccomp.program(processes=False))
    os.getpid()  # a call that must still work
    try:
        os.fork()
    except PermissionError:
        return
    os._exit(1)  # both of them


if __name__ == "__main__":
    print(", ".join(probe(left_out())))
