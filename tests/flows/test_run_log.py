"""What the log of a run says of its tasks, in Prefect's own words, and the rows of a terminal."""

import io
import queue
import re
import sys
import uuid

import pytest
from prefect import task
from prefect._internal.states import exception_to_crashed_state_sync
from prefect.client.schemas.objects import TaskRun
from prefect.exceptions import TerminationSignal
from prefect.logging.loggers import task_run_logger
from prefect.states import Completed
from prefect.task_engine import SyncTaskRunEngine

from flows import launch
from flows.runtime.log import TASKS, tasks_named, under_way
from flows.runtime.terminal import TerminalProgress
from tasks.progress import report


@pytest.fixture
def engine(monkeypatch):
    """Prefect's engine of a task that nobody stores."""
    step = task(lambda: None, name="tasks")
    run = TaskRun(
        name="load bundled tasks", task_key="t", dynamic_key="0", state=Completed(), id=uuid.uuid4()
    )
    made = SyncTaskRunEngine(task=step, task_run=run)
    made.logger = task_run_logger(run, step)
    monkeypatch.setattr(made, "set_state", lambda *_, **__: None)
    return made


@pytest.mark.filterwarnings("ignore:Logger .* attempted to send logs")
def test_lines_name_their_task_and_a_cancelled_one_is_no_crash(engine, caplog, monkeypatch):
    caplog.set_level("INFO", logger=TASKS)
    with tasks_named():
        engine.log_finished_message()
        engine.logger.info("12 tasks")  # what a task of ours says is its own
        engine.handle_crash(TerminationSignal(signal=15))
        ended = exception_to_crashed_state_sync(TerminationSignal(signal=15))
        monkeypatch.setattr(SyncTaskRunEngine, "state", ended)
        engine.log_finished_message()
        engine.handle_crash(KeyError("lost"))
        monkeypatch.undo()
    engine.log_finished_message()
    finished, own, stopped, crashed, after = [
        (record.levelname, record.getMessage()) for record in caplog.records
    ]
    assert finished == ("INFO", "load bundled tasks: Finished in state Completed()")
    assert own == ("INFO", "12 tasks")
    assert stopped == ("WARNING", "load bundled tasks: stopped, as when its run is cancelled")
    assert crashed[0] == "ERROR" and crashed[1].startswith("load bundled tasks: Crash detected!")
    assert after == ("INFO", "Finished in state Completed()")


def test_a_server_of_its_own_is_said_where_none_is_named(monkeypatch, capsys):
    monkeypatch.setattr(launch, "start_server_apart", lambda: None)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with launch.served_and_shown():
        assert capsys.readouterr().err == f"{launch.STARTS_SERVER}\n"
    monkeypatch.setenv("PREFECT_API_URL", "http://stack")
    with launch.served_and_shown():
        assert capsys.readouterr().err == ""


def test_what_is_under_way_is_said_also_while_nothing_is_reported():
    said = queue.Queue()
    with under_way(said.put, every_s=0.01):
        report("verification", 1, 6, "correct bundled/add")
        for _ in range(2):
            line = said.get(timeout=60)
            assert line.startswith("verification: 1 of 6, for ")
            assert line.endswith(": correct bundled/add")
        report("curate", 0, 0, "begins")
        while not (line := said.get(timeout=60)).startswith("curate, for "):
            assert line.startswith("verification: ")
        report("curate", 1, 1)
    while not said.empty():
        assert said.get().startswith("curate, for ")
    report("curate", 0, 1)
    assert said.empty(), "nobody listens after the block"


@pytest.mark.parametrize("columns", [80, 200])
def test_a_narrow_terminal_shows_names_counts_and_notes_whole(columns, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    for name, value in (("COLUMNS", str(columns)), ("LINES", "40"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    note = "waits for a worker: 2 of 2 workers build; L1/relu-7 compiles for 22 s so far"
    with TerminalProgress() as progress:
        progress("verification", 3, 600, note)
    rows = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue()).splitlines()
    assert max(map(len, rows)) <= columns
    told = " ".join(" ".join(rows).split())
    assert "verification" in told and "3/600" in told and "…" not in told
    words = set(note.split())
    assert words <= set(told.split())
