"""`python -m flows.stack.part MODULE WORDS`: supervisord's command, which becomes that module.
Leftovers of the same part are killed first, never flow runs, which go on where the worker is
killed."""

from __future__ import annotations

import os
import signal
import sys

from flows.stack.layout import PART_VARIABLE, ROOT_VARIABLE, Layout
from flows.stack.programs import PYTHON
from kernels_eval.sandbox.process_tree import members, send, wait_gone
from kernels_eval.sandbox.syscalls import PR_SET_PDEATHSIG, prctl

KILL_S = 5.0


def main() -> None:
    mark, words = os.environ[PART_VARIABLE], sys.argv[1:]
    is_worker = mark.startswith("worker ")
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL if is_worker else signal.SIGTERM)
    # After the signal was asked for: a supervisord that has ended before would send none.
    manager = Layout(os.environ[ROOT_VARIABLE]).pid_file.read_text(encoding="ascii")
    if os.getppid() != int(manager):
        sys.exit("its supervisord has ended")
    if not is_worker:
        left = members([], {PART_VARIABLE: mark})
        for process in left:
            send(process, signal.SIGKILL)
        wait_gone(left, KILL_S)
    os.execv(sys.executable, [*PYTHON, *words])


if __name__ == "__main__":
    main()
