"""Where references spend their time: really profiled, in a confined process, and what fails costs
one row."""

import pytest

from kernels_eval.records import KernelTask
from tasks.sources import bundled
from tasks.sources.stage import keep
from tasks.workload import operator_times as stage
from tasks.workload.measure import Profiler
from tasks.workload.record import Profile

BUNDLED = {task.name: task for task in bundled.load()}


def shares(found):
    return {each.name: each.us / found.total_us for each in found.operators}


def profiles_of(ref):
    rows = ref.open().read(columns=list(Profile.model_fields)).to_dicts()
    return {row["task_id"]: Profile.model_validate(row) for row in rows}


def broken(name, forward):
    code = BUNDLED["softmax_rows"].code
    head, tail = code.split("    def forward", 1)
    rest = tail[tail.index("\n\n\n") :]
    return KernelTask(
        task_id=f"user/{name}",
        name=name,
        code=f"{head}    def forward(self, x):\n        {forward}{rest}",
    )


@pytest.fixture(scope="module")
def profiler():
    with Profiler("cpu", timeout_s=30) as made:
        yield made


def test_one_operator_takes_all_the_time(profiler):
    found = profiler.profile(BUNDLED["matrix_multiply"])
    assert found.problem is None and found.clock == "cpu"
    assert found.operators[0].name == "matmul" and found.operators[0].calls == 1
    assert shares(found)["matmul"] > 0.95 and sum(shares(found).values()) == pytest.approx(1.0)


def test_the_shares_of_several_are_those_of_the_outermost_calls(profiler):
    """`linear` is an addmm below torch's surface, and has its time; a large product outweighs its
    activation."""
    found = profiler.profile(BUNDLED["linear_gelu"])
    assert set(list(shares(found))[:2]) == {"linear", "gelu"} and "addmm" not in shares(found)
    assert shares(found)["linear"] > shares(found)["gelu"] > 0.02


@pytest.mark.parametrize(
    "forward, said",
    [
        ("raise ValueError('no')", "ValueError: no"),
        ("import os; os._exit(3)", "status 3"),
        ("while True: pass", "no answer"),
    ],
)
def test_a_reference_that_misbehaves_costs_its_own_row(profiler, forward, said):
    hurried = Profiler("cpu", timeout_s=3.0 if "while" in forward else 30.0)
    hurried._server = profiler._server  # the same process that has imported torch
    found = hurried.profile(broken("bad", forward))
    assert found.problem is not None and said in found.problem and not found.operators


def test_the_stage_keeps_a_row_a_task_and_profiles_a_program_once(tmp_path, monkeypatch):
    twin = BUNDLED["softmax_rows"].model_copy(update={"task_id": "user/twin", "name": "twin"})
    tasks = keep(
        [BUNDLED["softmax_rows"], twin, broken("bad", "raise ValueError('no')")], str(tmp_path), {}
    )
    asked = []
    original = Profiler.profile
    monkeypatch.setattr(
        Profiler, "profile", lambda self, task: asked.append(task.name) or original(self, task)
    )
    ref = stage.run(tasks, 1, "cpu", "a processor")
    found = profiles_of(ref)
    assert set(found) == {"bundled/softmax_rows", "user/twin", "user/bad"} and len(asked) == 2
    assert (
        shares(found["user/twin"]) == shares(found["bundled/softmax_rows"])
        and shares(found["user/twin"])["softmax"] > 0.9
    )
    assert found["user/bad"].problem and found["user/twin"].device == "a processor"
    assert stage.run(tasks, 1, "cpu", "a processor") == ref and len(asked) == 2
    assert stage.planned(tasks, 1, "cpu", "another").fingerprint != ref.fingerprint, (
        "shares of one device say nothing of another"
    )
    more = keep([BUNDLED["softmax_rows"]], str(tmp_path), {})
    assert (
        shares(profiles_of(stage.run(more, 1, "cpu", "a processor"))["bundled/softmax_rows"])
        and len(asked) == 2
    )
