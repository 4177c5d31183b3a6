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


def changed(samples: list[dict[str, Any]], name: str, **changes: Any) -> list[dict[str, Any]]:
    return [entry | changes if entry["id"] == name else entry for entry in samples]


def compare(
    tmp_path: Path, old: list[dict[str, Any]], new: list[dict[str, Any]], **named: Any
) -> RefreshDiff:
    before = {
        name.removeprefix("old_"): value for name, value in named.items() if name.startswith("old_")
    }
    after = {name: value for name, value in named.items() if not name.startswith("old_")}
    return diff(line(tmp_path / "root", old, **before), line(tmp_path / "root", new, **after))


def said(changes: tuple[SampleChange, ...]) -> dict[str, str]:
    return {change.candidate_id: change.reason for change in changes}


def test_the_same_set_differs_in_nothing(tmp_path):
    found = compare(tmp_path, BASE, BASE)
    assert not any(
        (
            found.samples_gained,
            found.samples_lost,
            found.samples_changed,
            found.tasks_gained,
            found.tasks_lost,
            found.settings,
        )
    )
    assert "hold the same samples" in to_markdown(found)


def test_a_task_that_is_new_and_one_that_is_gone(tmp_path):
    found = compare(tmp_path, BASE, [*BASE[:2], sample("t/3", 0, 50, 9.0)])
    assert said(found.samples_gained) == {"t-3-0": "task"} and said(found.samples_lost) == {
        "t-2-0": "task",
        "t-2-1": "task",
    }
    assert [(task.task_id, task.reason) for task in found.tasks_gained] == [("t/3", "task")]
    assert [(task.task_id, task.reason, task.old_samples) for task in found.tasks_lost] == [
        ("t/2", "task", 2)
    ]
    text = to_markdown(found)
    assert "the task is new: 1" in text and "the task is gone from the source: 2" in text


def test_the_same_name_for_another_program(tmp_path):
    other = [
        entry | {"id": f"{entry['id']}b"} if entry["task"] == "t/2" else entry for entry in BASE
    ]
    found = compare(tmp_path, BASE, other, programs={"t/2": "another"})
    assert said(found.samples_lost) == {"t-2-0": "program", "t-2-1": "program"}
    assert [(task.task_id, task.reason) for task in found.tasks_changed] == [("t/2", "program")]


def test_a_candidate_that_is_new_and_the_one_it_outdoes(tmp_path):
    found = compare(tmp_path, BASE, [*BASE, sample("t/1", 2, 80, 3.0)])
    assert said(found.samples_gained) == {"t-1-2": "candidate"} and said(found.samples_lost) == {
        "t-1-0": "outdone"
    }
    detail = found.samples_lost[0].detail
    assert (
        "t-1-2 is shorter (80 < 100 tokens) and faster (3 > 2)" in detail
        and "the other side does not have it" in detail
    )
    back = compare(tmp_path, [*BASE, sample("t/1", 2, 80, 3.0)], BASE)
    assert said(back.samples_gained) == {"t-1-0": "outdone"} and said(back.samples_lost) == {
        "t-1-2": "candidate"
    }
    assert "no longer stands in its way: 1" in to_markdown(back)
    assert [(task.task_id, task.reason, task.detail) for task in back.tasks_changed] == [
        ("t/1", "samples", "1 gained, 1 lost")
    ]


def test_another_generator(tmp_path):
    other = [entry | {"id": f"{entry['id']}-new", "generator": "org/other"} for entry in BASE]
    found = compare(tmp_path, BASE, other)
    assert (
        set(said(found.samples_gained).values())
        == {"generator"}
        == set(said(found.samples_lost).values())
    )
    assert "org/writer" in found.samples_gained[0].detail
    settings = {"sampler": "openai", "samples_per_task": 3}
    fewer = compare(
        tmp_path / "fewer", BASE, changed(BASE, "t-1-0", id="t-1-9"), synthesis=settings
    )
    assert (
        said(fewer.samples_lost) == {"t-1-0": "generator"}
        and "samples_per_task" in fewer.samples_lost[0].detail
    )


STRICT = {"config": CurationConfig(require_speedup_lower_above=1.9)}
REJECTED = {"status": "rejected", "reason": "stale_cache", "speedup": None}
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
    new = changed(BASE, name, **changes)
    found = compare(tmp_path, BASE, new, **after)
    assert said(found.samples_lost) == {name: reason} and not found.samples_gained
    assert detail in found.samples_lost[0].detail
    before = {f"old_{key}": value for key, value in after.items()}
    assert said(compare(tmp_path, new, BASE, **before).samples_gained) == {name: reason}
    if case == "threshold":
        assert [setting.name for setting in found.settings][:1] == ["curation.config.min_speedup"]


def test_a_lower_bound_that_fell_below_the_strict_one(tmp_path):
    faster, slower = (changed(BASE, "t-1-0", speedup=speedup) for speedup in (2.5, 1.95))
    slower = changed(slower, "t-1-0", key="later")
    found = compare(tmp_path, faster, slower, old_config=STRICT["config"], **STRICT)
    assert said(found.samples_lost) == {"t-1-0": "bound"}
    assert "the verifier's code changed" in found.samples_lost[0].detail


