"""Process trees: identities that outlive their process, whole families, and their end."""

import os
import signal
import sys
from types import SimpleNamespace

import psutil
import pytest

from kernels_eval.sandbox import process_tree
from kernels_eval.sandbox.process_tree import (
    LOOK_S,
    Deadline,
    alive,
    descendants,
    ends_within,
    identify,
    kill_descendants,
    members,
    send,
    usage,
    wait_gone,
)
from kernels_eval.sandbox.program_counters import files_at, program_counters
from tests.support.processes import started
from tests.support.waiting import until


def test_time_in_which_nobody_looked_counts_for_little(monkeypatch):
    """A machine that is suspended takes nothing of anybody's time."""
    now = [100.0]
    monkeypatch.setattr(process_tree, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(process_tree, "is_awake", lambda root: False)
    monkeypatch.setattr(process_tree, "processor_s", lambda root: 0.0)
    deadline = Deadline(2.0, began=now[0])
    now[0] += 3600
    assert not deadline.passed(1) and deadline.spent_s == LOOK_S
    for expected in (False, False, True):
        now[0] += LOOK_S
        assert deadline.passed(1) is expected


FAMILY = '''
import subprocess, sys
child = """
import subprocess, sys
print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)
sys.stdin.read()
"""
inner = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
print(inner.pid, inner.stdout.readline().decode().strip(), flush=True)
sys.stdin.read()
'''
"""A leader, its child, and a grandchild in a session of its own."""


@pytest.fixture
def family():
    with started(FAMILY, OF_THIS_TEST=str(os.getpid())) as leader:
        child, grandchild = map(int, leader.stdout.readline().split())
        yield leader, child, grandchild
        process_tree.kill(child)
        process_tree.kill(grandchild)


def test_a_family_is_found_and_ended(family):
    leader, child, grandchild = family
    assert descendants(leader.pid) == [child, grandchild]
    used = usage(leader.pid)
    assert used.processes == 3 and used.threads >= 3 and used.resident_bytes > 1 << 20
    assert 0 < process_tree.proportional_memory(leader.pid) <= used.resident_bytes
    assert kill_descendants(leader.pid, timeout_s=60) and descendants(leader.pid) == []
    assert leader.poll() is None, "the root itself is left alone"


def test_members_are_found_by_session_variable_and_descent(family):
    leader, child, grandchild = family
    identity = identify(leader.pid)
    assert identity
    everyone = sorted((leader.pid, child, grandchild))
    assert [one.pid for one in members([identity])] == everyone
    assert [one.pid for one in members([], {"OF_THIS_TEST": str(os.getpid())})] == everyone
    other = psutil.Process(leader.pid)
    other._ident = (leader.pid, other._ident[1] - 1)  # one that had this number before
    assert members([other]) == members([], {"OF_THIS_TEST": "another"}) == []
    assert not alive(other)
    mine = identify(os.getpid())
    assert mine and os.getpid() not in {one.pid for one in members([mine])}


def test_a_process_is_alive_until_it_is_a_zombie_and_is_waited_for(family):
    leader, child, grandchild = family
    identity = identify(leader.pid)
    assert identity and alive(identity)
    assert process_tree.environment_variable(leader.pid, "OF_THIS_TEST") == str(os.getpid())
    assert process_tree.command_line(leader.pid).startswith(sys.executable)
    orphan = identify(grandchild)
    assert wait_gone([identity, orphan], timeout_s=0) == [identity, orphan]
    assert not ends_within(leader.pid, 0)
    send(identity, signal.SIGKILL)
    assert ends_within(leader.pid, 60)
    assert psutil.pid_exists(leader.pid) and process_tree.has_ended(leader.pid)
    assert not alive(identity)
    send(orphan, signal.SIGKILL)
    assert wait_gone([identity, orphan], timeout_s=60) == []
    assert identify(leader.pid) is None
    send(identity, signal.SIGKILL)  # harmless
    assert process_tree.environment_variable(leader.pid, "PATH") is None
    assert process_tree.command_line(leader.pid) == ""


HEADLESS = """
import ctypes, os, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print(flush=True)
ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
"""


def test_a_process_whose_first_thread_has_ended_goes_on():
    with started(HEADLESS) as process:
        assert process.stdout.readline()
        until(lambda: process_tree.headless(process.pid))
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
        assert not process_tree.has_ended(process.pid)
        assert process.pid in descendants(os.getpid())
    assert process_tree.has_ended(process.pid) and not process_tree.headless(process.pid)


@pytest.mark.parametrize(
    "state, flags, ended", [("R", 0x40, False), ("D", 0x44, True), ("Z", 0x40, True)]
)
def test_a_thread_that_gives_its_memory_back_has_ended(tmp_path, state, flags, ended):
    """As one does in a GPU's driver for a second, when the first thread is a zombie already."""
    stat = tmp_path / "stat"
    stat.write_text(f"7 (a) b) {state} 1 7 7 0 -1 {flags} 0 0")
    assert process_tree._has_state(stat, process_tree.ENDED) is ended


def test_where_a_stopped_process_was_at_work():
    with started("print(flush=True)\nwhile True: sum(range(100))") as spinning:
        spinning.stdout.readline()

        def look():
            os.kill(spinning.pid, signal.SIGCONT)
            os.kill(spinning.pid, signal.SIGSTOP)
            return program_counters(spinning.pid)

        files = files_at(spinning.pid, until(look, "an instruction"))
    assert len(files) == 1 and files[0]
    assert files_at(os.getpid(), [0]) == [""]


def test_a_process_in_a_system_call_is_not_at_work():
    with started("import sys; print(flush=True); sys.stdin.read()") as waiting:
        waiting.stdout.readline()
        until(lambda: not process_tree.is_awake(waiting.pid))
        os.kill(waiting.pid, signal.SIGSTOP)
        assert program_counters(waiting.pid) == []
    assert program_counters(2**31) == [] == files_at(2**31, [])
