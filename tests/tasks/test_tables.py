"""Tables that others wrote: every accepted set of columns, what identity a candidate gets, and what
is said of a table that does not do."""

import json
from pathlib import Path

import polars as pl
import pytest

from kernels_eval.errors import UsageError
from kernels_eval.records import Language
from tasks.sources import bundled, tables
from tasks.sources.stage import keep
from tasks.synthesis.tables import SCHEMA, CandidateTable
from tasks.tables import CANDIDATES
from tests.support.cases import cases
from tests.support.hub_server import hub_of
from tests.support.programs import EMPTY

CASES = cases("tables")

TASK = bundled.load()[0]
CODE = "class ModelNew: pass\n"
ANSWER = f"<think>hm</think>\nHere:\n```python\n{CODE}```\n"


def table(path, rows):
    pl.DataFrame(rows, infer_schema_length=None).write_parquet(path)
    return path


def written(tmp_path, rows, program=EMPTY, language=Language.CPP, name="c"):
    """The snapshot of a table of candidates; every task it names has the same program."""
    source = CandidateTable(table(tmp_path / f"{name}.parquet", rows))
    tasks = {
        task_id: TASK.model_copy(update={"task_id": task_id, "code": program})
        for task_id in source.asked_tasks(language)
    }
    upstream = keep(list(tasks.values()), str(tmp_path / "root"), {})
    return source.write(tasks, upstream, language)


def candidates(tmp_path, rows, *args, **options):
    return written(tmp_path, rows, *args, **options).open().read().to_dicts()


# -- tasks -----------------------------------------------------------------------------------------


def test_tasks_by_id_and_code_and_only_those_that_are_wanted(tmp_path):
    path = table(
        tmp_path / "t.parquet",
        [{"task_id": 7, "code": EMPTY, "more": 1}, {"task_id": 8, "code": "broken("}],
    )
    (task,) = tables.load(path, {"7"})
    assert (task.task_id, task.name, task.code, task.entry_point) == ("7", "7", EMPTY, "Model")
    with pytest.raises(UsageError, match=r"row 1 \(8\) is not Python"):
        tables.load(path)


@pytest.mark.parametrize(
    "row, task_id",
    [
        ({"level": 1, "problem_id": 3, "name": "3_x"}, "kernelbench/L1/3"),
        ({"level": "level_1", "problem_id": "3"}, "kernelbench/L1/3"),
        (TASK.model_dump(), TASK.task_id),
        ({"name": "x"}, "user/x"),
    ],
)
def test_tasks_in_kernelbenchs_columns_and_in_ours(tmp_path, row, task_id):
    (task,) = tables.load(table(tmp_path / "t.parquet", [{"code": EMPTY} | row]))
    assert task.task_id == task_id and (task == TASK or task.code == EMPTY)


def test_tasks_of_folders_globs_and_source_files(tmp_path):
    for number in range(2):
        table(tmp_path / f"part-{number}.parquet", [{"task_id": f"t{number}", "code": EMPTY}])
    for location in (tmp_path, tmp_path / "part-*.parquet"):
        assert [task.task_id for task in tables.load(location)] == ["t0", "t1"]
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text(EMPTY)
    assert [task.task_id for task in tables.load(tmp_path / "code")] == ["user/mine"]


def test_one_task_has_one_program(tmp_path):
    path, one = tmp_path / "t.parquet", {"task_id": "t", "code": EMPTY}
    assert len(tables.load(table(path, [one, one]))) == 1
    with pytest.raises(UsageError, match="gives task 't' a second program"):
        tables.load(table(path, [one, one | {"code": EMPTY + "#"}]))


# -- candidates ------------------------------------------------------------------------------------


def test_code_is_taken_as_it_is_and_responses_are_parsed(tmp_path):
    for name, case in CASES["code_and_responses"].items():
        rows = candidates(tmp_path, case["rows"], name=name)
        assert [list(map(row.get, case["columns"])) for row in rows] == case["found"]


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
        *candidates(tmp_path, [base], EMPTY + "#", name="5"),
    ]
    ids = {row["candidate_id"] for row in others}
    assert len(ids) == 3 and known["candidate_id"] not in ids
    same = candidates(tmp_path, [{"task_id": "t", "code": CODE}] * 3, name="6")
    assert (
        len({row["candidate_id"] for row in same}) == 3
    )  # three samples that say the same are three candidates


def test_the_same_table_is_the_same_snapshot_and_an_unfinished_one_is_gone_on_with(tmp_path):
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
    def source(*languages):
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


@pytest.mark.parametrize("rows, said", CASES["what_cannot_be_used_is_one_error_that_names_it"])
def test_what_cannot_be_used_is_one_error_that_names_it(tmp_path, rows, said):
    with pytest.raises(UsageError, match=said) as caught:
        written(tmp_path, rows)
    assert caught.value.hint and "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path):
    (tmp_path / "x.parquet").write_text("not parquet")
    with pytest.raises(UsageError, match="cannot read .*x.parquet: it is text"):
        CandidateTable(tmp_path / "x.parquet")
    with pytest.raises(UsageError, match="gone.parquet does not exist"):
        CandidateTable(tmp_path / "gone.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no candidate .read are FILE.py"):
        CandidateTable(tmp_path / "empty")
    with pytest.raises(UsageError, match="has no rows"):
        pl.DataFrame(schema={"task_id": pl.String, "code": pl.String}).write_parquet(
            tmp_path / "none.parquet"
        )
        CandidateTable(tmp_path / "none.parquet").language(None)


