"""Two refreshes made by the real rule, one thing changed between them: the difference says what,
and why."""

import json
import shutil
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml
from markdown_it import MarkdownIt

from kernels_eval.errors import UsageError
from tasks.curation.config import CurationConfig
from tasks.publishing.config import PublishOptions
from tasks.publishing.diff import diff
from tasks.publishing.publish import publish
from tasks.publishing.sets import GAINED, LOST, to_json, to_markdown
from tasks.store.snapshot import Snapshot, SnapshotRef
from tests.support.curated import FUSION, SINGLE, line, sample

BASE = [
    sample("t/1", 0, 100, 2.0),
    sample("t/1", 1, 300, 1.0),
    sample("t/2", 0, 100, 7.0),
    sample("t/2", 1, 200, 6.0),
]


OPERATORS = [
    sample("t/1", 0, 100, 2.0),
    sample("t/2", 0, 10, 0.5, ops=SINGLE),
    sample("t/2", 1, 50, 0.9, ops=SINGLE),
]
SETS = {"base": BASE, "more": [*BASE, sample("t/1", 2, 80, 3.0)], "operators": OPERATORS}
CASES = yaml.safe_load((Path(__file__).parents[1] / "data/refresh_diff.yaml").read_text())


def refresh(
    root,
    start="base",
    drop=(),
    change=MappingProxyType({}),
    add=(),
    config=MappingProxyType({}),
    **named,
):
    """A curated set, as the table of cases describes it."""
    kept = [entry for entry in SETS[start] if entry["id"] not in drop]
    rows = [entry | change.get(entry["id"], {}) for entry in kept]
    rows += [sample(*each[:4], ops=SINGLE if "single" in each else FUSION) for each in add]
    return line(root, rows, config=CurationConfig(**config), **named)


def compared(root, case, backwards=False):
    sides = [refresh(root, **CASES[case].get(name, {})) for name in ("old", "new")]
    return diff(*(sides[::-1] if backwards else sides))


def said(changes):
    return {change.candidate_id: change.reason for change in changes}


def test_the_same_set_differs_in_nothing(tmp_path):
    found = diff(refresh(tmp_path), refresh(tmp_path))
    assert not any(value for name, value in found if name not in ("old", "new"))
    assert "contain the same samples" in to_markdown(found)


@pytest.mark.parametrize("case", CASES)
def test_what_changed_and_why(tmp_path, case):
    found, expected = compared(tmp_path, case), CASES[case]
    for kind in ("lost", "gained", "changed"):
        changes = getattr(found, f"samples_{kind}")
        assert said(changes) == expected.get(kind, {})
        assert f"why_{kind}" not in expected or expected[f"why_{kind}"] in changes[0].detail
    if "exact" in expected:
        assert found.samples_lost[0].detail == expected["exact"]
    if "settings" in expected:
        assert [setting.name for setting in found.settings] == expected["settings"]
    text = to_markdown(found)
    assert all(words in text for words in expected.get("page", ()))
    if "undone" in expected:
        assert said(compared(tmp_path, case, backwards=True).samples_gained) == expected["lost"]


def test_tasks_are_gained_lost_and_changed(tmp_path):
    found = compared(tmp_path, "tasks")
    (gained,), (lost,) = found.tasks_gained, found.tasks_lost
    assert (gained.task_id, gained.reason) == ("t/3", "task")
    assert (lost.task_id, lost.reason, lost.old_samples) == ("t/2", "task", 2)
    (task,) = compared(tmp_path, "no candidate").tasks_changed
    assert (task.task_id, task.reason, task.detail) == ("t/1", "samples", "1 gained, 1 lost")
    (task,) = compared(tmp_path, "program").tasks_changed
    assert (task.task_id, task.reason) == ("t/2", "program")


def test_another_strategy(tmp_path):
    ref = refresh(tmp_path)
    other = Snapshot(ref.root, "curation", "random")
    rows = ref.open().read().head(1)
    other.append(rows.to_dicts(), rows.to_arrow().schema)
    other.publish(config={"strategy": "random"}, upstream=ref.open().manifest["upstream"])
    found = diff(ref, other.ref)
    assert [change.reason for change in found.samples_lost] == ["strategy"] * 2


def test_what_the_sides_do_not_tell_is_unknown(tmp_path):
    """Folders alone know their rows; with the root they know the line again."""
    root = tmp_path / "root"
    old, new = refresh(root), refresh(root, change={"t-2-1": {"speedup": 4.0}})
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
    found = diff(refresh(tmp_path), line(tmp_path, many))
    data = json.loads(to_json(found))
    assert data["reasons"]["samples_gained"] == {"task": 70} and len(data["samples_gained"]) == 70
    text = to_markdown(found)
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    assert text.count("And 20 more: see the JSON.") == 2
    inline = [child.type for token in tokens for child in token.children or ()]
    assert "html_inline" not in inline and "html_block" not in {token.type for token in tokens}
    assert LOST.keys() == GAINED.keys()
