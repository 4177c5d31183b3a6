"""A SIGKILL from outside changes no verdict: whoever is hit, at whatever step; and who always dies
of one gets its verdict at the fifth."""

import os
import signal
import subprocess
import textwrap

import psutil
import pytest

from kernels_eval.compile.extensions import Builder
from kernels_eval.compile.prepared import Prepared
from kernels_eval.compile.process import WorkRoot, remove_abandoned, was_killed
from kernels_eval.config import BuildConfig
from kernels_eval.errors import KILL_ATTEMPTS, KilledError, SandboxError, ToolchainError
from kernels_eval.sandbox import process_tree, sandbox
from kernels_eval.sandbox.sandbox import BLAMED_ROLES, Child, retry_killed
from kernels_eval.source.spec import ExtensionSpec
from kernels_eval.toolchain import Toolchain
from tests.support import kernels
from tests.support.kernels import AFFINE, WEIGHTED, module
from tests.support.processes import python
from tests.support.waiting import until

CONFIG = kernels.QUICK.model_copy(update={"time_correct": False})
HONEST = module("return ext.affine(x)")
SLOW = module("time.sleep(0.2)\nreturn ext.affine(x)", before="import time\ntime.sleep(0.5)")
"""Gives a child that was just forked the time to notice that it is to die."""
ORNAMENT = module("ext.affine(x)\nreturn x * 2.0 + 1.0")
SHAPED = module("return ext.affine(x) if x.shape[0] == 64 else ext.shifted(x)")
STALE = module(
    "return ext.times_row(x, self.frozen)",
    init="self.gain = nn.Parameter(torch.randn(64))\nself.frozen = self.gain.detach().clone()",
)


# -- the rule --------------------------------------------------------------------------------------


@pytest.mark.parametrize("deaths", range(KILL_ATTEMPTS + 1))
def test_four_deaths_are_put_down_to_the_machine_and_the_fifth_is_believed(deaths):
    asked = []

    def work():
        asked.append("candidate" in BLAMED_ROLES.get())
        if len(asked) <= deaths and not asked[-1]:
            raise KilledError("killed", role="candidate")
        return "crashed" if len(asked) <= deaths else "ok"

    assert retry_killed(work) == ("crashed" if deaths == KILL_ATTEMPTS else "ok")
    assert asked == [False, False, False, False, True][: deaths + 1]


def test_deaths_of_one_role_do_not_speak_against_another():
    deaths = [
        KilledError("killed", role=role)
        for role in ["reference", "candidate", "capture"] * (KILL_ATTEMPTS - 2)
    ]
    deaths += [SandboxError("the fork server is gone")] * (KILL_ATTEMPTS - 1)

    def work():
        assert not BLAMED_ROLES.get() & {"reference", "candidate", "capture"}
        if deaths:
            raise deaths.pop()
        return "ok"

    assert retry_killed(work) == "ok"


def test_a_machine_that_fails_five_times_is_an_error():
    seen = []

    def work():
        seen.append(1)
        raise SandboxError("the fork server is gone")

    with pytest.raises(SandboxError):
        retry_killed(work)
    assert len(seen) == KILL_ATTEMPTS


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
    resume = Child.resume

    def hooked(self, message, timeout, fds=()):
        if (self.role, message.get("command")) == (role, command) and not self.dead:
            keeper = self.pid
            until(lambda: process_tree.children(keeper) or process_tree.has_ended(keeper))
            inner, server = process_tree.children(keeper), self.server.process.pid
            for pid in {"child": inner[:1], "keeper": [keeper], "fork server": [server]}[victim]:
                # it may have been hit before, and its child have answered once more
                if len(hit) < times and not process_tree.has_ended(pid):
                    os.kill(pid, signal.SIGKILL)
                    hit.add(pid)
        return resume(self, message, timeout, fds)

    monkeypatch.setattr(Child, "resume", hooked)
    return hit


