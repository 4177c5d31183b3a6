"""A SIGKILL from outside changes no verdict: whoever is hit, at whatever step; and who always dies
of one gets its verdict at the fifth."""

import os
import pickle
import shutil
import signal
import subprocess
import textwrap
from pathlib import Path

import psutil
import pytest

from kernels_eval.compile import prepared
from kernels_eval.compile.extensions import Builder
from kernels_eval.compile.prepared import Prepared
from kernels_eval.compile.process import WorkRoot, remove_abandoned, was_killed
from kernels_eval.config import BuildConfig
from kernels_eval.errors import GpuLostError, KilledError, SandboxError, ToolchainError
from kernels_eval.sandbox import process_tree
from kernels_eval.sandbox.child import Child
from kernels_eval.sandbox.deaths import (
    BLAMED_ROLES,
    COMPILER,
    DEATHS,
    FORK_SERVER,
    OF_THE_MACHINE,
    WORKER,
    Deaths,
    retried,
    role_of,
)
from kernels_eval.source.spec import ExtensionSpec
from kernels_eval.toolchain import Toolchain
from tests.support import kernels
from tests.support.kernels import AFFINE, module
from tests.support.processes import ROOT, python
from tests.support.waiting import until

CONFIG = kernels.UNTIMED
HONEST = module("return ext.affine(x)")
SLOW = module("time.sleep(0.2)\nreturn ext.affine(x)", before="import time\ntime.sleep(0.5)")
"""Gives a child that was just forked the time to notice that it is to die."""
SHAPED = module("return ext.affine(x) if x.shape[0] == 64 else ext.shifted(x)")


# -- the rule --------------------------------------------------------------------------------------


@pytest.mark.parametrize("deaths", range(DEATHS + 1))
def test_four_deaths_are_put_down_to_the_machine_and_the_fifth_is_believed(deaths):
    asked = []

    def work():
        asked.append("candidate" in BLAMED_ROLES.get())
        if len(asked) <= deaths and not asked[-1]:
            raise KilledError("killed", role="candidate")
        return "crashed" if len(asked) <= deaths else "ok"

    assert retried(work) == ("crashed" if deaths == DEATHS else "ok")
    assert asked == [False, False, False, False, True][: deaths + 1]
    assert not BLAMED_ROLES.get()


def test_deaths_of_one_role_do_not_speak_against_another():
    deaths = Deaths()
    for role in ["reference", "candidate", "capture", COMPILER, WORKER] * (DEATHS - 2):
        assert not deaths.note(role)
    assert not deaths.blamed
    deaths.note("reference")
    assert deaths.blamed == {"reference"}


@pytest.mark.parametrize(
    "fault, times",
    [(SandboxError("the fork server is gone"), DEATHS), (GpuLostError("no device"), 3)],
)
def test_a_machine_that_fails_again_and_again_is_an_error(fault, times):
    deaths = Deaths()
    assert [deaths.note(role_of(fault)) for _ in range(times)] == [False] * (times - 1) + [True]
    assert not deaths.blamed, "no candidate gets a verdict for it"


def test_who_died_is_known_in_another_process():
    told = pickle.loads(pickle.dumps(KilledError("killed", "look", "capture")))
    assert (role_of(told), told.hint) == ("capture", "look")


@pytest.mark.parametrize(
    "said",
    [
        "g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.",
        (
            "main.cpp: warning\ncollect2: fatal error: ld terminated with signal 9"
            " [Killed]\ncompilation terminated."
        ),
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
        "clang++: error: unable to execute command: Killed",
    ],
)
def test_what_compilers_say_of_a_program_that_was_killed(said):
    assert was_killed(1, said) and was_killed(-signal.SIGKILL, "")
    assert not was_killed(0, said) and not was_killed(-signal.SIGSEGV, "")
    assert not was_killed(
        1, "main.cpp:3:2: error: #error g++: fatal error: Killed signal terminated program cc1plus"
    )


# -- children and fork servers ---------------------------------------------------------------------


class Reasons(kernels.Verifier):
    def __call__(self, code, task=AFFINE):
        return super().__call__(task, code).reason


@pytest.fixture(scope="module")
def verify():
    made = Reasons(CONFIG, own_server=True)
    with made.evaluator:
        made.preparer.builder.warm()
        yield made


