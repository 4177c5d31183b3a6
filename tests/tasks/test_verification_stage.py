"""The verification stage on real C++ kernels: every candidate once, and what is verified stays verified across snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kernels_eval.config import EvalConfig, TimingConfig
from kernels_eval.errors import DeviceError, GpuLostError, UsageError
from kernels_eval.pool import start_ray
from kernels_eval.protocol import Finding, Prepared, verdict_of
from kernels_eval.records import Candidate, KernelTask, Language, Verdict, candidate_id
from tasks.progress import observed_by
from tasks.schemas import CANDIDATES, TASKS, VERDICTS
from tasks.sources import bundled
from tasks.store import Snapshot, SnapshotRef, known_rows
from tasks.synthesis.parsing import parse_response
from tasks.verification import stage
from tasks.verification.config import VerificationConfig

CONFIG = VerificationConfig(eval=EvalConfig(timing=TimingConfig(max_s=0.3)), workers=1, builders=1, chunk_size=2)
NAMES = ("cumulative_sum", "softmax_rows")


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    import ray

    start_ray()
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def tasks() -> list[KernelTask]:
    return [task for task in bundled.load("train") if task.name in NAMES]


def answer(task: KernelTask, number: int) -> Candidate:
    """A recorded response, as synthesis would have stored it."""
    text = bundled.responses(task.name, "cpp")[number]
    parsed = parse_response(text)
    return Candidate(
        candidate_id=candidate_id(task, "recorded", Candidate.model_fields["sampling"].default, number, text),
        task_id=task.task_id,
        language=Language.CPP,
        generator="recorded",
        sample_index=number,
        response=text,
        reasoning=parsed.reasoning,
        answer=parsed.answer,
        code=parsed.code,
        parse_reason=parsed.parse_reason,
    )


def without_code(task: KernelTask, number: int) -> Candidate:
    base = answer(task, 0).model_dump() | {"candidate_id": f"cut-{number}", "sample_index": number, "code": None}
    return Candidate.model_validate(base | {"parse_reason": "truncated"})


def tasks_snapshot(root: str, tasks: list[KernelTask]) -> SnapshotRef:
    snapshot = Snapshot(root, "tasks", "t")
    if not snapshot.finished:
        snapshot.append([task.model_dump(mode="json") for task in tasks], TASKS)
        snapshot.publish(config={})
    return snapshot.ref


def candidates_snapshot(root: str, name: str, candidates: list[Candidate]) -> SnapshotRef:
    snapshot = Snapshot(root, "synthesis", name)
    snapshot.append([c.model_dump(mode="json") | {"request_key": f"r-{c.candidate_id}"} for c in candidates], CANDIDATES)
    snapshot.publish(config={})
    return snapshot.ref


def verdicts_of(ref: SnapshotRef) -> dict[str, dict]:
    rows = ref.open().read().to_dicts()
    assert len({row["candidate_id"] for row in rows}) == len(rows)
    return {row["candidate_id"]: row for row in rows}


def reported(candidates: SnapshotRef, tasks: SnapshotRef, config: VerificationConfig = CONFIG) -> tuple[SnapshotRef, list[tuple[int, int]]]:
    """Run the stage. Returns its snapshot and the progress it reported: one pair (done, total) per verdict that was newly reached."""
    seen: list[tuple[int, int]] = []
    with observed_by(lambda name, done, total, note: seen.append((done, total))):
        return stage.run(candidates, tasks, config, Language.CPP), seen


@pytest.mark.slow
def test_verdicts_are_kept_and_only_the_new_candidate_is_verified(ray_here: None, tmp_path: Path, tasks: list[KernelTask]) -> None:
    root = str(tmp_path)
    task_ref = tasks_snapshot(root, tasks)
    first_asked = [answer(tasks[0], 0), answer(tasks[1], 0), without_code(tasks[0], 7)]
    first, seen = reported(candidates_snapshot(root, "c1", first_asked), task_ref)
    before = verdicts_of(first)
    assert set(before) == {c.candidate_id for c in first_asked}
    assert len(seen) == 2 and seen[-1][1] == 3  # the one without code needed no worker
    assert before["cut-7"]["status"] == "no_code" and before["cut-7"]["reason"] == "truncated"
    right, wrong = (before[candidate.candidate_id] for candidate in first_asked[:2])
    assert (right["status"], wrong["status"]) == ("correct", "incorrect"), (right["detail"], wrong["detail"])
    assert right["timing"]["speedup"] > 0 and wrong["timing"] is None
    manifest = first.open().manifest
    counts = {"correct": 1, "incorrect": 1, "no_code": 1}
    assert (manifest["rows"], manifest["status_counts"], manifest["language"]) == (3, counts, "cpp")
    for row in before.values():  # what is stored is a legal verdict
        Verdict.model_validate({name: value for name, value in row.items() if name != "verdict_key"})

    # one candidate more: another snapshot, and only that one is run
    new = answer(tasks[1], 1)
    second, seen = reported(candidates_snapshot(root, "c2", [*first_asked, new]), task_ref)
    after = verdicts_of(second)
    assert second.fingerprint != first.fingerprint
    assert seen == [(4, 4)]
    assert {key: after[key] for key in before} == before  # the very same rows, timings included
    assert set(after) - set(before) == {new.candidate_id}
    assert verdicts_of(first) == before

    # the same again: nothing is done
    again, seen = reported(SnapshotRef(root=root, stage="synthesis", fingerprint="c2"), task_ref)
    assert again == second and seen == []

    # machines are no part of a verdict: the same snapshot; the protocol is: other keys, so nothing would be reused
    def planned(config: VerificationConfig) -> stage.Verification:
        return stage.Verification(SnapshotRef(root=root, stage="synthesis", fingerprint="c2"), task_ref, config, Language.CPP)

    assert planned(CONFIG.model_copy(update={"workers": 7, "chunk_size": 64})).snapshot.ref == second
    stricter = CONFIG.model_copy(update={"eval": EvalConfig(timing=TimingConfig(max_s=0.4))})
    other = planned(stricter)
    assert other.snapshot.ref != second
    assert known_rows(root, "verification", "verdict_key", {other.verdict_key(key) for key in after}) == []
    assert {row["verdict_key"] for row in after.values()} == {planned(CONFIG).verdict_key(key) for key in after}


@pytest.mark.slow
def test_a_run_that_was_cut_short_does_only_the_rest(ray_here: None, tmp_path: Path, tasks: list[KernelTask]) -> None:
    root = str(tmp_path)
    task_ref = tasks_snapshot(root, tasks)
    asked = [answer(tasks[0], 0), answer(tasks[0], 1), answer(tasks[1], 0)]
    candidates = candidates_snapshot(root, "c1", asked)
    work = stage.Verification(candidates, task_ref, CONFIG, Language.CPP)
    pending = work.pending()
    assert [c.candidate_id for _, c in pending] == [c.candidate_id for c in asked] and work.total == 3
    with work.pool() as pool:
        counts = work.verify(pool, pending[:1])
    assert sum(counts.values()) == 1 and not work.snapshot.finished
    with pytest.raises(UsageError, match="unfinished"):
        _ = work.snapshot.manifest
    kept = verdicts_of(work.snapshot.ref)

    again = stage.Verification(candidates, task_ref, CONFIG, Language.CPP)
    assert [c.candidate_id for _, c in again.pending()] == [c.candidate_id for c in asked[1:]]
    ref, seen = reported(candidates, task_ref)
    assert len(seen) == 2 and seen[-1] == (3, 3)
    after = verdicts_of(ref)
    assert {key: after[key] for key in kept} == kept and len(after) == 3
    assert ref.open().finished and ref == work.snapshot.ref


class Judge:
    """A pool that needs no compiler: every kernel is wrong, and the machine fails after `faults_after` of them."""

    def __init__(self, faults_after: int | None = None) -> None:
        self.faults_after = faults_after
        self.asked: list[str] = []
        self.quarantined = ["cuda:1 failed its canary twice"] if faults_after is None else []

    def verify(self, pairs: Sequence[tuple[KernelTask, Candidate]]) -> Iterator[Verdict]:
        for number, (task, candidate) in enumerate(pairs):
            if number == self.faults_after:
                raise GpuLostError("the device is gone")
            self.asked.append(candidate.candidate_id)
            finding = Finding(reason="wrong_output", detail="as always")
            yield verdict_of(task, candidate, Prepared(candidate_id=candidate.candidate_id), finding)


def test_a_retried_chunk_does_only_what_has_no_verdict_yet(tmp_path: Path, tasks: list[KernelTask]) -> None:
    """What Prefect's retry after a lost device relies on: the verdicts before the fault are kept."""
    root = str(tmp_path)
    asked = [answer(task, number) for task in tasks for number in range(2)]
    candidates = candidates_snapshot(root, "c1", asked)
    work = stage.Verification(candidates, tasks_snapshot(root, tasks), CONFIG, Language.CPP)
    chunk = work.pending()
    with pytest.raises(GpuLostError):
        work.verify(Judge(faults_after=3), chunk)
    assert len(verdicts_of(work.snapshot.ref)) == 3
    judge = Judge()
    assert work.verify(judge, chunk) == {"incorrect": 1}
    assert judge.asked == [chunk[3][1].candidate_id]
    assert work.verify(judge, chunk) == {} and len(judge.asked) == 1
    published = work.publish()
    assert set(verdicts_of(published)) == {c.candidate_id for c in asked}
    assert published.open().manifest["quarantined"] == judge.quarantined, "who reads the snapshot sees which device was given up"


