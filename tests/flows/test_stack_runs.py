"""Flow runs whose process is gone get their end in a real Prefect server, and free the slot that
they hold; others are left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from flows.ops.places import Places
from flows.ops.processes import Identity, identify
from flows.ops.runs import RUN_ID, STOPPED, Runs, engines
from flows.ops.settings import Secrets, StackSettings
from tests.support.night import Night, free_port, night, until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Night]:
    with night(tmp_path_factory.mktemp("runs")) as found:
        yield found


@pytest.fixture
def places(tmp_path: Path) -> Places:
    found = Places(tmp_path)
    found.make()
    return found


def known(server: Night, places: Places) -> Runs:
    return Runs(places, StackSettings(prefect_port=urlsplit(server.url).port), Secrets())


class Work:
    """A process as Prefect starts one for a run, with a child."""

    def __init__(self, run: str) -> None:
        child = (
            "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time;"
            " time.sleep(600)']); time.sleep(600)"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", child], env={**os.environ, RUN_ID: run}, start_new_session=True
        )
        until(lambda: len(self.all()) == 2, 30, "a process and its child")

    def all(self) -> list[Identity]:
        import psutil

        both = [self.process.pid, *(one.pid for one in psutil.Process(self.process.pid).children())]
        return [
            found
            for pid in both
            if (found := identify(pid)) and Path(f"/proc/{pid}/environ").read_bytes()
        ]

    def end(self) -> None:
        os.killpg(self.process.pid, 9)
        self.process.wait()


@pytest.fixture
def deployment(server: Night) -> str:
    return server.deployment(
        f"nightly-{uuid.uuid4().hex[:6]}",
        "refresh the data set",
        "flows.refresh.refresh_dataset",
        concurrency_limit=1,
    )


@pytest.fixture
def run(server: Night, deployment: str) -> str:
    """A run that holds the one slot of its deployment."""
    found = server.start(deployment)
    assert server.set_state(found, "PENDING", "Pending")["status"] == "ACCEPT"
    assert server.set_state(found, "RUNNING", "Running")["status"] == "ACCEPT"
    return found


@pytest.fixture
def work(run: str) -> Iterator[Work]:
    found = Work(run)
    yield found
    found.end()


def free(server: Night, deployment: str) -> bool:
    """May another run of the deployment start now?"""
    return server.set_state(server.start(deployment), "PENDING", "Pending")["status"] == "ACCEPT"


def subflow(server: Night, parent: str) -> str:
    task = server.ask(
        "task_runs/",
        {
            "flow_run_id": parent,
            "task_key": "a",
            "dynamic_key": uuid.uuid4().hex,
            "state": {"type": "RUNNING"},
        },
    )["id"]
    flow = server.ask(f"flow_runs/{parent}")["flow_id"]
    return server.ask(
        "flow_runs/", {"flow_id": flow, "parent_task_run_id": task, "state": {"type": "RUNNING"}}
    )["id"]


def test_the_process_of_a_run_is_known_by_what_prefect_gives_it_and_its_children_are_not_it(
    work: Work, run: str
) -> None:
    me = identify(os.getpid())
    assert me and engines([*work.all(), me]) == {run: [identify(work.process.pid)]}


def test_a_run_whose_process_is_gone_crashes_with_its_subflows_and_frees_its_slot(
    server: Night, places: Places, deployment: str, run: str, work: Work
) -> None:
    child = subflow(server, run)
    grandchild = subflow(server, child)
    runs = known(server, places)
    runs.see(work.all())
    assert runs.settle(after_s=0) == [] and server.state(run)["type"] == "RUNNING", (
        "its process lives"
    )
    work.end()
    assert not free(server, deployment), "this is what it is for"
    assert runs.settle() == [] and server.state(run)["type"] == "RUNNING", (
        "for a minute its worker may say itself how it ended"
    )
    assert runs.settle(STOPPED, after_s=0) == [server.ask(f"flow_runs/{run}")["name"]]
    assert {server.state(each)["type"] for each in (run, child, grandchild)} == {"CRASHED"}
    assert STOPPED in server.state(run)["message"]
    assert free(server, deployment)
    assert not places.runs_file.exists() and runs.settle(after_s=0) == []


def test_after_a_power_cut_the_next_start_knows_it(
    server: Night, places: Places, run: str, work: Work
) -> None:
    known(server, places).see(work.all())
    assert places.runs_file.stat().st_mode & 0o077 == 0
    work.end()
    later = known(server, places)
    until(
        lambda: later.settle(after_s=1.0),
        30,
        "no worker is left that could tell, so it waits for the state to be old enough only",
    )
    assert server.state(run)["type"] == "CRASHED" and "restarted" in server.state(run)["message"]


def test_one_that_was_asked_to_end_is_cancelled(
    server: Night, places: Places, run: str, work: Work
) -> None:
    assert server.set_state(run, "CANCELLING", "Cancelling")["status"] == "ACCEPT"
    runs = known(server, places)
    runs.see(work.all())
    work.end()
    assert runs.settle(after_s=0) and server.state(run)["type"] == "CANCELLED"


@pytest.mark.parametrize(
    ("kind", "name"),
    [("COMPLETED", "Completed"), ("FAILED", "Failed"), ("SCHEDULED", "AwaitingRetry")],
)
def test_one_that_said_itself_what_comes_next_is_left_alone(
    server: Night, places: Places, run: str, work: Work, kind: str, name: str
) -> None:
    runs = known(server, places)
    runs.see(work.all())
    server.ask(f"flow_runs/{run}/set_state", {"state": {"type": kind, "name": name}, "force": True})
    work.end()
    assert runs.settle(after_s=0) == [] and server.state(run)["name"] == name
    assert not places.runs_file.exists()


def test_one_that_works_again_in_another_process_is_left_alone(
    server: Night, places: Places, run: str, work: Work
) -> None:
    runs = known(server, places)
    runs.see(work.all())
    work.end()
    again = Work(run)
    try:
        runs.see(again.all())
        assert runs.settle(after_s=0) == [] and server.state(run)["type"] == "RUNNING"
    finally:
        again.end()
    assert runs.settle(after_s=0)


def test_a_server_that_is_away_is_asked_later_and_a_deleted_run_is_forgotten(
    server: Night, places: Places, run: str, work: Work
) -> None:
    runs = Runs(places, StackSettings(prefect_port=free_port()), Secrets())
    runs.see(work.all())
    work.end()
    assert runs.settle(after_s=0) == [] and places.runs_file.exists()
    server.ask(f"flow_runs/{run}", method="DELETE")
    later = known(server, places)
    assert later.settle(after_s=0) == [] and not places.runs_file.exists()


def test_a_file_that_was_cut_short_is_none(server: Night, places: Places) -> None:
    places.runs_file.write_text('{"a": [')
    assert known(server, places).settle(after_s=0) == []
