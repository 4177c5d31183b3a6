"""Runs that are stuck: the rules by themselves, and against a real Prefect server whose deployment
runs one at a time."""

import json
import sys
import uuid
from datetime import UTC, datetime, timedelta

import pytest
import yaml

from flows.ops.watchdog import RunFacts, judge
from flows.runtime.config import WatchdogConfig
from tests.support import commands
from tests.support.night import POOL, night, until
from tests.support.servers import free_port

NOW = datetime(2026, 1, 1, 3, tzinfo=UTC)


def facts(state="RUNNING", since=0, sign=None, beat=None, **more):
    """Times in minutes before NOW."""

    def ago(minutes):
        return NOW - timedelta(minutes=minutes)

    return RunFacts(
        run_id=more.pop("run_id", "r"),
        name="refresh",
        deployment_id=more.pop("deployment_id", "d"),
        state=state,
        state_name=state.title(),
        since=ago(since),
        last_sign=ago(since if sign is None else sign),
        last_heartbeat=None if beat is None else ago(beat),
        **more,
    )


LIMITS = yaml.safe_load((commands.ROOT / "tests/data/stuck_runs.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", LIMITS, ids=str)
def test_a_run_is_stuck_when_its_limit_has_passed_without_a_sign(case):
    run = {name: value for name, value in case.items() if name != "action"}
    found = judge([facts(**run)], NOW, WatchdogConfig())
    assert [each.action for each in found] == [case[name] for name in case if name == "action"]
    assert all("limit" in each.why and "min" in each.why for each in found)


def test_of_late_runs_of_one_deployment_the_newest_waits_on():
    runs = [
        facts("SCHEDULED", since=since, run_id=str(since), workers_online=0)
        for since in (200, 10, 80)
    ]
    runs.append(facts("SCHEDULED", since=300, run_id="other", deployment_id="e"))
    found = {each.run_id: each for each in judge(runs, NOW, WatchdogConfig())}
    acted = {run_id: each.action for run_id, each in found.items()}
    assert acted == {"200": "drop", "80": "drop", "other": "tell"}
    assert "no worker online" in found["200"].why


# -- a real server ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with night(tmp_path_factory.mktemp("watchdog")) as found:
        yield found


@pytest.fixture
def one_at_a_time(server):
    return server.refresh_deployment(concurrency_options={"collision_strategy": "CANCEL_NEW"})


def watch(server, *arguments):
    done = command(server.environment, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["stuck"]


def command(environment, *arguments):
    return commands.run([*commands.CONCUR, "watchdog", *arguments], environment)


def later(server, minutes, **limits):
    """What the watchdog does so many minutes from now, with a worker online."""
    server.ask(
        f"work_pools/{POOL}/workers/heartbeat", {"name": "alive", "heartbeat_interval_seconds": 30}
    )
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.ops.watchdog import watch

    with temporary_settings({PREFECT_API_URL: server.url}):
        return watch(WatchdogConfig(**limits), now=datetime.now(UTC) + timedelta(minutes=minutes))


@pytest.mark.slow
def test_a_run_that_is_pending_for_ever_no_longer_blocks_its_deployment(server, one_at_a_time):
    """The trap: a worker that is killed between taking a run and starting it leaves PENDING, and
    every later night is cancelled."""
    stuck, blocked = server.start(one_at_a_time), server.start(one_at_a_time)
    server.set_state(stuck, "PENDING")
    server.set_state(blocked, "PENDING")
    assert server.state(blocked)["type"] == "CANCELLED"
    assert watch(server) == [], "it may still come up"
    said = watch(server, "--pending-min", "0.001", "--dry-run")
    (one,) = said
    assert (one["run_id"], one["action"], one["done"]) == (stuck, "crash", "nothing: a dry run")
    assert server.state(stuck)["type"] == "PENDING"
    shown = command(server.environment, "--pending-min", "0.001")
    assert shown.returncode == 0 and "Pending" in shown.stdout
    state = server.state(stuck)
    assert state["type"] == "CRASHED" and state["message"].startswith(
        "concur watchdog: pending for"
    )
    free = server.running(one_at_a_time)
    for run in (stuck, blocked, free):
        server.ask(f"flow_runs/{run}", method="DELETE")


def beat(server, run):
    """The heartbeat of a run's process."""
    event = {
        "occurred": datetime.now(UTC).isoformat(),
        "event": "prefect.flow-run.heartbeat",
        "id": str(uuid.uuid4()),
        "payload": {},
        "resource": {"prefect.resource.id": f"prefect.flow-run.{run}"},
        "related": [],
    }
    server.ask("events", [event])


@pytest.mark.slow
def test_a_run_whose_process_is_gone_is_crashed_and_one_that_works_is_not(server, one_at_a_time):
    run = server.running(one_at_a_time)
    assert later(server, 170) == [], "no heartbeat was ever sent, and 3 hours are not over"
    beat(server, run)
    until(lambda: later(server, 20), 60, "the server to have stored the heartbeat", every_s=1)
    state = server.state(run)
    assert state["type"] == "CRASHED" and "its process has ended" in state["message"]

    busy = server.running(one_at_a_time)
    beat(server, busy)
    body = {"key": "refresh-progress", "type": "progress", "data": 10.0, "flow_run_id": busy}
    server.ask("artifacts/", body)
    assert later(server, 14) == [] and server.state(busy)["type"] == "RUNNING"
    server.set_state(busy, "COMPLETED")


@pytest.mark.slow
def test_a_run_without_progress_is_handed_to_its_worker_and_ends_without_it_where_there_is_none(
    server, one_at_a_time
):
    run = server.running(one_at_a_time)
    sub = server.subflow(run)
    assert later(server, 100) == []
    assert [each["done"] for each in later(server, 181)] == ["its worker was asked to cancel it"]
    assert server.state(run)["type"] == "CANCELLING"
    assert [each["done"] for each in later(server, 6)] == ["cancelled without its worker"]
    assert server.state(run)["type"] == server.state(sub)["type"] == "CANCELLED"
    assert later(server, 1000) == []


@pytest.mark.slow
def test_late_runs_are_told_and_those_that_a_later_one_replaces_are_dropped(server, one_at_a_time):
    at = [(datetime.now(UTC) - timedelta(hours=hours)).isoformat() for hours in (5, 3)]
    states = [{"type": "SCHEDULED", "state_details": {"scheduled_time": when}} for when in at]
    path = f"deployments/{one_at_a_time}/create_flow_run"
    old, new = [server.ask(path, {"state": state})["id"] for state in states]
    found = {each["run_id"]: each for each in watch(server, "--late-min", "60")}
    assert (found[old]["action"], found[new]["action"]) == ("drop", "tell")
    assert server.state(old)["type"] == "CANCELLED" and server.state(new)["type"] == "SCHEDULED"
    server.set_state(new, "CANCELLED")


@pytest.mark.slow
def test_the_flow_says_what_it_did_and_does_not_look_at_itself(server, one_at_a_time):
    stuck = server.start(one_at_a_time)
    server.set_state(stuck, "PENDING")
    program = (
        "from flows.ops.watchdog import WatchdogConfig, watch_runs;"
        "watch_runs(WatchdogConfig(pending_min=0.001, silent_min=0.0001))"
    )
    done = commands.run([sys.executable, "-c", program], server.environment)
    assert done.returncode == 0, done.stderr
    table = json.loads(server.artifacts("watchdog")[0]["data"])
    assert stuck in [row["run_id"] for row in table]
    assert not [row for row in table if "watch over" in row["name"]]
    assert server.state(stuck)["type"] == "CRASHED"


@pytest.mark.parametrize(
    "url, arguments, status, said",
    [
        ("", (), 2, "no Prefect server is named"),
        ("http://127.0.0.1:{port}/api", (), 1, "does not answer"),
        ("http://127.0.0.1:{port}/api", ("--pending-min", "-1"), 2, "pending_min"),
    ],
)
def test_what_cannot_be_asked_is_one_clear_error(tmp_path, url, arguments, status, said):
    told = {"PREFECT_API_URL": url.format(port=free_port())} if url else {}
    environment = commands.environment(
        PREFECT_HOME=str(tmp_path), PREFECT_CLIENT_MAX_RETRIES="0", **told
    )
    done = command(environment, *arguments)
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == status and said in line
