"""Measures and flags of bad reasoning traces, in linear time. Flags are heuristics; for their
precision see benchmarks/results/2026-11-21-trace-quality.md."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from tasks.tables import TRACE_FLAGS

Array = np.ndarray[Any, Any]

MEASURES = TRACE_FLAGS.names[3:]
# Calibrated on 1,032 responses of QwQ-32B (benchmarks/results/2026-11-21-trace-quality.md).
MAX_REPEATED_SHARE = 0.25
"""repetitive above this share of 10-grams seen before"""
MAX_LOOP_WORDS = 60
"""ends_in_loop above this many words of a repeated period at the end"""
MAX_DOUBT_PER_1000_WORDS = 18.0
"""self_doubting above this rate"""
MIN_DOUBT_MARKERS = 10
"""fewer markers than this are never self_doubting: short texts have wild rates"""
MAX_FOREIGN_LETTERS = 3
"""mixed_language above this many letters outside the text's main script"""
MIN_PROSE = 200
"""too_short below this many characters outside of closed code: of 199 recorded correct answers one
has less (68), the next 282"""
NGRAM = 10
MAX_PERIODS = 64  # occurrences of the last word that are tried as periods
MAX_TAIL = 20_000  # words at the end that are searched; a longer loop is flagged all the same
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
# written in it. ASCII letters are added to the first.
_SCRIPTS = {
    "latin": r"\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{24F}\x{1E00}-\x{1EFF}",
    "cyrillic": r"\x{400}-\x{52F}",
    "hebrew": r"\x{590}-\x{5FF}",
    "arabic": r"\x{600}-\x{77F}",
    "indic": r"\x{900}-\x{DFF}",
    "thai": r"\x{E00}-\x{E7F}",
    "han and kana": (r"\x{3040}-\x{30FF}\x{3400}-\x{9FFF}\x{F900}-\x{FAFF}\x{20000}-\x{323AF}"),
    "hangul": r"\x{1100}-\x{11FF}\x{AC00}-\x{D7AF}",
}
_FENCE = r"(?m)^[ \t]*(?:```|~~~)"
_ENDING = r"[.!?:;)\]}>`\"'*|。！？”’…]\s*\z|(?m:^[ \t]*(?:#+ .*|\*\*.*|-{3,}))\s*\z"


def quality(texts: Sequence[str | None]) -> pl.DataFrame:
    """One row per text: `MEASURES`, then the boolean `FLAGS`. Null counts as empty. `words`,
    `repeated_share`, `loop_words` and doubt leave out closed code fences."""
    frame = pl.Series("text", texts, dtype=pl.String).fill_null("").to_frame()
    prose = frame["text"].str.replace_all(_CODE, "\n")
    repeated, loops, total = _repetition(prose.str.extract_all(_WORD))
    text, words = pl.col("text").str, prose.str.count_matches(rf"{_LETTER}+").cast(pl.Int64)
    doubts = prose.str.count_matches(_DOUBT).cast(pl.Int64)
    foreign = _foreign(frame["text"])
    prose_characters = prose.str.replace_all(r"\s+", " ").str.strip_chars().str.len_chars()
    return frame.select(
        characters=text.len_chars().cast(pl.Int64),
        words=words,
        repeated_share=pl.Series(repeated),
        loop_words=pl.Series(loops),
        loop_share=pl.Series(loops / total.clip(1)),
        doubt_markers=doubts,
        doubt_per_1000_words=1000 * doubts / words.clip(1),
        foreign_letters=foreign["letters"],
        foreign_share=foreign["share"],
        unclosed_fence=text.count_matches(_FENCE) % 2 == 1,
        unclosed_thought=text.contains("<think>", literal=True)
        & ~text.contains("</think>", literal=True),
        ends_mid_sentence=text.contains(_LETTER) & ~text.tail(200).str.contains(_ENDING),
    ).with_columns(
        repetitive=pl.col("repeated_share") > MAX_REPEATED_SHARE,
        ends_in_loop=pl.col("loop_words") > MAX_LOOP_WORDS,
        self_doubting=(pl.col("doubt_per_1000_words") > MAX_DOUBT_PER_1000_WORDS)
        & (pl.col("doubt_markers") >= MIN_DOUBT_MARKERS),
        mixed_language=pl.col("foreign_letters") > MAX_FOREIGN_LETTERS,
        truncated=pl.any_horizontal("unclosed_fence", "unclosed_thought", "ends_mid_sentence"),
        too_short=(pl.col("characters") > 0) & (prose_characters < MIN_PROSE),
    )


def _foreign(texts: pl.Series) -> pl.DataFrame:
    rest = texts.str.replace_all(r"[\x00-\x7F]+", "")
    counts = pl.DataFrame(
        {name: rest.str.count_matches(f"[{blocks}]") for name, blocks in _SCRIPTS.items()}
    ).with_columns(pl.col("latin") + texts.str.replace_all("[^A-Za-z]+", "").str.len_bytes())
    total, most = pl.sum_horizontal(pl.all()), pl.max_horizontal(pl.all())
    letters = (total - most).cast(pl.Int64)
    return counts.select(letters=letters, share=(letters / total).fill_nan(0.0))


def _repetition(words: pl.Series) -> tuple[Array, Array, Array]:
    """By 64-bit polynomial hashes of 10-grams."""
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
    loops = [_loop_words(hashes[start:end]) for start, end in pairwise(starts)]
    return repeated, np.array(loops, dtype=np.int64), lengths


def _loop_words(words: Array) -> int:
    """Words at the end that repeat with one period: a distance to the last word's nearest earlier
    occurrences."""
    if len(words) < 4:
        return 0
    best = 0
    for position in np.flatnonzero(words[:-1] == words[-1])[::-1][:MAX_PERIODS]:
        period = len(words) - 1 - int(position)
        tail = words[-min(len(words), MAX_TAIL) :]
        if period * 2 > len(tail):
            break
        different = np.flatnonzero(tail[period:] != tail[:-period])
        run = len(tail) - period - (int(different[-1]) + 1 if len(different) else 0)
        if run >= period:
            best = max(best, run + period)
    return best
