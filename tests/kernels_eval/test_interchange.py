"""Definitions, solutions and traces of FlashInfer-Bench and SOL-ExecBench, and KernelBench's
results: what becomes of them here, and of our records there."""

import json
import math
import struct

import pytest
import torch

from kernels_eval.errors import UsageError
from kernels_eval.exchange import kernelbench
from kernels_eval.exchange.definitions import definition_of, solution_of, workload_of, written
from kernels_eval.exchange.flashinfer import (
    Definition,
    Solution,
    Workload,
)
from kernels_eval.exchange.trace_set import TraceSet, is_trace_set
from kernels_eval.exchange.traces import evaluation_of, verdict_row
from kernels_eval.protocol import DescribeInterface, Interface
from kernels_eval.records import Language, Reason, Status, Timing, Verdict
from tasks.sources.tables import load
from tasks.synthesis.tables import CandidateTable
from tasks.workload.measure import Measurer
from tests.support.cases import cases
from tests.support.kernels import AFFINE, candidate, module

CASES = cases("interchange")
DEFINITION, WORKLOAD, SOLUTION = CASES["definition"], CASES["workload"], CASES["solution"]
REFERENCE = DEFINITION["reference"]
SPEC = {name: value for name, value in SOLUTION["spec"].items() if name != "language"}


def of(kind, row, **fields):
    return kind.model_validate({**row, **fields})


def values(code):
    found = {}
    exec(code, found)
    return found


def test_a_definition_and_a_solution_compute_the_same():
    definition, workload = of(Definition, DEFINITION), of(Workload, WORKLOAD)
    task = values(definition.task(workload).code)
    inputs = task["get_inputs"]()
    assert inputs[0].shape == (3, 4, 2) and inputs[1] == 0.5
    assert definition.sizes(workload)["H"] == 8
    code = of(Solution, SOLUTION).code(definition, workload)
    for x in (inputs[0], torch.randn(5, 4, 2)):  # sizes are those of the inputs that come
        expected, found = task["Model"]()(x, 0.5), values(code)["ModelNew"]()(x, 0.5)
        assert isinstance(expected, tuple) and len(found) == 2
        torch.testing.assert_close(list(found), list(expected))


def test_a_task_refuses_another_size_where_its_definition_fixes_one():
    mask = {"shape": ["M", "H"], "dtype": "bool"}
    reference = REFERENCE.replace("run(x, scale)", "run(x, scale, m)")
    inputs = {**DEFINITION["inputs"], "m": mask}
    definition = of(Definition, DEFINITION, inputs=inputs, reference=reference)
    model = values(definition.task(of(Workload, WORKLOAD)).code)["Model"]()
    m = torch.ones(5, 12, dtype=torch.bool)
    model(torch.randn(5, 4, 2), 1.0, m)
    for shape, mask in (((5, 3, 2), m), ((5, 4, 1), m), ((6, 4, 2), m), ((5, 4, 2), m[:, :9])):
        with pytest.raises(ValueError, match="sizes of another task"):
            model(torch.randn(shape), 1.0, mask)


def test_outputs_take_the_size_of_an_expression():
    outputs = {"y": {"shape": ["H", "M"], "dtype": "bfloat16"}}
    definition = of(Definition, DEFINITION, outputs=outputs)
    content = (
        "def go(x, scale, y):\n    assert y.shape == (2 * len(x) + 2, len(x))\n    y.zero_()\n"
    )
    solution = of(Solution, SOLUTION, sources=[{"path": "main.py", "content": content}])
    made = values(solution.code(definition, of(Workload, WORKLOAD)))["ModelNew"]()
    assert made(torch.randn(7, 4, 2), 1.0).dtype is torch.bfloat16


@pytest.mark.parametrize(
    "expression, says",
    [
        ("__import__('os')", "Call is no arithmetic"),
        ("M.real", "Attribute"),
        ("M / 2", "gives 1.5"),
        ("9 ** 9 ** 9", "a power of more than"),
        ("(((9 ** 18) ** 18) ** 18) ** 18", "more than 18 digits"),
        ("M - 9", "gives -6"),
        ("M // 0", "division|modulo"),
        ("Z", "axis 'Z' has no value"),
        ("(" * 300, "axis expression"),
    ],
)
def test_an_expression_is_arithmetic_or_refused(expression, says):
    axes = {**DEFINITION["axes"], "H": {"type": "expr", "expression": expression[:256]}}
    with pytest.raises(ValueError, match=says):
        of(Definition, DEFINITION, axes=axes).task(of(Workload, WORKLOAD))


