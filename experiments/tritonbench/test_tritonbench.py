"""A function with test calls becomes a task that makes the same calls; what does not is refused or
left out with its reason."""

import ast
import json
import sys
from pathlib import Path

import polars as pl
import pytest
import torch
import yaml

from experiments.tritonbench import run, source
from experiments.tritonbench.answers import load_answers, operator_of, with_model_new
from experiments.tritonbench.functions import (
    EXCEPTION_CALL,
    NUMBERS_CALL,
    RANDOM_CALL,
    Refused,
    adapt,
)
from kernels_eval.errors import UsageError
from kernels_eval.source.syntax import parse_source
from tasks.sources.config import TasksConfig
from tasks.sources.files import check_task_source
from tasks.sources.stage import load_tasks

CASES = yaml.safe_load(Path(__file__).with_name("test_cases.yaml").read_text(encoding="utf-8"))

RULE = "#" * 146
REFERENCE = """\
import torch

def scaled(x, y=1.0, *, scale=1, out=None):
    result = x * y * scale
    if out is not None:
        out.copy_(result)
        return out
    return result
"""


def text(*body, reference=REFERENCE, imports="import torch", name="scaled"):
    lines = [
        reference,
        RULE,
        "",
        imports,
        "",
        f"def test_{name}():",
        "    results = {}",
        *(f"    {line}" for line in body),
    ]
    return "\n".join([*lines, "    return results", "", f"test_results = test_{name}()", ""])


def adapted(*body, **other):
    found = adapt(other.get("name", "scaled"), text(*body, **other))
    check_task_source(found.code, "Model", "adapted")
    return found


def outputs(found, seed=0, device="cpu"):
    """Inputs and results of a task of this file's own text."""
    space = {}
    exec(found.code, space)
    torch.manual_seed(seed)
    with torch.device(device):
        inputs = space["get_inputs"]()
    return inputs, space["Model"](*space["get_init_inputs"]()).to(device)(*inputs)


# --- what becomes of calls
# --------------------------------------------------------------------------------------------------


def test_tensors_are_inputs_and_everything_else_is_a_constant():
    found = adapted(
        "a = torch.randn(2, 3, device='cuda')",
        "factor = 3.0",
        "results['test_case_1'] = scaled(a, factor)",
        "results['test_case_2'] = scaled(a, scale=2)",
    )
    inputs, results = outputs(found)
    assert [tuple(x.shape) for x in inputs] == [(2, 3)]
    torch.testing.assert_close(results["test_case_1"], inputs[0] * 3)
    torch.testing.assert_close(results["test_case_2"], inputs[0] * 2)
    assert (found.calls, found.left_out, found.fixed_inputs) == (2, (), False)


