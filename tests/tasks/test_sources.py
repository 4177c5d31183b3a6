"""Every source gives checked tasks under stable ids, and says which file or row is wrong and how it
should look."""

import json
import warnings
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_eval.errors import UsageError
from kernels_eval.records import KernelTask, Language
from tasks.sources import bundled, files, hub, kernelbench, kernelbook
from tasks.sources.bundled import pairs
from tasks.sources.config import TasksConfig
from tasks.sources.degenerate import degenerate_tasks
from tasks.sources.files import check_task_source
from tasks.sources.stage import load_tasks
from tasks.sources.step import _load_tasks
from tasks.synthesis.prompts import render
from tests.support.cases import cases
from tests.support.hub_server import hub_of

CASES = cases("sources")

GOOD = """\
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        return x + {number}


def get_inputs():
    return [1]


def get_init_inputs():
    return []
"""
CUDA_TASKS = {
    "softmax_rows",
    "scale_shift_silu",
    "max_pool2d",
    "residual_layer_norm",
    "masked_softmax",
    "matrix_multiply",
    "group_norm_swish",
    "pairwise_l1_distance",
    "swiglu_gate",
    "smooth_l1_rows",
}


def good(number=0, entry_point="Model"):
    return GOOD.format(number=number).replace("class Model", f"class {entry_point}")


# --- the check
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code, missing", CASES["check_names_what_is_missing_and_how_it_should_look"]
)
def test_check_names_what_is_missing_and_how_it_should_look(code, missing):
    with pytest.raises(UsageError, match=rf"^my\.py does not define {missing}") as caught:
        check_task_source(code, "Model", "my.py")
    for part in ("class Model(nn.Module)", "get_inputs()", "get_init_inputs()"):
        assert part in caught.value.hint


@pytest.mark.parametrize(
    "code",
    ["def f(:", "x = (", "\0", "x = '\ud800'", "(" * 5000, "-" * 100_000 + "1", "    indented"],
)
def test_check_says_where_a_file_is_not_python(code):
    with pytest.raises(UsageError, match=r"^my\.py is not Python: "):
        check_task_source(code, "Model", "my.py")
    if code.startswith("def"):
        with pytest.raises(UsageError, match="line 1"):
            check_task_source(code, "Model", "my.py")


@pytest.mark.parametrize("code", CASES["check_takes_ordinary_modules_without_a_word"])
def test_check_takes_ordinary_modules_without_a_word(code):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_task_source(code, "Model", "my.py")


def test_check_never_runs_the_code(tmp_path):
    check_task_source(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + good(), "Model", "my.py")
    assert not (tmp_path / "ran").exists()


@given(st.text())
def test_check_answers_any_text_with_a_usage_error_or_nothing(code):
    try:
        check_task_source(code, "Model", "any.py")
    except UsageError as error:
        assert str(error).startswith("any.py")


# --- bundled
# --------------------------------------------------------------------------------------------------


def test_bundled_splits_part_the_tasks():
    splits = ("all", "train", "heldout", "gradients")
    every, train, held_out, gradients = (
        [task.task_id for task in bundled.load(split)] for split in splits
    )
    assert gradients and not {*gradients} & {*every}
    assert len(every) == 16 and sorted(train + held_out) == every == sorted(set(every))
    assert set(held_out) == {f"bundled/{name}" for name in bundled.HELD_OUT} and len(held_out) == 4
    with pytest.raises(UsageError, match="'test'"):
        bundled.load("test")


def test_the_demos_splits_hold_pairs_of_which_the_small_model_reads_none_it_is_asked():
    names = {split: {task.name for task in bundled.load(split)} for split in bundled.SPLITS}
    for split, held in bundled.PAIRS.items():
        own = {pair.name for pair in held}
        assert own <= names[split] and names[split] - own <= names["train"]
        assert all(bundled.responses(name, "cpp") for name in own)
    assert not names["demo"] & names["demo_heldout"]
    read = {pair.name for pair in pairs.read()}
    assert read >= {pair.name for pair in pairs.TRAIN}
    assert not read & {pair.name for pair in pairs.HELD_OUT}


