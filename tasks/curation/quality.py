"""Numbers on a reasoning trace that a person would call bad, and flags from them: loops,
self-doubt, mixed languages, a cut thought.

Guarantees: one row a text in their order; the measures depend on a text alone, never on its
neighbours; time linear in the text, whatever it holds (10 MB of one character take seconds); memory
bounded by `QualityConfig.batch_characters` and the longest text, since texts are read a batch at a
time. Does not guarantee that a flagged trace is bad: the flags are heuristics, their precision by
hand is in benchmarks/results/2026-11-21-trace-quality.md, and nothing is removed unless the caller
filters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    import numpy as np
    import polars as pl

MEASURES = (
    "characters",
    "words",
    "repeated_share",
    "loop_words",
    "loop_share",
    "doubt_markers",
    "doubt_per_1000_words",
    "foreign_letters",
    "foreign_share",
    "unclosed_fence",
    "unclosed_thought",
    "ends_mid_sentence",
)
Flag = Literal["repetitive", "ends_in_loop", "self_doubting", "mixed_language", "truncated"]
FLAGS: tuple[Flag, ...] = get_args(Flag)

NGRAM = 10
_LETTER = (  # not \w: a Unicode class repeated 40 times is ten times as slow
    r"[A-Za-z0-9_\x{80}-\x{10FFFF}]"
)
_WORD = (  # at most 40: a text without a space is words too
    rf"(?:{_LETTER}|'){{1,40}}|[^A-Za-z0-9_'\s\x{{80}}-\x{{10FFFF}}]{{1,40}}"
)
_CODE = (  # closed fences: a draft written again is no loop
    r"(?ms)^[ \t]*```[^\n]*\n.*?^[ \t]*```[ \t]*$"
)
_DOUBT = (
    r"(?i)(?-u:\b)(?:(?:wait|hmm+|hold on|actually|alternatively|on second thought"
    r"|let me (?:re-?|double[- ])?(?:check|think|consider|verify|read)"
    r"|let me (?:start over|try again)|i'?m (?:not sure|confused|stuck)|i (?:made a mistake|was"
    r" wrong|am not sure|am confused)"
    r"|that(?:'s| is) (?:not right|wrong|incorrect)|this is getting (?:too"
    r" )?(?:complicated|complex|confusing|stuck))(?-u:\b)|no,)"
)
# blocks of https://www.unicode.org/Public/UNIDATA/Blocks.txt; Greek is left out, since formulas are
# written in it
_SCRIPTS = {
    "latin": ((0xC0, 0xD6), (0xD8, 0xF6), (0xF8, 0x24F), (0x1E00, 0x1EFF)),
    "cyrillic": ((0x400, 0x52F),),
    "hebrew": ((0x590, 0x5FF),),
    "arabic": ((0x600, 0x77F),),
    "indic": ((0x900, 0xDFF),),
    "thai": ((0xE00, 0xE7F),),
    "han and kana": ((0x3040, 0x30FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF)),
    "hangul": ((0x1100, 0x11FF), (0xAC00, 0xD7AF)),
}
_FENCE = r"(?m)^[ \t]*(?:```|~~~)"
_ENDING = r"[.!?:;)\]}>`\"'*|。！？”’…]\s*\z|(?m:^[ \t]*(?:#+ .*|\*\*.*|-{3,}))\s*\z"


class QualityConfig(BaseModel):
    """From which value a measure is a flag. Calibrated on 1,032 responses of QwQ-32B
    (benchmarks/results/2026-11-21-trace-quality.md)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_repeated_share: float = Field(
        default=0.25, ge=0, le=1, description="repetitive above this share of 10-grams seen before"
    )
    max_loop_words: int = Field(
        default=60,
        ge=1,
        description="ends_in_loop above this many words of a repeated period at the end",
    )
    max_doubt_per_1000_words: float = Field(
        default=18.0, ge=0, description="self_doubting above this rate"
    )
    min_doubt_markers: int = Field(
        default=10,
        ge=1,
        description="fewer markers than this are never self_doubting: short texts have wild rates",
    )
    max_foreign_letters: int = Field(
        default=3,
        ge=0,
        description="mixed_language above this many letters outside the text's main script",
    )
    batch_characters: int = Field(
        default=8_000_000,
        ge=1,
        description="characters of text measured at a time: bounds memory, not results",
    )

    @property
    def identity(self) -> dict[str, Any]:
        """What the flags depend on."""
        return self.model_dump(mode="json", exclude={"batch_characters"})


def quality(
    texts: pl.Series | Iterable[str | None], config: QualityConfig | None = None
) -> pl.DataFrame:
    """One row a text: `MEASURES`, then the boolean `FLAGS`. A null text counts as empty.

    Shares are of 1. `words`, `repeated_share`, `loop_words` and doubt are of the prose: closed code
    fences are left out.
    """
    import polars as pl

    frames = list(stream_quality(texts, config))
    return (
        pl.concat(frames)
        if frames
        else _measured(pl.Series("text", [], dtype=pl.String), config or QualityConfig())
    )


