"""`concur verify-batch` without Prefect: candidates in, verdicts and a summary out.

Guarantees: the same command resumes from `OUT/snapshots`; bad columns, tasks, languages and
addresses are refused before writing, rows before verifying.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Protocol

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from kernels_eval.devices import require_device
from kernels_eval.errors import UsageError
from kernels_eval.grouping import grouped
from kernels_eval.pool.ray import require_cluster
from kernels_eval.records import Json, KernelTask, Language, Phases
from tasks.files import atomic_write, explain_write_errors, make_writable
from tasks.reporting.text import by_count
from tasks.sources.files import shown
from tasks.sources.stage import keep
from tasks.sources.tables import load
from tasks.store import Snapshot, SnapshotRef
from tasks.tables import VERDICTS
from tasks.verification import stage
from tasks.verification.config import VerificationConfig

VERDICTS_FILE, SUMMARY_FILE, SNAPSHOTS = "verdicts.parquet", "summary.json", "snapshots"
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
WRITTEN_ROWS = 1000
SHOWN_TASKS, SHOWN_CORRECT, SHOWN_WRONG = 5, 20, 10
_OWN_COPY = re.compile(r"(?<![\w/.-])candidate\.py(?=:\d)")
"""The judge's copy of a candidate in a compiler's message."""
SUMMARISED = (
    *("candidate_id", "task_id", "status", "reason", "detail"),
    *("timing", "flags", "custom_kernel_time_share"),
    *("build_tier", "build_cached", "build_s", "run_s", "phases"),
)
UNSTABLE = pl.col("flags").list.contains("unstable")


class Candidates(Protocol):
    """A table of candidates, such as tasks.synthesis.tables.CandidateTable."""

    location: str

    def language(self, asked: Language | None) -> Language: ...

    def asked_tasks(self, language: Language) -> Counter[str]: ...

    def write(
        self, tasks: Mapping[str, KernelTask], upstream: SnapshotRef, language: Language
    ) -> SnapshotRef: ...


def verify_batch(
    table: Candidates,
    tasks: str,
    out: str,
    config: VerificationConfig,
    language: Language | None = None,
    patience_s: float | None = None,
) -> Json:
    """Returns `summary` and `this_run`: seconds of work and of waiting for other runs, and verdicts
    that workers reached and that needed none.

    `tasks` is what tasks.sources.tables reads. Waits for the devices `patience_s` seconds, else
    until they are free. Raises UsageError for unusable input, DeviceError
    without the language's device, other EvalErrors where the machine fails; the same call then
    resumes.
    """
    began_s = time.monotonic()
    config = config.model_copy(update={"screen": False})  # nothing confirms later
    require_cluster(config.ray_address)
    language = table.language(language)
    require_device(language)
    asked = table.asked_tasks(language)
    found = _tasks_of(tasks, asked, table.location)
    with explain_write_errors(
        f"to {shown(out)}", "choose another --out, or correct its permissions"
    ):
        directory = make_writable(Path(out).expanduser())
    root = str(directory / SNAPSHOTS)
    for name, value in {"RAY_USAGE_STATS_ENABLED": "0", "DO_NOT_TRACK": "1"}.items():
        os.environ.setdefault(name, value)
    with _workers_stopped():
        named = {task.task_id: task for task in found.values()}
        tasks_ref = keep(list(named.values()), root, {"source": "verify-batch"})
        candidates_ref = table.write(found, tasks_ref, language)
        with stage.Verification(candidates_ref, tasks_ref, config, language) as work:
            work.patience_s = patience_s
            verdicts, waited_s = work.run(), work.waited_s
    summary = summarise(verdicts, {"tasks": tasks_ref, "candidates": candidates_ref}, directory)
    with explain_write_errors(out, "free some disk, then rerun the same command"):
        _write_verdicts(verdicts.open(), candidates_ref.open(), directory / VERDICTS_FILE)
        atomic_write(directory / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
    this_run = {
        "seconds": round(time.monotonic() - began_s - waited_s, 1),
        "waited_for_other_runs_s": round(waited_s, 1),
        "judged": work.planned,
        "reused_or_without_code": summary["candidates"] - work.planned,
    }
    unknown = {name: count for name, count in asked.items() if name not in found}
    left_out = {"left_out": _unknown(unknown, tasks)} if unknown else {}
    return {**summary, "this_run": this_run, **left_out}


# -- what comes in ---------------------------------------------------------------------------------


def _tasks_of(location: str, asked: Counter[str], candidates: str) -> dict[str, KernelTask]:
    numbered = any(name.isdecimal() for name in asked)
    loaded = load(location, None if numbered else asked)
    named = grouped((name, task) for task in loaded for name in _names(task))
    there = {name: tasks[0] for name, tasks in named.items() if len(tasks) == 1}
    there |= {task.task_id: task for task in loaded}
    found = {task_id: there[task_id] for task_id in asked if task_id in there}
    if asked and not found:
        ids = [repr(shown(task.task_id, 60)) for task in loaded or load(location)][:SHOWN_TASKS]
        raise UsageError(
            f"{candidates} holds {_unknown(asked, location)}",
            "give the tasks that the candidates answer: their task_id or name must be the same, or"
            " their number, if one alone has it (KernelBench's level is a folder level1); the first"
            f" ids there are {', '.join(ids)}",
        )
    return found


def _names(task: KernelTask) -> set[str]:
    """Its name, and the number with which the last part of its id begins."""
    number = task.task_id.rpartition("/")[2].partition("_")[0]
    return {task.name, number} if number.isdecimal() else {task.name}


def _unknown(missing: Mapping[str, int], location: str) -> str:
    names = [repr(shown(name, 60)) for name in missing][:SHOWN_TASKS]
    more = f" and {len(missing) - len(names)} more" if len(missing) > len(names) else ""
    count, many = sum(missing.values()), len(missing)
    return (
        f"{count} {'candidate' if count == 1 else 'candidates'} of"
        f" {'a task that is' if many == 1 else 'tasks that are'} not in {shown(location)}:"
        f" {', '.join(names)}{more}"
    )


@contextmanager
def _workers_stopped() -> Iterator[None]:
    """Stop workers started inside, even if a second interruption comes meanwhile."""
    there = _ray_runs()
    try:
        yield
    finally:
        in_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main else None
        try:
            if not there and _ray_runs():
                import ray

                ray.shutdown()
        finally:
            if before is not None:
                signal.signal(signal.SIGINT, before)


def _ray_runs() -> bool:
    ray = sys.modules.get("ray")
    return bool(ray and ray.is_initialized())


# -- what goes out ---------------------------------------------------------------------------------


def summarise(verdicts: SnapshotRef, upstream: dict[str, SnapshotRef], directory: Path) -> Json:
    """The numbers of a finished verdicts snapshot, as plain data: counts, shares in [0, 1],
    speedups of correct candidates, seconds. `telemetry` is of the finishing run."""
    snapshot = verdicts.open()
    manifest = snapshot.manifest
    frame = snapshot.read(columns=SUMMARISED, unique="candidate_id")
    ids = upstream["candidates"].open().read(columns=["candidate_id", "given_id"])
    named = frame.join(ids, on="candidate_id", how="left").sort("task_id", "given_id")
    return {
        "candidates": len(frame),
        "tasks": frame["task_id"].n_unique(),
        "language": manifest["language"],
        "device": manifest["device"],
        "statuses": _counts(frame, "status"),
        "reasons": {
            status: _counts(group, "reason")
            for (status,), group in sorted(frame.group_by("status"))
        },
        "correct": _fastest(named),
        "not_correct": _not_correct(named),
        "speedup": _speedups(frame),
        "seconds": _seconds(frame),
        "builds": {
            "tiers": _counts(frame, "build_tier"),
            "cached": int(frame["build_cached"].sum()),
        },
        "quarantined": manifest["quarantined"],
        "telemetry": manifest["telemetry"],
        "protocol": manifest["config"]["eval"],
        "verdicts": str(directory / VERDICTS_FILE),
        "summary": str(directory / SUMMARY_FILE),
        "snapshots": {
            **{name: ref.open().path for name, ref in upstream.items()},
            "verdicts": snapshot.path,
        },
    }


def _fastest(named: pl.DataFrame) -> list[Json]:
    """The correct candidates, the fastest first, with `given_id`: the user's own name, such as a
    file's."""
    timing = pl.col("timing").struct
    speedups = {name: timing.field(name) for name in ("speedup", "speedup_lower", "speedup_upper")}
    right = named.filter(pl.col("status") == "correct").with_columns(unstable=UNSTABLE, **speedups)
    fastest = right.sort("speedup", descending=True, nulls_last=True, maintain_order=True)
    ids, timed = ("task_id", "given_id", "candidate_id"), (*speedups, "unstable")
    names = [*ids, *timed, "custom_kernel_time_share"]
    return fastest.head(SHOWN_CORRECT).select(names).to_dicts()


