"""Rows in another order than they were written in: the right rows, read when due, and no more of
them in memory than was allowed."""

import random

import polars as pl
import pyarrow as pa
import pytest

from tasks.store import ordering
from tasks.store.ordering import rows_in_order
from tasks.store.snapshot import Snapshot

SCHEMA = pa.schema(
    [("name", pa.string()), ("code", pa.string()), ("number", pa.int64()), ("heavy", pa.string())]
)


class Counting(Snapshot):
    """Remembers which parts were read."""

    def batches_at(self, part, *arguments):
        self.__dict__.setdefault("seen", []).append(part)
        return super().batches_at(part, *arguments)


def written(root, numbers, part_rows):
    snapshot = Counting(str(root), "stage", "f00d")
    for start in range(0, len(numbers), part_rows):
        rows = [
            {"name": f"n{n}", "code": "x" * 50 + str(n), "number": n, "heavy": "h"}
            for n in numbers[start : start + part_rows]
        ]
        snapshot.append(rows, SCHEMA)
    return snapshot


def places(snapshot):
    return snapshot.index(["number"]).sort("number")


@pytest.fixture(autouse=True)
def _short_stretches(monkeypatch):
    monkeypatch.setattr(ordering, "STRETCH_ROWS", 16)


def orders(rows):
    eights = [list(range(start, min(rows, start + 8))) for start in range(0, rows, 8)]
    ordered = list(range(rows))
    return {
        "sorted": ordered,
        "nearly": [
            number for each in eights for number in random.Random(each[0]).sample(each, len(each))
        ],
        "backwards": ordered[::-1],
        "scattered": random.Random(1).sample(ordered, rows),
    }


@pytest.mark.parametrize("part_rows", [10, 1000])
@pytest.mark.parametrize("order", ["sorted", "nearly", "backwards", "scattered"])
@pytest.mark.parametrize("buffer_bytes", [0, 20_000, ordering.BUFFER_BYTES])
def test_every_row_comes_once_in_the_order_asked_for(tmp_path, order, part_rows, buffer_bytes):
    snapshot, scratch = written(tmp_path, orders(333)[order], part_rows), tmp_path / "scratch"
    wanted = (snapshot, places(snapshot), ["number", "code"], scratch)
    rows = list(rows_in_order(*wanted, buffer_bytes=buffer_bytes))
    # and no other column
    assert rows == [{"number": n, "code": "x" * 50 + str(n)} for n in range(333)]
    assert sorted(snapshot.seen) == snapshot.parts(), "each part is read once"
    assert not list(scratch.glob("*")), "what was spilled is gone when it has been read"


def test_some_rows_of_some_parts(tmp_path):
    snapshot = written(tmp_path, orders(400)["scattered"], 25)
    wanted = places(snapshot).filter(pl.col("number") % 7 == 0).reverse()
    rows = rows_in_order(snapshot, wanted, ["number"], tmp_path / "scratch")
    assert [row["number"] for row in rows] == list(range(0, 400, 7))[::-1]
    assert list(rows_in_order(snapshot, wanted.clear(), ["number"], tmp_path / "scratch")) == []


def test_parts_are_read_when_their_rows_are_due(tmp_path):
    snapshot = written(tmp_path, orders(640)["nearly"], 32)
    stream = rows_in_order(snapshot, places(snapshot), ["number"], tmp_path / "scratch")
    for done in range(640):
        assert next(stream)["number"] == done
        assert len(snapshot.seen) <= done // 32 + 1
    assert not (tmp_path / "scratch").exists(), "almost in order: nothing had to wait on disk"


def test_what_waits_in_memory_is_bounded(tmp_path, monkeypatch):
    most = 0
    add = ordering._Waiting.add

    def watched(self, table):
        nonlocal most
        add(self, table)
        most = max(most, sum(len(each) for tables in self._tables.values() for each in tables))

    monkeypatch.setattr(ordering._Waiting, "add", watched)
    snapshot = written(tmp_path, orders(4000)["scattered"], 50)
    rows = rows_in_order(
        snapshot, places(snapshot), ["number"], tmp_path / "scratch", buffer_bytes=2**20
    )
    assert [row["number"] for row in rows] == list(range(4000))
    # the limit, a batch, and the stretch that is due
    assert 200 < most <= 2**20 // ordering.TABLE_BYTES + 50 + 2 * ordering.STRETCH_ROWS