def test_a_larger_snapshot_asks_only_for_what_is_new(tmp_path: Path, tasks: list[KernelTask]) -> None:
    root = str(tmp_path)
    task_ref = tasks_snapshot(root, tasks)
    old = [answer(tasks[0], 0), answer(tasks[1], 0)]
    first = stage.Verification(candidates_snapshot(root, "c1", old), task_ref, CONFIG, Language.CPP)
    first.verify(Judge(), first.pending())  # never published: verdicts of an unfinished snapshot count as well
    new = answer(tasks[0], 1)
    second = stage.Verification(candidates_snapshot(root, "c2", [*old, new]), task_ref, CONFIG, Language.CPP)
    assert [candidate.candidate_id for _, candidate in second.pending()] == [new.candidate_id]
    assert (second.total, second.reused) == (3, 2)
    assert verdicts_of(second.snapshot.ref) == verdicts_of(first.snapshot.ref)


def test_candidates_without_code_start_no_worker(tmp_path: Path, tasks: list[KernelTask], monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(tmp_path)

    def no_pool(self: stage.Verification) -> None:
        raise AssertionError("a pool was started for nothing")

    monkeypatch.setattr(stage.Verification, "pool", no_pool)
    candidates = candidates_snapshot(root, "c1", [without_code(tasks[0], number) for number in range(3)])
    ref, seen = reported(candidates, tasks_snapshot(root, tasks))
    assert ref.open().manifest["status_counts"] == {"no_code": 3} and seen == []
    assert ref.open().read().columns == VERDICTS.names


def test_chunks_cover_everything_once(tmp_path: Path, tasks: list[KernelTask]) -> None:
    root = str(tmp_path)
    candidates = candidates_snapshot(root, "c1", [answer(task, number) for task in tasks for number in (2, 0, 1)][:5])
    work = stage.Verification(candidates, tasks_snapshot(root, tasks), CONFIG, Language.CPP)
    pending = work.pending()
    chunks = list(work.chunks(pending))
    assert [len(chunk) for chunk in chunks] == [2, 2, 1]
    assert [pair for chunk in chunks for pair in chunk] == pending
    order = [(task.task_id, candidate.sample_index) for task, candidate in pending]
    assert order == sorted(order)  # a task's candidates lie together: its reference is built once


def test_a_language_without_its_device_is_refused_before_anything_is_written(
    tmp_path: Path, tasks: list[KernelTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    root = str(tmp_path)
    candidates = candidates_snapshot(root, "c1", [answer(tasks[0], 0)])
    with pytest.raises(DeviceError, match="need an NVIDIA GPU"):
        stage.run(candidates, tasks_snapshot(root, tasks), CONFIG, Language.CUDA)
    assert not (tmp_path / "verification").exists()
