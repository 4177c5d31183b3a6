"""One vLLM server on the devices it was given, kept alive: a Ray actor's class, and a plain one.

Guarantees: the server runs as long as `renew` is called (a lease), and is gone, with all that
it started, once `stop` has returned, this process has died or the lease has run out. One that
crashes, or has not answered for a minute, is started again on the same port after pauses that
double; one that crashes more than `restarts` times without ten minutes between, or that has never
been healthy, is `failed`, with the end of its log. Does not answer requests itself, and does not
know who asks.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from kernels_eval.records import Record
from tasks.synthesis.config import ServerConfig
from tasks.synthesis.supervised import Supervised, free_port, unhealthy

log = logging.getLogger(__name__)

HEALTH_EVERY_S = 1.0
HEALTH_TIMEOUT_S = 10.0
STARTING_TIMEOUT_S = 1.0
"""A server that is starting does not listen yet, and its end is to be seen soon."""
UNRESPONSIVE_S = 60.0
STABLE_S = 600.0
LONGEST_PAUSE_S = 60.0
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Of this interpreter, not of the one that has vLLM."""
PORT_TAKEN = "address already in use"


class ReplicaSpec(Record):
    """What one replica runs. `command` lacks the address, `env` is added to the environment of the
    actor."""

    config: ServerConfig
    command: tuple[str, ...]
    names: tuple[str, ...]
    """Models and adapters that it must serve to be healthy."""
    env: dict[str, str] = {}
    threads: str | None = None
    """OMP_NUM_THREADS as the user has set it: Ray sets its own for actors, and a model on the CPU
    would run on one core."""
    api_key: str
    log_dir: str

    def __repr__(self) -> str:
        return f"ReplicaSpec(command={self.command!r})"  # a key is in the other fields

    __str__ = __repr__


class ReplicaStatus(Record):
    """How a replica is. `base_url` where it is healthy; `served`: it has been healthy before, once
    at least."""

    state: Literal["starting", "healthy", "restarting", "failed"]
    base_url: str | None = None
    pid: int | None = None
    starts: int = 0
    served: bool = False
    error: str | None = None


class Replica:
    """Starts at once; `veteran` is one that takes the place of a replica that has served, so a
    crash of its first start is no verdict."""

    def __init__(self, spec: ReplicaSpec, index: int, veteran: bool = False) -> None:
        self._spec, self._index = spec, index
        self._host = "127.0.0.1" if spec.config.listen == "loopback" else _node_address()
        self._status = ReplicaStatus(state="starting", served=veteran)
        self._server: Supervised | None = None
        self._stopping = threading.Event()
        self._port: int | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._keep_or_say, name="replica", daemon=True)
        self._thread.start()

    def renew(self) -> ReplicaStatus:
        """Renew the lease and say how things are."""
        with self._lock:
            if self._server is not None:
                self._server.renew()
            return self._status

    def stop(self, at_once: bool = False) -> None:
        """Returns when nothing of the server is left. Requests in flight have `drain_s` to be
        answered, seconds where it is `at_once`."""
        self._stopping.set()
        with self._lock:
            if self._server is not None:
                self._server.stop(at_once)
        self._thread.join()

    def _keep_or_say(self) -> None:
        try:
            self._keep()
        except Exception as error:  # callers must not wait for a replica without a keeper
            if self._server is not None:
                self._server.stop()
            self._set(
                state="failed",
                error=f"vLLM replica {self._index} cannot be kept: {error!r}",
                base_url=None,
            )

    def _keep(self) -> None:
        crashes = retried = 0
        while True:
            since = time.monotonic()
            fault = self._serve()
            if self._stopping.is_set():
                return
            served = self._status.served
            if not served and PORT_TAKEN in fault.lower() and not retried:
                # another program took it between our look and the server's
                retried, self._port = 1, None
                continue
            crashes = 1 if time.monotonic() - since > STABLE_S else crashes + 1
            if not served or crashes > self._spec.config.restarts:
                what = (
                    f"crashed {crashes} times, the last time"
                    if served
                    else "did not become healthy"
                )
                self._set(
                    state="failed",
                    error=f"vLLM replica {self._index} {what}: {fault}",
                    base_url=None,
                )
                return
            log.warning("vLLM replica %s: %s", self._index, fault)
            self._set(state="restarting", error=fault, base_url=None)
            if self._stopping.wait(
                min(self._spec.config.restart_pause_s * 2 ** (crashes - 1), LONGEST_PAUSE_S)
            ):
                return

    def _serve(self) -> str:
        """One server from its start to its end. Returns why it ended."""
        spec = self._spec
        try:
            self._port = free_port(self._host, self._port)
            server = Supervised(
                [*spec.command, "--host", self._host, "--port", str(self._port)],
                self._environment(),
                spec.log_dir,
                f"replica-{self._index}",
                spec.config.log_mib << 20,
                spec.config.lease_s,
                spec.config.drain_s,
            )
        except OSError as error:
            return f"cannot be started: {error}"
        with self._lock:
            self._server = server
            if self._stopping.is_set():
                server.stop()
        self._set(
            state="restarting" if self._status.served else "starting",
            starts=self._status.starts + 1,
        )
        gave_up = self._watch(server, f"http://{self._host}:{self._port}")
        if gave_up:
            server.stop()
        server.ended.wait()
        why = gave_up or server.fault or f"it ended with {_how(server.status)}"
        tail = server.tail()
        return why + (f"; the end of {server.log}:\n{tail}" if tail else "")

    def _watch(self, server: Supervised, address: str) -> str | None:
        """Until the server ends by itself (None), or something is wrong with it that only its end
        can correct."""
        started = answered = time.monotonic()
        healthy, fault = False, None
        while not server.ended.wait(HEALTH_EVERY_S if healthy else HEALTH_EVERY_S / 4):
            if self._stopping.is_set():
                continue
            fault = unhealthy(
                address,
                self._spec.names,
                self._spec.api_key,
                HEALTH_TIMEOUT_S if healthy else STARTING_TIMEOUT_S,
            )
            now = time.monotonic()
            if fault is None:
                answered = now
                if not healthy:
                    healthy = True
                    self._set(
                        state="healthy",
                        base_url=f"{address}/v1",
                        pid=server.pid,
                        served=True,
                        error=None,
                    )
            elif healthy and now - answered > UNRESPONSIVE_S:
                return f"it has not answered for {UNRESPONSIVE_S:.0f} s ({fault})"
            elif not healthy and now - started > self._spec.config.start_timeout_s:
                return (
                    f"it was not healthy {self._spec.config.start_timeout_s:.0f} s after its start"
                    f" ({fault})"
                )
        return None

    def _environment(self) -> dict[str, str]:
        """The actor's (CUDA_VISIBLE_DEVICES is Ray's word), without what belongs to this
        interpreter and to Ray."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in NOT_INHERITED and not name.startswith("RAY_")
        }
        kept.pop("OMP_NUM_THREADS", None)
        if self._spec.threads:
            kept["OMP_NUM_THREADS"] = self._spec.threads
        return kept | {"PYTHONUNBUFFERED": "1", "VLLM_API_KEY": self._spec.api_key} | self._spec.env

    def _set(self, **changes: object) -> None:
        with self._lock:
            self._status = self._status.model_copy(update=changes)


def _how(status: int | None) -> str:
    if status is None:
        return "its supervisor"
    return f"exit status {status}" if status >= 0 else f"signal {-status}"


def _node_address() -> str:
    with suppress(Exception):  # outside Ray
        from ray.util import get_node_ip_address as untyped

        address_of: Callable[[], str] = untyped
        return address_of()
    return "127.0.0.1"
