"""Files as other people have them, read by `concur import` and as candidates: each is read, or ends
in one line with the input, the cause and the fix. None ends in a traceback."""

import gzip
import io
import json
import os
import zipfile

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels_eval.errors import UsageError
from kernels_eval.records import KernelTask
from tasks.progress import gathering
from tasks.sources.stage import keep
from tasks.sources.tables import load
from tasks.synthesis.tables import CandidateTable
from tests.support.programs import ADDS_ONE
from tests.support.typed import invoked, refused

pytestmark = pytest.mark.filterwarnings("ignore")
KERNEL = """import torch
from torch.utils.cpp_extension import load_inline
ext = load_inline(name="k", cpp_sources="torch::Tensor k(torch::Tensor x) { return x + 1; }")

class ModelNew(torch.nn.Module):
    def forward(self, x):
        return ext.k(x)
"""
FAST = KERNEL.replace("ModelNew", "Fast")
ANSWER = f"Here:\n```python\n{KERNEL}```\n"
ASKED = {"role": "user", "content": f"```python\n{ADDS_ONE}```"}
SAID = {"role": "assistant", "content": ANSWER}
ROW = {"task_id": "t", "code": KERNEL}
BOM = b"\xef\xbb\xbf"
CHOICES = {"object": "chat.completion", "choices": [{"message": SAID, "finish_reason": "stop"}]}
CELL = {"cell_type": "code", "source": KERNEL.splitlines(True)}
CUDA_L1 = [
    {"level": level, "task_id": 3, "ref_code": ADDS_ONE.replace("1", str(level))}
    | {"custom_code": KERNEL}
    for level in (1, 2)
]


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def csv_of(*rows):
    return pl.DataFrame(rows).write_csv()


def arrow_of(write, *rows):
    out = io.BytesIO()
    write(pl.DataFrame(rows), out)
    return out.getvalue()


def stream(frame, out):
    table = frame.to_arrow()
    with pa.ipc.new_stream(out, table.schema) as sink:
        sink.write_table(table)


def zipped(**files):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return out.getvalue()


