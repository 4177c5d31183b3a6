"""`python -m flows.stack.head WORDS`: Ray's command of that name, whose agents get free ports here.
A raylet ends where an agent that chooses its own has not told it within 15 s, which on a busy
machine the agent still imports."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from socket import socket
from typing import Any

LISTEN = "--dashboard-agent-listen-port"
AGENTS = (
    LISTEN,
    *("--dashboard-agent-grpc-port", "--runtime-env-agent-port", "--metrics-export-port"),
)


def free_ports() -> dict[str, str]:
    """An option of `ray start` for each agent, with its port."""
    with ExitStack() as held:
        found = {}
        for option in AGENTS:
            tried = held.enter_context(socket())
            tried.bind(("127.0.0.1", 0))
            found[option] = f"{option}={tried.getsockname()[1]}"
    return found


def main() -> None:
    from ray._private import services
    from ray._private.ray_constants import PROCESS_TYPE_RAYLET
    from ray.scripts import scripts

    ports, start = free_ports(), services.start_ray_process

    def start_knowing(command: Sequence[str], kind: str, *args: Any, **kwargs: Any) -> Any:
        """Tell the raylet the one port of these that Ray 2.60 tells only the agent."""
        more = [ports[LISTEN]] if kind == PROCESS_TYPE_RAYLET else []
        return start([*command, *more], kind, *args, **kwargs)

    vars(services)["start_ray_process"] = start_knowing
    sys.argv += ports.values()
    scripts.main()


if __name__ == "__main__":
    main()
