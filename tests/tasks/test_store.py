"""Snapshots under everything that happens to them: resume, kill -9, a second writer, an edited
module, a root that cannot be written."""

import ast
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from kernels_eval.errors import UsageError
from tasks.store import Snapshot, fingerprint, identity, known_rows, snapshots
from tasks.store import snapshot as store
from tasks.store.identity import code_hash
from tasks.synthesis.config import SynthesisConfig
from tests.support.cases import cases

CASES = cases("store")

ROOT = Path(store.__file__).parents[2]
POINT = pa.struct([("x", pa.int64()), ("label", pa.string())])
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("value", pa.int64()),
        ("point", POINT),
        ("names", pa.list_(pa.string())),
    ]
)


def row(number, value=None):
    return {
        "key": f"k{number:06d}",
        "value": number if value is None else value,
        "point": {"x": number, "label": f"\u00e9{number}"},
        "names": [str(number)],
    }


@pytest.fixture
def snapshot(tmp_path):
    return Snapshot(str(tmp_path / "root"), "stage", "f00d")


def keys(snapshot):
    return snapshot.read(columns=["key"])["key"].to_list()


# -- parts and manifest ----------------------------------------------------------------------------


def test_a_snapshot_is_unfinished_until_its_manifest_and_whole_afterwards(snapshot):
    assert (snapshot.finished, snapshot.parts(), snapshot.keys("key")) == (False, [], set())
    snapshot.append([row(1), row(2)], SCHEMA)
    snapshot.append([row(3)], SCHEMA)
    assert not snapshot.finished
    with pytest.raises(UsageError, match="unfinished"):
        _ = snapshot.manifest
    config = SynthesisConfig(samples_per_task=2)
    snapshot.publish(config=config, upstream=["up"], extra={"note": "n"})
    known = {"rows": 3, "stage": "stage", "fingerprint": "f00d", "upstream": ["up"], "note": "n"}
    manifest = snapshot.manifest
    assert snapshot.finished and manifest.items() >= known.items()
    assert manifest["config"]["samples_per_task"] == 2
    assert manifest["tools"]["polars"] == pl.__version__
    assert manifest["hardware"]["cpus"] == os.cpu_count()
    # nested values come back as they went in
    assert snapshot.read().to_dicts() == [row(1), row(2), row(3)]
    assert not list(Path(snapshot.path).glob(".*"))


def test_the_manifest_is_the_last_thing_and_comes_by_rename(snapshot, monkeypatch):
    """At the moment of each rename, the target is not there and the temporary file is already
    complete."""
    seen = []
    real = type(snapshot._fs).mv

    def mv(self, source, target, **options):
        seen.append((target, Path(target).exists(), Path(source).stat().st_size))
        return real(self, source, target, **options)

    monkeypatch.setattr(type(snapshot._fs), "mv", mv)
    snapshot.append([row(1)], SCHEMA)
    snapshot.publish(config={})
    files = [Path(snapshot.parts()[0]), Path(snapshot.path) / "manifest.json"]
    assert seen == [(str(path), False, path.stat().st_size) for path in files]


def test_a_write_that_fails_half_way_leaves_no_part(snapshot, monkeypatch):
    import pyarrow.parquet as pq

    def disk_full(table, handle, **options):
        handle.write(b"PAR1 half of a file")
        raise OSError(28, "No space left on device")

    snapshot.append([row(1)], SCHEMA)
    with monkeypatch.context() as patch:
        patch.setattr(pq, "write_table", disk_full)
        with pytest.raises(UsageError, match="No space left on device"):
            snapshot.append([row(2)], SCHEMA)
    assert keys(snapshot) == ["k000001"]
    snapshot.append([row(2)], SCHEMA)  # and the same snapshot goes on when there is room again
    assert keys(snapshot) == ["k000001", "k000002"]


def test_a_finished_snapshot_refuses_more(snapshot):
    snapshot.append([row(1)], SCHEMA)
    snapshot.publish(config={})
    before = {path.name: path.read_bytes() for path in Path(snapshot.path).iterdir()}
    with pytest.raises(UsageError, match="is finished"):
        snapshot.append([row(2)], SCHEMA)
    with pytest.raises(UsageError, match="is finished"), snapshot.journal(SCHEMA) as add:
        add(row(3))
    assert snapshot.recover(SCHEMA) == 0
    assert {path.name: path.read_bytes() for path in Path(snapshot.path).iterdir()} == before


