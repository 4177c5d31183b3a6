"""One `vllm serve` process under a `with`, and the GPUs that it runs on.

Guarantees: `with VllmServer(...) as server` is entered when /health answers, or raises one
EvalError with the end of the log; a server that dies, or has not answered for a minute, is started
again on the same port; when the block is left nothing that it started is left. Where this process
is killed, the kernel sends the server SIGTERM. Does not guarantee that what a server has started
ends where both are killed at once.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import httpx

from kernels_eval.errors import DeviceError, EvalError
from kernels_eval.sandbox.process_tree import identify, members, send, wait_gone
from kernels_eval.sandbox.syscalls import PR_SET_PDEATHSIG, prctl

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
PLACE_S = 600.0
"""How long Ray may take to hand out GPUs: another stage gives them back."""
LOOK_S = 0.25
HEALTH_TIMEOUT_S = 10.0
UNRESPONSIVE_S = 60.0
STOP_S = 30.0
"""From SIGTERM to SIGKILL: answers in flight."""
HURRY_S = 5.0
"""The same where nobody wants them: a run that is cancelled has 30 s to be gone."""
GIVE_UP_S = 60.0
"""A process that a device driver holds cannot be killed."""
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Of this interpreter, not of the one that has vLLM."""
MARK = "CONCUR_VLLM_SERVER"
"""A variable by which everything that a server started is known."""
PORT_TAKEN = "address already in use"
TAIL_BYTES, TAIL_LINES = 1 << 17, 30
ENGINE_FAULT = re.compile(
    r"^\((?!APIServer)\w+[^)\n]*\) ERROR [^\]\n]*\] (?:\w+\.)*\w*(?:Error|Exception)\b.*",
    re.MULTILINE,
)
"""An exception of one of vLLM's other processes. Its server, which ends later, names no cause."""
FAILED = (
    "fix the cause in its log, such as a wrong synthesis.server setting; answers so far are kept"
)


