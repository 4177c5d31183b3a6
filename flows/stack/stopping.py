"""Stops a stack in the right order: what hands out work first, what the others report to last.

Guarantees: within `STOP_S` seconds every process of the stack has ended or is told of; flow runs are asked to end, and have
`RUNS_GRACE_S` to write what they have, while the servers still answer. The same code stops a stack whose supervisor was killed.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping

from flows.stack.places import Places
from flows.stack.processes import Identity, alive, members, send, wait_gone
from flows.stack.settings import Part

GRACE_S = 8.0
RUNS_GRACE_S = 8.0
KILL_S = 3.0
ORDER: tuple[tuple[Part, ...], ...] = (("worker",), ("ray", "mlflow"), ("prefect",))
STOP_S = 45.0
"""Three rounds of `GRACE_S` and `KILL_S`, the runs' own, and a last sweep."""


def stop_parts(
    places: Places,
    parts: Mapping[Part, Identity | None],
    families: Mapping[Part, Iterable[Identity]],
    reap: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Identity]:
    """Stop the parts, their `families` and whatever else has the mark of this root. Returns what could not be stopped."""
    for together in ORDER:
        leaders = [identity for part in together if (identity := parts.get(part)) is not None]
        whole = [*members(None, leaders), *(one for part in together for one in families.get(part, ()))]
        if not any(alive(one) for one in [*leaders, *whole]):
            continue
        say(f"stopping {', '.join(together)}")
        for leader in leaders:
            send(leader, signal.SIGTERM)
        wait_gone(leaders, GRACE_S, reap)
        rest = {one.pid: one for one in [*members(None, leaders), *whole] if alive(one)}.values()
        if together == ("worker",) and rest:
            for one in rest:
                send(one, signal.SIGTERM)
            wait_gone(rest, RUNS_GRACE_S, reap)
        _kill(rest, reap)
    deadline = time.monotonic() + KILL_S
    while (left := members(str(places.root), [i for i in parts.values() if i])) and time.monotonic() < deadline:
        _kill(left, reap)  # again, because one that is killed may just have started another
    return left


def _kill(identities: Iterable[Identity], reap: Callable[[], None]) -> None:
    identities = list(identities)
    for one in identities:
        send(one, signal.SIGKILL)
    wait_gone(identities, KILL_S, reap)
