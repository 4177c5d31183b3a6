"""`concur analyze`: verdicts and candidates on disk in, the observations out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels_eval.errors import UsageError
from kernels_eval.records import Json

if TYPE_CHECKING:
    import polars as pl

    from tasks.curation.source import Source


def analyze_table(
    verdicts: str | None = None,
    candidates: str | None = None,
    *,
    root: str = ".concur",
    out: str,
) -> Json:
    """Write the observations' report to `out`; return them and the report's path.

    A path is a directory with Parquet files (a snapshot), a Parquet file, or a glob; without any,
    the newest verdicts under `root` are read. Raises UsageError where no sample can be analysed.
    """
    from tasks.curation.source import Source
    from tasks.observe.observations import observe
    from tasks.observe.page import write

    if candidates and not verdicts:
        raise UsageError("--candidates without --verdicts", "give both, or neither")
    found = observe(read(Source(verdicts, candidates, root, unfinished=True)))
    report = write(found, out)
    findings = [
        {"key": row.key, "name": row.name} | row.estimate.model_dump() for row in found.findings
    ]
    return found.model_dump(mode="json") | {"findings": findings, "report": str(report)}


def read(source: Source) -> pl.DataFrame:
    from tasks.observe.stage import OF_CANDIDATES, OF_VERDICTS

    speedup = ("speedup",) if source.one_table else ()
    return source.read((*OF_VERDICTS, *speedup), OF_CANDIDATES)
