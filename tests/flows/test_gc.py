"""`concur gc` on real snapshots, a real MLflow database and real locks: what is referred to stays,
whatever is killed."""

import json
import os
import signal
import time
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.cli.common import in_units
from flows.cli.main import main
from flows.ops.gc import collect
from flows.ops.gc_inventory import TRASH, Stored, scan
from flows.ops.gc_plan import DAY_S, Keep, decide
from flows.runtime.root_lock import in_use
from kernels_eval.errors import UsageError
from kernels_eval.records import stable_hash
from tasks.store.snapshot import Snapshot
from tests.support.commands import ROOT

SCHEMA = pa.schema([("key", pa.string())])
NOTHING = Keep(refreshes=0, younger_than_days=0, unfinished_days=0)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CONCUR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def made(root, stage, name, *upstream, days=100, finished=True):
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
    aged(snapshot.path, created.timestamp())
    return snapshot


def refresh(root, night, days, tasks=None):
    found = {"tasks": tasks or made(root, "tasks", f"tasks {night}", days=days)}
    for name, stage, upstream in (
        ("candidates", "synthesis", ("tasks",)),
        ("verdicts", "verification", ("candidates", "tasks")),
        ("curated", "curation", ("verdicts", "candidates", "tasks")),
        ("analysis", "analysis", ("verdicts", "candidates")),
    ):
        above = (found[each] for each in upstream)
        found[name] = made(root, stage, f"{name} {night}", *above, days=days)
    return found


def places(root):
    return {one.place for one in scan(root)}


def of(*snapshots):
    return {f"{one.stage}/{one.fingerprint}" for one in snapshots}


def gone(root, keep=NOTHING, **options):
    """What `--delete` removed, which is what the dry run had said, and nothing before it was asked
    to."""
    before = places(root)
    said = []
    for delete in (False, True):
        assert places(root) == before
        asked = {"without_mlflow": True} | options
        told = collect(str(root), keep=keep, delete=delete, **asked)["snapshots"]
        said.append({f"{one['stage']}/{one['fingerprint']}" for one in told if not one["stays"]})
    removed = before - places(root)
    assert said == [removed, removed] and not (root / TRASH).exists()
    return removed


def gc(root, *words):
    return CliRunner().invoke(main, ["gc", "--root", str(root), *words])


def collected(root, keep=NOTHING):
    return collect(str(root), keep=keep, delete=True, without_mlflow=True)


def reported(snapshot, told):
    """Give a snapshot a report."""
    report = Path(snapshot.path) / "report"
    report.mkdir()
    (report / "report.json").write_text(json.dumps(told))


def aged(path, seconds):
    for each in [*Path(path).iterdir(), path]:
        os.utime(each, (seconds, seconds))


def test_the_newest_refreshes_stay_with_what_they_were_made_of(root):
    tasks = made(root, "tasks", "shared", days=300)
    nights = [refresh(root, f"night {age}", 30 * age, tasks) for age in (1, 2, 3)]
    above = (nights[1][name] for name in ("verdicts", "candidates", "tasks"))
    other = made(root, "curation", "another strategy", *above, days=61)
    adapter = made(root, "training", "adapter", nights[0]["curated"], days=29)
    assert gone(root, Keep(refreshes=2, younger_than_days=0)) == of(*nights[2].values()) - of(tasks)
    assert of(tasks, other, adapter, *nights[0].values(), *nights[1].values()) == places(root)
    assert gone(root, Keep(refreshes=1, younger_than_days=0)) == of(
        other, *nights[1].values()
    ) - of(tasks)
    assert of(tasks, adapter, *nights[0].values()) == places(root)


def test_what_is_young_or_half_done_stays_for_a_while(root):
    young, old = refresh(root, "young", 3), refresh(root, "old", 30)
    begun = made(root, "verification", "begun", days=10, finished=False)
    left = made(root, "verification", "left", days=40, finished=False)
    empty = root / "verification" / stable_hash("somebody's own directory")
    empty.mkdir()
    assert gone(root, Keep(refreshes=0)) == of(left, *old.values())
    assert of(begun, *young.values()) == places(root) and empty.is_dir()


