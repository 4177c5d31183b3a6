"""Several nodes: `ray start` twice on this machine, with folders and a build cache of their own, joined as a user joins them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest

import kernels_eval
from tasks.sources import bundled

ROOT = Path(kernels_eval.__file__).parent.parent
NAMES = ("cumulative_sum", "softmax_rows")
RAY = Path(sys.executable).parent / "ray"
START_S = 120
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
"""Of these nodes only: one of the user's own is never read, nor written."""


def clean_environment(**added: str) -> dict[str, str]:
    left = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return left | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0", **TOKEN} | added


@dataclass
class Nodes:
    """A head node and a second one, each with one CPU: two workers that take a CPU each are on two nodes."""

    folder: Path
    head: subprocess.Popen[bytes]
    other: subprocess.Popen[bytes]
    address: str


def start_node(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    """`ray start`, which ends all it has started when it is told to end: `ray stop` would also end the Ray of others on this machine."""
    command = [str(RAY), "start", "--block", "--num-cpus=1", "--object-store-memory=100000000", *arguments]
    with open(folder / f"{len(list(folder.glob('*.log')))}.log", "wb") as log:
        return subprocess.Popen(
            command,
            env=clean_environment(RAY_TMPDIR=str(folder), **environment),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end_node(process: subprocess.Popen[bytes]) -> None:
    below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=30)
    for left in psutil.wait_procs(below, timeout=10)[1]:
        left.kill()


def once(condition: Any, timeout_s: float, message: str) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, message
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Real nodes, started with the commands of the documentation; they ask for a token, as `ray start` does by itself."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as name:  # short: sockets lie in it
        folder, started = Path(name), []
        noted = folder / "ray" / "ray_current_cluster"
        try:
            started.append(start_node(folder, "--head", "--port=0", "--include-dashboard=false"))
            address = once(lambda: noted.exists() and noted.read_text().strip(), START_S, "the head node has not started")
            started.append(start_node(folder, f"--address={address}"))
            yield Nodes(folder, *started, address)
        finally:
            for process in reversed(started):
                end_node(process)


# -- a batch on both --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with six candidates of two tasks: right, wrong, and one without code."""
    folder = tmp_path_factory.mktemp("batch")
    tasks = [task for task in bundled.load("train") if task.name in NAMES]
    texts = [(task, bundled.responses(task.name, "cpp")[number]) for task in tasks for number in (0, 1, 2)]
    texts[-1] = (tasks[1], "I would rather not.")
    pl.DataFrame([{"task_id": task.task_id, "response": text} for task, text in texts]).write_parquet(folder / "candidates.parquet")
    pl.DataFrame([{"task_id": task.task_id, "code": task.code} for task in tasks]).write_parquet(folder / "tasks.parquet")
    return folder


def verify_batch(folder: Path, out: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "flows.cli", "verify-batch", "candidates.parquet", "--tasks", "tasks.parquet", "--out", out]
    command += ["--workers", "2", "--builders", "1", "--set", "timing.max_s=0.3", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=clean_environment(**environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def at_work(node: subprocess.Popen[bytes]) -> bool:
    """Has a kernel worker of this node been given a candidate? It has a fork server from then on."""
    for process in psutil.Process(node.pid).children(recursive=True):
        try:
            if "KernelWorker" in " ".join(process.cmdline()) and process.children():
                return True
        except psutil.Error:
            continue  # it has just ended
    return False


def outcomes(folder: Path, out: str) -> list[tuple[int, str, str]]:
    return sorted(pl.read_parquet(folder / out / "verdicts.parquet").select("row", "status", "reason").iter_rows())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_batch_is_verified_on_both_nodes_as_it_is_on_one(nodes: Nodes, batch: Path) -> None:
    command = verify_batch(batch, "cluster", "--address", nodes.address)
    worked: set[str] = set()
    while command.poll() is None:
        worked |= {name for name, node in (("head", nodes.head), ("other", nodes.other)) if name not in worked and at_work(node)}
        time.sleep(0.05)
    assert command.returncode == 0, command.stdout.read()
    assert worked == {"head", "other"}
    alone = verify_batch(batch, "alone")
    assert alone.wait(timeout=600) == 0, alone.stdout.read()
    found = outcomes(batch, "cluster")
    assert found == outcomes(batch, "alone")
    assert {status for _, status, _ in found} == {"correct", "incorrect", "no_code"}
