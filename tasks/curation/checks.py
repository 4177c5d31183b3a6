"""Requirements on frames for curation. Every error names the columns or the row count, and the
fix."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import VERDICT_SCHEMA_VERSION, Json
from tasks.curation.config import CurationConfig
from tasks.tables import CORRECT

COLUMNS = (
    *("candidate_id", "task_id", "status", "timing", "reference_operators"),
    *("generator", "sample_index", "reasoning_tokens"),
)
TEXT = (pl.String, pl.Categorical, pl.Enum)
KINDS = {
    **dict.fromkeys(("candidate_id", "task_id", "status"), "text"),
    **dict.fromkeys(("sample_index", "reasoning_tokens", "turn", "schema_version"), "numbers"),
    **dict.fromkeys(("reference_operators", "custom_kernels", "trace_flags"), "lists"),
    **dict.fromkeys(("timing.speedup", "timing.speedup_lower", "timing.speedup_upper"), "numbers"),
}
FIX = "give the verdicts as verification wrote them, with the candidates as synthesis did"
Problem = tuple[str, str]
"""What is wrong with a frame, and the fix."""


def require_usable(frame: pl.DataFrame, config: CurationConfig) -> None:
    """Raise UsageError for missing columns or ones of another kind, rows without an id, and
    verdicts of different or newer schema versions."""
    for problem, fix in _problems(frame, config):
        raise UsageError(problem, fix)


def require_lengths(correct: pl.DataFrame) -> None:
    """Raise UsageError where a correct sample has no reasoning_tokens, or all have no reasoning."""
    tokens = pl.col("reasoning_tokens").cast(pl.Float64)
    unknown = correct.filter(~tokens.is_finite().fill_null(False))
    if unknown.height:
        raise UsageError(
            f"{unknown.height} of {correct.height} correct samples of {_generators(unknown)} have"
            " no reasoning_tokens, which curation compares",
            "give that generator's tokenizer with --set synthesis.tokenizer=HUB_ID_OR_DIRECTORY and"
            " run synthesis again",
        )
    if correct.height and not (correct["reasoning_tokens"] > 0).any():
        raise UsageError(
            f"none of the {correct.height} correct samples of {_generators(correct)} has any"
            " reasoning to train on",
            "use a model that reasons, and a server that returns the text before </think>",
        )


def timing_fields(frame: pl.DataFrame) -> Json:
    """Field types of the struct `timing`."""
    return {field.name: field.dtype for field in getattr(frame.schema["timing"], "fields", [])}


def _problems(frame: pl.DataFrame, config: CurationConfig) -> Iterator[Problem]:
    yield from _missing_columns(frame, config)
    yield from _wrong_kinds(frame)
    for name in ("candidate_id", "task_id"):
        if nulls := frame[name].null_count():
            yield f"{nulls} of {frame.height} rows have no {name}", FIX
    if "speedup" not in timing_fields(frame) and frame["timing"].null_count() < frame.height:
        yield "the column timing is no struct with a field speedup", FIX
    yield from _unmeasured_flags(frame, config)
    yield from _schema_versions(frame)


def _missing_columns(frame: pl.DataFrame, config: CurationConfig) -> Iterator[Problem]:
    needed = [*COLUMNS, *(["custom_kernels"] if config.require_custom_kernel else [])]
    if missing := [name for name in needed if name not in frame.columns]:
        yield (
            f"curation needs the columns {', '.join(missing)}",
            "join a verification snapshot with the candidates it verified",
        )
    if config.require_rewritten_bottleneck and "rewrote_bottleneck" not in frame.columns:
        yield (
            "require_rewritten_bottleneck asks for profiles of these verdicts, and there are none",
            "run the refresh with --set profile.enabled=true, or leave it out",
        )


def _wrong_kinds(frame: pl.DataFrame) -> Iterator[Problem]:
    fields = timing_fields(frame)
    for name, kind in KINDS.items():
        field = name.partition("timing.")[2]
        found = fields.get(field) if field else frame.schema.get(name)
        if found not in (None, pl.Null) and not _is(kind, found):
            yield f"{'' if field else 'the column '}{name} is {found}, not {kind}", FIX


def _is(kind: str, found: pl.DataType) -> bool:
    if kind == "numbers":
        return found.is_numeric()
    return isinstance(found, pl.List if kind == "lists" else TEXT)


def _unmeasured_flags(frame: pl.DataFrame, config: CurationConfig) -> Iterator[Problem]:
    """Traces that were not measured are not known to be without flags."""
    if not config.exclude_flags:
        return
    correct = frame.filter(CORRECT)
    known = "trace_flags" in frame.columns
    count = correct["trace_flags"].null_count() if known else correct.height
    if count:
        yield (
            f"the reasoning of {count} of {correct.height} correct samples was not measured,"
            " which exclude_flags asks about",
            "give candidates with their reasoning, or leave out exclude_flags",
        )


def _schema_versions(frame: pl.DataFrame) -> Iterator[Problem]:
    versions = frame.get_column("schema_version", default=pl.Series([], dtype=pl.Int64))
    counts = dict(sorted(versions.drop_nulls().value_counts().iter_rows()))
    if len(counts) > 1:
        shown = ", ".join(f"version {version}: {count}" for version, count in counts.items())
        yield (
            f"the verdicts are of {len(counts)} schema versions ({shown})",
            "verify all candidates with one version of concur",
        )
    if (newest := max(counts, default=0)) > VERDICT_SCHEMA_VERSION:
        known = f"this concur knows {VERDICT_SCHEMA_VERSION}"
        yield f"the verdicts have schema version {newest}, {known}", "update concur"


def _generators(rows: pl.DataFrame) -> str:
    return ", ".join(sorted({str(name) for name in rows["generator"].unique().to_list()}))
