"""The stack of `concur up`: what is refused before anything starts, who is taken for whom, and what
is kept alive."""

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
from datetime import timedelta
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, build_opener
from uuid import uuid4

import pytest

from flows.ops import control, manager, part, preflight
from flows.ops.control import down, export_lines, status, up, use_stack
from flows.ops.manager import Manager
from flows.ops.places import ROOT_VARIABLE, Places, StackState
from flows.ops.programs import Stack as Made
from flows.ops.programs import program
from flows.ops.settings import (
    MLFLOW_SECRET,
    PARTS,
    PREFECT_SECRET,
    StackSettings,
    load_secrets,
    load_settings,
)
from kernels_eval.errors import UsageError
from kernels_eval.sandbox.process_tree import alive, identify, send, wait_gone
from tests.support import commands
from tests.support.night import until
from tests.support.servers import free_port, free_ports
from tests.support.stacks import PORTS, Stack

PASSWORDS = {
    "PREFECT_SERVER_API_AUTH_STRING": "someone:Prefect-Geheim-1",
    "MLFLOW_AUTH_ADMIN_PASSWORD": "Mlflow-Geheim-2",
}
DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"


@pytest.fixture(autouse=True)
def _no_stack_of_the_caller(monkeypatch):
    for name in list(os.environ):
        if name.startswith(commands.FOREIGN):
            monkeypatch.delenv(name)


@pytest.fixture
def me():
    found = identify(os.getpid())
    assert found is not None
    return found


def refused(call):
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.hint, "every refusal says what would correct it"
    return str(caught.value)


def recorded(root, settings, manager, authenticated=False):
    """The places of a stack whose state says that this process manages it."""
    places = Places(root)
    places.make()
    places.write_state(StackState(settings=settings, manager=manager, authenticated=authenticated))
    return places


def stack_of(environment, root=Path("root"), **options):
    settings = StackSettings(**options)
    return Made(Places(root), settings, load_secrets(settings, environment))


def made(root, environment, **options):
    stack = stack_of(environment, root, **options)
    return {name: program(name, stack, environment) for name in stack.settings.parts}


# --- settings and secrets


@pytest.mark.parametrize(
    "options, said",
    [
        ({"prefect_port": 70000}, "--prefect-port"),
        ({"prefect_port": 5000}, "prefect_port and mlflow_port are both 5000"),
        ({"host": "example"}, "is not an IPv4 address"),
        ({"prefect_database": "postgresql://me:pw@h/db"}, DATABASE),
        ({"mlflow_database": "postgresql://me:pw@h/db"}, "MLFLOW_BACKEND_STORE_URI"),
    ],
)
def test_settings_that_cannot_be_used_are_one_error(options, said):
    assert said in refused(lambda: load_settings(None, options))


def test_a_file_gives_settings_and_options_win(tmp_path):
    file = tmp_path / "stack.yaml"
    file.write_text("prefect_port: 4300\nmlflow_port: 5100\nwithout: [ray]\n")
    settings, given = load_settings(str(file), {"mlflow_port": 5200})
    assert (settings.prefect_port, settings.mlflow_port) == (4300, 5200)
    assert settings.parts == ("prefect", "mlflow", "pages", "worker")
    assert set(given) == {"prefect_port", "mlflow_port", "without"}
    file.write_text("prefect_prot: 4300\n")
    assert "prefect_prot" in refused(lambda: load_settings(str(file), {}))


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7"])
@pytest.mark.parametrize("missing", sorted(PASSWORDS))
def test_an_open_server_without_a_password_is_refused(host, missing):
    settings = StackSettings(host=host)
    given = {name: value for name, value in PASSWORDS.items() if name != missing}
    assert missing in refused(lambda: load_secrets(settings, given))
    assert load_secrets(settings, PASSWORDS).mlflow == PASSWORDS[MLFLOW_SECRET]
    assert load_secrets(StackSettings(host="127.0.0.1"), {}).prefect is None