def test_rows_keep_the_order_of_writing_and_the_first_of_a_key(snapshot):
    assert snapshot.read().is_empty()
    for each in (row(5), row(1), row(3), row(1, value=99)):  # the last is a second writer's
        snapshot.append([each], SCHEMA)
    assert keys(snapshot) == ["k000005", "k000001", "k000003", "k000001"]
    assert snapshot.read(unique="key")["value"].to_list() == [5, 1, 3]
    some = pl.DataFrame({"key": ["k000001", "k000005", "k000006"]})
    assert snapshot.read(unique="key", among=some)["value"].to_list() == [5, 1]
    assert snapshot.keys("key") == {"k000001", "k000003", "k000005"}


def test_a_resumed_stage_adds_only_what_is_missing(snapshot):
    snapshot.append([row(number) for number in range(3)], SCHEMA)
    again = store.SnapshotRef.model_validate_json(snapshot.ref.model_dump_json()).open()
    again.append([row(n) for n in range(5) if row(n)["key"] not in again.keys("key")], SCHEMA)
    again.append([], SCHEMA)
    assert keys(again) == [row(number)["key"] for number in range(5)] and len(again.parts()) == 2


def test_many_rows_become_parts_of_a_thousand_as_they_come(snapshot):
    there = []

    def rows():
        for number in range(2500):
            there.append(len(snapshot.parts()))
            yield row(number)

    snapshot.append(rows(), SCHEMA)
    assert there == [0] * 1000 + [1] * 1000 + [2] * 500
    assert keys(snapshot) == [row(number)["key"] for number in range(2500)]


def test_an_index_says_where_each_row_lies(snapshot):
    empty = snapshot.index(["key"])
    assert empty.columns == ["key", "part", "row"] and empty.is_empty()
    for start in (0, 700):
        snapshot.append([row(number) for number in range(start, start + 700)], SCHEMA)
    index = snapshot.index(["key", "value"])
    assert index["part"].unique(maintain_order=True).to_list() == snapshot.parts()
    wanted = index.filter(pl.col("value") % 300 == 1)
    # whole rows, nested values and all
    assert list(snapshot.rows_of(wanted)) == [row(number) for number in (1, 301, 601, 901, 1201)]
    assert list(snapshot.rows_of(index[5:6], ["value"])) == [{"value": 5}]


def test_what_killed_processes_left_half_written_goes_with_the_next_run(snapshot):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    gone, kept = (
        snapshot.local_dir() / f".part-1-f00dcafe.parquet.{pid}.tmp"
        for pid in (dead.pid, os.getppid())
    )
    for half in (gone, kept):
        half.write_bytes(b"half of a part")
    assert snapshot.recover(SCHEMA) == 0
    assert not gone.exists() and kept.exists()


# -- the journal -----------------------------------------------------------------------------------


def test_a_journal_becomes_parts_and_is_gone(snapshot):
    rows = [row(number) for number in range(5)]
    with (
        pytest.raises(RuntimeError, match="the machine"),
        snapshot.journal(SCHEMA, rows_per_part=2) as add,
    ):
        for each in rows:
            add(each)
        assert len(snapshot.parts()) == 2 and len(keys(snapshot)) == 4
        (journal,) = journals(snapshot)  # holds nothing that is in a part
        assert [json.loads(line) for line in journal.read_text().splitlines()] == rows[4:]
        raise RuntimeError("the machine")
    assert snapshot.read().to_dicts() == rows and not journals(snapshot)


WRITER = """
import sys
from tasks.store.snapshot import Snapshot
from tests.tasks.test_store import SCHEMA, row

with Snapshot(sys.argv[1], "stage", "f00d").journal(SCHEMA, rows_per_part=int(sys.argv[2])) as add:
    for number in range(int(sys.argv[3])):
        add(row(number))
        print(number, flush=True)  # only after the row is on disk
    sys.stdin.read()
"""


