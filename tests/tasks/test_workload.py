"""Workloads: numbers against those worked out by hand, and tasks that misbehave cost only
themselves."""

import json
from functools import partial

import polars as pl
import pytest
import torch

from kernels_eval.errors import SandboxError
from kernels_eval.model.operators import reference_operators
from kernels_eval.records import KernelTask
from tasks.operators import operator_kind
from tasks.sources import bundled
from tasks.sources.stage import keep
from tasks.workload import measure, stage
from tasks.workload.families import FAMILIES, TABLE, families_of, family_of
from tasks.workload.measure import Measurer
from tasks.workload.record import Workload
from tests.support.cases import cases

CASES = cases("workload")

MODULE = """
import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, {arguments}):
        {forward}

def get_inputs():
    return [{inputs}]

def get_init_inputs():
    return []
"""


def task(forward, inputs, *, arguments="x", init="pass", name="t"):
    body = "\n        ".join(forward.splitlines())
    code = MODULE.format(init=init, arguments=arguments, forward=body, inputs=inputs)
    return KernelTask(task_id=f"user/{name}", name=name, code=code)


@pytest.fixture(scope="module")
def measurer():
    with Measurer(memory_gb=1.5) as found:
        yield found


def counted(measurer, *args, **kwargs):
    found = measurer.measure(task(*args, **kwargs))
    assert found.problem is None
    return found


@pytest.mark.parametrize("name", CASES["counted"])
def test_a_reference_costs_what_was_worked_out_by_hand(measurer, name):
    case = CASES["counted"][name]
    found = counted(measurer, **case["task"])
    kept = {name: getattr(found, name) for name in case["costs"]}
    assert json.loads(json.dumps(kept)) == case["costs"]


def test_attention_counts_both_products(measurer):
    forward = "return F.scaled_dot_product_attention(x, y, z)"
    found = counted(
        measurer, forward, "*(torch.rand(2, 3, 16, 8) for _ in range(3))", arguments="x, y, z"
    )
    scores = 2 * 3 * 16 * 16
    assert found.flops == 2 * scores * 8 * 2
    assert found.bytes_min == 4 * 4 * (2 * 3 * 16 * 8)


@pytest.mark.parametrize("layer, gates", CASES["a_long_recurrent_layer_costs_its_steps"])
def test_a_long_recurrent_layer_costs_its_steps(measurer, layer, gates):
    steps, batch = (400, 7)
    shape = f"{batch}, {steps}" if "batch_first" in layer else f"{steps}, {batch}"
    found = counted(
        measurer, "return self.rnn(x)[0]", f"torch.rand({shape}, 12)", init=f"self.rnn = {layer}"
    )
    assert found.flops == 2 * steps * batch * gates * 20 * (12 + 20)
    weights = gates * 20 * (12 + 20 + 2)
    assert found.bytes_min == 4 * (steps * batch * 12 + weights + steps * batch * 20)
    assert (found.operator_kind, found.families) == ("single_operator", ("rnn",))


def test_two_steps_stand_for_all_steps_exactly():
    from kernels_eval.reference.workload import Tally, TwoSteps

    torch._C._set_mkldnn_enabled(False)
    try:
        for layer in (
            torch.nn.LSTM(6, 5, 2, bidirectional=True),
            torch.nn.GRU(6, 5, 2),
            torch.nn.LSTM(6, 5, proj_size=3),
        ):
            with torch.no_grad():
                long, short = Tally(), Tally()
                x = torch.rand(9, 2, 6)
                with long:
                    expected, _ = layer(x)
                meta = layer.to("meta")
                x = x.to("meta")
                with torch.device("meta"), TwoSteps(short), short:
                    got, _ = meta(x)
            assert short.flops == long.flops > 0
            assert short.read.bytes == long.read.bytes
            assert got.shape == expected.shape
    finally:
        torch._C._set_mkldnn_enabled(True)


def test_gigabytes_of_inputs_cost_no_memory(measurer):
    """More than the process may hold (COUNTING_GB)."""
    large = measurer.measure(task("return torch.relu(x) + 1", "torch.rand(4, 1024, 1024, 1024)"))
    assert (large.problem, large.executed) == (None, "meta")
    assert large.bytes_min == 2 * 4 * (4 << 30)


