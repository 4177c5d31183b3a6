"""`concur gc` on real snapshots and real locks: what is needed stays, whatever is killed."""

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.cli.main import main
from flows.gc import DAY_S, TRASH, Stored, collect, decide, scan
from flows.runtime.lock import in_use
from kernels_eval.errors import UsageError
from kernels_eval.records import stable_hash
from tasks.store.snapshot import Snapshot
from tests.support.commands import environment

SCHEMA = pa.schema([("key", pa.string())])


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def made(root, stage, name, *upstream, days=100.0, finished=True):
    """A snapshot as a stage writes it, so many days ago."""
    snapshot = Snapshot(str(root), stage, stable_hash(name))
    snapshot.append([{"key": name}], SCHEMA)
    created = datetime.now(UTC) - timedelta(days=days)
    if finished:
        snapshot.publish(
            config={},
            upstream=[one.fingerprint for one in upstream],
            extra={"created_at": created.isoformat()},
        )
    for path in [*root.joinpath(stage, snapshot.fingerprint).rglob("*"), snapshot.path]:
        os.utime(path, (created.timestamp(),) * 2)
    return snapshot


def refresh(root, night, days):
    tasks = made(root, "tasks", f"tasks {night}", days=days)
    candidates = made(root, "synthesis", f"candidates {night}", tasks, days=days - 0.1)
    verdicts = made(root, "verification", f"verdicts {night}", candidates, tasks, days=days - 0.2)
    return [tasks, candidates, verdicts, made(root, "curation", night, verdicts, days=days - 0.3)]


def places(root):
    return {(one.stage, one.fingerprint) for one in scan(root)}


def of(*snapshots):
    return {(one.stage, one.fingerprint) for one in snapshots}


def gone(root, keep=0, younger_than_days=0.0):
    """What `delete` removed, which is what the dry run had said."""
    before, said = places(root), []
    for delete in (False, True):
        assert places(root) == before
        told = collect(str(root), keep=keep, younger_than_days=younger_than_days, delete=delete)[
            "snapshots"
        ]
        said.append({(one["stage"], one["fingerprint"]) for one in told if not one["stays"]})
    assert said[0] == said[1] == before - places(root)
    return said[0]


def test_the_newest_of_each_stage_stay_with_what_they_were_made_of(root):
    nights = [refresh(root, f"night {n}", days=50 - n) for n in range(4)]
    shared = made(root, "curation", "from an old night", nights[0][2], days=1)
    assert gone(root, keep=2) == of(*nights[1], *nights[2], nights[0][3]) - of(*nights[2][:3])
    assert of(shared, *nights[0][:3]) <= places(root)


def test_what_is_young_stays_and_what_is_half_done_while_it_is_young(root):
    old, young = made(root, "synthesis", "a", days=9), made(root, "synthesis", "b", days=8)
    half = [made(root, "synthesis", f"half {n}", days=n, finished=False) for n in (9, 8)]
    assert gone(root, younger_than_days=8.5) == of(old, half[0])
    assert places(root) == of(young, half[1])


def test_folders_that_are_no_snapshot_and_links_are_left_alone(root, tmp_path):
    other = made(tmp_path / "other", "tasks", "elsewhere")
    ours = made(root, "tasks", "ours")
    name = stable_hash("an ablation")
    (root / "ablations" / name).mkdir(parents=True)
    (root / "tasks" / stable_hash("link")).symlink_to(other.path)
    (root / "stage").symlink_to(tmp_path / "other" / "tasks")
    moved = root / "tasks" / stable_hash("renamed")
    (root / "tasks" / ours.fingerprint).rename(moved)
    assert gone(root) == set()
    assert (root / "ablations" / name).is_dir() and moved.is_dir() and other.finished
    (root / "linked-root").symlink_to(root)
    for wrong in (root / "linked-root", root / "absent", "s3://bucket"):
        with pytest.raises(UsageError, match="is not a folder of this machine"):
            collect(str(wrong), keep=0, younger_than_days=0)


@pytest.mark.parametrize("text", ["{", "[]", '{"stage": "tasks"}', "null"])
def test_a_manifest_that_cannot_be_read_stops_everything(root, text):
    made(root, "synthesis", "fine")
    broken = made(root, "tasks", "broken")
    (root / "tasks" / broken.fingerprint / "manifest.json").write_text(text)
    with pytest.raises(UsageError, match="cannot read the manifest"):
        collect(str(root), keep=0, younger_than_days=0, delete=True)
    assert len(list(root.glob("*/*"))) == 2


