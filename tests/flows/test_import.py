"""`concur import`: each known map on a few rows of our own making in that form, cells of every
kind, and what comes of it in the commands that read it."""

import csv
import json

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.importing import import_source
from kernels_eval.errors import UsageError
from kernels_eval.records import KernelTask, Language
from tasks.sources.mapping import known_maps
from tasks.sources.small_model import build_small_model
from tasks.sources.stage import keep
from tasks.sources.tables import load
from tasks.synthesis.recorded import ResponsesFile
from tasks.synthesis.tables import CandidateTable
from tests.support.commands import ROOT
from tests.support.requests import make_request
from tests.support.typed import data_of, refused


def program(name="Model", shift=1, init="[]"):
    return (
        f"import torch\n\n\nclass {name}(torch.nn.Module):\n    def forward(self, x):\n"
        f"        return x + {shift}\n\n\ndef get_inputs():\n    return [torch.rand(4)]\n\n\n"
        f"def get_init_inputs():\n    return {init}\n"
    )


def module(name="ModelNew", shift=1):
    return program(name, shift).partition("\n\n\ndef get_inputs")[0] + "\n"


def fenced(text):
    return f"```python\n{text}```"


def said(role, text, **more):
    return {"role": role, "content": text, **more}


def asked(text):
    return said("user", f"Make this faster:\n{fenced(text)}")


FIVE = [
    each
    for turn in range(5)
    for each in (asked(program()), said("assistant", f"Turn {turn}\n{fenced(module())}"))
]
SOL = {
    "name": "scaled",
    "description": "x + 1",
    "axes": {"n": {"type": "var"}},
    "inputs": {"x": {"shape": ["n"], "dtype": "float32"}},
    "outputs": {"out": {"shape": ["n"], "dtype": "float32"}},
    "workloads": [
        {"uuid": f"w{n}", "axes": {"n": n}, "inputs": {"x": {"type": "random"}}} for n in (4, 8)
    ],
}
TABLES = {
    "kernelbook": [
        {"uuid": 7, "entry_point": "Add", "python_code": program("Add", init="[[], {}]")}
        | {"triton_code": module("AddNew")},
        {"uuid": 8, "entry_point": "Sub", "python_code": program("Sub", 2), "triton_code": None},
    ],
    "concur": [
        {"pytorch_code": program(), "reasoning": "Add one.", "cuda_code": module(), "id": "c1"},
        {"pytorch_code": "no code", "reasoning": "Hm.", "cuda_code": module(), "id": "c2"},
    ],
    "drkernel": [
        {"uuid": 1, "entry_point": "Model", "original_python_code": program(), "messages": FIVE}
        | {"num_rounds": 5, "final_speedup": 1.5, "best_round": 3},
    ],
    "cuda-agent-ops": [{"ops": "['add']", "data_source": "torch#1", "code": program()}],
    "kernelhacks": [
        {"original_code": program(), "kernel_code": module(), "problem_name": "1_Add"}
        | {"problem_level": 1, "backend": language, "reward_hack": hack, "speedup": 2.0}
        | {"reward_hack_category": hack * "Ghost" or None}
        for language, hack in (("triton", 1), ("CUDA", 0))
    ],
    "triton-traces": [
        {"sample_key": "kernelbook_1", "pytorch_code": program("Other"), "result_correctness": True}
        | {"triton_code": "def triton_kernel_wrapper(x):\n    return x\n", "model_reasoning": "Hm."}
        | {"result_speedup": 1.0},
    ],
    "triton-multiturn": [
        {"sample_key": "k", "pytorch_code": program(), "num_turns": 5, "stop_reason": "done"}
        | {"full_messages": json.dumps(FIVE)},
    ],
    "ai-cuda-engineer": [
        {"Level_ID": 1, "Task_ID": 7, "Op_Name": "1_Add", "CUDA_Speedup_Native": 2.0}
        | {"PyTorch_Code_Functional": program(), "CUDA_Code": "__global__ void k() {}"}
        | {"Correct": True},
    ],
    "kernelbench-hard": [
        {"problem": "06_moe", "solution": module(), "peak_fraction": 0.5, "verdict": "clean"}
        | {"correct": True, "model": "M"},
    ],
    "messages": [
        {"id": "m1", "messages": [asked(program()), said("assistant", fenced(module()))]},
        {"id": "m2", "messages": [said("user", "hello"), said("assistant", "hi")]},
        {"id": "m3", "messages": [asked(program())]},
    ],
    "conversations": [
        {"id": "s1"}
        | {
            "conversations": [
                {"from": "human", "value": fenced(program())},
                {"from": "gpt", "value": fenced(module())},
            ]
        },
    ],
    "sol-execbench": [
        {name: each if isinstance(each, str) else json.dumps(each) for name, each in SOL.items()}
        | {"hf_id": None, "custom_inputs_entrypoint": None}
        | {"reference": "import torch\n\ndef run(x):\n    return x + 1\n"},
    ],
}
EXPECTED = {
    # the ids of tasks, answers, and rows that were skipped with their reasons
    "kernelbook": (["kernelbook/7", "kernelbook/8"], 1, {"there is no answer": 1}),
    "concur": (["concur/c1"], 1, {"its task defines no class with get_inputs": 1}),
    "drkernel": (["drkernel/1"], 5, {}),
    "cuda-agent-ops": (1, 0, {}),
    "kernelhacks": (["kernelhacks/L1/1_Add"], 2, {}),
    "triton-traces": (["triton-traces/kernelbook_1"], 1, {}),
    "triton-multiturn": (["triton-multiturn/k"], 5, {}),
    "ai-cuda-engineer": (["ai-cuda-engineer/L1/7"], 1, {}),
    "kernelbench-hard": ([], 1, {"there is no file ../kernelbench-hard-problems/06_moe": 1}),
    "messages": (
        ["m1", "m3"],
        1,
        {"its task defines no class with get_inputs": 1, "there is no answer": 1},
    ),
    "conversations": (["s1"], 1, {}),
    "sol-execbench": (2, 0, {}),
}


