"""What Prefect retries, what it answers from its cache, and what it makes again: with a real
Prefect."""

import builtins
import shutil
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from kernels_eval import errors
from kernels_eval.errors import DeviceError, GpuLostError, SandboxError, UsageError
from tasks import policy
from tasks.policy import (
    ProgressArtifact,
    by_fingerprint,
    call_stage,
    infrastructure_only,
    stage_options,
)
from tasks.progress import observed_by, report
from tasks.store import Snapshot, SnapshotRef, fingerprint
from tests.support.cases import cases

CASES = cases("policy")

SCHEMA = pa.schema([("value", pa.int64())])
CALLS = []
FAULTS = []


def planned(root, value):
    return Snapshot(root, "stage", fingerprint("stage", {"value": value}))


def fill(root, value):
    """A stage as small as one can be: raises what `FAULTS` holds, one a call, then writes its
    snapshot."""
    CALLS.append(value)
    if FAULTS:
        raise FAULTS.pop(0)
    snapshot = planned(root, value)
    if not snapshot.finished:
        snapshot.append([{"value": value}], SCHEMA)
        snapshot.publish(config={"value": value})
    return snapshot.ref


@pytest.fixture(autouse=True)
def _nothing_called_yet():
    CALLS.clear()
    FAULTS.clear()


# -- what is retried -------------------------------------------------------------------------------


@pytest.mark.parametrize("name, again", CASES["a_machines_fault"].items())
def test_a_machines_fault_is_retried_and_nothing_else(name, again):
    from prefect.states import Completed, Failed

    error = (vars(errors).get(name) or getattr(builtins, name))("a reason")
    assert infrastructure_only(None, None, Failed(message=str(error), data=error)) is again
    assert infrastructure_only(None, None, Completed(data=1)) is False


def test_a_stage_is_retried_twice_with_growing_pauses():
    options = stage_options(planned)
    assert (options["retries"], options["retry_delay_seconds"]) == (2, [5, 30])
    assert options["retry_condition_fn"] is infrastructure_only
    assert options["persist_result"] is True


def test_every_step_is_made_with_this_policy():
    from tasks.benchmark.step import score_benchmark
    from tasks.curation.step import curate
    from tasks.sources.step import load_tasks
    from tasks.synthesis.step import refine, synthesise
    from tasks.training.step import train
    from tasks.verification.step import verify_chunk
    from tasks.workload.step import measure_workloads

    for step in (
        load_tasks,
        measure_workloads,
        synthesise,
        refine,
        verify_chunk,
        curate,
        train,
        score_benchmark,
    ):
        assert (step.retries, step.retry_condition_fn) == (2, infrastructure_only), step.name
        assert step.retry_delay_seconds == [5, 30] and step.retry_jitter_factor == 0.5, step.name
    for step in (synthesise, refine, curate, train, score_benchmark):
        assert step.cache_key_fn is not None and step.persist_result, step.name


@pytest.mark.slow
def test_a_lost_gpu_is_tried_again_and_an_unreadable_input_is_not(prefect_home, tmp_path):
    from prefect import flow, task

    step = task(**{**stage_options(planned), "retry_delay_seconds": 0})(fill)

    @flow
    def line(value: int) -> SnapshotRef:
        return step(str(tmp_path), value)

    FAULTS[:] = [GpuLostError("gone", "look at it"), SandboxError("died")]
    assert line(1).open().finished
    assert CALLS == [1, 1, 1]

    CALLS.clear()
    FAULTS[:] = [GpuLostError("gone", "look at it")] * 3
    with pytest.raises(GpuLostError, match="look at it"):
        line(2)
    assert CALLS == [2, 2, 2]  # the third fault ends it

    for error in (UsageError("unreadable", "mend it"), DeviceError("no GPU"), ValueError("a bug")):
        CALLS.clear()
        FAULTS[:] = [error]
        with pytest.raises(type(error), match=str(error.args[0])):
            line(3)
        assert CALLS == [3], error


# -- what is cached --------------------------------------------------------------------------------


def test_the_cache_key_is_the_snapshot_and_its_place(tmp_path):
    key = by_fingerprint(planned)

    def of(root, value):
        return key(None, {"root": root, "value": value})

    assert of("a", 1) == of("a", 1)
    assert (
        len({of("a", 1), of("a", 2), of("b", 1)}) == 3
    )  # another root is another snapshot, whatever the fingerprint
    assert planned("a", 1).fingerprint in of("a", 1)