def test_the_small_model_reads_the_prompt_that_it_is_asked_by():
    for task in bundled.load("demo_heldout"):
        assert bundled.prompt(task.code) == render(task, pairs.LANGUAGE)


@pytest.mark.parametrize("language", ["cpp", "cuda"])
def test_every_bundled_task_has_five_recordings_in_its_languages(language):
    counts = {task.name: len(bundled.responses(task.name, language)) for task in bundled.load()}
    assert counts == {name: 5 if language == "cpp" or name in CUDA_TASKS else 0 for name in counts}
    assert counts.keys() >= CUDA_TASKS


def test_recordings_come_in_order_of_their_number():
    folder = Path(bundled.__file__).parent / "responses" / "cpp" / "softmax_rows"
    expected = [(folder / f"{number}.md").read_text(encoding="utf-8") for number in range(5)]
    assert (
        bundled.responses("softmax_rows", "cpp")
        == bundled.responses("softmax_rows", Language.CPP)
        == expected
    )
    assert len(set(expected)) == 5
    bundled.responses("softmax_rows", "cpp").clear()
    assert bundled.responses("softmax_rows", "cpp") == expected, "a caller's list is its own"


def test_a_tenth_recording_comes_after_the_ninth(tmp_path, monkeypatch):
    (tmp_path / "tasks" / "gradients").mkdir(parents=True)
    (tmp_path / "tasks" / "t.py").write_text(good())
    recordings = tmp_path / "responses" / "cpp" / "t"
    recordings.mkdir(parents=True)
    for number in range(12):
        (recordings / f"{number}.md").write_text(str(number))
    monkeypatch.setattr(bundled, "files", lambda package: tmp_path)
    bundled._tasks.cache_clear()
    bundled._responses.cache_clear()
    try:
        assert bundled.responses("t", "cpp") == [str(number) for number in range(12)]
    finally:
        bundled._tasks.cache_clear()
        bundled._responses.cache_clear()


@pytest.mark.parametrize("name", ["no_such_task", "../tasks", ""])
def test_recordings_of_an_unknown_task_are_refused(name):
    with pytest.raises(UsageError, match="no bundled task"):
        bundled.responses(name, "cpp")
    assert bundled.responses("softmax_rows", "triton") == []


# --- the user's files
# --------------------------------------------------------------------------------------------------


def test_a_folder_of_files(tmp_path):
    for number, name in enumerate(("b", "a", "_helper")):
        (tmp_path / f"{name}.py").write_text(good(number))
    (tmp_path / "notes.txt").write_text("not a task")
    found = files.load(tmp_path)
    assert found == [
        KernelTask(task_id="user/a", name="a", code=good(1), source="user"),
        KernelTask(task_id="user/b", name="b", code=good(0), source="user"),
    ]
    assert files.load(tmp_path / "a.py") == found[:1] == files.load(str(tmp_path / "a.py"))


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "a.py").write_text(good())
    (tmp_path / "b.py").write_text("x = 1")
    with pytest.raises(UsageError, match=r"b\.py \(b\) does not define class Model"):
        files.load(tmp_path)
    (tmp_path / "b.py").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"cannot read .*b\.py.*UTF-8"):
        files.load(tmp_path)


def test_a_place_without_tasks_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"absent\.py does not exist"):
        files.load(tmp_path / "absent.py")
    with pytest.raises(UsageError, match=r"holds no \.py file"):
        files.load(tmp_path)
    (tmp_path / "tasks.csv").write_text("name,code")
    with pytest.raises(UsageError, match=r"tasks\.csv has no rows"):
        files.load(tmp_path / "tasks.csv")
    (tmp_path / "tasks.tsv").write_text("name\tcode")
    with pytest.raises(UsageError, match=r"tasks\.tsv: it is text with tabs"):
        files.load(tmp_path / "tasks.tsv")


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.py").write_text(good())
    assert [task.name for task in files.load("~/a.py")] == ["a"]


