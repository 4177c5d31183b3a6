"""Tables that are not as they should be, given to curate, analyze, publish and diff: one clear
error or a defined result, earlier results intact, and never a traceback."""

import json
import re
from pathlib import Path

import polars as pl
import pytest
import yaml

from tests.support.commands import ROOT
from tests.support.curated import line, sample
from tests.support.samples import FUSION, SINGLE
from tests.support.typed import invoked

SAMPLES = [
    sample(
        f"t/{task}",
        index,
        100 + 40 * index,
        None if index == 2 else 7.0 - index + task / 10,
        ops=SINGLE if task % 2 else FUSION,
    )
    for task in range(6)
    for index in range(3)
]


class Line:
    """A root with a finished line, some parts of which tests write again."""

    def __init__(self, root, samples):
        self.root, self.curated = root, line(root, samples)

    def place(self, stage):
        """The stage's snapshot; of the curated ones the first that was made."""
        made = next((self.root / stage).iterdir())
        return Path(self.curated.open().path) if stage == "curation" else made

    def rewrite(self, stage, *changes):
        """The snapshot's rows once more, divided into as many parts as there are changes, each part
        changed by its own."""
        place = self.place(stage)
        rows = pl.concat([pl.read_parquet(part) for part in sorted(place.glob("part-*.parquet"))])
        for part in place.glob("part-*.parquet"):
            part.unlink()
        size = -(-rows.height // len(changes))
        for number, change in enumerate(changes):
            part = rows.slice(number * size, size)
            part = change(part) if callable(change) else changed(part, change)
            part.write_parquet(place / f"part-{number:020d}-00000000.parquet")

    def run(self, command, out, *more):
        verdicts, candidates = self.place("verification"), self.place("synthesis")
        curated = self.place("curation")
        table = ("--verdicts", verdicts, "--candidates", candidates, "--out", out)
        arguments = {
            "curate": table,
            "analyze": table,
            "publish": ("--root", self.root, "--curated", curated, "--out", out),
            "diff": ("--root", self.root, curated, curated),
        }
        return invoked(command, *arguments[command], *more)


@pytest.fixture
def there(tmp_path):
    return Line(tmp_path / "root", SAMPLES)


def contents(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(done):
    """The one line of an error."""
    assert done.exit_code == 2, (done.output, done.exception)
    assert done.stdout == "" and re.fullmatch(r"error: .* \(.*\)\n", done.stderr), done.output
    return done.stderr


def done_well(done):
    assert done.exit_code == 0 and not done.stderr, (done.output, done.exception)
    return done.stdout


def timed(frame, field, *instead):
    """Every timing without a field, and with something instead."""
    fields = frame.schema["timing"].fields
    kept = [pl.col("timing").struct.field(each.name) for each in fields if each.name != field]
    there = pl.when(pl.col("timing").is_not_null()).then(pl.struct(*kept, *instead))
    return frame.with_columns(there.alias("timing"))


def none_correct(frame):
    return frame.with_columns(
        pl.lit("incorrect").alias("status"), pl.lit(None, frame.schema["timing"]).alias("timing")
    )


def changed(frame, change):
    """A table as `tests/data/bad_tables.yaml` says."""
    ((kind, told),) = change.items() if isinstance(change, dict) else ((change, None),)
    match kind:
        case "same":
            return frame
        case "no_rows":
            return frame.clear()
        case "twice":
            return pl.concat([frame, frame])
        case "none_correct":
            return none_correct(frame)
        case "without":
            return frame.drop(told)
        case "put":
            return frame.with_columns(pl.lit(value).alias(name) for name, value in told.items())
        case "cast":
            return frame.cast({name: getattr(pl, kind) for name, kind in told.items()})
        case "timing":
            ((field, value),) = told.items()
            return timed(frame, field, pl.lit(value).alias(field))
        case "untimed":
            return timed(frame, told)
    raise ValueError(kind)


TABLES = yaml.safe_load((ROOT / "tests/data/bad_tables.yaml").read_text(encoding="utf-8"))
CASES = [(*place.split(), *case) for place, cases in TABLES["refused"].items() for case in cases]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[:3]))
def test_what_cannot_be_used_is_one_error_and_changes_nothing(tmp_path, there, case):
    command, stage, part, *changes = case
    out = tmp_path / "out"
    if command == "publish":
        done_well(there.run(command, out))
    else:
        out.mkdir()
        (out / "concur.parquet").write_text("an earlier set")
        (out / "report.md").write_text("an earlier report")
    before = contents(out)
    there.rewrite(stage, *changes)
    more = ("--name", "another") if command == "publish" else ()
    said = refused(there.run(command, out, *more))
    assert part in said
    assert contents(out) == before
    assert not list(tmp_path.glob(".*"))  # nothing half written beside it


def sets_of(out):
    return {path.stem: pl.read_parquet(path) for path in out.glob("*.parquet")}


def rows_published(done):
    return json.loads(done_well(done))["rows"]


def assert_no_change(done):
    """Two sets contain the same samples, and their page says so."""
    lines = set(done_well(done).splitlines())
    assert {"gained   none", "lost     none", "changed  none"} <= lines


