"""The stack of `concur up`: what is refused before anything starts, who is taken for whom, and what
is kept alive."""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, count
from types import SimpleNamespace

import httpx
import psutil
import pytest
from click.testing import CliRunner

from flows.cli.main import main
from flows.config import PipelineConfig
from flows.launch import mlflow_pages
from flows.stack import control, head
from flows.stack.control import down, export_lines, status, use_stack
from flows.stack.health import fault, runs_under_way, scores_page
from flows.stack.layout import PARTS, ROOT_VARIABLE, Layout, StackSettings
from flows.stack.programs import RETRIES, Program, configuration, programs
from flows.stack.supervisor import Supervisor
from kernels_eval.errors import EvalError, UsageError
from kernels_eval.sandbox.process_tree import alive, environment_variable, send, wait_gone
from tests.support import commands
from tests.support.processes import started
from tests.support.servers import free_port, logged, two_ports
from tests.support.stacks import Stack
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def no_stack_of_the_caller(monkeypatch):
    for name in list(os.environ):
        if name.startswith(commands.FOREIGN):
            monkeypatch.delenv(name)


def refused(call):
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.hint, "every refusal says what would correct it"
    return str(caught.value)


def up(root, settings=None, **more):
    said = []
    return control.up(str(root), settings or StackSettings(), said.append, **more), said


# -- where a run's page is -----------------------------------------------------------------------


def test_a_page_is_named_where_a_server_shows_the_run_s_own_root(tmp_path, monkeypatch):
    """Another root's server would show another run under the same number."""
    monkeypatch.delenv("CONCUR_MLFLOW_URL", raising=False)
    # others may run a stack here
    ours = SimpleNamespace(pids=lambda: [child.pid for child in psutil.Process().children()])
    monkeypatch.setattr(control, "psutil", ours)
    config = PipelineConfig(root=str(tmp_path / "mine"))
    before = mlflow_pages(config, "run")
    assert before["mlflow_page"] is None and f"up --root {tmp_path}/mine" in before["start_mlflow"]
    other = str(tmp_path / "other")
    with started("input()", **{ROOT_VARIABLE: other}) as process:
        until(lambda: environment_variable(process.pid, ROOT_VARIABLE), "it has begun")
        command = mlflow_pages(config, "run")["start_mlflow"]
        assert f"the stack of {other} is up" in command and f"down --root {other}" in command
        instead = f"one runs for {other}: give --root {other}, or set CONCUR_ROOT"
        assert status(str(tmp_path / "mine"))["note"].endswith(instead)
    assert other not in mlflow_pages(config, "run")["start_mlflow"]


# -- what is refused -------------------------------------------------------------------------------


