"""The profiling stage: verdicts in, a profile and a finding for each correct one out.

Candidates are rerun one at a time for undisturbed timing; a failed one gets a row with the reason;
a killed run resumes.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernels_eval.config import EvalConfig
from kernels_eval.devices import device_for, gpu_arch
from kernels_eval.profile.bottleneck import findings
from kernels_eval.profile.profiler import Profiler
from kernels_eval.profile.records import KernelProfile, OperatorTime
from kernels_eval.records import Candidate, Json, KernelTask, Language, Record, Verdict, stable_hash
from tasks.keys import keyed
from tasks.profiling.config import ProfileConfig
from tasks.progress import caution, report
from tasks.store import Snapshot, SnapshotRef, known_rows
from tasks.tables import CORRECT, KERNEL_PROFILES, TASKS
from tasks.versions import KERNEL_PROFILE_VERSION

STAGE = "kernel-profiles"
TIMEOUT_S = 120.0
"""Deadline of one program, s."""
BUDGET_S = 0.3
"""Time of the calls profiled by operator, s."""
READ = ("candidate_id", "task_id", "language", "generator", "sample_index", "code", "parse_reason")
DERIVED = ("memory_ms", "compute_ms", "least_ms", "speed_of_light", "sol_score", "kernel_share")


class Line(Record):
    """The snapshots behind profiles: `workloads` count what tasks compute, `references` say where
    their programs spend time."""

    verdicts: SnapshotRef
    candidates: SnapshotRef
    tasks: SnapshotRef
    workloads: SnapshotRef
    references: SnapshotRef


def planned(
    line: Line, config: ProfileConfig, protocol: EvalConfig, language: Language
) -> Snapshot:
    above = [ref for _, ref in line]
    return Snapshot.planned(STAGE, [keyed(config), language], above, KERNEL_PROFILE_VERSION)


def run(line: Line, config: ProfileConfig, protocol: EvalConfig, language: Language) -> SnapshotRef:
    """Return a finished snapshot of tasks.tables.KERNEL_PROFILES, one row per correct verdict.

    Raises DeviceError where the language's device is missing, EvalError where the machine fails."""
    snapshot = planned(line, config, protocol, language)
    if snapshot.finished:
        return snapshot.ref
    snapshot.recover(KERNEL_PROFILES)
    correct = _correct(line.verdicts, config)
    done = snapshot.keys("candidate_id")
    left = {key: row for key, row in correct.items() if row["candidate_id"] not in done}
    with snapshot.journal(KERNEL_PROFILES) as add:
        for row in known_rows(snapshot, "profile_key", list(left), KERNEL_PROFILES):
            add(row | {"candidate_id": left.pop(row["profile_key"])["candidate_id"]})
        if left:
            rows = _profiled(left, line, config, protocol, language)
            for number, row in enumerate(rows, len(correct) - len(left) + 1):
                add(row)
                report(STAGE, number, len(correct), f"{row['limit']} {row['task_id']}")
    limits = snapshot.read(columns=["candidate_id", "limit"], unique="candidate_id")["limit"]
    counts = dict(sorted(limits.fill_null("not profiled").value_counts().iter_rows()))
    extra = {"limit_counts": counts}
    return snapshot.publish(config=config, rows=len(limits), extra=extra).ref


def _correct(verdicts: SnapshotRef, config: ProfileConfig) -> dict[str, Json]:
    rows = verdicts.open().read(unique="candidate_id").filter(CORRECT)
    asked = [keyed(config), KERNEL_PROFILE_VERSION]
    return {
        stable_hash([row["verdict_key"], row["candidate_id"], *asked]): row
        for row in rows.iter_rows(named=True)
    }


def _rows_of(tasks: SnapshotRef) -> dict[str, Json]:
    rows = tasks.open().read(unique="task_id").iter_rows(named=True)
    return {row["task_id"]: row for row in rows}


def _profiled(
    left: dict[str, Json],
    line: Line,
    config: ProfileConfig,
    protocol: EvalConfig,
    language: Language,
) -> Iterator[Json]:
    about = [*map(_rows_of, (line.tasks, line.workloads, line.references))]
    keys = {row["candidate_id"]: key for key, row in left.items()}
    candidates = line.candidates.open().rows_by("candidate_id", keys, READ)
    with Profiler(
        protocol,
        device_for(language),
        timeout_s=TIMEOUT_S,
        budget_s=BUDGET_S,
        metrics=config.metrics,
        cuda_arch=gpu_arch() if language.needs_gpu else None,
    ) as profiler:
        for row in candidates:
            candidate, key = Candidate.model_validate(row), keys[row["candidate_id"]]
            task, work, spent = (found.get(row["task_id"], {}) for found in about)
            verdict_key = left[key].pop("verdict_key")
            profile = profiler.profile(
                KernelTask.model_validate({name: task.get(name) for name in TASKS.names}),
                candidate,
                Verdict.model_validate(left[key]),
                flops=work.get("flops"),
                bytes_min=work.get("bytes_min"),
                reference=tuple(map(OperatorTime.model_validate, spent.get("operators") or ())),
            )
            yield {"profile_key": key, "verdict_key": verdict_key, **_row(profile)}
        if profiler.counters and profiler.on_gpu:
            caution(profiler.counters)


def _row(profile: KernelProfile) -> Json:
    row = profile.model_dump(mode="json") | {name: getattr(profile, name) for name in DERIVED}
    for kernel in row["kernels"]:
        kernel["metrics"] = _pairs(kernel["metrics"])
    row["rewrote_bottleneck"] = profile.rewrote_bottleneck
    if profile.problem is not None:
        return row | dict.fromkeys(("limit", "cause", "where", "suggestion"))
    finding = next(iter(findings(profile))).model_dump(mode="json")
    return row | finding | {"numbers": _pairs(finding["numbers"])}


def _pairs(numbers: dict[str, float]) -> list[Json]:
    return [{"name": name, "value": value} for name, value in numbers.items()]
