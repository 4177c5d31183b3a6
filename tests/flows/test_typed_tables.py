"""Every column of every table that others give us, in every type that a table can have: it is read
rightly, or refused in one error that names the table, the column, its type and the wanted one."""

import re
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.analyze import analyze_table
from flows.curate import Choice, curate_table
from flows.exchange import export
from flows.score import score_table
from flows.view import write_view
from kernels_eval.errors import UsageError
from kernels_eval.records import Language
from tasks.sources import files as task_files
from tasks.sources import kernelbench, kernelbook, tables
from tasks.sources.stage import keep
from tasks.synthesis.recorded import ResponsesFile
from tasks.synthesis.tables import CandidateTable
from tasks.tables import CANDIDATES, VERDICTS, columns_of
from tasks.typed import typed
from tests.support.curated import line, sample
from tests.support.programs import EMPTY

ANSWER = "<think>a thought</think>\n```python\nclass ModelNew: pass\n```\n"
OPTIONS = dict.fromkeys(
    ("candidates", "tasks", "candidate", "name", "license", "task", "language", "recipe")
)
ROWS = 4
VALUES: dict[str, tuple[list, pa.DataType]] = {
    "whole": ([1, 2, 3, 4], pa.int64()),
    "unsigned": ([1, 2, 3, 4], pa.uint8()),
    "float": ([1.5, 2.5, 3.5, 4.5], pa.float32()),
    "nan": ([float("nan")] * ROWS, pa.float64()),
    "decimal": ([Decimal("1.5")] * ROWS, pa.decimal128(5, 1)),
    "text": (["one", "two", "three", "four"], pa.string()),
    "large_text": (["one", "two", "three", "four"], pa.large_string()),
    "dictionary": (["one", "two", "one", "two"], pa.dictionary(pa.int8(), pa.string())),
    "bytes": ([b"\xff\x00", b"a", b"b", b"c"], pa.binary()),
    "bool": ([True, False, True, False], pa.bool_()),
    "null": ([None] * ROWS, pa.null()),
    "nulls": ([None] * ROWS, pa.string()),
    "timestamp": ([datetime(2026, 1, 1)] * ROWS, pa.timestamp("us")),
    "texts": ([["one"], [], None, ["two"]], pa.list_(pa.string())),
    "numbers": ([[1], [], None, [2]], pa.list_(pa.int64())),
    "fixed": ([[1, 2]] * ROWS, pa.list_(pa.int64(), 2)),
    "struct": (
        [{"speedup": "fast", "x": 1}] * ROWS,
        pa.struct({"speedup": pa.string(), "x": pa.int8()}),
    ),
    "empty_struct": ([{"y": None}] * ROWS, pa.struct({"y": pa.null()})),
}


def verdicts_and_candidates(folder):
    """One table with both, as a merged table has them."""
    rows = [
        sample(f"t/{task}", index, 100 + 40 * index, 7.0 - index + task / 10)
        for task in range(2)
        for index in range(2)
    ]
    root = folder / "root"
    line(root, rows)
    parts = [
        pl.read_parquet(root / stage / "*" / "part-*.parquet")
        for stage in ("verification", "synthesis")
    ]
    shared = set(parts[0].columns) & set(parts[1].columns) - {"candidate_id"}
    return parts[0].join(parts[1].drop(shared), on="candidate_id").to_arrow()


def of_rows(row):
    """A table of a few rows that differ in their number."""

    def made(folder):
        return pa.Table.from_pylist(
            [
                {
                    name: each.format(n=n) if isinstance(each, str) else each + n
                    for name, each in row.items()
                }
                for n in range(ROWS)
            ]
        )

    return made


def candidates(path, folder):
    table = CandidateTable(path)
    language = table.language(None)
    task = tables.load(_file(folder / "task.parquet", TASKS(folder)))[0]
    asked = [task.model_copy(update={"task_id": name}) for name in table.asked_tasks(language)]
    upstream = keep(asked, str(folder / "root"), {})
    table.write({task.task_id: task for task in asked}, upstream, Language(language))


def _file(path, table):
    pq.write_table(table, path)
    return path