def write_table(path, rows):
    if path.suffix == ".parquet":
        pl.DataFrame(rows, infer_schema_length=None).write_parquet(path)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
            out.write_table(table)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def imported(source, tmp_path, columns=None, name=None):
    told = import_source(str(source), columns, name, str(tmp_path / "out"))
    tables = {}
    for kind in ("tasks", "answers"):
        path = tmp_path / "out" / f"{kind}.parquet"
        tables[kind] = pl.read_parquet(path).to_dicts() if path.exists() else []
    return told, tables["tasks"], tables["answers"]


@pytest.mark.parametrize(
    "name, suffix",
    [(name, ".jsonl") for name in TABLES]
    + [("kernelbook", suffix) for suffix in (".parquet", ".json", ".arrow")],
)
def test_a_known_map_is_found_by_the_columns(name, suffix, tmp_path):
    told, tasks, answers = imported(write_table(tmp_path / f"t{suffix}", TABLES[name]), tmp_path)
    ids, count, skipped = EXPECTED[name]
    assert told["map"] == name and told["rows"] == len(TABLES[name])
    found = [task["task_id"] for task in tasks]
    assert (len(found) if isinstance(ids, int) else found) == ids
    assert len(answers) == told["answers"] == count
    reasons = {each["why"]: each["rows"] for each in told["skipped"]}
    assert {why.partition("/reference")[0]: rows for why, rows in reasons.items()} == skipped
    if tasks:
        assert {task.task_id for task in load(tmp_path / "out" / "tasks.parquet")} == set(found)


def test_every_map_is_tried_and_has_its_line_in_the_guide():
    elsewhere = {"kernelbench-v3", "robust-kbench", "cuda-l1"}
    assert known_maps().keys() == TABLES.keys() | elsewhere
    page = (ROOT / "docs/how-to/import.md").read_text(encoding="utf-8")
    assert [name for name in known_maps() if f"`{name}`" not in page] == []


def test_grouped_json_is_read_with_its_groups(tmp_path):
    rows = {"1": [{"task_id": 3, "ref_code": program(), "custom_code": module()}], "2": []}
    told, (task,), (answer,) = imported(write_table(tmp_path / "l40.json", rows), tmp_path)
    assert told["map"] == "cuda-l1"
    assert (task["task_id"], task["level"]) == ("cuda-l1/L1/3", 1)
    assert (answer["task_id"], answer["language"]) == ("cuda-l1/L1/3", "cuda")