STEPS = [
    ("capture", "Capture", HONEST, AFFINE, "ok"),
    ("reference", "LoadTask", HONEST, AFFINE, "ok"),
    ("reference", "Expect", HONEST, AFFINE, "ok"),
    ("reference", "Compare", HONEST, AFFINE, "ok"),
    (
        "reference",
        "TryOtherWeights",
        STALE.replace("nn.Parameter(torch.randn(64))", "torch.randn(64)"),
        WEIGHTED,
        "stale_weights",
    ),
    ("candidate", "LoadCandidate", HONEST, AFFINE, "ok"),
    ("candidate", "Call", SHAPED, AFFINE, "shape_specialised"),
    ("candidate", "ReadState", HONEST, AFFINE, "ok"),
    ("candidate", "ReplaceWritten", ORNAMENT, AFFINE, "no_custom_kernel"),
]


QUICK_STEPS = {("capture", "Capture"), ("reference", "Compare"), ("candidate", "Call")}
"""One of each role; the others are tests of half a minute together."""


@pytest.mark.parametrize(
    "role, command, code, task, reason",
    [
        pytest.param(
            *step,
            id=f"{step[0]}-{step[1]}",
            marks=() if step[:2] in QUICK_STEPS else pytest.mark.slow,
        )
        for step in STEPS
    ],
)
def test_a_child_that_is_killed_once_changes_no_verdict(
    verify, monkeypatch, role, command, code, task, reason
):
    verify.runner.drop_reference()  # it is asked everything anew
    hit = kill_at(monkeypatch, role, command, "child", 1)
    assert verify(code, task) == reason
    assert len(hit) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim, role, command, times",
    [
        pytest.param("fork server", "capture", "Capture", 1, marks=pytest.mark.slow),
        ("fork server", "reference", "Compare", 1),
        pytest.param("fork server", "candidate", "Call", 2, marks=pytest.mark.slow),
        ("keeper", "candidate", "Call", KILL_ATTEMPTS - 1),
    ],
)
def test_a_keeper_or_a_fork_server_that_is_killed_changes_no_verdict(
    verify, monkeypatch, victim, role, command, times
):
    hit = kill_at(monkeypatch, role, command, victim, times)
    assert verify(SLOW) == "ok"
    assert len(hit) == times


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
        assert len(hit) == KILL_ATTEMPTS
    assert verify(HONEST) == "ok", "the next one is not blamed for it"


@pytest.mark.slow
def test_a_fork_server_that_is_killed_every_time_is_the_machines_fault(verify, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "KILL_ATTEMPTS", 2)
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


def test_a_compiler_that_is_killed_is_started_again(fragile):
    builder = fragile(KILL_ATTEMPTS - 1)
    build = builder.build(PLAIN)
    assert build.ok and build.log == "" and builder.cached(PLAIN) is not None


def test_a_compiler_that_is_killed_every_time_has_failed_and_nobody_remembers(fragile, tmp_path):
    builder = fragile(100)
    build = builder.build(PLAIN)
    assert (build.ok, build.reason) == (False, "build_failed")
    assert (tmp_path / "left").read_text().strip() == str(100 - KILL_ATTEMPTS)
    assert builder.cached(PLAIN) is None
    (tmp_path / "left").write_text("0")
    assert builder.build(PLAIN).ok


@pytest.mark.parametrize("deaths", [KILL_ATTEMPTS - 1, KILL_ATTEMPTS])
def test_what_all_builds_need_is_made_although_its_compiler_is_killed(fragile, deaths, tmp_path):
    tools = fragile(deaths).tools
    source = tmp_path / "one.cpp"
    source.write_text("int one() { return 1; }\n")
    command, target = [tools.cxx, "-c", str(source)], tmp_path / "one.o"
    prepared = Prepared(tools, WorkRoot(tmp_path / "cache"))
    if deaths < KILL_ATTEMPTS:
        prepared.compile("a shim", command, target)
        assert target.exists()
    else:
        with pytest.raises(ToolchainError):
            prepared.compile("a shim", command, target)


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
