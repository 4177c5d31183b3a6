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
import socket
import threading
import time
from contextlib import suppress
from typing import Any, Literal

import httpx
from pydantic import Field

from kernels_eval.errors import cause_of
from kernels_eval.records import Record
from tasks.synthesis.config import ServerConfig
from tasks.synthesis.supervisor import Command, Supervised

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
    actor. Only the command is printed: there is a key in the other fields."""

    config: ServerConfig = Field(repr=False)
    command: tuple[str, ...]
    names: tuple[str, ...] = Field(repr=False)
    """Models and adapters that it must serve to be healthy."""
    env: dict[str, str] = Field(default={}, repr=False)
    threads: str | None = Field(default=None, repr=False)
    """OMP_NUM_THREADS as the user has set it: Ray sets its own for actors, and a model on the CPU
    would run on one core."""
    api_key: str = Field(repr=False)
    log_dir: str = Field(repr=False)


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
        self._spec, self._name = spec, f"vLLM replica {index}"
        self._log_name = f"replica-{index}"
        self._host = "127.0.0.1" if spec.config.listen == "loopback" else _node_address()
        self._status = ReplicaStatus(state="starting", served=veteran)
        self._server: Supervised | None = None
        self._stopping = threading.Event()
        self._port = 0
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
            error = self._keep()
        except Exception as fault:  # callers must not wait for a replica without a keeper
            if self._server is not None:
                self._server.stop()
            error = f"cannot be kept: {fault!r}"
        if error:
            self._set(state="failed", error=f"{self._name} {error}", base_url=None)

    def _keep(self) -> str | None:
        """Serve until it is stopped (None), or serving has no sense. Returns why."""
        crashes = retried = 0
        config = self._spec.config
        while True:
            since = time.monotonic()
            fault = self._serve()
            if self._stopping.is_set():
                return None
            served = self._status.served
            if not served and PORT_TAKEN in fault.lower() and not retried:
                # another program took it between our look and the server's
                retried, self._port = 1, 0
                continue
            crashes = 1 if time.monotonic() - since > STABLE_S else crashes + 1
            if not served:
                return f"did not become healthy: {fault}"
            if crashes > config.restarts:
                return f"crashed {crashes} times, the last time: {fault}"
            log.warning("%s: %s", self._name, fault)
            self._set(state="restarting", error=fault, base_url=None)
            pause_s = min(config.restart_pause_s * 2 ** (crashes - 1), LONGEST_PAUSE_S)
            if self._stopping.wait(pause_s):
                return None

    def _serve(self) -> str:
        """One server from its start to its end. Returns why it ended."""
        spec, config = self._spec, self._spec.config
        try:
            self._port = free_port(self._host, self._port)
            command = Command(
                command=[*spec.command, "--host", self._host, "--port", str(self._port)],
                log_dir=spec.log_dir,
                log_name=self._log_name,
                log_bytes=config.log_mib << 20,
                lease_s=config.lease_s,
                grace_s=config.drain_s,
            )
            server = Supervised(command, self._environment())
        except OSError as error:
            return f"cannot be started: {error}"
        with self._lock:
            self._server = server
            if self._stopping.is_set():
                server.stop()
        state = "restarting" if self._status.served else "starting"
        self._set(state=state, starts=self._status.starts + 1)
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
        start_timeout_s, healthy = self._spec.config.start_timeout_s, False
        while not server.ended.wait(HEALTH_EVERY_S if healthy else HEALTH_EVERY_S / 4):
            if self._stopping.is_set():
                continue
            timeout_s = HEALTH_TIMEOUT_S if healthy else STARTING_TIMEOUT_S
            fault = unhealthy(address, self._spec.names, self._spec.api_key, timeout_s)
            now = time.monotonic()
            if fault is None:
                answered = now
                if not healthy:
                    url, healthy = f"{address}/v1", True
                    self._set(
                        state="healthy", base_url=url, pid=server.pid, served=True, error=None
                    )
            elif healthy and now - answered > UNRESPONSIVE_S:
                return f"it has not answered for {UNRESPONSIVE_S:.0f} s ({fault})"
            elif not healthy and now - started > start_timeout_s:
                return f"it was not healthy {start_timeout_s:.0f} s after its start ({fault})"
        return None

    def _environment(self) -> dict[str, str]:
        """The actor's (CUDA_VISIBLE_DEVICES is Ray's word), without what belongs to this
        interpreter and to Ray."""
        left_out = {*NOT_INHERITED, "OMP_NUM_THREADS"}
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in left_out and not name.startswith("RAY_")
        }
        threads = {"OMP_NUM_THREADS": self._spec.threads} if self._spec.threads else {}
        added = {"PYTHONUNBUFFERED": "1", "VLLM_API_KEY": self._spec.api_key}
        return kept | threads | added | self._spec.env

    def _set(self, **changes: object) -> None:
        with self._lock:
            self._status = self._status.model_copy(update=changes)


def _how(status: int | None) -> str:
    if status is None:
        return "its supervisor"
    return f"exit status {status}" if status >= 0 else f"signal {-status}"


def _node_address() -> str:
    with suppress(Exception):  # outside Ray
        from ray import util

        untyped: Any = util
        return str(untyped.get_node_ip_address())
    return "127.0.0.1"


def free_port(host: str, wanted: int = 0) -> int:
    """A port that is free: the wanted one if possible. Another program may take it before
    the server does."""
    for port in (wanted, 0):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    raise OSError(f"no port is free at {host}")


def unhealthy(address: str, names: tuple[str, ...], api_key: str, timeout_s: float) -> str | None:
    """What keeps the server at http://HOST:PORT from serving these models; None where it does.
    Asks without proxies."""
    headers = {"Authorization": f"Bearer {api_key}"}
    try:
        with httpx.Client(trust_env=False, timeout=timeout_s, headers=headers) as client:
            client.get(f"{address}/health").raise_for_status()
            models = client.get(f"{address}/v1/models").raise_for_status().json()["data"]
        served = {model["id"] for model in models}
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        return cause_of(error)
    missing = [name for name in names if name not in served]
    return (
        f"it serves {', '.join(sorted(served))} and not {', '.join(missing)}" if missing else None
    )
