"""The fork server (`python -m kernels_eval.sandbox.forkserver FD`): imports torch once, never
touches CUDA, forks children.

Every child is a keeper of our code (namespaces, subreaper, dies as the inner process dies) and a
confined inner process. When `kill` returns, all descendants are gone, in other sessions too.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable

from kernels_eval.sandbox import confinement, layers, process_tree
from kernels_eval.sandbox.channel import Answer, Channel, ChannelClosed, Message
from kernels_eval.sandbox.syscalls import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl

ROLES = "kernels_eval.roles"
"""What a child serves, started by name: the sandbox knows nothing of what it confines."""
REAP_S = 1.0
"""Seconds that a child may go on after it closed its channel."""
BROKEN = 70
"""The status of a child whose code cannot be imported (EX_SOFTWARE of sysexits.h)."""
KEEPER_S = 10.0
"""Seconds for a keeper to report how its inner process ended."""


def main(fd: int, warm: str, without: list[str]) -> None:
    channel = Channel(socket.socket(fileno=fd))
    found = layers.probe(without)  # by forks, of which each takes longer with torch
    gc.disable()  # a fifth of the time of the imports, which leave little to collect
    import torch
    import torch.utils.cpp_extension  # imported before the first fork: 1 s that no child pays again

    torch.set_num_threads(1)  # torch starts more in each fork, which then enters no namespace
    importlib.import_module(ROLES).warm_up(warm)
    # A collection in a child would touch, and so copy, every page that holds an object of these
    # imports.
    gc.freeze()
    gc.enable()
    Server(channel, found).run()


class Server:
    """Answers spawn, wait and kill requests, one at a time."""

    def __init__(self, channel: Channel, found: list[str]) -> None:
        self.channel, self.layers = channel, found
        self.readable = confinement.readable()
        self.children: set[int] = set()
        self._adopt_orphans()

    def _adopt_orphans(self) -> None:
        if "subreaper" in self.layers:
            prctl(PR_SET_CHILD_SUBREAPER, 1)

    def run(self) -> None:
        self.channel.accepts_descriptors = True
        self.channel.send({"isolation": self.layers})
        while True:
            try:
                message = self.channel.receive_record()
                fds, self.channel.descriptors = self.channel.descriptors, []
                if "wait" in message:
                    answer = self.reap(int(message["wait"]), REAP_S)
                elif "kill" in message:
                    answer = self.kill(int(message["kill"]))
                elif "end" in message:
                    answer = self.end(int(message["end"]))
                else:
                    answer = {"pid": self.spawn(message, fds)}
                self.channel.send(answer)
            except (OSError, ChannelClosed):
                return

    def spawn(self, message: Answer, fds: list[int]) -> int:
        server = os.getpid()
        pid = _forked(lambda: self._keep(message, fds, server))
        for descriptor in fds:
            os.close(descriptor)
        self.children.add(pid)
        return pid

    def reap(self, pid: int, patience_s: float) -> Message:
        """How a child ended; one that goes on is killed (null status), an ended one is waited for,
        however busy the machine.
        """
        deadline, killed = time.monotonic() + patience_s, False
        while pid in self.children:
            done, status, used = os.wait4(pid, os.WNOHANG)
            if done:
                self.children.discard(pid)
                self._reap_orphans()
                code = os.waitstatus_to_exitcode(status)
                went_on = killed and code == -signal.SIGKILL
                return {
                    "status": None if went_on else code,
                    "cpu_s": used.ru_utime + used.ru_stime,
                }
            late_s = time.monotonic() - deadline
            if late_s > KEEPER_S:
                killed = True
                _end_family(pid)
            elif late_s > 0 and not killed and process_tree.descendants(pid):
                killed = True
                process_tree.kill_descendants(pid)
            time.sleep(process_tree.PAUSE_S)  # waitpid has no timeout of its own
        return {"status": None}

    def kill(self, pid: int) -> Message:
        """Begin to end a child, where that can be waited for elsewhere (`ending`): a device takes
        0.1 s and more to let a process go.
        """
        first = process_tree.children(pid) if pid in self.children else []
        if "namespace:pid" not in self.layers:
            return {"ending": False}
        for each in first:  # takes all others with it
            process_tree.kill(each)
        return {"ending": bool(first)}

    def end(self, pid: int) -> Message:
        if pid in self.children:
            if "namespace:pid" in self.layers:
                self.kill(pid)
                process_tree.kill(pid)
            else:
                _end_family(pid)
        return self.reap(pid, 0.0)

    def _reap_orphans(self) -> None:
        if "subreaper" not in self.layers:
            return
        # Looked at again until none is left: one that ends meanwhile hands its own children on.
        while orphans := set(process_tree.children(os.getpid())) - self.children:
            for pid in orphans:
                _end_family(pid)
                os.waitpid(pid, 0)

    def _keep(self, message: Answer, fds: list[int], server: int) -> None:
        command, log = fds
        self.channel.close()
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        self._adopt_orphans()
        confinement.enter_namespaces(self.layers)
        # The process that entered a PID namespace is not in it: its child is, as PID 1, and takes
        # every descendant with it when it dies.
        inner = _forked(lambda: self._serve(message, command))
        os.close(command)
        _mirror(inner, server, adopts="namespace:pid" not in self.layers)

    def _serve(self, message: Answer, command: int) -> None:
        keep = {0, 1, 2, command}
        confinement.confine(message, self.layers, self.readable, keep)
        channel = Channel(socket.socket(fileno=command))
        importlib.import_module(ROLES).serve(message["spawn"], channel)


def _forked(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException as error:
        status = BROKEN if isinstance(error, ImportError) else 1
        sys.stderr.write(f"child failed to start or serve: {type(error).__name__}: {error}\n")
    finally:
        os._exit(status)


def _end_family(pid: int) -> None:
    """Kill what is below a process, and then it, for it adopts orphans."""
    process_tree.kill_descendants(pid)
    process_tree.kill(pid)


def _mirror(inner: int, server: int, *, adopts: bool) -> None:
    """Wait for the inner process, end what it left, and die by its signal or status."""

    def end() -> None:
        process_tree.kill(inner)
        if adopts:
            process_tree.kill_descendants(os.getpid())
        os._exit(1)

    signal.signal(signal.SIGTERM, lambda *_: end())
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # when the fork server is gone, end the family
    if os.getppid() != server:  # it died before that was set
        end()
    status = None
    while status is None:
        pid, ended = os.wait()
        if pid == inner:
            status = ended
    if adopts:
        process_tree.kill_descendants(os.getpid())
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], [name for name in sys.argv[3:] if name])
