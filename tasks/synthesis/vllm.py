"""One `vllm serve` process as a context manager, and its GPUs.

Guarantees: `with VllmServer(...) as server` starts when /health answers, or raises one EvalError
with the log's end; nothing is left afterwards, nor a few seconds after this process was killed.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import httpx

from kernels_eval.errors import DeviceError, EvalError
from kernels_eval.sandbox import reaper
from kernels_eval.sandbox.process_tree import identify, members, send, wait_gone

HOST = "127.0.0.1"
PLACE_S = 600.0
"""Seconds for Ray to hand out GPUs: another stage may have to free them."""
START_S = 1800.0
"""Seconds from a server's start until it is healthy."""
LOOK_S = 0.25
HEALTH_TIMEOUT_S = 60.0
"""Seconds without an answer after which a server counts as ended."""
STOP_S = 30.0
"""Seconds from SIGTERM to SIGKILL, for answers in flight."""
HURRY_S = 5.0
"""The same where nobody wants them: a cancelled run has 30 s to end."""
GIVE_UP_S = 60.0
"""Seconds of waiting for a killed process; a device driver may hold it forever."""
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Variables of this interpreter, not of vLLM's."""
MARK = "CONCUR_VLLM_SERVER"
"""A variable that marks everything that a server started."""
TAIL_BYTES, TAIL_LINES = 1 << 17, 30
ENGINE_FAULT = re.compile(
    r"^\((?!APIServer)\w+[^)\n]*\) ERROR [^\]\n]*\] (?:\w+\.)*\w*(?:Error|Exception)\b.*",
    re.MULTILINE,
)
"""An exception of another vLLM process. Its server ends later, without naming a cause."""
FAILED = (
    "fix the cause in its log, such as a wrong synthesis.server setting; answers so far are kept"
)


class VllmServer:
    """A server of `command` (without the address), with `env` added to the environment; its log is
    `log`."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.command, self.log = command, log
        self.address = ""
        self.process: subprocess.Popen[bytes] | None = None
        self._mark = uuid.uuid4().hex
        self._env = _environment() | dict(env) | {MARK: self._mark, "PYTHONUNBUFFERED": "1"}

    def __enter__(self) -> VllmServer:
        try:
            self.start()
        except BaseException:
            self.stop(at_once=True)
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop(at_once=kind is not None)

    def start(self) -> None:
        """Start the server on a free port and wait until it answers. Raises EvalError where it ends
        before or takes too long."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.address = f"http://{HOST}:{port}"
        command = [*self.command, "--host", HOST, "--port", str(port)]
        try:
            with self.log.open("wb") as output:
                self.process = self._popen(command, output)
        except OSError as error:
            raise EvalError(f"vLLM cannot be started: {error}", FAILED) from error
        began_s = time.monotonic()
        while not self.is_healthy():
            if self.process.poll() is not None or time.monotonic() - began_s > START_S:
                raise EvalError(f"vLLM did not become healthy: {self.fault()}", FAILED)
            time.sleep(LOOK_S)

    def stop(self, at_once: bool = False) -> None:
        """Stop; returns when nothing of the server is left. `at_once`: do not wait for answers in
        flight."""
        process, self.process = self.process, None
        if process is None:
            return
        leader = identify(process.pid)
        with suppress(ProcessLookupError):
            process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(HURRY_S if at_once else STOP_S)
        left = members([leader] if leader else [], {MARK: self._mark})
        for each in left:
            send(each, signal.SIGKILL)
        process.wait()
        wait_gone(left, GIVE_UP_S)
        reaper.unregister(reaper.reaper(), process.pid)

    def is_healthy(self) -> bool:
        with (
            suppress(httpx.HTTPError),
            httpx.Client(trust_env=False, timeout=HEALTH_TIMEOUT_S) as client,
        ):
            return client.get(f"{self.address}/health").is_success
        return False

    def fault(self) -> str:
        status = self.process.poll() if self.process else None
        cause = "it does not answer"
        if status is not None:
            cause = f"it ended with {_status_words(status)}"
        return f"{cause}; the end of {self.log}:\n{log_tail(self.log)}"

    def _popen(self, command: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
        descriptor = reaper.reaper()
        return subprocess.Popen(
            command,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: reaper.register(descriptor, f"{MARK}={self._mark}"),
        )


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name not in NOT_INHERITED and not name.startswith("RAY_")
    }


def _status_words(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"signal {-status}"


def free_port(host: str = HOST) -> int:
    """A port that is free now; another program may take it first."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def log_tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        text = file.read().decode("utf-8", "replace")
    tail = "\n".join(text.splitlines()[-TAIL_LINES:])
    fault = ENGINE_FAULT.search(text)
    return f"{fault[0]}\n{tail}" if fault and fault[0] not in tail else tail


class _GpuHolder:
    def visible(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")


@contextmanager
def reserved_gpus(count: int) -> Iterator[dict[str, str]]:
    """The environment for `count` GPUs of this machine, reserved in Ray meanwhile; empty for 0.
    Raises DeviceError where Ray finds none."""
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