PARQUET = arrow_of(pl.DataFrame.write_parquet, ROW)
READ = {
    # files, then the tasks of the answers that are read
    "csv": ({"t.csv": csv_of(ROW)}, ["t"]),
    "csv with CRLF and a mark": ({"t.csv": BOM + csv_of(ROW).replace("\n", "\r\n").encode()}, "t"),
    "json": ({"t.json": json.dumps([ROW])}, ["t"]),
    "one object": ({"t.json": json.dumps(ROW)}, ["t"]),
    "jsonl with CRLF and a mark": (
        {"t.jsonl": BOM + lines(ROW, ROW)[:-1].encode() + b"\r\n"},
        "tt",
    ),
    "parquet": ({"t.parquet": PARQUET}, ["t"]),
    "arrow": ({"t.arrow": arrow_of(stream, ROW)}, ["t"]),
    "feather": ({"t.feather": arrow_of(pl.DataFrame.write_ipc, ROW)}, ["t"]),
    "numbers as text": (
        {"t.csv": csv_of(ROW | {"sample_index": "3", "turn": "1", "completion_tokens": "1e3"})},
        ["t"],
    ),
    "half a surrogate pair": ({"t.jsonl": lines(ROW | {"code": KERNEL + "# \ud800"})}, ["t"]),
    "columns of any kind beside": (
        {"t.jsonl": lines(*[ROW | {"more": more} for more in ({}, [1], "x", None, {"a": [{}]})])},
        ["t"] * 5,
    ),
    "unicode": ({"t.jsonl": lines({"task_id": "t ñ 测试", "code": KERNEL, "名": 1})}, ["t ñ 测试"]),
    "a completion": ({"t.jsonl": lines({"task_id": "t", "response": CHOICES})}, ["t"]),
    "parts of text": (
        {
            "t.jsonl": lines(
                {"task_id": "t", "response": [{"role": "assistant", "content": [SAID]}]}
            )
        },
        None,
    ),
    "messages as text": (
        {"t.csv": csv_of({"id": "t", "messages": json.dumps([ASKED, SAID])})},
        "t",
    ),
    "messages with a tool": (
        {
            "t.jsonl": lines(
                {"id": "t"}
                | {
                    "messages": [
                        ASKED,
                        {"role": "assistant", "content": None, "tool_calls": []},
                        {"role": "tool", "content": "done"},
                        SAID,
                    ]
                }
            )
        },
        ["t", "t"],
    ),
    "CUDA-L1's levels merged": (
        {"t.jsonl": lines(*CUDA_L1)},
        ["cuda-l1/L1/3", "cuda-l1/L2/3"],
    ),
    "a module": ({"t.py": KERNEL}, ["t"]),
    "a module with a mark and CRLF": ({"t.py": BOM + KERNEL.replace("\n", "\r\n").encode()}, "t"),
    "an answer": ({"t.txt": ANSWER}, ["t"]),
    "an answer in Markdown": ({"t.md": ANSWER}, ["t"]),
    "answers in Markdown": ({"README.md": "x", "t.md": ANSWER, "u/answer.md": ANSWER}, ["t"]),
    "a folder a task": ({"t/kernel.py": KERNEL, "u/solution_1.py": KERNEL}, ["t", "u"]),
    "with its code in a folder": (
        {f"{task}/code/kernel_{n}.py": KERNEL for task in "tu" for n in (0, 1)},
        ["t", "t", "u", "u"],
    ),
    "with its program above": (
        {"t/ref.py": ADDS_ONE, "t/code/kernel_0.py": KERNEL, "t/code/kernel_1.py": KERNEL},
        ["t", "t"],
    ),
    "with its samples in folders": (
        {f"t/sample_{n}/kernel.py": KERNEL for n in (0, 1)},
        ["t", "t"],
    ),
    "in its level": (
        {"level2/3_Add/code/kernel_0.py": KERNEL},
        ["kernelbench/L2/3"],
    ),
    "with spaces and unicode": ({"my task ñ/kernel 0.py": KERNEL}, ["my task ñ"]),
    "a CUDA file beside its binding": ({"t/kernel.cu": "x", "t/solution.py": KERNEL}, ["t"]),
    "a program and a kernel of other names": (
        {"t/ref.py": ADDS_ONE, "t/kernel_0.py": FAST, "t/kernel_1.py": ADDS_ONE + FAST},
        ["t", "t"],
    ),
}
REFUSED = {
    "an empty folder": ({}, "holds no candidate (read are FILE.py"),
    "CUDA files alone": ({"t/kernel.cu": "x"}, "TASK/code/kernel_0.py"),
    "a CUDA file": ({"t.cu": "__global__ void k() {}"}, "give Parquet, Arrow, JSON or CSV"),
    "a notebook": ({"t.ipynb": json.dumps({"cells": [CELL]})}, "give Parquet, Arrow, JSON or CSV"),
    "an archive": ({"t.zip": zipped(t=KERNEL)}, "unpacked"),
    "a packed table": ({"t.jsonl.gz": gzip.compress(lines(ROW).encode())}, "it is packed by gzip"),
    "a packed table of another name": (
        {"t.jsonl": gzip.compress(lines(ROW).encode())},
        "it is packed by gzip",
    ),
    "tabs": ({"t.tsv": "task_id\tcode\nt\tx\n"}, "it is text with tabs"),
    "tabs in a CSV": ({"t.csv": "task_id\tcode\nt\tx\n"}, "is text with tabs"),
    "lines in place of Parquet": ({"t.parquet": lines(ROW)}, "it is JSON (give Parquet"),
    "a packed folder": ({"set/t.zip": zipped(t=KERNEL)}, "holds no candidate"),
    "a cut parquet": ({"t.parquet": PARQUET[:-9]}, "give a complete file"),
    "an empty parquet": ({"t.parquet": b""}, "give a complete file"),
    "a cut arrow": ({"t.arrow": arrow_of(stream, ROW)[:80]}, "give a complete file"),
    "a cut line": ({"t.jsonl": lines(ROW, ROW)[:-20]}, "line 2 is not JSON"),
    "an unclosed quote": ({"t.csv": 'task_id,code\nt,"abc\n'}, "unexpected end of data"),
    "fields beyond the header": ({"t.csv": "task_id,code\nt,a,b\n"}, "line 2 has more fields"),
    "semicolons": ({"t.csv": "task_id;code\nt;x\n"}, "no known map: task_id;code"),
    "another encoding": ({"t.jsonl": lines(ROW).encode("utf-16")}, "in UTF-8"),
    "a module in another encoding": ({"t.py": b"# \xe9\n"}, "give a UTF-8 text file"),
    "an empty table": ({"t.csv": "task_id,code\n"}, "it has no rows"),
    "a list of lists": ({"t.json": "[[1]]"}, "give a list of objects"),
    "a number": ({"t.json": "5"}, "give a list of objects"),
    "deep nesting": ({"t.json": "[" * 9999 + "]" * 9999}, "nested too deeply"),
    "columns of lists": ({"t.json": json.dumps({"task_id": ["t"], "code": ["x"]})}, "holds str"),
    "text for a number": ({"t.jsonl": lines(ROW | {"turn": "one"})}, "column turn holds str"),
    "a huge number": ({"t.jsonl": lines(ROW | {"sample_index": 2**63})}, "sample_index holds int"),
    "code that is a number": ({"t.jsonl": lines(ROW, {"task_id": "t", "code": 5})}, "row 1: the"),
    "ids that are lists": (
        {"t.jsonl": lines({"task_id": ["t"], "code": "x"})},
        "row 0: the column",
    ),
    "nulls alone": ({"t.jsonl": lines({"task_id": None, "code": None})}, "row 0 names no task"),
    "several answers": (
        {"t.jsonl": lines({"task_id": "t", "response": [ANSWER] * 2})},
        "--map id=",
    ),
    "nested conversations": ({"t.jsonl": lines({"messages": [[ASKED, SAID]]})}, "row 0 holds list"),
    "roles that are none": ({"t.jsonl": lines({"messages": [{"role": 3, "content": 4}]})}, "row 0"),
    "no configuration": (
        {"t/func_forward.py": ADDS_ONE, "t/config_forward.json": "{"},
        "config_forward.json is not JSON",
    ),
}