BOTH = ("--strategy", "concur", "--strategy", "speedup")


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """The sets of the line as it should be, and what publishing says of it first."""
    place = tmp_path_factory.mktemp("usual")
    whole = Line(place / "root", SAMPLES)
    done_well(whole.run("curate", place / "sets", *BOTH))
    return (
        sets_of(place / "sets"),
        rows_published(whole.run("publish", place / "published", "--json")),
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (number % 3 > 0))
        for number, name in enumerate(TABLES["harmless"])
    ],
)
def test_shards_that_differ_in_what_does_not_matter_give_the_same_sets(
    tmp_path, there, usual, name
):
    stage, *changes = TABLES["harmless"][name]
    there.rewrite(stage, *changes)
    done_well(there.run("curate", tmp_path / "sets", *BOTH))
    before, after = usual[0], sets_of(tmp_path / "sets")
    assert before.keys() == after.keys()
    assert all(map(pl.DataFrame.equals, before.values(), map(after.get, before)))
    published = there.run("publish", tmp_path / "published", "--json")
    assert rows_published(published) == usual[1]
    assert_no_change(there.run("diff", tmp_path / "out"))


NO_SPEEDUPS = (float("nan"), float("inf"), float("-inf"), -2.0, 0.0, None)


def no_speedups(frame):
    """In turn each of what is no speedup, in place of those that are."""
    values = pl.Series((NO_SPEEDUPS * frame.height)[: frame.height], dtype=pl.Float64)
    if "timing" not in frame.columns:
        return frame.with_columns(values.alias("speedup"))
    return timed(frame, "speedup", values.alias("speedup"))


def test_a_speedup_that_is_no_speedup_is_no_number_anywhere(tmp_path, there):
    """Such a sample counts as not timed: it can be the shortest, never the fastest, and no table or
    page has its value as a speedup."""
    there.rewrite("verification", no_speedups, "same")
    shown = done_well(there.run("curate", tmp_path / "sets", *BOTH))
    assert "nan" not in shown.lower().split()
    for rows in sets_of(tmp_path / "sets").values():
        known = rows["speedup"].drop_nulls()
        assert known.is_finite().all() and (known > 0).all()
    assert sets_of(tmp_path / "sets")["speedup"]["speedup"].null_count() == 0
    # a set that an earlier version curated may hold it
    there.rewrite("curation", no_speedups, "same")
    done_well(there.run("publish", tmp_path / "published"))
    page = (tmp_path / "published/README.md").read_text().lower()
    assert not {"nan", "inf", "-inf"} & set(page.replace("|", " ").split())
    assert_no_change(there.run("diff", tmp_path / "out"))


@pytest.mark.parametrize(
    "command, said",
    [
        ("curate", "reasoning cannot be moved between tasks"),
        ("analyze", "1 task, fewer than 15: not divided"),
        ("publish", "train 2"),
        ("diff", "samples   none"),
    ],
)
def test_one_task_only(tmp_path, command, said):
    one = Line(tmp_path / "root", [each for each in SAMPLES if each["task"] == "t/1"])
    more = "--strategy concur --strategy shuffled_reasoning".split() * (command == "curate")
    assert said in done_well(one.run(command, tmp_path / "out", *more))
    if command == "curate":
        heights = {name: rows.height for name, rows in sets_of(tmp_path / "out").items()}
        assert heights == {"concur": 2, "concur.decisions": 3}


def test_no_correct_candidate_is_analysed_as_such(tmp_path, there):
    there.rewrite("verification", none_correct)
    said = "0 correct samples have a speedup"
    assert said in done_well(there.run("analyze", tmp_path / "analysis"))


@pytest.mark.parametrize("command", ["curate", "analyze"])
def test_the_first_verdict_of_a_candidate_counts(tmp_path, there, command):
    """In two tables and in one that holds both."""
    later = pl.read_parquet(there.place("verification") / "*.parquet")
    both = later.join(
        pl.read_parquet(there.place("synthesis") / "*.parquet").drop("task_id", "language"),
        on="candidate_id",
    )
    none_correct(both).vstack(both).write_parquet(tmp_path / "one.parquet")
    done = invoked(command, "--verdicts", tmp_path / "one.parquet", "--out", tmp_path / "out")
    if command == "analyze":
        assert "0 correct samples" in done_well(done) and "18 repeated" in done.stdout
        return
    assert "none of 18 candidates: none is correct" in refused(done)
    there.rewrite("verification", lambda frame: pl.concat([none_correct(frame), frame]))
    assert "none of 18 candidates: none is correct" in refused(there.run(command, tmp_path / "out"))


def test_a_set_published_before_its_snapshots_broke_is_compared_all_the_same(tmp_path, there):
    """A published folder holds its rows; only why they changed is told by what it was made from."""
    done_well(there.run("publish", tmp_path / "published"))
    there.rewrite("curation", {"without": ["criterion"]})
    published = tmp_path / "published"
    done = invoked("diff", published, published, "--root", there.root)
    assert_no_change(done)


def test_a_manifest_that_is_no_manifest(tmp_path, there):
    for text in ("{", "[]", "{}"):
        (there.place("curation") / "manifest.json").write_text(text)
        for command in ("publish", "diff"):
            assert "manifest" in refused(there.run(command, tmp_path / "out"))
