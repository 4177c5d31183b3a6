"""Ctrl-C in a terminal: the line ends soon, says what to do, leaves no process, and goes on where
it was."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.commands import CONCUR, Running, environment, kill_tree

ENDS_S = 45.0
IDLE = """
import signal, time
from flows.cli.common import Group, app, command

@command(Group.MACHINE, prints=False)
def idle() -> None:
    print("up", flush=True)
    time.sleep(600)

signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a script does for a job in the background
app()
"""


def test_a_command_in_the_background_of_a_script_can_be_interrupted():
    process = subprocess.Popen(
        [sys.executable, "-c", IDLE],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        assert "interrupted" in process.communicate()[1] and process.returncode == 130
    finally:
        kill_tree(process)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_a_background_run_and_its_server(tmp_path, number):
    """The process alone gets it, as from `kill`; a script has started it with SIGINT ignored."""
    words = ["run", "--profile", "local", "--only", "refresh", "--set", f"root={tmp_path / 'root'}"]
    background = 'trap "" INT; exec "$@"'
    process = subprocess.Popen(
        ["sh", "-c", background, "sh", *CONCUR, *words],
        cwd=tmp_path,
        env=environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1"),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        next(line for line in process.stderr if line.startswith("verification"))
        below = psutil.Process(process.pid).children(recursive=True)
        assert any("uvicorn" in each.cmdline() for each in below)
        began = time.monotonic()
        process.send_signal(number)
        process.communicate(timeout=120)
        assert time.monotonic() - began < ENDS_S
        assert process.returncode in (130, -number, 128 + number)
        assert psutil.wait_procs(below, timeout=60)[1] == []
    finally:
        kill_tree(process)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_ends_a_run_soon(tmp_path):
    words = ("run", "--profile", "local", "--only", "refresh", "--root", tmp_path / "root")
    run = Running(*words, cwd=tmp_path)
    try:
        run.wait_for("^verification")
        below = run.below()
        began = time.monotonic()
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.finish(120) == 130, run.stderr
        took_s, said = time.monotonic() - began, "".join(run.stderr)
        assert "interrupted" in said and "Traceback" not in said
        assert took_s < ENDS_S, f"it took {took_s:.0f} s: {said}"
        assert psutil.wait_procs(below, timeout=30)[1] == []
    finally:
        kill_tree(run.process)
