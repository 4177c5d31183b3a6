"""`concur benchmark`: verdicts on disk in, scores out; what they cannot support is null and said,
and bad tables are refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner

import flows
from flows.cli.main import main
from flows.lists import parsed_numbers
from flows.score import score_table
from kernels_eval.errors import UsageError
from kernels_eval.records import KernelTask
from tasks.scores import pass_at_k
from tasks.store.snapshot import Snapshot
from tasks.tables import CANDIDATES, VERDICTS
from tests.support.cases import cases

CASES = cases("flows")

ROOT = Path(flows.__file__).parent.parent
TASK = (
    "import torch\nclass Model(torch.nn.Module):\n    pass\ndef get_inputs():\n    return []\ndef"
    " get_init_inputs():\n    return []\n"
)
QUICK = {"resamples": 100}


def verdict(task_id, sample, speedup=None, **other):
    """Correct where a speedup is given (0: not timed), else a wrong output."""
    right = (
        {"status": "correct", "reason": "ok"}
        if speedup is not None
        else {"status": "incorrect", "reason": "wrong_output"}
    )
    facts = {
        "candidate_id": f"{task_id}#{sample}",
        "task_id": task_id,
        "sample_index": sample,
        "generator": "m",
        "device": "H200",
    }
    return (
        facts
        | right
        | {
            "timing": {"speedup": speedup} if speedup else None,
            "outputs_match": speedup is not None,
        }
        | other
    )


def table(path, rows):
    schema = {"timing": pl.Struct({"speedup": pl.Float64}), "outputs_match": pl.Boolean}
    pl.DataFrame(
        rows,
        schema_overrides={name: kind for name, kind in schema.items() if name in rows[0]},
        infer_schema_length=None,
    ).write_parquet(path)
    return str(path)


def value(data, metric, k, group="all", track="custom_kernel", **more):
    asked = {"k": k, "group": group, "track": track, **more}
    found = [
        row[metric]["value"]
        for row in data["scores"]
        if all(row[name] == wanted for name, wanted in asked.items())
    ]
    assert len(found) == 1, (asked, found)
    return found[0]


def rows_of_two_levels():
    """Level 1: one task right twice of four (speedups 2 and 0.5), one never. Level 2: one task
    right in all of four, speedup 4."""
    first = [
        verdict("kernelbench/L1/1", n, speed) for n, speed in enumerate((2.0, 0.5, None, None))
    ]
    second = [verdict("kernelbench/L1/2", n) for n in range(4)]
    return [*first, *second, *(verdict("kernelbench/L2/1", n, 4.0) for n in range(4))]


def test_scores_are_the_estimators_level_by_level(tmp_path):
    data = score_table(
        table(tmp_path / "v.parquet", rows_of_two_levels()), ks="1,2,10", ps="0,1", **QUICK
    )
    assert [group["group"] for group in data["groups"]] == ["all", "level 1", "level 2"]
    assert data["devices"] == ["H200"]
    assert value(data, "exec", 1) == pytest.approx((0.5 + 0 + 1) / 3)
    assert value(data, "exec", 2, "level 1") == pytest.approx(pass_at_k(4, 2, 2) / 2)
    assert value(data, "fast_1", 1, "level 1") == pytest.approx(1 / 8)
    assert value(data, "geometric_mean_speedup", 2, "level 1") == pytest.approx(1.0)
    assert value(data, "exec", 10) is None
    assert any("m: pass@10 needs 10 samples of each task" in note for note in data["notes"])
    row = data["scores"][0]
    assert (row["group"], row["k"]) == ("all", 1)
    assert row["exec"]["lower"] <= row["exec"]["value"] <= row["exec"]["upper"]
    assert row["tasks"] == 3
    assert row["samples"] == 12


def test_both_tracks_and_what_is_not_said(tmp_path):
    alien = {"status": "rejected", "reason": "no_custom_kernel", "timing": None}
    rows = [
        verdict("t", 0, 2.0),
        verdict("t", 1, None, **alien, outputs_match=True),
        verdict("t", 2, None, **alien, outputs_match=None),
    ]
    data = score_table(table(tmp_path / "v.parquet", rows), ks="1", ps="0", **QUICK)
    assert value(data, "exec", 1) == pytest.approx(1 / 3)
    assert value(data, "exec", 1, track="any") == pytest.approx(2 / 3)
    assert any(note.startswith("1 verdicts do not say whether outputs") for note in data["notes"])


def test_degenerate_tasks_are_scored_with_and_without(tmp_path):
    rows = [verdict("kernelbench/L2/80", 0, 9.0), verdict("kernelbench/L2/1", 0)]
    data = score_table(table(tmp_path / "v.parquet", rows), ks="1", **QUICK)
    assert value(data, "exec", 1, "level 2", degenerate="with") == 0.5
    assert value(data, "exec", 1, "level 2", degenerate="without") == 0.0
    assert (
        list(data["degenerate_tasks"])
        == ["kernelbench/L2/80"]
        == data["groups"][0]["degenerate_tasks"]
    )


def test_times_that_were_not_recorded_are_not_guessed(tmp_path):
    rows = [
        verdict("a", 0, 0.0),
        verdict("b", 0),
        verdict("a", 1, 2.0, generator="timed"),
        verdict("b", 1, generator="timed"),
    ]
    data = score_table(table(tmp_path / "v.parquet", rows), ks="1", ps="0,1", **QUICK)
    assert value(data, "exec", 1, model="m") == value(data, "fast_0", 1, model="m") == 0.5
    assert value(data, "fast_1", 1, model="m") is None
    assert value(data, "fast_1", 1, model="timed") == 0.5
    assert "m: no reference time was recorded." in data["notes"]


def test_a_model_that_left_tasks_out_is_named(tmp_path):
    rows = [
        verdict("a", 0, 1.0),
        verdict("b", 0),
        verdict("b", 1),
        verdict("a", 2, generator="other"),
    ]
    notes = score_table(table(tmp_path / "v.parquet", rows), ks="1", **QUICK)["notes"]
    assert "other has no sample on 1 of 2 tasks: its scores are of the others." in notes
    assert "m has 1 to 2 samples per task: pass@k needs k of every task." in notes


def test_tables_without_a_model_or_optional_columns_take_the_label(tmp_path):
    rows = CASES["bare_rows"]
    data = score_table(
        table(tmp_path / "v.parquet", rows), label="recorded elsewhere", ks="1", **QUICK
    )
    assert value(data, "exec", 1, model="recorded elsewhere") == 0.5 and data["devices"] == []
    assert (
        "These verdicts do not say whether a custom kernel did the work: both tracks are the same."
        in data["notes"]
    )


def test_levels_come_from_the_tasks(tmp_path):
    tasks = [
        KernelTask(task_id=name, name=name, code=TASK, level=level)
        for name, level in (("a", 1), ("b", 5))
    ]
    pl.DataFrame([task.model_dump() for task in tasks]).write_parquet(tmp_path / "t.parquet")
    verdicts = table(tmp_path / "v.parquet", [verdict("a", 0, 1.0), verdict("b", 0)])
    data = score_table(verdicts, tasks=str(tmp_path / "t.parquet"), ks="1", **QUICK)
    assert [group["group"] for group in data["groups"]] == ["all", "level 1", "level 5"]
    assert value(data, "exec", 1, "level 1") == 1.0
    with pytest.raises(UsageError, match="1 of 2 tasks are not in .*such as c"):
        score_table(
            table(tmp_path / "w.parquet", [verdict("a", 0), verdict("c", 0)]),
            tasks=str(tmp_path / "t.parquet"),
        )


@pytest.mark.parametrize(
    "rows, message, hint",
    [
        (
            [verdict("a", 0, 1.0), verdict("b", 0, device="A100")],
            r"verdicts of 2 devices are mixed: .*H200 \(1\)",
            "--device",
        ),
        (
            [verdict("a", 0), verdict("a", 0)],
            "1 candidates are there more than once, such as 'a#0'",
            "drop repeated rows",
        ),
        ([{"candidate_id": "a", "task_id": "t"}], "needs the columns status", "verify-batch"),
    ],
)
def test_bad_tables_are_refused(tmp_path, rows, message, hint):
    with pytest.raises(UsageError, match=message) as caught:
        score_table(table(tmp_path / "v.parquet", rows))
    assert hint in caught.value.hint


def test_one_of_several_devices_is_chosen(tmp_path):
    rows = [
        verdict("a", 0, 1.0),
        verdict("a", 1, device="A100"),
        verdict("a", 2, device=""),
        verdict("a", 3, device=None),
    ]
    path = table(tmp_path / "v.parquet", rows)
    assert value(score_table(path, device="H200", ks="1", **QUICK), "exec", 1) == pytest.approx(
        1 / 3
    ), "what needed no device counts"
    with pytest.raises(UsageError, match="no verdict of 'B200'") as caught:
        score_table(path, device="B200")
    assert "A100" in caught.value.hint


def test_snapshots_are_read_with_their_candidates(tmp_path):
    root = str(tmp_path)
    candidates, verdicts = (
        Snapshot(root, "synthesis", "c" * 32),
        Snapshot(root, "verification", "d" * 32),
    )
    candidates.append(
        [
            {"candidate_id": f"c{n}", "task_id": "t", "generator": "gen", "sample_index": n}
            for n in range(2)
        ],
        CANDIDATES,
    )
    candidates.publish(config={}, rows=2)
    timing = {"reference_ms": 2.0, "candidate_ms": 1.0, "speedup": 2.0}
    rows = [
        {
            "candidate_id": "c0",
            "task_id": "t",
            "status": "correct",
            "reason": "ok",
            "timing": timing,
            "device": "cpu",
        }
    ]
    rows += [{"candidate_id": "c1", "task_id": "t", "status": "timeout", "reason": "run"}]
    verdicts.append(rows, VERDICTS)
    verdicts.publish(config={}, upstream=["c" * 32], rows=2)
    data = score_table(root=root, ks="1", **QUICK)
    assert value(data, "fast_1.5", 1, model="gen") == 0.5 and data["devices"] == ["cpu"]


@pytest.mark.parametrize(
    "text, kind, least, found",
    [
        ("1,5,10", int, 1, [1, 5, 10]),
        (" 1, 0", int, 0, [1, 0]),
        ("0,0.5,0.5", float, 0, [0.0, 0.5]),
        *((text, int, 1, None) for text in ("", "0", "1,x", "1,,2", "1.5")),
        *((text, float, 0, None) for text in ("-1", "nan", "inf")),
    ],
)
def test_lists_of_numbers_are_read_strictly(text, kind, least, found):
    if found:
        assert parsed_numbers(text, "--k", kind, least, "1") == found
        return
    with pytest.raises(UsageError, match="--k .* is not a list of numbers"):
        parsed_numbers(text, "--k", kind, least, "1")


def test_the_command_prints_a_table_or_one_json_object(tmp_path):
    path = table(tmp_path / "v.parquet", rows_of_two_levels())
    done = CliRunner().invoke(
        main, ["benchmark", "--verdicts", path, "--k", "1", "--resamples", "100"]
    )
    assert done.exit_code == 0, done.output
    assert "level 2" in done.output and "0.5" in done.output and "H200" in done.output
    command = [
        sys.executable,
        "-m",
        "flows.cli",
        "benchmark",
        "--verdicts",
        path,
        "--resamples",
        "100",
        "--json",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    plain = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment
    )
    assert plain.returncode == 0, plain.stderr
    assert value(json.loads(plain.stdout), "exec", 1, "level 2") == 1.0
    refused = CliRunner().invoke(main, ["benchmark", "--verdicts", path, "--k", "none"])
    assert refused.exit_code == 2 and "--k 'none' is not a list" in refused.output
