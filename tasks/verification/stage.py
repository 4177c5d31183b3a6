"""Candidates in, verdicts out, each verdict reached once.

Guarantees: one verdict per candidate, reused under the same protocol, parsed code and conditions
(device, driver, CUDA, torch); a kill loses only candidates in flight; memory holds ids and keys. A
chunk is the stream's next `chunk_size` verdicts.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, suppress
from functools import cached_property
from itertools import islice
from typing import Any

import polars as pl

from kernels_eval.devices import Conditions, conditions
from kernels_eval.errors import ClusterError, EvalError, UsageError, cause_of
from kernels_eval.judge.messages import no_code_verdict
from kernels_eval.pool.pool import Pool
from kernels_eval.pool.ray import (
    address_of,
    gpu_type_for,
    is_lost,
    leave,
    measured_on,
    membership,
    require_cluster,
    start_ray,
)
from kernels_eval.records import (
    Candidate,
    Json,
    KernelTask,
    Language,
    Row,
    Status,
    Verdict,
    stable_hash,
)
from kernels_eval.versions import PROTOCOL_VERSION
from tasks.progress import Ahead, caution, expect, report
from tasks.retry import retry_until_back
from tasks.store import (
    PART_ROWS,
    Snapshot,
    SnapshotRef,
    known_rows,
)
from tasks.store.lookup import newest_first
from tasks.tables import TASKS, VERDICTS
from tasks.verification.config import VerificationConfig

STAGE = "verification"
ORDER = ("task_id", "sample_index", "candidate_id")
PLANNED = ("candidate_id", "task_id", "sample_index", "parse_reason")
KEYED = ("candidate_id", "task_id", "code", "parse_reason")
"""Columns of a candidate that its verdict's key reads."""
READ = ("candidate_id", "task_id", "language", "generator", "sample_index", "code", "parse_reason")
"""Columns that verification reads of a candidate; its texts weigh ten times as much."""
SHOWN = 4
"""Differences of two protocols that are named."""
HEAD_BACK_S = 180.0
"""A Ray head is restarted within a minute."""
LOST_FIX = "`concur status` says whether its head runs again; rerun to resume from what is kept"
CONFIRMING_TIMES = 6.0
"""How many times as long as a screening a confirmation takes. Measured beside load on two cores:
5.6 and 6.0 times (benchmarks/results/2026-11-30-two-of-each.md)."""
logger = logging.getLogger(__name__)


def wait_for_head(address: str | None, log: Callable[[str], None] = logger.warning) -> None:
    """Wait for a Ray cluster at the address, if any. Raises ClusterError after `HEAD_BACK_S`
    seconds."""
    where = address_of(address)
    if where == "local":
        return
    try:
        retry_until_back(
            lambda: require_cluster(where),
            service=f"the Ray cluster at {where}",
            is_absent=lambda error: isinstance(error, UsageError),
            log=log,
            deadline_s=HEAD_BACK_S,
        )
    except UsageError as error:
        absence = f"no Ray cluster answers at {where}, for {HEAD_BACK_S:.0f} s: {error.args[0]}"
        raise ClusterError(absence, LOST_FIX) from error


def pool_of(language: Language, config: VerificationConfig) -> Pool:
    return Pool(
        language,
        config.protocol,
        workers=config.workers,
        builders=config.builders,
        lanes=config.lanes,
        address=config.ray_address,
        gpu_type=config.gpu_type,
    )


def conditions_of(language: Language, config: VerificationConfig) -> Conditions:
    """Conditions of verdicts: this machine, or one with the configured GPUs. Raises as `conditions`
    and `start_ray` do."""
    if config.gpu_type is None or not language.needs_gpu:
        return conditions(language)
    start_ray(config.ray_address)
    return measured_on(str(gpu_type_for(config.gpu_type)), language)[0]


