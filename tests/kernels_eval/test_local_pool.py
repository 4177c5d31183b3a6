"""The pool without Ray: processes of this machine, which wait for one another."""

import os
import sys
import threading
from contextlib import ExitStack
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest

from kernels_eval.compile.extensions import Builder
from kernels_eval.errors import BusyError, GpuLostError, SandboxError
from kernels_eval.pool import local
from kernels_eval.pool import pool as pool_module
from kernels_eval.pool.held import held, holders
from kernels_eval.pool.local import LostError, Machine
from kernels_eval.pool.pool import Pool
from kernels_eval.records import Language
from kernels_eval.sandbox.deaths import DEATHS
from tests.support import kernels
from tests.support.kernels import AFFINE, load_inline, module
from tests.support.pools import Held, Quick, many, outcomes
from tests.support.processes import started
from tests.support.waiting import until


class Fated(Quick):
    """Dies, or fails, on the candidates that are named for it, as often as a file says."""

    def __init__(self, log, *_):
        self.log = log

    def run(self, task, candidate, *_):
        fate = os.environ.get("FATE", "")
        if candidate.candidate_id == "many-2" and fate:
            done = len(self.log.read_text()) if self.log.exists() else 0
            if done < int(fate.split()[1]):
                self.log.write_text("x" * (done + 1))
                if fate.startswith("dies"):
                    os._exit(3)
                raise SandboxError("the fork server is gone", "mend it")
        return super().run(task, candidate)


