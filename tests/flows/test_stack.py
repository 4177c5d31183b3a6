"""The stack of `concur up`: what is refused before anything starts, who is taken for whom, and what
is kept alive."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from uuid import uuid4

import pytest

import flows
from flows.ops import preflight
from flows.ops.control import down, export_lines, status, up, use_stack
from flows.ops.health import fields
from flows.ops.parts import programs
from flows.ops.places import PartState, Places, StackState, changing, read_state, write_state
from flows.ops.processes import Identity, alive, identify, members, send, wait_gone
from flows.ops.settings import StackSettings, load_secrets, load_settings, masked
from flows.ops.supervisor import bound
from kernels_eval.errors import UsageError

ROOT = Path(flows.__file__).parent.parent
PASSWORDS = {
    "PREFECT_SERVER_API_AUTH_STRING": "someone:Prefect-Geheim-1",
    "MLFLOW_AUTH_ADMIN_PASSWORD": "Mlflow-Geheim-2",
}


@pytest.fixture(autouse=True)
def _no_stack_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(
            (
                "PREFECT_API_",
                "PREFECT_HOME",
                "PREFECT_SERVER_API_",
                "PREFECT_SERVER_DATABASE",
                "MLFLOW_",
                "RAY_ADDRESS",
                "RAY_AUTH_",
            )
        ):
            monkeypatch.delenv(name)


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.hint, "every refusal says what would mend it"
    return str(caught.value)


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
        return True
    except OSError:
        return False


def running(
    places: Places, settings: StackSettings, parts: dict[str, Identity | None], supervisor: Identity
) -> StackState:
    places.make()
    states = {
        part: PartState(phase="healthy", identity=identity, since=time.time())
        for part, identity in parts.items()
    }
    state = StackState(
        user=os.getuid(),
        root=str(places.root),
        settings=settings,
        supervisor=supervisor,
        parts=states,
    )
    write_state(places, state)
    return state


# --- settings and secrets


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prefect_port": 70000}, "--prefect-port"),
        ({"prefect_port": 5000}, "prefect_port and mlflow_port are both 5000"),
        ({"host": "example"}, "is not an IPv4 address"),
        ({"prefect_database": "postgresql://me:pw@h/db"}, "PREFECT_SERVER_DATABASE_CONNECTION_URL"),
        ({"mlflow_database": "postgresql://me:pw@h/db"}, "MLFLOW_BACKEND_STORE_URI"),
    ],
)
def test_settings_that_cannot_be_used_are_one_error(options: dict[str, object], said: str) -> None:
    assert said in refused(lambda: load_settings(None, options))


def test_a_file_gives_settings_and_options_win(tmp_path: Path) -> None:
    file = tmp_path / "stack.yaml"
    file.write_text("prefect_port: 4300\nmlflow_port: 5100\nwithout: [ray]\n")
    settings, given = load_settings(str(file), {"mlflow_port": 5200})
    assert (settings.prefect_port, settings.mlflow_port, settings.parts) == (
        4300,
        5200,
        ("prefect", "mlflow", "worker"),
    )
    assert set(given) == {"prefect_port", "mlflow_port", "without"}
    file.write_text("prefect_prot: 4300\n")
    assert "prefect_prot" in refused(lambda: load_settings(str(file), {}))


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7"])
@pytest.mark.parametrize("missing", sorted(PASSWORDS))
def test_an_open_server_without_a_password_is_refused(host: str, missing: str) -> None:
    settings = StackSettings(host=host)
    assert missing in refused(
        lambda: load_secrets(
            settings, {name: value for name, value in PASSWORDS.items() if name != missing}
        )
    )
    assert load_secrets(settings, PASSWORDS).mlflow == PASSWORDS["MLFLOW_AUTH_ADMIN_PASSWORD"]
    assert load_secrets(StackSettings(host="127.0.0.1"), {}).prefect is None


@pytest.mark.parametrize("value", ["short:pw", "no-colon-in-it-at-all"])
def test_a_password_that_is_none_is_refused(value: str) -> None:
    said = refused(lambda: load_secrets(StackSettings(), {"PREFECT_SERVER_API_AUTH_STRING": value}))
    assert value not in said


def test_secrets_are_on_no_command_line_and_only_where_they_are_needed(tmp_path: Path) -> None:
    given = {
        **PASSWORDS,
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": "postgresql://p:Datenbank-3@h/prefect",
        "MLFLOW_BACKEND_STORE_URI": "postgresql://m:Datenbank-4@h/mlflow",
        "PREFECT_API_URL": "http://elsewhere/api",
        "PREFECT_API_KEY": "pnu_x",
        "RAY_ADDRESS": "10.0.0.1:6379",
        "HF_TOKEN": "hf_x",
    }
    settings = StackSettings(host="0.0.0.0")
    secrets = load_secrets(settings, given)
    made = {
        program.part: program for program in programs(Places(tmp_path), settings, secrets, given)
    }
    hidden = [*PASSWORDS.values(), "Datenbank-3", "Datenbank-4"]
    for program in made.values():
        assert not any(secret in " ".join(program.command) for secret in hidden)
        assert not any(secret in repr(program) for secret in hidden)
        assert (
            "http://elsewhere/api" not in program.environment.values()
            and "PREFECT_API_KEY" not in program.environment
        )
    assert not any(secret in repr(secrets) + settings.model_dump_json() for secret in hidden)

    def held(part: str) -> set[str]:
        values = " ".join(made[part].environment.values())
        return {secret for secret in hidden if secret in values}

    assert held("prefect") == {hidden[0], "Datenbank-3"}
    assert held("mlflow") == {hidden[1], "Datenbank-4"}
    assert held("ray") == set()
    assert held("worker") == {hidden[0], hidden[1]}
    assert made["worker"].environment["HF_TOKEN"] == "hf_x"
    assert "--app-name" in made["mlflow"].command


def test_the_page_of_prefect_asks_the_port_it_is_on_and_no_other_page_may(tmp_path: Path) -> None:
    settings = StackSettings(prefect_port=4711)
    prefect = programs(Places(tmp_path), settings, load_secrets(settings, {}), {})[0].environment
    assert (
        prefect["PREFECT_SERVER_UI_API_URL"]
        == prefect["PREFECT_API_URL"]
        == "http://127.0.0.1:4711/api"
    )
    assert (
        prefect["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"]
        == "http://127.0.0.1:4711,http://localhost:4711"
    )


def test_who_holds_the_devices_is_known_to_a_prefect_server_that_was_killed(tmp_path: Path) -> None:
    settings = StackSettings()
    prefect = programs(Places(tmp_path), settings, load_secrets(settings, {}), {})[0].environment
    storage = import_module(
        prefect["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"]
    ).ConcurrencyLeaseStorage
    first, second = (storage(tmp_path / "leases") for _ in range(2))
    lease = asyncio.run(first.create_lease([uuid4()], ttl=timedelta(minutes=5)))
    assert asyncio.run(second.read_lease(lease.id)) == lease


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:pw@h:5/db", "postgresql://u:***@h:5/db"),
        ("postgresql://u@h/db", "postgresql://u@h/db"),
        ("sqlite:///a", "sqlite:///a"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert masked(url) == shown


# --- what is looked at before anything starts


def test_a_busy_port_names_its_holder_and_the_option(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        said = refused(lambda: preflight.require_ports(StackSettings(mlflow_port=port), {"mlflow"}))
        assert (
            f"port {port} for MLflow is in use by process {os.getpid()}" in said
            and "--mlflow-port" in said
        )
        preflight.require_ports(StackSettings(mlflow_port=port), set())  # its own, which runs
        before = set(os.listdir("/proc"))
        ports = dict(
            zip(
                ("prefect_port", "worker_port", "ray_port", "ray_client_port"),
                free_ports(4),
                strict=True,
            )
        )
        assert "MLflow" in refused(
            lambda: up(str(tmp_path / "root"), {"mlflow_port": port, **ports})
        )
        assert not (tmp_path / "root" / "stack" / "state.json").exists()
        assert not [
            pid
            for pid in set(os.listdir("/proc")) - before
            if pid.isdigit() and members(str(tmp_path / "root"), [])
        ]
    preflight.require_ports(StackSettings(mlflow_port=port), {"mlflow"})


def test_an_address_of_another_machine_is_refused() -> None:
    said = refused(lambda: preflight.require_ports(StackSettings(host="192.0.2.250"), {"prefect"}))
    assert "no address 192.0.2.250" in said


def test_a_root_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot write at" in refused(lambda: up(str(tmp_path / "file"), {}))
    assert "cannot write at /proc/1/" in refused(lambda: up("/proc/1/concur", {}))
    assert "is a URL" in refused(lambda: up("s3://bucket/root", {}))


def test_a_disk_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, int(sys.argv[2])));"
    )
    program += "from flows.ops.control import up; up(sys.argv[1], {})"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "root"), str(hard)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "UsageError: no room to write at" in done.stderr and "--root DIR" in done.stderr
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 10**12 - 1000, 1000)
    )
    assert "0 MB are free" in refused(lambda: preflight.require_place(Places(tmp_path / "root")))
    assert [
        path.name
        for path in (tmp_path / "root" / "stack").iterdir()
        if path.name.startswith(".probe")
    ] == []


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense", "is not the URL of a PostgreSQL database"),
        ("mysql://me@127.0.0.1/db", "is not the URL of a PostgreSQL database"),
        (
            "postgresql://me:Geheim@127.0.0.1:9/db",
            "cannot use postgresql+asyncpg://me:***@127.0.0.1:9/db",
        ),
        ("postgresql://me:Geheim@127.0.0.1/", "names no database"),
        ("postgresql://me:Geheim@127.0.0.1:port/db", "port of the URL is no number"),
        ("postgresql+psycopg2://me:Geheim@127.0.0.1/db", "cannot use the driver psycopg2"),
        ("postgresql+://me:Geheim@127.0.0.1/db", "cannot use the driver"),
    ],
)
def test_a_database_that_cannot_be_used_is_refused_without_its_password(
    url: str, said: str
) -> None:
    secrets = load_secrets(StackSettings(), {"PREFECT_SERVER_DATABASE_CONNECTION_URL": url})
    told = refused(lambda: preflight.require_databases(StackSettings(), secrets, {"prefect"}))
    assert (
        said in told and "PREFECT_SERVER_DATABASE_CONNECTION_URL" in told and "Geheim" not in told
    )


def test_one_database_for_both_is_refused() -> None:
    url = "postgresql://me@127.0.0.1:9/db"
    said = refused(
        lambda: preflight.require_databases(
            StackSettings(prefect_database=url, mlflow_database=url),
            load_secrets(StackSettings(), {}),
            {"prefect"},
        )
    )
    assert "the same database" in said


# --- who is who


def test_a_process_is_known_by_its_start_and_not_by_its_id() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        me = identify(child.pid)
        assert me is not None and alive(me)
        later = me.model_copy(update={"started_ticks": me.started_ticks + 1})
        rebooted = me.model_copy(update={"boot": "another"})
        for other in (later, rebooted):
            assert not alive(other) and not send(other, signal.SIGKILL)
        assert child.poll() is None
        assert send(me, signal.SIGKILL)
        assert wait_gone([me], 10.0) == [] and not alive(me)  # also while nobody has collected it
    finally:
        child.kill()
        child.wait()
    assert identify(child.pid) is None


def test_members_are_found_by_session_mark_and_parentage_and_the_caller_never_is(
    tmp_path: Path,
) -> None:
    script = (
        "import subprocess, time; print(subprocess.Popen(['sleep', '60'], start_new_session=True,"
        " env={}).pid, flush=True); time.sleep(60)"
    )
    mark = {**os.environ, "CONCUR_STACK_ROOT": str(tmp_path)}
    leader = subprocess.Popen(
        [sys.executable, "-c", script], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    marked = subprocess.Popen(["sleep", "60"], env=mark)
    other = subprocess.Popen(["sleep", "60"])
    try:
        assert leader.stdout is not None
        below = int(leader.stdout.readline())
        identity = identify(leader.pid)
        assert identity is not None
        assert {one.pid for one in members(None, [identity])} == {leader.pid, below}
        assert {one.pid for one in members(str(tmp_path), [identity])} == {
            leader.pid,
            below,
            marked.pid,
        }
        stale = identity.model_copy(update={"started_ticks": identity.started_ticks - 5})
        assert members(None, [stale]) == []
        here = identify(os.getpid())
        assert here is not None and os.getpid() not in {one.pid for one in members(None, [here])}
    finally:
        for one in (
            *members(None, [identity]),
            *(i for p in (marked, other) if (i := identify(p.pid))),
        ):
            send(one, signal.SIGKILL)
        for process in (leader, marked, other):
            process.wait()


def test_a_state_of_an_earlier_start_of_the_machine_is_none(tmp_path: Path) -> None:
    places, me = Places(tmp_path), identify(os.getpid())
    assert me is not None
    running(places, StackSettings(), {"prefect": me}, me)
    assert read_state(places) is not None and places.state.stat().st_mode & 0o777 == 0o600
    running(places, StackSettings(), {"prefect": me}, me.model_copy(update={"boot": "before"}))
    assert read_state(places) is None
    places.state.write_text("{")
    assert read_state(places) is None
    assert status(str(tmp_path)) == {
        "root": str(tmp_path),
        "running": False,
        "healthy": False,
        "supervisor": None,
        "parts": [],
    }


def test_one_command_at_a_time_and_the_lock_leaves_no_file(tmp_path: Path) -> None:
    places = Places(tmp_path)
    places.make()
    with changing(places):
        before = sorted(tmp_path.rglob("*"))
        said = refused(lambda: changing(Places(tmp_path)).__enter__())
    assert "another `concur up`" in said and sorted(tmp_path.rglob("*")) == before
    with changing(places):
        pass


def test_the_sandboxes_do_not_sweep_what_a_stack_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels_eval.isolation import machine

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = tmp_path / f"concur-{dead.pid}-abc"
    left.mkdir()
    places = Places(tmp_path / "root")
    places.temporary.mkdir()
    machine.remove_abandoned()
    assert places.temporary.is_dir() and places.temporary.parent == tmp_path and not left.exists()


def test_the_stack_of_another_user_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, me = Places(tmp_path), identify(os.getpid())
    assert me is not None
    running(places, StackSettings(), {"prefect": me}, me)
    before = places.state.read_bytes()
    monkeypatch.setattr(os, "getuid", lambda: places.stack.stat().st_uid + 1)
    for call in (lambda: up(str(tmp_path), {}), lambda: down(str(tmp_path))):
        assert "belongs to user" in refused(call)
    assert places.state.read_bytes() == before


# --- health, logs, and the use of a stack


def test_fields_of_a_protocol_buffer_are_those_that_ray_reads() -> None:
    from ray.core.generated import gcs_service_pb2

    answer = gcs_service_pb2.GetAllNodeInfoReply()
    assert fields(answer.SerializeToString()) == set()
    answer.status.message = "x" * 300
    assert fields(answer.SerializeToString()) == {1}
    answer.node_info_list.add().resources_total["CPU"] = 2.0
    assert fields(answer.SerializeToString()) == {1, 2}


def test_a_log_is_cut_and_its_writer_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    with log.open("ab", buffering=0) as handle:
        handle.write(b"old\n" * 300)
        bound(log, 1000)
        handle.write(b"new\n")
        assert log.read_bytes() == b"new\n" and Path(f"{log}.1").read_bytes() == b"old\n" * 300
        bound(log, 1000)
    assert log.read_bytes() == b"new\n"


@pytest.fixture
def prefect_like() -> Iterator[int]:
    """An address that answers as Prefect's health endpoint does."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/api/health" else 404)
            self.end_headers()
            self.wfile.write(b"true")

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_run_uses_the_stack_of_its_root_unless_it_is_told_otherwise(
    tmp_path: Path, prefect_like: int
) -> None:
    me, settings = (
        identify(os.getpid()),
        StackSettings(prefect_port=prefect_like, without=("mlflow", "ray", "worker")),
    )
    assert (
        me is not None and use_stack(str(tmp_path), {}) == [] and use_stack("s3://bucket", {}) == []
    )
    running(Places(tmp_path), settings, {"prefect": me}, me)
    environment: dict[str, str] = {}
    assert use_stack(str(tmp_path), environment) == [f"prefect http://127.0.0.1:{prefect_like}"]
    assert environment["PREFECT_API_URL"] == f"http://127.0.0.1:{prefect_like}/api"
    assert environment["PREFECT_HOME"] == str(tmp_path / "stack" / "prefect")
    for own in ({"PREFECT_API_URL": "http://mine/api"}, {"PREFECT_HOME": "/mine"}):
        told = dict(own)
        assert use_stack(str(tmp_path), told) == [] and told == own
    lines = export_lines(str(tmp_path))
    assert f"export PREFECT_API_URL=http://127.0.0.1:{prefect_like}/api" in lines
    running(
        Places(tmp_path),
        settings.model_copy(update={"prefect_port": free_ports(1)[0]}),
        {"prefect": me},
        me,
    )
    assert "no healthy prefect" in refused(lambda: use_stack(str(tmp_path), {}))


