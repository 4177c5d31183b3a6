"""A process that is killed leaves no compiler behind, and nothing of a Ray that it started."""

import os
import signal
import tempfile
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

import kernels_eval
from kernels_eval.compile.process import run
from kernels_eval.errors import KilledError
from kernels_eval.sandbox import process_tree, reaper
from kernels_eval.sandbox.deaths import retried
from kernels_eval.sandbox.process_tree import (
    WALL_SHARE,
    Deadline,
    environment_variable,
    has_ended,
)
from tests.support.processes import python, started
from tests.support.waiting import until

ROOT = Path(kernels_eval.__file__).parent.parent
BUILDER = """
    import os, sys, time
    from pathlib import Path
    from kernels_eval.compile.process import run
    from kernels_eval.sandbox.process_tree import Deadline

    here = Path(sys.argv[1])
    print(run(["sh", "-c", "exit 0"], here, Deadline(60), dict(os.environ)), flush=True)
    long = Deadline(60)
    program = "echo $$ > outer; sh -c 'echo $$ > inner; trap \\"\\" TERM; sleep 600' & wait"
    run(["sh", "-c", program], here, long, dict(os.environ))
"""


def test_a_builder_that_is_killed_takes_its_compilers_along(tmp_path):
    with started(BUILDER, tmp_path) as builder:
        assert builder.stdout.readline() == "ok\n"
        until(lambda: (tmp_path / "inner").exists() and (tmp_path / "inner").read_text().strip())
        outer, inner = (int((tmp_path / name).read_text()) for name in ("outer", "inner"))
        assert not has_ended(outer) and not has_ended(inner)
        assert os.getpgid(inner) == outer != os.getpgid(builder.pid)
        builder.kill()
        until(lambda: has_ended(outer) and has_ended(inner))