def test_a_busy_port_names_its_holder_and_the_option(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        ray = two_ports()
        settings = StackSettings(prefect_port=free_port(), mlflow_port=port, ray_port=ray)
        said = refused(lambda: up(tmp_path / "root", settings))
    assert f"port {port} for mlflow is in use by process {os.getpid()}" in said
    assert "--mlflow-port" in said
    assert status(str(tmp_path / "root"))["parts"] == []


@pytest.mark.parametrize(
    "root, said",
    [
        ("file", "file"),
        ("/proc/1/concur", "/proc/1"),
        ("s3://bucket", "is a URL"),
        ("100%", "has one of %"),
    ],
)
def test_a_root_that_cannot_be_used_is_refused(tmp_path, root, said):
    (tmp_path / "file").write_text("")
    assert said in refused(lambda: up(tmp_path / root if "/" not in root else root))


def test_a_port_that_is_none_is_one_line(tmp_path):
    done = CliRunner().invoke(main, ["up", "--root", str(tmp_path), "--prefect-port", "70000"])
    assert (
        done.exit_code == 2 and "--prefect-port" in done.output and "Traceback" not in done.output
    )


def test_the_stack_of_another_user_is_left_alone(tmp_path, monkeypatch):
    layout = Layout(tmp_path)
    layout.make()
    monkeypatch.setattr(os, "getuid", lambda: layout.stack.stat().st_uid + 1)
    for call in (lambda: up(tmp_path), lambda: down(str(tmp_path), print)):
        assert "belongs to another user" in refused(call)


def test_one_command_at_a_time_and_the_lock_leaves_no_file(tmp_path):
    layout = Layout(tmp_path)
    layout.make()
    with layout.changing():
        before = sorted(tmp_path.rglob("*"))
        said = refused(lambda: Layout(tmp_path).changing().__enter__())
        assert "another `concur up`" in said and sorted(tmp_path.rglob("*")) == before
    layout.clean()


# -- the configuration -----------------------------------------------------------------------------


def test_everything_is_on_loopback_and_the_page_of_prefect_asks_its_own_port(tmp_path):
    made = programs(Layout(tmp_path), StackSettings(prefect_port=4711))
    told = made["prefect"].environment
    url = "http://127.0.0.1:4711"
    assert told["PREFECT_SERVER_UI_API_URL"] == told["PREFECT_API_URL"] == f"{url}/api"
    assert told["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] == f"{url},http://localhost:4711"
    assert told["PREFECT_SERVER_API_HOST"] == "127.0.0.1"
    unused = {"--include-dashboard=false", "--include-log-monitor=false"}
    assert unused <= set(made["ray"].words), "who runs them pays for each second"
    mlflow = made["mlflow"]
    assert mlflow.environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    assert {"--workers", "127.0.0.1"} <= set(mlflow.words)


def test_supervisord_reads_what_was_written_whatever_the_root_is_called(tmp_path):
    from supervisor.options import ServerOptions

    layout = Layout(tmp_path / "a night, really [one] of 7")
    layout.make()
    layout.make_sockets()
    layout.configuration.write_text(configuration(layout, StackSettings()))
    options = ServerOptions()
    options.realize(["--configuration", str(layout.configuration)])
    groups = {group.name: group.process_configs[0] for group in options.process_group_configs}
    layout.clean()
    assert set(groups) == set(PARTS)
    assert groups["worker"].environment["CONCUR_ROOT"] == str(layout.root)
    assert groups["ray"].environment["RAY_worker_niceness"] == "0"
    assert groups["mlflow"].stdout_logfile == str(layout.log("mlflow"))


# -- parts that are killed, with a program of the test's in their place ----------------------------

CHILD = "import time; time.sleep(600)"
PARENT = f"""
import subprocess, sys, time
print("up", flush=True)
subprocess.Popen([sys.executable, "-c", {CHILD!r}])
time.sleep(600)
"""


@pytest.fixture
def only_mlflow(tmp_path, monkeypatch):
    """Starts a stack whose only part, MLflow, is a module of the test's."""
    layout = Layout(tmp_path / "root")
    settings = StackSettings(
        mlflow_port=free_port(), prefect_port=free_port(), ray_port=two_ports()
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{commands.ROOT}")
    monkeypatch.setattr(control, "fault", lambda *_: "")
    monkeypatch.setattr(control, "PARTS", ("mlflow",))
    fake = {"mlflow": Program(("fake",))}
    monkeypatch.setattr("flows.stack.programs.programs", lambda *_: fake)

    def start(body):
        (tmp_path / "fake.py").write_text(body)
        _, said = up(layout.root, settings)
        assert said[0] == f"starting mlflow: {control.USUAL}"
        return layout, settings

    yield start
    for one in layout.processes():
        send(one, signal.SIGKILL)
    layout.clean()


def row(layout):
    (found,) = status(str(layout.root))["parts"]
    return found


@pytest.mark.parametrize(
    "answer, runs, place",
    [
        ({"experiment": {"experiment_id": "7"}}, ["a", "b"], "/#/experiments/7/runs?"),
        ({"experiment": {"experiment_id": "7"}}, ["a"], "/#/experiments/7/runs/a?"),
        ({}, [], None),
    ],
)
def test_the_charts_of_all_runs_are_named_once_there_is_a_run(monkeypatch, answer, runs, place):
    settings = StackSettings(mlflow_port=free_port())
    assert scores_page(settings) is None, "nothing listens"

    def request(url, asked=None):
        found = {"runs": [{"info": {"run_id": run}} for run in runs]}
        return httpx.Response(200, json=found if asked else answer)

    monkeypatch.setattr("flows.stack.health._request", request)
    page = scores_page(settings)
    assert page is None if place is None else page.startswith(f"{settings.mlflow_url}{place}")


def test_status_names_no_page_of_mlflow_but_that_of_runs(only_mlflow, monkeypatch):
    """Its list of experiments leads to pages for traces, whatever the address says."""
    layout, _ = only_mlflow(PARENT)
    for page, told in (("http://charts", "http://charts"), (None, control.AFTER_A_RUN)):
        monkeypatch.setattr(control, "scores_page", lambda _, page=page: page)
        assert row(layout)["page"] == told


def test_a_run_under_way_is_named_with_what_it_is_at(monkeypatch):
    """Of Prefect's answers: one run that began, and one that is due and not begun."""
    settings = StackSettings(prefect_port=free_port())
    assert runs_under_way(settings) == [], "nothing listens"
    hour = timedelta(hours=1)
    began, due = (datetime.now(UTC) - each for each in (hour, 2 * hour))
    runs = [
        run_of("1", "refresh nightly", "Running", started=began, due=due),
        run_of("2", "calm-owl", "Late", started=None, due=due),
    ]
    told = [{"flow_run_id": "1", "description": "verification: 34 of 60"}]

    def answer(url, asked):
        return httpx.Response(200, json=runs if url.endswith("/flow_runs/filter") else told)

    monkeypatch.setattr("flows.stack.health._request", answer)
    first, second = runs_under_way(settings)
    assert first | {"under_way_s": 0} == {
        "run": "refresh nightly",
        "state": "running",
        "under_way_s": 0,
        "at": "verification: 34 of 60",
    }
    assert (second["state"], second["at"]) == ("late", "")
    assert second["under_way_s"] - first["under_way_s"] in (3599, 3600, 3601)


def run_of(key, name, state, *, started, due):
    return {
        "id": key,
        "name": name,
        "state_name": state,
        "start_time": started and started.isoformat(),
        "expected_start_time": due.isoformat(),
    }


def test_a_ray_that_does_not_listen_is_told_in_words(tmp_path):
    settings = StackSettings(ray_port=two_ports())
    assert fault("ray", Layout(tmp_path), settings) == "not listening yet"


@pytest.mark.slow
def test_a_run_without_the_stack_writes_files_to_an_experiment_that_the_stack_made(tmp_path):
    from mlflow.tracking import MlflowClient

    settings, layout = StackSettings(mlflow_port=free_port()), Layout(tmp_path)
    program = programs(layout, settings)["mlflow"]
    words = [sys.executable, "-P", "-m", *program.words]
    environment = commands.environment(**program.environment)
    with logged(words, tmp_path / "log", cwd=tmp_path, env=environment):
        until(lambda: not fault("mlflow", layout, settings), "MLflow")
        experiment = MlflowClient(settings.mlflow_url).create_experiment("concur")
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run = client.create_run(experiment).info
    client.log_text(run.run_id, "what it found", "report.md")
    assert [file.path for file in client.list_artifacts(run.run_id)] == ["report.md"]


def test_a_raylet_is_told_the_ports_of_its_agents(monkeypatch):
    """What it must be told by them, it waits 15 s for, and ends."""
    from ray._private import services
    from ray.scripts import scripts

    told = []

    def started():
        for kind in ("gcs_server", "raylet"):
            services.start_ray_process([kind], kind, fate_share=True)

    monkeypatch.setattr(services, "start_ray_process", lambda words, *_, **__: told.append(words))
    monkeypatch.setattr(scripts, "main", started)
    monkeypatch.setattr(sys, "argv", ["ray", "start"])
    head.main()
    ports = [word.partition("=") for word in sys.argv[2:]]
    assert [name for name, _, _ in ports] == list(head.AGENTS)
    assert len({int(port) for *_, port in ports}) == len(ports)
    assert told == [["gcs_server"], ["raylet", "".join(ports[0])]]


def test_a_part_that_is_killed_is_started_again_and_its_children_go_with_it(only_mlflow):
    layout, settings = only_mlflow(PARENT)
    until(lambda: len(layout.processes()) == 3, "supervisord, the part and its child")
    before = [one for one in layout.processes() if one.pid != Supervisor(layout).pid()]
    os.kill(row(layout)["pid"], signal.SIGKILL)
    until(lambda: wait_gone(before, 1) == [] and len(layout.processes()) == 3, "it runs again")
    up(layout.root, settings)
    second = layout.processes()
    assert down(str(layout.root), print)["processes"] == 3
    assert not [one for one in second if alive(one)]
    assert not layout.settings.exists() and not layout.sockets.exists()


def test_all_parts_are_stopped_at_once_and_those_that_take_long_are_named(monkeypatch):
    asked, said = [], []

    class Stub:
        def ask(self, method, *arguments):
            asked.append((method, *arguments))

        def processes(self):
            left = {"prefect": 0, "ray": 7 * (len(said) < 3)}
            return {part: {"pid": pid} for part, pid in left.items()}

    monkeypatch.setattr(control, "SAY_S", 0.0)
    control._stop_parts(Stub(), said.append)
    assert asked == [("stopAllProcesses", False)]
    assert said[0] == "stopping prefect, mlflow, ray, worker: each has 8 s"
    assert len(said) == 3 and all("waiting for ray to end" in line for line in said[1:])


def test_a_part_that_ended_says_that_it_starts_again_by_itself(tmp_path, monkeypatch):
    process = {"statename": "BACKOFF", "pid": 0, "spawnerr": "Bad exit code 1", "description": ""}
    monkeypatch.setattr(control, "PARTS", ("ray",))
    monkeypatch.setattr(Supervisor, "processes", lambda self: {"ray": process})
    layout = Layout(tmp_path)
    layout.make()
    layout.write_settings(StackSettings())
    found = row(layout)
    layout.clean()
    assert (found["health"], found["reason"]) == (
        "restarting",
        "bad exit code 1: starts again by itself",
    )


def test_what_is_waited_for_is_one_line_which_names_a_part_that_was_started_later_or_long_ago():
    def row(part, reason, uptime_s):
        return {"part": part, "reason": reason, "uptime_s": uptime_s}

    rows = [row("prefect", "late", 40.2), row("mlflow", "late", 39.0), row("ray", "no node", None)]
    assert control.awaited(rows, 41.0) == "prefect, mlflow (late); ray (no node)"
    again = [row("ray", "no node", 9.0), row("prefect", "late", 41.0), row("mlflow", "late", 900.0)]
    told = "ray (no node, started 9 s ago); prefect (late); mlflow (late, started 900 s ago)"
    assert control.awaited(again, 41.0) == told
    assert control.awaited([], 3.0) == "supervisord"


def test_up_says_what_ended_and_was_started_again_and_of_a_part_only_once_that_it_is_healthy(
    tmp_path, monkeypatch, supervised
):
    layout = Layout(tmp_path)
    layout.make()
    settings = StackSettings()
    layout.write_settings(settings)
    began = "2026-11-30 08:00:00,000 INFO supervisord started with pid 1\n"
    ended = "2026-11-30 08:01:00,000 WARN exited: ray (exit status 1; not expected)\n"
    log = layout.log("supervisor")
    log.write_text(f"{began}{ended}{began}{ended}")
    layout.log("ray").write_text("Local node IP: 127.0.0.1\n\n")
    looks = iter([("", "no node"), ("late", "no node"), ("late", ""), ("", "")])
    processes = {}

    def look(_):
        if processes.get("ray") == "no node":
            log.write_text(f"{began}{ended}{began}{ended}{ended}")
        processes.update(zip(("worker", "ray"), next(looks), strict=True))
        state = {"statename": "RUNNING", "pid": 7, "start": time.time()}
        return dict.fromkeys(processes, state)

    monkeypatch.setattr(control, "PARTS", ("ray", "worker"))
    monkeypatch.setattr(control, "fault", lambda part, *_: processes[part])
    monkeypatch.setattr(control, "LOOK_S", 0.0)
    monkeypatch.setattr(control, "SAY_S", 0.0)
    monkeypatch.setattr(Supervisor, "processes", look)
    looks = chain([("", "")], looks)  # before anything is waited for
    said = up(tmp_path, settings)[1]
    layout.clean()
    assert [line for line in said if line.startswith("healthy")] == [
        "healthy: worker",
        "healthy: ray",
    ]
    waits = [line for line in said if "  waiting for " in line]
    assert len(waits) == 2 and not any("worker" in line for line in waits)
    last = "its log ends: Local node IP: 127.0.0.1"
    for line, times in zip(waits, ("1 time", "2 times"), strict=True):
        told = f"ray (no node; ended {times} so far, its log is {layout.log('ray')}"
        assert f"waiting for {told}" in line
        assert last not in line, "it was said once, when the part ended"
    assert said.count(f"ray ended and is started again; {last}") == 1


@pytest.mark.parametrize(
    "answer, said",
    [
        (httpx.ReadTimeout("timed out"), "Prefect does not answer yet"),
        (httpx.Response(404), "Prefect does not know it yet"),
        (httpx.Response(200, json=[]), "Prefect has not heard of it yet"),
    ],
)
def test_a_late_prefect_is_not_taken_for_one_that_knows_no_worker(
    tmp_path, monkeypatch, answer, said
):
    def request(*_, **__):
        if isinstance(answer, Exception):
            raise answer
        answer.request = httpx.Request("POST", "http://prefect")
        return answer

    monkeypatch.setattr("flows.stack.health.httpx.request", request)
    assert fault("worker", Layout(tmp_path), StackSettings()) == said


@pytest.mark.slow
def test_parts_do_not_outlive_a_supervisord_that_is_killed_and_status_says_so(only_mlflow):
    layout, settings = only_mlflow("import time; time.sleep(600)")
    whole = layout.processes()
    os.kill(Supervisor(layout).pid(), signal.SIGKILL)
    assert wait_gone(whole, 60) == []
    found = status(str(layout.root))
    assert found["supervisor_pid"] is None and not found["healthy"]
    assert row(layout)["reason"] == "not running"
    said = CliRunner().invoke(main, ["status", "--root", str(layout.root)])
    assert said.exit_code == 1 and "supervisord is not running" in said.output
    up(layout.root, settings)
    assert row(layout)["health"] == "healthy"


@pytest.mark.slow
def test_a_part_that_ends_at_once_is_left_alone_after_a_few_times_and_says_why(
    only_mlflow, monkeypatch
):
    monkeypatch.setattr(control, "fault", lambda *_: "not listening yet")
    with pytest.raises(EvalError) as caught:
        only_mlflow("import sys; print('no such table', flush=True); sys.exit(3)")
    assert "mlflow does not start" in str(caught.value) and "no such table" in str(caught.value)
    assert str(caught.value).count("no such table") <= RETRIES + 1


def test_a_part_that_is_slow_is_told_every_few_seconds_and_other_settings_are_refused(
    only_mlflow, monkeypatch, tmp_path
):
    layout, settings = only_mlflow(PARENT)
    pid = row(layout)["pid"]
    monkeypatch.setattr(control, "SAY_S", 0.0)
    monkeypatch.setattr(control, "LOOK_S", 0.0)
    counted = SimpleNamespace(**vars(time) | {"monotonic": count().__next__})
    monkeypatch.setattr(control, "time", counted)
    answers = iter(["not listening yet", "not listening yet"])
    monkeypatch.setattr(control, "fault", lambda *_: next(answers, ""))
    _, said = up(layout.root, settings)
    waits = r"  1 s  waiting for mlflow \(not listening yet(, started \d+ s ago)?\)"
    assert re.fullmatch(waits, said[0]), "none was started"
    assert said[-1] == "healthy: mlflow" and row(layout)["pid"] == pid
    monkeypatch.setattr(control, "fault", lambda *_: "busy")
    with pytest.raises(EvalError, match=r"not healthy within 0 s: mlflow \(busy\)"):
        up(layout.root, settings, timeout_s=0.0)
    assert row(layout)["pid"] == pid, "nothing that runs is torn down"
    other = settings.model_copy(update={"mlflow_port": free_port()})
    assert "already running" in refused(lambda: up(layout.root, other))


# -- the use of a stack ----------------------------------------------------------------------------


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


@pytest.fixture
def supervised(monkeypatch):
    monkeypatch.setattr(Supervisor, "pid", lambda self: os.getpid())


def test_a_run_uses_the_stack_of_its_root_unless_it_is_told_otherwise(
    tmp_path, prefect_like, monkeypatch, supervised
):
    monkeypatch.setattr("flows.stack.health.ANSWER_S", 60.0)
    root, layout = str(tmp_path), Layout(tmp_path)
    settings = StackSettings(prefect_port=prefect_like)
    others = {"MLFLOW_TRACKING_URI": "http://mine", "RAY_ADDRESS": "mine:6379"}
    assert use_stack(root, {}) == [] and use_stack("s3://bucket", {}) == []
    assert "no stack is running" in refused(lambda: export_lines(root))
    layout.make()
    layout.write_settings(settings)
    environment = dict(others)
    url = f"http://127.0.0.1:{prefect_like}"
    assert use_stack(root, environment) == [f"prefect {url}"]
    assert environment["PREFECT_API_URL"] == f"{url}/api"
    assert environment["PREFECT_HOME"] == str(tmp_path / "prefect")
    for own in ({"PREFECT_API_URL": "http://mine/api"}, {"PREFECT_HOME": "/mine"}):
        told = own | others
        assert use_stack(root, told) == []
        assert {name for name in told if name.startswith("PREFECT_")} == set(own)
    assert f"export PREFECT_API_URL={url}/api" in export_lines(root)
    layout.write_settings(settings.model_copy(update={"prefect_port": free_port()}))
    assert "no healthy prefect" in refused(lambda: use_stack(root, dict(others)))
    layout.clean()


def test_ray_is_told_where_it_listens_before_it_is_asked(tmp_path, monkeypatch, supervised):
    """To ask it imports it, and Ray reads this variable on import: `concur run` beside `concur up`
    looked for it at the machine's own address."""
    layout = Layout(tmp_path)
    layout.make()
    layout.write_settings(StackSettings())
    environment = {"PREFECT_API_URL": "http://mine/api", "MLFLOW_TRACKING_URI": "http://mine"}
    seen = []
    monkeypatch.setattr(control, "fault", lambda *_: seen.append(dict(environment)) or "")
    assert use_stack(str(tmp_path), environment)
    assert seen[0]["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0" and "RAY_AUTH_MODE" in seen[0]
    layout.clean()


# -- the real parts --------------------------------------------------------------------------------

JOIN = """
import sys
from flows.stack.control import join_stack
join_stack(sys.argv[1])
from kernels_eval.pool.ray import start_ray
start_ray()
import ray
print(ray.get(ray.remote(lambda: "joined").remote()))
"""


def listening(pids):
    """Addresses on which these processes listen."""
    return {
        one.laddr.ip.removeprefix("::ffff:")
        for one in psutil.net_connections("tcp")
        if one.pid in pids and one.status == psutil.CONN_LISTEN
    }


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_stack_comes_up_survives_the_death_of_each_part_and_leaves_nothing(tmp_path):
    stack = Stack(tmp_path / "root")

    def pids():
        return {part: row["pid"] for part, row in stack.status().items()}

    try:
        began = time.monotonic()
        assert json.loads(stack.up("--json").stdout)["healthy"]
        print(f"up after {time.monotonic() - began:.0f} s")
        before = pids()
        assert set(before) == set(PARTS) and None not in before.values()
        assert listening({one.pid for one in stack.processes()}) == {"127.0.0.1"}

        # a new shell, without what `concur env` prints
        words = [sys.executable, "-c", JOIN, str(stack.root)]
        done = commands.run(words, commands.environment())
        assert done.stdout.strip() == "joined", done.stderr

        stack.prefect_done("deploy", "--all")
        deployed = {one["name"] for one in stack.ask("deployments/filter", {})}
        assert {"nightly", "line", "ablations"} <= deployed
        made = [one["name"] for one in stack.ask("automations/filter", {})]
        assert len(made) == len(set(made)) == 2

        for part in PARTS:
            os.kill(before[part], signal.SIGKILL)
        stack.up()
        after = pids()
        assert not set(after.values()) & set(before.values())
        assert len(stack.ask("automations/filter", {})) == 2, "a restarted worker makes no second"

        os.kill(stack.look()["supervisor_pid"], signal.SIGKILL)
        assert not stack.look()["healthy"]
        whole = stack.processes()
        done = stack.command("down", "--json")
        assert done.returncode == 0, done.stderr
        assert not [one for one in whole if alive(one)] and not stack.processes()
        assert not stack.layout.sockets.exists()
        left = {path.name for path in stack.layout.stack.iterdir()}
        assert left == {"logs"}
        for port in (*stack.ports.values(), stack.ports["ray"] + 1):
            socket.create_server(("127.0.0.1", port)).close()
        assert "no stack is running" in stack.command("down").stdout
    finally:
        stack.end()
