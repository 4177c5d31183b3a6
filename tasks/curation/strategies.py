"""Which verified samples become training data: ConCuR's rule (arXiv 2510.07356, data curation) as pure functions on a frame.

The paper took 4,892 samples: (a) 3,934 concise and fast, (b) 414 with a speedup above 5, (c) 544 of single operators.

Guarantees: only samples with status "correct" and a reasoning are taken, each once, in an order that depends on the data alone
(criterion a, b, c, then task_id, then sample_index); nothing is random, so there is no seed. Does not guarantee that single operators
and fusions end up equal: (c) adds at most one sample a task and only ever adds single operators.

A frame holds one row per candidate with the columns of tasks.schemas.VERDICTS and CANDIDATES (`COLUMNS` names those read).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from kernels_eval.errors import UsageError
from tasks.curation.operators import operator_kind

if TYPE_CHECKING:
    import polars as pl

CONCISE_AND_FAST, HIGH_SPEEDUP, SINGLE_OPERATOR = "concise_and_fast", "high_speedup", "single_operator"
COLUMNS = ("candidate_id", "task_id", "status", "timing", "reference_operators", "generator", "sample_index", "reasoning_tokens")


class CurationConfig(BaseModel):
    """The rule and its thresholds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    strategy: Literal["concur"] = Field(default="concur", description="the paper's three criteria")
    min_speedup: float = Field(default=5.0, ge=0, description="paper, criterion b: every correct kernel above this speedup is taken")
    single_operator_quota: Annotated[int, Field(strict=True, ge=0)] | Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.5,
        description="criterion c: a share (0.5) is how much of the set single operators may come to; a whole number is how many samples "
        "are added at most, and never past half of the set",
    )
    require_speedup_lower_above: float | None = Field(
        default=None, ge=0, description="strict: take only samples whose lower bound of the speedup (95 %) is above this"
    )


def curate(frame: pl.DataFrame, config: CurationConfig) -> pl.DataFrame:
    """The rows taken, with a column `criterion` naming the first rule that took each: all of (a), then (b), then (c).

    Returns the columns of `frame` plus `criterion`; no rows where nothing qualifies. A candidate_id that occurs twice counts once.
    Raises UsageError for a missing column, for a correct sample without reasoning_tokens ((a) and (c) compare lengths), and where no
    correct sample has any reasoning.
    """
    import polars as pl

    eligible = eligible_samples(frame)
    sure = _is_sure(config)
    # (a) is decided among all correct samples: the strict bound may refuse the winner, never crown another
    first = concise_and_fast(eligible).filter(sure)
    second = high_speedup(eligible, config.min_speedup).filter(sure, ~pl.col("candidate_id").is_in(first["candidate_id"].to_list()))
    taken = pl.concat([first.with_columns(criterion=pl.lit(CONCISE_AND_FAST)), second.with_columns(criterion=pl.lit(HIGH_SPEEDUP))])
    third = single_operator(eligible.filter(sure), taken, config.single_operator_quota)
    return pl.concat([taken, third.with_columns(criterion=pl.lit(SINGLE_OPERATOR))]).select(*frame.columns, "criterion")


def eligible_samples(frame: pl.DataFrame) -> pl.DataFrame:
    """The correct rows with a reasoning, each candidate once, with `_speedup` and `_speedup_lower` (ratios; 0 where not timed).

    A correct answer whose reasoning is empty (a response that lost its think tags) has no trace to train on, and its zero tokens would
    make it the shortest of its task. Sorted by task_id, sample_index, candidate_id. Raises UsageError as `curate` does.
    """
    import polars as pl

    missing = [name for name in COLUMNS if name not in frame.columns]
    if missing:
        raise UsageError(f"curation needs the columns {', '.join(missing)}", "join a verification snapshot with the candidates it verified")
    correct = frame.filter(pl.col("status") == "correct").unique(subset="candidate_id", keep="first", maintain_order=True)
    _require_lengths(correct)
    reasoned = correct.filter(pl.col("reasoning_tokens") > 0)
    timings = [timing or {} for timing in reasoned["timing"].to_list()]
    return reasoned.with_columns(
        pl.Series("_speedup", [timing.get("speedup") or 0.0 for timing in timings], dtype=pl.Float64),
        pl.Series("_speedup_lower", [timing.get("speedup_lower") or 0.0 for timing in timings], dtype=pl.Float64),
    ).sort("task_id", "sample_index", "candidate_id")