TASKS = of_rows({"task_id": "t{n}", "name": "n{n}", "code": EMPTY, "entry_point": "Model"})
READERS: dict[str, tuple[Callable, Callable]] = {
    "curate": (
        verdicts_and_candidates,
        lambda path, out: curate_table(Choice(str(path)), str(out / "o")),
    ),
    "benchmark": (
        verdicts_and_candidates,
        lambda path, out: score_table(str(path), resamples=100, min_kernel_share=0.1),
    ),
    "analyze": (
        verdicts_and_candidates,
        lambda path, out: analyze_table(str(path), out=str(out / "o")),
    ),
    "view": (verdicts_and_candidates, lambda path, out: write_view(str(path), out=str(out / "o"))),
    "export": (
        verdicts_and_candidates,
        lambda path, out: export(
            [str(path), str(path)], "table", str(out / "o.parquet"), root=".", **OPTIONS
        ),
    ),
    "candidates": (
        of_rows(
            {
                "task_id": "t{n}",
                "candidate_id": "c{n}",
                "response": ANSWER,
                "sample_index": 0,
                "generator": "m",
                "language": "cpp",
                "reasoning_tokens": 3,
                "finish_reason": "stop",
            }
        ),
        candidates,
    ),
    "candidates with code": (
        of_rows(
            {
                "level": 1,
                "problem_id": 1,
                "code": "class ModelNew: pass  # {n}",
                "language": "cpp",
                "sampling": "?",
            }
        ),
        candidates,
    ),
    "tasks": (TASKS, lambda path, out: tables.load(path)),
    "tasks by name": (
        of_rows({"name": "n{n}", "code": EMPTY, "level": 1}),
        lambda path, out: task_files.load(path),
    ),
    "KernelBench": (
        of_rows({"level": 1, "problem_id": 1, "name": "n{n}", "code": EMPTY}),
        lambda path, out: kernelbench.load(path, precision="fp16"),
    ),
    "KernelBook": (
        of_rows({"uuid": 1, "entry_point": "Model", "python_code": EMPTY}),
        lambda path, out: kernelbook.load(path),
    ),
    "responses": (
        of_rows(
            {
                "level": 1,
                "problem_id": 1,
                "sample_id": 0,
                "model": "m",
                "response": ANSWER,
                "language": "cpp",
            }
        ),
        lambda path, out: ResponsesFile(path),
    ),
}
COLUMNS = {
    "curate": """candidate_id task_id status reason level timing reference_operators generator
        sample_index reasoning_tokens schema_version turn custom_kernels custom_kernel_time_share
        finish_reason finish_guessed completion_tokens reasoning answer code language sampling""",
    "benchmark": """candidate_id task_id status level reason outputs_match timing correctness
        custom_kernels custom_kernel_time_share device generator sample_index""",
    "analyze": """candidate_id task_id status timing reasoning_tokens generator finish_reason
        sampling""",
    "view": """candidate_id task_id status reason device generator flags reasoning_tokens timing
        response reasoning answer code detail library_calls phases""",
    "export": "candidate_id task_id status reason device timing code generator verdict_key",
}
CASES = [
    (reader, column)
    for reader in READERS
    for column in (COLUMNS.get(reader) or "").split() or READERS[reader][0](None).column_names
]
QUICK = ("struct",)
REST = [kind for kind in VALUES if kind not in QUICK]
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The table of each reader as it should be."""
    found = {}
    for make, _ in READERS.values():
        if make not in found:
            found[make] = make(tmp_path_factory.mktemp("made"))
    return {name: found[make] for name, (make, _) in READERS.items()}


@pytest.mark.parametrize(("reader", "column"), CASES)
@pytest.mark.parametrize("kinds", [QUICK, pytest.param(REST, marks=pytest.mark.slow)], ids=len)
def test_a_column_of_any_type_is_read_or_refused(tmp_path, made, reader, column, kinds):
    table, read = made[reader], READERS[reader][1]
    for kind in kinds:
        values, wanted = VALUES[kind]
        folder = tmp_path / kind
        folder.mkdir()
        other = pa.array((values * (1 + table.num_rows // ROWS))[: table.num_rows], wanted)
        changed = table.drop_columns([column] if column in table.column_names else [])
        path = _file(folder / "given.parquet", changed.append_column(column, other))
        try:
            read(path, folder)
        except UsageError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000, kind
        except Exception as error:
            raise AssertionError(f"{kind}: {type(error).__name__}: {error}") from error


def one(values, kind):
    return pl.from_arrow(pa.table({"given": pa.array(values, kind)}))


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize(
    "wanted", ["status", "speedup", "turn", "flags", "timing", "outputs_match"]
)
def test_what_is_read_has_the_wanted_kind(kind, wanted):
    """The reader itself, for every kind of column that the software knows."""
    asked = columns_of(VERDICTS) | columns_of(CANDIDATES) | {"speedup": pl.Float64()}
    frame = one(*VALUES[kind])
    try:
        read = typed(frame, "a/table.parquet", {"given": asked[wanted]})
    except UsageError as error:
        said = str(error)
        assert re.match(r"a/table\.parquet: the column given\S* holds \w.*, not [A-Z]", said), said
        return
    found = read.schema["given"]
    assert read.height == ROWS
    assert found.is_numeric() == asked[wanted].is_numeric()
    assert found.base_type() == asked[wanted].base_type() or found.is_numeric()


def test_what_holds_the_same_in_another_type_is_read():
    texts, days = ["a", "b", "a", "b"], pa.dictionary(pa.int8(), pa.string())
    for kind, wanted, values, read in (
        (days, pl.String(), texts, texts),
        (pa.decimal128(5, 1), pl.Float64(), [Decimal("1.5")], [1.5]),
        (pa.float64(), pl.Int64(), [1.0, float("nan")], [1.0, None]),
        (pa.list_(pa.string(), 1), pl.List(pl.String()), [["a"], ["b"]], [["a"], ["b"]]),
        (pa.list_(days), pl.List(pl.String()), [["a", "b"], None], [["a", "b"], None]),
        (
            pa.struct({"speedup": pa.decimal128(5, 1)}),
            pl.Struct({"speedup": pl.Float64()}),
            [{"speedup": Decimal("1.5")}, None],
            [{"speedup": 1.5}, None],
        ),
    ):
        found = typed(one(values, kind), "a table", {"given": wanted})["given"]
        assert found.to_list() == read, wanted
    numbers = pl.DataFrame({"task_id": [7, 8]})
    assert typed(numbers, "a table")["task_id"].to_list() == ["7", "8"]
