"""A builder that is killed leaves no compiler behind, whatever that has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

import kernels_eval
from kernels_eval.build import orphans
from kernels_eval.build.process import run

ROOT = Path(kernels_eval.__file__).parent.parent
BUILDER = """
    import os, sys, time
    from pathlib import Path
    from kernels_eval.build.process import run

    here = Path(sys.argv[1])
    print(run(["sh", "-c", "exit 0"], here, time.monotonic() + 60, dict(os.environ)), flush=True)
    long = time.monotonic() + 600
    run(["sh", "-c", "echo $$ > outer; sh -c 'echo $$ > inner; trap \\"\\" TERM; sleep 600' & wait"], here, long, dict(os.environ))
"""


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def until(condition: object, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_builder_that_is_killed_takes_its_compilers_along(tmp_path: Path) -> None:
    builder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(BUILDER), str(tmp_path)], env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    )
    try:
        assert builder.stdout.readline() == b"ok\n"
        until(lambda: (tmp_path / "inner").exists() and (tmp_path / "inner").read_text().strip())
        pids = [int((tmp_path / name).read_text()) for name in ("outer", "inner")]
        assert not any(gone(pid) for pid in pids) and os.getpgid(pids[1]) == pids[0] != os.getpgid(builder.pid)
        builder.send_signal(signal.SIGKILL)
        builder.wait()
        until(lambda: all(gone(pid) for pid in pids), 10)
    finally:
        builder.kill()
        builder.wait()


def test_one_watcher_serves_a_process_and_knows_no_group_that_has_ended(tmp_path: Path) -> None:
    first = orphans.watcher()
    assert [run(["true"], tmp_path, time.monotonic() + 60, dict(os.environ)) for _ in range(3)] == ["ok"] * 3
    assert orphans.watcher() == first
    child = os.fork()
    if not child:  # a fork has one of its own: the end of this one is not its end
        os._exit(0 if orphans.watcher() != first or orphans._pipe[0] == os.getpid() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_output_is_captured_and_a_wait_that_ends_early_ends_the_group(tmp_path: Path) -> None:
    done = orphans.captured(["sh", "-c", "echo out; echo err >&2; exit 3"], 60, cwd=tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 3)
    with pytest.raises(subprocess.TimeoutExpired):
        orphans.captured(["sh", "-c", "sh -c 'echo $$ > inner; sleep 600' & wait"], 1.0, cwd=tmp_path)
    until(lambda: gone(int((tmp_path / "inner").read_text())), 10)


def test_the_watcher_ends_with_its_owner(tmp_path: Path) -> None:
    program = "from kernels_eval.build import orphans; orphans.watcher()"
    subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(ROOT), "OF_THIS_TEST": str(tmp_path)}, check=True)

    def none_left() -> bool:
        for process in psutil.process_iter():
            try:
                if f"OF_THIS_TEST={tmp_path}" in Path(f"/proc/{process.pid}/environ").read_text(errors="replace"):
                    return False
            except OSError:
                continue
        return True

    until(none_left, 10)


def test_builds_go_on_where_the_watcher_was_killed(tmp_path: Path) -> None:
    """A pipe that nobody reads any more breaks between fork and exec, where an error would be the build's."""
    program = """
    import os, signal, sys
    from pathlib import Path
    import psutil
    from kernels_eval.build import orphans

    orphans.watcher()
    def ours(process):
        try:
            return f"OF_THIS_TEST={sys.argv[1]}" in Path(f"/proc/{process.pid}/environ").read_text(errors="replace")
        except OSError:
            return False
    (watcher,) = [process for process in psutil.process_iter() if process.pid != os.getpid() and ours(process)]
    watcher.kill()
    psutil.wait_procs([watcher], timeout=10)
    print(orphans.captured(["echo", "built"], 60).stdout, end="")
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OF_THIS_TEST": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "built\n", done.stderr