def test_a_report_and_what_its_json_names_stay(root):
    night, unused = refresh(root, "night", 90), refresh(root, "unused", 90)
    scores = made(root, "benchmark", "scores", made(root, "verification", "answers"))
    reported(scores, {"fingerprints": {"analysis": night["analysis"].fingerprint}})
    assert gone(root) == of(*unused.values(), night["curated"])


def test_published_sets_stay_wherever_the_folder_lies(root, tmp_path):
    from tasks.publishing.sets import publish_set
    from tests.support.curated import line, sample

    ref = line(root, [sample("t/1", 0, 10, 6.0)])
    lost = refresh(root, "never published", 90)
    publish_set(str(root), str(tmp_path / "set"), curated=ref.fingerprint)
    assert gone(root) == of(*lost.values())
    (root / "published.jsonl").unlink()  # a folder that an older version published
    kept = places(root)
    assert gone(root, published_folders=(str(tmp_path / "set"),)) == set()
    assert places(root) == kept and gone(root) == kept


@pytest.fixture
def mlflow_uri(root):
    return f"sqlite:///{root}/mlflow.db"


@pytest.mark.slow  # MLflow makes its database: half a minute on a busy machine
def test_runs_and_registered_models_keep_what_they_name_until_they_are_deleted(
    root, mlflow_uri, tmp_path
):
    from mlflow.tracking import MlflowClient

    from tasks.tracking.connection import Destination
    from tasks.tracking.mlflow_sink import log_run
    from tasks.tracking.records import DatasetRef, RunRecord, StageRecord

    nights = {name: refresh(root, name, 90) for name in ("run", "model", "nobody")}
    answers = made(root, "verification", "answers of the tuned model")
    scores = made(root, "benchmark", "scores", answers)
    reported(scores, [nights["run"]["analysis"].fingerprint])
    curated = nights["run"]["curated"]
    run_id = log_run(
        RunRecord(
            run_fingerprint="run",
            name="night",
            datasets=(DatasetRef("set", curated.path, curated.fingerprint),),
            stages=(
                StageRecord(name="benchmark tuned", tags={"fingerprint": answers.fingerprint}),
            ),
        ),
        Destination(mlflow_uri, str(tmp_path / "artifacts"), "concur"),
    )
    client = MlflowClient(mlflow_uri)
    client.create_registered_model("m")
    client.create_model_version(
        "m", str(tmp_path), tags={"concur.curated": nights["model"]["curated"].fingerprint}
    )
    assert gone(root, without_mlflow=False) == of(
        *nights["nobody"].values(), nights["model"]["analysis"]
    )

    for child in client.search_runs([client.get_run(run_id).info.experiment_id]):
        client.delete_run(child.info.run_id)
    assert gone(root, without_mlflow=False) == of(answers, scores, *nights["run"].values())
    client.delete_model_version("m", "1")
    assert gone(root, without_mlflow=False) == of(*nights["model"].values()) - of(
        nights["model"]["analysis"]
    )


@pytest.mark.slow  # MLflow is imported
def test_nothing_is_deleted_where_mlflow_cannot_be_asked(root):
    old = refresh(root, "old", 90)
    (root / "mlflow.db").write_bytes(b"no database" * 100)
    shown = gc(root, "--keep", "0")
    assert shown.exit_code == 0 and "warning: cannot open the tracking database" in shown.stdout
    for said in ("error: cannot open", "--without-mlflow"):
        refused = gc(root, "--keep", "0", "--delete")
        assert refused.exit_code == 1 and refused.stderr.startswith("error: ")
        assert said in refused.stderr and places(root) == of(*old.values())
        (root / "mlflow.db").unlink(missing_ok=True)  # then there is none to ask
    done = gc(root, "--keep", "0", "--delete", "--without-mlflow", "--json")
    told = json.loads(done.stdout)
    assert done.exit_code == 0 and places(root) == set() and told["deleted"]
    assert told["freed_bytes"] == sum(one["bytes"] for one in told["snapshots"]) > 0


