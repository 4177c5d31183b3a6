"""Several nodes: `ray start` twice on this machine, with folders and a build cache of their own,
joined as a user joins them."""

import os
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import psutil
import pytest

import kernels_eval
from kernels_eval.errors import UsageError
from kernels_eval.pool import ray as cluster
from kernels_eval.pool.ray import start_ray
from tasks.sources import bundled
from tests.support.waiting import until, within

ROOT = Path(kernels_eval.__file__).parent.parent
NAMES = ("cumulative_sum", "softmax_rows")
RAY = Path(sys.executable).parent / "ray"
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
"""Of these nodes only: one of the user's own is never read, nor written."""


def clean_environment(**added):
    left = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return (
        left
        | {
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
            "RAY_USAGE_STATS_ENABLED": "0",
            **TOKEN,
        }
        | added
    )


@dataclass
class Nodes:
    """A head node and a second one, each with one CPU: two workers that take a CPU each are on two
    nodes."""

    folder: Path
    head: subprocess.Popen[bytes]
    other: subprocess.Popen[bytes]
    address: str


def start_node(folder, *arguments, **environment):
    """`ray start`, which ends all it has started when it is told to end: `ray stop` would also end
    the Ray of others on this machine."""
    command = [
        str(RAY),
        "start",
        "--block",
        "--num-cpus=1",
        "--object-store-memory=100000000",
        *arguments,
    ]
    with open(folder / f"{len(list(folder.glob('*.log')))}.log", "wb") as log:
        return subprocess.Popen(
            command,
            env=clean_environment(RAY_TMPDIR=str(folder), **environment),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end_node(process):
    below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=30)
    for left in psutil.wait_procs(below, timeout=10)[1]:
        left.kill()