def test_the_content_says_how_json_is_written(tmp_path):
    row = {"level_id": "2", "task_id": "7", "ref_code": program(), "custom_code": module()}
    (tmp_path / "h100.json").write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    (tmp_path / "h100.jsonl").write_text(json.dumps([row, row], indent=1))
    for name in ("h100.json", "h100.jsonl"):
        told, (task,), _ = imported(tmp_path / name, tmp_path)
        assert (told["map"], told["answers"]) == ("cuda-l1", 2)
        assert (task["task_id"], task["level"]) == ("cuda-l1/L2/7", 2)


@pytest.mark.parametrize("place", ["data/train-00000-of-00001.parquet", "train/data.arrow"])
def test_a_data_set_of_the_hub_is_read_in_its_folders(place, tmp_path):
    (tmp_path / "set" / place).parent.mkdir(parents=True)
    (tmp_path / "set/README.md").write_text("# A card")
    write_table(tmp_path / "set" / place, TABLES["kernelhacks"])
    assert imported(tmp_path / "set", tmp_path)[0]["answers"] == 2


@pytest.mark.parametrize(
    "files, tasks, answers",
    [
        ({"level1/3_Add.py": program()}, ["kernelbench/L1/3"], []),
        ({"activation/relu.py": program(), "loss/mse.py": program()}, ["mse", "relu"], []),
        (
            {"T1/baseline_cudnn.py": program(shift=2), "T1/ref.py": program()}
            | {"T1/optimized.py": program() + module(), "T2/generated_code.py": module()},
            ["T1"],
            ["T1", "T2"],
        ),
    ],
    ids="kernelbench categories references".split(),
)
def test_programs_with_inputs_and_without_a_kernel_are_tasks(files, tasks, answers, tmp_path):
    for name, text in files.items():
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_text(text)
    _, found, given = imported(tmp_path / "set", tmp_path)
    assert sorted(task["task_id"] for task in found) == tasks
    assert [answer["task_id"] for answer in given] == answers
    assert {task["code"] for task in found} == {program()}


@pytest.mark.parametrize("name", ["tasks/scaled", "tasks/kernelbench/level_1/scaled"])
def test_problems_of_robust_kbench_take_the_sizes_of_their_configuration(name, tmp_path):
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (folder / "func_forward.py").write_text(
        "import torch\n\n\ndef forward_fn(x, scale):\n    return x * scale\n\n\n"
        "class Model(torch.nn.Module):\n    def __init__(self, scale=1.0):\n"
        "        super().__init__()\n        self.scale = scale\n\n"
        "    def forward(self, x, fn=forward_fn):\n        return fn(x, self.scale)\n\n\n"
        "def get_inputs(rows=1, columns=1):\n    return (torch.ones(rows, columns),)\n"
    )
    configuration = {
        "single_input_configs": [{"rows": 2}],
        "single_init_configs": [{"scale": 3.0}],
        "single_shared_configs": [{}],
    }
    (folder / "config_forward.json").write_text(json.dumps(configuration))
    told, (task,), answers = imported(tmp_path / "tasks", tmp_path)
    assert (told["map"], answers) == ("robust-kbench", [])
    assert task["task_id"] == name.replace("tasks", "robust-kbench")
    assert load(tmp_path / "tasks") == load(tmp_path / "out" / "tasks.parquet")
    with pytest.raises(UsageError, match="holds tasks alone"):
        CandidateTable(tmp_path / "tasks")
    names = {}
    exec(task["code"], names)
    arguments, keywords = names["get_init_inputs"]()
    (inputs,) = names["get_inputs"]()
    assert task["init_form"] == "args_kwargs" and inputs.shape == (2, 1)
    assert names["Model"](*arguments, **keywords)(inputs).tolist() == [[3.0], [3.0]]