@pytest.fixture(autouse=True)
def without_ray(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("CONCUR_LOCKS", str(tmp_path / "locks"))
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


@pytest.fixture
def fated(monkeypatch, tmp_path):
    def pool(fate=""):
        monkeypatch.setenv("FATE", fate)
        runner = (tmp_path / "log",)
        made = Pool(Language.CPP, workers=2, builders=1, builder=Quick, runner=Fated)
        made._new_runner = lambda: made._host.start(Fated, runner)
        return made

    return pool


def test_real_candidates_are_judged_without_ray():
    asked = [
        (AFFINE, kernels.candidate(AFFINE, code))
        for code in (
            module("return ext.affine(x)"),
            module("return ext.aborts(x)"),
            "class ModelNew(\n",
            module(
                "return ext.broken(x)",
                extension=load_inline("at::Tensor broken(at::Tensor x) { return unheard_of; }"),
            ),
        )
    ]
    with Pool(Language.CPP, kernels.UNTIMED, workers=1, builders=1) as pool:
        assert isinstance(pool._host, Machine)
        assert outcomes(asked, list(pool.verify(asked))) == [
            "ok",
            "crashed",
            "syntax_error",
            "build_failed",
        ]
        workers = [slot.actor.process.pid for slot in pool._slots]
    assert not any(map(psutil.pid_exists, workers))
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()


@pytest.mark.parametrize(
    "cores, asked, workers, builders",
    [(1, None, 1, 1), (2, None, 2, 2), (3, None, 2, 2), (8, None, 4, 4), (2, 1, 1, 2)],
)
def test_two_cores_have_two_workers_of_each_kind_and_more_have_halves(
    monkeypatch, cores, asked, workers, builders
):
    monkeypatch.setattr(local, "usable_cpus", lambda: cores)
    with Pool(Language.CPP, workers=asked, builder=Quick, runner=Quick) as pool:
        assert (pool.telemetry.devices, pool.telemetry.builders) == (workers, builders)


class Notes(Quick):
    """Writes to the file `NOTES` which builds give way, and runs none before all six are noted."""

    def build(self, task, candidate, prepared, blamed, gives_way):
        with open(os.environ["NOTES"], "a") as notes:
            notes.write(f"{gives_way:d}")
        return super().build(task, candidate)

    def run(self, task, candidate, *_):
        if candidate.candidate_id == "many-0":
            assert until(lambda: len(Path(os.environ["NOTES"]).read_text()) == 6)
        return super().run(task, candidate)


def test_builds_give_way_while_each_worker_has_its_next_work(monkeypatch, tmp_path):
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    with Pool(Language.CPP, workers=1, builders=1, builder=Notes, runner=Notes) as pool:
        assert len(list(pool.verify(many(6)))) == 6
    # the second while the first one waits for the worker, the third while the second is its next
    assert (tmp_path / "notes").read_text() == "001111"


def test_until_its_first_verdict_a_pool_says_what_is_under_way():
    said, asked = [], many(3)
    options = {"builder": Quick, "runner": Quick, "waiting": said.append}
    with Pool(Language.CPP, workers=1, builders=1, **options) as pool:
        for _ in range(2):  # also of a second stream, as of a next round
            stream = pool.verify(asked)
            next(stream)
            assert f"builds {AFFINE.task_id}" in said
            assert any(each.startswith(f"judges {AFFINE.task_id}") for each in said)
            said.clear()
            assert len(list(stream)) == 2 and not said


class Waits(Quick):
    """Builds once somebody writes to the pipe `GATE`."""

    def build(self, task, candidate, *_):
        Path(os.environ["GATE"]).read_bytes()
        return super().build(task, candidate)


def test_a_pool_says_how_far_the_headers_are_that_its_builders_make(monkeypatch, tmp_path):
    gate, parts, said = tmp_path / "gate", [tmp_path / "first", tmp_path / "second"], []
    os.mkfifo(gate)
    parts[0].touch()
    monkeypatch.setenv("GATE", str(gate))
    monkeypatch.setattr(Builder, "parts", lambda self, cuda: dict.fromkeys(parts))
    monkeypatch.setattr(pool_module, "WATCH_S", 0.05)

    def say(text):
        said.append(text)
        if "1 of 2" in text:
            parts[1].touch()
        elif "2 of 2" in text:
            gate.write_bytes(b"go")

    options = {"builder": Waits, "runner": Quick, "waiting": say}
    with Pool(Language.CPP, workers=1, builders=1, **options) as pool:
        asked = many(1)
        assert outcomes(asked, list(pool.verify(asked))) == ["ok"]
    told = [f"headers: {made} of 2 parts built, once for all kernels" for made in (1, 2)]
    headers = [f"{told[0]}; under way: second", told[1]]
    assert [line for line in said if line.startswith("headers")] == headers


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


def test_a_worker_that_cannot_read_what_it_is_given_is_lost(request):
    machine = Machine(gpus=0)
    worker = machine.start(Quick, [Unreadable()])
    request.addfinalizer(worker.kill)
    pending = machine.started(worker)
    until(lambda: pending.done, "the end of the worker", 60)
    with pytest.raises(LostError, match="status 1: ValueError: invalid literal for int"):
        machine.get(pending)


@pytest.mark.parametrize(
    "fate", [f"dies {DEATHS - 1}", pytest.param(f"fails {DEATHS - 1}", marks=pytest.mark.slow)]
)
def test_workers_that_die_or_fail_are_replaced(fated, fate):
    asked = many(30)
    with fated(fate) as pool:
        assert set(outcomes(asked, list(pool.verify(asked)))) == {"ok"}


def test_what_is_cancelled_ends_without_a_verdict_and_frees_its_worker(tmp_path, monkeypatch):
    begun = tmp_path / "begun"
    monkeypatch.setenv("HELD", str(begun))
    asked = many(4)
    asked[1] = AFFINE, asked[1][1].model_copy(update={"code": "HOLD"})
    asked.append((AFFINE, asked[2][1].model_copy()))  # the same, asked for again
    cancelled = SimpleQueue()
    cancelled.put(asked[2][1])  # before it is taken

    def cancel():
        until(begun.exists, "the run that never ends")
        cancelled.put(asked[1][1])

    options = {"workers": 1, "builders": 1, "builder": Quick, "runner": Held}
    with Pool(Language.CPP, **options, cancelled=cancelled) as pool:
        worker = pool._runners[0].actor.process.pid
        threading.Thread(target=cancel).start()
        found = [verdict.candidate_id for verdict in pool.verify(asked)]
        assert pool._given_up == [] and not psutil.pid_exists(worker)
    assert sorted(found) == ["many-0", "many-2", "many-3"]


@pytest.mark.parametrize(
    "fate, error, said",
    [
        pytest.param(
            *(f"dies {DEATHS}", GpuLostError),
            "on candidate many-2: its process ended with status 3",
            marks=pytest.mark.slow,
        ),
        (f"fails {DEATHS}", SandboxError, "the fork server is gone"),
    ],
)
def test_a_candidate_that_takes_its_worker_down_is_named(fated, fate, error, said):
    with fated(fate) as pool, pytest.raises(error, match=said):
        list(pool.verify(many(30)))


def test_an_answer_that_was_given_up_is_not_taken_for_the_next(fated):
    with fated() as pool:
        stream = pool.verify(many(50))
        next(stream)
        stream.close()
        asked = many(20, "others")
        assert outcomes(asked, list(pool.verify(asked))) == ["ok"] * 20


def test_a_worker_that_cannot_start_says_why():
    class Unreachable(Quick):
        """Another process cannot import it."""

    Unreachable.__qualname__ = "Unreachable"
    with (
        pytest.raises(Exception, match="Unreachable"),
        Pool(Language.CPP, workers=1, builders=1, builder=Quick, runner=Unreachable) as pool,
    ):
        list(pool.verify(many(1)))


def test_workers_end_with_a_pool_that_is_killed():
    script = """
        import time
        from kernels_eval.pool.pool import Pool
        from kernels_eval.records import Language
        from tests.support.pools import Quick, many
        with Pool(Language.CPP, workers=1, builders=1, builder=Quick, runner=Quick) as pool:
            list(pool.verify(many(3)))
            print("up", flush=True)
            time.sleep(600)
    """
    with started(script) as process:
        assert process.stdout.readline() == "up\n"
        workers = psutil.Process(process.pid).children()
        assert len(workers) >= 2
        process.kill()
        assert psutil.wait_procs(workers, timeout=300)[1] == []


# -- who waits for whom ----------------------------------------------------------------------------

HOLDS = """
    import sys
    from kernels_eval.pool.held import call_it, held
    call_it("flow run ruby-fox")
    how, kind = sys.argv[1:]
    with held(kind, shared=how == "shared", patience_s=None, say=print):
        print("held", flush=True)
        sys.stdin.read()
"""


@pytest.fixture
def other():
    """Another process that holds the device, until its standard input ends."""
    with ExitStack() as stack:

        def start(how, kind="cpu"):
            process = stack.enter_context(started(HOLDS, how, kind))
            assert process.stdout.readline() == "held\n"
            return process

        yield start


@pytest.mark.parametrize("theirs", ["shared", "alone"])
def test_a_pool_says_whom_it_waits_for_and_goes_on(other, theirs):
    holder, said = other(theirs), []

    def say(text):
        said.append(text)
        holder.kill()

    with held("cpu", shared=False, patience_s=None, say=say):
        assert f"flow run ruby-fox (process {holder.pid}, since " in said[0]
        assert holders("cpu") == []


def test_a_pool_counts_the_time_that_it_waited(other):
    holder = other("alone")
    options = {"workers": 1, "builder": Quick, "runner": Quick}
    pool = Pool(Language.CPP, waiting=lambda text: holder.kill(), **options)
    with pool:
        assert pool.waited_s > 0.1, "half a second until it looks again"


def test_a_holder_with_a_temporary_folder_of_its_own_is_seen(other, monkeypatch, tmp_path):
    """Such as a run of a stack."""
    monkeypatch.delenv("CONCUR_LOCKS")
    kind = f"test-{tmp_path.name}-{os.getpid()}"
    with monkeypatch.context() as theirs:
        theirs.setenv("TMPDIR", str(tmp_path))
        holder = other("alone", kind)
    assert f"(process {holder.pid}, since " in holders(kind)[0]
    for path in Path("/tmp").glob(f"concur_judging-*-{kind}*"):
        path.unlink()


def test_patience_ends(other):
    other("alone")
    with (
        pytest.raises(BusyError, match="not free after 0 s: flow run ruby-fox.*--timeout"),
        Pool(Language.CPP, workers=1, builder=Quick, runner=Quick, patience_s=0),
    ):
        pass


def test_pools_of_ray_share_what_they_hold(other):
    other("shared")
    with held("cpu", shared=True, patience_s=0, say=print):
        other("shared")
        assert len(holders("cpu")) == 2


def test_pools_of_one_process_do_not_wait_for_one_another():
    with held("cpu", shared=False, patience_s=0, say=print):
        with held("cpu", shared=False, patience_s=0, say=print):
            assert holders("cpu") == []


def test_a_pool_without_work_lets_others_judge(tmp_path):
    """A service holds the devices only while it has requests."""
    (first, second), seen = many(2), []

    def is_free():
        with (tmp_path / f"locks/concur_judging-{os.getuid()}-cpu").open() as file:
            try:
                flock(file, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                return False
            return True

    def requests():
        yield first
        seen.append(is_free())  # while the first is under way
        while not is_free():
            yield None
        yield second

    with Pool(Language.CPP, workers=1, builders=1, builder=Quick, runner=Quick) as pool:
        assert outcomes([first, second], list(pool.verify(requests()))) == ["ok", "ok"]
        assert seen == [False] and not is_free()
    assert is_free()


def test_one_that_was_killed_holds_nothing(other):
    other("alone").kill()
    until(lambda: holders("cpu") == [])
    with held("cpu", shared=False, patience_s=None, say=print):
        pass
