"""`concur analyze` on tables as a user has them, and what it says of those it cannot use."""

import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

import flows
from flows.analyze import analyze_table, read
from flows.cli.render import render
from kernels_eval.errors import UsageError
from tasks.curation.source import Source
from tasks.store.snapshot import Snapshot
from tasks.tables import VERDICTS
from tests.support.cases import cases
from tests.support.planted import plant, planted, planted_frame
from tests.support.samples import finished

CASES = cases("flows")

ROOT = Path(flows.__file__).parent.parent


def concur(*arguments, cwd):
    command = [sys.executable, "-m", "flows.cli", "analyze", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=cwd, env=environment
    )


def test_snapshots_in_a_report_out(tmp_path):
    plant(tmp_path, 2000, seed=0)
    asked = ("--verdicts", "verdicts", "--candidates", "candidates", "--out", "found")
    done = concur(*asked, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["samples"] == 2000 and len(data["thirds"]) == 3
    numbers = {row["key"]: row for row in data["findings"]}
    assert numbers["odds_ratio_within_tasks"]["upper"] < 1
    assert {path.suffix for path in (tmp_path / "found").iterdir()} == {
        *(".md", ".json", ".svg", ".png")
    }
    assert Path(tmp_path, data["report"]).read_text().startswith("# Reasoning length")


@pytest.mark.slow
def test_one_table_with_all_columns_will_do_and_says_the_same(tmp_path):
    plant(tmp_path, 500, seed=0)
    planted_frame(500, 0).write_parquet(tmp_path / "one.parquet")
    places = [str(tmp_path / name) for name in ("verdicts", "candidates")]
    joined = analyze_table(*places, out=str(tmp_path / "out"))
    alone = analyze_table(str(tmp_path / "one.parquet"), out=str(tmp_path / "out"))
    assert joined == alone
    printed = render(joined)
    assert all(sentence in printed for sentence in joined["finding"])


def test_parts_of_older_snapshots_that_lack_a_column_are_read(tmp_path):
    directory = tmp_path / "verdicts"
    directory.mkdir()
    planted_frame(50, 0).write_parquet(directory / "part-00000.parquet")
    planted_frame(50, 1).drop("finish_reason").with_columns(extra=1).write_parquet(
        directory / "part-00001.parquet"
    )
    (directory / "part-00002.parquet").write_bytes((directory / "part-00000.parquet").read_bytes())
    frame = read(Source(str(directory), None, "nowhere", unfinished=True))
    assert frame.height == 150
    assert frame["finish_reason"].null_count() == 50
    assert "extra" not in frame.columns
    # a column that the first part lacks is there too
    (directory / "part-00000.parquet").unlink()
    assert (
        read(Source(str(directory), None, "nowhere", unfinished=True))["finish_reason"].null_count()
        == 50
    )


def test_without_a_path_the_newest_training_sets_samples_are_analysed(tmp_path):
    """As `concur curate` finds them; a benchmark's verdicts, which are newer, are not what the set
    was made of."""
    verdicts, candidates = planted(tmp_path / "root", 200)
    few, above = verdicts.open().read().head(10).to_dicts(), [candidates.fingerprint]
    finished(tmp_path / "root", "verification", few, VERDICTS, "later", above)
    for snapshot, upstream in (
        (verdicts.open(), [candidates.fingerprint]),
        (Snapshot(str(tmp_path / "root"), "curation", "c"), []),
    ):
        snapshot.publish(config={}, upstream=upstream or [verdicts.fingerprint])
    newest, named = (
        Source(None, None, str(tmp_path / "root")),
        Source(str(verdicts.open().path), str(candidates.open().path), "nowhere"),
    )
    assert read(newest).equals(read(named)) and read(newest).height == 200
    assert read(Source(str(verdicts.open().path), None, "nowhere", unfinished=True)).equals(
        read(newest)
    )
    found = analyze_table(root=str(tmp_path / "root"), out=str(tmp_path / "out"))
    assert found["samples"] == 200


def test_what_cannot_be_used_is_one_line_and_exit_2(tmp_path):
    plant(tmp_path, 50, seed=0)
    (tmp_path / "bad.parquet").write_text("no table")
    (tmp_path / "empty").mkdir()
    pl.read_parquet(tmp_path / "verdicts" / "*.parquet").with_columns(
        candidate_id=pl.lit("x")
    ).write_parquet(tmp_path / "foreign.parquet")
    cases = CASES["bad_analyses"]
    for said, arguments in cases.items():
        options = dict(
            zip(
                (name.removeprefix("--").replace("-", "_") for name in arguments[::2]),
                arguments[1::2],
                strict=True,
            )
        )
        paths = {
            name: value if "://" in value else str(tmp_path / value)
            for name, value in options.items()
        }
        with pytest.raises(UsageError, match=said):
            analyze_table(**paths, out=str(tmp_path / "out"))
    done = concur("--verdicts", "verdicts", cwd=tmp_path)
    assert done.returncode == 2
    *waits, said = done.stderr.splitlines()
    assert said.startswith("error: ")
    assert all(" s  still at work: " in line for line in waits), "on a busy machine"
    assert not (tmp_path / "analysis").exists()


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    planted_frame(50, 0).write_parquet(tmp_path / "one.parquet")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        analyze_table(str(tmp_path / "one.parquet"), out=str(tmp_path / "file"))
