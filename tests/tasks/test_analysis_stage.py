"""The observations from snapshot to snapshot: what their manifest and files say, that nothing is
done twice, and samples that say nothing."""

import json
from pathlib import Path

import pytest

from tasks.observe import stage
from tasks.observe.observations import observe
from tasks.tables import CANDIDATES, NUMBERS, VERDICTS
from tests.support.planted import planted, planted_frame
from tests.support.samples import finished, sample


def numbers_of(ref):
    return {row["name"]: row for row in ref.open().read().to_dicts()}


def run(root, rows):
    refs = (
        finished(root, "verification", rows, VERDICTS),
        finished(root, "synthesis", rows, CANDIDATES),
    )
    return stage.run(*refs)


def test_numbers_words_page_and_figures(tmp_path):
    refs = planted(tmp_path)
    made = stage.run(*refs).open()
    expected = observe(planted_frame(600, 0))

    found = stage.found_in(made.ref)
    assert (found.finding, found.findings, found.cautions) == (
        expected.finding,
        expected.findings,
        expected.cautions,
    )
    numbers = numbers_of(made.ref)
    odds = expected.estimate("odds_ratio_within_tasks")
    told = numbers["odds_ratio_within_tasks"]
    assert [told[key] for key in "value lower upper tasks samples".split()] == [
        *(odds.value, odds.lower, odds.upper, odds.tasks, odds.n)
    ]
    assert all((row["value"] is None) == (row["why_not"] is not None) for row in numbers.values())
    assert made.manifest["rows"] == len(numbers)
    assert made.manifest["upstream"] == [ref.fingerprint for ref in refs]
    assert made.manifest["thirds"] == json.loads(expected.model_dump_json())["thirds"]

    names = [path.name for path in found.files]
    assert names[0] == "report.md"
    assert {"analysis.json", "accuracy-by-length.svg", "accuracy-by-length.png"} <= set(names)
    assert all(path.stat().st_size for path in found.files)
    assert found.markdown().count("\n- ") + 1 == len(found.finding) + len(found.cautions)


def test_a_killed_run_is_done_again_and_a_finished_one_is_served(tmp_path):
    refs = planted(tmp_path, 100)
    half = stage.planned(*refs)
    half.append([{"name": "odds_ratio_within_tasks", "value": 0.0}], NUMBERS)
    (half.local_dir(stage.PAGE) / "report.md").write_text("half")
    made = stage.run(*refs).open()
    rows = made.read()
    assert rows["name"].is_unique().all() and made.manifest["rows"] == rows.height
    assert stage.found_in(made.ref).files[0].read_text().startswith("# Reasoning length")
    before = {path: path.stat().st_mtime_ns for path in Path(made.path).rglob("*")}
    assert stage.run(*refs) == made.ref
    assert {path: path.stat().st_mtime_ns for path in Path(made.path).rglob("*")} == before


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
    made = run(tmp_path, rows)
    found = stage.found_in(made)
    assert found.finding == () and found.files == () and made.open().manifest["rows"] == 0
    (caution,) = found.cautions
    assert caution.startswith("Nothing could be analysed") and said in caution


def test_a_few_samples_are_analysed_as_far_as_they_go(tmp_path):
    rows = [
        sample("a", 0, 10, 2.0) | {"reason": "ok"},
        sample("a", 1, 30, None, status="incorrect") | {"reason": "wrong_output"},
    ]
    made = run(tmp_path, rows)
    numbers = numbers_of(made)
    assert numbers["median_correct_tokens"]["value"] == 10
    assert numbers["spearman_of_length_and_speedup"]["value"] is None
    assert numbers["spearman_of_length_and_speedup"]["why_not"] and stage.found_in(made).finding


def test_a_remote_root_holds_the_words_and_numbers(tmp_path):
    root = f"memory://{tmp_path.name}"
    made = stage.run(*planted(root, 100))
    assert stage.found_in(made).files == ()
    assert stage.found_in(made).finding
    assert made.open().read().height > 5