def test_inputs_come_from_the_definitions_own_function():
    reference = "import torch\ndef run(x, scale):\n    return x\ndef made(sizes, device):\n"
    reference += "    return {'x': torch.full((sizes['M'], sizes['H']), sizes['scale'])}\n"
    definition = of(
        Definition, DEFINITION, reference=reference, custom_inputs_entrypoint="made", outputs={}
    )
    custom = {"x": {"type": "custom"}, "scale": {"type": "scalar", "value": 2.5}}
    task = definition.task(of(Workload, WORKLOAD, inputs=custom))
    x, scale = values(task.code)["get_inputs"]()
    assert x.shape == (3, 8) and scale == 2.5 and bool((x == 2.5).all())


def safetensors(path, values, shape):
    data = struct.pack(f"<{len(values)}i", *values)
    head = json.dumps({"k": {"dtype": "I32", "shape": shape, "data_offsets": [0, len(data)]}})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(head)) + head.encode() + data)


def test_a_tensor_of_a_file_is_in_the_program_and_no_file_outside_is_read(tmp_path):
    inputs = {"x": {"shape": ["M"], "dtype": "int32"}}
    definition = of(Definition, DEFINITION, inputs=inputs, reference="def run(x): return x")

    def task(path, root=tmp_path / "set"):
        given = {"x": {"type": "safetensors", "path": path, "tensor_key": "k"}}
        return definition.task(of(Workload, WORKLOAD, inputs=given), root)

    safetensors(tmp_path / "set/blob/a.safetensors", [3, -1, 7], [3, 1])
    safetensors(tmp_path / "out.safetensors", [1], [1])
    for path in ("blob/a.safetensors", "elsewhere/blob/a.safetensors"):
        (x,) = values(task(path).code)["get_inputs"]()
        assert x.tolist() == [[3], [-1], [7]] and x.dtype is torch.int32
    for path, root, says in (
        ("../out.safetensors", tmp_path / "set", "is not under"),
        ("/etc/passwd", tmp_path / "set", "is not under|cannot be read"),
        ("blob/none", tmp_path / "set", "No such file"),
        ("blob/a.safetensors", None, "cannot be sent"),
    ):
        with pytest.raises(ValueError, match=says):
            task(path, root)


HEADER = {"path": "inc/k.h", "content": "int twice(int);\n"}
NATIVE = [
    HEADER,
    {"path": "k.cpp", "content": '#include "inc/k.h"\n#include "inc/k.h"\nint twice(int a);\n'},
    {"path": "main.cpp", "content": '#include <torch/extension.h>\n#include "inc/k.h"\n'},
]


def test_headers_of_a_native_solution_stand_in_their_places_once_a_unit():
    spec = {**SPEC, "language": "cpp", "binding": "torch", "entry_point": "main.cpp::run"}
    solution = of(Solution, SOLUTION, spec=spec, sources=NATIVE)
    code = solution.code(of(Definition, DEFINITION), of(Workload, WORKLOAD))
    assert solution.language is Language.CPP and code.count("int twice(int);") == 2
    assert '#include "' not in code and "_extension.run(*inputs, *outputs)" in code
    sol = {**SPEC, "languages": ["cuda_cpp"], "entry_point": "main.cpp::run"}
    assert of(Solution, SOLUTION, spec=sol, sources=NATIVE).language is Language.CUDA


@pytest.mark.parametrize(
    "spec, sources, says",
    [
        ({"language": "cuda", "entry_point": "main.cpp::run"}, NATIVE, "tvm-ffi"),
        ({"language": "python"}, [*SOLUTION["sources"], {"path": "b.py", "content": "x"}], "join"),
        ({"language": "python", "entry_point": "no.py::go"}, SOLUTION["sources"], "no file"),
        ({"language": "cute_dsl"}, SOLUTION["sources"], "not verified"),
    ],
)
def test_what_cannot_be_built_is_refused(spec, sources, says):
    solution = of(Solution, SOLUTION, spec={**SPEC, **spec}, sources=sources)
    with pytest.raises(ValueError, match=says):
        assert solution.language or solution.code(
            of(Definition, DEFINITION), of(Workload, WORKLOAD)
        )
        solution.code(of(Definition, DEFINITION), of(Workload, WORKLOAD))


# -- verdicts --------------------------------------------------------------------------------------

TIMING = Timing(
    reference_ms=2, candidate_ms=1, speedup=2, speedup_lower=1.9, speedup_upper=2.1, pairs=9,
    calls_per_sample=1, clock_bound_ms=1,
)  # fmt: skip


def judged(reason, **fields):
    timing = TIMING if reason is Reason.OK else None
    return Verdict(
        candidate_id="c", task_id="t", language="cpp", status=reason.status, reason=reason,
        device="cpu", timing=timing, log_tail="tail", **fields,
    )  # fmt: skip