def _not_correct(named: pl.DataFrame) -> list[Json]:
    """The first candidates that are not correct, by task, and why."""
    wrong = named.filter(pl.col("status") != "correct").head(SHOWN_WRONG)
    columns = ["task_id", "given_id", "candidate_id", "reason", "detail"]
    return [under_its_name(row) for row in wrong.select(columns).to_dicts()]


def under_its_name(row: Json) -> Json:
    """A row whose detail names the candidate's file as the user does, where it has a `given_id`."""
    if (given := row["given_id"]) and row.get("detail"):
        row["detail"] = _OWN_COPY.sub(lambda _: given, row["detail"])
    return row


def _counts(frame: pl.DataFrame, column: str) -> dict[str, int]:
    return dict(by_count(dict(frame[column].drop_nulls().value_counts().iter_rows())))


def _speedups(frame: pl.DataFrame) -> Json:
    frame = frame.filter(pl.col("timing").is_not_null())
    timed, share = frame["timing"].struct.field("speedup"), frame["custom_kernel_time_share"]
    return {
        "timed": len(timed),
        "above_1": int((timed > 1).sum()),
        "unstable": frame.filter(UNSTABLE).height,
        "quantiles": _quantiles(timed),
        "share_of_own_kernels": _quantiles(share.drop_nulls()),
    }


