"""What a child cannot see, cannot outlive and cannot break. Hostile code runs as a candidate's
module does: by the `capture` role."""

import glob
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from contextlib import chdir, closing, nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from kernels_eval.config import LimitsConfig
from kernels_eval.errors import KilledError, SandboxError
from kernels_eval.judge.reference_handle import ReferenceProcess
from kernels_eval.judge.turns import Turns
from kernels_eval.protocol import Capture
from kernels_eval.sandbox import confinement, forkserver, machine, process_tree
from kernels_eval.sandbox.child import Child, ChildFailure
from kernels_eval.sandbox.layers import WITHOUT
from kernels_eval.sandbox.process_tree import has_ended
from kernels_eval.sandbox.server_handle import ForkServer
from tests.support import kernels
from tests.support.kernels import SPINS
from tests.support.waiting import until, within

LIMITS = LimitsConfig(memory_gb=1.0, file_mb=1)
SECRET = "a-secret-of-the-parent-7f3a"
EXIT_THREAD = 60 if os.uname().machine == "x86_64" else 93
BARE = (*(f"namespace:{name}" for name in ("user", "pid", "net", "ipc")), "landlock", "seccomp")


def server_without(*layers):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(WITHOUT, ",".join(layers))
        return ForkServer()


@pytest.fixture(scope="module")
def server():
    os.environ["CONCUR_TEST_SECRET"] = SECRET
    os.environ["OPENAI_API_KEY"] = SECRET
    made = ForkServer()
    yield made
    made.close()
    del os.environ["CONCUR_TEST_SECRET"], os.environ["OPENAI_API_KEY"]


def living(processes):
    return [process for process in processes if not has_ended(process.pid)]


def run(child, code, timeout=20):
    path = child.scratch / "candidate.py"
    path.write_text(textwrap.dedent(code))
    answer = child.request(Capture(path=str(path)), timeout)
    return answer if answer["error"] else {"specs": answer["specs"]}


def answer_of(server, code, limits=LIMITS):
    """A child's answer to such a module, and its log."""
    with Child(server, "capture", limits) as child:
        return run(child, code), child.log_tail(100_000)


def failure_of(server, code, limits=LIMITS, timeout=20, processes=False):
    """How a child with such a module ends; it is gone then."""
    with Child(server, "capture", limits, processes=processes) as child:
        pid = child.pid
        with pytest.raises(ChildFailure) as failure:
            run(child, code, timeout)
    until(lambda: not psutil.pid_exists(pid or 0), "the child is gone")
    return failure.value


def test_a_child_sees_nothing_of_the_parents_environment(server):
    code = """
        import os
        print(dict(os.environ), open('/proc/self/environ').read())
        print('seen', os.getcwd())
    """
    with Child(server, "capture", LIMITS) as child:
        run(child, code)
        log = child.log_tail(100_000)
    assert "OMP_NUM_THREADS" in log and SECRET not in log
    assert f"'HOME': '{child.scratch}/work'" in log and f"seen {child.scratch}/work" in log


def test_a_child_holds_no_descriptor_but_its_own(server, tmp_path):
    code = """
        import os
        for fd in os.listdir('/proc/self/fd'):
            print('fd', fd, os.readlink(f'/proc/self/fd/{fd}'))
    """
    with open(tmp_path / "parents_file", "w") as handle:
        os.set_inheritable(handle.fileno(), True)
        log = answer_of(server, code)[1]
    assert "parents_file" not in log and log.count("socket:") == 1, log


@pytest.fixture(scope="module")
def unfiltered(tmp_path_factory):
    """Without a filter for system calls, started in a folder of kernels that holds `triton.py`."""
    folder = tmp_path_factory.mktemp("users")
    for name in ("json", "triton"):
        (folder / f"{name}.py").write_text("raise RuntimeError('the wrong module')\n")
    with chdir(folder):
        made = server_without("seccomp", "landlock")
    with closing(made):
        yield made, folder


def test_modules_in_the_users_folder_are_not_imported(unfiltered):
    server, folder = unfiltered
    log = answer_of(server, "import json\nprint('from', json.__file__)")[1]
    assert "from" in log and str(folder) not in log


