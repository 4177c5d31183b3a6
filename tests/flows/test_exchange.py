"""`concur export` as a user types it: solutions of another suite in; traces, run folders, a table
and a package out, which a fresh process imports. On the CPU."""

import json
import subprocess
import sys

import polars as pl
import pytest

from tests.support import kernels
from tests.support.commands import concur
from tests.support.typed import data_of, refused

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
CPP = """#include <torch/extension.h>
#include "twice.h"
void run(torch::Tensor x, double shift, torch::Tensor out) {
  const float* a = x.data_ptr<float>();
  float* b = out.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) b[i] = twice(a[i]) + (float)shift;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("run", &run); }
"""
SPEC = {"target_hardware": ["cpu"], "entry_point": "main.cpp::run", "binding": "torch"}
SHAPE = {"shape": ["M", "N"], "dtype": "float32"}
DEFINITION = {
    "name": "doubled",
    "op_type": "elementwise",
    "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": 96}},
    "inputs": {"x": SHAPE, "shift": {"shape": None, "dtype": "float32"}},
    "outputs": {"out": SHAPE},
    "reference": "import torch\n\ndef run(x, shift):\n    return 2 * x + shift\n",
}
USE = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
import doubled
model, x = doubled.Model(), torch.randn(80, 96)
told = {"never": doubled.fallback_reason(), "version": doubled.certificate["verdict"]["status"]}
compiled = torch.compile(model, fullgraph=True)
for name, given in {"verified": x, "shape": x[:7].clone(), "dtype": x.double()}.items():
    told[name] = model.fallback_reason(given, 0.5)
    for each in (model, compiled):
        torch.testing.assert_close(each(given, 0.5), 2 * given + 0.5)