def kill_at(monkeypatch, role, command, victim, times):
    """SIGKILL for so many processes, each when the child of a role is asked a command. Returns the
    ids of those that were hit so far."""
    hit = set()
    begin = Child.begin

    def hooked(self, message, fds=()):
        if (self.role, message.get("command")) == (role, command) and not self.dead:
            keeper = self.pid
            until(lambda: process_tree.children(keeper) or process_tree.has_ended(keeper))
            inner, server = process_tree.children(keeper), self.server.process.pid
            for pid in {"child": inner[:1], "keeper": [keeper], "fork server": [server]}[victim]:
                # it may have been hit before, and its child have answered once more
                if len(hit) < times and not process_tree.has_ended(pid):
                    os.kill(pid, signal.SIGKILL)
                    hit.add(pid)
        return begin(self, message, fds)

    monkeypatch.setattr(Child, "begin", hooked)
    return hit


@pytest.mark.parametrize(
    "victim, role, command, code, reason",
    [
        pytest.param("child", "capture", "Capture", HONEST, "ok", marks=pytest.mark.slow),
        ("child", "reference", "Compare", HONEST, "ok"),
        ("child", "candidate", "Call", SHAPED, "shape_specialised"),
        pytest.param("keeper", "candidate", "Call", SLOW, "ok", marks=pytest.mark.slow),
        pytest.param("fork server", "reference", "Compare", SLOW, "ok", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_is_killed_once_changes_no_verdict(
    verify, monkeypatch, victim, role, command, code, reason
):
    verify.runner.drop_reference()  # it is asked everything anew
    hit = kill_at(monkeypatch, role, command, victim, 1)
    assert verify(code) == reason
    assert len(hit) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "role, command, reason",
    [
        ("capture", "Capture", "crashed"),
        ("reference", "LoadTask", "reference_failed"),
        ("candidate", "Call", "crashed"),
    ],
)
def test_a_child_that_is_killed_every_time_gets_its_verdict(
    verify, monkeypatch, role, command, reason
):
    verify.runner.drop_reference()
    with monkeypatch.context() as patch:
        hit = kill_at(patch, role, command, "child", 100)
        assert verify(HONEST) == reason
        assert len(hit) == DEATHS
    assert verify(HONEST) == "ok", "the next one is not blamed for it"


@pytest.mark.slow
def test_a_fork_server_that_is_killed_every_time_is_the_machines_fault(verify, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(OF_THE_MACHINE, FORK_SERVER, 2)
        hit = kill_at(patch, "candidate", "Call", "fork server", 100)
        with pytest.raises(SandboxError) as fault:
            verify(HONEST)
    assert fault.value.hint and len(hit) == 2
    assert verify(HONEST) == "ok"


# -- compilers -------------------------------------------------------------------------------------

PLAIN = ExtensionSpec(
    kind="files", name="plain_ext", files=(("plain.cpp", 'extern "C" int seven() { return 7; }\n'),)
)


@pytest.fixture(params=["driver", "program"])
def fragile(request, tmp_path):
    """Makes a builder, with a cache of its own, whose compiler is killed so many times: itself, or
    the program that it starts."""

    def made(deaths):
        (tmp_path / "left").write_text(str(deaths))
        dies = tmp_path / "dies"
        dies.write_text(
            textwrap.dedent(f"""\
            #!/bin/sh
            left=$(cat {tmp_path}/left)
            if [ "$left" -gt 0 ]; then echo $((left - 1)) > {tmp_path}/left; kill -9 $$; fi
            """)
        )
        builder = Builder(BuildConfig(), cache=tmp_path / "cache")
        if request.param == "program" and not builder.tools.is_gcc:
            pytest.skip("only GCC lets us stand between it and its programs")
        real, _ = (
            builder.tools.cxx,
            builder.tools.key,
        )  # asked for now: the scripts below would die of it
        compiler = tmp_path / "compiler"
        if request.param == "driver":
            compiler.write_text(f'{dies.read_text()}exec {real} "$@"\n')
        else:
            dies.write_text(f'{dies.read_text()}exec "$@"\n')
            compiler.write_text(f'#!/bin/sh\nexec {real} -wrapper {dies} "$@"\n')
        for script in (dies, compiler):
            script.chmod(0o755)
        builder.tools.__dict__["cxx"] = str(compiler)
        return builder

    return made


def test_a_compiler_that_is_killed_is_no_fault_of_its_source(fragile):
    builder = fragile(1)
    with pytest.raises(KilledError) as fault:
        builder.build(PLAIN)
    assert fault.value.role == COMPILER and "dmesg" in fault.value.hint
    build = builder.build(PLAIN)
    assert build.ok and build.log == "" and builder.cached(PLAIN) is not None


def test_a_compiler_that_is_killed_every_time_has_failed_and_nobody_remembers(
    fragile, tmp_path, monkeypatch
):
    monkeypatch.setattr(prepared, "FULL_BUILDS_WITHOUT", 100)  # its compiler would die, too
    builder = fragile(100)
    build = retried(lambda: builder.build(PLAIN))
    assert (build.ok, build.reason) == (False, "build_failed")
    assert (tmp_path / "left").read_text().strip() == str(100 - DEATHS)
    assert builder.cached(PLAIN) is None
    (tmp_path / "left").write_text("0")
    assert builder.build(PLAIN).ok


def test_what_all_builds_need_is_a_fault_of_the_machine_where_its_compiler_dies(fragile, tmp_path):
    tools = fragile(100).tools
    source, target = tmp_path / "one.cpp", tmp_path / "one.o"
    source.write_text("int one() { return 1; }\n")
    made = Prepared(tools, WorkRoot(tmp_path / "cache"))
    with pytest.raises(ToolchainError):
        retried(lambda: made.compile("a shim", [tools.cxx, "-c", str(source)], target))
    (tmp_path / "left").write_text("0")
    made.compile("a shim", [tools.cxx, "-c", str(source)], target)
    assert target.exists()


def test_what_is_made_for_all_leaves_nothing_where_its_maker_is_killed(tmp_path):
    """Half of a precompiled header is 800 MB. What a killed process was making lies in its work
    root, which the next one sweeps."""
    script = """
    import os, signal, sys
    from pathlib import Path
    from kernels_eval.compile.prepared import Prepared
    from kernels_eval.compile.process import WorkRoot
    from kernels_eval.toolchain import Toolchain

    def die(staging):
        staging.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    cache = Path(sys.argv[1])
    made = Prepared(Toolchain(cache), WorkRoot(cache))
    made.once(made.root / "libshim.so", die)
    """
    done = python(script, tmp_path)
    assert (
        done.returncode == -signal.SIGKILL and len(list(tmp_path.glob("work-*/*-libshim.so"))) == 1
    )
    mine = Prepared(Toolchain(tmp_path), WorkRoot(tmp_path))
    assert (
        mine.once(
            mine.root / "libshim.so", lambda staging: staging.write_bytes(b"whole") and None
        ).read_bytes()
        == b"whole"
    )
    assert [path.name for path in mine.root.iterdir() if path.suffix != ".lock"] == ["libshim.so"]
    assert len(list(tmp_path.glob("work-*"))) == 1, "its own"


def test_a_compiler_does_not_outlive_its_builder_for_long(tmp_path):
    """A builder that is killed leaves its compiler at work: who sweeps its folder ends it first."""
    script = """
    import os, signal, subprocess, sys
    from pathlib import Path
    from kernels_eval.compile.process import WorkRoot

    work = WorkRoot(Path(sys.argv[1])).path / "build" / "lite"
    work.mkdir(parents=True)
    null = subprocess.DEVNULL
    left = subprocess.Popen(
        ["sleep", "600"], cwd=work, stdout=null, stderr=null, start_new_session=True
    )
    print(left.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    done = python(script, tmp_path)
    assert done.returncode == -signal.SIGKILL
    compiler = psutil.Process(int(done.stdout))
    bystander = subprocess.Popen(["sleep", "600"], cwd=tmp_path)
    try:
        assert compiler.is_running()
        remove_abandoned(tmp_path)
        assert not list(tmp_path.glob("work-*"))
        until(lambda: process_tree.has_ended(compiler.pid), "the compiler is gone")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


# -- an installation that changes ------------------------------------------------------------------

UPGRADED = """
import pathlib
import sys

sys.path.insert(0, sys.argv[1])
import kernels_eval
from kernels_eval import evaluator
from kernels_eval.errors import InstallationError
from tests.support import kernels

TASK = kernels.AFFINE
assert kernels_eval.__file__.startswith(sys.argv[1])
with evaluator.Evaluator("cpu", kernels.UNTIMED) as judge:
    judge.runner.start()
    changed = pathlib.Path(sys.argv[1], "kernels_eval", sys.argv[2])
    changed.write_text(changed.read_text() + sys.argv[3])
    try:
        print(judge(TASK, kernels.candidate(TASK, kernels.module("return ext.affine(x)"))).reason)
    except InstallationError as error:
        print(error)
"""
"""The fork server has loaded what it needs; a child's role is what an upgrade has replaced."""


@pytest.mark.parametrize(
    "written, said",
    [
        ("from kernels_eval.records import nothing\n", "cannot import name 'nothing'"),
        ("raise AttributeError('of another version')\n", "answers.py was changed while this ran"),
    ],
)
def test_code_that_is_replaced_under_a_judge_is_not_held_against_a_task(tmp_path, written, said):
    shutil.copytree(Path(ROOT, "kernels_eval"), tmp_path / "kernels_eval")
    told = python(UPGRADED, tmp_path, "reference/answers.py", written)
    assert said in told.stdout and "then start again" in told.stdout, told.stderr
