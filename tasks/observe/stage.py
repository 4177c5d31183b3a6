"""Verdicts and their candidates in, the observations out: numbers, findings, the page and its
figure.

Guarantees: one finished snapshot for each pair of verdicts and candidates, the same numbers every
time; samples that cannot be analysed (none with a length, an older table) are a finished snapshot
too, without numbers and with a caution that says why: trying again would not change it. Reads the
columns that the observations need, never a text. Does not guarantee the page and the figure on a
remote root: there the words and numbers are in the manifest alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import Json, Record
from tasks.observe.config import ObservationConfig
from tasks.progress import report
from tasks.reporting.findings import Finding, findings_table
from tasks.reporting.page import Block, Bullets, block_markdown
from tasks.store import Snapshot, SnapshotRef
from tasks.tables import NUMBERS
from tasks.versions import ANALYSIS_VERSION

STAGE, PAGE = "analysis", "page"
OF_VERDICTS = ("candidate_id", "task_id", "status", "reason", "timing.speedup")
OF_CANDIDATES = (
    *("candidate_id", "reasoning_tokens", "finish_reason", "generator"),
    "sampling.max_tokens",
)


class Found(Record):
    """What an analysis found, and its files: the page first, then data and the figure.

    `finding` are the observations in sentences, `findings` the numbers behind them, `cautions` what
    bounds them.
    """

    finding: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    cautions: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

    def markdown(self) -> str:
        """Return all three for a page of another: a list, a table, a list; no heading."""
        table = [findings_table(self.findings)] if self.findings else []
        blocks: list[Block] = [Bullets(self.finding), *table, Bullets(self.cautions)]
        return "\n\n".join(map(block_markdown, blocks)).strip() + "\n"


def planned(verdicts: SnapshotRef, candidates: SnapshotRef, config: ObservationConfig) -> Snapshot:
    """The snapshot that `run` with the same arguments fills."""
    return Snapshot.planned(STAGE, config, [verdicts, candidates], ANALYSIS_VERSION)


def run(verdicts: SnapshotRef, candidates: SnapshotRef, config: ObservationConfig) -> SnapshotRef:
    """Return a finished snapshot of NUMBERS.

    Its manifest has `finding`, `findings`, `cautions`, `files`, and `bins` and `thirds`, the tables
    of the page. Raises UsageError where the root cannot be written.
    """
    snapshot = planned(verdicts, candidates, config)
    if snapshot.finished:
        return snapshot.ref
    frame = joined(verdicts.open(), candidates.open())
    found, tables = _analysed(frame, config, snapshot)
    rows = number_rows(found.findings)
    snapshot.append(rows, NUMBERS, key="name")
    report(STAGE, frame.height, frame.height, (found.finding or found.cautions)[0])
    extra = found.model_dump(mode="json") | tables
    return snapshot.publish(config=config, rows=len(rows), extra=extra).ref


def found_in(ref: SnapshotRef) -> Found:
    """Return what a finished snapshot says, and its files."""
    snapshot = ref.open()
    found = Found.model_validate(
        {name: value for name, value in snapshot.manifest.items() if name in Found.model_fields}
    )
    files = tuple(snapshot.local_dir() / name for name in found.files)
    return found.model_copy(update={"files": files})


def joined(verdicts: Snapshot, candidates: Snapshot) -> pl.DataFrame:
    """The columns that the observations read, one row per candidate, in the order of the
    verdicts."""
    left = verdicts.read(columns=OF_VERDICTS, unique="candidate_id")
    right = candidates.read(columns=OF_CANDIDATES, unique="candidate_id")
    if left.is_empty() or right.is_empty():
        return left.clear()
    return left.join(right, on="candidate_id", how="inner", maintain_order="left")


def number_rows(findings: Iterable[Finding]) -> list[Json]:
    """Return rows of NUMBERS, by which runs are compared: ratios, shares and correlations;
    `..._tokens` are tokens. Every row has its value or the reason why there is none, never both."""
    rows = []
    for row in findings:
        estimate = row.estimate.model_dump(exclude={"n", "why_not"})
        why_not = row.estimate.why_not or None
        rows.append({"name": row.key, "samples": row.estimate.n, "why_not": why_not} | estimate)
    return rows


def _analysed(
    frame: pl.DataFrame, config: ObservationConfig, snapshot: Snapshot
) -> tuple[Found, Json]:
    """What is found, with the names of the files that were written, and the tables of the page.

    Raises UsageError where files cannot be written.
    """
    from tasks.observe.observations import observe
    from tasks.observe.page import write

    try:
        observations = observe(frame, config)
    except UsageError as problem:
        return Found(cautions=(f"Nothing could be analysed: {problem.args[0]}.",)), {}
    files: tuple[Path, ...] = ()
    if snapshot.is_local:
        directory = snapshot.local_dir(PAGE)
        page = write(observations, directory)
        others = sorted(path.name for path in directory.iterdir() if path.name != page.name)
        files = tuple(Path(PAGE) / name for name in (page.name, *others))
    found = Found(
        finding=observations.finding,
        findings=observations.findings,
        cautions=observations.cautions,
        files=files,
    )
    return found, {"bins": observations.bins, "thirds": observations.thirds}