def placed(folder, files):
    """What the files are given as: themselves where there is one, else their folder."""
    for name, content in files.items():
        path = folder / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    (folder / "in").mkdir(exist_ok=True)
    alone = len(files) == 1 and "/" not in next(iter(files))
    return folder / "in" / next(iter(files)) if alone else folder / "in"


def imported(path, folder):
    """Exit status of `concur import`, and its one line where it refuses."""
    done = invoked("import", path, "--out", folder / "out")
    assert done.exit_code in (0, 2), done.exception
    if done.exit_code == 2:
        assert done.stdout == "" and done.stderr.startswith("error: "), done.output
        assert done.stderr.count("\n") == 1 and done.stderr.rstrip().endswith(")"), done.stderr
    return done.exit_code, done.stderr


def as_candidates(path, folder):
    """The candidates that `verify-batch` would judge. Raises UsageError."""
    table = CandidateTable(path)
    language = table.language(None)
    asked = table.asked_tasks(language)
    tasks = {name: KernelTask(task_id=name, name=name, code=ADDS_ONE) for name in asked if name}
    if not tasks:
        return []
    written = table.write(tasks, keep(list(tasks.values()), str(folder / "root"), {}), language)
    return written.open().read().sort("row").to_dicts()


@pytest.mark.parametrize("name", READ)
def test_what_is_read_is_read_alike_by_both(name, tmp_path):
    files, expected = READ[name]
    path = placed(tmp_path, files)
    assert imported(path, tmp_path)[0] == 0
    answers = pl.read_parquet(tmp_path / "out/answers.parquet").to_dicts()
    assert all("ModelNew" in (row.get("code") or ANSWER) for row in answers)
    found = [row["task_id"] for row in as_candidates(path, tmp_path)]
    assert [row["task_id"] for row in answers] == found
    assert expected is None or found == [*expected]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_what_can_be_read(name, tmp_path):
    files, message = REFUSED[name]
    path = placed(tmp_path, files)
    status, said = imported(path, tmp_path)
    assert status == 2 and message in said
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError) as caught:
        as_candidates(path, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ("view",),
        ("benchmark", "--verdicts"),
        ("analyze", "--verdicts"),
        ("curate", "--verdicts"),
        ("export", "--as", "kernelbench", "--out", "traces"),
    ],
    ids=lambda words: words[0],
)
def test_verdicts_in_lines_are_refused_by_what_they_are(words, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(lines(ROW))
    assert f"{path}: it is JSON (give a Parquet file" in refused(*words, path)


def test_what_is_no_file_is_left_out(tmp_path):
    folder = tmp_path / "in"
    (folder / "folder.py").mkdir(parents=True)
    (folder / "gone.py").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe.py")
    other = os.fsencode(folder) + b"/b\xff"
    os.mkdir(other)
    with open(other + b"/kernel.py", "w") as file:
        file.write(KERNEL)
    assert imported(folder, tmp_path)[0] == 0
    assert [row["task_id"] for row in as_candidates(folder, tmp_path)] == ["b?"]


def test_kernels_at_two_depths_are_read_nearer_the_top_and_the_rest_is_counted(tmp_path):
    folder = placed(tmp_path, {"a.py": KERNEL, "b/kernel.py": KERNEL, "c/kernel.py": KERNEL})
    with gathering() as cautions:
        assert [row["task_id"] for row in as_candidates(folder, tmp_path)] == ["a"]
    assert len(cautions) == 1 and cautions[0].startswith("2 files in folders are left out")
    (folder / "a.py").unlink()
    with gathering() as cautions:
        assert [row["task_id"] for row in as_candidates(folder, tmp_path)] == ["b", "c"]
    assert cautions == []


def test_answers_as_text_beside_modules_are_left_out_and_counted(tmp_path):
    folder = placed(tmp_path, {"a.py": KERNEL, "b.txt": KERNEL, "c.md": KERNEL, "prompt.txt": "p"})
    with gathering() as cautions:
        assert [row["task_id"] for row in as_candidates(folder, tmp_path)] == ["a"]
    (said,) = cautions
    assert said.startswith("2 files that are not .py, such as b.txt, are left out")


@pytest.mark.parametrize("path", ["~nobody-here/t.jsonl", "x" * 5000, "a\0b", "/dev/null", ""])
def test_a_place_that_is_none_is_one_line(path, tmp_path):
    assert imported(path, tmp_path)[0] == 2


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
VALUES = st.recursive(
    SCALARS | st.sampled_from([ADDS_ONE, KERNEL, ANSWER, SAID, ASKED, CHOICES]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)
COLUMNS = [
    "task_id code language sample_index turn parent candidate_id finish_reason sampling".split(),
    "task_id response reasoning generator completion_tokens parse_reason".split(),
    "level problem_id code".split(),
    ["id", "messages"],
    ["uuid", "entry_point", "python_code", "triton_code"],
    ["level", "task_id", "ref_code", "custom_code"],
    "original_code kernel_code reward_hack problem_name problem_level backend".split(),
    "name axes inputs outputs reference workloads".split(),
]


@given(st.data())
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("columns", COLUMNS, ids=lambda names: names[-1])
def test_any_value_in_any_column_is_read_or_refused(columns, tmp_path_factory, data):
    row = st.fixed_dictionaries({name: VALUES for name in columns})
    rows = data.draw(st.lists(row, min_size=1, max_size=2))
    folder = tmp_path_factory.mktemp("any")
    path = folder / "t.jsonl"
    path.write_text(lines(*rows))
    imported(path, folder)
    for read in (as_candidates, lambda path, _: load(path)):
        try:
            read(path, folder)
        except UsageError as error:
            assert "\n" not in str(error)
