"""Tables that others wrote: every accepted set of columns, what identity a candidate gets, and what
is said of a table that does not do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from kernels_eval.errors import UsageError
from kernels_eval.records import Language
from tasks.sources import bundled, tables
from tasks.sources.stage import keep
from tasks.store.snapshot import SnapshotRef
from tasks.synthesis.tables import SCHEMA, CandidateTable
from tasks.tables import CANDIDATES
from tests.support.cases import cases

CASES = cases("tables")

TASK = bundled.load()[0]
PROGRAM = "class Model: pass\ndef get_inputs(): return []\ndef get_init_inputs(): return []\n"
CODE = "class ModelNew: pass\n"
ANSWER = f"<think>hm</think>\nHere:\n```python\n{CODE}```\n"


def table(path: Path, rows: list[dict]) -> Path:
    pl.DataFrame(rows, infer_schema_length=None).write_parquet(path)
    return path


def written(
    tmp_path: Path,
    rows: list[dict],
    program: str = PROGRAM,
    language: Language = Language.CPP,
    name: str = "c",
) -> SnapshotRef:
    """The snapshot of a table of candidates; every task it names has the same program."""
    source = CandidateTable(table(tmp_path / f"{name}.parquet", rows))
    tasks = {
        task_id: TASK.model_copy(update={"task_id": task_id, "code": program})
        for task_id in source.asked_tasks(language)
    }
    return source.write(
        str(tmp_path / "root"),
        tasks,
        keep(list(tasks.values()), str(tmp_path / "root"), {}),
        language,
    )


def candidates(tmp_path: Path, rows: list[dict], *args: Any, **options: Any) -> list[dict]:
    return written(tmp_path, rows, *args, **options).open().read().to_dicts()


# -- tasks -----------------------------------------------------------------------------------------


def test_tasks_by_id_and_code_and_only_those_that_are_wanted(tmp_path):
    path = table(
        tmp_path / "t.parquet",
        [{"task_id": 7, "code": PROGRAM, "more": 1}, {"task_id": 8, "code": "broken("}],
    )
    (task,) = tables.load(path, {"7"})
    assert (task.task_id, task.name, task.code, task.entry_point) == ("7", "7", PROGRAM, "Model")
    with pytest.raises(UsageError, match=r"row 1 \(8\) is not Python"):
        tables.load(path)


@pytest.mark.parametrize(
    ("row", "task_id"),
    [
        ({"level": 1, "problem_id": 3, "name": "3_x"}, "kernelbench/L1/3"),
        (TASK.model_dump(), TASK.task_id),
        ({"name": "x"}, "user/x"),
    ],
)
def test_tasks_in_kernelbenchs_columns_and_in_ours(tmp_path, row, task_id):
    (task,) = tables.load(table(tmp_path / "t.parquet", [{"code": PROGRAM} | row]))
    assert task.task_id == task_id and (task == TASK or task.code == PROGRAM)


def test_tasks_of_folders_globs_and_source_files(tmp_path):
    for number in range(2):
        table(tmp_path / f"part-{number}.parquet", [{"task_id": f"t{number}", "code": PROGRAM}])
    for location in (tmp_path, tmp_path / "part-*.parquet"):
        assert [task.task_id for task in tables.load(location)] == ["t0", "t1"]
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text(PROGRAM)
    assert [task.task_id for task in tables.load(tmp_path / "code")] == ["user/mine"]


def test_one_task_has_one_program(tmp_path):
    path, one = tmp_path / "t.parquet", {"task_id": "t", "code": PROGRAM}
    assert len(tables.load(table(path, [one, one]))) == 1
    with pytest.raises(UsageError, match="gives task 't' a second program"):
        tables.load(table(path, [one, one | {"code": PROGRAM + "#"}]))


# -- candidates ------------------------------------------------------------------------------------


def test_code_is_taken_as_it_is_and_responses_are_parsed(tmp_path):
    for name, case in CASES["code_and_responses"].items():
        rows = candidates(tmp_path, case["rows"], name=name)
        assert [list(map(row.get, case["columns"])) for row in rows] == case["found"]


def test_recorded_responses_to_kernelbench(tmp_path):
    rows = [
        {
            "level": 2,
            "problem_id": 5,
            "sample_id": 3,
            "model": "QwQ",
            "response": ANSWER,
            "language": "CUDA",
        }
    ]
    (row,) = candidates(tmp_path, rows, language=Language.CUDA)
    assert (row["task_id"], row["sample_index"], row["generator"], row["language"]) == (
        "kernelbench/L2/5",
        3,
        "QwQ",
        "cuda",
    )


def test_our_own_snapshot_schema_comes_back(tmp_path):
    ref = written(tmp_path, [{"task_id": "t", "response": ANSWER}])
    source = CandidateTable(ref.open().path)  # a folder of part files
    assert set(CANDIDATES.names) < set(SCHEMA.names) and source.language(None) is Language.CPP
    before = ref.open().read().to_dicts()[0]
    (after,) = candidates(tmp_path, [before], name="again")
    assert after["given_id"] == before["candidate_id"]
    assert {name: after[name] for name in ("code", "response", "reasoning", "sampling")} == {
        name: before[name] for name in ("code", "response", "reasoning", "sampling")
    }


def test_identity_is_the_content_and_not_the_name_or_the_place(tmp_path):
    """What verdicts are reused by. A program or a code that changed under an old id is another
    candidate."""
    base = {"task_id": "t", "candidate_id": "a", "code": CODE}
    (known,) = candidates(tmp_path, [base], name="1")
    moved = candidates(tmp_path, [{**base, "candidate_id": "b"}, base], name="2")
    assert moved[1]["candidate_id"] == known["candidate_id"] != moved[0]["candidate_id"]
    others = [
        *candidates(tmp_path, [{**base, "code": CODE + "#"}], name="3"),
        *candidates(tmp_path, [{**base, "task_id": "u"}], name="4"),
        *candidates(tmp_path, [base], PROGRAM + "#", name="5"),
    ]
    ids = {row["candidate_id"] for row in others}
    assert len(ids) == 3 and known["candidate_id"] not in ids
    same = candidates(tmp_path, [{"task_id": "t", "code": CODE}] * 3, name="6")
    assert (
        len({row["candidate_id"] for row in same}) == 3
    )  # three samples that say the same are three candidates


def test_the_same_table_is_the_same_snapshot_and_an_unfinished_one_is_gone_on_with(
    tmp_path,
):
    rows = [{"task_id": "t", "code": CODE + f"# {number}\n"} for number in range(5)]
    first = written(tmp_path, rows)
    assert written(tmp_path, rows) == first
    whole = first.open().read()
    snapshot = first.open()
    Path(snapshot.path, "manifest.json").unlink()
    (part,) = snapshot.parts()
    pl.read_parquet(part).head(2).write_parquet(part)
    assert written(tmp_path, rows) == first and first.open().read().equals(whole)


def test_languages(tmp_path):
    def source(*languages: str | None) -> CandidateTable:
        return CandidateTable(
            table(
                tmp_path / "l.parquet",
                [{"task_id": "t", "code": CODE, "language": name} for name in languages],
            )
        )

    assert source("cuda", "cuda").language(None) is Language.CUDA
    assert source("cuda", "cpp").language(Language.CUDA) is Language.CUDA
    assert source("cuda", "cpp", "cuda").asked_tasks(Language.CUDA) == {"t": 2}
    assert source(None).language(Language.TRITON) is Language.TRITON
    with pytest.raises(UsageError, match=r"2 languages: cpp \(1\), cuda \(2\).*--language"):
        source("cuda", "cpp", "cuda").language(None)
    with pytest.raises(UsageError, match="holds no cpp candidate"):
        source("cuda").language(Language.CPP)
    with pytest.raises(UsageError, match="row 1: there is no language 'rust'"):
        source("cpp", "rust").language(None)


@pytest.mark.parametrize(
    ("rows", "said"),
    CASES["what_cannot_be_used_is_one_error_that_names_it"],
)
def test_what_cannot_be_used_is_one_error_that_names_it(tmp_path, rows, said):
    with pytest.raises(UsageError, match=said) as caught:
        written(tmp_path, rows)
    assert caught.value.hint and "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path):
    (tmp_path / "x.parquet").write_text("not parquet")
    with pytest.raises(UsageError, match="cannot read .*x.parquet as Parquet"):
        CandidateTable(tmp_path / "x.parquet")
    with pytest.raises(UsageError, match="gone.parquet does not exist"):
        CandidateTable(tmp_path / "gone.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no Parquet file"):
        CandidateTable(tmp_path / "empty")
    with pytest.raises(UsageError, match="holds no row"):
        pl.DataFrame(schema={"task_id": pl.String, "code": pl.String}).write_parquet(
            tmp_path / "none.parquet"
        )
        CandidateTable(tmp_path / "none.parquet").language(None)


def test_text_of_others_is_harmless_in_a_message():
    assert tables.shown("a\x1b[31m\nb") == "a?[31m?b"
    assert len(tables.shown("x" * 999)) == 200