@pytest.mark.parametrize("suite", ["flashinfer", "sol"])
@pytest.mark.parametrize("reason", Reason)
def test_a_verdict_is_a_legal_evaluation_and_comes_back(suite, reason):
    found = evaluation_of(judged(reason), suite, "now", {"a": "b"})
    unknown = [Status.NO_CODE] + [Status.TASK_ERROR] * (suite == "flashinfer")
    if reason.status in unknown:
        assert found is None  # they have no status for it
        return
    measured = found["status"] in ("PASSED", "INCORRECT_NUMERICAL")  # the rule of both suites
    assert (found["correctness"] is not None) == measured
    assert (found["performance"] is not None) == (found["status"] == "PASSED")
    assert (found["status"] == "PASSED") == (reason is Reason.OK)
    row = verdict_row(json.loads(json.dumps(found)))
    assert (row["status"], row["reason"]) == (reason.status.value, reason.value)
    assert row["timing"]["speedup"] == (2 if reason is Reason.OK else None)


def test_a_correct_kernel_that_was_not_timed_is_no_trace():
    untimed = judged(Reason.OK).model_copy(update={"timing": None})
    assert evaluation_of(untimed, "flashinfer", "now", {}) is None


def test_evaluations_of_another_harness_have_no_reason():
    theirs = {"status": "REWARD_HACK", "log": "the output was lazy (very)", "environment": {}}
    row = verdict_row(theirs)
    assert (row["status"], row["reason"]) == ("rejected", None)
    assert verdict_row({"status": "INCORRECT_SHAPE"})["reason"] == "wrong_shape"
    with pytest.raises(ValueError, match="'SOMETHING'"):
        verdict_row({"status": "SOMETHING"})


def test_kernelbenchs_results_come_back():
    results = {"7": [], "10": []}
    reasons = [Reason.OK, Reason.WRONG_OUTPUT, Reason.NO_CODE_BLOCK, Reason.LAZY_OUTPUT]
    for number, reason in enumerate(reasons):
        results["7"].append(kernelbench.entry_of(judged(reason), number))
    theirs = {"sample_id": 0, "compiled": True, "correctness": True, "runtime": 2.0, "metadata": {}}
    results["10"] = theirs  # its older form: no list
    rows = list(kernelbench.verdict_rows(json.loads(json.dumps(results)), 2))
    assert [row["reason"] for row in rows] == [*(each.value for each in reasons), None]
    assert [row["timing"]["speedup"] for row in rows] == [2.0, None, None, None, None]
    assert rows[-1]["task_id"] == "kernelbench/L2/10" and rows[-1]["status"] == "correct"
    assert [e["compiled"] for e in results["7"]] == [True, True, False, True]
    broken = {**theirs, "compiled": True, "correctness": False}
    failed = {**broken, "metadata": {"runtime_error": "x"}}
    both = list(kernelbench.verdict_rows({"1": [broken, failed, {**broken, "compiled": False}]}, 1))
    assert [r["status"] for r in both] == ["incorrect", "runtime_error", "compile_error"]
    endless = {**theirs, "runtime": math.inf, "ref_runtime": 1.0}
    (row,) = kernelbench.verdict_rows({"1": [endless]}, 1)
    assert set(row["timing"].values()) == {None}
    with pytest.raises(ValueError, match="no list of samples"):
        list(kernelbench.verdict_rows({"name": []} | {"1": ["x"]}, 1))


# -- folders ---------------------------------------------------------------------------------------


def trace_set(root, *, sol=False):
    def write(place, *rows):
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(map(json.dumps, rows)))

    workload = {"definition": "scaled", "workload": WORKLOAD, "solution": None, "evaluation": None}
    evaluation = {"status": "PASSED", "performance": {"speedup_factor": 1.5}, "environment": {}}
    solved = {**workload, "solution": "mine", "evaluation": evaluation}
    bad = {**SOLUTION, "name": "bad", "spec": {**SPEC, "language": "tilelang"}}
    if sol:
        write("one/definition.json", {**DEFINITION, "hf_id": None, "unknown": 1})
        write("one/workload.jsonl", WORKLOAD, {**WORKLOAD, "axes": {}, "uuid": "w2"})
        beside = [{"path": each["path"], "content": ""} for each in SOLUTION["sources"]]
        write("one/solution_a.json", {**SOLUTION, "sources": beside})
        for each in SOLUTION["sources"]:
            (root / "one" / each["path"]).write_text(each["content"])
        write("one/trace.jsonl", solved)
        return root
    write("definitions/e/scaled.json", DEFINITION)
    write("workloads/e/scaled.jsonl", workload)
    write("solutions/e/mine.json", SOLUTION)
    write("solutions/e/bad.json", bad)
    write("solutions/e/broken.json", {"sources": [], "spec": {}})
    write("traces/e/scaled.jsonl", solved, {**solved, "definition": "no"})
    return root