def test_a_link_is_never_followed(root, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    outside = made(elsewhere, "verification", "outside")
    inside = made(root, "verification", "inside")
    (Path(inside.path) / "linked").symlink_to(elsewhere)
    (root / "verification" / outside.fingerprint).symlink_to(outside.path)
    (root / "synthesis").symlink_to(elsewhere / "verification")
    assert gone(root) == of(inside)
    assert outside.finished and outside.keys("key") == {"outside"}
    (root / TRASH).symlink_to(elsewhere)
    made(root, "verification", "another")
    with pytest.raises(UsageError, match="is a link"):
        collected(root)
    assert outside.finished and (root / "verification" / stable_hash("another")).exists()


def test_checkpoints_and_logs(root):
    trained = made(root, "training", "done", days=1)
    begun = made(root, "training", "begun", days=1, finished=False)
    for one in (trained, begun):
        checkpoint = Path(one.path) / "checkpoints" / "checkpoint-1"
        checkpoint.mkdir(parents=True)
        (checkpoint / "weights").write_bytes(b"w" * 100_000)
    logs = root / "stack" / "logs"
    logs.mkdir(parents=True)
    for name, days in (("worker.log", 1), ("worker.log.1", 60), ("notes.txt", 60)):
        (logs / name).write_text("said")
        os.utime(logs / name, (time.time() - days * DAY_S,) * 2)
    assert collected(root, Keep())["freed_bytes"] >= 100_000
    assert not (Path(trained.path) / "checkpoints").exists() and (checkpoint / "weights").exists()
    assert {path.name for path in logs.iterdir()} == {"notes.txt", "worker.log"}
    assert trained.finished and trained.keys("key") == {"done"}


def test_a_manifest_that_cannot_be_read_stops_everything(root):
    old, broken = refresh(root, "old", 90), made(root, "curation", "broken")
    (Path(broken.path) / "manifest.json").write_text('{"stage": "cura')
    with pytest.raises(UsageError, match="what it needs is unknown"):
        collected(root)
    assert all(one.finished for one in old.values())


@contextmanager
def child(work):
    """A process that runs `work`, once it has said that it waits (or ended); it may go on when the
    block ends."""
    fork = get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=work, args=(there,))
    process.start()
    there.close()
    try:
        with suppress(EOFError):
            here.recv()
        yield process
    finally:
        with suppress(OSError):  # it may have ended
            here.send("go on")
        process.join()


def wait(channel):
    """Say that this process waits, and do so until it is told to go on."""
    channel.send("waits")
    channel.recv()


@pytest.mark.parametrize("call", ["rename", "unlink", "rmdir"])
@pytest.mark.parametrize("number", [1, 3, 9])
def test_a_kill_at_any_moment_leaves_what_stays_whole_and_the_next_gc_ends_it(root, call, number):
    kept, tasks = refresh(root, "kept", 40), made(root, "tasks", "shared", days=99)
    old = [refresh(root, f"old {age}", age, tasks) for age in (60, 80, 90)]
    keep = Keep(refreshes=1, younger_than_days=0)

    def killed(_):
        real, calls = getattr(os, call), iter(range(1, 1000))

        def counted(*args, **kwargs):
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, call, counted)
        collected(root, keep)

    with child(killed) as process:
        process.join()
    assert process.exitcode == -signal.SIGKILL
    for snapshot in kept.values():
        assert snapshot.finished and len(snapshot.keys("key")) == 1
    for night in old:  # each whole or gone, and nothing without what it was made of
        there = {name for name, one in night.items() if Path(one.path).exists()}
        assert all(night[name].finished and night[name].keys("key") for name in there)
        assert there.isdisjoint({"curated", "verdicts"}) or {"candidates", "tasks"} <= there
        assert "curated" not in there or "verdicts" in there
    gone(root, keep)
    assert places(root) == of(*kept.values())


def test_what_another_process_writes_to_stays_and_is_finished(root):
    snapshot = Snapshot(str(root), "verification", stable_hash("being written"))

    def write(channel):
        with snapshot.journal(SCHEMA, rows_per_part=1000) as add:
            add({"key": "first"})
            wait(channel)
            for number in range(50):
                add({"key": f"more {number}"})
        snapshot.publish(config={}, upstream=[])

    with child(write) as process:
        aged(snapshot.path, 0)
        abandoned = made(root, "verification", "abandoned", finished=False)
        assert gone(root) == of(abandoned)
        (told,) = collect(str(root), keep=NOTHING, without_mlflow=True)["snapshots"]
        assert told["stays"] and told["reason"] == "unfinished, and its journal is open"
    assert process.exitcode == 0
    assert snapshot.finished and len(snapshot.keys("key")) == 51