@pytest.mark.parametrize("value", ["short:pw", "no-colon-in-it-at-all"])
def test_a_password_that_is_none_is_refused(value):
    assert value not in refused(lambda: load_secrets(StackSettings(), {PREFECT_SECRET: value}))


def test_secrets_are_on_no_command_line_and_only_where_they_are_needed(tmp_path):
    given = {
        **PASSWORDS,
        DATABASE: "postgresql://p:Datenbank-3@h/prefect",
        "MLFLOW_BACKEND_STORE_URI": "postgresql://m:Datenbank-4@h/mlflow",
        "PREFECT_API_URL": "http://elsewhere/api",
        "PREFECT_API_KEY": "pnu_x",
        "RAY_ADDRESS": "10.0.0.1:6379",
        "HF_TOKEN": "hf_x",
    }
    settings = StackSettings(host="0.0.0.0")
    parts = made(tmp_path, given, host="0.0.0.0")
    hidden = [*PASSWORDS.values(), "Datenbank-3", "Datenbank-4"]
    for each in parts.values():
        assert not any(secret in " ".join(each.command) for secret in hidden)
        assert not any(secret in repr(each) for secret in hidden)
        assert "http://elsewhere/api" not in each.environment.values()
        assert "PREFECT_API_KEY" not in each.environment
    seen = repr(load_secrets(settings, given)) + settings.model_dump_json()
    seen += manager.configuration(Places(tmp_path), settings.parts)
    assert not any(secret in seen for secret in hidden)
    held = {
        part: {secret for secret in hidden if secret in " ".join(each.environment.values())}
        for part, each in parts.items()
    }
    assert held == {
        "prefect": {hidden[0], "Datenbank-3"},
        "mlflow": {hidden[1], "Datenbank-4"},
        "pages": {hidden[0]},
        "ray": set(),
        "worker": {hidden[0], hidden[1]},
    }
    assert parts["worker"].environment["HF_TOKEN"] == "hf_x"
    assert "--app-name=basic-auth" in parts["mlflow"].command


