"""Requirements on frames for curation. Every error names the columns or the row count, and the
fix."""

from __future__ import annotations

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import VERDICT_SCHEMA_VERSION
from tasks.curation.config import CurationConfig
from tasks.scores import SHARE_COLUMN
from tasks.tables import CANDIDATES, CORRECT, VERDICTS, columns_of, completed

COLUMNS = (
    *("candidate_id", "task_id", "status", "timing", "reference_operators"),
    *("generator", "sample_index", "reasoning_tokens"),
)
OPTIONAL = (
    *("schema_version", "turn", "custom_kernels", "reason", SHARE_COLUMN),
    *("finish_reason", "finish_guessed", "completion_tokens"),
)
MEASURED = {
    "trace_flags": pl.List(pl.String()),
    "kernel": pl.String(),
    "max_tokens": pl.Int64(),
    "rewrote_bottleneck": pl.Boolean(),
    "correct_on_every_gpu": pl.Boolean(),
}
"""Columns that other snapshots add."""
RATIOS = ("speedup", "speedup_lower", "speedup_upper")
_WRITTEN = {**columns_of(CANDIDATES), **columns_of(VERDICTS)}
DECIDING: dict[str, pl.DataType] = {
    **{name: _WRITTEN[name] for name in (*COLUMNS, *OPTIONAL)},
    "timing": pl.Struct(dict.fromkeys(RATIOS, pl.Float64())),
    **MEASURED,
}
"""What curation decides by."""
FIX = "give the verdicts as verification wrote them, with the candidates as synthesis did"


def usable(frame: pl.DataFrame, config: CurationConfig) -> pl.DataFrame:
    """The columns `DECIDING`, null where the frame has none.

    Raises UsageError for missing columns or ones of another kind, rows without an id, and verdicts
    of different or newer schema versions.
    """
    if config.require_rewritten_bottleneck and "rewrote_bottleneck" not in frame.columns:
        raise UsageError(
            "require_rewritten_bottleneck asks for profiles of these verdicts, and there are none",
            "run the refresh with --set profile.enabled=true, or leave it out",
        )
    needed = [*COLUMNS, *(["custom_kernels"] if config.require_custom_kernel else [])]
    needed += [] if config.min_kernel_share is None else [SHARE_COLUMN]
    rows = completed(frame, DECIDING, needed, what="curation", fix=FIX).select(list(DECIDING))
    for name in ("candidate_id", "task_id"):
        if nulls := rows[name].null_count():
            raise UsageError(f"{nulls} of {rows.height} rows have no {name}", FIX)
    correct = rows.filter(CORRECT)
    if config.exclude_flags and (count := correct["trace_flags"].null_count()):
        # traces that were not measured are not known to be without flags
        raise UsageError(
            f"the reasoning of {count} of {correct.height} correct samples was not measured,"
            " which exclude_flags asks about",
            "give candidates with their reasoning, or leave out exclude_flags",
        )
    _require_one_version(rows)
    return rows


def _require_one_version(rows: pl.DataFrame) -> None:
    counts = dict(sorted(rows["schema_version"].drop_nulls().value_counts().iter_rows()))
    if len(counts) > 1:
        shown = ", ".join(f"version {version}: {count}" for version, count in counts.items())
        raise UsageError(
            f"the verdicts are of {len(counts)} schema versions ({shown})",
            "verify all candidates with one version of concur",
        )
    if (newest := max(counts, default=0)) > VERDICT_SCHEMA_VERSION:
        known = f"this concur knows {VERDICT_SCHEMA_VERSION}"
        raise UsageError(f"the verdicts have schema version {newest}, {known}", "update concur")


def require_lengths(correct: pl.DataFrame, *, none: bool = False) -> None:
    """Raise UsageError where a correct sample has no reasoning_tokens, or all have no reasoning and
    that is not asked for (`none`)."""
    tokens = pl.col("reasoning_tokens").cast(pl.Float64)
    unknown = correct.filter(~tokens.is_finite().fill_null(False))
    if unknown.height:
        raise UsageError(
            f"{unknown.height} of {correct.height} correct samples of {_generators(unknown)} have"
            " no reasoning_tokens, which curation compares",
            "give that generator's tokenizer with --set synthesis.tokenizer=HUB_ID_OR_DIRECTORY and"
            " run again: no answer is asked for twice",
        )
    if correct.height and not none and not (correct["reasoning_tokens"] > 0).any():
        raise UsageError(
            f"none of the {correct.height} correct samples of {_generators(correct)} has any"
            " reasoning to train on",
            "use a model that reasons, and a server that returns the text before </think>; or take"
            " answers without it with --set curation.without_reasoning=true",
        )


def _generators(rows: pl.DataFrame) -> str:
    return ", ".join(sorted({str(name) for name in rows["generator"].unique().to_list()}))
