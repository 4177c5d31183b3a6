"""Flow runs that a stack carries out: which have a process here, and an end in Prefect for those
whose process is gone.

Guarantees: a run whose process has ended, by `concur down`, a kill or a power cut, does not stay
RUNNING, where it would hold its deployment's slot forever: it is crashed with the reason, or
cancelled where that was asked, and every run below it first. Which runs those are is noted on the
disk by each run's own process, so runs of another machine's worker are never touched. A server that
does not answer is asked again later. Does not end processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import psutil
from pydantic import ValidationError

from flows.ops.health import ask
from flows.ops.places import ROOT_VARIABLE, Places
from flows.ops.programs import Stack
from kernels_eval.records import Json
from kernels_eval.sandbox.process_tree import Identity, alive, environment_variable, identify
from tasks.files import atomic_write

RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
"""What Prefect puts into the environment of a run's process."""
PAGE = 200
"""The most rows that Prefect gives at once."""
HELD = ("PENDING", "RUNNING", "CANCELLING")
"""States that a process is behind, and that hold a slot."""
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
KEPT = "finished work is kept; start the same run again to resume"
STOPPED = f"the stack was stopped while it ran; {KEPT}"
GONE = f"its process is gone: killed, or the machine was restarted; {KEPT}"

Ask = Callable[[str, Any], Any]
"""Posts a body (None: GET) to a path below Prefect's /api; the JSON of the answer."""


def note_run() -> None:
    """Note that this process carries out a flow run of a stack; nothing where it does not."""
    root, run = os.environ.get(ROOT_VARIABLE), os.environ.get(RUN_VARIABLE)
    me = identify(os.getpid())
    if root and run and me:
        with suppress(OSError):  # a full disk does not end a run that could work
            atomic_write(Places(root).flow_runs / run, me.model_dump_json(), mode=0o600)


def flow_runs(processes: Iterable[Identity]) -> dict[str, list[Identity]]:
    """Id of a flow run -> those of `processes` that were started for it, without what runs below
    them."""
    owner = {
        one.pid: (run, one)
        for one in processes
        if (run := environment_variable(one.pid, RUN_VARIABLE))
    }
    found: dict[str, list[Identity]] = {}
    for run, one in owner.values():
        with suppress(psutil.Error):
            if owner.get(psutil.Process(one.pid).ppid(), ("", one))[0] != run:
                found.setdefault(run, []).append(one)
    return found


def settle(stack: Stack, why: str, ended: Iterable[str] = ()) -> list[str]:
    """End in Prefect the runs whose processes are gone: those noted, and `ended`. Returns the names
    of those that had to be ended; never raises."""
    names = []
    for run in sorted({*_gone(stack.places), *ended}):
        try:
            names += _settle(prefect_api(stack), run, why)
        except httpx.HTTPStatusError as error:
            # a deleted run is settled; another refusal may be momentary
            if error.response.status_code != httpx.codes.NOT_FOUND:
                continue
        except (httpx.HTTPError, ValueError, KeyError):
            continue
        (stack.places.flow_runs / run).unlink(missing_ok=True)
    return names


def _gone(places: Places) -> Iterator[str]:
    for note in places.flow_runs.glob("*"):
        with suppress(OSError, ValidationError):
            if not alive(Identity.model_validate_json(note.read_bytes())):
                yield note.name


def _settle(ask: Ask, run: str, why: str) -> list[str]:
    found = ask(f"flow_runs/{run}", None)
    if found["state_type"] not in HELD:
        return []
    end_run(ask, run, found["state_type"], f"concur up: {why}")
    return [found["name"]]


def prefect_api(stack: Stack) -> Ask:
    """Requests to the stack's own server, without importing Prefect."""
    url, login = stack.settings.prefect_url, stack.secrets.prefect
    return lambda path, body: ask(f"{url}/api/{path}", login, body).json()


def matching_runs(ask: Ask, wanted: Json, sort: str = "ID_DESC") -> list[Json]:
    """All flow runs that a filter of Prefect's matches, as its API has them."""
    found: list[Json] = []
    while True:
        body = {"flow_runs": wanted, "sort": sort, "limit": PAGE, "offset": len(found)}
        page = ask("flow_runs/filter", body)
        found += page
        if len(page) < PAGE:
            return found


def runs_below(ask: Ask, run: str) -> list[Json]:
    """All runs below a run; parents before their children."""
    found: list[Json] = []
    level = [run]
    while level:
        children = matching_runs(ask, {"parent_flow_run_id": {"any_": level}})
        found += children
        level = [child["id"] for child in children]
    return found


def end_run(ask: Ask, run: str, state_type: str, message: str) -> str:
    """End a run in a state of this type without its process, and first the runs below it. Returns
    what it has become: CANCELLED or CRASHED."""
    kind = "CANCELLED" if state_type == "CANCELLING" else "CRASHED"
    below = reversed(runs_below(ask, run))
    for each in [*(child["id"] for child in below if child["state_type"] not in FINAL), run]:
        set_state(ask, each, kind, message, force=True)
    return kind


def set_state(ask: Ask, run: str, kind: str, message: str, force: bool = False) -> None:
    state = {"type": kind, "name": kind.capitalize(), "message": message}
    ask(f"flow_runs/{run}/set_state", {"state": state, "force": force})