leaf = x.clone().requires_grad_()
compiled(leaf, 0.5).sum().backward()
told["gradient"] = leaf.grad.unique().tolist()
print(json.dumps(told))
"""
LOAD = """
import json, sys
from flashinfer_bench.data import TraceSet
held = TraceSet.from_path(sys.argv[1])
rows = [[t.solution, t.evaluation.status.value] for x in held.traces.values() for t in x]
print(json.dumps([rows, sorted(held._solution_by_name), sorted(held.definitions)]))
"""


def exported(*words):
    return data_of("export", *words)


@pytest.fixture(scope="module")
def verified(tmp_path_factory):
    """Two solutions of one definition, right and wrong, verified by one command."""
    place = tmp_path_factory.mktemp("exchange")
    write_trace_set(place / "set")
    words = "verify-batch set --tasks set --out verified --json --set build.timeout_s=900"
    done = concur(*words.split(), cwd=place, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["statuses"] == {"correct": 1, "incorrect": 1}
    return place


def write_trace_set(place):
    header = {"path": "twice.h", "content": "static float twice(float v) { return v * 2.0f; }\n"}
    for name, text in {"right": CPP, "wrong": CPP.replace("(float)shift", "1.0f")}.items():
        row = {
            "name": name,
            "definition": "doubled",
            "author": "somebody",
            "spec": {**SPEC, "language": "cpp"},
            "sources": [{"path": "main.cpp", "content": text}, header],
        }
        write(place / f"solutions/{name}.json", row)
    write(place / "definitions/doubled.json", DEFINITION)
    inputs = {"x": {"type": "random"}, "shift": {"type": "scalar", "value": 0.5}}
    workload = {"axes": {"M": 80}, "inputs": inputs, "uuid": "w1"}
    write(place / "workloads/doubled.jsonl", {"definition": "doubled", "workload": workload})


def write(path, row):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(row))


def test_verdicts_become_traces_that_flashinfer_bench_loads(verified):
    out = verified / "traces"
    told = exported(verified / "verified", "--as", "flashinfer", "--tasks", verified / "set",
                    "--out", out)  # fmt: skip
    assert told["written"] == 2
    again = json.loads((out / "definitions/doubled/doubled.json").read_text())
    assert again.items() >= DEFINITION.items()
    table = verified / "table.parquet"
    assert exported(out, "--as", "table", "--out", table)["written"] == 2
    rows = {row["candidate_id"]: row for row in pl.read_parquet(table).to_dicts()}
    assert rows["right@w1"]["reason"] == "ok" and rows["wrong@w1"]["reason"] == "wrong_output"
    assert rows["right@w1"]["timing"]["speedup"] > 0
    scores = data_of("benchmark", "--verdicts", table)["scores"]
    assert {row["model"] for row in scores} == {"somebody"}
    pytest.importorskip("flashinfer_bench", reason="pip install --no-deps flashinfer-bench")
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, str(out)], capture_output=True, text=True, check=True
    )
    traces, solutions, definitions = json.loads(loaded.stdout.splitlines()[-1])
    assert dict(traces) == {"right": "PASSED", "wrong": "INCORRECT_NUMERICAL"}
    assert (solutions, definitions) == (["right", "wrong"], ["doubled"])


def test_a_package_runs_the_kernel_where_it_was_verified(verified):
    out = verified / "package"
    options = ["--as", "package", "--candidate", "right@w1", "--out", out]
    told = exported(verified / "verified", *options)
    built = out / "build" / told["variant"]
    environment = {"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", USE, str(built)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["never"], found["version"], found["verified"]) == ("", "correct", "")
    assert "shape" in found["shape"] and "dtype" in found["dtype"]
    assert found["gradient"] == [2.0]
    linked = subprocess.run(["ldd", *map(str, built.glob("*.so"))], capture_output=True, text=True)
    assert "concur" not in linked.stdout.replace(str(built), "")
    assert "holds other files" in refused("export", verified / "verified", *options)
    wrong = [*map(str, options[:-2]), "--out", str(verified / "no")]
    wrong[wrong.index("right@w1")] = "wrong@"
    assert "incorrect (wrong_output)" in refused("export", verified / "verified", *wrong)


def test_the_file_of_a_candidate_becomes_a_package(tmp_path):
    task, candidate = tmp_path / "doubling.py", tmp_path / "candidate.py"
    task.write_text(kernels.AFFINE.code)
    candidate.write_text(kernels.module("return ext.affine(x)"))
    out = tmp_path / "package"
    words = ["--as", "package", "--task", task, "--out", out, "--license", "mit"]
    told = exported(candidate, *words)
    assert (told["name"], told["license"], told["task_id"]) == ("doubling", "mit", "file/doubling")
    built = out / "build" / told["variant"]
    certificate = json.loads((built / "certificate.json").read_text())
    assert certificate["verdict"]["status"] == "correct"
    assert (built / "candidate.py").read_text() == candidate.read_text()
    candidate.write_text(kernels.module("return ext.shifted(x)"))
    words[words.index(out)] = tmp_path / "no"
    assert "incorrect (wrong_output)" in refused("export", candidate, *words)


@pytest.mark.parametrize(
    "words, said",
    [
        (["--as", "package", "--task", "task.py"], "export CANDIDATE.py --task TASK.py"),
        (["candidate.py", "--as", "table", "--task", "task.py"], "export CANDIDATE.py"),
        (
            ["candidate.py", "--as", "sol", "--task", "task.py"],
            "export CANDIDATE.py --task TASK.py",
        ),
        (["nothing.py", "--as", "package", "--task", "task.py"], "cannot read nothing.py"),
        (["empty.py", "--as", "package", "--task", "task.py"], "does not define ModelNew"),
        (["--as", "harbor"], "no tasks are named"),
        (["tasks", "--as", "harbor", "--recipe", "none"], "none is no reward recipe"),
    ],
)
def test_what_cannot_be_exported_says_why(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    for name in ("task.py", "tasks/one.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(kernels.AFFINE.code)
    (tmp_path / "candidate.py").write_text(kernels.module("return ext.affine(x)"))
    (tmp_path / "empty.py").touch()
    assert said in refused("export", *words, "--out", "out")


def test_tasks_become_folders_of_harbor(tmp_path):
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "affine.py").write_text(kernels.AFFINE.code)
    out = tmp_path / "harbor"
    told = exported(tasks, "--as", "harbor", "--out", out, "--language", "triton")
    assert told["written"] == 1
    instruction = (out / "user-affine/instruction.md").read_text()
    assert kernels.AFFINE.code in instruction and "triton" in instruction.lower()


def test_a_run_of_kernelbench_is_written_and_read(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    entry = {"sample_id": 0, "compiled": True, "correctness": True, "metadata": {}, "runtime": 1.0}
    (run / "eval_results.json").write_text(json.dumps({"3": [{**entry, "ref_runtime": 2.0}]}))
    words = [run, "--as", "table", "--out", tmp_path / "t.parquet"]
    assert "does not say its level" in refused("export", *words)
    (run / "level_2_problem_3_sample_0_kernel.py").write_text("x = 1")
    assert exported(*words)["written"] == 1
    (row,) = pl.read_parquet(tmp_path / "t.parquet").to_dicts()
    assert (row["task_id"], row["timing"]["speedup"]) == ("kernelbench/L2/3", 2.0)
    table = {
        "candidate_id": ["a", "b"],
        "task_id": "kernelbench/L2/3",
        "language": "cpp",
        "level": "screen",
        "status": ["incorrect", "correct"],
        "reason": ["wrong_output", "ok"],
        "code": "class ModelNew: pass",
        "generator": "m",
    }
    pl.DataFrame(table).write_parquet(tmp_path / "v.parquet")
    task = {"task_id": ["kernelbench/L2/3"], "code": [kernels.AFFINE.code]}
    pl.DataFrame(task).write_parquet(tmp_path / "tasks.parquet")
    out = tmp_path / "again"
    told = exported(tmp_path / "v.parquet", "--as", "kernelbench", "--tasks",
                    tmp_path / "tasks.parquet", "--out", out)  # fmt: skip
    assert told["written"] == 1 and "without --quick" in "".join(told["left_out"])
    assert (out / "level_2_problem_3_sample_0_kernel.py").read_text() == "class ModelNew: pass"
    results = json.loads((out / "eval_results.json").read_text())
    assert results["3"][0]["compiled"] and not results["3"][0]["correctness"]
    assert "model_name" in (out / "generation_config.yaml").read_text()
