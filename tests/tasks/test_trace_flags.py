"""Flags of reasoning traces in the line: measured once, of correct samples, counted, and left out
where that is asked for."""

from pathlib import Path

import polars as pl
import pytest
from pydantic import ValidationError

from kernels_eval.errors import UsageError
from tasks.curation import flags, stage
from tasks.curation.config import FLAGS, STRATEGY_NAMES, CurationConfig
from tasks.curation.decisions import curate
from tasks.curation.tables import deciding_of, with_flags
from tasks.tables import TRACE_FLAGS
from tests.support.samples import frame, line_of, sample

LOOP = "You must keep the shape of the output and the type of the output. " * 30
FINE = (
    "A tile of each operand is loaded, and the partial sums stay in registers. The inner loop reads"
    " shared memory, which a barrier guards on both sides. What is left over at the borders is"
    " padded with zeros, so no thread leaves early."
)
CUT = f"{FINE} And then the kernel is launched with"
TRACES = {"a-0": LOOP, "a-1": FINE, "b-0": CUT, "b-1": LOOP, "c-0": None, "c-1": FINE}


def rows(**changes):
    """Three tasks with two correct samples each, and one that is wrong."""
    made = [
        sample(task, index, 10 + index, 2.0 - index / 2) | {"turn": 1}
        for task in "abc"
        for index in (0, 1)
    ]
    made = [row | {"reasoning": TRACES[row["candidate_id"]]} | changes for row in made]
    return [*made, sample("a", 9, 5, None, status="incorrect") | {"reasoning": LOOP}]


@pytest.fixture
def read(monkeypatch):
    """Every text that is measured."""
    texts = []
    true = flags.quality
    monkeypatch.setattr(flags, "quality", lambda batch: (texts.extend(batch), true(batch))[1])
    return texts


def test_correct_samples_are_flagged_and_counted(tmp_path, read, monkeypatch):
    monkeypatch.setattr(flags, "BATCH_TEXTS", 2)
    line = line_of(tmp_path, rows())
    verdicts, candidates = line.verdicts, line.candidates
    made = flags.run(verdicts, candidates).open()
    found = dict(made.read().select("candidate_id", "trace_flags").iter_rows())
    loop = ["repetitive", "ends_in_loop"]
    assert found == {
        "a-0": loop,
        "a-1": [],
        "b-0": ["truncated"],
        "b-1": loop,
        "c-0": [],
        "c-1": [],
    }
    assert len(read) == 6
    assert made.manifest["flag_counts"] == dict.fromkeys(FLAGS, 0) | {
        "repetitive": 2,
        "ends_in_loop": 2,
        "truncated": 1,
    }
    assert made.manifest["rows"] == 6 and made.read().columns == TRACE_FLAGS.names
    assert made.read().filter(candidate_id="a-0")["repeated_share"][0] > 0.9
    assert flags.run(verdicts, candidates) == made.ref
    assert len(read) == 6


def test_what_was_measured_once_is_not_read_again(tmp_path, read, monkeypatch):
    line = line_of(tmp_path, rows())
    verdicts, candidates = line.verdicts, line.candidates
    half = flags.planned(verdicts, candidates)
    first = flags.run(verdicts, candidates).open()
    assert half.fingerprint == first.fingerprint
    more = [*rows(), sample("d", 0, 7, 1.0) | {"reasoning": FINE + " " + FINE}]
    again = line_of(tmp_path, more, "y")
    second = flags.run(again.verdicts, again.candidates).open()
    assert len(read) == 7
    assert second.manifest["rows"] == 7
    assert second.read()["candidate_id"].is_unique().all()
    monkeypatch.setattr(flags, "TRACE_FLAG_VERSION", "other thresholds")
    flags.run(verdicts, candidates)
    assert len(read) == 13