def test_runs_of_kernelbench_v3_are_read_with_the_files_that_they_name(tmp_path):
    runs, problems = tmp_path / "kernelbench-v3-runs", tmp_path / "kernelbench-v3-problems"
    for place, text in {
        runs / "solutions" / "m_H100_1_Add.py.txt": module(),
        problems / "level1" / "1_Add.py": program(),
    }.items():
        place.parent.mkdir(parents=True)
        place.write_text(text)
    hub = "https://huggingface.co/datasets/Infatoshi"
    row = {"model": "M", "gpu": "H100", "level": 1, "problem": "1_Add.py", "correct": True}
    row |= {"compiled": True, "speedup": 1.5}
    row |= {"baseline_link": f"{hub}/kernelbench-v3-problems/blob/main/level1/1_Add.py"}
    links = ["solutions/m_H100_1_Add.py.txt", None, "../../outside.py", "solutions/gone.py.txt"]
    with (runs / "results.csv").open("w", newline="") as handle:
        table = csv.DictWriter(handle, [*row, "solution_link"])
        table.writeheader()
        table.writerows({**row, "solution_link": link} for link in links)
    told, (task,), (answer,) = imported(runs, tmp_path)
    assert (told["map"], told["rows"]) == ("kernelbench-v3", 4)
    assert (task["code"], answer["code"]) == (program(), module())
    assert (answer["generator"], answer["gpu"]) == ("M", "H100")
    assert {each["why"]: each["such as"].split("row ")[1] for each in told["skipped"]} == {
        "there is no answer": "1",
        "there is no file ../../outside.py": "2",
        "there is no file solutions/gone.py.txt": "3",
    }


COMPLETION = {
    "object": "chat.completion",
    "choices": [
        {"message": said("assistant", fenced(module()), reasoning_content="Hm."), **ended}
        for ended in ({"finish_reason": "stop"}, {"finish_reason": "length"})
    ],
}
PARTS = [{"type": "text", "text": fenced(module())}]
RESPONSE = {
    "object": "response",
    "status": "incomplete",
    "output": [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "message", "content": [{"type": "output_text", "text": fenced(module())}]},
    ],
}
SPOKEN = {"role": "model", "parts": [{"text": "Hm.", "thought": True}, {"text": fenced(module())}]}
GEMINI = {"candidates": [{"content": SPOKEN, "finishReason": "MAX_TOKENS"}]}
CUT = {"response": fenced(module()), "reasoning": "Hm.", "finish_reason": "length"}


@pytest.mark.parametrize(
    "cell, count, first",
    [
        (fenced(module()), 1, {"turn": 1}),
        (COMPLETION, 2, {"reasoning": "Hm.", "finish_reason": "stop"}),
        (json.dumps(COMPLETION), 2, {"reasoning": "Hm.", "finish_reason": "stop"}),
        ({"status_code": 200, "body": COMPLETION}, 2, {"reasoning": "Hm."}),
        ([fenced(module()), fenced(module(shift=2))], 2, {"turn": 1}),
        ([said("assistant", PARTS)], 1, {"response": fenced(module())}),
        (RESPONSE, 1, CUT),
        (json.dumps(RESPONSE), 1, CUT),
        (GEMINI, 1, CUT),
        ([[asked(program()), said("assistant", "a")], [said("assistant", "b")]], 2, {}),
        (FIVE, 5, {"turn": 1, "parent": None}),
        ('{"answer": 1}', 1, {"response": '{"answer": 1}'}),
    ],
    ids="text completion json batch list parts response response-json gemini conversations turns"
    " json-answer".split(),
)
def test_answers_of_every_form_are_understood(cell, count, first, tmp_path):
    path = write_table(tmp_path / "t.jsonl", [{"p": program(), "said": cell, "who": "M"}])
    told, (task,), answers = imported(path, tmp_path, "task=p,answer=said,model=who,label=who")
    assert (told["answers"], len(answers)) == (count, count)
    assert {answer["task_id"] for answer in answers} == {task["task_id"]}
    assert answers[0].items() >= {**first, "generator": "M", "who": "M"}.items()


def test_languages_are_told_by_the_sources_and_others_are_skipped(tmp_path):
    cpp = "from torch.utils.cpp_extension import load_inline\n" + module()
    rows = [{"p": program(), "kernel": cpp, "as": name} for name in (None, "CPP", "fortran")]
    told, _, answers = imported(
        write_table(tmp_path / "t.jsonl", rows), tmp_path, "task=p,kernel=kernel,language=as"
    )
    assert {answer["language"] for answer in answers} == {"cpp"}
    (skipped,) = told["skipped"]
    assert skipped["why"] == "no language fortran is judged" and "row 2" in skipped["such as"]


