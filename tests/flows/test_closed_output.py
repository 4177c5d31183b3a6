"""A run whose worker is killed: its output has no reader any more, and it goes on."""

import subprocess
import sys
from pathlib import Path

import pytest

import flows

ROOT = Path(flows.__file__).parent.parent
# a run's process as Prefect makes it: its log goes through Prefect's own handler, its output
# through a pipe
RUN = """
import logging, subprocess, sys
from pathlib import Path
from prefect.logging.handlers import PrefectConsoleHandler
from flows.runtime.shutdown import survive_closed_output

log = logging.getLogger("run")
log.addHandler(PrefectConsoleHandler())
if sys.argv[2] == "guarded":
    survive_closed_output()
    survive_closed_output()
log.error("before")
sys.stdin.readline()
for number in range(3):
    log.error("after %d", number)
print("printed", flush=True)
print("to stderr", file=sys.stderr, flush=True)
child = subprocess.run([sys.executable, "-c", "import sys; print('of a child', flush=True); \
sys.stderr.write('x')"])
Path(sys.argv[1]).write_text(f"{child.returncode}")
"""


@pytest.mark.parametrize("stacked", [True, False])
def test_a_run_goes_on_when_nobody_reads_its_output(tmp_path, stacked):
    worker_log = tmp_path / "stack" / "logs" / "worker.log"
    worker_log.parent.mkdir(parents=True)
    worker_log.write_text("of the worker\n")
    status = run(tmp_path, "guarded", {"CONCUR_STACK_ROOT": str(tmp_path)} if stacked else {})
    assert status == 0 and (tmp_path / "done").read_text() == "0"
    said = worker_log.read_text()
    assert (
        said.startswith("of the worker\n")
        and ("printed" in said) == ("of a child" in said) == ("after 2" in said) == stacked
    )


def test_without_it_the_next_line_of_the_log_ends_the_run(tmp_path):
    assert run(tmp_path, "bare", {}) != 0 and not (tmp_path / "done").exists()


def run(tmp_path, how, environment):
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path / "done"), how],
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
        return process.wait(60)
