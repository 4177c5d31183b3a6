"""Room on the disk, before a run and while it works; what a run that ends early tells; a run that
is told to stop."""

import re
import shutil
import signal
import subprocess
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
from markdown_it import MarkdownIt

from flows.runtime import disk
from flows.runtime.disk import GIB, DiskWatch, require_room
from flows.runtime.guard import ending, shown
from kernels_eval.errors import DiskFullError, EvalError
from kernels_eval.records import Language
from kernels_eval.sandbox.process_tree import has_ended
from tasks.progress import observed_by
from tasks.sources.config import TasksConfig
from tasks.sources.stage import run as load_tasks
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.stage import Synthesis
from tasks.tables import CANDIDATES
from tests.support.chat_server import completion, serving
from tests.support.processes import python, started
from tests.support.waiting import until


@pytest.fixture
def small(tmp_path):
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]
    if not shutil.which("mount") or subprocess.run(mount).returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


# -- before the start ------------------------------------------------------------------------------


def test_a_run_that_has_no_room_does_not_start(small):
    with pytest.raises(DiskFullError) as caught:
        require_room(str(small / "not" / "made" / "yet"))
    said = str(caught.value)
    for part in (f"root {small}", "0.0 GiB left", "2 GiB must stay free", "concur gc"):
        assert part in said
    assert not (small / "not").exists(), "asking writes nothing"


def test_a_root_that_is_elsewhere_is_not_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(disk, "free_bytes", lambda path: asked.append(path) or 3 * GIB)
    require_room("memory://x")
    assert len(asked) == 2, "the build cache and temporary files"


# -- while it works --------------------------------------------------------------------------------


def three_each(url):
    return SynthesisConfig(
        sampler="openai", model="m", base_url=url, samples_per_task=3, concurrency=1
    )


def test_a_run_stops_below_the_reserve_with_one_error_and_goes_on_later(
    small, monkeypatch, tmp_path
):
    """A real stage on a real file system that somebody else fills: what was answered stays, and is
    not asked for again."""
    monkeypatch.setenv("CONCUR_CACHE", str(tmp_path / "cache"))
    tasks = load_tasks(TasksConfig(limit=8), str(small))
    monkeypatch.setattr(disk, "RESERVE_GIB", 1e6 / GIB)
    watch = partial(DiskWatch, str(small))
    other = small / "somebody-else"

    def answer(number, body):
        if number == 9:
            other.write_bytes(bytes(1_200_000))
        return 200, completion(f"answer {number}")

    monkeypatch.setattr(disk, "CHECK_EVERY_S", 0.0)
    with serving(answer) as server:
        asked = three_each(server.url)
        with pytest.raises(DiskFullError) as caught, observed_by(watch()):
            Synthesis(tasks, asked, Language.CPP).run()
        said = str(caught.value)
        for part in (f"root {small}", "synthesis stopped at", "of 24", "concur gc"):
            assert part in said
        snapshot = Synthesis(tasks, asked, Language.CPP).snapshot
        kept = len(snapshot.read(columns=["request_key"]))
        assert not snapshot.finished and 8 <= kept <= 12
        assert not list(Path(snapshot.path).glob(".*"))
        other.unlink()
        with observed_by(watch()):
            finished = Synthesis(tasks, asked, Language.CPP).run().open()
        assert finished.manifest["rows"] == 24
        keys = finished.read(columns=["request_key"])["request_key"]
        assert keys.n_unique() == len(keys) == 24
        assert len(server.bodies) <= 24 + 2, "only what was in flight is asked for again"


def test_a_disk_that_fills_in_the_middle_of_a_shard_leaves_a_snapshot_that_goes_on(small):
    """No reserve, and no warning: ENOSPC while the part is written. The journal still has the
    rows."""
    tasks = load_tasks(TasksConfig(limit=8), str(small))
    text = "".join(chr(33 + (n * n * 7919) % 90) for n in range(120_000))

    def answer(number, body):
        return 200, completion(f"{number}{text[number:]}")

    with serving(answer) as server:
        asked = three_each(server.url)
        with pytest.raises(EvalError, match="No space left"):
            Synthesis(tasks, asked, Language.CPP).run()
        answered = len(server.bodies)
        assert 2 < answered < 24
        snapshot = Synthesis(tasks, asked, Language.CPP).snapshot
        assert not snapshot.finished
        assert subprocess.run(["mount", "-o", "remount,size=64m", str(small)]).returncode == 0
        Synthesis(tasks, asked, Language.CPP).run()
        assert snapshot.manifest["rows"] == 24 and len(server.bodies) <= 24 + 3
        keys = snapshot.read()["request_key"]
        assert keys.n_unique() == len(keys) == 24
        assert set(snapshot.read().columns) == set(CANDIDATES.names)