def test_text_of_others_is_harmless_in_a_message():
    assert tables.shown("a\x1b[31m\nb") == "a?[31m?b"
    assert len(tables.shown("x" * 999)) == 200


# -- what people have ------------------------------------------------------------------------------

CUDA = "SOURCE = '__global__ void k() {}'\n"
RUN = "level_1_problem_{}_sample_{}_kernel.py"


def read(location, language=Language.CPP):
    """Task, sample, model and code of each candidate of a place, as `write` makes them."""
    source = CandidateTable(location)
    tasks = {
        task_id: TASK.model_copy(update={"task_id": task_id})
        for task_id in source.asked_tasks(language)
    }
    names = ("task_id", "sample_index", "generator", "code")
    rows = source._candidates(tasks, language)
    return [tuple(row[name] for name in names) for row in rows]


def test_a_run_of_kernelbench(tmp_path):
    """Tasks by number, the model by the run's own note; prompts and other files are left out."""
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    for problem, sample in ((3, 1), (10, 0), (3, 0)):
        (run / RUN.format(problem, sample)).write_text(CODE)
    (run / "correct_level_2_problem_5.py").write_text(CODE)
    (run / "level_1_problem_3_sample_0_prompt.txt").write_text("write a kernel")
    (run / "helper.py").write_text("x = 1\n")
    found = [
        ("kernelbench/L1/10", 0, "mine", CODE),
        ("kernelbench/L1/3", 0, "mine", CODE),
        ("kernelbench/L1/3", 1, "mine", CODE),
        ("kernelbench/L2/5", 0, "mine", CODE),
    ]
    assert sorted(read(run)) == found
    (run / "generation_config.yaml").write_text("run_name: mine\nmodel_name: 'Qwen/QwQ-32B'\n")
    assert {row[2] for row in read(run)} == {"Qwen/QwQ-32B"}
    assert CandidateTable(run, "other")._model == "other"


def test_folders_of_python_files(tmp_path):
    for name in ("softmax", "gelu_sample_2", "_draft"):
        (tmp_path / f"{name}.py").write_text(CODE)
    (tmp_path / "level2").mkdir()
    (tmp_path / "level2" / "5_Conv.py").write_text(CODE)
    model = tmp_path.name
    assert read(tmp_path) == [
        ("gelu", 2, model, CODE),
        ("kernelbench/L2/5", 0, model, CODE),
        ("softmax", 0, model, CODE),
    ]
    assert read(tmp_path / "softmax.py") == [("softmax", 0, "softmax", CODE)]


HAVE = {
    "a folder a task": [("softmax/candidate.py", "softmax", 0), ("gelu/sample_2.py", "gelu", 2)],
    "a folder a task, by numbers": [("level1/3_Softmax/kernel.py", "kernelbench/L1/3", 0)],
    "a wrapped folder": [("kernels/softmax.py", "softmax", 0), ("kernels/gelu.py", "gelu", 0)],
    "a wrapped level": [("run/level2/5_Conv.py", "kernelbench/L2/5", 0)],
    "problems of a level": [("level1/problem_10_kernel.py", "kernelbench/L1/10", 0)],
    "a problem a folder": [("level1/problem_7/0.py", "kernelbench/L1/7", 0)],
    "answers as text": [("softmax_sample_1.txt", "softmax", 1), ("gelu.txt", "gelu", 0)],
}
BESIDE = {
    "softmax_prompt.txt": "write one",
    "results.jsonl": '{"task": "softmax", "correct": true}\n',
    "eval_results.json": "{}",
    "__pycache__/x.py": "x",
}


@pytest.mark.parametrize("name", HAVE)
@pytest.mark.parametrize("beside", [{}, BESIDE])
def test_run_folders_as_people_have_them(tmp_path, name, beside):
    files = HAVE[name]
    as_text = files[0][0].endswith(".txt")
    for place, text in {**beside, **{file: CODE for file, *_ in files}}.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(f"```python\n{text}```" if place.endswith(".txt") else text)
    if as_text and beside:
        (tmp_path / "results.jsonl").unlink()  # a table without candidates is no folder of text
    assert [row[:2] for row in read(tmp_path)] == sorted((task, n) for _, task, n in files)
    assert {row[3].strip() for row in read(tmp_path)} == {CODE.strip()}


