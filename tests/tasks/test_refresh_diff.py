"""Two refreshes made by the real rule, one thing changed between them: the difference says what,
and why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from kernels_eval.errors import UsageError
from tasks.curation.config import CurationConfig
from tasks.publishing.config import PublishOptions
from tasks.publishing.diff import RefreshDiff, SampleChange, diff
from tasks.publishing.diff_report import GAINED, LOST, to_json, to_markdown
from tasks.publishing.publish import publish
from tasks.store.snapshot import Snapshot, SnapshotRef
from tests.support.curated import SINGLE, line, sample

BASE = [
    sample("t/1", 0, 100, 2.0),
    sample("t/1", 1, 300, 1.0),
    sample("t/2", 0, 100, 7.0),
    sample("t/2", 1, 200, 6.0),
]


MORE = [*BASE, sample("t/1", 2, 80, 3.0)]
STRICT = {"config": CurationConfig(require_speedup_lower_above=1.9)}
REJECTED = {"status": "rejected", "reason": "stale_cache", "speedup": None}
FLAGS = {"t-1-2": ["repetitive", "truncated"], "t-2-1": ["truncated"]}
UNFLAGGED = {"config": CurationConfig(exclude_flags=("repetitive",))}
OPERATORS = [
    sample("t/1", 0, 100, 2.0),
    sample("t/2", 0, 10, 0.5, ops=SINGLE),
    sample("t/2", 1, 50, 0.9, ops=SINGLE),
]
QUOTA = {"config": CurationConfig(single_operator_quota=1)}


def changed(name: str, **changes: Any) -> list[dict[str, Any]]:
    return [entry | changes if entry["id"] == name else entry for entry in BASE]


def compare(
    tmp_path: Path,
    old: list[dict[str, Any]],
    new: list[dict[str, Any]],
    before: Any = None,
    after: Any = None,
) -> RefreshDiff:
    root = tmp_path / "root"
    return diff(line(root, old, **(before or {})), line(root, new, **(after or {})))


def said(changes: tuple[SampleChange, ...]) -> dict[str, str]:
    return {change.candidate_id: change.reason for change in changes}


def test_the_same_set_differs_in_nothing(tmp_path):
    found = compare(tmp_path, BASE, BASE)
    assert not any(value for name, value in found if name not in ("old", "new"))
    assert "hold the same samples" in to_markdown(found)


TWO = ("t-2-0", "t-2-1")
CASES = {
    # samples and settings, before and after; what is lost and gained, why; words of the details
    # (lost, gained) and of the page
    "tasks": (
        *(BASE, [*BASE[:2], sample("t/3", 0, 50, 9.0)], {}, {}),
        *(dict.fromkeys(TWO, "task"), {"t-3-0": "task"}, "", ""),
        ("the task is new: 1", "the task is gone from the source: 2"),
    ),
    "program": (
        BASE,
        [entry | {"id": f"{entry['id']}b"} if entry["task"] == "t/2" else entry for entry in BASE],
        *({}, {"programs": {"t/2": "another"}}),
        *(dict.fromkeys(TWO, "program"), dict.fromkeys(("t-2-0b", "t-2-1b"), "program")),
        *("", "", ()),
    ),
    "candidate": (
        *(BASE, MORE, {}, {}, {"t-1-0": "outdone"}, {"t-1-2": "candidate"}),
        "t-1-2 is shorter (80 < 100 tokens) and faster (3 > 2); the other side does not have it",
        *("", ()),
    ),
    "no candidate": (
        *(MORE, BASE, {}, {}, {"t-1-2": "candidate"}, {"t-1-0": "outdone"}, "", ""),
        ("no longer stands in its way: 1",),
    ),
    "generator": (
        BASE,
        [entry | {"id": f"{entry['id']}b", "generator": "org/other"} for entry in BASE],
        *({}, {}, dict.fromkeys(("t-1-0", *TWO), "generator")),
        *(dict.fromkeys(("t-1-0b", "t-2-0b", "t-2-1b"), "generator"), "org/other", "org/writer"),
        (),
    ),
    "synthesis": (
        *(BASE, changed("t-1-0", id="t-1-9"), {}),
        {"synthesis": {"sampler": "openai", "samples_per_task": 3}},
        *({"t-1-0": "generator"}, {"t-1-9": "generator"}, "samples_per_task", "", ()),
    ),
    "bound": (
        *(changed("t-1-0", speedup=2.5), changed("t-1-0", speedup=1.95, key="later")),
        *(STRICT, STRICT, {"t-1-0": "bound"}, {}, "the verifier's code changed", "", ()),
    ),
    "flag": (
        *(MORE, MORE, {"flags": FLAGS}, {"flags": FLAGS, **UNFLAGGED}),
        *({"t-1-2": "flag"}, {"t-1-0": "outdone"}),
        "its reasoning is repetitive; exclude_flags is ['repetitive'] there and [] here",
        "on the other side its reasoning, which is repetitive, keeps it out",
        ("a flag of its reasoning keeps it out now: 1", "| curation.config.exclude_flags |"),
    ),
    "no flag": (
        *(MORE, MORE, {"flags": FLAGS, **UNFLAGGED}, {"flags": FLAGS}),
        *({"t-1-0": "outdone"}, {"t-1-2": "flag"}),
        *("on the other side its reasoning, which is repetitive, keeps it out", "", ()),
    ),
    # one fusion is taken, so one single operator fits; with no quota none does
    "no quota": (
        *(OPERATORS, OPERATORS, QUOTA, {"config": CurationConfig(single_operator_quota=0)}),
        *({"t-2-0": "threshold"}, {}, "single_operator_quota", "", ()),
    ),
    "quota": (
        OPERATORS,
        [
            *OPERATORS,
            *(entry | {"task": "t/0", "id": f"0{entry['id']}"} for entry in OPERATORS[1:]),
        ],
        *(QUOTA, QUOTA, {"t-2-0": "quota"}, {"0t-2-0": "task"}, "", "", ()),
    ),
    "shorter": (
        *(OPERATORS, [*OPERATORS, sample("t/2", 2, 5, 0.4, ops=SINGLE)], QUOTA, QUOTA),
        *({"t-2-0": "outdone"}, {"t-2-2": "candidate"}),
        *("t-2-2 was taken for this task (5 tokens)", "", ()),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_changed_and_why(tmp_path, case):
    old, new, before, after, lost, gained, why_lost, why_gained, page = CASES[case]
    found = compare(tmp_path, old, new, before, after)
    assert said(found.samples_lost) == lost and said(found.samples_gained) == gained
    for changes, words in ((found.samples_lost, why_lost), (found.samples_gained, why_gained)):
        assert not words or words in changes[0].detail
    text = to_markdown(found)
    assert all(words in text for words in page)
    if case == "flag":
        names = {setting.name for setting in found.settings}
        assert names == {"curation.config.exclude_flags", "curation.fingerprint"}
        (lost,) = found.samples_lost
        assert lost.detail == why_lost


def test_tasks_are_gained_lost_and_changed(tmp_path):
    _, new, *_ = CASES["tasks"]
    found = compare(tmp_path, BASE, new)
    (gained,), (lost,) = found.tasks_gained, found.tasks_lost
    assert (gained.task_id, gained.reason) == ("t/3", "task")
    assert (lost.task_id, lost.reason, lost.old_samples) == ("t/2", "task", 2)
    (task,) = compare(tmp_path, MORE, BASE).tasks_changed
    assert (task.task_id, task.reason, task.detail) == ("t/1", "samples", "1 gained, 1 lost")
    (task,) = compare(tmp_path, *CASES["program"][:4]).tasks_changed
    assert (task.task_id, task.reason) == ("t/2", "program")


WHY = {
    "verifier": (
        *("t-2-1", REJECTED | {"key": "later"}, {}),
        *("verdict", "rejected (stale_cache) on the other; the verifier's code changed"),
    ),
    "device": (*("t-2-1", REJECTED, {"device": "GPU Y"}), *("verdict", "another device")),
    "protocol": (
        *("t-2-1", REJECTED | {"key": "later"}, {"protocol": {"trials": 9}}),
        *("verdict", "the protocol differs: eval.trials"),
    ),
    "speedup": (
        *("t-2-1", {"speedup": 4.0}, {}),
        "speedup",
        "speedup 4 is not above 5, 6 on the other side; measured again under the same conditions",
    ),
    "threshold": (
        *("t-2-1", {}, {"config": CurationConfig(min_speedup=6.5)}),
        *("threshold", "min_speedup is 6.5 there and 5.0 here"),
    ),
    "strict": (*("t-1-0", {}, STRICT), *("threshold", "require_speedup_lower_above is 1.9 there")),
}


@pytest.mark.parametrize("case", WHY)
def test_one_sample_is_lost_for_one_change_and_gained_by_its_undoing(tmp_path, case):
    name, changes, after, reason, detail = WHY[case]
    new = changed(name, **changes)
    found = compare(tmp_path, BASE, new, after=after)
    assert said(found.samples_lost) == {name: reason} and not found.samples_gained
    assert detail in found.samples_lost[0].detail
    assert said(compare(tmp_path, new, BASE, after).samples_gained) == {name: reason}
    if case == "threshold":
        assert found.settings[0].name == "curation.config.min_speedup"


def test_another_strategy(tmp_path):
    ref = line(tmp_path / "root", BASE)
    other = Snapshot(ref.root, "curation", "random")
    rows = ref.open().read().head(1)
    other.append(rows.to_dicts(), rows.to_arrow().schema)
    other.publish(config={"strategy": "random"}, upstream=ref.open().manifest["upstream"])
    found = diff(ref, other.ref)
    assert [change.reason for change in found.samples_lost] == ["strategy"] * 2


@pytest.mark.parametrize(
    ("new", "name", "reason", "details"),
    [
        (
            *(changed("t-1-0", speedup=4.0, key="later"), "t-1-0", "verdict"),
            ("speedup 2 to 4 (the intervals do not meet)", "the verifier's code changed"),
        ),
        (changed("t-1-0", speedup=2.1), "t-1-0", "verdict", ("(the intervals meet)",)),
        (
            *([*BASE, sample("t/2", 2, 50, 8.0)], "t-2-0", "criterion"),
            ("concise_and_fast to high_speedup; t-2-2 is shorter (50 < 100 tokens)",),
        ),
    ],
)
def test_a_sample_that_stays_but_was_measured_anew_or_taken_by_another_rule(
    tmp_path, new, name, reason, details
):
    (change,) = compare(tmp_path, BASE, new).samples_changed
    assert (change.candidate_id, change.reason) == (name, reason)
    assert all(detail in change.detail for detail in details)


def test_what_the_sides_do_not_tell_is_unknown(tmp_path):
    """Folders alone know their rows; with the root they know the line again."""
    root = tmp_path / "root"
    old, new = line(root, BASE), line(root, changed("t-2-1", speedup=4.0))
    folders = tmp_path / "a", tmp_path / "b"
    for ref, folder in zip((old, new), folders, strict=True):
        publish(ref, folder, PublishOptions(holdout_share=0.5))
    alone = diff(*folders)
    assert said(alone.samples_lost) == {"t-2-1": "unknown"}
    assert "are not there" in alone.samples_lost[0].detail
    assert alone.old.rows == 3 and alone.old.label.startswith("refresh-")
    for found in (diff(*folders, root=str(root)), diff(folders[0], new)):
        assert said(found.samples_lost) == {"t-2-1": "speedup"}
    shutil.rmtree(root / "verification")
    assert said(diff(old, new).samples_lost) == {"t-2-1": "unknown"}
    with pytest.raises(UsageError, match="no published set"):
        diff(tmp_path, new)
    with pytest.raises(UsageError, match="no curated set"):
        diff(new, SnapshotRef(root=new.root, stage="tasks", fingerprint="x"))
    (folders[0] / "data/train-00000-of-00001.parquet").unlink()
    with pytest.raises(UsageError, match="missing or have changed"):
        diff(folders[0], new)


def test_json_is_one_object_and_markdown_shows_no_more_than_fifty_of_a_kind(tmp_path):
    many = [sample(f"t/<b>|{number:03d}", 0, 10, 2.0) for number in range(70)]
    found = compare(tmp_path, BASE, many)
    data = json.loads(to_json(found))
    assert data["reasons"]["samples_gained"] == {"task": 70} and len(data["samples_gained"]) == 70
    text = to_markdown(found)
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    assert text.count("And 20 more: see the JSON.") == 2
    inline = [child.type for token in tokens for child in token.children or ()]
    assert "html_inline" not in inline and "html_block" not in {token.type for token in tokens}
    assert LOST.keys() == GAINED.keys()
