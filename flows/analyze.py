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
from tasks.curation.source import Source

if TYPE_CHECKING:
    import polars as pl

    from tasks.analysis.config import ObservationConfig
    from tasks.analysis.difficulty import Difficulty
    from tasks.analysis.observations import Observations


class Analysis(NamedTuple):
    """What was found, and where its page lies."""

    observations: Observations
    difficulty: Difficulty
    report: Path

    def as_json(self) -> dict[str, Any]:
        from tasks.analysis.report import as_json

        return {**as_json(self.observations, self.difficulty), "report": str(self.report)}

    def summary(self) -> str:
        """The finding in plain words, and the report's path."""
        said = [*self.observations.finding, *self.difficulty.finding, *self.observations.cautions]
        return "\n".join([*(f"- {sentence}" for sentence in said), f"report: {self.report}"])


def analyze(
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

    if other_candidates and not other_verdicts:
        raise UsageError("--other-candidates without --other-verdicts", "give both, or neither")
    if candidates and not verdicts:
        raise UsageError("--candidates without --verdicts", "give both, or neither")
    frame = read(Source(verdicts, candidates, root, unfinished=True))
    other = (
        read(Source(other_verdicts, other_candidates, root, unfinished=True, of="other-"))
        if other_verdicts
        else None
    )
    config = config or ObservationConfig(seed=seed)
    observations, divided = observe(frame, config), difficulty(frame, other, seed=config.seed)
    return Analysis(observations, divided, write(observations, divided, out))


def read(source: Source) -> pl.DataFrame:
    """The columns that the analysis reads, one row a verdict with its candidate."""
    from tasks.analysis.stage import OF_CANDIDATES, OF_VERDICTS

    return source.read(
        (*OF_VERDICTS, "speedup") if source.one_table else OF_VERDICTS, OF_CANDIDATES
    )
