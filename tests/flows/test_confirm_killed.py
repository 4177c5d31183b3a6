"""A refresh that is killed with SIGKILL while it confirms, by the real command: what was confirmed
stays, nothing is confirmed twice, and every sample of the training set is confirmed in the end."""

import json
import signal
from collections import Counter

import polars as pl
import pytest
import yaml

from tests.support.commands import Running, kill_tree, tiny
from tests.support.recordings import written
from tests.support.waiting import until

PROFILE = tiny("kept", tasks=2, training={}, benchmark={}) | {
    "synthesis": {"sampler": "recorded", "tokenizer": "small", "samples_per_task": 5},
    # all that is correct is taken: there is something to confirm after the kill
    "curation": {"strategy": "random", "size": 10, "max_per_task": None},
}
REFRESH_S = 900

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def journalled(root):
    """The confirmed verdicts of a run that was killed, or still works."""
    rows = []
    for journal in root.glob("verification/*/.journal-*.jsonl"):
        if not (journal.parent / "manifest.json").exists():
            lines = journal.read_text().split("\n")[:-1]
            rows += [row for row in map(json.loads, lines) if row["level"] == "confirm"]
    return {row["candidate_id"]: row for row in rows if row["status"] == "correct"}


def test_killed_while_it_confirms(tmp_path):
    (tmp_path / "kept.yaml").write_text(yaml.safe_dump(PROFILE))
    command = ("run", "--only", "refresh", "--profile", "kept.yaml", "--root", "out")
    root = tmp_path / "out"
    first = Running(*command, cwd=tmp_path)
    try:
        first.wait_for(r"^confirmation +0/\d+ ", REFRESH_S)
        until(lambda: journalled(root), "a confirmed verdict", REFRESH_S)
    finally:
        kill_tree(first.process)
    assert first.process.returncode == -signal.SIGKILL
    before = journalled(root)
    assert before and not list(root.glob("curation/*/manifest.json"))

    second = Running(*command, cwd=tmp_path)
    try:
        assert second.finish(REFRESH_S) == 0, "".join(second.stderr)[-4000:]
    finally:
        kill_tree(second.process)
    (manifest,) = [
        path
        for path in root.glob("verification/*/manifest.json")
        if "confirmation" in json.loads(path.read_text())
    ]
    told = json.loads(manifest.read_text())["confirmation"]
    rows = written(manifest.parent, ["candidate_id", "level", "status", "timing"])
    assert len(rows) == 10 and set(Counter(row["candidate_id"] for row in rows).values()) == {1}
    after = {row["candidate_id"]: row for row in rows}
    for name, row in before.items():
        speedup = row["timing"]["speedup"]
        assert after[name]["timing"]["speedup"] == speedup, "it was not measured again"
    assert len(before) < told["proposed"], "it was killed in the middle"
    (curated,) = root.glob("curation/*/manifest.json")
    taken = pl.read_parquet(curated.parent / "part-*.parquet")
    assert json.loads(curated.read_text())["unconfirmed"] == 0
    assert {after[name]["level"] for name in taken["candidate_id"]} == {"confirm"}
    assert taken.height == told["confirmed"] > 0
    assert (
        f"Confirmed {told['confirmed']} of {told['proposed']}" in (root / "morning.md").read_text()
    )