def test_parquet_of_kernel_tasks_comes_back_as_it_was(tmp_path):
    tasks = [
        KernelTask(task_id="x/1", name="one", code=good(1), source="x", level=2),
        KernelTask(
            task_id="x/2",
            name="two",
            code=good(2, "Net"),
            entry_point="Net",
            init_form="args_kwargs",
        ),
    ]
    pl.DataFrame([task.model_dump() for task in tasks]).write_parquet(tmp_path / "t.parquet")
    assert files.load(tmp_path / "t.parquet") == tasks


@pytest.mark.parametrize("columns, message", CASES["parquet_with_a_fault_names_the_row"])
def test_parquet_with_a_fault_names_the_row(tmp_path, columns, message):
    pl.DataFrame(columns).write_parquet(tmp_path / "t.parquet")
    with pytest.raises(UsageError, match=rf"t\.parquet.*{message}"):
        files.load(tmp_path / "t.parquet")


def test_the_column_of_code_has_the_name_that_is_given(tmp_path):
    pl.DataFrame(
        {"python_code": [good(), good(1)], "code": ["not this", "nor this"]}
    ).write_parquet(tmp_path / "mine.parquet")
    found = files.load(tmp_path / "mine.parquet", code_column="python_code")
    assert [(task.task_id, task.code) for task in found] == [
        ("user/mine_0", good()),
        ("user/mine_1", good(1)),
    ]
    config = TasksConfig(
        source="files", location=str(tmp_path / "mine.parquet"), code_column="python_code"
    )
    assert load_tasks(config) == found
    with pytest.raises(UsageError, match="no column programs") as caught:
        files.load(tmp_path / "mine.parquet", code_column="programs")
    assert "python_code" in caught.value.hint


def test_json_lines_are_the_same_as_parquet(tmp_path):
    rows = [
        {"name": "one", "code": good(1), "level": 2},
        {"name": "two", "code": good(2, "Net"), "entry_point": "Net"},
    ]
    (tmp_path / "t.jsonl").write_text("\n".join([json.dumps(rows[0]), "", json.dumps(rows[1])]))
    pl.DataFrame(rows).write_parquet(tmp_path / "t.parquet")
    found = files.load(tmp_path / "t.jsonl")
    assert [task.level for task in found] == [2, None]
    with pytest.raises(UsageError, match="row 0: the column entry_point holds int, not String"):
        files.load(bad_lines(tmp_path, json.dumps(rows[0] | {"entry_point": 3})))
    assert (
        [task.task_id for task in found]
        == ["user/one", "user/two"]
        == [task.task_id for task in files.load(tmp_path / "t.parquet")]
    )


def bad_lines(folder, *lines):
    (folder / "bad.jsonl").write_text("\n".join(lines))
    return folder / "bad.jsonl"


@pytest.mark.parametrize("lines, message", CASES["json_lines_with_a_fault_name_the_line"])
def test_json_lines_with_a_fault_name_the_line(tmp_path, lines, message):
    with pytest.raises(UsageError, match=rf"bad\.jsonl.*{message}"):
        files.load(bad_lines(tmp_path, *lines))


# --- KernelBench
# --------------------------------------------------------------------------------------------------


def bench_file(path, rows):
    schema = {"code": pl.String, "level": pl.Int64, "name": pl.String, "problem_id": pl.Int64}
    pl.DataFrame(rows, schema=schema, orient="row").write_parquet(path)
    return path


