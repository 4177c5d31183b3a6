"""`concur curate` as a user runs it: files and snapshots in, tables, JSON and training sets out;
and the strategies that ship."""

import json
import tomllib
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pyarrow as pa
import pytest

import flows
from flows.cli.pages import of_snapshot
from flows.config import load_strategy, shipped_dir
from flows.curate import Choice, curate_table
from flows.refresh import summary_rows
from tasks.curation import stage
from tasks.curation.config import STRATEGY_NAMES, CurationConfig
from tasks.store.snapshot import Snapshot
from tasks.tables import CANDIDATES, CURATED, TASKS, TRACE_FLAGS, VERDICTS, WORKLOADS
from tests.support.cases import cases
from tests.support.samples import FUSION, SINGLE, finished, frame, line_of, sample
from tests.support.typed import refused, typed

CASES = cases("flows")

ROWS = [
    sample(
        f"t{task}",
        index,
        100 + 50 * (index if task % 2 else 2 - index),
        1.0 + index + task / 10,
        ops=SINGLE if task % 3 == 0 else FUSION,
    )
    for task in range(12)
    for index in range(3)
] + [sample("t0", 9, 5, None, status="incorrect")]
SHIPPED = sorted(shipped_dir("strategies").glob("*.yaml"))


def curate(*arguments):
    return typed(" ".join(map(str, ("curate", *arguments))))


def unusable(*arguments):
    return refused(" ".join(map(str, ("curate", *arguments))))


@pytest.fixture
def table(tmp_path):
    frame(*ROWS).write_parquet(tmp_path / "both.parquet")
    return tmp_path / "both.parquet"


@pytest.fixture
def root(tmp_path):
    """Finished snapshots of tasks, candidates and verdicts, as the line leaves them."""
    store = tmp_path / "store"
    ids = sorted({row["task_id"] for row in ROWS})
    tasks = [
        {"task_id": name, "name": name.upper(), "code": f"# {name}", "entry_point": "Model"}
        for name in ids
    ]
    texts = [
        row | {"answer": f"answer {row['candidate_id']}", "code": "pass", "language": "cpp"}
        for row in ROWS
    ]
    finished(store, "tasks", tasks, TASKS, "t")
    finished(store, "synthesis", texts, CANDIDATES, "c", ["t"])
    finished(store, "verification", texts, VERDICTS, "v", ["c", "t"])
    return store


def curated_json(*arguments):
    return json.loads(curate(*arguments, "--json"))


def test_samples_that_were_only_screened_are_counted_and_cautioned_of(tmp_path, caplog):
    levels = ("screen", "confirm")
    frame(*(row | {"level": levels[row["sample_index"] % 2]} for row in ROWS)).write_parquet(
        tmp_path / "both.parquet"
    )
    found = curate_table(Choice(str(tmp_path / "both.parquet")))["sets"][0]
    assert 0 < found["unconfirmed"] < found["samples"]
    said = f"{found['unconfirmed']} of {found['samples']} samples of concur were only screened"
    assert [said in record.message for record in caplog.records] == [True]


def test_all_strategies_are_a_short_table_and_one_caution_that_names_them(tmp_path, caplog):
    frame(*(row | {"level": "screen"} for row in ROWS)).write_parquet(tmp_path / "both.parquet")
    page = curate(f"--verdicts {tmp_path / 'both.parquet'} --strategy all")
    (warned,) = [each.message for each in caplog.records if "screened" in each.message]
    assert "concur" in warned and "min_length" in warned
    assert all(name in page for name in ("concur", "min_length", "samples", "kept 8 of 36 correct"))
    assert "of samples" not in page and "trace flags" not in page and "--json" in page


def test_a_strategy_that_takes_nothing_says_why(tmp_path):
    frame(*(sample(f"t{n}", 0, 9, 2.0, ops=FUSION) for n in range(3))).write_parquet(
        tmp_path / "both.parquet"
    )
    names = "concur,concur_two_correct"
    data = curated_json(f"--verdicts {tmp_path / 'both.parquet'} --strategy {names}")
    first, second = data["sets"]
    assert first["samples"] == 3 and "problem" not in first
    assert second["samples"] == 0 and "3: it is its task's only correct" in second["problem"]


