"""The analysis from snapshot to snapshot: what its manifest and files say, that nothing is done
twice, and samples that say nothing."""

import json
from pathlib import Path

import pytest

from benchmarks.analysis_scale import planted_frame
from tasks.analysis import stage
from tasks.analysis.difficulty import difficulty
from tasks.analysis.observations import observe
from tasks.store.snapshot import Snapshot
from tasks.tables import CANDIDATES, NUMBERS, VERDICTS
from tests.support.planted import QUICK, planted
from tests.support.samples import finished, sample


def test_numbers_words_page_and_figures(tmp_path):
    refs = planted(tmp_path)
    made = stage.run(*refs, QUICK).open()
    frame = stage.joined(*(ref.open() for ref in refs))
    expected, divided = (
        observe(planted_frame(600, 0), QUICK),
        difficulty(planted_frame(600, 0), seed=0),
    )

    found = stage.found_in(made.ref)
    assert found.finding == (*expected.finding, *divided.finding)
    assert found.cautions == expected.cautions
    numbers = {row["name"]: row for row in made.read().to_dicts()}
    within = expected.everything.within.odds_ratio
    assert [
        numbers["all/odds_ratio_within_tasks_per_sd"][key]
        for key in "value lower upper tasks".split()
    ] == [within.value, within.lower, within.upper, within.tasks]
    assert numbers["speedup/spearman"]["value"] == expected.speedup.spearman.value
    assert all((row["value"] is None) == (row["why_not"] is not None) for row in numbers.values())
    assert made.manifest["rows"] == len(numbers)
    assert made.manifest["upstream"] == [ref.fingerprint for ref in refs]

    records = made.manifest["records"]
    assert records["observations"]["everything"] == json.loads(
        expected.everything.model_dump_json()
    )
    assert len(records["difficulty"]["tertiles"]["groups"]) == 3
    assert "points" not in records["observations"]["speedup"]
    names = [path.name for path in found.files]
    assert names[0] == "report.md"
    assert {"analysis.json", "findings.md", "difficulty.svg", "accuracy-by-length.png"} <= set(
        names
    )
    assert all(path.stat().st_size for path in found.files)
    assert json.loads(found.files[names.index("analysis.json")].read_text())["observations"][
        "speedup"
    ]["points"]
    assert found.files[names.index("findings.md")].read_text() == found.markdown()
    assert found.markdown().count("\n- ") + 1 == len(found.finding) + len(found.cautions)
    assert found.findings == (*expected.findings, *divided.findings)
    assert set(frame.columns) == {
        "candidate_id",
        "task_id",
        "status",
        "reason",
        "speedup",
        "reasoning_tokens",
        "finish_reason",
        "generator",
        "sample_index",
        "max_tokens",
    }


def test_a_killed_run_is_done_again_and_a_finished_one_is_served(tmp_path):
    refs = planted(tmp_path, 100)
    half = stage.planned(*refs, QUICK)
    half.append([{"name": "all/share_correct", "value": 0.0}], NUMBERS)
    (half.local_dir(stage.PAGE) / "report.md").write_text("half")
    made = stage.run(*refs, QUICK).open()
    rows = made.read()
    assert rows["name"].is_unique().all() and made.manifest["rows"] == rows.height
    assert stage.found_in(made.ref).files[0].read_text().startswith("# Reasoning length")
    before = {path: path.stat().st_mtime_ns for path in Path(made.path).rglob("*")}
    assert stage.run(*refs, QUICK) == made.ref
    assert {path: path.stat().st_mtime_ns for path in Path(made.path).rglob("*")} == before
    assert (
        stage.planned(*refs, QUICK.model_copy(update={"seed": 1})).fingerprint != made.fingerprint
    )


@pytest.mark.parametrize(
    "rows, said",
    [
        (
            [sample("a", 0, None, 2.0), sample("a", 1, 0, 2.0)],
            "no sample with a reasoning length and an outcome",
        ),
        ([sample("a", 0, 10, None, status="task_error")], "1 reference failed"),
        ([], "needs the columns"),
    ],
)
def test_samples_that_say_nothing_are_a_caution_and_no_error(tmp_path, rows, said):
    made = stage.run(
        finished(tmp_path, "verification", rows, VERDICTS),
        finished(tmp_path, "synthesis", rows, CANDIDATES),
        QUICK,
    )
    found = stage.found_in(made)
    assert found.finding == () and found.files == () and made.open().manifest["rows"] == 0
    (caution,) = found.cautions
    assert caution.startswith("Nothing could be analysed") and said in caution


def test_a_few_samples_are_analysed_as_far_as_they_go(tmp_path):
    rows = [
        sample("a", 0, 10, 2.0) | {"reason": "ok"},
        sample("a", 1, 30, None, status="incorrect") | {"reason": "wrong_output"},
    ]
    made = stage.run(
        finished(tmp_path, "verification", rows, VERDICTS),
        finished(tmp_path, "synthesis", rows, CANDIDATES),
        QUICK,
    )
    numbers = {row["name"]: row for row in made.open().read().to_dicts()}
    assert numbers["all/share_correct"]["value"] == 0.5
    assert numbers["speedup/spearman"]["value"] is None
    assert numbers["speedup/spearman"]["why_not"] and stage.found_in(made).finding


def test_a_remote_root_holds_the_words_and_numbers(tmp_path):
    root = f"memory://{tmp_path.name}"
    made = stage.run(*planted(root, 100), QUICK)
    assert stage.found_in(made).files == ()
    assert stage.found_in(made).finding
    assert made.open().read().height > 5


def test_older_parts_without_a_column_are_read(tmp_path):
    verdicts, candidates = planted(tmp_path, 100)
    older = Snapshot(str(tmp_path), "synthesis", "older")
    rows = candidates.open().read().to_dicts()
    older.append(rows[:50], CANDIDATES.remove(CANDIDATES.get_field_index("finish_reason")))
    older.append(rows[50:], CANDIDATES)
    older.publish(config={})
    frame = stage.joined(verdicts.open(), older)
    assert frame.height == 100
    assert frame["finish_reason"].null_count() == 50
    assert frame["speedup"].null_count() < 100
