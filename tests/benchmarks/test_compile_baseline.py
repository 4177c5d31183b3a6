"""The benchmark of two baselines: its tasks are tasks, and its table says what its rows say."""

import torch

from benchmarks.compile_baseline import MORE, report, tasks_of
from kernels_eval.checks.inputs import construct, declared, load_module, make_inputs


def test_every_built_in_task_runs_on_a_cpu_and_grows_on_a_gpu(tmp_path):
    small, large = tasks_of(None, "cpu"), tasks_of(None, "cuda:0")
    assert len(small) == len({task.task_id for task in small}) == 22
    for task, grown in zip(small[: len(MORE)], large, strict=False):
        path = tmp_path / f"{task.name}.py"
        path.write_text(task.code, encoding="utf-8")
        module = load_module(str(path), "task")
        with torch.no_grad():
            spec = declared({"entry_point": "Model", "init_form": "args"}, "cpu", "cpu")
            answer = construct(module, module, spec)(
                *make_inputs(module, 0, "declared", None, "cpu")
            )
        assert torch.isfinite(answer).all() and answer.std() > 0
        assert task.code != grown.code and task.task_id == grown.task_id


def test_a_folder_of_tasks_can_be_given(tmp_path):
    (tmp_path / "one.py").write_text("class Model: pass\n", encoding="utf-8")
    assert [task.task_id for task in tasks_of(str(tmp_path), "cpu")] == ["file/one"]


def test_the_table_names_what_compiled_and_what_did_not(capsys):
    timed = {
        "eager_ms": 2.0,
        "compiled_ms": 1.0,
        "speedup": 2.0,
        "lower": 1.9,
        "upper": 2.1,
        "compile_s": 12.0,
    }
    even = timed | {"compiled_ms": 4.0, "speedup": 0.5, "lower": 0.4, "upper": 0.6}
    rows = [
        {"task": "a"} | timed,
        {"task": "b"} | even,
        {"task": "c", "why_not": "it does not", "compile_s": 3.0},
    ]
    answer = {
        "task": "a",
        "both_reason": "ok",
        "eager_reason": "ok",
        "both_timing_s": 1.5,
        "eager_timing_s": 1.0,
    }
    report(rows, [answer | {"both_speedup": 1.1, "eager_speedup": 1.0}])
    said = capsys.readouterr().out
    assert (
        "| a | 2.0000 | 1.0000 | 2.00 (1.90 to 2.10) | 12.0 |" in said
        and "| c | - | - | it does not | 3.0 |" in said
    )
    assert (
        "2 of 3 references compiled; geometric mean of eager / compiled 1.00." in said
        and "1 are faster compiled" in said
    )
    assert "the third side adds 0.50 s" in said