def test_a_killed_run_goes_on(tmp_path, read):
    line = line_of(tmp_path, rows())
    verdicts, candidates = line.verdicts, line.candidates
    whole = flags.run(verdicts, candidates).open()
    kept = whole.read().head(4).to_dicts()
    for part in (*whole.parts(), f"{whole.path}/manifest.json"):
        Path(part).unlink()
    whole.append(kept, TRACE_FLAGS)
    read.clear()
    assert flags.run(verdicts, candidates).open().read()["candidate_id"].n_unique() == 6
    assert len(read) == 2


def flagged(samples):
    measured = [
        (row["candidate_id"], row["reasoning"]) for row in samples if row["status"] == "correct"
    ]
    return with_flags(
        frame(*samples),
        pl.concat(flags.flagged(iter(measured))).select("candidate_id", "trace_flags"),
    )


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_every_strategy_takes_as_if_flagged_samples_had_not_been_drawn(strategy):
    table, excluded = flagged(rows()), ("ends_in_loop", "truncated")
    config = CurationConfig(strategy=strategy, exclude_flags=excluded, max_per_task=None)
    if strategy == "shuffled_reasoning":
        with pytest.raises(UsageError, match="of one task"):  # c has two of the three that are left
            curate(table, config.model_copy(update={"min_speedup": 1.0}))
        return
    clean = table.filter(pl.col("candidate_id").is_in(["a-1", "c-0", "c-1"]))
    expected = curate(clean, config.model_copy(update={"exclude_flags": ()}))["candidate_id"]
    assert sorted(curate(table, config)["candidate_id"]) == sorted(expected)
    assert "a-0" in curate(table, CurationConfig(strategy="min_length"))["candidate_id"]


def test_flags_are_names_that_are_known_and_unknown_traces_are_refused():
    with pytest.raises(ValidationError, match="repetitive"):
        CurationConfig(exclude_flags=("repetition",))
    config = CurationConfig(exclude_flags=("truncated",))
    with pytest.raises(UsageError, match="of 6 of 6 correct samples was not measured"):
        curate(frame(*rows()), config)
    table = flagged(rows()).with_columns(
        pl.when(pl.col("candidate_id") != "a-1").then("trace_flags").alias("trace_flags")
    )
    with pytest.raises(UsageError, match="of 1 of 6 correct samples was not measured"):
        curate(table, config)


def test_the_training_sets_manifest_counts_flags_and_what_they_left_out(tmp_path):
    line = line_of(tmp_path, rows())
    measured = flags.run(line.verdicts, line.candidates)
    flagged = line.model_copy(update={"flags": measured})
    config = CurationConfig(strategy="random", size=9, max_per_task=None)
    made = stage.run(flagged, config).open()
    none = dict.fromkeys(FLAGS, 0)
    assert made.manifest["trace_flags"] == {
        "correct": none | {"repetitive": 2, "ends_in_loop": 2, "truncated": 1},
        "taken": none | {"repetitive": 2, "ends_in_loop": 2, "truncated": 1},
        "left_out": 0,
    }
    strict = config.model_copy(update={"exclude_flags": ("repetitive",)})
    made = stage.run(flagged, strict).open()
    assert made.manifest["trace_flags"]["taken"] == none | {"truncated": 1}
    assert made.manifest["trace_flags"]["left_out"] == 2
    assert set(made.read()["candidate_id"]) == {"a-1", "b-0", "c-0", "c-1"}
    assert made.manifest["upstream"][-1] == measured.fingerprint
    assert stage.run(line, config).open().manifest["trace_flags"] is None

    only = line_of(tmp_path, [row for row in rows() if row["reasoning"] == LOOP], "loops")
    with pytest.raises(UsageError, match="every correct one has a trace flag"):
        measured = flags.run(only.verdicts, only.candidates)
        stage.run(only.model_copy(update={"flags": measured}), strict)


def test_deciding_reads_flags_and_no_text(tmp_path):
    line = line_of(tmp_path, rows())
    measured = flags.run(line.verdicts, line.candidates)
    table = deciding_of(line.model_copy(update={"flags": measured}))
    assert table["trace_flags"].null_count() == 1
    texts = {"response", "reasoning", "answer", "code", "log_tail", "words"}
    assert not texts & set(table.columns)