def test_exports_name_the_variable_of_a_secret_and_not_the_secret(tmp_path: Path) -> None:
    me, places = identify(os.getpid()), Places(tmp_path)
    assert me is not None and "no stack runs" in refused(lambda: export_lines(str(tmp_path)))
    state = running(places, StackSettings(), {"prefect": me}, me)
    write_state(places, state.model_copy(update={"authenticated": True}))
    assert 'export PREFECT_API_AUTH_STRING="$PREFECT_SERVER_API_AUTH_STRING"' in export_lines(
        str(tmp_path)
    )


def test_a_stack_that_runs_is_not_started_with_other_settings(
    tmp_path: Path, prefect_like: int
) -> None:
    me = identify(os.getpid())
    assert me is not None
    running(Places(tmp_path), StackSettings(prefect_port=prefect_like), {"prefect": me}, me)
    said = refused(
        lambda: up(
            str(tmp_path), {"prefect_port": prefect_like + 1 if prefect_like < 65535 else 1024}
        )
    )
    assert "`concur down` first" in said


# --- the supervisor, with parts that are quick to start

SUPERVISED = """
import json, os, sys
from flows.ops import supervisor
from flows.ops.parts import Program
from flows.ops.places import Places
from flows.ops.settings import Secrets, StackSettings

def made(places, settings, secrets):
    part = "import subprocess, time; subprocess.Popen(['sleep', '300'], start_new_session=True, env={}); time.sleep(300)"
    body = sys.argv[2] if len(sys.argv) > 2 else part
    return [Program("prefect", [sys.executable, "-c", body], dict(os.environ), "", 1, "")]

supervisor.programs = made
supervisor.fault = lambda *_: None
supervisor.BACKOFF_S = 0.05
places = Places(sys.argv[1])
places.make()
supervisor.Supervisor(places, StackSettings(), Secrets(), {}, supervisor.say).run()
"""