@pytest.mark.parametrize("sol", [False, True])
def test_a_folder_gives_tasks_candidates_and_verdicts(tmp_path, sol):
    root = trace_set(tmp_path, sol=sol)
    assert is_trace_set(root)
    held = TraceSet(root)
    (task,), (made,), (judged,) = list(held.tasks()), list(held.candidates()), list(held.verdicts())
    assert task.task_id == made["task_id"] == judged["task_id"]
    assert made["candidate_id"] == judged["candidate_id"] == "mine@w1"
    assert SOLUTION["sources"][0]["content"].strip() in made["code"]
    assert (made["generator"], judged["generator"]) == ("somebody", "somebody")
    assert judged["timing"]["speedup"] == 1.5
    said = "\n".join(held.left_out)
    assert ("axis 'M' has no value" if sol else "is in 'tilelang'") in said
    if not sol:
        assert "broken.json is no Solution" in said and "'no', which is not here" in said
    assert [each.task_id for each in load(root)] == [task.task_id]
    table = CandidateTable(root)
    assert table.asked_tasks(Language.CPP) == {task.task_id: 1}


BROKEN = [
    ({"evaluation": "PASSED"}, "is no Evaluation"),
    ({"evaluation": {"status": "EXPLODED"}}, "'EXPLODED' is no status"),
    ({"evaluation": {"status": "PASSED", "environment": "H200"}}, "environment: Input"),
    ({"evaluation": {"status": "PASSED", "performance": {"latency_ms": "x"}}}, "performance.lat"),
    ({"evaluation": {"status": "PASSED", "performance": {"latency_ms": math.nan}}}, "finite"),
    ({"definition": ["scaled"]}, "which is not here"),
    ({"workload": None}, "is no Workload"),
    ({"workload": {**WORKLOAD, "axes": {"M": 9}}}, "the uuid 'w1' stands for another"),
]


@pytest.mark.parametrize("changes, says", BROKEN)
def test_a_broken_trace_is_left_out_with_its_line_and_why(tmp_path, changes, says):
    path = trace_set(tmp_path) / "traces/e/scaled.jsonl"
    good = json.loads(path.read_text().splitlines()[0])
    path.write_text(json.dumps({**good, **changes}) + "\n" + json.dumps(good))
    held = TraceSet(tmp_path)
    assert len(list(held.verdicts())) == 1
    assert [text for text in held.left_out if says in text and "scaled.jsonl line 1" in text]


def test_a_workload_cannot_give_a_fixed_axis_another_size():
    with pytest.raises(ValueError, match="axis 'N' is .*, and 7 in the workload"):
        Definition.model_validate(DEFINITION).sizes(
            Workload.model_validate({**WORKLOAD, "axes": {**WORKLOAD["axes"], "N": 7}})
        )


def test_a_folder_of_programs_is_no_trace_set(tmp_path):
    (tmp_path / "task.py").write_text(AFFINE.code)
    assert not is_trace_set(tmp_path) and not is_trace_set(tmp_path / "task.py")
    (tmp_path / "definition.json").write_text("{")
    with pytest.raises(UsageError, match="definition.json is not JSON"):
        TraceSet(tmp_path)


# -- our own tasks ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interface():
    with Measurer() as measurer:
        return Interface.model_validate(measurer.ask(DescribeInterface, AFFINE))


@pytest.mark.slow
def test_the_interface_is_learned_without_values(interface):
    (x,) = interface.inputs
    assert (x.name, x.shape, x.stride, x.dtype) == ("x", [64, 64], [64, 1], "torch.float32")
    assert interface.structure == "." and not interface.mutates


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["flashinfer", "sol"])
def test_a_task_of_ours_is_a_definition_that_we_read_again(interface, suite):
    definition, workload = (f(AFFINE, interface, suite) for f in (definition_of, workload_of))
    kernel = candidate(AFFINE, module("return x * 2.0 + 1.0", extension="None"))
    solution = solution_of(kernel, AFFINE, interface, "one", "cpu")
    rows = [json.loads(json.dumps(written(x, suite))) for x in (definition, workload, solution)]
    again = [
        of(kind, row) for kind, row in zip((Definition, Workload, Solution), rows, strict=True)
    ]
    assert again[:2] == [definition, workload]
    task = values(again[0].task(again[1]).code)
    (x,) = task["get_inputs"]()
    assert x.shape == (64, 64)
    ours = values(again[2].code(again[0], again[1]))["ModelNew"]()
    torch.testing.assert_close(task["Model"]()(x), x * 2 + 1)
    torch.testing.assert_close(ours(x), x * 2 + 1)
    language = {"flashinfer": ("language", "python"), "sol": ("languages", ["pytorch"])}[suite]
    assert rows[2]["spec"][language[0]] == language[1]
