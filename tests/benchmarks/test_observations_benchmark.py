"""What recorded rows become for the analysis, and that a file without the columns is refused."""

import html
import json

import polars as pl
import pytest

from benchmarks.observations import (
    LENGTHS,
    MISSING,
    SAMPLES,
    VERDICTS,
    adapted,
    analyse,
    breaks_off,
    judged,
    main,
    samples_table,
    template_caution,
)
from flows.cli.analyze import read
from flows.curate import curate_table
from kernels_eval.errors import UsageError
from tasks.curation.source import Source

MODULE = "```python\nclass ModelNew:\n    pass\n```"


def row(problem, sample, response, runtime_ms):
    return {
        **{"level": 1, "problem_id": problem, "sample_id": sample, "model": "m"},
        **{"response": response, "recorded_correct": runtime_ms > 0},
        "recorded_runtime_ms": runtime_ms,
    }


@pytest.mark.slow
def test_lengths_cuts_and_speeds_of_recorded_rows(tmp_path):
    path = tmp_path / "recorded.parquet"
    thought = "x" * 400
    made = [
        row(1, 0, f"{thought}</think>\n\n{MODULE}", 2.0),
        row(1, 1, f"{MODULE}", 8.0),
        row(1, 2, "and so it goes on and", -1.0),
        row(2, 0, "", -1.0),
    ]
    pl.DataFrame(made).write_parquet(path)
    found = adapted(str(path))
    assert found.select("tagged", "whole", "speedup", "finish_reason", "status").rows() == [
        (100, (408 + 2 + len(MODULE)) // 4, pytest.approx(2.0), "stop", "correct"),
        (None, len(MODULE) // 4, pytest.approx(0.5), "stop", "correct"),
        (None, 5, None, "length", "incorrect"),
        (None, None, None, "length", "incorrect"),
    ]
    said = analyse(str(path), str(tmp_path / "out"))
    assert said.keys() == LENGTHS.keys()
    assert all(VERDICTS in sentences for sentences in said.values())
    for name, unit in LENGTHS.items():
        page = (tmp_path / "out" / name / "report.md").read_text(encoding="utf-8")
        assert unit.split(" (")[0] in html.unescape(page) and "</think>" not in page
        assert "another GPU" in page


def test_a_response_breaks_off_in_a_block_or_in_a_sentence():
    assert all(
        map(breaks_off, ("```python\nclass ModelNew:\n", "the kernel is", "<think>\nI think."))
    )
    assert not any(map(breaks_off, ("The kernel is done.\n", MODULE)))


@pytest.mark.slow
def test_the_page_is_the_reports_and_says_where_it_comes_from(tmp_path, responses, monkeypatch):
    written_to = tmp_path / "page.md"
    command = ["observations", "--responses", responses, "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", [*command, "--page", str(written_to)])
    assert main() == 0
    text = written_to.read_text(encoding="utf-8")
    head, *parts = text.split("\n## ")
    for part in ("--responses responses.parquet --out out --page page.md", "Date 20", "commit "):
        assert part in head
    assert str(tmp_path) not in text and "cores" in head
    assert [part.splitlines()[0] for part in parts] == list(LENGTHS)
    for part in parts:
        for line in ("Shorter reasoning is more often correct: not robust", "### Sensitivity"):
            assert line in part
        assert "look sampled without the model's chat template: 0 of 24" in html.unescape(part)


def test_what_shows_that_no_chat_template_was_used():
    told = ["You should use fp32.", " When writing kernels, think.", "First, I look.</think>"]
    assert "2 of 3 begin with more instructions" in template_caution(told)
    assert "1 do not begin with a capital letter, and only 1 have" in template_caution(told)


def test_a_file_without_the_columns_is_refused(tmp_path):
    pl.DataFrame({"response": ["a"]}).write_parquet(tmp_path / "other.parquet")
    with pytest.raises(UsageError, match="recorded_correct"):
        adapted(str(tmp_path / "other.parquet"))


def verdict(level, problem, sample, status, speedup=None):
    """As benchmarks.recorded_verdicts writes one, without what is not read."""
    timing = speedup and {
        f"speedup{bound}": speedup * factor
        for bound, factor in (("", 1.0), ("_lower", 0.9), ("_upper", 1.1))
    }
    return {
        **{"task_id": f"kernelbench/L{level}/{problem}", "sample_index": sample},
        **{"status": status, "reason": "ok", "timing": timing},
        **{"custom_kernels": ["k"], "build_s": 1.0},
    }


@pytest.fixture
def responses(tmp_path):
    """Ten tasks of level 1 and two of level 2, two responses each, all recorded as incorrect."""
    made = [
        row(
            problem,
            sample,
            f"{'x' * (400 + 40 * problem + 400 * sample)}</think>\n\n{MODULE}",
            -1.0,
        )
        | {"level": level}
        for level, problems in ((1, 10), (2, 2))
        for problem in range(1, problems + 1)
        for sample in (0, 1)
    ]
    pl.DataFrame(made).write_parquet(tmp_path / "responses.parquet")
    return str(tmp_path / "responses.parquet")


def written(path, *verdicts):
    path.write_text(json.dumps(verdicts))
    return str(path)


@pytest.fixture
def files(tmp_path):
    """Verdicts of level 1 but for L1/10 #1, of half of level 2, and later ones of which some are
    correct."""
    first = [
        verdict(1, problem, sample, "incorrect") for problem in range(1, 11) for sample in (0, 1)
    ]
    later = [verdict(1, problem, 0, "correct", 0.5 * problem) for problem in range(1, 10)]
    first[19:] = [verdict(2, 1, 0, "no_code"), verdict(2, 1, 1, "no_code")]
    return [written(tmp_path / "a.json", *first), written(tmp_path / "b.json", *later)]


def test_our_verdicts_take_the_place_of_the_recorded_ones(tmp_path, responses, files):
    """The later file counts; a task that is not judged wholly, and a level with many of those, are
    left out and said."""
    ours, said, missing = judged(adapted(responses), files)
    assert ours.height == 18
    assert set(ours["task_id"]) == {f"kernelbench/L1/{problem}" for problem in range(1, 10)}
    assert ours.filter(status="correct")["sample_index"].to_list() == [0] * 9
    for part in ("21 of 24 responses", "18 of 9 tasks", "L1 90% of 10, L2 50% of 2"):
        assert part in said
    absent = [("kernelbench/L1/10", 1), ("kernelbench/L2/2", 0), ("kernelbench/L2/2", 1)]
    assert sorted(missing.rows()) == absent
    # the table is one that both commands read
    samples_table(ours, None).write_parquet(tmp_path / SAMPLES)
    assert read(Source(str(tmp_path / SAMPLES), None, ".")).height == 18
    (found,) = curate_table(verdicts=str(tmp_path / SAMPLES), overrides=["min_speedup=4"])["sets"]
    assert found["criteria"] == {"concise_and_fast": 9} and found["median_speedup"] == 2.5


@pytest.mark.slow
def test_reports_of_our_verdicts_stand_beside_those_of_the_recorded_ones(
    tmp_path, responses, files
):
    out = tmp_path / "out"
    said = analyse(responses, str(out), files)
    assert set(said) == {*LENGTHS, *(f"recorded-{name}" for name in LENGTHS)}
    found = {
        name: json.loads((out / name / "analysis.json").read_text())["observations"]
        for name in ("whole", "recorded-whole")
    }
    counts = {name: (one["samples"], one["everything"]["correct"]) for name, one in found.items()}
    assert counts == {"whole": (18, 9), "recorded-whole": (18, 0)}
    speedup = found["whole"]["speedup"]
    assert speedup["label"] == "speedup over PyTorch eager"
    assert speedup["spearman"]["value"] is not None
    missing = pl.read_parquet(out / MISSING)
    assert set(missing.columns) == set(pl.read_parquet(responses).columns)
    rows = missing.select("level", "problem_id", "sample_id").rows()
    assert sorted(rows) == [(1, 10, 1), (2, 2, 0), (2, 2, 1)]
    assert pl.read_parquet(out / SAMPLES).height == 18


def test_verdict_files_that_do_not_fit_are_refused(tmp_path, responses):
    (tmp_path / "no.json").write_text("{")
    cases = {
        "cannot read": [str(tmp_path / "no.json")],
        "holds no list of verdicts": [written(tmp_path / "other.json", {"task_id": "x"})],
        "1 verdicts are of no response, such as kernelbench/L9/1 #0": [
            written(tmp_path / "foreign.json", verdict(9, 1, 0, "no_code"))
        ],
        "of no level enough": [written(tmp_path / "few.json", verdict(1, 1, 0, "correct", 1.0))],
    }
    for said, files in cases.items():
        with pytest.raises(UsageError, match=said):
            analyse(responses, str(tmp_path / "out"), files)
    with pytest.raises(UsageError, match="--tasks without --verdicts"):
        analyse(responses, str(tmp_path / "out"), tasks="tasks.parquet")
    assert not (tmp_path / "out").exists()
