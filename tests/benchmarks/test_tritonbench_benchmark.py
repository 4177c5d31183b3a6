"""The comparison of a task with its file notices what differs, and the accuracies are those of the
verdicts."""

import json
import sys

import polars as pl
import pytest

from benchmarks import tritonbench as benchmark
from kernels_eval.records import Language
from tasks.sources import tritonbench
from tasks.workload.measure import Measurer

FILE = """\
import torch
def doubled(x, out=None):
    return torch.mul(x, 2, out=out)
{rule}
import torch
from doubled import doubled
def test_doubled():
    results = {{}}
    x = torch.randn(2, 3, device='cuda')
    results['a'] = doubled(x).cpu()
    out = torch.empty(2, 3, device='cuda')
    results['b'] = doubled(x, out=out)
    return results
test_results = test_doubled()
""".format(rule="#" * 50)
RANDOM = FILE.replace("torch.mul(x, 2, out=out)", "torch.nn.functional.dropout(x)")


def operators(folder, **files):
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def answers(folder, models, texts):
    """The path of a table with an answer of each model for the operator."""
    path = folder / "a.parquet"
    pl.DataFrame({"model": models, "response": texts}).with_columns(
        name=pl.lit("doubled")
    ).write_parquet(path)
    return str(path)


@pytest.mark.slow  # six tasks in confined processes
def test_a_task_agrees_with_its_file_and_not_with_another(tmp_path):
    (task,) = tritonbench.load(operators(tmp_path / "files", doubled=FILE))
    cases = {
        "same": (FILE, True),
        "fewer": (FILE, False),  # only the shapes of the calls that remain
        "values": (FILE.replace("(x, 2,", "(x, 3,"), True),
        "shapes": (FILE.replace("(2, 3, device", "(2, 4, device"), True),
        "calls": (FILE.replace("    results['b']", "    doubled(x)\n    results['b']"), True),
        "other shapes": (FILE.replace("(2, 3, device", "(2, 4, device"), False),
    }
    with Measurer() as measurer:
        found = {
            name: measurer.measure(benchmark.agreement_task(task, *case)).workload.problem
            for name, case in cases.items()
        }
    assert found["same"] is None and found["fewer"] is None
    for name, said in (
        ("values", "other values"),
        ("shapes", "shape"),
        ("calls", "2 calls against 3"),
        ("other shapes", "not among"),
    ):
        assert said in (found[name] or ""), (name, found[name])


def test_the_page_lists_what_was_refused_and_left_out(tmp_path, monkeypatch, capsys):
    files = operators(tmp_path / "files", doubled=FILE, random=RANDOM)
    texts = ["def doubled(x, out=None):\n    return x\n", "x", "def f(:"]
    words = ["tritonbench", "--operators", str(files), "--no-run", "--out", str(tmp_path / "out")]
    words += ["--answers", answers(tmp_path, ["m", "m", "n"], texts)]
    monkeypatch.setattr(sys, "argv", words)
    assert benchmark.main() == 0
    page = (tmp_path / "out" / "tritonbench.md").read_text()
    assert page.strip() == capsys.readouterr().out.strip()
    for row in (
        "1 of 2 operators become tasks, with 2 test calls",
        "| random | every test call draws random numbers",
        "| m | defines the function | 1 |",
        "| m | missing_model_new | 1 |",
        "| n | syntax_error | 1 |",
    ):
        assert row in page


@pytest.mark.slow  # a Ray cluster
def test_recorded_answers_are_verified_and_scored(tmp_path):
    """On a CPU there is no Triton: answers in torch are right, without a custom kernel."""
    tasks = tritonbench.load(operators(tmp_path / "files", doubled=FILE))
    good = "import torch\ndef doubled(x, out=None):\n    return torch.add(x, x, out=out)\n"
    said = {
        "right": good,
        "wrong": good.replace("(x, x,", "(x, 1,"),
        "broken": good.replace("torch.add", "torch.ad"),
        "none": "x = 1",
    }
    path = answers(tmp_path, list(said), list(said.values()))
    lines = benchmark.verified(tasks, path, tmp_path, 1, Language.CPP)
    scores = json.loads((tmp_path / "scores.json").read_text())
    found = {(row["model"], row["metric"]): row["value"] for row in scores if row["track"] == "any"}
    for metric, values in (("call_accuracy", [1, 1, 0, 0]), ("execution_accuracy", [1, 0, 0, 0])):
        assert [found[model, metric] for model in said] == values
    assert "| right | rejected | no_custom_kernel | 1 |" in lines
    assert "| none | no_code | missing_model_new | 1 |" in lines


def test_accuracies_are_shares_of_operators(tmp_path):
    said = [
        ("correct", "ok"),
        ("incorrect", "wrong_output"),
        ("runtime_error", "exception"),
        ("no_code", "missing_model_new"),
        ("task_error", "degenerate_task"),
    ]
    common = {"model": "m", "correctness": None, "custom_kernels": [], "device": "H200"}
    frame = pl.DataFrame(
        [
            common
            | {"task_id": task, "candidate_id": task, "status": status, "reason": reason}
            | {"outputs_match": status == "correct"}
            | {"timing": {"speedup": 2.0} if status == "correct" else None}
            for task, (status, reason) in zip("abcde", said, strict=True)
        ]
    )
    lines, data = benchmark.accuracy(frame)
    found = {(row["metric"], row["track"]): row for row in data}
    calls = found["call_accuracy", "any"]
    assert (calls["value"], calls["tasks"]) == (0.5, 4)
    assert found["execution_accuracy", "custom_kernel"]["value"] == 0.25
    assert found["geometric_mean_speedup", "custom_kernel"]["value"] == pytest.approx(2.0)
    assert "Left out, because the reference fails or is degenerate: e." in lines
    assert json.dumps(data)
