"""Rows in another order than they were written in: the right rows, read when they are due."""

import random

import polars as pl
import pyarrow as pa
import pytest

from tasks.store import snapshot as module
from tasks.store.snapshot import Snapshot

SCHEMA = pa.schema([("name", pa.string()), ("code", pa.string()), ("number", pa.int64())])
STRETCH = 16


class Counting(Snapshot):
    """Remembers which parts were read."""

    def batches_at(self, part, *arguments):
        self.__dict__.setdefault("seen", []).append(part)
        return super().batches_at(part, *arguments)


def written(root, numbers, part_rows):
    snapshot = Counting(str(root), "stage", "f00d")
    for start in range(0, len(numbers), part_rows):
        rows = [
            {"name": f"n{n}", "code": "x" * 50 + str(n), "number": n}
            for n in numbers[start : start + part_rows]
        ]
        snapshot.append(rows, SCHEMA)
    return snapshot


def places(snapshot):
    return snapshot.index(["number"]).sort("number")


@pytest.fixture(autouse=True)
def _short_stretches(monkeypatch):
    monkeypatch.setattr(module, "STRETCH_ROWS", STRETCH)


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
def test_every_row_comes_once_in_the_order_asked_for(tmp_path, order, part_rows):
    snapshot = written(tmp_path, orders(333)[order], part_rows)
    rows = list(snapshot.rows_in_order(places(snapshot), ["number", "code"]))
    # and no other column
    assert rows == [{"number": n, "code": "x" * 50 + str(n)} for n in range(333)]


def test_some_rows_of_some_parts(tmp_path):
    snapshot = written(tmp_path, orders(400)["scattered"], 25)
    wanted = places(snapshot).filter(pl.col("number") % 7 == 0).reverse()
    rows = snapshot.rows_in_order(wanted, ["number"])
    assert [row["number"] for row in rows] == list(range(0, 400, 7))[::-1]
    assert list(snapshot.rows_in_order(wanted.clear(), ["number"])) == []


def test_parts_are_read_when_their_rows_are_due(tmp_path):
    snapshot = written(tmp_path, orders(640)["nearly"], STRETCH)
    stream = snapshot.rows_in_order(places(snapshot), ["number"])
    for done in range(640):
        assert next(stream)["number"] == done
        assert len(snapshot.seen) == done // STRETCH + 1
