"""One vLLM server that is kept alive, and the supervisor that lets nothing of it outlive its owner:
real processes; vLLM alone is a stand-in (support/fake_vllm.py)."""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tasks.synthesis import replica as replica_module
from tasks.synthesis.config import ServerConfig
from tasks.synthesis.replica import Replica, ReplicaSpec
from tasks.synthesis.supervisor import Command, Supervised
from tests.support.vllm_servers import FAKE, WAIT_S, stand_ins
from tests.support.waiting import until


@pytest.fixture
def fake(tmp_path):
    with stand_ins(tmp_path / "fake") as fake:
        yield fake


def spec(fake, **changes):
    settings = {"log_mib": 1, "start_timeout_s": WAIT_S, "restarts": 2, "restart_pause_s": 0.05}
    return ReplicaSpec(
        config=ServerConfig(**({"drain_s": 0.2, **settings} | changes)),
        command=(*FAKE.split(), "org/model", "--served-model-name", "m"),
        names=("m",),
        env={"FAKE_VLLM_DIR": str(fake.home)},
        api_key="k",
        log_dir=str(fake.home / "logs"),
    )


def healthy(replica, starts=1):
    until(
        lambda: (status := replica.renew()).state == "healthy" and status.starts >= starts,
        f"health after start {starts}",
    )
    return replica.renew().base_url


def ask(url):
    body = {"model": "m", "messages": [{"role": "user", "content": "prompt"}], "seed": 0}
    headers = {"authorization": "Bearer k"}
    answer = httpx.post(f"{url}/chat/completions", json=body, headers=headers, timeout=WAIT_S)
    return answer.json()


def test_what_is_in_flight_is_answered_before_a_server_stops(fake):
    fake.set("hold")
    replica = Replica(spec(fake, drain_s=WAIT_S), 0)
    url, answers = healthy(replica), []
    asking = threading.Thread(target=lambda: answers.append(ask(url)))
    asking.start()
    stopping = threading.Thread(target=replica.stop)
    until(lambda: fake.asked, "the request")
    stopping.start()
    until(
        lambda: "=== stopping: asked to" in (fake.home / "logs" / "replica-0.log").read_text(),
        "the order to stop",
    )
    assert not answers
    fake.unset("hold")
    asking.join(timeout=WAIT_S)
    stopping.join(timeout=WAIT_S)
    assert answers and answers[0]["choices"] and fake.alive() == []


def test_a_server_that_is_never_healthy_is_given_up(fake, monkeypatch):
    """With what its last answer said; here every look waits for an answer."""
    fake.set("never_healthy")
    look = replica_module.unhealthy

    def answered(address, names, key, _):
        return until(
            lambda: "503" in (fault := look(address, names, key, WAIT_S) or "") and fault,
            "an answer",
        )

    monkeypatch.setattr(replica_module, "unhealthy", answered)
    replica = Replica(spec(fake, start_timeout_s=0.01), 0)
    until(lambda: replica.renew().state == "failed", "the last word")
    said = replica.renew().error
    assert (
        "did not become healthy: it was not healthy 0 s after its start (Server error '503" in said
    )
    assert "startup complete" in said
    replica.stop()


def test_a_server_that_ignores_the_order_to_stop_is_killed(fake):
    fake.set("stubborn")
    replica = Replica(spec(fake, drain_s=0.3), 0)
    healthy(replica)
    replica.stop()
    assert fake.alive() == []


def test_a_server_that_answers_no_more_is_started_again(fake, monkeypatch):
    monkeypatch.setattr(replica_module, "UNRESPONSIVE_S", 1.0)
    monkeypatch.setattr(replica_module, "HEALTH_TIMEOUT_S", 0.4)
    monkeypatch.setattr(replica_module, "HEALTH_EVERY_S", 0.1)
    replica = Replica(spec(fake, drain_s=0.2, restarts=20, restart_pause_s=1.0), 0)
    healthy(replica)
    fake.set("hang")
    until(lambda: replica.renew().state == "restarting", "the restart")
    assert "it has not answered for 1 s" in replica.renew().error
    fake.unset("hang")
    healthy(replica, starts=2)
    replica.stop()


def test_what_the_engine_died_of_is_quoted(tmp_path):
    """The server's own last words are that its engine failed, and 'see above'."""
    said = "(EngineCore pid=7) ERROR 11-26 15:07:09 [core.py:1210] "
    cause = f"{said}ValueError: No valid attention backend found"
    server = [f"(APIServer pid=5)   File {number}" for number in range(40)]
    last = "(APIServer pid=5) RuntimeError: Engine core initialization failed."
    log = tmp_path / "replica-0.log"
    log.write_text("\n".join([f"{said}Traceback", cause, *server, last, ""]))
    supervised = object.__new__(Supervised)
    supervised.log = str(log)
    assert supervised.tail().splitlines()[0] == cause
    assert supervised.tail().splitlines()[-1] == last
    log.write_text(f"{cause}\n{last}\n")
    assert supervised.tail() == f"{cause}\n{last}"