def test_real_inputs_are_not_made_where_they_are_too_large(measurer, monkeypatch):
    monkeypatch.setattr(measure, "DECLARED_MAX_BYTES", (1 << 22) - 1)
    large = task("return x * x.sum().item()", "torch.rand(1 << 20)")
    found = measurer.measure(large)
    assert found.problem and "0.00419 GB" in found.problem and "item()" in found.problem
    assert (found.flops, found.bytes_min, found.operator_kind, found.executed) == (
        None,
        None,
        None,
        None,
    )


BAD = {
    "loops": ("while True: pass", "within 6 s"),
    "exits": ("import os; os._exit(3)", "status 3"),
    "segfaults": ("import ctypes; ctypes.string_at(1)", "SIGSEGV"),
    "aborts": ("import os; os.abort()", "killed by SIG"),
    "allocates": (
        "x.sum().item()\n" + "z = [torch.ones(1 << 26, device='cpu') for _ in range(64)]",
        "resident memory above the limit",
    ),
    "raises": ("raise ValueError('no such thing')", "no such thing"),
    "returns no tensor": ("return 'text', x", "not tensors"),
}


@pytest.mark.slow
def test_a_task_that_misbehaves_is_one_problem_and_the_rest_go_on(monkeypatch):
    hurried = partial(Measurer, timeout_s=6, memory_gb=1.0)
    monkeypatch.setattr(measure, "Measurer", hurried)
    tasks = []
    for name, (forward, _) in BAD.items():
        tasks.append(task(forward, "torch.rand(4)", name=name))
        tasks.append(task("return x + 1", "torch.rand(4)", name=f"after {name}"))
    tasks.append(KernelTask(task_id="user/broken", name="broken", code="this is no Python"))
    frame = pl.DataFrame([item.model_dump() for item in tasks])
    rows = stage.annotate(frame)
    assert rows["name"].to_list() == frame["name"].to_list()
    found = dict(zip(rows["name"], rows["problem"], strict=True))
    for name, (_, expected) in BAD.items():
        assert expected in found[name], (name, found[name])
        assert found[f"after {name}"] is None
    assert "SyntaxError" in found["broken"]
    assert rows.filter(pl.col("name").str.starts_with("after"))["bytes_min"].to_list() == [
        32
    ] * len(BAD)


def test_a_child_that_lies_about_the_form_of_its_answer_is_a_problem(measurer):
    forward = (
        "import kernels_eval.reference.workload as w\nw.Storages.bytes = property(lambda self:"
        " -10**9)\nreturn x + 1"
    )
    found = measurer.measure(task(forward, "torch.rand(4)"))
    assert found.problem and "no workload" in found.problem


@pytest.fixture
def asked(monkeypatch):
    """The names of the tasks that are measured."""
    names = []
    true = stage.measured
    monkeypatch.setattr(
        stage,
        "measured",
        lambda tasks: true(names.append(t.name) or t for t in tasks),
    )
    return names


@pytest.mark.slow
def test_the_same_program_is_counted_once_and_kept(tmp_path, asked):
    one, other = (
        task("return x + 1", "torch.rand(4)", name="one"),
        task("return x + 1", "torch.rand(8)", name="other"),
    )
    copy = one.model_copy(update={"task_id": "user/copy", "name": "copy"})
    frame = pl.DataFrame([item.model_dump() for item in (one, other, copy)])
    first = stage.annotate(frame, root=str(tmp_path))
    assert len(asked) == 2
    assert first["bytes_min"].to_list() == [32, 64, 32]
    assert first.columns == [*frame.columns, *stage.COLUMNS]
    assert stage.annotate(frame, root=str(tmp_path)).equals(first)
    assert len(asked) == 2
    more = pl.concat(
        [frame, pl.DataFrame([task("return x - 1", "torch.rand(4)", name="new").model_dump()])]
    )
    assert stage.annotate(more, root=str(tmp_path))["bytes_min"].to_list() == [32, 64, 32, 32]
    assert asked[2:] == ["new"]


