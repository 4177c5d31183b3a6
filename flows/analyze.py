"""`concur analyze`: verdicts and candidates on disk in, the observations out.

Guarantees: reads only the columns that the observations need (`tasks.curation.source`), never a
response, so millions of candidates take little memory; changes nothing but --out. Does not
guarantee anything about directories that are still being written: it reads the parts that are
there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels_eval.errors import UsageError
from kernels_eval.records import Json

if TYPE_CHECKING:
    import polars as pl

    from tasks.curation.source import Source
    from tasks.observe.config import ObservationConfig


def analyze_table(
    verdicts: str | None = None,
    candidates: str | None = None,
    *,
    root: str = ".concur",
    out: str,
    config: ObservationConfig | None = None,
) -> Json:
    """Write the report of the observations to `out`; return them, and the report's path.

    Each path is a directory with Parquet files (a snapshot), a Parquet file, or a glob; without
    any, the newest verdicts under `root` are taken as `tasks.curation.source.Source` does. Raises
    UsageError for paths, tables and columns that cannot be used, and where no sample can be
    analysed.
    """
    from tasks.curation.source import Source
    from tasks.observe.observations import observe
    from tasks.observe.page import write

    if candidates and not verdicts:
        raise UsageError("--candidates without --verdicts", "give both, or neither")
    found = observe(read(Source(verdicts, candidates, root, unfinished=True)), config)
    report = write(found, out)
    findings = [
        {"key": row.key, "name": row.name} | row.estimate.model_dump() for row in found.findings
    ]
    return found.model_dump(mode="json") | {"findings": findings, "report": str(report)}


def read(source: Source) -> pl.DataFrame:
    """Return the columns that the observations read, one row per verdict with its candidate."""
    from tasks.observe.stage import OF_CANDIDATES, OF_VERDICTS

    speedup = ("speedup",) if source.one_table else ()
    return source.read((*OF_VERDICTS, *speedup), OF_CANDIDATES)
