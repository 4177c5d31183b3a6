"""`concur benchmark`: verdicts on disk in, scores out; what they cannot support is null and said,
and bad tables are refused."""

import json

import polars as pl
import pytest
from click.testing import CliRunner

from flows.cli.main import main
from flows.lists import parsed_numbers
from flows.score import score_table
from kernels_eval.errors import UsageError
from tasks.tables import CANDIDATES, VERDICTS
from tests.support.cases import cases
from tests.support.commands import concur
from tests.support.programs import EMPTY
from tests.support.samples import finished

CASES = cases("flows")

RIGHT = {"status": "correct", "reason": "ok", "outputs_match": True}
WRONG = {"status": "incorrect", "reason": "wrong_output", "outputs_match": False}
ALIEN = {"status": "rejected", "reason": "no_custom_kernel"}
FIRST, SECOND, OTHER = (f"kernelbench/L{name}" for name in ("1/1", "1/2", "2/1"))


def rows(*answers, **other):
    """A verdict for each answer: "TASK SPEEDUP" (correct; 0: not timed) or "TASK" (wrong), a
    sample of its task each, with other columns."""
    made = []
    for number, answer in enumerate(answers):
        task, *speedup = answer.split()
        timing = {"speedup": float(speedup[0])} if speedup and float(speedup[0]) else None
        known = {"candidate_id": f"{task}#{number}", "sample_index": number, "timing": timing}
        model = {"generator": "m", "device": "H200"}
        made.append(known | {"task_id": task} | model | (RIGHT if speedup else WRONG) | other)
    return made


def table(path, rows):
    schema = {"timing": pl.Struct({"speedup": pl.Float64}), "outputs_match": pl.Boolean}
    known = {name: kind for name, kind in schema.items() if name in rows[0]}
    pl.DataFrame(rows, schema_overrides=known, infer_schema_length=None).write_parquet(path)
    return str(path)


def value(data, metric, k=1, group="all", track="custom_kernel", **more):
    asked = {"k": k, "group": group, "track": track, **more}
    found = [
        row[metric]["value"]
        for row in data["scores"]
        if all(row[name] == wanted for name, wanted in asked.items())
    ]
    assert len(found) == 1, (asked, found)
    return found[0]


# level 1: one task right twice of four, one never; level 2: one task right in all of four
LEVELS = rows(*(f"{FIRST} 2", f"{FIRST} 0.5", FIRST, FIRST), *[SECOND] * 4, *[f"{OTHER} 4"] * 4)


def named(rows):
    """The rows with an id each."""
    return [row | {"candidate_id": f"c{number}"} for number, row in enumerate(rows)]


SAMPLED = named(rows("a 1", "b", "b") + rows("a", generator="other"))
(WITHOUT,) = rows("t", **ALIEN)
TRACKS = named([*rows("t 2"), *(WITHOUT | {"outputs_match": said} for said in (True, None))])
UNTIMED = named(rows("a 0", "b") + rows("a 2", "b", generator="timed"))

SCORES = {
    "levels": (LEVELS, "1,2,10", [
        ({"metric": "exec"}, (0.5 + 0 + 1) / 3),
        ({"metric": "exec", "k": 2, "group": "level 1"}, 5 / 12),
        ({"metric": "fast_1", "group": "level 1"}, 1 / 8),
        ({"metric": "geometric_mean_speedup", "k": 2, "group": "level 1"}, 1.0),
        ({"metric": "exec", "k": 10}, None),
    ], "m: pass@10 needs 10 samples of each task"),
    "tracks": (TRACKS, "1", [
        ({"metric": "exec"}, 1 / 3),
        ({"metric": "exec", "track": "any"}, 2 / 3),
    ], "1 verdicts do not say whether outputs"),
    "disturbed times": (
        rows("a 2", "a", flags=["unstable"]) + rows("b 2", "b 3", flags=["native: popen"]), "1", [],
        "1 of 3 timed verdicts are unstable: the machine disturbed the timing: measure again."),
    "degenerate tasks": (rows("kernelbench/L2/80 9", "kernelbench/L2/1"), "1", [
        ({"metric": "exec", "group": "level 2", "degenerate": "with"}, 0.5),
        ({"metric": "exec", "group": "level 2", "degenerate": "without"}, 0.0),
    ], ""),
    "times that were not recorded": (UNTIMED, "1", [
        ({"metric": "exec", "model": "m"}, 0.5),
        ({"metric": "fast_0", "model": "m"}, 0.5),
        ({"metric": "fast_1", "model": "m"}, None),
        ({"metric": "fast_1", "model": "timed"}, 0.5),
    ], "m: no reference time was recorded."),
    "tasks left out": (SAMPLED, "1", [],
        "other has no sample on 1 of 2 tasks: its scores are of the others."),
    "samples of other numbers": (SAMPLED, "1", [],
        "Model m has 1 to 2 samples per task; all tasks count alike."),
    "a table without a model": (CASES["bare_rows"], "1", [
        ({"metric": "exec", "model": "unnamed"}, 0.5),
    ], "do not say whether a custom kernel did the work: both tracks are the same."),
}  # fmt: skip


@pytest.mark.parametrize("case", SCORES)
def test_scores_are_the_estimators_and_what_is_not_known_is_said(tmp_path, case):
    given, ks, expected, note = SCORES[case]
    data = score_table(table(tmp_path / "v.parquet", given), ks=ks, ps="0,1", resamples=100)
    for asked, wanted in expected:
        assert value(data, **asked) == pytest.approx(wanted)
    assert not note or any(note in each for each in data["notes"]), data["notes"]