def until(true: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def supervised(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISED, str(tmp_path), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_a_part_that_is_killed_is_started_again_and_its_children_go_with_it(tmp_path: Path) -> None:
    places = Places(tmp_path)

    def part() -> PartState | None:
        state = read_state(places)
        return state.parts["prefect"] if state else None

    def family() -> list[Identity]:
        now = part()
        return members(None, [now.identity]) if now and now.identity else []

    process = supervised(tmp_path)
    try:
        until(lambda: len(family()) == 2, "the part has started its child")
        first, told = family(), part()
        assert told is not None and told.identity is not None
        until(lambda: (now := part()) and now.processes == 2, "the supervisor has seen both")
        send(told.identity, signal.SIGKILL)
        until(
            lambda: (now := part()) and now.restarts == 1 and now.phase == "healthy",
            "it runs again",
        )
        assert wait_gone(first, 10.0) == []
        until(lambda: len(family()) == 2, "the new one has started its child")
        second = family()
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        assert process.returncode == 0 and not [one for one in second if alive(one)]
        assert not places.state.exists() and not places.temporary.exists()
    finally:
        process.kill()
        for one in family():
            send(one, signal.SIGKILL)


def test_a_part_that_never_runs_is_left_alone_after_a_few_times_and_says_why(
    tmp_path: Path,
) -> None:
    process = supervised(tmp_path, "import sys; print('no such table'); sys.exit(3)")
    try:
        until(
            lambda: (
                (state := read_state(Places(tmp_path))) and state.parts["prefect"].phase == "failed"
            ),
            "it is left alone",
        )
        state = read_state(Places(tmp_path))
        assert state is not None and "ended with status 3" in state.parts["prefect"].reason
        assert b"no such table" in Places(tmp_path).log("prefect").read_bytes()
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    finally:
        process.kill()
    assert json.dumps(status(str(tmp_path))["parts"]) == "[]"


# --- the real parts


class Stack:
    """A real stack in an empty directory, driven by the command as a user would."""

    def __init__(self, root: Path, *options: str, **environment: str) -> None:
        names = ("prefect", "worker", "mlflow", "ray", "ray-client")
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.ports["ray-client"] = next(
            port for port in range(10002, 20000) if free(port)
        )  # Ray's default for its workers
        self.root, self.options = (
            root,
            [
                *(f"--{name}-port={port}" for name, port in self.ports.items()),
                *options,
            ],
        )
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            **environment,
        }

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "flows.cli", *words, "--root", str(self.root)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=900, env=self.environment
        )

    def up(self) -> subprocess.CompletedProcess[str]:
        return self.command("up", *self.options, "--timeout", "600", "--json")

    def look(self) -> dict[str, dict[str, object]]:
        """Part -> its row; empty unless every part is healthy."""
        done = self.command("status", "--json")
        data = json.loads(done.stdout)
        assert (done.returncode == 0) == data["healthy"]
        return {row["part"]: row for row in data["parts"]} if data["healthy"] else {}

    def members(self) -> list[Identity]:
        state = read_state(Places(self.root))
        leaders = [one.identity for one in state.parts.values() if one.identity] if state else []
        return members(str(self.root), leaders)

    def kill(self) -> None:
        """Whatever the test did, nothing stays."""
        self.command("down")
        for one in self.members():
            send(one, signal.SIGKILL)


