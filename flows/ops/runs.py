"""Flow runs that this stack carries out: which have a process here, and an end in Prefect for those
whose process is gone.

Guarantees: a run whose process has ended, by `concur down`, a kill or a power cut, does not stay
RUNNING, where it would hold its deployment's slot for ever: it is crashed with the reason, or
cancelled where that was asked, and its subflows with it. Which runs those are is on the disk, by
process and not by name, so runs of another machine's worker are never touched. A server that does
not answer is asked again later. Does not end processes: `stop_parts` does.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from typing import Any

from pydantic import TypeAdapter, ValidationError

from flows.ops.health import ask
from flows.ops.places import Places, write_private
from flows.ops.processes import Identity, alive, look, variable_of
from flows.ops.settings import Secrets, StackSettings
from flows.runtime.ending import end_run

RUN_ID = "PREFECT__FLOW_RUN_ID"
"""What Prefect puts into the environment of a run's process."""
WORKER_S = 60.0
"""How long a worker that lives has to say itself how a run ended; it kills one that was cancelled
after 30 s."""
HELD = ("PENDING", "RUNNING", "CANCELLING")
"""States that a process is behind, and that hold a slot."""
STOPPED = (
    "the stack was stopped while it ran; what is finished is kept, and the same run again goes on"
    " from there"
)
GONE = (
    "its process is gone: killed, or the machine was restarted; what is finished is kept, and the"
    " same run again goes on from there"
)
FILE = TypeAdapter(dict[str, list[Identity]])


def engines(processes: Iterable[Identity]) -> dict[str, list[Identity]]:
    """Id of a flow run -> those of `processes` that were started for it, without what runs below
    them."""
    owner = {one.pid: (run, one) for one in processes if (run := variable_of(one.pid, RUN_ID))}
    found: dict[str, list[Identity]] = {}
    for run, one in owner.values():
        seen = look(one.pid)
        if seen and owner.get(seen.parent, ("", one))[0] != run:
            found.setdefault(run, []).append(one)
    return found


class Runs:
    """The runs of one stack that were seen to work and were not yet seen to have ended. To be used
    by several threads."""

    def __init__(self, places: Places, settings: StackSettings, secrets: Secrets) -> None:
        self._places, self._settings, self._secrets = places, settings, secrets
        self._lock = threading.Lock()
        self._known = self._written = _read(places)
        self._gone_since = {
            run: 0.0 for run in self._known
        }  # of an earlier start: nobody else will tell

    def see(self, processes: Iterable[Identity]) -> None:
        """Take note of the runs that `processes` carry out."""
        found = engines(processes)
        with self._lock:
            for run, those in found.items():
                there = self._known.get(run, [])
                self._known = self._known | {
                    run: [*(one for one in there if alive(one) and one not in those), *those]
                }
            self._write()

    def settle(self, why: str = GONE, after_s: float = WORKER_S) -> list[str]:
        """End in Prefect the runs whose processes have been gone for `after_s` seconds. Returns
        their names; never raises."""
        now, settled = time.monotonic(), []
        with self._lock:
            gone = [run for run, those in self._known.items() if not any(map(alive, those))]
            self._gone_since = {run: self._gone_since.get(run, now) for run in gone}
        for run in gone:
            if self._gone_since[run] and now - self._gone_since[run] < after_s:
                continue
            try:
                names = self._end(run, why, after_s)
            except (
                urllib.error.HTTPError,
                ValueError,
                KeyError,
            ):  # what is wrong with this one need not be with the others
                continue
            except OSError:  # the server is away: later
                break
            if names is not None:
                settled += names
                with self._lock:
                    self._known = {one: those for one, those in self._known.items() if one != run}
                    self._write()
        return settled

    def _end(self, run: str, why: str, after_s: float) -> list[str] | None:
        """None where it is in its state for less than `after_s`: it was started again, and its new
        process may not have been seen yet."""
        try:
            there = self._ask(f"flow_runs/{run}")
        except urllib.error.HTTPError as error:
            if error.code == 404:  # deleted
                return []
            raise
        if there["state_type"] not in HELD:
            return []
        if time.time() - datetime.fromisoformat(there["state"]["timestamp"]).timestamp() < after_s:
            return None
        end_run(self._ask, run, there["state_type"], f"concur up: {why}")
        return [there["name"]]

    def _ask(self, path: str, body: Any = None) -> Any:
        sent = None if body is None else json.dumps(body).encode()
        return json.loads(
            ask(f"{self._settings.prefect_url}/api/{path}", self._secrets.prefect, sent)
        )

    def _write(self) -> None:
        if self._known != self._written:
            with suppress(OSError):  # a full disk ends no part
                if self._known:
                    write_private(self._places.runs_file, FILE.dump_json(self._known))
                else:
                    self._places.runs_file.unlink(missing_ok=True)
                self._written = self._known


def _read(places: Places) -> dict[str, list[Identity]]:
    try:
        return FILE.validate_json(places.runs_file.read_bytes())
    except (OSError, ValidationError):
        return {}


def settling(
    runs: Runs, tell: Callable[[str], None], why: str = GONE, after_s: float = WORKER_S
) -> None:
    """`settle`, and a line of the log for each run."""
    for name in runs.settle(why, after_s):
        tell(f"flow run {name}: ended in Prefect, because {why}")