def test_answers_by_torch_alone_are_counted(tmp_path):
    rows = [{"p": program(), "kernel": text + module()} for text in ("", "import triton\n")]
    path = write_table(tmp_path / "t.jsonl", rows)
    told, _, answers = imported(path, tmp_path, "task=p,kernel=kernel")
    assert (told["without_a_kernel"], len(answers)) == (1, 2)


def test_a_table_of_answers_is_no_run_of_another_harness(tmp_path):
    path = write_table(tmp_path / "t.jsonl", [{"p": program()}])
    told = refused("export", path, "--as", "table", "--out", tmp_path / "out.parquet")
    assert "holds no results of another harness" in told and not (tmp_path / "out.parquet").exists()


def test_bytes_are_text(tmp_path):
    rows = [{"p": program().encode(), "said": fenced(module()).encode()}]
    told, _, (answer,) = imported(
        write_table(tmp_path / "t.parquet", rows), tmp_path, "task=p,answer=said"
    )
    assert told["answers"] == 1 and answer["response"] == fenced(module())


def test_messages_that_only_call_tools_are_no_turns(tmp_path):
    call = said("assistant", None, tool_calls=[{"function": {"name": "run"}}])
    turns = [asked(program()), call, said("tool", "ok"), said("assistant", fenced(module()))]
    path = write_table(tmp_path / "t.jsonl", [{"messages": turns}])
    _, _, (answer,) = imported(path, tmp_path)
    assert (answer["turn"], answer["response"]) == (1, fenced(module()))


def test_a_map_of_arrow_is_a_message(tmp_path):
    message = list(said("assistant", fenced(module())).items())
    cells = pa.array([message], pa.map_(pa.string(), pa.string()))
    pq.write_table(pa.table({"p": [program()], "said": cells}), tmp_path / "t.parquet")
    _, _, (answer,) = imported(tmp_path / "t.parquet", tmp_path, "task=p,answer=said")
    assert answer["response"] == fenced(module())


def test_a_column_may_have_a_dot_in_its_name(tmp_path):
    path = write_table(tmp_path / "t.jsonl", [{"a.p": program(), "a.said": fenced(module())}])
    told, _, _ = imported(path, tmp_path, "task=a.p,answer=a.said")
    assert (told["tasks"], told["answers"]) == (1, 1)


def test_two_columns_of_one_name_are_refused(tmp_path):
    columns = [pa.array([program()]), pa.array(["x"]), pa.array(["y"])]
    table = pa.Table.from_arrays(columns, ["p", "said", "said"])
    pq.write_table(table, tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text("p,said,said\na,b,c\n")
    (tmp_path / "unnamed.csv").write_text("p,said,,\na,b,,\n")
    for name in ("t.parquet", "t.csv"):
        told = refused("import", tmp_path / name, "--map", "task=p,answer=said")
        assert "has the column 'said' more than once (rename all but one)" in told
    told = refused("import", tmp_path / "unnamed.csv", "--map", "task=p,answer=said")
    assert "its task defines no class" in told


@pytest.mark.parametrize(
    "cell, message",
    [
        (3, "row 1 holds int, which is no answer"),
        ({"role": "assistant"}, "row 1 holds dict with role, which is no answer"),
        ([said("assistant", 3)], "row 1 holds int"),
        ({"choices": [7]}, "row 1 holds int"),
        ([[3]], "row 1 holds int"),
    ],
)
def test_a_cell_of_no_known_form_names_its_row(cell, message, tmp_path):
    rows = [{"p": program(), "said": "x"}, {"p": program(), "said": cell}]
    path = write_table(tmp_path / "t.jsonl", rows)
    told = refused("import", path, "--map", "task=p,answer=said", "--out", tmp_path / "out")
    assert message in told and "known are text" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        (["--map", "task=p,answer=said", "--as", "kernelbook"], "leave out one of them"),
        (["--as", "kernelbok"], "there is no map 'kernelbok' (known are ai-cuda-engineer, concur"),
        (["--map", "task=q"], "there is no column 'q' (the columns are p, said)"),
        (["--map", "reply=said"], "'reply=said' is no KEY=COLUMN (keys are task, answer"),
        ([], "has columns of no known map: p, said (say which are the task and the answer"),
    ],
)
def test_what_cannot_be_mapped_is_said_with_the_fix(options, message, tmp_path):
    path = write_table(tmp_path / "t.jsonl", [{"p": program(), "said": "x"}])
    assert message in refused("import", path, *options, "--out", tmp_path / "out")