def test_a_run_holds_its_root_and_lets_go_when_it_dies(root):
    old = refresh(root, "old", 90)

    def work(channel):
        with in_use(str(root)):
            wait(channel)

    with child(work) as process:
        with in_use(str(root)):  # runs do not hinder each other
            pass
        refused = gc(root, "--without-mlflow", "--keep", "0", "--delete")
        assert refused.exit_code == 2 and "a run or another gc is using" in refused.stderr
        assert all(one.finished for one in old.values())
        assert gc(root, "--without-mlflow").exit_code == 0
        process.kill()
        process.join()
    assert gone(root) == of(*old.values())


@pytest.mark.parametrize("flow", ["refresh", "pipeline"])
def test_the_flows_hold_their_root(flow):
    """By reading: a real flow needs a Prefect server, and a gc beside one is tested where there is
    one (`test_line.py` runs both flows)."""
    assert "\n@guarded_flow(" in (ROOT / "flows" / f"{flow}.py").read_text()


NAMES = [f"{number:032x}" for number in range(12)]
STAGES = ("tasks", "synthesis", "verification", "curation", "training", "benchmark", "analysis")


@st.composite
def roots(draw):
    """Any snapshots that name any others made before them, and some that were never there."""
    found = []
    for index, name in enumerate(NAMES[: draw(st.integers(0, len(NAMES)))]):
        finished = draw(st.booleans())
        above, more = (
            draw(st.sets(st.sampled_from([*NAMES[:index], gone * 32]), max_size=most * finished))
            for gone, most in (("f", 4), ("e", 2))
        )
        found.append(
            Stored(
                stage=draw(st.sampled_from(STAGES)),
                fingerprint=name,
                finished=finished,
                upstream=tuple(sorted(above)),
                names=frozenset(above | more),
                changed_s=draw(st.floats(0, 100 * DAY_S)),
                bytes=1,
                has_report=finished and draw(st.booleans()),
                written_by=(
                    draw(st.sampled_from(["", "process 1 writes there"])) if not finished else ""
                ),
            )
        )
    return draw(st.permutations(found))


@settings(max_examples=100, deadline=None)
@given(
    roots(),
    st.sets(st.sampled_from(NAMES)),
    st.sets(st.sampled_from(NAMES)),
    st.builds(
        Keep,
        refreshes=st.integers(0, 4),
        younger_than_days=st.floats(0, 100),
        unfinished_days=st.floats(0, 100),
    ),
)
def test_nothing_that_stays_loses_what_it_was_made_of(there, named, released, keep):
    now_s = 100 * DAY_S
    references = dict.fromkeys(named, "named")
    decisions = decide(there, references, keep, now_s, frozenset(released - named))
    assert sorted(each.snapshot.place for each in decisions) == sorted(one.place for one in there)
    stay = {each.snapshot.fingerprint for each in decisions if each.stays}
    present = {one.fingerprint for one in there}
    for one in there:
        young = one.finished and now_s - one.changed_s < keep.younger_than_days * DAY_S * 0.999
        if one.fingerprint in stay:
            assert one.names & present <= stay
        else:
            assert not (one.fingerprint in named or one.written_by or young)
    left = {one.fingerprint: one.names for one in there if one.fingerprint not in stay}
    for fingerprint in [each.snapshot.fingerprint for each in decisions if not each.stays]:
        assert not any(fingerprint in names for names in left.values())
        del left[fingerprint]


def test_sizes_as_a_person_reads_them():
    sizes = [in_units(size) for size in (0, 999, 1500, 2.5e9, 3e12)]
    assert sizes == ["0 B", "999 B", "1.5 kB", "2.5 GB", "3.0 TB"]


def test_every_option_is_on_the_page_about_cleaning_up():
    text = (ROOT / "docs" / "how-to" / "clean-up.md").read_text(encoding="utf-8")
    options = {name for option in main.commands["gc"].params for name in option.opts} - {"--root"}
    assert [name for name in options if name not in text] == []