class Verification:
    """The verification of one candidates snapshot: plan, take chunks, publish. A context manager.

    Workers start with the first chunk that needs any.
    """

    activity, verb = STAGE, "verify"
    """What it is called where people see its progress."""
    repeats_nothing = True
    """Whether verdicts on the same candidates under another protocol are worth a word."""
    confirms_all = False
    """Whether every right one is confirmed after a screening, not what a training set takes."""
    patience_s: float | None = None
    """Seconds to wait for devices that others use; default: until they are free."""

    def __init__(
        self,
        candidates: SnapshotRef,
        tasks: SnapshotRef,
        config: VerificationConfig,
        language: Language,
    ) -> None:
        self.config, self.language = config, language
        self._candidates, self._tasks = candidates.open(), tasks.open()
        self._measured = conditions_of(language, config)
        key = {
            "eval": config.protocol.model_dump(mode="json"),
            "conditions": self._measured.model_dump(mode="json"),
        }
        self._conditions = stable_hash([key, PROTOCOL_VERSION])
        self._keys: dict[str, str] = {}
        self._same_code: dict[str, list[str]] = {}
        self._resources = ExitStack()
        self._pool: Pool | None = None
        self._left: pl.DataFrame | None = None
        self._stream: Generator[Verdict, None, None] | None = None
        self._logged = 0
        self._settled = 0
        """Verdicts of earlier rounds, which progress has told."""
        self._joined = ""
        self.total = self.planned = self.reached = self.chunks = 0
        self._failed = 0
        """Of the verdicts reached since the plan, those that are not correct."""
        self._seen_tasks, self._right_tasks = set[str](), set[str]()
        self._planned_tasks = 0
        self._identity = key | {"language": language.value}
        self.snapshot = Snapshot.planned(
            STAGE, self._identity, [candidates, tasks], PROTOCOL_VERSION
        )

    def __enter__(self) -> Verification:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_stream()
        self._resources.close()

    def pool(self) -> Pool:
        """The workers; benchmarks and tests replace this."""
        return pool_of(self.language, self.config)

    def verdict_key(self, candidate: Row) -> str:
        """The identity of a verdict across snapshots: hash(candidate, its parsed code, protocol and
        its version, device, driver, CUDA, torch). With `once_per_code` the task's source counts
        instead of the candidate. `candidate` is a row with the columns `KEYED`."""
        judged = candidate["candidate_id"]
        if self.config.once_per_code:
            judged = self._task_sources[candidate["task_id"]]
        key = [judged, candidate["code"], candidate["parse_reason"]]
        return stable_hash([key, self._conditions])

    @cached_property
    def _task_sources(self) -> dict[str, str]:
        frame = self._tasks.read(columns=TASKS.names, unique="task_id")
        tasks = map(KernelTask.model_validate, frame.iter_rows(named=True))
        return {task.task_id: stable_hash(task.model_dump(mode="json")) for task in tasks}

    # -- what there is to do -----------------------------------------------------------------------

    def plan(self) -> int:
        """Reuse known verdicts and settle what needs no worker. Returns the number of chunks left.

        Also sets `total` (all candidates) and `planned` (those for workers). Call it again for more
        candidates.
        """
        self._end_stream()
        self.snapshot.recover(VERDICTS)
        self.snapshot.append(self._known(), VERDICTS)
        left = self._without_verdict()
        if self.repeats_nothing:
            self._say_why_anew(len(left))
        has_code = left["parse_reason"].is_null()
        with closing(self._pairs(left.filter(~has_code))) as without_code:
            verdicts = (no_code_verdict(*pair) for pair in without_code)
            self.snapshot.append((row for each in verdicts for row in self._rows(each)), VERDICTS)
        self._left = self._to_judge(left.filter(has_code))
        self.planned, self.reached, self._failed = len(self._left), 0, 0
        self._planned_tasks = self._left["task_id"].n_unique()
        self.chunks = -(-self.planned // self.config.chunk_size)
        return self.chunks

    def _say_why_anew(self, count: int) -> None:
        mine = {"protocol": self.config.protocol.model_dump(mode="json")}
        mine |= {"on": self._measured.model_dump(mode="json")}
        for other in newest_first(self.snapshot.root, STAGE) if count else ():
            manifest = other.manifest
            if self._candidates.fingerprint not in manifest["upstream"]:
                continue
            with suppress(ValueError):  # another version of concur has written it
                its = VerificationConfig.model_validate(manifest["config"]).protocol
                theirs = {"protocol": its.model_dump(mode="json"), "on": manifest["conditions"]}
                if differences := list(_differences(theirs, mine)):
                    logger.warning(
                        "%d candidates are verified anew: verdicts of %s were reached with %s",
                        count,
                        other.fingerprint[:12],
                        "; ".join(differences[:SHOWN]),
                    )
                    return

    def _known(self) -> Generator[Json, None, None]:
        left = self._keyed(self._without_verdict())
        of_key = left.group_by("key").agg("candidate_id")
        ids = dict(of_key.iter_rows())
        own = self.config.once_per_code
        for row in known_rows(self.snapshot, "verdict_key", ids, VERDICTS, own=own):
            for candidate_id in ids[row["verdict_key"]]:
                yield row | {"candidate_id": candidate_id}

    def _keyed(self, left: pl.DataFrame) -> pl.DataFrame:
        left = left.sort("part", "row")
        keys = [self.verdict_key(row) for row in self._candidates.rows_of(left, KEYED)]
        return left.with_columns(key=pl.Series(keys, dtype=pl.String))

    def _to_judge(self, left: pl.DataFrame) -> pl.DataFrame:
        if not self.config.once_per_code:
            return left
        keyed = self._keyed(left).sort(ORDER)
        ids = keyed.group_by("key", maintain_order=True).agg(pl.col("candidate_id").slice(1))
        self._same_code = dict(ids.iter_rows())
        return keyed.unique("key", keep="first", maintain_order=True).drop("key")

    def _wanted(self) -> pl.DataFrame:
        return self._candidates.index(PLANNED, unique=True)

    def _without_verdict(self) -> pl.DataFrame:
        wanted = self._wanted()
        self.total = len(wanted)
        done = self.snapshot.index(["candidate_id"])
        return wanted.join(done, on="candidate_id", how="anti").sort(ORDER)

    def _pairs(self, left: pl.DataFrame) -> Generator[tuple[KernelTask, Candidate], None, None]:
        asked = left.select("task_id").unique(maintain_order=True)
        known = self._tasks.index(["task_id"], unique=True)
        places = asked.join(known, on="task_id", how="left", maintain_order="left")
        if places["part"].has_nulls():
            missing = places.filter(places["part"].is_null())["task_id"][0]
            raise UsageError(
                f"task {missing} of a candidate is not in {self._tasks.path}",
                "verify candidates with the tasks they answer",
            )
        tasks = self._tasks.rows_in_order(places, TASKS.names)
        task: KernelTask | None = None
        for row in self._candidates.rows_in_order(left, READ):
            while task is None or task.task_id != row["task_id"]:
                task = KernelTask.model_validate(next(tasks))
            self._keys[row["candidate_id"]] = self.verdict_key(row)
            yield task, Candidate.model_validate(row)

    # -- doing it ----------------------------------------------------------------------------------

    def verify_chunk(self, number: int) -> dict[str, int]:
        """Keep verdicts until chunks 1 to `number` are full. Returns counts by status.

        After an error the same call resumes; after ClusterError, on the cluster then at its
        address.
        """
        counts: Counter[str] = Counter()
        wanted = min(number * self.config.chunk_size, self.planned) - self.reached
        if self._stream is None:
            self._stream = self._verdicts()
        try:
            for verdict in islice(self._stream, wanted):
                self.reached += 1
                counts[verdict.status.value] += 1
                self._count(verdict)
                work = f"; {self._pool.telemetry.line()}" if self._pool else ""
                self._report(f"{verdict.status} {verdict.task_id}{work}")
            if self.reached == self.planned:
                self._end_stream()  # its last rows become a part: a search reads them
        except BaseException as error:
            self._end_stream()
            if not is_lost(error):
                raise
            self._leave()
            if isinstance(error, ClusterError):
                raise
            # Ray takes another cluster than before for a wrong token, and says so at length.
            said = cause_of(error).partition(". Ensure that the token")[0]
            lost = f"the Ray cluster is lost: {type(error).__name__}: {said}"
            raise ClusterError(lost, LOST_FIX) from error
        finally:
            for line in self.quarantined[self._logged :]:
                logger.warning("a worker was quarantined, the others continue: %s", line)
            self._logged = len(self.quarantined)
            for line in self._pool.cautions if self._pool else []:
                caution(line)
        return dict(counts)

    def _verdicts(self) -> Generator[Verdict, None, None]:
        left, self._left = self._left, None
        if left is None:  # an earlier stream broke
            left = self._to_judge(self._without_verdict())
        if self._pool is None:
            wait_for_head(self.config.ray_address)  # it may have died since the run began
            pool = self.pool()
            pool.waiting, pool.patience_s = self._report, self.patience_s
            self._pool = self._resources.enter_context(pool)
            self._joined = membership()
        # Without a journal, a kill loses the part that is being filled.
        rows_per_part = PART_ROWS if self.snapshot.is_local else self.config.chunk_size
        with (
            closing(self._pairs(left)) as pairs,
            closing(self._pool.verify(pairs)) as verdicts,
            self.snapshot.journal(VERDICTS, rows_per_part=rows_per_part) as add,
        ):
            for verdict in verdicts:
                for row in self._rows(verdict):
                    add(row)
                yield verdict

    def _count(self, verdict: Verdict) -> None:
        right = verdict.status is Status.CORRECT
        self._failed += not right
        self._seen_tasks.add(verdict.task_id)
        self._right_tasks |= {verdict.task_id} if right else set()

    def _expect(self) -> None:
        """Tell what follows a screening: of each task that has a right one, one is confirmed, or
        all right ones."""
        if not (self.config.screen and self.reached):
            return
        share = len(self._right_tasks) / len(self._seen_tasks)
        kept = share * self._planned_tasks
        if self.confirms_all:
            kept = (1 - self._failed / self.reached) * self.planned
        words = f"then confirms about {kept:.0f}" if kept else ""
        expect(self.activity, Ahead(words, kept * CONFIRMING_TIMES))

    def _report(self, note: str = "") -> None:
        self._expect()
        done = self.total - self.planned + self.reached
        report(self.activity, done - self._settled, self.total - self._settled, note)

    def _end_stream(self) -> None:
        if self._stream:
            self._stream.close()
        self._stream = None
        self._keys.clear()

    def _leave(self) -> None:
        with suppress(Exception):  # no worker may be left to stop
            self._resources.close()
        self._resources, self._pool, self._logged = ExitStack(), None, 0
        leave(self._joined or membership())  # the second where it was gone before the pool started
        self._joined = ""

    def _rows(self, verdict: Verdict) -> Iterator[Json]:
        key = self._keys.pop(verdict.candidate_id)
        row = verdict.model_dump(mode="json") | {"verdict_key": key}
        for candidate_id in (verdict.candidate_id, *self._same_code.get(key, ())):
            yield row | {"candidate_id": candidate_id}

    @property
    def telemetry(self) -> Json | None:
        return self._pool.telemetry.summary() if self._pool else None

    @property
    def waited_s(self) -> float:
        """Seconds until other runs let go of the devices."""
        return self._pool.waited_s if self._pool else 0.0

    @property
    def quarantined(self) -> list[str]:
        """One line per worker whose device was given up."""
        return self._pool.quarantined if self._pool else []

    def run(self, verify_chunk: Callable[[Any, int], Any] | None = None) -> SnapshotRef:
        """Plan, take chunks by `verify_chunk` and publish, unless finished."""
        if not self.snapshot.finished:
            for chunks in self._plans():
                for number in range(1, chunks + 1):
                    (verify_chunk or Verification.verify_chunk)(self, number)
            self.publish()
        return self.snapshot.ref

    def _plans(self) -> Iterator[int]:
        yield self.plan()

    def publish(self) -> SnapshotRef:
        """Finish the snapshot. Raises EvalError where a verdict is missing."""
        self._end_stream()  # the last rows are still in its journal
        verdicts = self.snapshot.read(columns=["candidate_id", "status"], unique="candidate_id")
        if len(verdicts) < self.total:
            missing = self.total - len(verdicts)
            raise EvalError(
                f"{missing} of {self.total} candidates have no verdict",
                "rerun the same command: it verifies the rest",
            )
        counts = verdicts["status"].value_counts().iter_rows() if len(verdicts) else ()
        extra = {
            "status_counts": dict(sorted(counts)),
            "device": self._measured.device,
            "conditions": self._measured.model_dump(mode="json"),
            "language": self.language.value,
            "quarantined": self.quarantined,
            "telemetry": self.telemetry,
            **self._facts(),
        }
        return self.snapshot.publish(config=self.config, rows=len(verdicts), extra=extra).ref

    def _facts(self) -> Json:
        return {}


def _differences(theirs: Json, mine: Json, above: str = "") -> Iterator[str]:
    for name, value in mine.items():
        other = theirs.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            yield from _differences(other, value, f"{above}{name}.")
        elif other != value:
            yield f"{above}{name} {other}, here {value}"


def run(
    candidates: SnapshotRef,
    tasks: SnapshotRef,
    config: VerificationConfig,
    language: Language,
    *,
    verification: type[Verification] = Verification,
    verify_chunk: Callable[[Any, int], Any] = Verification.verify_chunk,
    confirms_all: bool = False,
) -> SnapshotRef:
    """A finished snapshot of tasks.tables.VERDICTS. `verify_chunk` calls a chunk (Prefect makes it
    a task run); `verification` may replace the workers or measure; `confirms_all`: every right one
    is confirmed next, which the time left counts."""
    with verification(candidates, tasks, config, language) as work:
        work.confirms_all = confirms_all
        return work.run(verify_chunk)