@pytest.fixture(scope="module")
def nodes():
    """Real nodes, started with the commands of the documentation; they ask for a token, as `ray
    start` does by itself."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as name:  # short: sockets lie in it
        folder, started = Path(name), []
        noted = folder / "ray" / "ray_current_cluster"
        try:
            started.append(start_node(folder, "--head", "--port=0", "--include-dashboard=false"))
            until(lambda: noted.exists() and noted.read_text().strip(), "the head node starts")
            address = noted.read_text().strip()
            started.append(start_node(folder, f"--address={address}"))
            log = folder / "1.log"
            until(lambda: b"Ray runtime started" in log.read_bytes(), "the second node starts")
            yield Nodes(folder, *started, address)
        finally:
            for process in reversed(started):
                end_node(process)


# -- addresses -------------------------------------------------------------------------------------


class Silent(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.recv(1)
        while self.request.recv(4096):  # until the other side gives up
            pass


class Web(socketserver.StreamRequestHandler):
    def handle(self):
        self.rfile.readline()
        self.wfile.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


@pytest.fixture
def listener(request):
    """A port on which something listens that is no Ray."""
    with socketserver.ThreadingTCPServer(("", 0), request.param) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture
def no_ray(monkeypatch, tmp_path):
    """As on a machine where no Ray runs, whoever else runs one on this one."""
    from ray._private import services

    monkeypatch.setattr(services, "find_gcs_addresses", set)
    monkeypatch.setattr(cluster, "ANSWER_S", 30.0)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return tmp_path


def refusal(address):
    """The error of an address that cannot be joined: at once, with the address and what to do."""
    with within(100), pytest.raises(UsageError) as fault:
        start_ray(address)
    assert address in str(fault.value) and "ray start --head" in fault.value.hint
    return str(fault.value)


@pytest.mark.parametrize(
    "listener, text, answer_s",
    [(Silent, "no answer within 1 s", 1.0), (Web, "HTTP/2", 30.0)],
    indirect=["listener"],
)
def test_what_listens_and_is_no_ray_is_told_from_one(no_ray, monkeypatch, listener, text, answer_s):
    monkeypatch.setattr(cluster, "ANSWER_S", answer_s)
    assert text in refusal(f"127.0.0.1:{listener}")


def test_an_address_where_nothing_listens_is_an_error_at_once(no_ray):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    assert "refused" in refusal(f"127.0.0.1:{port}")
    assert "no-such-host.invalid" in refusal("no-such-host.invalid:6379")
    assert "Invalid address format" in refusal("head")
    assert "Ray Client" in refusal("ray://head:10001")
    assert "Could not find any running Ray" in refusal("auto")
    (no_ray / "ray").mkdir()
    (no_ray / "ray" / "ray_current_cluster").write_text(
        f"127.0.0.1:{port}"
    )  # what a machine that was reset keeps
    assert f":{port}" in refusal("auto")


def test_a_server_of_another_kind_is_no_head_node(no_ray):
    """Ray's other processes speak the same protocol: their ports are mistaken for the head node's
    easily."""
    import grpc

    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("0.0.0.0:0")
    server.start()
    try:
        assert "is not a head node" in refusal(f"127.0.0.1:{port}")
    finally:
        server.stop(None).wait()


def test_a_line_asks_for_its_cluster_before_anything_starts(tmp_path):
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    command = [
        sys.executable,
        "-m",
        "flows.cli",
        "run",
        "--set",
        "root=out",
        "--set",
        f"verification.ray_address={address}",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert address in done.stderr and "ray start --head" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_cluster_that_asks_for_a_token_says_so(nodes):
    """Left to itself Ray asks again and again, for minutes. The token is read once a process, so
    each try is a process."""
    joins = (
        "import sys; from kernels_eval.pool.ray import start_ray; start_ray(sys.argv[1]);"
        " import ray; print(len(ray.nodes()))"
    )

    def join(address=nodes.address, **environment):
        given = {
            name: value for name, value in clean_environment().items() if name not in TOKEN
        } | environment
        return subprocess.run(
            [sys.executable, "-c", joins, address],
            env=given,
            capture_output=True,
            text=True,
            timeout=120,
        )

    assert join(**TOKEN).stdout == "2\n"
    assert join("auto", RAY_TMPDIR=str(nodes.folder), **TOKEN).stdout == "2\n"
    assert join("", RAY_TMPDIR=str(nodes.folder), RAY_ADDRESS="auto", **TOKEN).stdout == "2\n"
    for wrong in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "another"}):
        with within(100):
            last = join(**wrong).stderr.strip().splitlines()[-1]
        assert (
            nodes.address in last
            and "UsageError" in last
            and "requires a token" in last
            and "ray get-auth-token" in last
        )


# -- a batch on both -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """A folder with six candidates of two tasks: right, wrong, and one without code."""
    folder = tmp_path_factory.mktemp("batch")
    tasks = [task for task in bundled.load("train") if task.name in NAMES]
    texts = [
        (task, bundled.responses(task.name, "cpp")[number])
        for task in tasks
        for number in (0, 1, 2)
    ]
    texts[-1] = (tasks[1], "I would rather not.")
    pl.DataFrame(
        [{"task_id": task.task_id, "response": text} for task, text in texts]
    ).write_parquet(folder / "candidates.parquet")
    pl.DataFrame([{"task_id": task.task_id, "code": task.code} for task in tasks]).write_parquet(
        folder / "tasks.parquet"
    )
    return folder


def verify_batch(folder, out, *arguments, **environment):
    command = [
        sys.executable,
        "-m",
        "flows.cli",
        "verify-batch",
        "candidates.parquet",
        "--tasks",
        "tasks.parquet",
        "--out",
        out,
    ]
    command += ["--workers", "2", "--builders", "1", "--set", "timing.max_s=0.3", *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=clean_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def at_work(node):
    """Has a kernel worker of this node been given a candidate? It has a fork server from then
    on."""
    for process in psutil.Process(node.pid).children(recursive=True):
        try:
            if "KernelWorker" in " ".join(process.cmdline()) and process.children():
                return True
        except psutil.Error:
            continue  # it has just ended
    return False


def outcomes(folder, out):
    return sorted(
        pl.read_parquet(folder / out / "verdicts.parquet")
        .select("row", "status", "reason")
        .iter_rows()
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_batch_is_verified_on_both_nodes_as_it_is_on_one(nodes, batch):
    command = verify_batch(batch, "cluster", "--address", nodes.address)
    worked = set()
    while command.poll() is None:
        worked |= {
            name
            for name, node in (("head", nodes.head), ("other", nodes.other))
            if name not in worked and at_work(node)
        }
        time.sleep(0.05)
    assert command.returncode == 0, command.stdout.read()
    assert worked == {"head", "other"}
    alone = verify_batch(batch, "alone")
    assert alone.wait(timeout=600) == 0, alone.stdout.read()
    found = outcomes(batch, "cluster")
    assert found == outcomes(batch, "alone")
    assert {status for _, status, _ in found} == {"correct", "incorrect", "no_code"}


@pytest.mark.slow
def test_a_node_with_another_build_cache_is_refused(nodes, batch):
    """A library that one node has built would be looked for on the other in vain, or found and not
    be readable."""
    command = verify_batch(
        batch, "unlike", "--address", nodes.address, CONCUR_CACHE=str(batch / "another")
    )
    said = command.communicate(timeout=200)[0].strip().splitlines()[-1]
    assert command.returncode == 2, said
    assert (
        f"this one in {batch / 'another'}" in said
        and "set CONCUR_CACHE to one path before `ray start`" in said
    )
    assert not (batch / "unlike" / "verdicts.parquet").exists()


@pytest.mark.parametrize(
    "changed, text",
    [
        ({"code": "b"}, "another version of kernels_eval"),
        ({"torch": "2.9.0"}, "has torch 2.9.0, this one 2.13.0"),
        ({"cache": "/b"}, "keeps builds in /b"),
    ],
)
def test_nodes_must_be_alike(changed, text):
    here = cluster.Place(node="n1" * 28, cache="/a", code="a", torch="2.13.0")
    there = here._replace(node="n2" * 28)
    cluster.require_alike(here, there)
    cluster.require_alike(
        here, here._replace(**changed)
    )  # on one node they are the same files, whatever has been edited meanwhile
    with pytest.raises(UsageError, match=text) as fault:
        cluster.require_alike(here, there._replace(**changed))
    assert "node n2n2n2n2" in str(fault.value) and fault.value.hint
