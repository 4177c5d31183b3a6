"""The analysis stage: verdicts and candidates in; numbers, findings, page and figure out. Samples
that cannot be analysed give a finished snapshot with a caution. A remote root has only the
manifest's numbers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import Json, Record
from tasks.progress import report
from tasks.reporting.findings import Finding, findings_table
from tasks.reporting.page import markdown
from tasks.reporting.parts import Bullets
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
    """An analysis's findings and files: the page first, then data and figure.

    `finding` has sentences, `findings` the numbers, `cautions` their limits."""

    finding: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    cautions: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

    def markdown(self) -> str:
        return markdown(
            Bullets(self.finding), findings_table(self.findings), Bullets(self.cautions)
        )


def planned(verdicts: SnapshotRef, candidates: SnapshotRef) -> Snapshot:
    return Snapshot.planned(STAGE, {}, [verdicts, candidates], ANALYSIS_VERSION)


def run(verdicts: SnapshotRef, candidates: SnapshotRef) -> SnapshotRef:
    """Return a finished snapshot of NUMBERS, with `finding`, `findings`, `cautions`, `files` and
    the tables `bins` and `thirds` in its manifest. Raises UsageError where the root cannot be
    written."""
    snapshot = planned(verdicts, candidates)
    if snapshot.finished:
        return snapshot.ref
    frame = joined(verdicts.open(), candidates.open())
    found, tables = _analysed(frame, snapshot)
    rows = number_rows(found.findings)
    snapshot.append(rows, NUMBERS, key="name")
    report(STAGE, frame.height, frame.height, (found.finding or found.cautions)[0])
    extra = found.model_dump(mode="json") | tables
    return snapshot.publish(config={}, rows=len(rows), extra=extra).ref


def found_in(ref: SnapshotRef) -> Found:
    snapshot = ref.open()
    found = Found.model_validate(
        {name: value for name, value in snapshot.manifest.items() if name in Found.model_fields}
    )
    files = tuple(snapshot.local_dir() / name for name in found.files)
    return found.model_copy(update={"files": files})


def joined(verdicts: Snapshot, candidates: Snapshot) -> pl.DataFrame:
    left = verdicts.read(columns=OF_VERDICTS, unique="candidate_id")
    right = candidates.read(columns=OF_CANDIDATES, unique="candidate_id")
    if left.is_empty() or right.is_empty():
        return left.clear()
    return left.join(right, on="candidate_id", how="inner", maintain_order="left")


def number_rows(findings: Iterable[Finding]) -> list[Json]:
    """Return rows of NUMBERS for comparing runs: ratios, shares, correlations and `..._tokens`,
    each with a value or the reason for its absence."""
    rows = []
    for row in findings:
        estimate = row.estimate.model_dump(exclude={"n", "why_not"})
        why_not = row.estimate.why_not or None
        rows.append({"name": row.key, "samples": row.estimate.n, "why_not": why_not} | estimate)
    return rows


def _analysed(frame: pl.DataFrame, snapshot: Snapshot) -> tuple[Found, Json]:
    from tasks.observe.observations import observe
    from tasks.observe.page import write

    try:
        observations = observe(frame)
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