def listening(pids: set[int]) -> set[str]:
    """Addresses on which these processes listen."""
    import psutil

    return {
        one.laddr.ip.removeprefix("::ffff:")
        for one in psutil.net_connections("tcp")
        if one.pid in pids and one.status == psutil.CONN_LISTEN
    }


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_stack_comes_up_survives_the_death_of_each_part_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    stack = Stack(tmp_path / "root")
    try:
        done = stack.up()
        assert done.returncode == 0, done.stderr
        rows = stack.look()
        assert (
            set(rows) == {"prefect", "mlflow", "ray", "worker"}
            and json.loads(done.stdout)["healthy"]
        )
        everybody = {one.pid for one in stack.members()}
        assert listening(everybody) == {"127.0.0.1"}
        assert all(Path(str(row["log"])).stat().st_size > 0 for row in rows.values())

        again = stack.up()
        assert again.returncode == 0 and {
            part: row["pid"] for part, row in stack.look().items()
        } == {p: r["pid"] for p, r in rows.items()}

        for part in ("prefect", "worker", "ray", "mlflow"):
            pid = rows[part]["pid"]
            os.kill(int(str(pid)), signal.SIGKILL)
            until(
                lambda part=part, pid=pid: (now := stack.look()) and now[part]["pid"] != pid,
                f"{part} runs again",
                400.0,
            )
            assert int(str(stack.look()[part]["restarts"])) >= 1

        data = json.loads(stack.command("status", "--json").stdout)
        pids = {row["part"]: row["pid"] for row in data["parts"]}
        os.kill(data["supervisor"], signal.SIGKILL)
        until(
            lambda: json.loads(stack.command("status", "--json").stdout)["supervisor"] is None,
            "the supervisor is seen to be gone",
        )
        assert not stack.look()
        assert (
            stack.up().returncode == 0
            and {part: row["pid"] for part, row in stack.look().items()} == pids
        )

        os.kill(json.loads(stack.command("status", "--json").stdout)["supervisor"], signal.SIGKILL)
        whole = stack.members()
        down = stack.command("down", "--json")
        assert down.returncode == 0 and set(json.loads(down.stdout)["stopped"]) == set(pids), (
            down.stderr
        )
        assert not [one for one in whole if alive(one)] and not stack.members()
        assert not Places(stack.root).temporary.exists()
        left = {
            path.relative_to(stack.root / "stack").parts[0]
            for path in (stack.root / "stack").rglob("*")
        }
        assert left <= {"logs", "prefect"}
        preflight.require_ports(
            StackSettings(**{f"{n.replace('-', '_')}_port": p for n, p in stack.ports.items()}),
            set(pids),
        )
        assert "no stack runs" in stack.command("down").stdout
    finally:
        stack.kill()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_open_stack_asks_for_passwords_that_nobody_else_sees(tmp_path: Path) -> None:
    pytest.importorskip("flask_wtf", reason="needs the extra `server`")
    from urllib.error import HTTPError
    from urllib.request import Request, build_opener

    stack = Stack(tmp_path / "root", "--host=0.0.0.0", "--without=ray", **PASSWORDS)
    try:
        done = stack.up()
        assert done.returncode == 0, done.stderr
        seen = done.stdout + done.stderr + stack.command("env").stdout
        for one in stack.members():
            seen += Path(f"/proc/{one.pid}/cmdline").read_text().replace("\0", " ")
        for path in (stack.root / "stack").rglob("*"):
            if path.is_file() and path.suffix not in (".db", ".db-wal", ".db-shm"):
                seen += path.read_text(errors="replace")
                assert path.stat().st_mode & 0o077 == 0, path
        assert not [
            secret
            for secret in PASSWORDS.values()
            if secret in seen or secret.rpartition(":")[2] in seen
        ]
        asked = {
            "prefect": "/api/admin/version",
            "mlflow": "/api/2.0/mlflow/experiments/get?experiment_id=0",
        }
        for part, path in asked.items():
            with pytest.raises(HTTPError) as caught:
                build_opener().open(f"http://127.0.0.1:{stack.ports[part]}{path}", timeout=30)
            assert caught.value.code == 401
        with pytest.raises(HTTPError) as caught:
            build_opener().open(
                Request(
                    f"http://127.0.0.1:{stack.ports['mlflow']}/", headers={"Host": "evil.example"}
                ),
                timeout=30,
            )
        assert caught.value.code == 403
        without = subprocess.run(
            [sys.executable, "-m", "flows.cli", "up", "--root", str(stack.root)],
            capture_output=True,
            text=True,
            env={name: value for name, value in stack.environment.items() if name not in PASSWORDS},
        )
        assert without.returncode == 2 and "password" in without.stderr
    finally:
        stack.kill()
    assert not stack.members()