def test_inputs_are_drawn_anew_for_every_seed_and_the_same_for_one():
    found = adapted("results['a'] = scaled(torch.rand(4, device='cuda'))")
    first, again, other = (outputs(found, seed)[0][0] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_name_that_is_used_again_is_another_input():
    found = adapted(
        "a = torch.tensor([1.0], device='cuda')",
        "results['one'] = scaled(a)",
        "a = torch.tensor([2.0, 3.0]).cuda()",
        "b, c = 2.0, 5.0",
        "results['two'] = scaled(a, b)",
        "b = 7.0",
        "results['three'] = scaled(a, b)",
    )
    inputs, results = outputs(found)
    assert [x.tolist() for x in inputs] == [[1.0], [2.0, 3.0]] and found.fixed_inputs
    assert {key: value.tolist() for key, value in results.items()} == {
        "one": [1.0],
        "two": [4.0, 6.0],
        "three": [14.0, 21.0],
    }


def test_an_input_may_be_made_of_others():
    inputs, results = outputs(
        adapted(
            "a = torch.ones(2, 2, device='cuda')",
            "a = a @ a.T + torch.eye(2, device='cuda')",
            "results['a'] = scaled(a)",
        )
    )
    assert len(inputs) == 1 and results["a"].tolist() == [[3.0, 2.0], [2.0, 3.0]]


def test_devices_are_the_verifiers():
    found = adapted(
        "device = 'cuda'",
        "a = torch.zeros(3, device=device).to('cuda')",
        "results['a'] = made(a, device='cuda')",
        "results['b'] = made(torch.arange(3, device=torch.device('cuda:0')), device=device)",
        reference=(
            "import torch\n\ndef made(x, device):\n    return torch.ones(2, device=device) +"
            " x.sum()\n"
        ),
        name="made",
    )
    inputs, results = outputs(found, device="meta")
    assert {x.device.type for x in (*inputs, *results.values())} == {"meta"}
    assert {x.device.type for x in outputs(found)[1].values()} == {"cpu"}
    assert "cuda" not in found.code


def test_out_and_dtype_and_lists_of_tensors():
    reference = (
        "import torch\n\ndef stacked(parts, dtype=None, out=None):\n    return torch.stack(parts,"
        " out=out).to(dtype or parts[0].dtype)\n"
    )
    found = adapted(
        "parts = [torch.ones(2, device='cuda'), torch.zeros(2, device='cuda')]",
        "results['list'] = stacked(parts, dtype=torch.float64)",
        "out = torch.empty(2, 2, device='cuda')",
        "results['out'] = stacked(parts, out=out)",
        "stacked(parts, out=out)",
        "results['given'] = out",
        reference=reference,
        name="stacked",
    )
    inputs, results = outputs(found)
    assert (
        len(inputs) == 3 and all(isinstance(x, torch.Tensor) for x in inputs) and found.calls == 3
    )
    assert results["list"].dtype == torch.float64
    assert results["out"] is inputs[2] is results["given"], "the caller's own memory"
    assert "torch.empty" not in found.code, "two processes must see the same memory"


def test_tuples_and_what_carries_results_home():
    found = adapted(
        "a = torch.tensor([3.0, 1.0], device='cuda')",
        "values, places = largest(a)",
        "results['pair'] = (values.item(), places.cpu().numpy())",
        "results['whole'] = largest(a)",
        reference="import torch\n\ndef largest(x):\n    return torch.max(x, 0)\n",
        name="largest",
    )
    results = outputs(found)[1]
    assert [x.item() for x in (*results["pair"], *results["whole"])] == [3.0, 0, 3.0, 0]


def test_a_result_that_is_returned_without_a_dict():
    reference, body = (
        REFERENCE,
        "    y = scaled(x)\n    print(y.shape)\n    assert y.shape == (2,)\n    return y\n",
    )
    found = adapt(
        "scaled",
        f"{reference}\n{RULE}\nimport torch\ndef test_it():\n    x = torch.ones(2).cuda()\n{body}",
    )
    assert outputs(found)[1]["result"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("call, random", CASES["calls_that_draw_random_numbers_are_left_out"])
def test_calls_that_draw_random_numbers_are_left_out(call, random):
    reference = (
        "import torch.nn.functional as F\n\ndef dropped(x, p=0.5, training=True):\n    return"
        " F.dropout(x, p, training=training)\n"
    )
    body = [
        "a = torch.ones(4, device='cuda')",
        "share, off = 0.25, False",
        f"results['other'] = {call}",
        "results['sure'] = dropped(a, p=0)",
    ]
    found = adapted(*body, reference=reference, name="dropped")
    assert found.left_out == ((("other", RANDOM_CALL),) if random else ())
    assert outputs(found)[1].keys() == ({"sure"} if random else {"other", "sure"})


def test_calls_without_a_tensor_and_calls_that_raise_are_left_out():
    found = adapted(
        "results['numbers'] = scaled(2.0, 3.0)",
        "try:\n        results['raises'] = scaled(torch.ones(2), 'x')\n    except TypeError as e:\n"
        "        results['raises'] = str(e)",
        "results['fine'] = scaled(torch.ones(2, device='cuda'))",
    )
    assert found.left_out == (("numbers", NUMBERS_CALL), ("raises", EXCEPTION_CALL))
    assert outputs(found)[1].keys() == {"fine"}


def test_calls_that_are_named_are_left_out_for_the_reason_that_is_given():
    body = [
        "a = torch.ones(2, device='cuda')",
        "results['one'] = scaled(a)",
        "results['two'] = scaled(a, 2.0)",
    ]
    found = adapt("scaled", text(*body), {"one": "is not judged"})
    assert (
        found.left_out == (("one", "is not judged"),)
        and outputs(found)[1].keys() == {"two"}
        and found.calls == 1
    )
    with pytest.raises(Refused, match="every test call is not judged"):
        adapt("scaled", text(*body), {"one": "is not judged", "two": "is not judged"})


@pytest.mark.parametrize(
    "code, reason",
    [*CASES["what_does_not_become_a_task_says_why"], ("(" * 3000 + f"\n{RULE}\n", "is not Python")],
)
def test_what_does_not_become_a_task_says_why(code, reason):
    with pytest.raises(Refused, match=reason):
        adapt("scaled", code)


def test_nothing_of_a_file_is_run(tmp_path):
    touch = f"open({str(tmp_path / 'ran')!r}, 'w')"
    found = adapt(
        "scaled",
        f"{REFERENCE}\n{touch}\n{RULE}\nimport torch\n{touch}\ndef test_it():\n    return"
        f" scaled(torch.ones(2))\n{touch}\n",
    )
    with_model_new(f"{touch}\ndef scaled(x):\n    return x\n", found.code)
    assert not (tmp_path / "ran").exists()


# --- candidates
# --------------------------------------------------------------------------------------------------


def test_a_candidate_gets_a_model_new_that_calls_its_function():
    found = adapted(
        "a = torch.randn(3, device='cuda')",
        "results['a'] = scaled(a, 2.0)",
        "results['b'] = scaled(a, scale=3)",
    )
    candidate = (
        "import torch as T\n\ntorch = 'mine'\n\ndef scaled(x, y=1.0, *, scale=1):\n    return"
        " T.mul(x, y * scale) + 0\n"
    )
    code = with_model_new(candidate, found.code)
    assert code is not None and code.startswith(candidate.rstrip())
    space = {}
    exec(code, space)
    inputs, expected = outputs(found)
    given = space["ModelNew"]()(*inputs)
    assert given.keys() == expected.keys() and all(
        torch.equal(given[key], expected[key]) for key in expected
    )
    assert space["torch"] == "mine", "the candidate's own names stay"
    assert any(
        isinstance(node, ast.ClassDef) and node.name == "ModelNew"
        for node in ast.walk(parse_source(code))
    )


def test_a_candidate_without_the_function_has_none_and_broken_text_stays():
    code = adapted("results['a'] = scaled(torch.ones(2))").code
    assert with_model_new("def triton_scaled(x):\n    return x\n", code) is None
    assert with_model_new("def scaled(x:\n", code) == "def scaled(x:\n", (
        "a syntax error is the verdict's"
    )
    assert with_model_new(
        "try:\n    import triton\nexcept ImportError:\n    pass\nelse:\n    def scaled(x):\n       "
        " return x\n",
        code,
    )


# --- files
# --------------------------------------------------------------------------------------------------

GOOD = text("results['a'] = scaled(torch.randn(2, device='cuda'))")


def operators(path, rows):
    pl.DataFrame(rows).write_parquet(path)
    return path


def test_a_file_of_operators_is_surveyed(tmp_path):
    rows = [
        {"name": "my.scaled", "code_with_tests": GOOD, "difficulty": "3", "file": "scaled.py"},
        {"name": "broken", "code_with_tests": REFERENCE, "difficulty": "x", "file": "broken.py"},
    ]
    found = source.survey(operators(tmp_path / "t.parquet", rows))
    task = found.tasks[0]
    assert (task.task_id, task.name, task.source, task.level) == (
        "tritonbench/my.scaled",
        "scaled",
        "tritonbench",
        3,
    )
    assert list(found.refused) == ["broken"] and "0 lines of #" in found.refused["broken"]
    assert (
        load_tasks(TasksConfig(source="tritonbench", location=str(tmp_path / "t.parquet")))
        == found.tasks
    )
    assert operator_of(task.code) == "scaled"
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert source.load(tmp_path / "t.jsonl") == found.tasks
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "my.scaled.py").write_text(GOOD)
    assert [task.code for task in source.load(tmp_path / "files")] == [task.code]
    (first, _) = source.operator_rows(tmp_path / "t.parquet")
    assert first["code_with_tests"] == GOOD


@pytest.mark.parametrize("rows, message", CASES["a_file_with_a_fault_is_refused"])
def test_a_file_with_a_fault_is_refused(tmp_path, rows, message):
    with pytest.raises(UsageError, match=message):
        source.load(operators(tmp_path / "t.parquet", rows))
    with pytest.raises(UsageError, match="does not exist"):
        source.load(tmp_path / "absent.parquet")
    with pytest.raises(UsageError, match=r"tasks\.location is not set"):
        load_tasks(TasksConfig(source="tritonbench"))


def test_recorded_answers_become_candidates(tmp_path):
    tasks = source.load(
        operators(tmp_path / "t.parquet", [{"name": "scaled", "code_with_tests": GOOD}])
    )
    answer = "def scaled(x):\n    return x\n"
    rows = [
        {"model": "m", "name": "scaled", "response": answer},
        {"model": "m", "name": "scaled", "response": "x = 1"},
        {"model": "n", "name": "scaled", "response": answer},
        {"model": "n", "name": "another", "response": answer},
    ]
    found = load_answers(operators(tmp_path / "a.parquet", rows), tasks)
    assert [(c.generator, c.sample_index, c.parse_reason, c.language) for c in found] == [
        ("m", 0, None, "triton"),
        ("m", 1, "missing_model_new", "triton"),
        ("n", 0, None, "triton"),
    ]
    assert len({c.candidate_id for c in found}) == 3 and found[0].response == answer
    with pytest.raises(UsageError, match="row 0 has no response"):
        load_answers(operators(tmp_path / "b.parquet", [rows[0] | {"response": None}]), tasks)


def test_the_page_lists_what_was_refused_left_out_and_answered(tmp_path, monkeypatch, capsys):
    rows = [
        {"name": "scaled", "code_with_tests": GOOD},
        {"name": "broken", "code_with_tests": REFERENCE},
    ]
    responses = ["def scaled(x):\n    return x\n", "x", "def f(:"]
    answers = [{"model": "m", "name": "scaled", "response": text} for text in responses]
    files = [operators(tmp_path / "t.parquet", rows), operators(tmp_path / "a.parquet", answers)]
    words = ["run", "--operators", str(files[0]), "--answers", str(files[1])]
    monkeypatch.setattr(sys, "argv", [*words, "--out", str(tmp_path / "out")])
    assert run.main() == 0
    page = (tmp_path / "out" / "tritonbench.md").read_text()
    assert page.strip() == capsys.readouterr().out.strip()
    for row in (
        "1 of 2 operators become tasks, with 1 test calls",
        "| broken |  | holds 0 lines of #",
        "| m | defines the function | 1 |",
        "| m | missing_model_new | 1 |",
        "| m | syntax_error | 1 |",
    ):
        assert row in page


@pytest.mark.slow  # a Ray cluster
def test_recorded_answers_are_verified_and_scored(tmp_path):
    """On a CPU there is no Triton: answers in torch are right, without a custom kernel."""
    file = text(
        "results['a'] = doubled(torch.randn(2, 3, device='cuda'))",
        name="doubled",
        reference="import torch\n\ndef doubled(x):\n    return torch.mul(x, 2)\n",
    )
    tasks = source.load(
        operators(tmp_path / "t.parquet", [{"name": "doubled", "code_with_tests": file}])
    )
    good = "import torch\ndef doubled(x):\n    return torch.add(x, x)\n"
    responses = {
        "right": good,
        "wrong": good.replace("(x, x)", "(x, 1)"),
        "broken": good.replace("torch.add", "torch.ad"),
        "none": "x = 1",
    }
    rows = [
        {"model": model, "name": "doubled", "response": text} for model, text in responses.items()
    ]
    answers = load_answers(operators(tmp_path / "a.parquet", rows), tasks)
    verdicts = run.verified(tasks, answers, tmp_path, 1, "cpp")
    lines = run.accuracy_table(verdicts)
    called = dict(run.accuracy(verdicts).select("model", "call_accuracy").iter_rows())
    assert called == {"right": 1, "wrong": 1, "broken": 0, "none": 0}
    assert "| right | rejected | no_custom_kernel | 1 |" in lines
    assert "| none | no_code | missing_model_new | 1 |" in lines


def test_accuracies_are_shares_of_operators():
    statuses = ["correct", "incorrect", "runtime_error", "no_code", "task_error"]
    verdicts = pl.DataFrame({"model": "m", "task_id": list("abcde"), "status": statuses})
    assert run.accuracy(verdicts).rows() == [("m", 4, 0.5, 0.25)]