KILLED = """
import os, signal, sys
from flows import gc
calls = [0]
def killing(real):
    def call(*args, **kwargs):
        calls[0] += 1
        if calls[0] == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return call
where = {"rename": gc.Path, "unlink": os, "rmdir": os}[sys.argv[2]]
setattr(where, sys.argv[2], killing(getattr(where, sys.argv[2])))
gc.collect(sys.argv[1], keep=1, younger_than_days=0, delete=True)
"""


@pytest.mark.parametrize(
    "call, number",
    [
        ("rename", 3),
        ("unlink", 2),
        pytest.param("rename", 1, marks=pytest.mark.slow),
        pytest.param("rmdir", 1, marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_any_moment_leaves_what_stays_whole_and_the_next_gc_ends_it(root, call, number):
    old, new = refresh(root, "old", days=50), refresh(root, "new", days=40)
    words = [sys.executable, "-c", KILLED, str(root), call, str(number)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    there = {one.fingerprint: one for one in scan(root)}
    for one in there.values():
        assert set(one.upstream) <= there.keys() and one.finished
    assert {one.fingerprint for one in new} <= there.keys()
    collect(str(root), keep=1, younger_than_days=0, delete=True)
    assert places(root) == of(*new) and not (root / TRASH).exists() and old


HOLDS = """
import sys, time
from flows.runtime.lock import in_use
with in_use(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_run_holds_its_workspace_with_others_and_lets_go_when_it_dies(root):
    made(root, "tasks", "old")
    words = [sys.executable, "-c", HOLDS, str(root)]
    holder = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with in_use(str(root)), pytest.raises(UsageError, match="a run or another gc is using"):
            collect(str(root), keep=0, younger_than_days=0, delete=True)
        assert collect(str(root), keep=0, younger_than_days=0)["freed_bytes"] > 0
    finally:
        holder.kill()
        holder.wait()
    assert len(gone(root)) == 1


STAGES = st.sampled_from(["tasks", "synthesis", "curation"])


@st.composite
def workspaces(draw):
    """Snapshots, each made of some of those before it."""
    found = []
    for number in range(draw(st.integers(0, 12))):
        upstream = draw(st.lists(st.sampled_from(found or [None]), max_size=3)) if found else []
        found.append(
            Stored(
                stage=draw(STAGES),
                fingerprint=f"{number:032x}",
                finished=draw(st.booleans()),
                upstream=tuple(one.fingerprint for one in upstream),
                changed_s=draw(st.floats(0, 100)) * DAY_S,
                bytes=1,
            )
        )
    return found


@settings(max_examples=60)
@given(workspaces(), st.integers(0, 3), st.floats(0, 100))
def test_nothing_that_stays_loses_what_it_was_made_of(there, keep, days):
    decisions = decide(there, keep, days, 100 * DAY_S)
    assert {one.snapshot.fingerprint for one in decisions} == {one.fingerprint for one in there}
    left = {one.snapshot.fingerprint: one.snapshot for one in decisions}
    for one in decisions:
        if not one.stays:
            del left[one.snapshot.fingerprint]
            for other in left.values():
                assert one.snapshot.fingerprint not in other.upstream, "products go first"
    for stage in {one.stage for one in there}:
        finished = [one for one in there if one.stage == stage and one.finished]
        newest = sorted(finished, key=lambda one: (one.changed_s, one.fingerprint))[::-1][:keep]
        assert {one.fingerprint for one in newest} <= left.keys()


def test_a_person_reads_what_would_go_and_json_has_each(root):
    made(root, "tasks", "old")
    words = ["gc", "--root", str(root), "--keep", "0"]
    text = CliRunner().invoke(main, words).output
    assert text.startswith("1 snapshot would go (") and "old and not needed" in text
    assert text.endswith("--delete removes them.\n")
    (one,) = json.loads(CliRunner().invoke(main, [*words, "--json"]).output)["snapshots"]
    assert not one["stays"] and one["reason"] == "old and not needed"
    kept = CliRunner().invoke(main, ["gc", "--root", str(root)]).output
    assert "of the newest 5" in kept and "--delete" not in kept
    assert one["fingerprint"][:12] in text and one["fingerprint"][:12] not in kept