def test_a_flag_of_its_reasoning(tmp_path):
    """A sample that a flag keeps out, and the one that its absence lets in."""
    samples = [*BASE, sample("t/1", 2, 80, 3.0)]
    raised = {"t-1-2": ["repetitive", "truncated"], "t-2-1": ["truncated"]}
    strict = CurationConfig(exclude_flags=("repetitive",))
    found = compare(tmp_path, samples, samples, flags=raised, old_flags=raised, config=strict)
    assert said(found.samples_lost) == {"t-1-2": "flag"} and said(found.samples_gained) == {
        "t-1-0": "outdone"
    }
    assert (
        found.samples_lost[0].detail
        == "its reasoning is repetitive; exclude_flags is ['repetitive'] there and [] here"
    )
    assert (
        "on the other side its reasoning, which is repetitive, keeps it out"
        in found.samples_gained[0].detail
    )
    assert {setting.name for setting in found.settings} == {
        "curation.config.exclude_flags",
        "curation.fingerprint",
    }
    assert "a flag of its reasoning keeps it out now: 1" in to_markdown(found)
    back = compare(tmp_path, samples, samples, flags=raised, old_flags=raised, old_config=strict)
    assert said(back.samples_gained) == {"t-1-2": "flag"} and said(back.samples_lost) == {
        "t-1-0": "outdone"
    }
    assert (
        "on the other side its reasoning, which is repetitive, keeps it out"
        in back.samples_lost[0].detail
    )


def test_another_strategy(tmp_path):
    ref = line(tmp_path / "root", BASE)
    other = Snapshot(ref.root, "curation", "random")
    rows = ref.open().read().head(1)
    other.append(rows.to_dicts(), rows.to_arrow().schema)
    other.publish(config={"strategy": "random"}, upstream=ref.open().manifest["upstream"])
    found = diff(ref, other.ref)
    assert set(said(found.samples_lost).values()) == {"strategy"} and len(found.samples_lost) == 2


def test_the_quota_of_single_operators(tmp_path):
    """One fusion is taken, so one single operator fits; with no quota none does."""
    samples = [
        sample("t/1", 0, 100, 2.0),
        sample("t/2", 0, 10, 0.5, ops=SINGLE),
        sample("t/2", 1, 50, 0.9, ops=SINGLE),
    ]
    kept = CurationConfig(single_operator_quota=1)
    found = compare(
        tmp_path, samples, samples, old_config=kept, config=CurationConfig(single_operator_quota=0)
    )
    assert (
        said(found.samples_lost) == {"t-2-0": "threshold"}
        and "single_operator_quota" in found.samples_lost[0].detail
    )
    more = [*samples, sample("t/0", 0, 10, 0.5, ops=SINGLE), sample("t/0", 1, 50, 0.9, ops=SINGLE)]
    assert said(compare(tmp_path, samples, more, old_config=kept, config=kept).samples_lost) == {
        "t-2-0": "quota"
    }
    shorter = [*samples, sample("t/2", 2, 5, 0.4, ops=SINGLE)]
    found = compare(tmp_path, samples, shorter, old_config=kept, config=kept)
    assert (
        said(found.samples_lost) == {"t-2-0": "outdone"}
        and "t-2-2 was taken for this task (5 tokens)" in found.samples_lost[0].detail
    )


def test_a_sample_that_stays_but_was_measured_anew_or_taken_by_another_rule(tmp_path):
    found = compare(tmp_path, BASE, changed(BASE, "t-1-0", speedup=4.0, key="later"))
    assert said(found.samples_changed) == {"t-1-0": "verdict"}
    detail = found.samples_changed[0].detail
    assert (
        "speedup 2 to 4 (the intervals do not meet)" in detail
        and "the verifier's code changed" in detail
    )
    assert (
        "(the intervals meet)"
        in compare(tmp_path, BASE, changed(BASE, "t-1-0", speedup=2.1)).samples_changed[0].detail
    )
    found = compare(tmp_path, BASE, [*BASE, sample("t/2", 2, 50, 8.0)])
    assert said(found.samples_changed) == {"t-2-0": "criterion"}
    assert found.samples_changed[0].detail.startswith(
        "concise_and_fast to high_speedup; t-2-2 is shorter (50 < 100 tokens)"
    )


def test_what_the_sides_do_not_tell_is_unknown(tmp_path):
    """Folders alone know their rows; with the root they know the line again."""
    old, new = (
        line(tmp_path / "root", BASE),
        line(tmp_path / "root", changed(BASE, "t-2-1", speedup=4.0)),
    )
    folders = tmp_path / "a", tmp_path / "b"
    for ref, folder in zip((old, new), folders, strict=True):
        publish(ref, folder, PublishOptions(holdout_share=0.5))
    alone = diff(*folders)
    assert (
        said(alone.samples_lost) == {"t-2-1": "unknown"}
        and "are not there" in alone.samples_lost[0].detail
    )
    assert alone.old.rows == 3 and alone.old.label.startswith("refresh-")
    assert said(diff(*folders, root=str(tmp_path / "root")).samples_lost) == {"t-2-1": "speedup"}
    assert said(diff(folders[0], new).samples_lost) == {"t-2-1": "speedup"}
    shutil.rmtree(tmp_path / "root/verification")
    assert said(diff(old, new).samples_lost) == {"t-2-1": "unknown"}


def test_input_that_is_no_set_is_refused(tmp_path):
    ref = line(tmp_path / "root", BASE)
    with pytest.raises(UsageError, match="no published set"):
        diff(tmp_path, ref)
    with pytest.raises(UsageError, match="no curated set"):
        diff(ref, SnapshotRef(root=ref.root, stage="tasks", fingerprint="x"))
    publish(ref, tmp_path / "out")
    (tmp_path / "out/data/train-00000-of-00001.parquet").unlink()
    with pytest.raises(UsageError, match="missing or have changed"):
        diff(tmp_path / "out", ref)


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
