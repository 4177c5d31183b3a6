"""Flow runs whose process is gone get their end in a real Prefect server, and free the slot that
they hold; others are left alone."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from flows.ops.places import ROOT_VARIABLE, Places
from flows.ops.programs import Stack
from flows.ops.runs import GONE, RUN_VARIABLE, STOPPED, flow_runs, settle
from flows.ops.settings import Secrets, StackSettings
from kernels_eval.sandbox.process_tree import identify
from tests.support.night import ROOT, night, until
from tests.support.servers import free_port

WORK = """
import subprocess, sys, time
from flows.ops.runs import note_run
note_run()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(600)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with night(tmp_path_factory.mktemp("runs")) as found:
        yield found


@pytest.fixture
def stack(server, tmp_path, monkeypatch):
    monkeypatch.setattr("flows.ops.health.ANSWER_S", 60.0)
    places = Places(tmp_path)
    places.make()
    return Stack(places, StackSettings(prefect_port=urlsplit(server.url).port), Secrets())


class Work:
    """A process as Prefect starts one for a run of a stack, with a child."""

    def __init__(self, run, root):
        told = {RUN_VARIABLE: run, ROOT_VARIABLE: str(root), "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORK], env={**os.environ, **told}, start_new_session=True
        )
        until(lambda: len(self.all()) == 2, 120, "a process and its child")

    def all(self):
        children = psutil.Process(self.process.pid).children()
        pids = [self.process.pid, *(one.pid for one in children)]
        return [
            found
            for pid in pids
            if (found := identify(pid)) and Path(f"/proc/{pid}/environ").read_bytes()
        ]

    def end(self):
        with suppress(ProcessLookupError):  # a test may have ended it
            os.killpg(self.process.pid, 9)
        self.process.wait()


@pytest.fixture
def deployment(server):
    return server.refresh_deployment()


@pytest.fixture
def run(server, deployment):
    """A run that holds the one slot of its deployment."""
    return server.running(deployment)


@pytest.fixture
def work(run, stack):
    found = Work(run, stack.places.root)
    yield found
    found.end()


def notes(stack):
    return list(stack.places.flow_runs.iterdir())


def settled(stack, why, *runs):
    """The runs that are settled; a busy server is asked again, as by `concur up`."""
    return until(lambda: settle(stack, why, *runs), 60, "the end of a run")


def forgotten(stack):
    """Nothing is settled, and no note is left."""
    return until(lambda: settle(stack, GONE) == [] and notes(stack) == [], 60, "no note")


def free(server, deployment):
    """May another run of the deployment start now?"""
    return server.set_state(server.start(deployment), "PENDING")["status"] == "ACCEPT"


def test_the_process_of_a_run_is_known_by_what_prefect_gives_it_and_its_children_are_not_it(
    work, run
):
    me = identify(os.getpid())
    assert me and flow_runs([*work.all(), me]) == {run: [identify(work.process.pid)]}


def test_a_run_whose_process_is_gone_crashes_with_its_subflows_and_frees_its_slot(
    server, stack, deployment, run, work
):
    child = server.subflow(run)
    grandchild = server.subflow(child)
    (note,) = notes(stack)
    assert note.stat().st_mode & 0o077 == 0
    assert settle(stack, STOPPED) == [] and server.state(run)["type"] == "RUNNING", (
        "its process lives"
    )
    work.end()
    assert not free(server, deployment), "this is what it is for"
    assert settled(stack, STOPPED) == [server.ask(f"flow_runs/{run}")["name"]]
    assert {server.state(each)["type"] for each in (run, child, grandchild)} == {"CRASHED"}
    assert STOPPED in server.state(run)["message"]
    assert free(server, deployment)
    assert notes(stack) == [] and settle(stack, STOPPED) == []


def test_a_run_that_was_not_noted_ends_where_its_id_is_known(server, stack, run):
    assert settle(stack, STOPPED) == [] and server.state(run)["type"] == "RUNNING"
    assert settled(stack, STOPPED, [run]) and server.state(run)["type"] == "CRASHED"


def test_one_that_was_asked_to_end_is_cancelled(server, stack, run, work):
    assert server.set_state(run, "CANCELLING")["status"] == "ACCEPT"
    work.end()
    assert settled(stack, GONE) and server.state(run)["type"] == "CANCELLED"


@pytest.mark.parametrize(
    "kind, name", [("COMPLETED", "Completed"), ("FAILED", "Failed"), ("SCHEDULED", "AwaitingRetry")]
)
def test_one_that_said_itself_what_comes_next_is_left_alone(server, stack, run, work, kind, name):
    server.ask(f"flow_runs/{run}/set_state", {"state": {"type": kind, "name": name}, "force": True})
    work.end()
    assert forgotten(stack) and server.state(run)["name"] == name


def test_one_that_works_again_in_another_process_is_left_alone(server, stack, run, work):
    work.end()
    again = Work(run, stack.places.root)
    try:
        assert settle(stack, GONE) == [] and server.state(run)["type"] == "RUNNING"
    finally:
        again.end()
    assert settled(stack, GONE) and "restarted" in server.state(run)["message"]


def test_a_server_that_is_away_is_asked_later_and_a_deleted_run_is_forgotten(
    server, stack, run, work
):
    away = Stack(stack.places, StackSettings(prefect_port=free_port()), Secrets())
    work.end()
    assert settle(away, GONE) == [] and len(notes(stack)) == 1
    server.ask(f"flow_runs/{run}", method="DELETE")
    assert forgotten(stack)


def test_a_note_that_was_cut_short_is_none(stack):
    (stack.places.flow_runs / "a").write_text('{"a": [')
    assert settle(stack, GONE) == []