WATCHING = """
    import subprocess, time
    from kernels_eval.sandbox import reaper

    told, other = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    reaper.watch(told.pid)
    print(told.pid, other.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_watched_child_ends_with_its_owner_and_another_stays(number):
    with started(WATCHING) as owner:
        watched, other = map(int, owner.stdout.readline().split())
        assert not has_ended(watched)
        owner.send_signal(number)
        until(lambda: has_ended(watched))
        assert not has_ended(other)
        os.kill(other, signal.SIGKILL)


def test_one_reaper_serves_a_process(tmp_path):
    first = reaper.reaper()
    ended = [run(["true"], tmp_path, Deadline(60), dict(os.environ)) for _ in range(3)]
    assert ended == ["ok"] * 3, (tmp_path / "log").read_text()
    assert reaper.reaper() == first
    child = os.fork()
    if not child:  # a fork has one of its own: the end of this one is not its end
        os._exit(0 if reaper.reaper() != first or reaper._pipe[0] == os.getpid() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_process_that_dies_without_a_word_is_started_again(tmp_path):
    again = "echo >> times; test $(wc -l < times) -gt 3 || kill -SEGV $$"
    run_again = partial(run, ["sh", "-c", again], tmp_path, Deadline(60), dict(os.environ))
    with pytest.raises(KilledError, match="sh was killed by signal 11"):
        run_again()  # the pool's rule decides
    assert retried(run_again) == "ok"
    assert (
        run(
            ["sh", "-c", "echo internal error; kill -SEGV $$"],
            tmp_path,
            Deadline(60),
            dict(os.environ),
        )
        == "failed"
    )
    assert (tmp_path / "log").read_text() == "internal error\n"


def test_a_deadline_ends_the_whole_group(tmp_path):
    command = ["sh", "-c", "echo out; sh -c 'echo $$ > inner; sleep 600' & wait"]
    inner = tmp_path / "inner"
    for seconds in (1, 4, 16, 64):  # a busy machine may not have come to the inner one before
        assert run(command, tmp_path, Deadline(seconds / WALL_SHARE), dict(os.environ)) == "timeout"
        if inner.exists() and inner.read_text().strip():
            break
    assert (tmp_path / "log").read_text().startswith("out\n")
    until(lambda: has_ended(int(inner.read_text())))


@pytest.fixture
def no_clock(monkeypatch):
    """Leaves deadlines their processor time alone, however slow the machine is."""
    monkeypatch.setattr(process_tree, "WALL_SHARE", 1e6)


def in_shell(program, folder, deadline):
    return run(["sh", "-c", program], folder, deadline, dict(os.environ))


BURNS = "(ulimit -t 1; while :; do :; done)"  # one second of processor time


@pytest.mark.slow
def test_a_deadline_counts_what_has_ended_and_what_was_run_before(no_clock, tmp_path):
    """Three processes one after another, none of which is past the deadline by itself."""
    deadline = Deadline(2.5)
    assert in_shell(f"{BURNS}; {BURNS}; {BURNS}; kill -STOP $$", tmp_path, deadline) == "timeout"
    assert 2.5 <= deadline.spent_s < 4
    shared = Deadline(1.5)
    ended = [in_shell(f"{BURNS}; exit 0", tmp_path, shared) for _ in range(3)]
    assert ended == ["ok", "timeout", "timeout"] and shared.spent_s < 3, "the third never ran"


def test_a_deadline_counts_and_ends_what_leaves_its_group(no_clock, tmp_path):
    leaves = "(setsid sh -c 'echo $$ > pid; while :; do :; done' &); sleep 600"
    assert in_shell(leaves, tmp_path, Deadline(0.3)) == "timeout"
    until(lambda: has_ended(int((tmp_path / "pid").read_text())))


# as if it had no processor
STOPPED = (
    "(until grep -q '^State:.T' /proc/$$/status; do sleep 0.05; done; sleep {}; kill -CONT $$) &"
    " kill -STOP $$; exit 0"
)


def test_a_deadline_does_not_count_time_without_a_processor(no_clock, tmp_path):
    deadline = Deadline(0.9)
    assert in_shell(STOPPED.format(1), tmp_path, deadline) == "ok" and deadline.spent_s < 0.9


def test_a_deadline_counts_sleep(no_clock, tmp_path):
    deadline = Deadline(0.5)
    assert in_shell("sleep 600", tmp_path, deadline) == "timeout" and deadline.spent_s >= 0.5
    assert in_shell("mkfifo never; read x < never", tmp_path, Deadline(0.5)) == "timeout"


def test_what_neither_works_nor_sleeps_is_ended_by_the_clock(tmp_path):
    deadline = Deadline(0.5 / WALL_SHARE)
    assert in_shell(STOPPED.format(600), tmp_path, deadline) == "timeout"


def test_the_reaper_ends_with_its_owner(tmp_path):
    program = "from kernels_eval.sandbox import reaper; reaper.reaper()"
    assert python(program, OF_THIS_TEST=str(tmp_path)).returncode == 0
    until(lambda: not marked(tmp_path))


def test_builds_go_on_where_the_reaper_was_killed(tmp_path):
    """A pipe that nobody reads breaks between fork and exec, where an error would be the
    build's."""
    program = """
    import os, sys, time
    from pathlib import Path
    import psutil
    from kernels_eval.compile.process import run
    from kernels_eval.sandbox import reaper
    from kernels_eval.sandbox.process_tree import Deadline, environment_variable

    reaper.reaper()
    here = Path(sys.argv[1])
    others = set(psutil.pids()) - {os.getpid()}
    (pid,) = [pid for pid in others if environment_variable(pid, "OF_THIS_TEST") == str(here)]
    process = psutil.Process(pid)
    process.kill()
    psutil.wait_procs([process], timeout=10)
    print(run(["echo", "built"], here, Deadline(60), dict(os.environ)))
    """
    done = python(program, tmp_path, OF_THIS_TEST=str(tmp_path))
    assert done.stdout == "ok\n" and (tmp_path / "log").read_text() == "built\n", done.stderr


# -- Ray -------------------------------------------------------------------------------------------

