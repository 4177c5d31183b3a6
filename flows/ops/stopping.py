"""Stops a stack in the right order: what hands out work first, what the others report to last.

Guarantees: within `STOP_S` seconds every process of the stack has ended or is told of; flow runs
are asked to end, and have `RUNS_GRACE_S` to write what they have and to say how they ended, while
the servers still answer; what they did not say is said for them. The same code stops a stack whose
supervisor was killed.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping

from flows.ops.places import Places
from flows.ops.processes import Identity, alive, members, send, wait_gone
from flows.ops.runs import STOPPED, Runs, engines, settling
from flows.ops.settings import Part

GRACE_S = 8.0
RUNS_GRACE_S = 18.0
"""A run that is told to stop needs 15 s at most (flows.runtime.shutdown), and then reports."""
KILL_S = 3.0
ORDER: tuple[tuple[Part, ...], ...] = (("worker",), ("ray", "mlflow"), ("prefect",))
STOP_S = 70.0
"""Three rounds of `GRACE_S` and `KILL_S`, the runs' own, their settling, and a last sweep."""


def stop_parts(
    places: Places,
    parts: Mapping[Part, Identity | None],
    families: Mapping[Part, Iterable[Identity]],
    runs: Runs | None,
    reap: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Identity]:
    """Stop the flow runs, the parts, their `families` and whatever else has the mark of this root.
    Returns what could not be stopped."""
    _stop_runs(places, parts, runs, reap, say)
    for together in ORDER:
        leaders = [identity for part in together if (identity := parts.get(part)) is not None]
        whole = [
            *members(None, leaders),
            *(one for part in together for one in families.get(part, ())),
        ]
        if not any(alive(one) for one in [*leaders, *whole]):
            continue
        say(f"stopping {', '.join(together)}")
        for leader in leaders:
            send(leader, signal.SIGTERM)
        wait_gone(leaders, GRACE_S, reap)
        _kill([*members(None, leaders), *whole], reap)
    deadline = time.monotonic() + KILL_S
    while (
        left := members(str(places.root), [i for i in parts.values() if i])
    ) and time.monotonic() < deadline:
        _kill(left, reap)  # again, because one that is killed may just have started another
    return left


def _stop_runs(
    places: Places,
    parts: Mapping[Part, Identity | None],
    runs: Runs | None,
    reap: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """End every flow run, whichever worker of this stack started it, and see to it that Prefect
    knows."""
    worker = parts.get("worker")
    there = members(str(places.root), [worker] if worker else [])
    if runs:
        runs.see(there)
    working = [one for those in engines(there).values() for one in those]
    if working:
        say(f"stopping {len(working)} flow runs" if len(working) > 1 else "stopping a flow run")
        if worker:  # told to stop, it kills its runs at once; left alone, it starts the next one
            _kill([worker], reap)
        for one in working:
            send(one, signal.SIGTERM)
        _kill(wait_gone(working, RUNS_GRACE_S, reap), reap)
    if runs:
        settling(runs, say, STOPPED, after_s=0.0)


def _kill(identities: Iterable[Identity], reap: Callable[[], None]) -> None:
    identities = list(identities)
    for one in identities:
        send(one, signal.SIGKILL)
    wait_gone(identities, KILL_S, reap)