def test_a_level_alone_and_a_level_that_a_note_tells(tmp_path):
    level, run = tmp_path / "level3", tmp_path / "run"
    for folder in (level, run):
        folder.mkdir()
    (level / "5_Conv.py").write_text(CODE)
    assert [row[0] for row in read(level)] == ["kernelbench/L3/5"]
    (run / "problem_10_kernel.py").write_text(CODE)
    assert [row[0] for row in read(run)] == ["10"], "the tasks may say which"
    (run / "generation_config.yaml").write_text("level: 2\n")
    assert [row[0] for row in read(run)] == ["kernelbench/L2/10"]


def test_scores_without_kernels_say_what_can_be_read(tmp_path):
    (tmp_path / "eval_results.json").write_text("{}")
    with pytest.raises(UsageError, match="holds scores .* but no kernels.*TASK/FILE.py"):
        CandidateTable(tmp_path)


ROWS = [
    {"level": "1", "problem": 3, "kernel": CODE, "model_name": "Q", "sample_id": 4},
    {"level": 1, "problem": "7", "kernel": f"```python\n{CODE}```", "model_name": "Q"},
]


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson", "csv", "parquet", "folder"])
def test_the_same_rows_in_every_form_and_by_other_names(tmp_path, suffix):
    """Other tools' names of the columns, numbers as text, code in a fence, U+2028 in a string."""
    place = tmp_path / ("rows.jsonl" if suffix == "folder" else f"rows.{suffix}")
    frame = pl.DataFrame(ROWS, infer_schema_length=None, strict=False)
    if suffix == "csv":
        frame.write_csv(place)
    elif suffix == "parquet":
        frame.write_parquet(place)
    else:
        more = ROWS[0] | {"note": "a\u2028b"}
        place.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in (more, ROWS[1])))
    found = [("kernelbench/L1/3", 4, "Q", CODE), ("kernelbench/L1/7", 0, "Q", CODE)]
    assert read(tmp_path if suffix == "folder" else place) == found


def test_the_minimal_table_is_named_after_its_file(tmp_path):
    path = tmp_path / "answers.csv"
    path.write_text('task_id,code\nt,"class ModelNew: pass\n"\n')
    assert read(path) == [("t", 0, "answers", CODE)]


def test_a_data_set_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"level": 1, "problem_id": 3, "response": ANSWER}]
    with hub_of(monkeypatch, tmp_path) as server:
        server.keep("c" * 40, train=rows, test=rows * 2)
        found = ("kernelbench/L1/3", 0, "kernels", CODE)
        assert read("me/kernels") == [found]
        assert [row[0] for row in read("me/kernels:test")] == ["kernelbench/L1/3"] * 2
    (tmp_path / "me").mkdir()
    table(tmp_path / "me" / "kernels", [{"task_id": "here", "code": CODE}])
    assert read("me/kernels") == [("here", 0, "kernels", CODE)]  # what is here wins
    with pytest.raises(UsageError, match="me/kernel does not exist"):
        CandidateTable("me/kernel")


def test_tasks_of_a_level_a_checkout_and_lines_and_by_their_names(tmp_path):
    level = tmp_path / "repository" / "KernelBench" / "level1"
    level.mkdir(parents=True)
    (level / "3_Softmax.py").write_text(EMPTY)
    (tmp_path / "t.jsonl").write_text(
        json.dumps({"level": 1, "problem_id": 3, "name": "3_Softmax", "code": EMPTY})
    )
    for place in (level, level.parent, level.parent.parent, tmp_path / "t.jsonl"):
        (task,) = tables.load(place, {"kernelbench/L1/3"})
        assert (task.task_id, task.level) == ("kernelbench/L1/3", 1)
        assert tables.load(place, {"3_Softmax"}) == [task]
        assert tables.load(place, {"other"}) == []


def test_the_language_of_rows_that_name_none_is_that_of_their_source(tmp_path):
    def source(*codes):
        rows = [{"task_id": "t", "code": code} for code in codes]
        return CandidateTable(table(tmp_path / "l.parquet", rows))

    cpp, triton = "load_inline(cpp_sources=x)\n", "import triton\n@triton.jit\n"
    assert source(CUDA, CODE, cpp).language(None) is Language.CUDA
    assert source(CUDA, CODE, cpp).asked_tasks(Language.CUDA) == {"t": 3}  # plain torch and C++ too
    assert source(cpp, CODE).language(None) is source(CODE).language(None) is Language.CPP
    assert source(triton, CUDA).asked_tasks(Language.TRITON) == {"t": 1}
    with pytest.raises(UsageError, match=r"2 languages: cuda \(1\), triton \(1\).*--language"):
        source(triton, CUDA).language(None)
    for codes, asked in (((CUDA, CODE), "cpp"), ((cpp,), "cuda"), ((triton,), "cuda")):
        with pytest.raises(UsageError, match=f"holds no {asked} candidate.*leave out --language"):
            source(*codes).language(Language(asked))
    answer = f"<think>__global__ void</think>\n```python\n{triton}class ModelNew: pass\n```"
    rows = [{"task_id": "t", "response": answer}, {"task_id": "t", "response": "__global__"}]
    assert CandidateTable(table(tmp_path / "r.parquet", rows)).language(None) is Language.TRITON