OWNER = """
    import os, subprocess, sys
    from datetime import datetime, timedelta
    from pathlib import Path
    from kernels_eval.sandbox import reaper

    reaper.watch_ray()
    reaper.watch_ray()  # a second Ray of the same process
    here, name = Path(sys.argv[1]), "session_{:%Y-%m-%d_%H-%M-%S_%f}_{}"
    now, pids = datetime.now(), []
    for kind, when, pid, how in [
        ("own", now, os.getpid(), os.O_WRONLY),
        ("read", now, os.getpid(), os.O_RDONLY),
        ("older", now - timedelta(days=1), os.getpid(), os.O_WRONLY),
        ("another", now, os.getppid(), os.O_WRONLY),
    ]:
        log = here / kind / name.format(when, pid) / "logs" / "agent.log"
        log.parent.mkdir(parents=True)
        file = os.open(log, how | os.O_CREAT)
        sleeper = subprocess.Popen(["sleep", "600"], pass_fds=[file], stdout=subprocess.DEVNULL)
        pids.append(sleeper.pid)
        os.close(file)
    print(*pids, flush=True)
    sys.stdin.read()
"""


def test_what_writes_to_the_logs_of_a_killed_process_s_own_ray_is_ended_and_nothing_else(tmp_path):
    with started(OWNER, tmp_path, OF_THIS_TEST=str(tmp_path)) as owner:
        pids = [int(word) for word in owner.stdout.readline().split()]
        own, *others = pids
        try:
            assert not any(map(has_ended, pids))
            assert {own, pids[2]} == set(reaper.ray_processes("session_2", owner.pid))
            owner.kill()
            owner.wait()
            until(lambda: has_ended(own))
            until(lambda: not marked(tmp_path) - set(pids))  # the watcher has ended
            assert not any(map(has_ended, others))
        finally:
            for pid in pids:
                process_tree.kill(pid)


def marked(mark):
    """Processes with this test's mark in their environment."""
    return {pid for pid in psutil.pids() if environment_variable(pid, "OF_THIS_TEST") == str(mark)}


DRIVER = """
    import sys
    from kernels_eval.pool.ray import start_ray

    start_ray()
    import ray
    from ray._private.worker import _global_node

    @ray.remote
    class Worker:
        def pid(self):
            import os
            return os.getpid()

    worker = Worker.remote()
    print(ray.get(worker.pid.remote()), _global_node.get_session_dir_path(), flush=True)
    if sys.stdin.read() == "shutdown":
        ray.shutdown()
"""


@contextmanager
def driver(mark, **environment):
    """A process that has started a Ray or joined one, a worker of that, and the session's
    folder."""
    given = {"OF_THIS_TEST": str(mark), "RAY_TMPDIR": str(mark), "RAY_AUTH_MODE": "disabled"}
    with started(DRIVER, **{"RAY_ADDRESS": ""} | given | environment) as process:
        pid, session = process.stdout.readline().split()
        yield process, psutil.Process(int(pid)), session


def of_session(session):
    """Processes that hold a file of a session open, and their names."""
    found = {}
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if any(
                os.readlink(entry).startswith(f"{session}/")
                for entry in Path(f"/proc/{process.pid}/fd").iterdir()
            ):
                found[process.pid] = process.name()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "shutdown", "exit"])
def test_a_ray_of_ones_own_is_gone_with_its_process(short_path, how):
    with driver(short_path) as (process, worker, session):
        began = of_session(session)
        assert {"gcs_server", "raylet"} <= set(began.values()) and worker.pid in began
        assert set(reaper.ray_processes("session_2", process.pid)) == set(began) - {process.pid}, (
            "Ray names its sessions as before"
        )
        if how == "kill":
            process.kill()
        else:
            process.stdin.write(how)
            process.stdin.close()
        process.wait(60)
        until(lambda: not of_session(session))
        until(lambda: not marked(short_path))


@pytest.mark.slow
def test_a_ray_that_was_joined_stays(short_path):
    with driver(short_path) as (_, worker, session):
        port = next(Path(session).glob("gcs_server_port_*")).read_text()
        mark = f"{short_path}/joined"
        address = f"127.0.0.1:{port}"
        with driver(short_path, RAY_ADDRESS=address, OF_THIS_TEST=mark) as (joined, theirs, same):
            assert same == session and theirs.ppid() == worker.ppid()
            joined.kill()
            joined.wait()
            until(lambda: not theirs.is_running() and not marked(mark))
            assert worker.is_running()
            assert {"gcs_server", "raylet"} <= set(of_session(session).values())
    until(lambda: not of_session(session))


@pytest.fixture
def short_path():
    """Ray's sockets lie below it, whose paths must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)