@contextmanager
def writer(root, rows_per_part=1000, rows=10**9):
    """A process that adds rows and says the number of each; killed (-9) when the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, root, str(rows_per_part), str(rows)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL


def journals(snapshot):
    return list(Path(snapshot.path).glob(".journal-*"))


def left_journal(snapshot, numbers, pid):
    """A journal with these rows, as a killed process leaves one."""
    path = snapshot.local_dir() / f".journal-{pid:020d}-{pid}.jsonl"
    path.write_text("".join(f"{json.dumps(row(number))}\n" for number in numbers))


@pytest.mark.parametrize("rows_per_part", [1000, 7])
def test_kill_9_loses_no_row_that_was_added(snapshot, rows_per_part):
    # it waits after 500: a signal that comes late finds no part of 1,000
    with writer(snapshot.root, rows_per_part, rows=500) as process:
        said = next(number for number in map(int, process.stdout) if number >= 40)
    # what it said before the signal reached it
    said = int([str(said), *process.stdout.read().split("\n")[:-1]][-1])
    found = journals(snapshot)
    assert len(found) == 1 or (not found and rows_per_part == 7)  # none between two parts
    in_parts = len(keys(snapshot)) if snapshot.parts() else 0
    assert (in_parts == 0) if rows_per_part == 1000 else (in_parts >= 35)
    for journal in found:
        with journal.open("a", encoding="utf-8") as handle:
            handle.write('{"key": "k999999", "value": 99, "po')  # the line a process dies in
    saved = snapshot.recover(SCHEMA)
    recovered = snapshot.read(unique="key").to_dicts()
    # in order, none missing, none cut; at most the row between disk and print is more than was said
    assert recovered == [row(number) for number in range(len(recovered))]
    assert len(recovered) in (said + 1, said + 2)
    assert in_parts + saved >= len(recovered)
    assert not journals(snapshot) and snapshot.recover(SCHEMA) == 0


def test_several_journals_are_recovered_even_where_a_writers_id_is_used_again(snapshot):
    """In a container a killed run and the next one have few ids to choose from: that one is in use
    says nothing."""
    left_journal(snapshot, range(3), os.getppid())  # of a process that lives
    left_journal(snapshot, range(5), 1)
    assert snapshot.recover(SCHEMA) == 8
    assert sorted(set(keys(snapshot))) == [row(number)["key"] for number in range(5)]
    assert not journals(snapshot)


def test_the_journal_of_a_living_writer_is_left_alone_until_it_is_killed(snapshot):
    """It is still being added to; taking it away would lose what comes next."""
    with writer(snapshot.root, rows=1) as process:
        assert process.stdout.readline() == "0\n"
        assert snapshot.recover(SCHEMA) == 0
        assert len(journals(snapshot)) == 1 and snapshot.parts() == []
    assert snapshot.recover(SCHEMA) == 1
    assert keys(snapshot) == ["k000000"] and not journals(snapshot)
    with Snapshot(snapshot.root, "stage", "own").journal(SCHEMA) as add:  # this process's
        add(row(1))
        own = Snapshot(snapshot.root, "stage", "own")
        assert own.recover(SCHEMA) == 0 and own.parts() == []
        add(row(2))
    assert keys(own) == ["k000001", "k000002"]


class Killed(BaseException):
    """A stand-in for a signal, at one place in the code."""


@pytest.mark.parametrize("who", ["writer", "recovery"])
def test_killed_between_a_part_and_the_end_of_its_journal_no_row_is_there_twice(
    snapshot, monkeypatch, who
):
    def journal():
        with snapshot.journal(SCHEMA) as add:
            add(row(1))
            add(row(2))

    def die(*_, **__):
        raise Killed

    if who == "recovery":
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Snapshot, "_append_part", die)
            journal()
        assert snapshot.parts() == []
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "unlink", die)
        snapshot.recover(SCHEMA) if who == "recovery" else journal()
    assert len(snapshot.parts()) == 1 and len(journals(snapshot)) == 1
    assert snapshot.recover(SCHEMA) == 0
    assert snapshot.read().to_dicts() == [row(1), row(2)]
    assert not list(Path(snapshot.path).glob(".*"))


def test_text_with_separators_of_every_kind_stays_in_its_row(snapshot, monkeypatch):
    """Compiler logs and model answers hold anything; what Python calls a line end must not cut a
    row in a journal in two."""
    odd = row(1) | {"names": ["a\u2028b\u0085c\x0cd\x1ce\r\nf", "\x00", "\U0001f600"]}
    with monkeypatch.context() as patch:
        patch.setattr(
            snapshot, "_append_part", lambda *_: (_ for _ in ()).throw(UsageError("killed"))
        )  # leaves the journal behind
        with pytest.raises(UsageError, match="killed"), snapshot.journal(SCHEMA) as add:
            add(odd)
            add(row(2))
    assert snapshot.parts() == [] and len(journals(snapshot)) == 1
    assert snapshot.recover(SCHEMA) == 2
    assert snapshot.read().to_dicts() == [odd, row(2)]


# -- identity --------------------------------------------------------------------------------------


def test_the_same_inputs_give_the_same_fingerprint_and_any_other_another():
    config, other = (SynthesisConfig(samples_per_task=count) for count in (3, 4))
    base = fingerprint("synthesis", config, ["a", "b"], "code")
    backwards = dict(reversed(config.model_dump(mode="json").items()))
    assert base == fingerprint("synthesis", config.model_copy(), ("a", "b"), "code")
    assert base == fingerprint("synthesis", backwards, ["a", "b"], "code")
    others = [
        ("training", config, ["a", "b"], "code"),
        ("synthesis", other, ["a", "b"], "code"),
        ("synthesis", config, ["b", "a"], "code"),
        ("synthesis", config, ["a"], "code"),
        ("synthesis", config, ["a", "b"], "other code"),
    ]
    assert len({base, *(fingerprint(*each) for each in others)}) == 6
    known = "7bbeb029cc1b0d52cde71f9124d3e9a5"  # in every process, and in every release
    assert fingerprint("s", {"b": 1, "a": [2.5, None]}, ["u"], "c") == known


LOGIC = '''
"""What it does."""

LIMIT = 3


class Rule:
    """A rule."""

    name: str = "text that is data"

    def holds(self, x: int) -> bool:
        """Says so."""
        return x > LIMIT
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def version_of(source):
        (tmp_path / "rules_under_test.py").write_text(source)
        importlib.invalidate_caches()
        return code_hash("rules_under_test")

    return version_of


@pytest.mark.parametrize(
    "old, new, same",
    CASES["logic_changes_the_code_hash_and_comments_docstrings_and_layout_do_not"],
)
def test_logic_changes_the_code_hash_and_comments_docstrings_and_layout_do_not(
    module, old, new, same
):
    assert old in LOGIC
    assert (module(LOGIC.replace(old, new)) == module(LOGIC)) is same


def test_a_package_counts_all_its_modules(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "package_under_test" / "inner").mkdir(parents=True)
    (tmp_path / "package_under_test" / "__init__.py").write_text("")
    deep = tmp_path / "package_under_test" / "inner" / "deep.py"
    deep.write_text("X = 1\n")
    before = code_hash("package_under_test")
    deep.write_text("X = 2\n")
    assert code_hash("package_under_test") != before
    with pytest.raises(ModuleNotFoundError):
        code_hash("package_that_is_not_there")


# -- across snapshots ------------------------------------------------------------------------------


def test_known_rows_come_from_any_other_snapshot_finished_or_not(tmp_path):
    root = str(tmp_path)
    old, killed, current, other = (
        Snapshot(root, stage, name)
        for stage, name in [("s", "a"), ("s", "b"), ("s", "c"), ("t", "a")]
    )
    old.append([row(1), row(2)], SCHEMA)
    old.publish(config={})
    killed.append([row(2, value=77), row(3)], SCHEMA)
    current.append([row(4)], SCHEMA)
    other.append([row(5)], SCHEMA)
    asked = {row(number)["key"] for number in range(1, 7)}
    found = {found["key"]: found for found in known_rows(current, "key", asked, SCHEMA)}
    assert set(found) == {"k000001", "k000002", "k000003"}
    assert found["k000001"] == row(1)  # whole rows, ready to append
    assert found["k000002"]["value"] in (2, 77)  # one of them, once
    for arguments in [
        (current, "key", {"k000006"}),
        (current, "no_such_column", asked),
        (Snapshot(str(tmp_path / "nowhere"), "s", "c"), "key", asked),
    ]:
        assert list(known_rows(*arguments, SCHEMA)) == []
    assert [each.fingerprint for each in snapshots(root, "s")] == ["a", "b", "c"]
    assert snapshots(root, "nothing") == []
    current.append(list(found.values()), SCHEMA)
    assert sorted(keys(current)) == ["k000001", "k000002", "k000003", "k000004"]


def test_known_rows_are_taken_from_a_killed_runs_journal_and_not_from_a_living_ones(snapshot):
    left_journal(snapshot, range(40), 1)
    asked = {row(number)["key"] for number in range(40)}
    another = Snapshot(snapshot.root, snapshot.stage, "another")
    for _ in ("in the journal", "in a part"):
        found = known_rows(another, "key", asked, SCHEMA)
        assert {each["key"] for each in found} == asked
    with Snapshot(snapshot.root, "stage", "alive").journal(SCHEMA) as add:
        add(row(999_999))
        assert list(known_rows(another, "key", {row(999_999)["key"]}, SCHEMA)) == []


# -- roots -----------------------------------------------------------------------------------------


@pytest.fixture(
    params=["a file in place of the directory", "a file system that takes no directories"]
)
def unwritable(request, tmp_path):
    """Not a matter of permissions, so that it also holds for root."""
    if request.param.startswith("a file system"):
        return "/proc/concur"
    (tmp_path / "file").write_text("here already")
    return str(tmp_path / "file")


@pytest.mark.parametrize(
    "write",
    [
        lambda snapshot: snapshot.append([row(1)], SCHEMA),
        lambda snapshot: snapshot.publish(config={}, rows=0),
        lambda snapshot: snapshot.journal(SCHEMA).__enter__(),
        lambda snapshot: snapshot.local_dir("adapter"),
    ],
    ids=["append", "publish", "journal", "local_dir"],
)
def test_an_unwritable_root_is_one_clear_error(unwritable, write):
    with pytest.raises(UsageError) as caught:
        write(Snapshot(unwritable, "stage", "f00d"))
    assert unwritable in caught.value.args[0]
    assert "--set root=DIR" in caught.value.hint


def test_a_disk_that_fills_is_one_clear_error_and_what_was_added_stays(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        not shutil.which("mount")
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
        ).returncode
    ):
        pytest.skip("a file system cannot be mounted here")
    added = 0
    try:
        snapshot = Snapshot(str(folder), "stage", "f00d")
        with pytest.raises(UsageError) as caught, snapshot.journal(SCHEMA) as add:
            while True:
                add(row(added))
                added += 1
        assert "No space left" in str(caught.value) and "free some disk" in caught.value.hint
        assert subprocess.run(["mount", "-o", "remount,size=1m", str(folder)]).returncode == 0
        snapshot.recover(SCHEMA)
        assert 100 < added <= len(keys(snapshot)) <= added + 1
        assert not list(Path(snapshot.path).glob(".*"))
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_remote_root_keeps_tables_but_no_files_beside_them():
    """memory:// stands for any fsspec URL: parts and manifests work, a directory for an adapter
    does not."""
    snapshot = Snapshot("memory://concur-test", "stage", "f00d")
    with snapshot.journal(SCHEMA, rows_per_part=2) as add:
        for number in range(3):
            add(row(number))
    snapshot.publish(config={})
    assert snapshot.ref.open().finished and keys(snapshot) == ["k000000", "k000001", "k000002"]
    assert snapshot.recover(SCHEMA) == 0
    with pytest.raises(UsageError, match="not a local directory"):
        snapshot.local_dir("adapter")


# -- other readers ---------------------------------------------------------------------------------


def test_others_read_it_without_our_code(tmp_path, snapshot):
    import datasets

    snapshot.append([row(1), row(2)], SCHEMA)
    snapshot.append([row(3)], SCHEMA)
    snapshot.publish(config={})
    files, cache = f"{snapshot.path}/part-*.parquet", str(tmp_path / "datasets")
    frame = pl.read_parquet(files)
    assert sorted(frame["key"].to_list()) == ["k000001", "k000002", "k000003"]
    # a struct column, not JSON in a string
    assert frame.schema["point"] == pl.Struct({"x": pl.Int64, "label": pl.String})
    loaded = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=cache)
    assert sorted(loaded["value"]) == [1, 2, 3]
    assert loaded[0]["point"]["label"].startswith("\u00e9")


def test_text_that_utf8_cannot_hold_is_stored_all_the_same(tmp_path):
    """A lone surrogate in a model's text once stopped a run for good: neither the part nor the
    journal could be written again."""
    schema = pa.schema([("key", pa.string()), ("names", pa.list_(pa.string()))])
    snapshot = Snapshot(str(tmp_path), "stage", "f" * 8)
    with snapshot.journal(schema) as add:
        add({"key": "bad " + chr(0xD800), "names": [chr(0xDFFF)]})
    assert snapshot.read()["key"].to_list() == ["bad ?"]


def test_a_parser_that_another_thread_disturbs_is_asked_again(monkeypatch):
    before, parse = code_hash("tasks.progress"), ast.parse
    faults = [SystemError("AST constructor recursion depth mismatch")] * 2

    def disturbed(*given, **options):
        if faults:
            raise faults.pop()
        return parse(*given, **options)

    identity._digest.cache_clear()  # else what was parsed once is not parsed again
    with monkeypatch.context() as patched:
        patched.setattr(identity.ast, "parse", disturbed)
        found = code_hash("tasks.progress")
    assert found == before and not faults
