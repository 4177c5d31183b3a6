"""`concur verify-batch`: a table of candidates in, a table of verdicts and a summary out, without
Prefect.

Guarantees: what is verified stays verified under `OUT/snapshots`, so that the same command goes on
after an interruption and is served from the finished snapshot after that; `OUT/verdicts.parquet`
and `OUT/summary.json` are there whole or not at all, and are those of the last command that
finished; columns, tasks, languages and addresses that cannot be used are refused before anything is
written, rows before anything is verified. However it ends, workers that were started here are
stopped: an interruption that comes meanwhile waits for that.

Does not guarantee that two commands on one OUT divide the work, and does not look for verdicts in
other directories.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels_eval.config import EvalConfig
from kernels_eval.errors import EvalError, UsageError
from kernels_eval.records import KernelTask, Language
from tasks.files import atomic_write, explain_write_errors
from tasks.progress import observed_by
from tasks.sources.tables import shown
from tasks.verification.batch_progress import Watch

if TYPE_CHECKING:
    import polars as pl
    from rich.console import Console

    from tasks.store.snapshot import Snapshot, SnapshotRef

VERDICTS_FILE, SUMMARY_FILE, SNAPSHOTS = "verdicts.parquet", "summary.json", "snapshots"
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
CONNECT_S = 10.0


def verify_batch(
    candidates: str,
    tasks: str,
    out: str,
    *,
    language: Language | None = None,
    protocol: EvalConfig | None = None,
    workers: int | None = None,
    builders: int | None = None,
    address: str | None = None,
) -> dict[str, Any]:
    """Verify the candidates of a table. Returns `summary` and what this call did (`this_run`:
    seconds, verdicts that workers reached, verdicts that were there or needed none).

    `candidates` and `tasks` are what tasks.synthesis.tables and tasks.sources.tables read;
    `language` as `CandidateTable.language` takes it. Raises UsageError for input that cannot be
    used, DeviceError where the language's device is missing, other EvalErrors where the machine
    fails, KeyboardInterrupt where it is interrupted; after all but the first two the same call goes
    on.
    """
    from kernels_eval.devices import require_device
    from tasks.sources.stage import keep
    from tasks.synthesis.tables import CandidateTable
    from tasks.verification import stage
    from tasks.verification.config import VerificationConfig

    began_s = time.monotonic()
    address = checked_address(address)
    table = CandidateTable(candidates)
    language = table.language(language)
    require_device(language)
    asked = table.asked_tasks(language)
    found = _tasks_of(tasks, asked, candidates)
    directory = _writable(out)
    root = str(directory / SNAPSHOTS)
    config = VerificationConfig(
        eval=protocol or EvalConfig(), workers=workers, builders=builders, ray_address=address
    )

    class Watched(stage.Verification):
        """The stage, telling `watch` what was planned and who works."""

        def plan(self) -> int:
            chunks = super().plan()
            settled = (
                self.snapshot.read(columns=["candidate_id", "status"], unique="candidate_id")
                if self.snapshot.parts()
                else None
            )
            watch.plans(self.planned, _counts(settled, "status") if settled is not None else {})
            return chunks

        def pool(self) -> Any:
            _start_ray(address)  # here, so that a fault of Ray's is told from one of the workers
            pool = super().pool()
            watch.follow(lambda: pool.telemetry)
            return pool

    for name, value in {"RAY_USAGE_STATS_ENABLED": "0", "DO_NOT_TRACK": "1"}.items():
        os.environ.setdefault(name, value)
    watch = Watch(stage.STAGE)
    with _workers_end(), watch, observed_by(watch):
        tasks_ref = keep(list(found.values()), root, {"source": "verify-batch"})
        candidates_ref = table.write(root, found, tasks_ref, language)
        verdicts = stage.run(candidates_ref, tasks_ref, config, language, verification=Watched)
    summary = summarise(verdicts, {"tasks": tasks_ref, "candidates": candidates_ref}, directory)
    with explain_write_errors(directory, "free some disk, then run the same command again"):
        _write_verdicts(verdicts.open(), candidates_ref.open(), directory / VERDICTS_FILE)
        atomic_write(directory / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
    counts = {"by_workers": watch.reached, "without_worker": summary["candidates"] - watch.reached}
    return {**summary, "this_run": {"seconds": round(time.monotonic() - began_s, 1), **counts}}


# -- what comes in ---------------------------------------------------------------------------------


def checked_address(address: str | None) -> str | None:
    """The address of a Ray cluster: `auto`, or HOST:PORT where something answers. None: start one
    here.

    Raises UsageError for what is neither, for Ray Client's `ray://`, and where nobody answers. Ray
    itself would try for minutes.
    """
    given = address or os.environ.get("RAY_ADDRESS") or None
    if given is None or given in ("auto", "local"):
        return address
    if "://" in given:
        raise UsageError(
            f"{shown(given)} is an address for Ray Client, which concur cannot use: what hands out"
            " the work must be part of the cluster",
            "run this on a node of the cluster, with --address auto or the HOST:PORT that `ray"
            " start --head` printed",
        )
    match = re.fullmatch(r"(?P<host>\[[0-9A-Fa-f:]+\]|[^\s:/@]+):(?P<port>\d{1,5})", given)
    if not match or not 0 < int(match["port"]) < 65536:
        raise UsageError(
            f"{shown(given)} is no address of a Ray cluster",
            "give auto, or HOST:PORT such as 10.0.0.5:6379",
        )
    try:
        socket.create_connection(
            (match["host"].strip("[]"), int(match["port"])), timeout=CONNECT_S
        ).close()
    except OSError as error:
        raise UsageError(
            f"nothing answers at {shown(given)}: {error.strerror or error}",
            "start the cluster with `ray start --head`, or leave out --address",
        ) from error
    return address


def _tasks_of(location: str, asked: dict[str, int], candidates: str) -> dict[str, KernelTask]:
    """The tasks that are asked for, in that order. Raises UsageError where some are not there."""
    from tasks.sources.tables import load

    there = {task.task_id: task for task in load(location, asked)}
    missing = [task_id for task_id in asked if task_id not in there]
    if missing:
        count = sum(asked[task_id] for task_id in missing)
        raise UsageError(
            f"{count} of {sum(asked.values())} candidates of {shown(candidates)} answer tasks that"
            f" are not in {shown(location)}: {len(missing)} tasks, the first is"
            f" {shown(missing[0])!r}",
            "give the tasks that the candidates answer: their task_id must be the same",
        )
    return {task_id: there[task_id] for task_id in asked}


def _writable(out: str) -> Path:
    directory = Path(out).expanduser()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"cannot write to {shown(out)}: {error.strerror}",
            "choose another --out, or mend its permissions",
        ) from error
    return directory


@contextmanager
def _workers_end() -> Iterator[None]:
    """Workers that were started inside are gone at the end, also where a second interruption comes
    while the first is being handled."""
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


def _start_ray(address: str | None) -> None:
    """Raises UsageError where no cluster is at `address`, or at $RAY_ADDRESS; EvalError where Ray
    does not start here."""
    from kernels_eval.cluster.pool import start_ray

    try:
        start_ray(address)
    except UsageError:
        raise
    except Exception as error:  # Ray raises bare Exceptions
        cause = shown(error)
        if address:
            raise UsageError(
                f"there is no Ray cluster to be had at {shown(address)}: {cause}",
                "or leave out --address",
            ) from error
        raise EvalError(
            f"Ray does not start: {cause}",
            "is the machine overloaded? the same command tries again",
        ) from error


def _ray_runs() -> bool:
    ray = sys.modules.get("ray")
    return bool(ray and ray.is_initialized())


# -- what goes out ---------------------------------------------------------------------------------


def summarise(
    verdicts: SnapshotRef, upstream: dict[str, SnapshotRef], directory: Path
) -> dict[str, Any]:
    """The numbers of a finished verdicts snapshot, as plain data.

    Counts; shares in [0, 1]; speedups of correct candidates (reference time / candidate time);
    seconds. `telemetry` is of the run that finished the snapshot.
    """
    snapshot = verdicts.open()
    manifest = snapshot.manifest
    columns = [
        "candidate_id",
        "task_id",
        "status",
        "reason",
        "timing",
        "build_tier",
        "build_cached",
        "build_s",
        "run_s",
        "phases",
    ]
    frame = snapshot.read(columns=columns, unique="candidate_id")
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


def _counts(frame: pl.DataFrame, column: str) -> dict[str, int]:
    """The most frequent first, then by name."""
    counts = frame[column].drop_nulls().value_counts().iter_rows()
    return dict(sorted(counts, key=lambda pair: (-pair[1], pair[0])))


def _speedups(frame: pl.DataFrame) -> dict[str, Any]:
    timed = frame.filter(frame["timing"].is_not_null())["timing"].struct.field("speedup")
    quantiles = (
        {f"{share:g}": _rounded(timed.quantile(share, "linear")) for share in QUANTILES}
        if len(timed)
        else {}
    )
    return {"timed": len(timed), "above_1": int((timed > 1).sum()), "quantiles": quantiles}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _seconds(frame: pl.DataFrame) -> dict[str, dict[str, float]]:
    """Of each phase: how many candidates came to it, the seconds of all of them, and their mean."""
    from kernels_eval.records import Phases

    columns = {"build_s": frame["build_s"], "run_s": frame["run_s"]}
    columns |= {name: frame["phases"].struct.field(name) for name in Phases.model_fields}
    spent = {name: values.filter(values > 0) for name, values in columns.items()}
    return {
        name: {
            "candidates": len(values),
            "sum": round(values.sum(), 3),
            "mean": round(values.mean() or 0.0, 4),
        }
        for name, values in spent.items()
    }


def _write_verdicts(verdicts: Snapshot, candidates: Snapshot, path: Path) -> None:
    """One row a verdict, as tasks.tables.VERDICTS: under the candidate_id of the table where it has
    one, with its row and sample_index.

    Part by part: a table of any length takes the memory of its ids.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tasks.tables import VERDICTS

    schema = VERDICTS.append(pa.field("sample_index", pa.int64())).append(
        pa.field("row", pa.int64())
    )
    origin = candidates.read(
        columns=["candidate_id", "given_id", "sample_index", "row"], unique="candidate_id"
    )
    places = {row[0]: row[1:] for row in origin.iter_rows()}
    index = verdicts.index(["candidate_id"]).unique(
        "candidate_id", keep="first", maintain_order=True
    )

    def write(target: Path) -> None:
        with pq.ParquetWriter(target, schema, compression="zstd") as writer:
            for (part,), rows in index.group_by("part", maintain_order=True):
                for batch in verdicts.rows_at(
                    str(part), rows.sort("row")["row"].to_numpy(), VERDICTS.names
                ):
                    for row in batch:
                        given_id, sample_index, number = places[row["candidate_id"]]
                        row |= {
                            "candidate_id": given_id or row["candidate_id"],
                            "sample_index": sample_index,
                            "row": number,
                        }
                    writer.write_table(pa.Table.from_pylist(batch, schema=schema))

    atomic_write(path, write)


