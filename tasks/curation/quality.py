"""Numbers on a reasoning trace that a person would call bad, and flags from them: loops, self-doubt, mixed languages, a cut thought.

Guarantees: one row a text in their order; the measures depend on a text alone, never on its neighbours; time linear in the text, whatever
it holds (10 MB of one character takes about a second); memory bounded by `QualityConfig.batch_characters` and the longest text, since
texts are read a batch at a time. Does not guarantee that a flagged trace is bad: the flags are heuristics, their precision by hand is in
benchmarks/results/2026-11-21-trace-quality.md, and nothing is removed unless the caller filters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    import numpy as np
    import polars as pl

MEASURES = (
    "characters", "words", "repeated_share", "loop_words", "loop_share", "doubt_markers", "doubt_per_1000_words", "foreign_letters",
    "foreign_share", "unclosed_fence", "unclosed_thought", "ends_mid_sentence",
)  # fmt: skip
FLAGS = ("repetitive", "ends_in_loop", "self_doubting", "mixed_language", "truncated")

NGRAM = 10
_WORD = r"[\w']{1,40}|[^\w\s']{1,40}"  # at most 40 characters: a text without a space is words too
_LETTER_WORD = r"\w"
_DOUBT = (
    r"(?i)\b(?:wait|hmm+|hold on|actually|alternatively|on second thought|let me (?:re-?|double[- ])?(?:check|think|consider|verify|read)"
    r"|let me (?:start over|try again)|i'?m (?:not sure|confused|stuck)|i (?:made a mistake|was wrong|am not sure|am confused)"
    r"|that(?:'s| is) (?:not right|wrong|incorrect)|this is getting (?:too )?(?:complicated|complex|confusing|stuck)|no,)"
)
_SCRIPTS = ("Latin", "Han", "Hiragana", "Katakana", "Hangul", "Cyrillic", "Arabic", "Hebrew", "Devanagari", "Thai", "Bengali", "Tamil")
_FENCE = r"(?m)^[ \t]*(?:```|~~~)"
_ENDING = r"[.!?:;)\]}>`\"'*|。！？”’…]\s*\z|(?m:^[ \t]*(?:#+ .*|\*\*.*|-{3,}))\s*\z"


class QualityConfig(BaseModel):
    """From which value a measure is a flag. Calibrated on 1,032 responses of QwQ-32B (benchmarks/results/2026-11-21-trace-quality.md)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_repeated_share: float = Field(default=0.35, ge=0, le=1, description="repetitive above this share of 10-grams seen before")
    max_loop_words: int = Field(default=60, ge=1, description="ends_in_loop above this many words of a repeated period at the end")
    max_doubt_per_1000_words: float = Field(default=16.0, ge=0, description="self_doubting above this rate")
    min_doubt_markers: int = Field(
        default=10, ge=1, description="fewer markers than this are never self_doubting: short texts have wild rates"
    )
    max_foreign_letters: int = Field(default=3, ge=0, description="mixed_language above this many letters outside the text's main script")
    batch_characters: int = Field(default=8_000_000, ge=1, description="characters of text measured at a time: bounds memory, not results")


def quality(texts: pl.Series | Iterable[str | None], config: QualityConfig | None = None) -> pl.DataFrame:
    """One row a text: `MEASURES`, then the boolean `FLAGS`. A null text counts as empty.

    Shares are of 1; `loop_words` counts words; `doubt_per_1000_words` is a rate.
    """
    import polars as pl

    frames = list(stream_quality(texts, config))
    return pl.concat(frames) if frames else _measured(pl.Series("text", [], dtype=pl.String), config or QualityConfig())


def stream_quality(texts: pl.Series | Iterable[str | None], config: QualityConfig | None = None) -> Iterator[pl.DataFrame]:
    """`quality` a batch at a time, for more rows than memory holds: give an iterator of texts."""
    import polars as pl

    config = config or QualityConfig()
    batch: list[str | None] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text or "")
        if characters >= config.batch_characters or len(batch) >= config.batch_characters // 100 + 1:
            yield _measured(pl.Series("text", batch, dtype=pl.String), config)
            batch, characters = [], 0
    if batch:
        yield _measured(pl.Series("text", batch, dtype=pl.String), config)


def keep(frame: pl.DataFrame, flags: Iterable[str] = FLAGS) -> pl.Series:
    """A mask of the rows of `quality` without any of `flags`: what a filter keeps."""
    import polars as pl

    return frame.select(~pl.any_horizontal(*flags)).to_series().alias("keep")