class VllmServer:
    """A server of `command` (without the address) with `env` added to the environment; its log is
    a file of `log_dir`. `restarts` are those after it was healthy once."""

    def __init__(
        self,
        command: Sequence[str],
        env: dict[str, str],
        log_dir: Path,
        start_timeout_s: float,
        restarts: int,
    ) -> None:
        self.command, self.start_timeout_s, self.restarts = command, start_timeout_s, restarts
        self.starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._port, self._mark = free_port(), uuid.uuid4().hex
        self._env = _environment() | env | {MARK: self._mark, "PYTHONUNBUFFERED": "1"}
        self.log = log_dir / f"vllm-{self._port}.log"
        self._fault: EvalError | None = None
        self._ready, self._stopping = threading.Event(), threading.Event()
        self._grace_s = STOP_S
        # the kernel's signal comes when the thread ends that started the server: it starts them all
        self._thread = threading.Thread(target=self._keep, name="vllm server", daemon=True)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self._port}"

    def __enter__(self) -> VllmServer:
        try:
            self._thread.start()
            self.wait_ready()
        except BaseException:
            self.stop(at_once=True)
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop(at_once=kind is not None)

    def wait_ready(self) -> None:
        """Wait until it answers. Raises EvalError where it never will."""
        while not self._ready.wait(timeout=0.5):
            pass  # a Ctrl-C that comes just before the wait begins does not wake it
        if self._fault:
            raise self._fault

    def stop(self, at_once: bool = False) -> None:
        """Returns when nothing of the server is left. `at_once`: answers in flight are not waited
        for."""
        if at_once:
            self._grace_s = HURRY_S
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _keep(self) -> None:
        """Serve until it is stopped, or serving has no sense."""
        served = False
        crashes = 0
        try:
            while not self._stopping.is_set():
                fault, healthy = self._serve()
                if self._stopping.is_set():
                    return
                served = served or healthy
                if not served and crashes == 0 and PORT_TAKEN in fault.lower():
                    # another program took it between our look and the server's
                    self._port = free_port()
                elif not served:
                    raise EvalError(f"vLLM did not become healthy: {fault}", FAILED)
                elif crashes >= self.restarts:
                    raise EvalError(f"vLLM ended {crashes + 1} times, the last: {fault}", FAILED)
                crashes += 1
                log.warning("vLLM is started again: %s", fault)
        except EvalError as error:
            self._fault = error
        except OSError as error:
            self._fault = EvalError(f"vLLM cannot be started: {error}", FAILED)
        finally:
            self._ready.set()

    def _serve(self) -> tuple[str, bool]:
        """One server from its start to its end: why it ended, and whether it was healthy."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab" if self.starts else "wb") as output:
            process = self._start(output)
            try:
                healthy = self._watch(process)
                gave_up = process.poll() is None
            finally:
                self._ready.clear()
                self._end(process)
        if gave_up:
            after_s = UNRESPONSIVE_S if healthy else self.start_timeout_s
            cause = f"it has not answered for {after_s:.0f} s"
        else:
            cause = f"it ended with {_status_words(process.returncode)}"
        return f"{cause}; the end of {self.log}:\n{log_tail(self.log)}", healthy

    def _start(self, output: IO[bytes]) -> subprocess.Popen[bytes]:
        self.starts += 1
        self.process = subprocess.Popen(
            [*self.command, "--host", HOST, "--port", str(self._port)],
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        return self.process

    def _watch(self, process: subprocess.Popen[bytes]) -> bool:
        """Until it ends, is stopped or does not answer any more. Returns whether it ever did."""
        answered = time.monotonic()
        healthy = False
        while process.poll() is None and not self._stopping.wait(LOOK_S):
            now = time.monotonic()
            if self._answers(HEALTH_TIMEOUT_S if healthy else 1.0):
                answered, healthy = now, True
                self._ready.set()
            elif now - answered > (UNRESPONSIVE_S if healthy else self.start_timeout_s):
                break
        return healthy

    def _answers(self, timeout_s: float) -> bool:
        with suppress(httpx.HTTPError), httpx.Client(trust_env=False, timeout=timeout_s) as client:
            return client.get(f"{self.address}/health").is_success
        return False

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """SIGTERM, and SIGKILL for whatever is left of it."""
        leader = identify(process.pid)
        with suppress(ProcessLookupError):
            process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(self._grace_s)
        left = members([leader] if leader else [], {MARK: self._mark})
        for each in left:
            send(each, signal.SIGKILL)
        process.wait()
        wait_gone(left, GIVE_UP_S)


def _environment() -> dict[str, str]:
    """Ours, without what belongs to this interpreter and to Ray."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in NOT_INHERITED and not name.startswith("RAY_")
    }


def _die_with_parent() -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _status_words(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"signal {-status}"


def free_port(host: str = HOST) -> int:
    """A port that is free now. Another program may take it before the server does."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def log_tail(path: Path) -> str:
    """The last lines of a server's log, behind the first exception of its engine."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        text = file.read().decode("utf-8", "replace")
    tail = "\n".join(text.splitlines()[-TAIL_LINES:])
    fault = ENGINE_FAULT.search(text)
    return f"{fault[0]}\n{tail}" if fault and fault[0] not in tail else tail


class _GpuHolder:
    """An actor that does nothing but hold the GPUs it was given."""

    def visible(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")


@contextmanager
def reserved_gpus(count: int) -> Iterator[dict[str, str]]:
    """The environment that shows `count` GPUs of this machine, which Ray gives to nobody else
    meanwhile; empty for 0. Raises DeviceError where Ray finds none."""
    if not count:
        yield {}
        return
    from kernels_eval.pool.ray import start_ray

    start_ray(None)
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    place = NodeAffinitySchedulingStrategy(here, soft=False)
    wishes: dict[str, Any] = {"num_gpus": count, "num_cpus": 0, "scheduling_strategy": place}
    holder: Any = ray.remote(_GpuHolder).options(**wishes).remote()
    try:
        visible: str = ray.get(holder.visible.remote(), timeout=PLACE_S)
        yield {"CUDA_VISIBLE_DEVICES": visible}
    except ray.exceptions.GetTimeoutError as error:
        raise DeviceError(
            f"Ray has found no {count} free GPUs for vLLM",
            "`ray status` shows who holds them; lower synthesis.server.replicas or tensor_parallel",
        ) from error
    finally:
        with suppress(Exception):  # of a Ray that has gone
            ray.kill(holder)
