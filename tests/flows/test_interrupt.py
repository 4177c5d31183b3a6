"""Ctrl-C in a terminal: the line ends soon, says what to do, leaves no process, and goes on where
it was."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from tests.support.commands import kill_tree, start

ENDS_S = 45.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_ends_a_run_soon(tmp_path):
    process = start(
        *("run", "--profile", "local", "--only", "refresh"),
        *("--set", f"root={tmp_path / 'root'}"),
        cwd=tmp_path,
    )
    try:
        seen = []
        for line in process.stderr:
            seen.append(line)
            if line.startswith("verification"):
                break
        assert process.poll() is None, "".join(seen)
        below = psutil.Process(process.pid).children(recursive=True)
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        _, rest = process.communicate(timeout=120)
        took_s = time.monotonic() - began
        assert process.returncode == 130, rest
        assert "interrupted" in rest and "Traceback" not in rest
        assert took_s < ENDS_S, f"it took {took_s:.0f} s: {rest}"
        assert psutil.wait_procs(below, timeout=30)[1] == []
    finally:
        kill_tree(process)