def _measured(texts: pl.Series, config: QualityConfig) -> pl.DataFrame:
    import polars as pl

    frame = texts.fill_null("").alias("text").to_frame()
    words = frame["text"].str.extract_all(_WORD)
    real = pl.Series("words", words.list.eval(pl.element().str.contains(_LETTER_WORD)).list.sum(), dtype=pl.Int64)
    repeated, loops, total = _repetition(words)
    letters = [pl.col("text").str.count_matches(rf"\p{{{script}}}").cast(pl.Int64).alias(script) for script in _SCRIPTS]
    scripts = frame.select(letters).with_columns(pl.sum_horizontal(_SCRIPTS).alias("all"), pl.max_horizontal(_SCRIPTS).alias("main"))
    text = pl.col("text")
    measured = frame.select(
        text.str.len_chars().cast(pl.Int64).alias("characters"),
        real.fill_null(0),
        pl.Series("repeated_share", repeated),
        pl.Series("loop_words", loops),
        pl.Series("loop_share", loops / total.clip(1)),
        text.str.count_matches(_DOUBT).cast(pl.Int64).alias("doubt_markers"),
        (scripts["all"] - scripts["main"]).alias("foreign_letters"),
        (text.str.count_matches(_FENCE) % 2 == 1).alias("unclosed_fence"),
        (text.str.contains("<think>", literal=True) & ~text.str.contains("</think>", literal=True)).alias("unclosed_thought"),
        (text.str.contains(_LETTER_WORD) & ~text.str.tail(200).str.contains(_ENDING)).alias("ends_mid_sentence"),
    ).with_columns(
        (1000 * pl.col("doubt_markers") / pl.col("words").clip(1)).alias("doubt_per_1000_words"),
        (pl.col("foreign_letters") / scripts["all"].clip(1)).alias("foreign_share"),
    )
    flags = (
        (pl.col("repeated_share") > config.max_repeated_share).alias("repetitive"),
        (pl.col("loop_words") > config.max_loop_words).alias("ends_in_loop"),
        ((pl.col("doubt_per_1000_words") > config.max_doubt_per_1000_words) & (pl.col("doubt_markers") >= config.min_doubt_markers)).alias(
            "self_doubting"
        ),
        (pl.col("foreign_letters") > config.max_foreign_letters).alias("mixed_language"),
        pl.any_horizontal("unclosed_fence", "unclosed_thought", "ends_mid_sentence").alias("truncated"),
    )
    return measured.with_columns(flags).select(*MEASURES, *FLAGS)


def _repetition(words: pl.Series) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each text: the share of its 10-grams that it had before, the words of the loop that it ends in, and all its words.

    One pass over the words of all texts: an n-gram is a polynomial hash of 64 bits, so two different ones collide once in 10^9 texts.
    """
    import numpy as np
    import polars as pl

    lengths = words.list.len().fill_null(0).to_numpy().astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    hashes = words.list.explode(empty_as_null=False).hash(seed=1).to_numpy()
    grams = np.zeros(max(0, len(hashes) - NGRAM + 1), dtype=np.uint64)
    for offset in range(NGRAM):
        grams = grams * np.uint64(0x9E3779B97F4A7C15) + hashes[offset : offset + len(grams)]
    row = np.repeat(np.arange(len(lengths)), lengths)[: len(grams)]
    inside = np.arange(len(grams)) + NGRAM <= starts[row + 1] if len(grams) else np.zeros(0, dtype=bool)
    table = pl.DataFrame({"row": row[inside], "gram": grams[inside]})
    counts = table.group_by("row").agg(pl.len(), pl.col("gram").n_unique().alias("different"))
    repeated = np.zeros(len(lengths))
    repeated[counts["row"].to_numpy()] = 1 - counts["different"].to_numpy() / counts["len"].to_numpy()
    loops = np.array([_loop_words(hashes[a:b]) for a, b in zip(starts[:-1], starts[1:], strict=True)], dtype=np.int64)
    return repeated, loops, lengths


def _loop_words(words: np.ndarray) -> int:
    """Words at the end that repeat with one period, all repetitions counted; 0 where the end is not said twice.

    The period is the distance from the last word to its occurrences before: the nearest few that continue backwards are tried.
    """
    import numpy as np

    if len(words) < 4:
        return 0
    best = 0
    for position in np.flatnonzero(words[:-1] == words[-1])[::-1][:_PERIODS]:
        period = len(words) - 1 - int(position)
        tail = words[-min(len(words), _TAIL) :]
        if period * 2 > len(tail):
            break
        different = np.flatnonzero(tail[period:] != tail[:-period])
        run = len(tail) - period - (int(different[-1]) + 1 if len(different) else 0)
        if run >= period:
            best = max(best, run + period)
    return best


_PERIODS = 64  # occurrences of the last word that are tried as periods
_TAIL = 20_000  # words at the end that are looked at: a longer loop is as flagged at this length