def test_the_page_of_prefect_asks_the_port_it_is_on_and_no_other_page_may(tmp_path):
    told = made(tmp_path, {}, prefect_port=4711)["prefect"].environment
    url = "http://127.0.0.1:4711"
    assert told["PREFECT_SERVER_UI_API_URL"] == told["PREFECT_API_URL"] == f"{url}/api"
    assert told["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] == f"{url},http://localhost:4711"


def test_who_holds_the_devices_is_known_to_a_prefect_server_that_was_killed(tmp_path):
    told = made(tmp_path, {})["prefect"].environment
    module = import_module(told["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"])
    first, second = (module.ConcurrencyLeaseStorage(tmp_path / "leases") for _ in range(2))
    lease = asyncio.run(first.create_lease([uuid4()], ttl=timedelta(minutes=5)))
    assert asyncio.run(second.read_lease(lease.id)) == lease


# --- what is looked at before anything starts


def test_a_busy_port_names_its_holder_and_the_option(tmp_path):
    names = [f"{name.replace('-', '_')}_port" for name in PORTS if name != "mlflow"]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    with socket.create_server(("127.0.0.1", 0)) as held:
        ports["mlflow_port"] = port = held.getsockname()[1]
        said = refused(lambda: preflight.require_ports(StackSettings(**ports)))
        assert f"port {port} for MLflow is in use by process {os.getpid()}" in said
        assert "--mlflow-port" in said
        preflight.require_ports(StackSettings(**ports, without=("mlflow",)))
        assert "MLflow" in refused(lambda: up(str(tmp_path / "root"), ports))
        places = Places(tmp_path / "root")
        assert not places.state.exists() and places.processes() == []
    preflight.require_ports(StackSettings(**ports))


def test_an_address_of_another_machine_is_refused():
    said = refused(lambda: preflight.require_ports(StackSettings(host="192.0.2.250")))
    assert "no address 192.0.2.250" in said


def test_a_root_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot write at" in refused(lambda: up(str(tmp_path / "file"), {}))
    assert "cannot write at /proc/1/" in refused(lambda: up("/proc/1/concur", {}))
    assert "is a URL" in refused(lambda: up("s3://bucket/root", {}))


def test_a_disk_without_room_is_refused(tmp_path, monkeypatch):
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, int(sys.argv[2])));"
        "from flows.ops.control import up; up(sys.argv[1], {})"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "root"), str(hard)]
    done = commands.run(words, commands.environment())
    assert "UsageError: no room to write at" in done.stderr and "--root DIR" in done.stderr
    full = shutil._ntuple_diskusage(10**12, 10**12 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert "0 MB are free" in refused(lambda: preflight.require_place(Places(tmp_path / "root")))
    assert not list((tmp_path / "root" / "stack").glob(".probe*"))


@pytest.mark.parametrize(
    "url, said",
    [
        ("nonsense", "is not the URL of a PostgreSQL database"),
        ("mysql://me@127.0.0.1/db", "is not the URL of a PostgreSQL database"),
        (
            "postgresql://me:Geheim@127.0.0.1:9/db",
            "cannot use postgresql+asyncpg://me:***@127.0.0.1:9/db",
        ),
        ("postgresql://me:Geheim@127.0.0.1/", "names no database"),
        ("postgresql://me:Geheim@127.0.0.1:port/db", "port of the URL is not a number"),
        ("postgresql+psycopg2://me:Geheim@127.0.0.1/db", "cannot use the driver psycopg2"),
        ("postgresql+://me:Geheim@127.0.0.1/db", "cannot use the driver"),
    ],
)
def test_a_database_that_cannot_be_used_is_refused_without_its_password(url, said):
    told = refused(lambda: preflight.require_databases(stack_of({DATABASE: url})))
    assert said in told and DATABASE in told and "Geheim" not in told


def test_one_database_for_both_is_refused():
    url = "postgresql://me@127.0.0.1:9/db"
    stack = stack_of({}, prefect_database=url, mlflow_database=url)
    assert "the same database" in refused(lambda: preflight.require_databases(stack))


# --- who is who


def test_a_state_of_an_earlier_start_of_the_machine_is_none(tmp_path, me):
    places = recorded(tmp_path, StackSettings(), me)
    assert places.read_state() is not None and places.state.stat().st_mode & 0o777 == 0o600
    recorded(tmp_path, StackSettings(), me.model_copy(update={"boot": "before"}))
    assert places.read_state() is None
    places.state.write_text("{")
    assert places.read_state() is None
    nothing = {"running": False, "healthy": False, "supervisor": None, "parts": []}
    assert status(str(tmp_path)) == {"root": str(tmp_path)} | nothing


def test_one_command_at_a_time_and_the_lock_leaves_no_file(tmp_path):
    places = Places(tmp_path)
    places.make()
    with places.changing():
        before = sorted(tmp_path.rglob("*"))
        said = refused(lambda: Places(tmp_path).changing().__enter__())
        assert "another `concur up`" in said and sorted(tmp_path.rglob("*")) == before
    with places.changing():
        pass


def test_the_sandboxes_do_not_sweep_what_a_stack_needs(tmp_path, monkeypatch):
    from kernels_eval.sandbox import machine

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = tmp_path / f"concur-{dead.pid}-abc"
    left.mkdir()
    places = Places(tmp_path / "root")
    places.temporary.mkdir()
    machine.remove_abandoned()
    assert places.temporary.is_dir() and places.temporary.parent == tmp_path and not left.exists()


def test_the_stack_of_another_user_is_left_alone(tmp_path, monkeypatch, me):
    places = recorded(tmp_path, StackSettings(), me)
    before = places.state.read_bytes()
    monkeypatch.setattr(os, "getuid", lambda: places.stack.stat().st_uid + 1)
    for call in (lambda: up(str(tmp_path), {}), lambda: down(str(tmp_path))):
        assert "belongs to user" in refused(call)
    assert places.state.read_bytes() == before


# --- the use of a stack


@pytest.fixture
def prefect_like(tmp_path):
    """The port of a server that answers as Prefect's health endpoint does."""
    (tmp_path / "served" / "api").mkdir(parents=True)
    (tmp_path / "served" / "api" / "health").write_text("true")
    files = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), files) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_a_run_uses_the_stack_of_its_root_unless_it_is_told_otherwise(
    tmp_path, prefect_like, me, monkeypatch
):
    monkeypatch.setattr("flows.ops.health.ANSWER_S", 60.0)
    without = ("mlflow", "pages", "ray", "worker")
    settings = StackSettings(prefect_port=prefect_like, without=without)
    root, url = str(tmp_path), f"http://127.0.0.1:{prefect_like}"
    assert use_stack(root, {}) == [] and use_stack("s3://bucket", {}) == []
    recorded(tmp_path, settings, me)
    environment = {}
    assert use_stack(root, environment) == [f"prefect {url}"]
    assert environment["PREFECT_API_URL"] == f"{url}/api"
    assert environment["PREFECT_HOME"] == str(tmp_path / "stack" / "prefect")
    for own in ({"PREFECT_API_URL": "http://mine/api"}, {"PREFECT_HOME": "/mine"}):
        told = dict(own)
        assert use_stack(root, told) == [] and told == own
    assert f"export PREFECT_API_URL={url}/api" in export_lines(root)
    recorded(tmp_path, settings.model_copy(update={"prefect_port": free_port()}), me)
    assert "no healthy prefect" in refused(lambda: use_stack(root, {}))


