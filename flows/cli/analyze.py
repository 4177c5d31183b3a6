"""`concur analyze`: verdicts and candidates on disk in, the observations and the difficulty report
out.

Guarantees: reads only the columns that the analysis needs (`tasks.curation.source`), never a
response, so millions of candidates take little memory; changes nothing but --out. Does not
guarantee anything about directories that are still being written: it reads the parts that are
there.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kernels_eval.errors import UsageError

if TYPE_CHECKING:
    import polars as pl

    from tasks.analysis.config import ObservationConfig
    from tasks.analysis.records import Difficulty, Observations
    from tasks.curation.source import Source


class Analysis(NamedTuple):
    """The findings, and the path of their page."""

    observations: Observations
    difficulty: Difficulty
    report: Path

    def as_json(self) -> dict[str, Any]:
        """Return both records and the report's path."""
        from tasks.analysis.report import as_json

        return {**as_json(self.observations, self.difficulty), "report": str(self.report)}


def analysis_of(
    verdicts: str | None = None,
    candidates: str | None = None,
    *,
    root: str = ".concur",
    out: str,
    other_verdicts: str | None = None,
    other_candidates: str | None = None,
    seed: int = 0,
    config: ObservationConfig | None = None,
) -> Analysis:
    """Analyse and write the report to `out`.

    Each path is a directory with Parquet files (a snapshot), a Parquet file, or a glob; without
    any, the newest verdicts under `root` are taken as `tasks.curation.source.Source` does. Raises
    UsageError for paths, tables and columns that cannot be used, and where no sample can be
    analysed.
    """
    from tasks.analysis.config import ObservationConfig
    from tasks.analysis.difficulty import difficulty
    from tasks.analysis.observations import observe
    from tasks.analysis.report import write
    from tasks.curation.source import Source

    for of, first, second in (
        ("other-", other_verdicts, other_candidates),
        ("", verdicts, candidates),
    ):
        if second and not first:
            raise UsageError(f"--{of}candidates without --{of}verdicts", "give both, or neither")
    frame, other = read(Source(verdicts, candidates, root, unfinished=True)), None
    if other_verdicts:
        other = read(Source(other_verdicts, other_candidates, root, unfinished=True, of="other-"))
    config = config or ObservationConfig(seed=seed)
    observations, divided = observe(frame, config), difficulty(frame, other, seed=config.seed)
    return Analysis(observations, divided, write(observations, divided, out))


def read(source: Source) -> pl.DataFrame:
    """Return the columns that the analysis reads, one row per verdict with its candidate."""
    from tasks.analysis.stage import OF_CANDIDATES, OF_VERDICTS

    speedup = ("speedup",) if source.one_table else ()
    return source.read((*OF_VERDICTS, *speedup), OF_CANDIDATES)