def test_the_summary_is_one_json_object_beside_a_page(tmp_path):
    path = write_table(tmp_path / "t.parquet", TABLES["messages"])
    told = data_of("import", path, "--out", tmp_path / "out")
    assert (told["map"], told["rows"], told["tasks"], told["answers"]) == ("messages", 3, 2, 1)
    assert [each["rows"] for each in told["skipped"]] == [1, 1]
    assert told["without_ModelNew"] == 0


def test_turns_stay_turns_of_one_sample(tmp_path):
    _, (task,), answers = imported(
        write_table(tmp_path / "t.parquet", TABLES["drkernel"]), tmp_path
    )
    names = [answer["candidate_id"] for answer in answers]
    assert [answer["turn"] for answer in answers] == [1, 2, 3, 4, 5]
    assert [answer["parent"] for answer in answers] == [None, *names[:-1]]
    tasks = {task["task_id"]: KernelTask.model_validate(task)}
    table = CandidateTable(tmp_path / "out" / "answers.parquet")
    ref = keep(list(tasks.values()), str(tmp_path / "root"), {})
    rows = table.write(tasks, ref, Language.TRITON).open().read().sort("turn").to_dicts()
    assert [row["turn"] for row in rows] == [1, 2, 3, 4, 5]
    assert {row["sample_index"] for row in rows} == {0}
    assert [row["parent"] for row in rows] == [None, *(row["candidate_id"] for row in rows[:-1])]
    assert {row["code"] for row in rows} == {module()}


def test_imported_answers_are_replayed_in_a_refresh(tmp_path):
    imported(write_table(tmp_path / "t.parquet", TABLES["kernelbook"]), tmp_path)
    sampler = ResponsesFile(tmp_path / "out" / "answers.parquet")
    (task, other) = load(tmp_path / "out" / "tasks.parquet")
    assert (task.entry_point, task.init_form, sampler.generator) == (
        "Add",
        "args_kwargs",
        "inductor",
    )
    wanted = [make_request(0, each, "p", each.task_id, Language.TRITON) for each in (task, other)]
    (answer,) = sampler.sample(wanted)
    assert answer.request_key == task.task_id and "ModelNew = AddNew" in answer.text


def test_reasoning_is_counted_where_a_tokenizer_is_given(tmp_path):
    model = build_small_model(tmp_path / "model", ["some text to learn from"])
    for name in ("concur", "messages"):
        path = write_table(tmp_path / "t.parquet", TABLES[name])
        import_source(str(path), None, None, str(tmp_path / "out"), str(model))
        (answer,) = pl.read_parquet(tmp_path / "out" / "answers.parquet").to_dicts()
        assert (answer["reasoning_tokens"] > 0) is (name == "concur")


def test_a_folder_of_other_results_is_not_taken_for_runs(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/results.csv").write_text("a,b\n1,2\n")
    told = refused("import", tmp_path / "run", "--out", tmp_path / "out")
    assert "has columns of no known map: a, b" in told
    (tmp_path / "run/results.csv").unlink()
    told = refused("import", tmp_path / "run", "--out", tmp_path / "out")
    assert "holds no candidate (read are FILE.py" in told


def test_one_id_of_two_programs_is_two_tasks(tmp_path):
    rows = [{"id": "a", "p": program(shift=shift), "said": "x"} for shift in (1, 2, 1)]
    _, tasks, answers = imported(
        write_table(tmp_path / "t.jsonl", rows), tmp_path, "task=p,answer=said,id=id"
    )
    assert len(tasks) == 2 and tasks[0]["task_id"] == "a" != tasks[1]["task_id"]
    places = [each["task_id"] for each in answers]
    assert places == ["a", tasks[1]["task_id"], "a"]


@pytest.mark.parametrize("name", ["drkernel", "kernelbook", "messages"])
def test_a_known_table_needs_no_import_to_be_judged(name, tmp_path):
    path = write_table(tmp_path / "t.parquet", TABLES[name])
    table = CandidateTable(path)
    language = table.language(None)
    asked = table.asked_tasks(language)
    assert asked.total() == EXPECTED[name][1]
    assert {task.task_id for task in load(path, asked)} == set(asked)