@pytest.mark.slow
def test_a_snapshot_has_a_row_a_task_and_a_later_one_pays_for_new_programs_only(tmp_path, asked):
    one, broken = (
        task("return x + 1", "torch.rand(4)", name="one"),
        KernelTask(task_id="user/broken", name="broken", code="no Python"),
    )
    copy = one.model_copy(update={"task_id": "user/copy", "name": "copy"})
    tasks = keep([one, broken, copy], str(tmp_path), {})
    made = stage.run(tasks).open()
    rows = {row["task_id"]: row for row in made.read().to_dicts()}
    assert set(rows) == {"user/one", "user/copy", "user/broken"}
    assert (
        rows["user/one"]["bytes_min"],
        rows["user/copy"]["bytes_min"],
        rows["user/broken"]["bytes_min"],
    ) == (32, 32, None)
    assert "SyntaxError" in rows["user/broken"]["problem"] and asked == ["one", "broken"]
    assert made.manifest["rows"] == 3 and made.manifest["upstream"] == [tasks.fingerprint]
    assert made.manifest["status_counts"] == {"not counted": 1, "single_operator": 2}
    assert made.manifest["family_counts"] == {"elementwise": 2}
    assert stage.run(tasks) == made.ref == stage.planned(tasks).ref
    assert len(asked) == 2

    renamed = one.model_copy(update={"task_id": "user/renamed", "name": "renamed"})
    more = keep(
        [renamed, broken, task("return x - 1", "torch.rand(4)", name="new")], str(tmp_path), {}
    )
    later = stage.run(more).open().read()
    assert asked[2:] == ["new"] and sorted(later["task_id"]) == [
        "user/broken",
        "user/new",
        "user/renamed",
    ]


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(tmp_path, monkeypatch, asked):
    frame = pl.DataFrame(
        [task(f"return x + {i}", "torch.rand(4)", name=str(i)).model_dump() for i in range(3)]
    )
    true = stage.measured

    def killed(tasks):
        yield next(true(tasks))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(stage, "measured", killed)
        stage.annotate(frame, root=str(tmp_path))
    asked.clear()
    assert stage.annotate(frame, root=str(tmp_path))["bytes_min"].to_list() == [32, 32, 32]
    assert len(asked) == 2


def test_bundled_tasks_are_named_as_verification_names_them(measurer):
    for item in bundled.load("all"):
        space = {}
        exec(compile(item.code, item.name, "exec"), space)
        model, inputs = space["Model"](*space["get_init_inputs"]()), space["get_inputs"]()
        seen = reference_operators(lambda model=model, inputs=inputs: model(*inputs))[:256]
        found = measurer.measure(item)
        assert found.problem is None
        assert list(found.operators) == seen, item.name
        assert found.operator_kind == operator_kind(seen)
        assert found.bytes_min, item.name
        assert found.families and "other" not in found.families, item.name


def test_every_name_is_in_one_family_only():
    names = [name for text in TABLE.values() for name in text.split()]
    assert sorted(names) == sorted(set(names))
    assert set(TABLE) | {"other"} == set(FAMILIES)


@pytest.mark.parametrize("operator, family", CASES["spellings_of_one_operator_are_one_family"])
def test_spellings_of_one_operator_are_one_family(operator, family):
    assert family_of(operator) == family
    assert families_of([operator, operator]) == (family,)


class Counted:
    """In the place of a Measurer: one that was closed measures no more."""

    made: list["Counted"]

    def __init__(self):
        self.closed = False
        self.made.append(self)

    def measure(self, task):
        if self.closed or task.name == "breaks":
            raise SandboxError("the measurement process ended")
        return Workload(task_id=task.task_id, problem="not counted")

    def close(self):
        self.closed = True


def test_sets_that_are_counted_in_one_block_share_a_process(monkeypatch):
    monkeypatch.setattr(measure, "Measurer", Counted)
    monkeypatch.setattr(Counted, "made", [], raising=False)
    first, second, breaks = (
        task("return x", "torch.ones(2)", name=n) for n in "a b breaks".split()
    )

    with measure.counting():
        assert len(list(measure.measured([first]))) == len(list(measure.measured([second]))) == 1
        assert [each.closed for each in Counted.made] == [False]
        with pytest.raises(SandboxError):
            list(measure.measured([breaks]))
        assert len(list(measure.measured([first]))) == 1  # as a retried stage asks again
    assert [each.closed for each in Counted.made] == [True, True]

    assert len(list(measure.measured([first]))) == 1
    assert [each.closed for each in Counted.made] == [True] * 3