def test_ray_is_told_where_it_listens_before_it_is_asked(tmp_path, monkeypatch, me):
    """To ask it imports it, and Ray reads this variable on import: `concur run` beside `concur up`
    looked for it at the machine's own address."""
    recorded(tmp_path, StackSettings(without=("prefect", "mlflow", "pages", "worker")), me)
    environment, seen = {}, []
    monkeypatch.setattr(control, "fault", lambda *_: seen.append(dict(environment)) or "")
    assert use_stack(str(tmp_path), environment)
    assert seen[0]["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0" and "RAY_AUTH_MODE" in seen[0]


def test_exports_name_the_variable_of_a_secret_and_not_the_secret(tmp_path, me):
    assert "no stack is running" in refused(lambda: export_lines(str(tmp_path)))
    recorded(tmp_path, StackSettings(), me, authenticated=True)
    assert f'export PREFECT_API_AUTH_STRING="${PREFECT_SECRET}"' in export_lines(str(tmp_path))


def test_a_stack_that_runs_is_not_started_with_other_settings(tmp_path, me):
    recorded(tmp_path, StackSettings(prefect_port=4711), me)
    said = refused(lambda: up(str(tmp_path), {"prefect_port": 4712}))
    assert "`concur down` first" in said


# --- the manager, with parts that are quick to start

FAKE_PART = """
import os, sys
from dataclasses import replace
from flows.ops import part

made = part.program
fake = [sys.executable, "-c", os.environ["FAKE"]]
part.program = lambda *words: replace(made(*words), command=fake)
part.main()
"""
WITH_CHILD = """
import subprocess, time
subprocess.Popen(["sleep", "300"], start_new_session=True, env={})
time.sleep(300)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a manager whose only part, Prefect, runs a program."""
    places = Places(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(commands.ROOT))
    monkeypatch.setattr(control, "fault", lambda *_: "")

    def started(body):
        (tmp_path / "fake.py").write_text(FAKE_PART)
        monkeypatch.setattr(manager, "LAUNCHER", (sys.executable, str(tmp_path / "fake.py")))
        monkeypatch.setenv("FAKE", body)
        places.make()
        settings = StackSettings(without=("mlflow", "pages", "ray", "worker"))
        return places, control._start(Made(places, settings, load_secrets(settings, {})))

    yield started
    for one in places.processes():
        send(one, signal.SIGKILL)
    places.clean()


def row(places):
    (found,) = status(str(places.root))["parts"]
    return found


def test_a_part_that_is_killed_is_started_again_and_its_children_go_with_it(start):
    places, leader = start(WITH_CHILD)
    until(lambda: row(places)["processes"] == 2, 60, "the part has started its child")
    first = [one for one in places.processes() if one.pid != leader.pid]
    assert len(first) == 2
    os.kill(row(places)["pid"], signal.SIGKILL)
    until(
        lambda: (now := row(places))["restarts"] == 1 and now["processes"] == 2, 60, "it runs again"
    )
    assert row(places)["health"] == "healthy" and wait_gone(first, 60) == []
    second = places.processes()
    assert len(second) == 3 and down(str(places.root))["stopped"] == ["prefect"]
    assert not [one for one in second if alive(one)]
    assert not places.state.exists() and not places.temporary.exists()


def test_parts_do_not_outlive_a_manager_that_is_killed(start):
    places, leader = start("import time; time.sleep(300)")
    until(lambda: row(places)["processes"] == 1, 60, "the part runs")
    whole = places.processes()
    send(leader, signal.SIGKILL)
    assert wait_gone(whole, 60) == []
    found = status(str(places.root))
    told = (found["running"], found["supervisor"], row(places)["reason"])
    assert told == (False, None, "not running")
    down(str(places.root))
    assert not places.state.exists() and not places.temporary.exists()


@pytest.mark.slow
def test_a_part_that_never_runs_is_left_alone_after_a_few_times_and_says_why(start):
    places, _ = start("import sys; print('no such table'); sys.exit(3)")
    until(lambda: row(places)["health"] == "failed", 60, "it is left alone")
    assert row(places)["reason"] == "exit status 3" and row(places)["restarts"] == manager.RETRIES
    assert b"no such table" in places.log("prefect").read_bytes()
    assert {path.stat().st_mode & 0o077 for path in places.logs.iterdir()} == {0}
    Manager(places).ask("startProcess", "prefect", False)
    until(lambda: row(places)["restarts"] > manager.RETRIES, 60, "it is started again when asked")
    down(str(places.root))
    assert status(str(places.root))["parts"] == []


def test_a_part_whose_manager_has_ended_kills_nothing_and_does_not_start(tmp_path, me):
    """Its parent is init by then, whose children are not the stack's."""
    dead = subprocess.Popen(["true"])
    gone = identify(dead.pid)
    dead.wait()
    assert gone is not None
    places = recorded(tmp_path, StackSettings(), gone)
    places.make_temporary()
    other = subprocess.Popen(["sleep", "60"], env={})
    try:
        part.kill_leftovers("prefect", places, gone)
        for one in (gone, me.model_copy(update={"started_ticks": 1})):
            recorded(tmp_path, StackSettings(), one)
            words = [sys.executable, "-m", "flows.ops.part", "prefect"]
            done = commands.run(words, commands.environment(**{ROOT_VARIABLE: str(tmp_path)}))
            assert done.returncode == 1 and "its manager has ended" in done.stderr
            assert not places.starts("prefect").exists()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        places.clean()


# --- the real parts


def listening(pids):
    """Addresses on which these processes listen."""
    import psutil

    return {
        one.laddr.ip.removeprefix("::ffff:")
        for one in psutil.net_connections("tcp")
        if one.pid in pids and one.status == psutil.CONN_LISTEN
    }


def ended_by_down(stack):
    """What `concur down` says, which has left no process."""
    whole = stack.processes()
    done = stack.command("down", "--json")
    assert done.returncode == 0, done.stderr
    assert not [one for one in whole if alive(one)] and not stack.processes()
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_stack_comes_up_survives_the_death_of_each_part_and_leaves_nothing(tmp_path):
    stack = Stack(tmp_path / "root")
    try:
        assert json.loads(stack.up("--json").stdout)["healthy"]
        rows = stack.status()
        assert set(rows) == set(PARTS) and stack.look()["healthy"]
        assert listening({one.pid for one in stack.processes()}) == {"127.0.0.1"}
        assert all(Path(row["log"]).stat().st_size > 0 for row in rows.values())

        def pids():
            return {part: row["pid"] for part, row in stack.status().items()}

        before = pids()
        stack.up()
        assert pids() == before

        for part in PARTS:
            os.kill(before[part], signal.SIGKILL)
            until(
                lambda part=part: (
                    (now := stack.look())["healthy"] and pids()[part] != before[part] and now
                ),
                400,
                f"{part} runs again",
            )
            assert stack.status()[part]["restarts"] >= 1

        whole = stack.processes()
        assert wait_gone([stack.kill_manager()], 60) == []
        assert stack.look()["supervisor"] is None and not stack.look()["healthy"]
        assert wait_gone(whole, 60) == [], "no server goes on without its manager"
        stack.up()
        assert stack.look()["healthy"] and not set(pids().values()) & {one.pid for one in whole}

        stack.kill_manager()
        ended_by_down(stack)
        stack.up()
        assert set(ended_by_down(stack)["stopped"]) == set(PARTS)
        assert not stack.places.temporary.exists()
        left = {
            path.relative_to(stack.places.stack).parts[0] for path in stack.places.stack.rglob("*")
        }
        assert left <= {"logs", "prefect", "runs"}
        ports = {f"{name.replace('-', '_')}_port": port for name, port in stack.ports.items()}
        preflight.require_ports(StackSettings(**ports))
        assert "stopped  none" in stack.command("down").stdout
    finally:
        stack.end()


JOIN = """
import sys
from flows.ops.control import join_stack
join_stack(sys.argv[1])
from kernels_eval.pool.ray import start_ray
start_ray()
import ray
print(ray.get(ray.remote(lambda: "joined").remote()))
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_finds_the_ray_of_its_stack_without_being_told(tmp_path):
    """In an environment without what `concur env` prints, as that of a new shell."""
    others = [f"--without={part}" for part in PARTS if part != "ray"]
    stack = Stack(tmp_path / "root", *others)
    try:
        stack.up()
        words = [sys.executable, "-c", JOIN, str(stack.root)]
        done = commands.run(words, commands.environment())
        assert done.stdout.strip() == "joined", done.stderr
    finally:
        ended_by_down(stack)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_open_stack_asks_for_passwords_that_nobody_else_sees(tmp_path):
    pytest.importorskip("flask_wtf", reason="needs the extra `server`")
    stack = Stack(tmp_path / "root", "--host=0.0.0.0", "--without=ray", **PASSWORDS)
    try:
        done = stack.up()
        seen = done.stdout + done.stderr + stack.command("env").stdout
        for one in stack.processes():
            seen += Path(f"/proc/{one.pid}/cmdline").read_text().replace("\0", " ")
        for folder in (stack.places.stack, stack.places.temporary):
            for path in folder.rglob("*"):
                if path.is_file() and path.suffix not in (".db", ".db-wal", ".db-shm"):
                    seen += path.read_text(errors="replace")
                    assert path.stat().st_mode & 0o077 == 0, path
        for secret in PASSWORDS.values():
            assert secret not in seen and secret.rpartition(":")[2] not in seen
        mlflow = "api/2.0/mlflow/experiments/get?experiment_id=0"
        for url, headers, code in (
            (f"{stack.prefect}/api/admin/version", {}, 401),
            (f"{stack.mlflow}/{mlflow}", {}, 401),
            (f"{stack.mlflow}/", {"Host": "evil.example"}, 403),
        ):
            with pytest.raises(HTTPError) as caught:
                build_opener().open(Request(url, headers=headers), timeout=30)
            assert caught.value.code == code
        for name in PASSWORDS:
            stack.environment.pop(name)
        without = stack.command("up")
        assert without.returncode == 2 and "password" in without.stderr
    finally:
        stack.end()
    assert not stack.processes()