def test_pauses_grow_and_restarts_are_bounded(fake, monkeypatch):
    replica = Replica(spec(fake, restarts=2, restart_pause_s=0.2), 0)
    pauses = []
    wait = replica._stopping.wait
    monkeypatch.setattr(
        replica._stopping, "wait", lambda timeout=None: pauses.append(timeout) or wait(timeout)
    )
    for number in range(1, 4):
        healthy(replica, starts=number)
        os.kill(fake.starts[-1]["pid"], signal.SIGKILL)
    until(lambda: replica.renew().state == "failed", "the last word")
    assert pauses == [0.2, 0.4] and "crashed 3 times" in replica.renew().error
    replica.stop()


def test_a_taken_port_is_left_to_who_has_it(fake, monkeypatch):
    replica, taken = Replica(spec(fake), 0), threading.Event()
    first = healthy(replica)
    monkeypatch.setattr(replica._stopping, "wait", lambda timeout: not taken.wait(WAIT_S))
    os.kill(fake.starts[0]["pid"], signal.SIGKILL)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        until(lambda: _binds(other, int(first.rsplit(":", 1)[1].split("/")[0])), "the port")
        other.listen()
        taken.set()
        assert healthy(replica, starts=2) != first
    replica.stop()


def test_a_port_that_is_lost_between_the_look_and_the_start_is_no_failure(fake, monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        found = [other.getsockname()[1]]
        real = replica_module.free_port
        monkeypatch.setattr(
            replica_module,
            "free_port",
            lambda host, wanted=None: found.pop() if found else real(host, wanted),
        )
        replica = Replica(spec(fake, restart_pause_s=3600.0), 0)
        healthy(replica, starts=2)
    assert not found and len(fake.starts) == 2, "the second start needed no pause"
    replica.stop()


def _binds(listener, port):
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def test_the_log_is_bounded_and_keeps_the_end(fake):
    fake.set("chatty")  # three times the bound
    replica = Replica(spec(fake), 0)
    healthy(replica)
    log = fake.home / "logs" / "replica-0.log"
    until(lambda: "startup complete" in log.read_text()[-200:], "the last line")
    files = sorted((fake.home / "logs").glob("replica-0*"))
    assert [path.name for path in files] == ["replica-0.log", "replica-0.log.1"]
    assert 1 << 19 < sum(path.stat().st_size for path in files) <= 1 << 20
    replica.stop()


def test_two_runs_under_one_root_do_not_share_a_log(fake):
    replicas = [Replica(spec(fake), 0) for _ in range(2)]
    for replica in replicas:
        healthy(replica)
    assert sorted(path.name for path in (fake.home / "logs").glob("*.log")) == [
        "replica-0-2.log",
        "replica-0.log",
    ]
    for replica in replicas:
        replica.stop()


# --- the lease
# --------------------------------------------------------------------------------------------------


def supervised(fake, *command, **changes):
    serve = [*FAKE.split(), "m", "--served-model-name", "m", "--host", "127.0.0.1", "--port", "0"]
    settings = {"log_bytes": 1 << 20, "lease_s": 60.0, "grace_s": 0.5} | changes
    told = Command([*command] or serve, str(fake.home / "logs"), "server", **settings)
    return Supervised(told, {**os.environ, "FAKE_VLLM_DIR": str(fake.home), "VLLM_API_KEY": "k"})


def test_a_lease_that_nobody_renews_runs_out(fake):
    server = supervised(fake, lease_s=4.0)
    until(lambda: fake.starts, "the server")
    renewing = time.monotonic() + 4.5
    while time.monotonic() < renewing:
        server.renew()
        assert not server.ended.wait(0.1)
    assert server.ended.wait(WAIT_S) and server.status == 0
    assert fake.alive() == [] and "nobody has renewed the lease" in Path(server.log).read_text()


def test_where_the_supervisor_is_killed_the_server_ends_all_the_same(fake):
    server = supervised(fake)
    until(lambda: fake.starts and server.pid, "the server")
    (supervisor,) = [
        process for process in fake.alive() if "synthesis.supervisor" in " ".join(process.cmdline())
    ]
    supervisor.kill()
    assert server.ended.wait(WAIT_S)
    until(lambda: not psutil.pid_exists(server.pid), "the end of the server")
    psutil.Process(
        fake.starts[0]["engine"]
    ).kill()  # vLLM's ends with its server: this one is made not to
    until(lambda: not fake.alive(), "the end of the engine")


def test_a_command_that_cannot_be_run_is_said(fake):
    server = supervised(fake, "/no/such/program")
    assert server.ended.wait(WAIT_S)
    assert server.fault == "/no/such/program: No such file or directory"
