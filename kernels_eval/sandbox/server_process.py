"""The fork server's process. It imports torch for two seconds, so a command starts it first; this
module imports in milliseconds."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping

from kernels_eval.sandbox import machine
from kernels_eval.sandbox.layers import left_out
from kernels_eval.sandbox.trees import remove_tree


class ServerProcess:
    """A started fork server, which `kernels_eval.sandbox.server_handle.ForkServer` talks to."""

    def __init__(
        self,
        *,
        threads: int = 1,
        warm: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Arguments as those of `ForkServer`, and variables that its environment has besides."""
        machine.remove_abandoned()
        self.base = machine.new_folder()
        self.log = self.base / "forkserver.log"
        self.socket, theirs = socket.socketpair()
        program = [sys.executable, "-P", "-m", "kernels_eval.sandbox.forkserver"]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*program, str(theirs.fileno()), warm, *left_out()],
                pass_fds=(theirs.fileno(),),
                env=machine.child_environment(threads) | {**(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        theirs.close()

    def close(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()
        remove_tree(self.base)
