"""What changed between two training sets: each reason on decisions made by hand."""

import polars as pl
import pytest

from tasks.curation.config import CurationConfig
from tasks.curation.decisions import decide
from tasks.curation.diff import changes, reason_counts
from tests.support.samples import frame, samples


def decisions(rows, **config):
    return decide(frame(*samples(rows)), CurationConfig(**config)).decisions


BASE = "a-0 100 2.0; a-1 200 1.0; b-0 100 6.0; b-1 50 1.0"


@pytest.mark.parametrize(
    "new, config, expected",
    [
        (BASE, {}, []),
        (
            "a-1 200 1.0; b-0 100 6.0; b-1 50 1.0",
            {},
            ["a-0 lost no_candidate", "a-1 gained longer"],
        ),
        ("b-0 100 6.0; b-1 50 1.0", {}, ["a-0 lost no_task"]),
        (f"{BASE}; c-0 10 1.0", {}, ["c-0 gained no_task"]),
        (BASE.replace("b-0 100 6.0", "b-0 100 4.0"), {}, ["b-0 lost longer"]),
        (
            BASE.replace("a-0 100 2.0", "a-0 100 - status=incorrect"),
            {},
            ["a-0 lost not_correct", "a-1 gained longer"],
        ),
        (BASE.replace("a-0 100 2.0", "a-0 100 3.0"), {}, ["a-0 changed other_speedup"]),
        (BASE.replace("b-1 50 1.0", "b-1 150 1.0"), {}, ["b-0 changed other_criterion"]),
        (BASE, {"min_speedup": 7.0}, ["b-0 lost longer"]),
        (BASE, {"size": 1}, ["b-0 lost limit"]),
    ],
)
def test_every_change_has_its_reason(new, config, expected):
    found = changes(decisions(BASE), decisions(new, **config))
    rows = found.select("candidate_id", "change", "reason").iter_rows()
    assert [" ".join(row) for row in rows] == expected
    turned = changes(decisions(new, **config), decisions(BASE))
    assert turned["candidate_id"].to_list() == found["candidate_id"].to_list()
    assert sum(sum(counts.values()) for counts in reason_counts(found).values()) == found.height


def test_a_set_without_its_decisions_cannot_say_why():
    old, new = decisions(BASE), decisions("a-0 100 2.0; a-1 200 1.0")
    published = new.filter("taken").select(
        "candidate_id", "task_id", "criterion", "speedup", "taken"
    )
    found = changes(old, published)
    assert found.select("candidate_id", "reason").rows() == [("b-0", "unknown")]
    assert isinstance(found["speedup_old"][0], float) and found.schema["why_not_new"] == pl.String