def test_the_watch_asks_once_a_second(tmp_path, monkeypatch):
    now, asked = [100.0], []
    monkeypatch.setattr(disk, "free_bytes", lambda path: asked.append(path) or 10 * GIB)
    watch = DiskWatch(str(tmp_path), clock=lambda: now[0])
    for _ in range(100):
        watch("synthesis", 1, 2, "")
    assert len(asked) == 3, "root, build cache, temporary files"
    now[0] += 1.0
    watch("synthesis", 1, 2, "")
    assert len(asked) == 6


# -- what is told ----------------------------------------------------------------------------------


def test_a_run_that_ends_early_tells_what_to_do():
    error = EvalError("no answer for x in 7 attempts", "check that the server runs")
    text = ending(error, ["the hub was down"])
    for part in (
        "**EvalError**: no answer for x in 7 attempts",
        "What to do: check that the server runs",
        "- the hub was down",
    ):
        assert part in text


HOSTILE = """<script>alert(1)</script>
<img src=x onerror=alert(1)>
[a](javascript:alert(1))
![a](http://127.0.0.1/x)
`code` **bold** _it_
<http://127.0.0.1>
&lt;b&gt;"""


@pytest.mark.parametrize(
    "text", [*HOSTILE.splitlines(), "a | b\n| - |", "# big\n\n- list", "x" * 5000]
)
def test_text_of_others_stays_text(text):
    html = MarkdownIt("commonmark").enable("table").render(f"**E**: {shown(text)}\n")
    assert not re.search("<(script|img|a |table|h1|li|code|em)", html)
    assert len(shown(text)) < 1300


# -- told to stop ----------------------------------------------------------------------------------

STUBBORN = """
    import signal, subprocess, sys, threading, time
    from flows.runtime.shutdown import stops_soon

    def raise_it(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, raise_it)
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', \
flush=True); time.sleep(600)"
    with stops_soon({grace_s}), stops_soon({grace_s}):
        started = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, \
start_new_session=True)
        started.stdout.readline()
        try:
            print(started.pid, flush=True)
            time.sleep(600)
        finally:
            {cleanup}
"""


@contextmanager
def told_to_stop(grace_s, cleanup, number=signal.SIGTERM):
    """A program and its child, after a signal."""
    with started(STUBBORN.format(grace_s=grace_s, cleanup=cleanup)) as process:
        child = int(process.stdout.readline())
        process.send_signal(number)
        yield process, child


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stage_that_waits_for_ever_is_ended_with_its_children(number):
    with told_to_stop(1.0, "threading.Event().wait()", number) as (process, child):
        assert process.wait() == 128 + number
        until(lambda: has_ended(child), "the end of the child")


def test_a_stage_that_cleans_up_in_time_ends_as_it_likes():
    with told_to_stop(600.0, "started.kill(), started.wait()") as (process, child):
        assert process.wait() != 128 + signal.SIGTERM and not psutil.pid_exists(child)


def test_a_caller_that_takes_an_interrupt_goes_on():
    """No thread is left that would end it later."""
    done = python(
        """
    import signal, threading
    from flows.runtime.shutdown import stops_soon
    before = threading.active_count()
    try:
        with stops_soon(600.0):
            signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print("went on")
    assert threading.active_count() == before and signal.set_wakeup_fd(-1) == -1
    """
    )
    assert (done.stdout, done.returncode) == ("went on\n", 0), done.stderr


def test_other_signals_and_a_quiet_end_change_nothing():
    done = python(
        """
    import os, signal, threading
    from flows.runtime.shutdown import stops_soon
    seen = []
    signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    before = threading.active_count()
    with stops_soon(0.2):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert seen == [1] and threading.active_count() == before and signal.set_wakeup_fd(-1) == -1
    """
    )
    assert done.returncode == 0, done.stderr
