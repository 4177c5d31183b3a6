"""A table of verdicts read by the other standard."""

import polars as pl
import pytest

from tasks.standards import read_by

ROWS = [
    ("correct", "ok", [], {"speedup": 2.0}),
    ("correct", "ok", ["approximation"], {"speedup": 3.0}),
    ("incorrect", "approximation", [], None),
    ("incorrect", "wrong_output", [], None),
    ("rejected", "precision_downcast", ["approximation"], None),
]
SCHEMA = {
    "status": pl.String,
    "reason": pl.String,
    "flags": pl.List(pl.String),
    "timing": pl.Struct({"speedup": pl.Float64}),
}


@pytest.mark.parametrize(
    "formula, reasons, speedups",
    [
        ("flag", ["ok", "ok", "ok"], [2.0, 3.0, None]),
        ("require", ["ok", "approximation", "approximation"], [2.0, None, None]),
    ],
)
def test_approximations_count_by_either_standard(formula, reasons, speedups):
    table = pl.DataFrame(ROWS, schema=SCHEMA, orient="row")
    found = read_by(table, formula)
    assert found.schema == table.schema
    assert found["reason"].to_list() == [*reasons, "wrong_output", "precision_downcast"]
    assert [row["status"] == "correct" for row in found.to_dicts()[:3]] == [
        reason == "ok" for reason in reasons
    ]
    timings = found["timing"].to_list()[:3]
    assert [timing and timing["speedup"] for timing in timings] == speedups
    assert read_by(found, formula).equals(found)