def test_kernelbench_from_parquet(tmp_path):
    path = bench_file(
        tmp_path / "kb.parquet",
        [
            (good(level + number), level, f"{number}_x", number)
            for level in (2, 1)
            for number in (10, 9)
        ],
    )
    found = kernelbench.load(path)
    assert [task.task_id for task in found] == [
        "kernelbench/L1/9",
        "kernelbench/L1/10",
        "kernelbench/L2/9",
        "kernelbench/L2/10",
    ]
    assert found[0] == KernelTask(
        task_id="kernelbench/L1/9", name="9_x", code=good(10), source="kernelbench", level=1
    )
    assert kernelbench.load(str(path), levels=(2,)) == found[2:]
    assert kernelbench.load(path, levels=(3,)) == []


def test_kernelbench_from_its_repository_is_the_same(tmp_path):
    rows = [
        (good(level), level, f"{number}_x", number) for level in (1, 2) for number in (1, 2, 11)
    ]
    for code, level, name, _ in rows:
        (tmp_path / "repo" / f"level{level}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "repo" / f"level{level}" / f"{name}.py").write_text(code)
    (tmp_path / "repo" / "level1" / "__init__.py").write_text("")
    (tmp_path / "repo" / "README.md").write_text("")
    assert kernelbench.load(tmp_path / "repo") == kernelbench.load(
        bench_file(tmp_path / "kb.parquet", rows)
    )
    assert {task.level for task in kernelbench.load(tmp_path / "repo", levels=[2])} == {2}


def test_kernelbench_from_the_hub_is_compared_with_the_pinned_release(server, monkeypatch):
    rows = [
        {"code": good(number), "level": 3, "name": f"{number}_x", "problem_id": number}
        for number in (2, 1)
    ]
    server.keep("c" * 40, level_3=rows)
    monkeypatch.setitem(kernelbench.CONTENT, 3, kernelbench.content_of(rows[::-1]))
    config = TasksConfig(source="kernelbench", levels=(3,), revision="c" * 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load_tasks(config)
    assert [task.task_id for task in found] == ["kernelbench/L3/1", "kernelbench/L3/2"]
    rows[0]["code"] += "# changed"
    server.keep("d" * 40, level_3=rows)
    message = "level 3 of ScalingIntelligence/KernelBench at revision d+ differs from the release"
    with pytest.warns(UserWarning, match=message):
        changed = load_tasks(config.model_copy(update={"revision": "d" * 40}))
    assert len(changed) == 2, "a warning, not a refusal"


def test_kernelbench_leaves_broken_rows_out_and_says_so(tmp_path):
    rows = [
        (good(), 1, "1_a", 1),
        ("x = 1", 1, "2_b", 2),
        (None, 1, "3_c", 3),
        (good(1), 1, "1_a", 1),
        (good(), None, "5_e", 5),
        (good(), 1, "6_f", 6),
    ]
    path = bench_file(tmp_path / "kb.parquet", rows)
    with pytest.warns(
        UserWarning,
        match=(
            r"4 of 6 rows left out \(row 1: kernelbench/L1/2 does not define class Model.*row 2:"
            r" code.*row 3:.*occurs twice; \.\.\.\)"
        ),
    ):
        found = kernelbench.load(path)
    assert [task.task_id for task in found] == ["kernelbench/L1/1", "kernelbench/L1/6"]
    assert found[0].code == good()


def test_kernelbench_says_what_it_cannot_read(tmp_path):
    with pytest.raises(UsageError, match="no level 7"):
        kernelbench.load(tmp_path, levels=(1, 7))
    with pytest.raises(UsageError, match="holds no level folder"):
        kernelbench.load(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        kernelbench.load(str(tmp_path / "absent.parquet"))
    pl.DataFrame({"code": ["x"]}).write_parquet(tmp_path / "short.parquet")
    with pytest.raises(UsageError, match="no column level, problem_id"):
        kernelbench.load(tmp_path / "short.parquet")


# --- KernelBook
# --------------------------------------------------------------------------------------------------


def book_file(path, rows):
    schema = {
        "uuid": pl.Int64,
        "entry_point": pl.String,
        "python_code": pl.String,
        "triton_code": pl.String,
    }
    pl.DataFrame([(*row, "unused") for row in rows], schema=schema, orient="row").write_parquet(
        path
    )
    return path


def test_kernelbook_keeps_entry_point_and_init_form(tmp_path):
    path = book_file(
        tmp_path / "book.parquet", [(7, "Swish", good(1, "Swish")), (3, "Model", good(2))]
    )
    assert kernelbook.load(path) == [
        KernelTask(
            task_id="kernelbook/7",
            name="Swish",
            code=good(1, "Swish"),
            entry_point="Swish",
            init_form="args_kwargs",
            source="kernelbook",
        ),
        KernelTask(
            task_id="kernelbook/3",
            name="Model",
            code=good(2),
            init_form="args_kwargs",
            source="kernelbook",
        ),
    ]


def test_kernelbook_limit_counts_tasks_not_rows(tmp_path):
    path = book_file(
        tmp_path / "book.parquet",
        [
            (1, None, good()),
            (2, "Model", good()),
            (3, "Gone", good()),
            (4, "Model", good()),
            (5, "Model", good()),
        ],
    )
    with pytest.warns(
        UserWarning, match=r"2 of 4 rows left out.*row 2: kernelbook/3 does not define class Gone"
    ):
        assert [task.task_id for task in kernelbook.load(path, limit=2)] == [
            "kernelbook/2",
            "kernelbook/4",
        ]


def test_kernelbook_says_what_it_cannot_read(tmp_path):
    for location in (tmp_path, tmp_path / "absent.parquet", "./no/such.parquet"):
        with pytest.raises(UsageError, match="is not a file.*GPUMODE/KernelBook"):
            kernelbook.load(location)


# --- the hub
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("location, is_id", CASES["what_counts_as_a_hub_id"])
def test_what_counts_as_a_hub_id(location, is_id):
    assert hub.is_hub_id(location) is is_id


@pytest.fixture
def server(tmp_path, monkeypatch):
    with hub_of(monkeypatch, tmp_path) as server:
        yield server


def test_sources_ask_the_hub_for_splits_at_a_revision(server):
    levels = {
        f"level_{level}": [
            {"code": good(), "level": level, "name": "1_x", "problem_id": 1, "more": 0}
        ]
        for level in kernelbench.LEVELS
    }
    server.keep("c" * 40, **levels)
    with pytest.warns(UserWarning, match="differs from the release"):
        found = kernelbench.load(kernelbench.HUB_ID, levels=(2, 1), revision="c" * 40)
    assert [task.task_id for task in found] == ["kernelbench/L1/1", "kernelbench/L2/1"]
    row = {"uuid": 5, "entry_point": "Model", "python_code": good(), "stars": 1}
    server.keep(kernelbook.PINNED, train=[row])
    assert [task.task_id for task in kernelbook.load(kernelbook.HUB_ID)] == ["kernelbook/5"]


# --- the list of degenerate tasks
# -------------------------------------------------------------------------------------------------


def test_every_degenerate_task_names_the_page_that_measured_it():
    root = Path(files.__file__).parent.parent.parent
    named = degenerate_tasks()
    assert set(degenerate_tasks()) == {
        f"kernelbench/{name}" for name in ("L2/66", "L2/80", "L2/83", "L2/93", "L3/35")
    }
    for task_id, evidence in named.items():
        page = evidence.rpartition("(")[2].rstrip(")")
        assert task_id.removeprefix("kernelbench/") in (root / page).read_text(encoding="utf-8"), (
            task_id
        )
    degenerate_tasks().clear()
    assert degenerate_tasks(), "a caller's dict is its own"


def test_a_run_says_which_of_the_bundled_tasks_it_loads():
    names = [_load_tasks(TasksConfig(split=split)) for split in ("train", "heldout")]
    held_out = "load bundled tasks (held out for the benchmark)"
    assert names == ["load bundled tasks (train)", held_out]
    assert _load_tasks(TasksConfig(source="kernelbook")) == "load kernelbook tasks"