@pytest.mark.slow
def test_a_cached_snapshot_that_was_deleted_or_lost_its_manifest_is_made_again(
    prefect_home, tmp_path
):
    from prefect import flow, task

    step = task(**stage_options(planned))(fill)

    @flow
    def line(value: int) -> SnapshotRef:
        return call_stage(step, str(tmp_path), value)

    first = line(7)
    assert first.open().finished and CALLS == [7]
    assert line(7) == first and CALLS == [7]  # Prefect's answer, in another flow run

    shutil.rmtree(first.open().path)
    assert line(7) == first
    assert first.open().finished and first.open().read()["value"].to_list() == [7]
    assert CALLS == [7, 7]

    assert line(7) == first and CALLS == [7, 7]  # and what was made again is cached again
    (Path(first.open().path) / "manifest.json").unlink()
    assert line(7).open().finished and CALLS == [7, 7, 7]
    assert line(8) != first and CALLS == [7, 7, 7, 8]
    assert any((prefect_home / "storage").iterdir())  # results went here, not to the user's home


# -- what is shown ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_progress_artifact_follows_the_stage_and_ends_full(prefect_home, monkeypatch):
    import prefect.artifacts
    from prefect import flow
    from prefect.artifacts import Artifact

    now, sent, update = [100.0], [], prefect.artifacts.update_progress_artifact
    monkeypatch.setattr(policy, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(
        prefect.artifacts,
        "update_progress_artifact",
        lambda id, **kept: (sent.append(kept), update(id, **kept)),
    )

    @flow
    def line() -> None:
        with observed_by(shown := ProgressArtifact()):
            for done, seconds in ((1, 1.0), (2, 2.5), (4, 3.0), (31, 31.0), (40, 31.1)):
                now[0] = 100.0 + seconds
                report("stage", done, 40)
        shown.end()

    line()
    # the first of a stage and the end always show; 1.5 s after the first is too early
    assert [(kept["progress"], kept["description"]) for kept in sent] == [
        (2.5, "stage: 1 of 40"),
        (10.0, "stage: 4 of 40"),
        (77.5, "stage: 31 of 40, 9 s left"),
        (100.0, "stage: 40 of 40"),
        (100.0, "the run is done"),
    ]
    stored = Artifact.get("progress")
    assert stored is not None and (stored.type, stored.data) == ("progress", 100.0)


def test_what_a_stage_waits_for_is_replaced_at_once(monkeypatch):
    """Also where the next report, which nothing follows for long, comes in the same second."""
    import prefect.artifacts

    sent = []
    monkeypatch.setattr(prefect.artifacts, "create_progress_artifact", lambda **_: "an id")
    monkeypatch.setattr(
        prefect.artifacts,
        "update_progress_artifact",
        lambda _, description, **kept: sent.append(description),
    )
    monkeypatch.setattr(policy, "time", SimpleNamespace(monotonic=lambda: 100.0))
    shown = ProgressArtifact()
    for done, note in (
        *((0, "waits for a CPU"), (0, "waits for a CPU"), (0, "a worker has started")),
        *((1, "correct t"), (2, "correct u")),
    ):
        shown("confirmation", done, 9, note)
    assert sent == [
        "confirmation: 0 of 9: waits for a CPU",
        "confirmation: 0 of 9: a worker has started",
        "confirmation: 1 of 9",
    ]


def test_progress_that_cannot_be_shown_stops_nothing_and_is_said_once(monkeypatch, caplog):
    import prefect.artifacts

    def gone(*_, **__):
        raise ConnectionError("the server is away")

    monkeypatch.setattr(prefect.artifacts, "create_progress_artifact", lambda **_: "an id")
    monkeypatch.setattr(prefect.artifacts, "update_progress_artifact", gone)
    shown = ProgressArtifact()
    for stage in ("a", "b"):
        shown(stage, 1, 1, "")
    assert [record.getMessage() for record in caplog.records] == [
        "progress is not shown for now: ConnectionError: the server is away"
    ]


def test_a_name_that_cannot_be_made_is_the_other():
    def _count_tasks(tasks):
        return f"count {len(tasks)} tasks"

    name = policy.sentence(_count_tasks, "count tasks")
    assert name(parameters={"tasks": [1, 2]}) == "count 2 tasks"
    assert name(parameters={"tasks": None}) == "count tasks"


def test_an_observer_hears_nothing_after_it_left():
    heard = []
    with pytest.raises(RuntimeError), observed_by(lambda *args: heard.append(args)):
        report("a", 1, 2, "note")
        raise RuntimeError("the stage failed")
    report("a", 2, 2)
    assert heard == [("a", 1, 2, "note")]
