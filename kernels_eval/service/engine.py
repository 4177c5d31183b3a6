"""The pool in its own process, because Ray ends one whose head stays away, and the service must
continue. It takes only what its workers need; after its failure the work is queued again."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue

from kernels_eval.errors import EvalError
from kernels_eval.pool.pool import ASK_S, Pool, arriving
from kernels_eval.pool.ray import is_lost
from kernels_eval.records import Candidate, Json
from kernels_eval.service.queue import Evaluations, Pair

PAUSE_S = 30.0
ENDS_S = 5.0
"""Seconds for that process to stop its Ray."""
STARTS = "starts the workers"
AHEAD = 2
"""Candidates in the pool per worker and builder, one of them waiting."""
logger = logging.getLogger(__name__)


def work(pipe: Connection, options: Json) -> None:
    """The process: verdicts for the pairs from the pipe, without those whose key follows, until a
    None."""
    os.setsid()  # Ctrl-C is for the service, which lets this one finish
    pairs: SimpleQueue[Pair | None] = SimpleQueue()
    taken: dict[str, Pair] = {}
    cancelled: SimpleQueue[Candidate] = SimpleQueue()

    def read() -> None:
        with suppress(EOFError, OSError):
            while True:
                match pipe.recv():
                    case str(key):
                        if pair := taken.pop(key, None):
                            cancelled.put(pair[1])
                    case pair:
                        if pair:
                            taken[pair[1].candidate_id] = pair
                        pairs.put(pair)
        os._exit(1)  # the service is gone; Ray's processes are the reaper's

    threading.Thread(target=read, daemon=True).start()
    try:
        says: Json = {"waiting": lambda text: pipe.send(("waits", text)), "cancelled": cancelled}
        with Pool(**options, **says) as pool:
            used = pool.telemetry
            pipe.send(("ready", used.builders + used.devices * used.lanes))
            for verdict in pool.verify(arriving(pairs)):
                taken.pop(verdict.candidate_id, None)
                pipe.send(("verdict", verdict, [*pool.quarantined, *pool.cautions]))
    except Exception as error:
        known = isinstance(error, EvalError) or is_lost(error)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        pipe.send(("fault", text, not is_lost(error)))
        os._exit(1)  # a lost Ray can hold up its own end


@dataclass
class Engine:
    """Judges what `evaluations` hold, in a thread. `options` are Pool's."""

    evaluations: Evaluations
    options: Json
    workers: int = 0
    """Workers and builders of the pool; 0 while none runs."""
    waits_for: str = STARTS
    """What the pool does before workers judge; else empty."""
    faults: int = 0
    fault: str = ""
    """The last fault, until a verdict follows it."""
    cautions: list[str] = field(default_factory=list)
    """The pool's cautions about missing or abandoned devices."""
    _ending: threading.Event = field(default_factory=threading.Event)
    _process: SpawnProcess | None = None
    _pause_s: float = 1.0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def end(self, wait_s: float) -> bool:
        """Begin nothing more; whether what was under way ended within `wait_s`."""
        self._ending.set()
        self._thread.join(wait_s)
        ended = not self._thread.is_alive()
        if self._process:
            self._process.kill()
        return ended

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self.evaluations.returned(self.fault, blame=False)  # what was left under way
                self._judge()
            except (EOFError, OSError):
                self._note("the process of the pool has ended")
            except Exception as error:  # such as a journal on a full disk
                self._note(f"the service failed: {type(error).__name__}: {error}")
            self._ending.wait(self._pause_s)
            self._pause_s = min(2 * self._pause_s, PAUSE_S)

    def _judge(self) -> None:
        spawn = get_context("spawn")
        ours, theirs = spawn.Pipe()
        self._process = spawn.Process(target=work, args=(theirs, self.options), daemon=True)
        try:
            self._process.start()
            theirs.close()
            self._serve(ours)
        finally:
            self.workers, self.waits_for = 0, STARTS
            ours.close()
            self._process.join(ENDS_S)
            self._process.kill()

    def _serve(self, pipe: Connection) -> None:
        """Feed the pool and keep its verdicts until it ends. Raises EOFError where it died."""
        ended = False
        while True:
            for key in self.evaluations.dropped():
                pipe.send(key)
            room = AHEAD * self.workers - self.evaluations.running
            while room > 0 and not self._ending.is_set() and (pair := self.evaluations.take()):
                pipe.send(pair)
                room -= 1
            if self._ending.is_set() and not ended:
                pipe.send(None)
                ended = True
            if ended and not self.evaluations.running:
                return
            if not pipe.poll(ASK_S):
                continue
            match pipe.recv():
                case ("waits", text):
                    self.waits_for = text
                case ("ready", workers):
                    self.workers, self.waits_for = workers, ""
                case ("verdict", verdict, cautions):
                    self.evaluations.reached(verdict)
                    self.fault, self.cautions, self._pause_s = "", cautions, 1.0
                    self.waits_for = ""
                case (_, fault, blame):
                    self._note(fault)
                    return self.evaluations.returned(fault, blame)

    def _note(self, fault: str) -> None:
        self.fault, self.faults = fault, self.faults + 1
        logger.error("the machine has failed, what was under way is tried again: %s", fault)