def concise_and_fast(eligible: pl.DataFrame) -> pl.DataFrame:
    """(a): per task, the correct sample that is both the shortest in reasoning and the fastest; no sample where those are two.

    Ties: a sample as short as the shortest and as fast as the fastest qualifies; of several, the lowest sample_index is taken. A task's
    only correct sample is both. A sample without a timing is never the fastest.
    """
    import polars as pl

    both = (pl.col("reasoning_tokens") == pl.col("reasoning_tokens").min().over("task_id")) & (
        pl.col("_speedup") == pl.col("_speedup").max().over("task_id")
    )
    return eligible.filter(both, pl.col("_speedup") > 0).unique(subset="task_id", keep="first", maintain_order=True)


def high_speedup(eligible: pl.DataFrame, min_speedup: float) -> pl.DataFrame:
    """(b): every correct sample with speedup > min_speedup (strictly), however long its reasoning."""
    import polars as pl

    return eligible.filter(pl.col("_speedup") > min_speedup)


def single_operator(eligible: pl.DataFrame, taken: pl.DataFrame, quota: float | int) -> pl.DataFrame:
    """(c): for each single-operator task in order of task_id, its shortest correct sample not yet taken, until the quota is reached.

    A float quota is the share of the set (taken and added) that single operators may reach, 0.5 being balance with fusions. An int quota
    caps how many are added, and balance still ends it. Ties in length: the faster, then the lower sample_index.
    """
    import polars as pl

    share, limit = (quota, eligible.height) if isinstance(quota, float) else (0.5, quota)
    singles = int(_is_single(taken).sum())
    pool = (
        eligible.filter(_is_single(eligible), ~pl.col("candidate_id").is_in(taken["candidate_id"].to_list()))
        .sort("task_id", "reasoning_tokens", -pl.col("_speedup"), "sample_index", "candidate_id")
        .unique(subset="task_id", keep="first", maintain_order=True)
    )
    added = 0
    while added < min(limit, pool.height) and singles + added < share * (taken.height + added):
        added += 1
    return pool.head(added)


def _is_single(frame: pl.DataFrame) -> pl.Series:
    import polars as pl

    kinds = [operator_kind(names or []) == "single_operator" for names in frame["reference_operators"].to_list()]
    return pl.Series("single", kinds, dtype=pl.Boolean)


def _is_sure(config: CurationConfig) -> pl.Expr:
    import polars as pl

    bound = config.require_speedup_lower_above
    return pl.lit(True) if bound is None else pl.col("_speedup_lower") > bound


def _require_lengths(correct: pl.DataFrame) -> None:
    import polars as pl

    unknown = correct.filter(pl.col("reasoning_tokens").is_null())
    if unknown.is_empty():
        if correct.height and not (correct["reasoning_tokens"] > 0).any():
            raise UsageError(
                f"none of the {correct.height} correct samples of {_generators(correct)} has any reasoning to train on",
                "use a model that reasons, and a server that returns the text before </think>",
            )
        return
    raise UsageError(
        f"{unknown.height} of {correct.height} correct samples of {_generators(unknown)} have no reasoning_tokens, which curation compares",
        "give that generator's tokenizer with --set synthesis.tokenizer=HUB_ID_OR_DIRECTORY and run synthesis again",
    )


def _generators(rows: pl.DataFrame) -> str:
    return ", ".join(sorted({str(name) for name in rows["generator"].to_list()}))