@pytest.mark.parametrize(
    "layer, said", [("seccomp", "PermissionError"), ("namespace:net", "Network")]
)
def test_a_child_cannot_reach_the_network(server, unfiltered, layer, said):
    """It gets no socket; where there is no filter for system calls, it has no network to use one
    on."""
    chosen = server if layer == "seccomp" else unfiltered[0]
    if layer not in chosen.isolation:
        pytest.skip(f"this kernel offers no {layer} here")
    code = "import socket\ns = socket.socket()\ns.settimeout(5)\ns.connect(('127.0.0.1', 9))"
    assert said in answer_of(chosen, code)[0]["detail"]


def test_an_exception_is_an_answer_not_a_death(server):
    with Child(server, "capture", LIMITS) as child:
        assert "nothing works" in str(run(child, "raise RuntimeError('nothing works')")["detail"])
        assert "error" not in run(child, "x = 1")


@pytest.fixture(scope="module")
def bare():
    """As on a machine without namespaces, Landlock and seccomp: what is left must still kill and
    clean up."""
    made = server_without(*BARE)
    yield made
    made.close()


RUNAWAYS = """
    import os, time
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.setsid()
                if os.fork() != 0:
                    os._exit(0)
            print('runs', flush=True)
            time.sleep(600)
"""


@pytest.mark.parametrize("layers", ["all", "none"])
@pytest.mark.parametrize("end", ["deadline", "exit", "killed_keeper"])
def test_however_a_child_ends_nothing_of_it_lives_on(server, bare, layers, end):
    """Four runaways in sessions of their own, two of them orphaned: gone at the deadline, at an
    exit, when the keeper is killed."""
    chosen = server if layers == "all" else bare
    last = "os._exit(3)" if end == "exit" else "time.sleep(600)"
    code = (
        f"{textwrap.dedent(RUNAWAYS)}\nwhile not os.path.exists('../go'):\n   "
        f" time.sleep(0.01)\n{last}\n"
    )
    with Child(
        chosen, "capture", LIMITS.model_copy(update={"memory_gb": 8.0}), processes=True
    ) as child:
        path = child.scratch / "candidate.py"
        path.write_text(code)
        child.channel.send(Capture(path=str(path)).message())
        until(lambda: child.log_tail(1000).count("runs") == 4, "the grandchildren run")
        top = psutil.Process(child.pid)
        until(
            lambda: len(living([top, *top.children(recursive=True)])) == 6,
            "the keeper, the child, two children and two orphans run",
        )
        family = living([top, *top.children(recursive=True)])
        (child.scratch / "go").touch()
        if end == "killed_keeper":
            top.kill()
        with (
            within(100),
            pytest.raises(KilledError if end == "killed_keeper" else ChildFailure) as failure,
        ):
            child.resume(Capture(path="").message(), 0.5 if end == "deadline" else 300)
        assert (
            end == "killed_keeper"
            or failure.value.reason == {"deadline": "run", "exit": "exited_early"}[end]
        )
    assert not living(family), "none is left when the child is closed"
    with Child(chosen, "capture", LIMITS) as child:
        assert "error" not in run(child, "x = 1")


def test_a_child_ends_with_its_fork_server_which_is_a_machine_fault():
    server = server_without(*BARE)
    child = Child(server, "capture", LIMITS, processes=True)
    path = child.scratch / "candidate.py"
    path.write_text(f"{textwrap.dedent(RUNAWAYS)}\ntime.sleep(600)")
    child.channel.send(Capture(path=str(path)).message())
    until(lambda: child.log_tail(1000).count("runs") == 4, "the grandchildren run")
    family = psutil.Process(child.pid).children(recursive=True)
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    assert not server.alive
    until(lambda: not living(family), "the orphaned family is gone")
    with pytest.raises(SandboxError) as fault:
        Child(server, "capture", LIMITS)
    assert fault.value.hint
    child.close()
    server.close()
    assert not server.base.exists()


