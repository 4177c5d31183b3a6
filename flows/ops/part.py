"""`python -m flows.ops.part PART`: what the manager starts; it becomes a part of the stack.

Guarantees: what an earlier process of the part has left behind is killed first; flow runs of a
worker that died go on. When the manager is killed the servers are told to stop and the worker is
killed, so that its flow runs go on.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import cast

from flows.ops.places import PART_VARIABLE, ROOT_VARIABLE, Places
from flows.ops.programs import Stack, program
from flows.ops.settings import Part, read_secrets
from kernels_eval.isolation.process_tree import (
    children,
    command_line,
    environment_variable,
    kill,
    kill_descendants,
    members,
    send,
    wait_gone,
)
from kernels_eval.isolation.syscalls import PR_SET_PDEATHSIG, prctl

KILL_S = 5.0


def kill_leftovers(part: Part, places: Places, manager: int) -> None:
    """Kill what an earlier process of this part started, and orphans that belong to no part."""
    left = members([], {PART_VARIABLE: places.mark(part)})
    for each in left:
        send(each, signal.SIGKILL)
    for pid in children(manager):
        # A child that has not yet become a part has the command line of the manager.
        forked = command_line(pid) == command_line(manager)
        if not forked and environment_variable(pid, PART_VARIABLE) is None:
            kill_descendants(pid)
            kill(pid)
    wait_gone(left, KILL_S)


def main() -> None:
    part, manager = cast(Part, sys.argv[1]), os.getppid()
    places = Places(os.environ[ROOT_VARIABLE])
    state = places.read_state()
    if state is None:
        sys.exit(f"no stack is being started for {places.root}")
    os.umask(0o077)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL if part == "worker" else signal.SIGTERM)
    with places.starts(part).open("ab") as handle:
        handle.write(b".")
    if part != "worker":
        kill_leftovers(part, places, manager)
    made = program(part, Stack(places, state.settings, read_secrets()))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execvpe(made.command[0], made.command, made.environment)


if __name__ == "__main__":
    main()