def test_groups_devices_and_intervals_are_beside_the_scores(tmp_path):
    data = score_table(table(tmp_path / "v.parquet", LEVELS), ks="1", resamples=100)
    assert [group["group"] for group in data["groups"]] == ["all", "level 1", "level 2"]
    assert data["devices"] == ["H200"]
    row = data["scores"][0]
    assert (row["group"], row["k"], row["tasks"], row["samples"]) == ("all", 1, 3, 12)
    assert row["exec"]["lower"] <= row["exec"]["value"] <= row["exec"]["upper"]


def test_levels_come_from_the_tasks_and_the_model_from_the_label(tmp_path):
    levels = {"a": 1, "b": 5}
    tasks = [{"task_id": name, "code": EMPTY, "level": levels[name]} for name in levels]
    pl.DataFrame(tasks).write_parquet(tmp_path / "t.parquet")
    needed = ("candidate_id", "task_id", "status")
    bare = [{key: row[key] for key in needed} for row in rows("a 1", "b")]
    asked = {"tasks": str(tmp_path / "t.parquet"), "ks": "1", "resamples": 100}
    data = score_table(table(tmp_path / "v.parquet", bare), label="elsewhere", **asked)
    assert [group["group"] for group in data["groups"]] == ["all", "level 1", "level 5"]
    assert value(data, "exec", group="level 1", model="elsewhere") == 1.0
    with pytest.raises(UsageError, match="1 of 2 tasks are not in .*such as c"):
        score_table(table(tmp_path / "w.parquet", rows("a", "c")), **asked)


@pytest.mark.parametrize(
    "given, message, hint",
    [
        (rows("a 1") + rows("b", device="A100"), r"2 devices are mixed: .*H200 \(1\)", "--device"),
        (rows("a") * 2, "1 candidates are there more than once, such as 'a#0'", "drop repeated"),
        ([{"candidate_id": "a", "task_id": "t"}], "needs the columns status", "verify-batch"),
    ],
)
def test_bad_tables_are_refused(tmp_path, given, message, hint):
    with pytest.raises(UsageError, match=message) as caught:
        score_table(table(tmp_path / "v.parquet", given))
    assert hint in caught.value.hint


def test_one_of_several_devices_is_chosen_with_what_needed_no_device(tmp_path):
    given = rows("a 1", "a", "a", "a")
    for row, device in zip(given, ("H200", "A100", "", None), strict=True):
        row["device"] = device
    path = table(tmp_path / "v.parquet", given)
    data = score_table(path, device="H200", ks="1", resamples=100)
    assert value(data, "exec") == pytest.approx(1 / 3)
    with pytest.raises(UsageError, match="no verdict of 'B200'") as caught:
        score_table(path, device="B200")
    assert "A100" in caught.value.hint


def test_snapshots_are_read_with_their_candidates(tmp_path):
    known = [{"candidate_id": f"c{n}", "task_id": "t"} for n in range(2)]
    named = [row | {"generator": "gen"} for row in known]
    finished(tmp_path, "synthesis", named, CANDIDATES, "c" * 32)
    timing = {"reference_ms": 2.0, "candidate_ms": 1.0, "speedup": 2.0}
    right = {"status": "correct", "reason": "ok", "timing": timing, "device": "cpu"}
    judged = [known[0] | right, known[1] | {"status": "timeout", "reason": "run"}]
    finished(tmp_path, "verification", judged, VERDICTS, "d" * 32, ["c" * 32])
    data = score_table(root=str(tmp_path), ks="1", resamples=100)
    assert value(data, "fast_1.5", model="gen") == 0.5 and data["devices"] == ["cpu"]


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
    words = ["benchmark", "--verdicts", table(tmp_path / "v.parquet", LEVELS), "--resamples", "100"]
    page = CliRunner().invoke(main, [*words, "--k", "1"])
    assert page.exit_code == 0 and all(
        text in page.output for text in ("level 2", "50.0 %", "H200")
    )
    assert page.output.index("notes") > page.output.rindex("└"), "the tables come first"
    first, _, _ = page.output.partition("\nscores\n")[2].partition("└")
    assert first.count("│ m ") == 3, "all answers and two levels, each once: their tracks agree"
    assert "the same in every row: track any and custom_kernel alike" in first
    assert "6 right of 12 samples" in page.output and "means over tasks" in page.output
    plain = concur(*words, "--json")
    assert value(json.loads(plain.stdout), "exec", 1, "level 2") == 1.0, plain.stderr
    assert {row["k"] for row in json.loads(plain.stdout)["scores"]} == {1}, "of 4 samples"
    assert "fast_0" not in json.loads(plain.stdout)["scores"][0] and "pass@" not in plain.stdout
    many = CliRunner().invoke(main, [*words, "--k", "1,10"])
    assert "pass@10 needs 10 samples" in " ".join(many.output.split())
    assert not any("10" in line.split() for line in many.output.splitlines() if "│" in line)
    refused = CliRunner().invoke(main, [*words, "--k", "none"])
    assert refused.exit_code == 2 and "--k 'none' is not a list" in refused.output


def test_a_group_whose_tasks_are_all_excluded_has_no_right_samples(tmp_path):
    broken = rows(FIRST, status="task_error", reason="reference_failed", outputs_match=None)
    verdicts = table(tmp_path / "verdicts.parquet", named(broken + rows(f"{OTHER} 2")))
    page = CliRunner().invoke(main, ["benchmark", "--verdicts", verdicts], catch_exceptions=False)
    assert page.exit_code == 0 and "0 right of 0 samples" in page.output
