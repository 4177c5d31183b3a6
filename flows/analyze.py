"""`concur analyze`: verdicts and candidates on disk in, the observations and the difficulty report out.

Guarantees: reads only the columns that the analysis needs, never a response, so millions of candidates take little memory; changes nothing
but --out. Does not guarantee anything about directories that are still being written: it reads the parts that are there. Local paths only.
"""

from __future__ import annotations

from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kernels_eval.errors import UsageError

if TYPE_CHECKING:
    import polars as pl

    from tasks.analysis.difficulty import Difficulty
    from tasks.analysis.observations import ObservationConfig, Observations

FROM_VERDICTS = ("candidate_id", "task_id", "status", "reason", "timing")
FROM_CANDIDATES = ("candidate_id", "reasoning_tokens", "finish_reason", "generator", "sample_index")
FROM_ONE_TABLE = (*FROM_VERDICTS, *FROM_CANDIDATES[1:], "speedup")


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
    verdicts: str,
    candidates: str | None = None,
    *,
    out: str,
    other_verdicts: str | None = None,
    other_candidates: str | None = None,
    seed: int = 0,
    config: ObservationConfig | None = None,
) -> Analysis:
    """Analyse and write the report to `out`.

    Each path is a directory with Parquet files (a snapshot), a Parquet file, or a glob. Raises UsageError for paths, tables and
    columns that cannot be used, and where no sample can be analysed.
    """
    from tasks.analysis.difficulty import difficulty
    from tasks.analysis.observations import ObservationConfig, observe
    from tasks.analysis.report import write

    if other_candidates and not other_verdicts:
        raise UsageError("--other-candidates without --other-verdicts", "give both, or neither")
    frame = read(verdicts, candidates)
    other = read(other_verdicts, other_candidates) if other_verdicts else None
    config = config or ObservationConfig(seed=seed)
    observations, divided = observe(frame, config), difficulty(frame, other, seed=config.seed)
    return Analysis(observations, divided, write(observations, divided, out))


def read(verdicts: str, candidates: str | None) -> pl.DataFrame:
    """The columns that the analysis reads, one row a verdict; joined with its candidate where `candidates` are given.

    Raises UsageError for what cannot be read, a missing candidate_id, and verdicts of none of the candidates.
    """
    import polars as pl

    if candidates is None:
        return _table(verdicts, FROM_ONE_TABLE)
    left, right = _table(verdicts, FROM_VERDICTS), _table(candidates, FROM_CANDIDATES)
    for frame, path in ((left, verdicts), (right, candidates)):
        if "candidate_id" not in frame.columns:
            raise UsageError(f"{path} has no column candidate_id", "give the snapshots of verification and synthesis")
    left, right = (frame.unique("candidate_id", keep="first", maintain_order=True) for frame in (left, right))
    if left.height and left["candidate_id"].dtype != right["candidate_id"].dtype:
        right = right.with_columns(pl.col("candidate_id").cast(left["candidate_id"].dtype, strict=False))
    joined = left.join(right, on="candidate_id", how="inner", maintain_order="left")
    if left.height and joined.is_empty():
        raise UsageError(f"none of the {left.height} verdicts is of a candidate in {candidates}", "give the candidates that were verified")
    return joined


def _table(path: str, columns: Sequence[str]) -> pl.DataFrame:
    """Those of `columns` that are there. Of timing only the speedup is kept."""
    import polars as pl

    files = _files(path)
    try:
        table = pl.scan_parquet(files, missing_columns="insert", extra_columns="ignore")
        schema = table.collect_schema()
        chosen = [pl.col(name) for name in columns if name in schema and name != "timing"]
        if "timing" in columns and "timing" in schema and "speedup" not in schema:
            kind = schema["timing"]
            has = isinstance(kind, pl.Struct) and "speedup" in {field.name for field in kind.fields}
            chosen.append(pl.col("timing").struct.field("speedup") if has else pl.col("timing"))
        return table.select(chosen).collect(engine="streaming")
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UsageError(f"cannot read {path}: {str(error).splitlines()[0]}", "give a snapshot's directory, or a Parquet file") from error


def _files(path: str) -> list[str]:
    if "://" in path:
        raise UsageError(f"{path} is not a local path", "copy the snapshot here first")
    place = Path(path)
    files = sorted(glob(str(place / "*.parquet"))) if place.is_dir() else sorted(glob(path)) or ([path] if place.exists() else [])
    if not files:
        raise UsageError(f"{path} holds no Parquet file", "give a snapshot's directory (ROOT/verification/FINGERPRINT), or a Parquet file")
    return files
