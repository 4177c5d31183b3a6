"""What training sets hold: parts add up."""

import polars as pl
import pytest

from flows.set_tables import task_families
from tasks.observe.composition import (
    composition,
    leading_family,
    markdown_table,
)
from tests.support.cases import cases
from tests.support.samples import frame, sample, samples

CASES = cases("analysis")

RELU = ["torch.nn.functional.relu"]
ROWS = [
    *samples("a-0 100 - status=compile_error; a-1 101 2.0; a-2 102 2.0; a-3 103 2.0"),
    sample("b", 3, 900, 0.5, ops=RELU),
    sample("c", 0, 50, float("nan"), ops=[]),
]
CORRECT = frame(*(row for row in ROWS if row["status"] == "correct"))
FAMILIES = task_families(frame(*ROWS))


@pytest.mark.parametrize("families, leading", CASES["leading_families"])
def test_the_leading_family_is_what_a_kernel_mostly_computes(families, leading):
    assert leading_family(families.split()) == leading


def test_what_a_set_holds():
    found = composition("mine", CORRECT, FAMILIES)
    assert (found.samples, found.tasks, found.single_operator, found.fusion) == (5, 3, 1, 4)
    assert found.families == {"matmul": 3, "activation": 1, "unknown": 1}
    assert found.median_tokens == 102.0
    # NaN is not timed
    assert (found.timed, found.median_speedup) == (4, 2.0)
    assert composition("untimed", CORRECT.tail(1), FAMILIES).median_speedup is None


def test_what_a_least_share_would_leave_out():
    """Samples of an unknown share go with every threshold."""
    shares = {"a-1": 0.005, "a-2": 0.05, "a-3": 0.9, "b-3": None, "c-0": 0.2}
    share = pl.col("candidate_id").replace_strict(shares, return_dtype=pl.Float64)
    rows = CORRECT.with_columns(custom_kernel_time_share=share)
    found = composition("mine", rows, FAMILIES).left_out
    assert [(each.min_kernel_share, each.samples, each.unknown) for each in found] == [
        (0.01, 2, 1),
        (0.1, 3, 1),
        (0.5, 4, 1),
    ]
    # speedups are 2, 2, 2, 0.5, and one that was not timed
    assert [each.speedup_share for each in found] == pytest.approx(
        [2.5 / 6.5, 4.5 / 6.5, 4.5 / 6.5]
    )
    assert [each.rest for each in found] == pytest.approx([2.0, 2.0, 2.0])
    text = markdown_table([composition("mine", rows, FAMILIES)])
    assert "| 0.1 | 3 (60.0%) | 1 | 69.2% | 2.00x |" in text
    unknown = CORRECT.drop("custom_kernel_time_share", strict=False)
    assert {each.samples for each in composition("mine", unknown, FAMILIES).left_out} == {5}


def test_the_table_has_a_row_a_set():
    held = [composition(name, CORRECT.head(n), FAMILIES) for name, n in (("one", 2), ("two", 4))]
    text = markdown_table(held)
    assert "| one | 2 | 1 |" in text and "| two | 4 | 2 |" in text
