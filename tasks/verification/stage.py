"""Candidates in, verdicts out, row by row: what is verified stays verified.

Guarantees: one verdict per candidate in the finished snapshot; a verdict reached under the same protocol, verifier code and device, in
this snapshot or any earlier one, is reused; a killed run loses at most the candidates in flight.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator, Sequence
from typing import Any

from kernels_eval.pool import Pool
from kernels_eval.protocol import Finding, Prepared, verdict_of
from kernels_eval.records import Candidate, KernelTask, Language, Verdict, stable_hash
from kernels_eval.worker import require_device
from tasks.progress import report
from tasks.schemas import CANDIDATES, VERDICTS
from tasks.sources.stage import read_tasks
from tasks.store import Snapshot, SnapshotRef, code_version, fingerprint, known_rows
from tasks.verification.config import VerificationConfig

STAGE = "verification"
logger = logging.getLogger(__name__)


def device_name(language: Language) -> str:
    """What verdicts are keyed by: the GPU's name, or the processor's. Raises DeviceError where the language's device is missing."""
    require_device(language)
    if language.needs_gpu:
        from kernels_eval.worker import visible_gpus

        return visible_gpus()[0].split(",")[0].strip()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as handle:
            names = [line.split(":", 1)[1].strip() for line in handle if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


class Verification:
    """The verification of one candidates snapshot: plan it, work through its chunks, publish."""

    def __init__(self, candidates: SnapshotRef, tasks: SnapshotRef, config: VerificationConfig, language: Language) -> None:
        self.config, self.language = config, language
        self._upstream = [candidates.fingerprint, tasks.fingerprint]
        self._candidates, self._tasks = candidates, tasks
        self._code = code_version("kernels_eval")
        self._device = device_name(language)
        self.quarantined: list[str] = []
        key = {"eval": config.eval.model_dump(mode="json"), "device": self._device, "language": language.value}
        self.snapshot = Snapshot(candidates.root, STAGE, fingerprint(STAGE, key, self._upstream, self._code))

    def verdict_key(self, candidate_id: str) -> str:
        """hash(candidate, protocol, device, verifier code): the identity of a verdict across snapshots."""
        return stable_hash([candidate_id, self.config.eval.model_dump(mode="json"), self._device, self._code])

    def pending(self) -> list[tuple[KernelTask, Candidate]]:
        """Candidates still without a verdict, by task. Reuses rows of this and earlier snapshots first."""
        self.snapshot.recover(VERDICTS)
        wanted = candidates_of(self._candidates)
        by_id = {task.task_id: task for task in read_tasks(self._tasks)}
        done = self.snapshot.keys("candidate_id")
        keys = {self.verdict_key(c.candidate_id) for c in wanted if c.candidate_id not in done}
        reused = known_rows(self.snapshot.root, STAGE, "verdict_key", keys, exclude=self.snapshot.fingerprint) if keys else []
        self.snapshot.append(reused, VERDICTS)
        done |= {row["candidate_id"] for row in reused}
        self.total, self.reused = len(wanted), len(done)
        left = [(by_id[c.task_id], c) for c in wanted if c.candidate_id not in done]
        self.snapshot.append([self._row(_no_code(*pair)) for pair in left if pair[1].code is None], VERDICTS)  # needs no worker
        left = [pair for pair in left if pair[1].code is not None]
        return sorted(left, key=lambda pair: (pair[0].task_id, pair[1].sample_index))

    def _row(self, verdict: Verdict) -> dict[str, Any]:
        return verdict.model_dump(mode="json") | {"verdict_key": self.verdict_key(verdict.candidate_id)}

    def chunks(self, pending: Sequence[tuple[KernelTask, Candidate]]) -> Iterator[list[tuple[KernelTask, Candidate]]]:
        for start in range(0, len(pending), self.config.chunk_size):
            yield list(pending[start : start + self.config.chunk_size])

    def pool(self) -> Pool:
        config = self.config
        return Pool(self.language, config.eval, workers=config.workers, builders=config.builders, address=config.ray_address)

    def verify(self, pool: Pool, chunk: Sequence[tuple[KernelTask, Candidate]], done_before: int = 0) -> dict[str, int]:
        """Verify one chunk, adding each verdict as it is reached. Returns how many of each status."""
        done = self.snapshot.keys("candidate_id")  # a retried chunk does only what is left
        left = [pair for pair in chunk if pair[1].candidate_id not in done]
        counts: dict[str, int] = {}
        with self.snapshot.journal(VERDICTS) as add:
            for number, verdict in enumerate(pool.verify(left), start=1):
                add(self._row(verdict))
                counts[verdict.status.value] = counts.get(verdict.status.value, 0) + 1
                report(STAGE, done_before + number, self.total, f"{verdict.status.value} {verdict.task_id}")
        for line in pool.quarantined[len(self.quarantined) :]:
            logger.warning("a worker was put aside, the run goes on with the others: %s", line)
            self.quarantined.append(line)
        return counts

    def publish(self) -> SnapshotRef:
        verdicts = self.snapshot.read(columns=["candidate_id", "status"], unique="candidate_id")
        counts = dict(sorted(verdicts["status"].value_counts().iter_rows())) if len(verdicts) else {}
        extra = {"status_counts": counts, "device": self._device, "language": self.language.value, "quarantined": self.quarantined}
        return self.snapshot.publish(config=self.config, upstream=self._upstream, rows=len(verdicts), extra=extra).ref


def run(candidates: SnapshotRef, tasks: SnapshotRef, config: VerificationConfig, language: Language) -> SnapshotRef:
    """The whole stage as a plain call: returns a finished snapshot of tasks.schemas.VERDICTS."""
    work = Verification(candidates, tasks, config, language)
    if work.snapshot.finished:
        return work.snapshot.ref
    pending = work.pending()
    if pending:
        with work.pool() as pool:
            done = work.reused
            for chunk in work.chunks(pending):
                work.verify(pool, chunk, done)
                done += len(chunk)
    return work.publish()


def _no_code(task: KernelTask, candidate: Candidate) -> Verdict:
    reason = candidate.parse_reason or "no_code_block"
    finding = Finding(reason=reason, detail="the response holds no complete module")
    return verdict_of(task, candidate, Prepared(candidate_id=candidate.candidate_id), finding)


def candidates_of(ref: SnapshotRef) -> list[Candidate]:
    columns = [name for name in CANDIDATES.names if name != "request_key"]
    rows = ref.open().read(columns=columns, unique="candidate_id").iter_rows(named=True)
    return [Candidate.model_validate(_known(row, columns)) for row in rows]


def _known(row: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: row[name] for name in names}