def _quantiles(values: pl.Series) -> dict[str, float]:
    return {
        f"{share:g}": round(values.quantile(share, "linear") or 0.0, 4)
        for share in (QUANTILES if len(values) else ())
    }


def _seconds(frame: pl.DataFrame) -> dict[str, dict[str, float]]:
    columns = {"build_s": frame["build_s"], "run_s": frame["run_s"]}
    columns |= {name: frame["phases"].struct.field(name) for name in Phases.model_fields}
    found = {}
    for name, values in columns.items():
        spent = [value for value in values.to_list() if value]
        total = sum(spent)
        mean = round(total / max(1, len(spent)), 4)
        found[name] = {"candidates": len(spent), "sum": round(total, 3), "mean": mean}
    return found


def _write_verdicts(verdicts: Snapshot, candidates: Snapshot, path: Path) -> None:
    """Rows are written in batches to bound memory."""
    columns = ["candidate_id", "given_id", "generator", "sample_index", "row"]
    added = [("generator", pa.string()), ("sample_index", pa.int64()), ("row", pa.int64())]
    schema = pa.schema([*VERDICTS, *added])
    origin = candidates.read(columns=columns, unique="candidate_id").select(columns)
    places = {row["candidate_id"]: row for row in origin.iter_rows(named=True)}
    index = verdicts.index(["candidate_id"], unique=True)

    def rows() -> Iterator[Json]:
        for row in verdicts.rows_of(index, VERDICTS.names):
            place = places[row["candidate_id"]]
            yield row | place | {"candidate_id": place["given_id"] or row["candidate_id"]}

    def write(target: Path) -> None:
        taken = rows()
        with pq.ParquetWriter(target, schema, compression="zstd") as writer:
            while batch := list(islice(taken, WRITTEN_ROWS)):
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))

    atomic_write(path, write)