def stream_quality(
    texts: pl.Series | Iterable[str | None], config: QualityConfig | None = None
) -> Iterator[pl.DataFrame]:
    """`quality` a batch at a time, for more rows than memory holds: give an iterator of texts."""
    import polars as pl

    config = config or QualityConfig()
    batch: list[str | None] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text or "")
        if (
            characters >= config.batch_characters
            or len(batch) >= config.batch_characters // 100 + 1
        ):
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
    prose = frame["text"].str.replace_all(_CODE, "\n")
    repeated, loops, total = _repetition(prose.str.extract_all(_WORD))
    foreign, foreign_share = _foreign(frame["text"])
    text = pl.col("text")
    measured = frame.select(
        text.str.len_chars().cast(pl.Int64).alias("characters"),
        prose.str.count_matches(rf"{_LETTER}+").cast(pl.Int64).alias("words"),
        pl.Series("repeated_share", repeated),
        pl.Series("loop_words", loops),
        pl.Series("loop_share", loops / total.clip(1)),
        prose.str.count_matches(_DOUBT).cast(pl.Int64).alias("doubt_markers"),
        pl.Series("foreign_letters", foreign),
        pl.Series("foreign_share", foreign_share),
        (text.str.count_matches(_FENCE) % 2 == 1).alias("unclosed_fence"),
        (
            text.str.contains("<think>", literal=True)
            & ~text.str.contains("</think>", literal=True)
        ).alias("unclosed_thought"),
        (text.str.contains(_LETTER) & ~text.str.tail(200).str.contains(_ENDING)).alias(
            "ends_mid_sentence"
        ),
    ).with_columns(
        (1000 * pl.col("doubt_markers") / pl.col("words").clip(1)).alias("doubt_per_1000_words"),
    )
    flags = (
        (pl.col("repeated_share") > config.max_repeated_share).alias("repetitive"),
        (pl.col("loop_words") > config.max_loop_words).alias("ends_in_loop"),
        (
            (pl.col("doubt_per_1000_words") > config.max_doubt_per_1000_words)
            & (pl.col("doubt_markers") >= config.min_doubt_markers)
        ).alias("self_doubting"),
        (pl.col("foreign_letters") > config.max_foreign_letters).alias("mixed_language"),
        pl.any_horizontal("unclosed_fence", "unclosed_thought", "ends_mid_sentence").alias(
            "truncated"
        ),
    )
    return measured.with_columns(flags).select(*MEASURES, *FLAGS)


def _foreign(texts: pl.Series) -> tuple[np.ndarray, np.ndarray]:
    """Of each text: letters outside its main script, and their share of all letters. Only what is
    not ASCII is looked at one by one."""
    import numpy as np

    counts, shares = np.zeros(len(texts), dtype=np.int64), np.zeros(len(texts))
    edges = sorted(
        (low, high, number)
        for number, blocks in enumerate(_SCRIPTS.values())
        for low, high in blocks
    )
    lows, highs, numbers = (
        np.array(column, dtype=np.uint32) for column in zip(*edges, strict=True)
    )
    rest = texts.str.replace_all(r"[\x00-\x7F]+", "")
    for i in (rest.str.len_bytes() > 0).arg_true().to_list():
        points = np.frombuffer(rest[i].encode("utf-32-le"), dtype=np.uint32)
        block = np.searchsorted(lows, points, side="right").astype(np.int64) - 1
        known = block[(block >= 0) & (points <= highs[block])]
        found = np.bincount(numbers[known], minlength=len(_SCRIPTS))
        if found.any():
            found[0] += texts[i : i + 1].str.count_matches("[A-Za-z]")[0]
            counts[i] = found.sum() - found.max()
            shares[i] = counts[i] / found.sum()
    return counts, shares


def _repetition(words: pl.Series) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each text: the share of its 10-grams that it had before, the words of the loop that it
    ends in, and all its words.

    An n-gram is a polynomial hash of 64 bits: in a text of 10,000 words two different ones collide
    once in 10^11 texts.
    """
    import numpy as np

    lengths = words.list.len().fill_null(0).to_numpy().astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    hashes = words.list.explode(empty_as_null=False).hash(seed=1).to_numpy()
    grams = np.zeros(max(0, len(hashes) - NGRAM + 1), dtype=np.uint64)
    for offset in range(NGRAM):
        grams = grams * np.uint64(0x9E3779B97F4A7C15) + hashes[offset : offset + len(grams)]
    repeated = np.zeros(len(lengths))
    for i in np.flatnonzero(lengths >= NGRAM):
        own = grams[starts[i] : starts[i + 1] - NGRAM + 1]
        repeated[i] = 1 - len(np.unique(own)) / len(own)
    loops = np.array(
        [_loop_words(hashes[a:b]) for a, b in zip(starts[:-1], starts[1:], strict=True)],
        dtype=np.int64,
    )
    return repeated, loops, lengths


def _loop_words(words: np.ndarray) -> int:
    """Words at the end that repeat with one period, all repetitions counted; 0 where the end is not
    said twice.

    The period is the distance from the last word to its occurrences before: the nearest few that
    continue backwards are tried.
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
