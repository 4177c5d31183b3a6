"""A run whose worker is killed: its output has no reader any more, and it goes on."""

import subprocess
import sys

import pytest

from tests.support.commands import ROOT

# a run's process as Prefect makes it: its log goes through Prefect's own handler, its output
# through a pipe
RUN = """
import logging, subprocess, sys
from pathlib import Path
from prefect.logging.handlers import PrefectConsoleHandler
from flows.runtime.shutdown import write_to_log

log = logging.getLogger("run")
log.addHandler(PrefectConsoleHandler())
log.error("before")
write_to_log()
sys.stdin.readline()
for number in range(3):
    log.error("after %d", number)
print("printed", flush=True)
child = subprocess.run([sys.executable, "-c", "print('of a child', flush=True)"])
Path(sys.argv[1]).write_text(f"{child.returncode}")
"""


@pytest.mark.parametrize("stacked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_of_a_stack_goes_on_when_nobody_reads_its_output(tmp_path, stacked):
    worker_log = tmp_path / "stack" / "logs" / "worker.log"
    worker_log.parent.mkdir(parents=True)
    worker_log.write_text("of the worker\n")
    status = run(tmp_path, {"CONCUR_STACK_ROOT": str(tmp_path)} if stacked else {})
    assert (status == 0) == (tmp_path / "done").exists() == stacked
    said = worker_log.read_text()
    assert said.startswith("of the worker\n")
    for text in ("after 2", "printed", "of a child"):
        assert (text in said) == stacked


def run(tmp_path, environment):
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path / "done")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "PREFECT_HOME": str(tmp_path / "prefect"),
            **environment,
        },
    )
    assert process.stdin and process.stdout
    with process:
        assert "before" in process.stdout.readline()
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.close()
        return process.wait()