HOLD = "hold = bytearray(b'x') * (1300 << 20)"
ENDS = {
    "memory": (
        """
        import time
        hold = []
        for _ in range(32):
            hold.append(b'x' * (64 << 20))
            time.sleep(0.05)
        time.sleep(600)
        """,
        {},
        "out_of_memory",
        "1 GB",
    ),
    "memory_of_a_grandchild": (
        f"import os, time\nif os.fork() == 0:\n    {HOLD}\n    time.sleep(600)\ntime.sleep(600)",
        {},
        "out_of_memory",
        "",
    ),
    # a process that ends while the family is looked at must not hide the others
    "memory_while_processes_come_and_go": (
        f"""
        import os
        {HOLD}
        while True:
            if os.fork() == 0:
                os._exit(0)
            os.waitpid(-1, os.WNOHANG)
        """,
        {},
        "out_of_memory",
        "",
    ),
    "processor_time": (
        """
        import signal
        signal.signal(signal.SIGXCPU, signal.SIG_IGN)
        while True:
            pass
        """,
        {"cpu_s": 1},
        "run",
        "processor time",
    ),
    "processes": (
        """
        import os, time
        for _ in range(40):
            os.fork() or time.sleep(600)
        time.sleep(600)
        """,
        {"processes": 20, "memory_gb": 8.0},
        "crashed",
        "processes, the limit is 20",
    ),
    "threads": (
        """
        import threading, time
        for _ in range(40):
            threading.Thread(target=time.sleep, args=(600,)).start()
        time.sleep(600)
        """,
        {"threads": 20, "memory_gb": 8.0},
        "crashed",
        "threads, the limit is 20",
    ),
    "exit": ("import os\nos._exit(3)", {}, "exited_early", "status 3"),
    # process 1 of a namespace cannot be killed from inside
    "own_kill": (
        """
        import ctypes, os, signal
        os.kill(os.getpid(), signal.SIGKILL)
        ctypes.string_at(0)
        """,
        {},
        "crashed",
        "SIG",
    ),
    "fault": ("import ctypes\nctypes.string_at(0)", {}, "crashed", "SIGSEGV"),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_child_that_exceeds_a_limit_or_ends_says_why(server, bare, case):
    code, limits, reason, seen = ENDS[case]
    counted = case in ("processes", "threads")
    limited = LIMITS.model_copy(update=limits)
    processes = counted or "os.fork" in code
    failure = failure_of(bare if counted else server, code, limited, 60, processes)
    assert failure.reason == reason and seen in failure.detail


@pytest.mark.parametrize("layers", ["all", "none"])
def test_scratch_is_bounded(server, bare, layers):
    """A file system of its own is full; without one, the parent sees it grow. Either way the disk
    never holds more than a little."""
    code = (
        "import time\nfor n in range(40):\n    open(str(n), 'wb').write(bytes(1 <<"
        " 20))\ntime.sleep(600)"
    )
    limits = LIMITS.model_copy(update={"scratch_mb": 8, "file_mb": 2})
    chosen = server if layers == "all" else bare
    with Child(chosen, "capture", limits) as child:
        if "tmpfs_scratch" in chosen.isolation:
            assert "No space left" in str(run(child, code)["detail"])
            assert not list((child.scratch / "work").iterdir()), "nothing of it is on the disk"
        else:
            with pytest.raises(ChildFailure) as failure:
                run(child, code)
            assert "limit is 8 MB" in failure.value.detail
        scratch = child.scratch
    assert not scratch.exists()


UNCOUNTABLE = {
    "below a path longer than PATH_MAX": """
        for _ in range(3000):
            os.mkdir("deep")
            os.chdir("deep")
        open("hidden", "wb").write(bytes(1 << 20))
        """,
    "in a folder without rights": """
        os.mkdir("closed")
        open("closed/hidden", "wb").write(bytes(1 << 20))
        os.chmod("closed", 0)
        """,
}


@pytest.mark.parametrize("case", UNCOUNTABLE)
def test_what_cannot_be_counted_is_too_much_and_goes_with_the_child(bare, case):
    code = f"import os, time\n{textwrap.dedent(UNCOUNTABLE[case])}\ntime.sleep(600)"
    with Child(bare, "capture", LIMITS) as child:
        if os.geteuid() == 0 and "rights" in case:
            pytest.skip("every folder is open to root")
        with pytest.raises(ChildFailure, match="uncountable files"):
            run(child, code)
        scratch = child.scratch
    assert not scratch.exists()


def test_a_log_that_is_a_pipe_is_not_waited_for(bare):
    code = "import os\nos.unlink('../log')\nos.mkfifo('../log')"
    answer, log = answer_of(bare, code)
    assert log == "", answer


def test_memory_is_never_more_than_a_share_of_the_machines(monkeypatch, server):
    assert 1 << 30 < machine.machine_memory_bytes() <= psutil.virtual_memory().total
    monkeypatch.setattr(machine, "machine_memory_bytes", lambda: 1 << 30)
    code = "hold = bytearray(b'x') * (900 << 20)\nimport time\ntime.sleep(600)"
    failure = failure_of(server, code, LIMITS.model_copy(update={"memory_gb": 1000.0}), 30)
    assert failure.reason == "out_of_memory" and "0.6 GB" in failure.detail


@pytest.mark.parametrize(
    "made, refused",
    [
        ("os.memfd_create('x')", True),
        ("mmap.mmap(-1, 4096)", True),  # shared, so its pages stay when they are given up
        ("mmap.mmap(os.open('/dev/zero', os.O_RDWR), 4096)", True),
        ("mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)[:1]", False),
        ("open('f', 'wb').write(bytes(4096)); mmap.mmap(os.open('f', os.O_RDWR), 0)[:1]", False),
        ("torch.ones(8, 8) @ torch.ones(8, 8)", False),
    ],
)
def test_memory_that_nobody_counts_is_refused(server, made, refused):
    """Where there is a GPU, CUDA may make what it likes (docs/explanation/verification.md)."""
    if not {"seccomp", "tmpfs_scratch"} <= set(server.isolation) or glob.glob("/dev/nvidia[0-9]*"):
        pytest.skip("not refused here")
    answer, _ = answer_of(server, f"import mmap, os, torch\n{made}")
    seen = str(answer.get("detail"))
    assert ("PermissionError" in seen) if refused else "error" not in answer, seen


def test_page_tables_count_as_memory():
    resident = psutil.Process().memory_info().rss
    assert process_tree.usage(os.getpid()).resident_bytes > resident // 2
    assert process_tree.page_tables_bytes(os.getpid()) > 0 or sys.platform != "linux"


def test_a_file_above_the_limit_cannot_be_written(server):
    with Child(server, "capture", LIMITS) as child:
        answer = run(child, "with open('big', 'wb') as handle:\n    handle.write(bytes(3 << 20))")
        assert "File too large" in str(answer["detail"])
        run(child, "import os\nprint('size', os.path.getsize('big'))")
        assert f"size {1 << 20}\n" in child.log_tail(1000)


FIND_CHANNEL = """
import os, time
for fd in map(int, os.listdir('/proc/self/fd')):
    try:
        if os.readlink(f'/proc/self/fd/{fd}').startswith('socket:'):
            break
    except OSError:
        continue
"""


ATTACKS = ["os.write(fd, b'\\xff' * 64)", "os.write(fd, b'\\0\\0\\0\\1{')", "os.close(fd)"]


@pytest.mark.parametrize("attack", ATTACKS, ids=["length", "not_json", "closed"])
def test_a_child_that_spoils_its_channel_and_lives_on_is_killed(server, attack):
    """Its parent hears nonsense or the end of the stream while the process is still there: it must
    be killed, not waited for."""
    with within(150):
        failure = failure_of(server, f"{FIND_CHANNEL}\n{attack}\ntime.sleep(600)", timeout=300)
    assert failure.reason in ("exited_early", "crashed", "run")
    assert "error" not in answer_of(server, "x = 1")[0], "the fork server still serves"


LATE = "import os, time; time.sleep(0.3); os.kill(os.getpid(), 11)"
GOES_ON = "import os, time; os.fork() or time.sleep(600); os.wait(); os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(("keeper", "status"), [(LATE, -11), (GOES_ON, None)])
def test_only_a_child_that_goes_on_is_killed_and_a_late_end_is_told(keeper, status):
    """A keeper whose child has crashed may get no processor for longer than the patience."""
    process = subprocess.Popen([sys.executable, "-c", keeper])
    server = object.__new__(forkserver.Server)
    server.children, server.layers = {process.pid}, []
    until(lambda: status or process_tree.descendants(process.pid), "what goes on")
    assert server.reap(process.pid, 0.0)["status"] == status


def test_the_processor_clock_counts_a_childs_work(server):
    with Child(server, "capture", LIMITS) as child:
        before = child.processor_ns()
        if not before:
            pytest.skip("this kernel does not account processor time by thread")
        run(
            child,
            "import time\nstart = time.process_time()\nwhile time.process_time() - start < 0.2:\n  "
            "  pass",
        )
        assert 0.15e9 < child.processor_ns() - before < 2e9


def is_stopped(pid):
    """All threads of it."""
    stats = (each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/stat"))
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


@pytest.mark.parametrize("processes", [False, True])
def test_a_stopped_child_uses_no_processor(server, processes):
    with Child(server, "capture", LIMITS, processes=processes) as child:
        run(child, SPINS)
        with child.stopped(child.family()):
            until(lambda: all(map(is_stopped, child.family())))  # a signal takes a moment
            before = child.processor_ns()
            time.sleep(0.1)
            # its keeper is woken when it stops, to no purpose
            assert child.processor_ns() - before < 0.005e9
        until(lambda: child.processor_ns() > before or not before)


def test_a_candidate_is_stopped_while_the_reference_works(server):
    reference = SimpleNamespace(
        config=kernels.QUICK,
        turns=Turns(),
        crowded=False,
        beside=None,
        _unbroken=nullcontext,
    )
    with Child(server, "capture", LIMITS) as candidate, Child(server, "capture", LIMITS) as child:
        run(candidate, SPINS)
        reference.child, reference.beside = child, candidate
        path = child.write_file("task.py", "import time\ntime.sleep(0.5)")
        used, request = [], child.request

        def watched(*asked, **more):
            before = candidate.processor_ns()
            answer = request(*asked, **more)
            used.append(candidate.processor_ns() - before)
            return answer

        child.request = watched
        ReferenceProcess.request_unread(reference, Capture(path=str(path)))
        assert len(used) == 1 and used[0] < 0.05e9
        before = candidate.processor_ns()
        until(lambda: candidate.processor_ns() > before or not before)


@pytest.mark.parametrize("name", ["mem", "oom_score_adj"])
def test_a_child_opens_no_file_of_its_threads_to_write(server, name):
    if confinement._devices() or "landlock" not in str(server.isolation):
        pytest.skip("CUDA writes there, or this kernel has no Landlock")
    path = "/proc/self/task/{of}"
    code = f"import threading\nof = threading.get_native_id()\nopen(f'{path}/{name}', 'r+b')"
    assert "PermissionError" in answer_of(server, code)[0]["detail"]


def test_a_child_whose_first_thread_has_ended_is_watched_and_ended(server):
    code = f"{SPINS}import ctypes\nctypes.CDLL(None).syscall({EXIT_THREAD}, 0)"
    failure = failure_of(server, code)
    assert failure.reason == "exited_early" and "first thread" in failure.detail


def test_a_capture_may_wait_for_a_processor_longer_than_it_may_work(server, monkeypatch):
    monkeypatch.setattr(process_tree, "WALL_SHARE", 1e6)
    with Child(server, "capture", LIMITS) as child:
        os.kill(child.pid, signal.SIGSTOP)  # as if it had no processor
        goes_on = threading.Timer(2.5, os.kill, (child.pid, signal.SIGCONT))
        goes_on.start()
        assert "error" not in run(child, "x = 1", timeout=2)
        goes_on.join()
        with pytest.raises(ChildFailure) as failure:
            run(child, "while True:\n    pass", timeout=0.3)
    assert failure.value.reason == "run"


def test_a_capture_that_sleeps_is_ended(server, monkeypatch):
    monkeypatch.setattr(process_tree, "WALL_SHARE", 1e6)
    assert failure_of(server, "import time\ntime.sleep(600)", timeout=0.1).reason == "run"


def test_leaving_a_child_leaves_nothing(server):
    with Child(server, "capture", LIMITS) as child:
        run(child, "open('left', 'w').write('x')")
        scratch, pid = child.scratch, child.pid
        assert scratch.exists()
    assert not scratch.exists() and not psutil.pid_exists(pid or 0)


def test_what_a_dead_process_left_is_swept_and_a_living_ones_kept(server):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = Path(tempfile.gettempdir()) / f"concur-{gone.pid}-left"
    left.mkdir()
    (left / "bytes").write_bytes(b"x")
    nobody = "9" * 30  # no number of a process
    odd = [Path(tempfile.gettempdir()) / f"concur-{owner}-left" for owner in ("²", nobody)]
    for folder in odd:
        folder.mkdir()
    stranger = Path(tempfile.mkdtemp(prefix="concur-notes-"))
    machine.remove_abandoned()
    assert [left.exists(), *(folder.exists() for folder in odd)] == [False, True, False]
    odd[0].rmdir()
    assert server.base.exists()
    assert stranger.exists(), "a directory that only looks alike is not ours"
    stranger.rmdir()