def test_a_refresh_says_why_correct_answers_are_left_out(tmp_path):
    rows = [sample("t", 0, 9, 3.0), sample("t", 1, 19, 2.0), sample("t", 2, 1, 9, status="no_code")]
    made = SimpleNamespace(
        snapshots={"curated": stage.run(line_of(tmp_path, rows), CurationConfig())}
    )
    (row,) = summary_rows(made)
    why = "kept 1 of 2 correct; 1: a correct sample of its task has shorter reasoning"
    assert (row["counts"], row["choice"]) == ("concise_and_fast 1", why)


def test_kept_samples_slower_than_their_reference_are_counted_with_the_slowest(tmp_path, caplog):
    rows = [sample("a", 0, 9, 0.0042), sample("b", 0, 9, 0.5), sample("c", 0, 9, 2.0)]
    made = stage.run(line_of(tmp_path, rows), CurationConfig())
    slower = "2 of 3 kept samples are slower than the reference, down to 0.0042 times its speed"
    assert slower in caplog.text and "require_speedup_lower_above=1" in caplog.text
    (row,) = summary_rows(SimpleNamespace(snapshots={"curated": made}))
    assert row["choice"] == f"kept 3 of 3 correct; {slower}"
    page = of_snapshot(
        {"path": made.open().path, "finished": True, "rows": [], "columns": []}
        | {"manifest": made.open().manifest}
    )
    assert slower in page and "kept 3 of 3 correct" in page


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_strategy_is_its_name_and_says_what_it_controls_for(path):
    config = load_strategy(path.stem)
    assert config.strategy == path.stem and load_strategy(str(path)) == config
    assert config == CurationConfig(
        strategy=path.stem
    )  # `--set curation.strategy=NAME` of a run means the same
    assert path.read_text(encoding="utf-8").startswith("# ")