def print_summary(data: dict[str, Any]) -> None:
    """The end of a batch on a terminal. Everything shown is counts, our own words, or text made
    harmless."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120, markup=False, highlight=False)
    _print_table(
        console,
        f"{data['candidates']:,} candidates of {data['tasks']:,} tasks ({data['language']},"
        f" {shown(data['device'])})",
        ("status", "reason", "candidates", "share"),
        [
            (
                status if number == 0 else "",
                reason,
                f"{count:,}",
                f"{count / data['candidates']:.1%}",
            )
            for status in data["statuses"]
            for number, (reason, count) in enumerate(data["reasons"][status].items())
        ],
    )
    if quantiles := data["speedup"]["quantiles"]:
        timed, above = data["speedup"]["timed"], data["speedup"]["above_1"]
        rows = [tuple(f"{value:.3g}" for value in quantiles.values())]
        names = [f"{float(share):.0%}" for share in quantiles]
        _print_table(
            console,
            f"speedup of {timed:,} correct candidates ({above:,} above 1), quantiles",
            names,
            rows,
        )
    seconds = [
        (name, f"{s['candidates']:,}", f"{s['sum']:,.1f}", f"{s['mean']:.3f}")
        for name, s in data["seconds"].items()
        if s["candidates"]
    ]
    if seconds:
        _print_table(console, "seconds", ("phase", "candidates", "sum", "mean"), seconds)
    built = sum(data["builds"]["tiers"].values())
    tiers = ", ".join(f"{shown(tier)} {count:,}" for tier, count in data["builds"]["tiers"].items())
    console.print(
        f"builds: {built:,} ({tiers}); {data['builds']['cached']:,} from the cache"
        if built
        else "builds: none"
    )
    for line in data["quarantined"]:
        console.print(f"a device was put aside: {shown(line)}")
    this_run = data["this_run"]
    new = "nothing was new, everything was served from the finished snapshot"
    if this_run["by_workers"]:
        new = (
            f"{this_run['by_workers']:,} verified now, {this_run['without_worker']:,} verified"
            " before or without code"
        )
    console.print(f"done in {this_run['seconds']:.0f} s: {new}")
    for name in ("verdicts", "summary"):
        print(f"{name + ':':<10} {data[name]}")  # plain lines: a wrapped path cannot be copied
    print(f"{'snapshot:':<10} {data['snapshots']['verdicts']}")


def _print_table(
    console: Console, title: str, names: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in names:
        table.add_column(
            Text(name), justify="left" if name in ("status", "reason", "phase") else "right"
        )
    for row in rows:
        table.add_row(*(Text(value) for value in row))
    console.print(
        Text(title)
    )  # not the table's own title, which is folded to the width of the table
    console.print(table)
