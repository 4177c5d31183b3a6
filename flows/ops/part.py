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
from kernels_eval.sandbox.process_tree import (
    Identity,
    alive,
    children,
    command_line,
    descendants,
    environment_variable,
    identify,
    members,
    send,
    wait_gone,
)
from kernels_eval.sandbox.syscalls import PR_SET_PDEATHSIG, prctl

KILL_S = 5.0


def kill_leftovers(part: Part, places: Places, manager: Identity) -> None:
    """Kill what an earlier process of this part started, and orphans that belong to no part.

    Orphans are children of the manager: nothing is looked for where it is not alive.
    """
    left = members([], {PART_VARIABLE: places.mark(part)})
    for pid in children(manager.pid) if alive(manager) else []:
        orphan = identify(pid)
        # A child that has not yet become a part has the command line of the manager.
        forked = command_line(pid) == command_line(manager.pid)
        if orphan and not forked and environment_variable(pid, PART_VARIABLE) is None:
            left += [orphan, *(one for below in descendants(pid) if (one := identify(below)))]
    # The manager ended meanwhile: the ids that were read may be those of other processes by now.
    if not alive(manager):
        return
    for each in left:
        send(each, signal.SIGKILL)
    wait_gone(left, KILL_S)


def main() -> None:
    part = cast(Part, sys.argv[1])
    places = Places(os.environ[ROOT_VARIABLE])
    state = places.read_state()
    os.umask(0o077)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL if part == "worker" else signal.SIGTERM)
    # After the signal was asked for: a manager that has ended before would leave this process, and
    # its parent would be init, whose children are nobody's to kill.
    if state is None or not state.running or os.getppid() != state.manager.pid:
        sys.exit(f"no stack is being started for {places.root}, or its manager has ended")
    with places.starts(part).open("ab") as handle:
        handle.write(b".")
    if part != "worker":
        kill_leftovers(part, places, state.manager)
    made = program(part, Stack(places, state.settings, read_secrets()))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execvpe(made.command[0], made.command, made.environment)


if __name__ == "__main__":
    main()
