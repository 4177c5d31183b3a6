"""Verdicts and their candidates in, the analysis of reasoning length out: headline numbers,
findings, the page and its figures.

Guarantees: one finished snapshot for each pair of verdicts and candidates, the same numbers every
time; samples that cannot be analysed (none with a length, too few, an older table) are a finished
snapshot too, without numbers and with a caution that says why: trying again would not change it.
Reads the columns that the analysis needs, never a text. Does not guarantee the page and the figures
on a remote root: there the words and numbers are in the manifest alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import Record
from tasks.analysis.config import ObservationConfig
from tasks.progress import report
from tasks.reporting.findings import Finding, findings_table
from tasks.reporting.page import Bullets, block_markdown
from tasks.store import Snapshot, SnapshotRef, fingerprint
from tasks.versions import ANALYSIS_VERSION

STAGE, PAGE = "analysis", "page"
OF_VERDICTS = ("candidate_id", "task_id", "status", "reason", "timing.speedup")
OF_CANDIDATES = ("candidate_id", "reasoning_tokens", "finish_reason", "generator", "sample_index")
FINDINGS = "findings.md"


class Found(Record):
    """What an analysis found, and its files: the page first, then data, findings, figures.

    `finding` are headlines, `findings` the rows behind them, `cautions` what bounds them.
    """

    finding: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    cautions: tuple[str, ...]
    files: tuple[Path, ...] = ()

    def markdown(self) -> str:
        """Return all three for a page of another: a list, a table, a list; no heading."""
        blocks = [Bullets(self.finding), Bullets(self.cautions)]
        return (
            "\n\n".join(
                [
                    block_markdown(blocks[0]),
                    *([block_markdown(findings_table(self.findings))] if self.findings else []),
                    block_markdown(blocks[1]),
                ]
            ).strip()
            + "\n"
        )


def planned(verdicts: SnapshotRef, candidates: SnapshotRef, config: ObservationConfig) -> Snapshot:
    """The snapshot that `run` with the same arguments fills."""
    upstream = [verdicts.fingerprint, candidates.fingerprint]
    return Snapshot(verdicts.root, STAGE, fingerprint(STAGE, config, upstream, ANALYSIS_VERSION))


def run(verdicts: SnapshotRef, candidates: SnapshotRef, config: ObservationConfig) -> SnapshotRef:
    """Return a finished snapshot of tasks.analysis.numbers.NUMBERS.

    Its manifest has `finding`, `findings`, `cautions`, `records` (all numbers of the figures but
    the dots of length against speedup) and `files`. Raises UsageError where the root cannot be
    written.
    """
    from tasks.analysis.numbers import NUMBERS

    snapshot = planned(verdicts, candidates, config)
    if snapshot.finished:
        return snapshot.ref
    frame = joined(verdicts.open(), candidates.open())
    rows: list[dict[str, Any]] = []
    told: dict[str, Any] = {"finding": [], "findings": [], "records": None, "files": []}
    try:
        rows, told = _analysed(frame, config, snapshot)
    except UnusableSamples as problem:
        told["cautions"] = [f"Nothing could be analysed: {problem}."]
    there = snapshot.keys("name")
    snapshot.append([row for row in rows if row["name"] not in there], NUMBERS)
    report(STAGE, frame.height, frame.height, (told["finding"] or told["cautions"])[0])
    upstream = [verdicts.fingerprint, candidates.fingerprint]
    return snapshot.publish(config=config, upstream=upstream, rows=len(rows), extra=told).ref


def found_in(ref: SnapshotRef) -> Found:
    """Return what a finished snapshot says, and its files. Older ones have no `findings`."""
    snapshot = ref.open()
    told = {name: snapshot.manifest.get(name, []) for name in ("finding", "findings", "cautions")}
    files = tuple(snapshot.local_dir() / name for name in snapshot.manifest["files"])
    return Found.model_validate(told | {"files": files})


def joined(verdicts: Snapshot, candidates: Snapshot) -> pl.DataFrame:
    """The columns that the analysis reads, one row a candidate, in the order of the verdicts."""
    left, right = (
        verdicts.read(columns=OF_VERDICTS, unique="candidate_id"),
        candidates.read(columns=OF_CANDIDATES, unique="candidate_id"),
    )
    if left.is_empty() or right.is_empty():
        return left.clear()
    return left.join(right, on="candidate_id", how="inner", maintain_order="left")


class UnusableSamples(Exception):
    """Samples that say nothing. Not an error of the run."""


def _analysed(
    frame: pl.DataFrame, config: ObservationConfig, snapshot: Snapshot
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows, and what the manifest says.

    Raises UnusableSamples where the samples cannot be analysed, UsageError where files cannot be
    written.
    """
    from tasks.analysis.difficulty import difficulty
    from tasks.analysis.numbers import number_rows
    from tasks.analysis.observations import observe
    from tasks.analysis.report import as_json, write

    try:
        observations = observe(frame, config)
        divided = difficulty(frame, seed=config.seed)
    except UsageError as error:
        raise UnusableSamples(error.args[0]) from error
    records = as_json(observations, divided)
    records["observations"]["speedup"].pop("points")
    found = Found(
        finding=(*observations.finding, *divided.finding),
        findings=(*observations.findings, *divided.findings),
        cautions=observations.cautions,
    )
    told = found.model_dump(mode="json", exclude={"files"}) | {"records": records, "files": []}
    if snapshot.is_local:
        directory = snapshot.local_dir(PAGE)
        page = write(observations, divided, directory)
        (directory / FINDINGS).write_text(found.markdown(), encoding="utf-8")
        others = sorted(path.name for path in directory.iterdir() if path.name != page.name)
        told["files"] = [f"{PAGE}/{name}" for name in (page.name, *others)]
    return number_rows(observations, divided), told