def test_the_files_are_the_names_and_travel_with_the_wheel():
    assert {path.stem for path in SHIPPED} == set(STRATEGY_NAMES)
    project = tomllib.loads(
        (Path(flows.__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert (
        project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"][
            "deployments/strategies"
        ]
        == "flows/strategies"
    )


def test_a_file_with_verdicts_and_candidates(table):
    data = curated_json(f"--verdicts {table}")
    (found,) = data["sets"]
    places = {"verdicts": "", "candidates": ""}
    assert data["source"] | places == places | {
        "rows": 37,
        "correct": 36,
        "operators_from": {"verdict": 36},
    }
    assert (
        found["strategy"] == "concur"
        and sum(found["criterion_counts"].values()) == found["samples"] > 0
    )
    assert sum(found["composition"].values()) == found["samples"]
    assert found["config"]["min_speedup"] == 5.0


def test_all_strategies_at_several_sizes_into_a_directory(table, tmp_path):
    out = tmp_path / "sets"
    page = curate(f"--verdicts {table} --strategy all --size 3,6 --out {out}")
    names = {path.name for path in out.iterdir()}
    drawn = {"composition.md", "curation.json"}
    sets = {f"{name}-{size}.parquet" for name in STRATEGY_NAMES for size in (3, 6)}
    decided = {name.replace(".parquet", ".decisions.parquet") for name in sets}
    assert names == sets | decided | drawn
    assert pl.read_parquet(out / "random-3.decisions.parquet").height == len(ROWS)
    assert all(name in page for name in STRATEGY_NAMES)
    for each in json.loads((out / "curation.json").read_text())["sets"]:
        rows = pl.read_parquet(each["file"])
        assert rows.columns == CURATED.names and rows.height == each["samples"] <= each["size"]
    moved = pl.read_parquet(out / "shuffled_reasoning-6.parquet")
    assert (moved["reasoning"] == "thoughts of " + moved["reasoning_from"]).all()
    assert (moved["reasoning_from"] != moved["candidate_id"]).all()
    plain = pl.read_parquet(out / "concur-6.parquet")
    assert plain["reasoning_from"].null_count() == 6
    assert (plain["reasoning"] == "thoughts of " + plain["candidate_id"]).all()


def test_snapshots_are_found_under_a_root_with_their_texts_and_tasks(root, tmp_path):
    found = curated_json(f"--root {root} --strategy shuffled_reasoning --out {tmp_path}/sets")
    rows = pl.read_parquet(tmp_path / "sets/shuffled_reasoning.parquet")
    for row in rows.iter_rows(named=True):
        assert (row["task_name"], row["task_code"], row["language"]) == (
            row["task_id"].upper(),
            f"# {row['task_id']}",
            "cpp",
        )
        assert row["answer"] == f"answer {row['candidate_id']}"
        assert row["reasoning"] == f"thoughts of {row['reasoning_from']}"
        assert row["speedup"] > 0 and row["operator_kind"] in ("single_operator", "fusion")
    places = f"--verdicts {root}/verification/v --candidates {root}/synthesis/c"
    by_path = curated_json(f"{places} --strategy shuffled_reasoning")
    sets = [each["sets"][0] for each in (found, by_path)]
    assert sets[0]["criterion_counts"] == sets[1]["criterion_counts"]
    assert sets[0]["median_reasoning_tokens"] == sets[1]["median_reasoning_tokens"]


def test_the_verdicts_of_the_newest_training_set_go_before_newer_ones(root):
    """A benchmark's answers are verified too, after the training set was made."""
    curation = finished(root, "curation", [], CURATED, "x", ["v", "c", "t"]).open()
    late = finished(root, "verification", ROWS[:3], VERDICTS, "late", ["c", "t"]).open()
    manifest = Path(late.path) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"created_at": "2', '"created_at": "3'))
    assert curated_json(f"--root {root}")["source"]["rows"] == len(ROWS)
    (Path(curation.path) / "manifest.json").unlink()
    assert curated_json(f"--root {root}")["source"]["rows"] == 3


def test_parts_of_older_versions_lack_columns(root):
    """A later turn stays out although the first part of the snapshot was written before there were
    turns."""
    older = Snapshot(str(root), "synthesis", "old")
    older.append(
        ROWS[:3], pa.schema([field for field in CANDIDATES if field.name not in ("turn", "parent")])
    )
    older.append([row | {"turn": 2, "parent": "x"} for row in ROWS[3:]], CANDIDATES)
    older.publish(config={})
    places = f"--verdicts {root}/verification/v --candidates {older.path}"
    (found,) = curated_json(f"{places} --strategy random --size 99")["sets"]
    assert found["samples"] == 1
    assert set(older.read(columns=["candidate_id", "turn"])["turn"][:4]) == {None, 2}


def test_explain_says_why_on_a_terminal_and_as_json(table):
    page = curate(f"--verdicts {table} --explain t0-9 --strategy concur --strategy random --size 2")
    assert "its verdict is not correct" in page and "random" in page
    both = curated_json(f"--verdicts {table} --explain t1-1 --strategy concur,random")
    assert [row["strategy"] for row in both["explanations"]] == ["concur", "random"]
    (said,) = curated_json(f"--verdicts {table} --explain t1-1")["explanations"]
    assert said["candidate_id"] == "t1-1"
    assert said["taken"] is False
    assert (said["why_not"], said["shortest_tokens"]) == ("longer", 100)
    assert curated_json(f"--verdicts {table} --explain t0-9")["explanations"]
    for name, count in (("nobody", "no"), ("t1-", "3")):
        problem = unusable(f"--verdicts {table} --explain {name}")
        assert f"error: {count} candidates of 37 begin with '{name}'" in problem


def test_keys_are_set_as_everywhere(table):
    low = curated_json(f"--verdicts {table} --set min_speedup=1")["sets"][0]
    assert low["config"]["min_speedup"] == 1.0 and low["criterion_counts"]["high_speedup"] > 0
    assert "did you mean min_speedup?" in unusable(f"--verdicts {table} --set min_speedups=1")


def test_a_strategy_file_of_the_users_own(table, tmp_path):
    (tmp_path / "mine.yaml").write_text("strategy: speedup\nmax_per_task: null\nsize: 36\n")
    (found,) = curated_json(f"--verdicts {table} --strategy {tmp_path}/mine.yaml")["sets"]
    assert found["samples"] == 36 and found["tasks"] == 12
    both = f"--strategy speedup --strategy {tmp_path}/mine.yaml --out {tmp_path}/sets"
    assert "the same name" in unusable(f"--verdicts {table}", both)
    assert not (tmp_path / "sets").exists()


def test_operators_come_from_the_tasks_workloads_where_verdicts_name_none(root):
    rows = [row | {"reference_operators": []} for row in ROWS]
    silent = finished(root, "verification", rows, VERDICTS, "silent", ["c", "t"]).open()
    asked = f"--verdicts {silent.path} --strategy random --size 99"
    without = curated_json(asked)
    assert without["source"]["operators_from"] == {"unknown": 36}
    assert without["sets"][0]["composition"]["single_operator"] == 0
    counted = [{"task_id": f"t{n}", "operators": SINGLE if n % 2 else FUSION} for n in range(11)]
    finished(root, "workloads", counted, WORKLOADS, "w", ["t"])
    found = curated_json(asked)
    assert found["source"]["operators_from"] == {"unknown": 3, "workload": 33}
    assert found["sets"][0]["composition"] == {"single_operator": 5, "fusion": 7}
    assert "unknown 3, workload 33" in curate(asked)


def test_flags_of_traces_are_measured_where_no_refresh_has(table, root, tmp_path):
    loop = "You must keep the shape of the output and the type of the output. " * 30
    rows = [
        row | {"reasoning": loop if row["candidate_id"] == "t1-0" else "It is done."}
        for row in ROWS
    ]
    frame(*rows).write_parquet(tmp_path / "traces.parquet")
    asked = f"--verdicts {tmp_path}/traces.parquet --set exclude_flags=[repetitive,ends_in_loop]"
    (found,) = curated_json(asked)["sets"]
    assert found["trace_flags"]["left_out"] == 1
    assert found["trace_flags"]["correct"]["ends_in_loop"] == 1
    (said,) = curated_json(asked, "--explain t1-0")["explanations"]
    assert (said["taken"], said["why_not"]) == (False, "trace_flag")
    assert (
        curated_json(f"--verdicts {table}")["sets"][0]["trace_flags"] is None
    )  # no text is read for nothing
    frame(*rows).drop("reasoning").write_parquet(tmp_path / "lean.parquet")
    assert "was not measured" in unusable(
        f"--verdicts {tmp_path}/lean.parquet --set exclude_flags=[truncated]"
    )
    assert "exclude_flags.0 = 'repetition'" in unusable(
        f"--verdicts {table} --set exclude_flags=[repetition]"
    )

    by_root = f"--root {root} --strategy random --size 99 --set max_per_task=null"
    by_root += " --set exclude_flags=[truncated]"
    assert "every correct one has a trace flag" in unusable(
        by_root
    )  # measured here: "thoughts of t0-0" ends within its sentence
    kept = [
        {"candidate_id": row["candidate_id"], "trace_flags": []}
        for row in ROWS
        if row["status"] == "correct"
    ]
    finished(root, "trace-flags", kept, TRACE_FLAGS, "f", ["v", "c"])
    assert curated_json(by_root)["sets"][0]["samples"] == 12  # as the refresh has found them


@pytest.mark.parametrize("arguments, part", CASES["bad_curations"])
def test_what_cannot_be_used_is_one_line(table, arguments, part):
    assert part in unusable(f"--verdicts {table}", *arguments)


def test_places_that_cannot_be_read(table, root, tmp_path):
    (tmp_path / "text.parquet").write_text("no table")
    assert "cannot read" in unusable(f"--verdicts {tmp_path}/text.parquet")
    assert "no finished verification snapshot" in unusable(f"--root {tmp_path}/empty")
    assert "not a finished snapshot" in unusable(f"--verdicts {tmp_path}")
    frame(*ROWS).drop("reasoning_tokens").write_parquet(tmp_path / "lean.parquet")
    assert "reasoning_tokens" in unusable(f"--verdicts {tmp_path}/lean.parquet")
    frame(*ROWS).drop("candidate_id").write_parquet(tmp_path / "nameless.parquet")
    assert "needs the columns candidate_id" in unusable(f"--verdicts {tmp_path}/nameless.parquet")
    frame(sample("other", 0, 1, 1.0)).write_parquet(tmp_path / "other.parquet")
    assert "has its candidate in" in unusable(
        f"--verdicts {table} --candidates {tmp_path}/other.parquet"
    )
    frame(ROWS[-1]).write_parquet(tmp_path / "wrong.parquet")
    assert "curation took none of 1 candidate: none is correct" in unusable(
        f"--verdicts {tmp_path}/wrong.parquet --out {tmp_path}/sets"
    )
    assert not (tmp_path / "sets").exists()
