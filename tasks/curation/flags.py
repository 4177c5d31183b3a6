"""Correct candidates in, the quality flags of their reasoning out: what curation counts, and leaves
out where it is told to.

Guarantees: one row for each correct candidate of the verdicts; a trace that any snapshot under the
root has measured with the same thresholds is not read again, so a night pays for new samples only;
a killed run resumes; texts are read a batch at a time, so that memory follows the number of threads
and not of samples.

Numbers on a reasoning trace that a person would call bad, and flags from them: loops,
self-doubt, mixed languages, a cut thought.

Guarantees: one row a text in their order; the measures depend on a text alone, never on its
neighbours; time linear in the text, whatever it holds (10 MB of one character take seconds); memory
bounded by `QualityConfig.batch_characters` and the longest text, since texts are read a batch at a
time. Does not guarantee that a flagged trace is bad: the flags are heuristics, their precision by
hand is in benchmarks/results/2026-11-21-trace-quality.md, and nothing is removed unless the caller
filters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import polars as pl

from kernels_eval.records import stable_hash
from tasks.curation.config import FLAGS, QualityConfig
from tasks.curation.tables import places_of
from tasks.keys import keyed
from tasks.progress import report
from tasks.store import Snapshot, SnapshotRef, known_rows
from tasks.tables import CORRECT, TRACE_FLAGS
from tasks.versions import TRACE_FLAG_VERSION

T = TypeVar("T")
Array = np.ndarray[Any, Any]

MEASURES = TRACE_FLAGS.names[3:]
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


def quality(texts: Iterable[str | None], config: QualityConfig | None = None) -> pl.DataFrame:
    """One row a text: `MEASURES`, then the boolean `FLAGS`. A null text counts as empty.

    Shares are of 1. `words`, `repeated_share`, `loop_words` and doubt are of the prose: closed code
    fences are left out.
    """
    frames = list(stream_quality(texts, config))
    return pl.concat(frames or [_measured([], config or QualityConfig())])


def stream_quality(
    texts: Iterable[str | None], config: QualityConfig | None = None
) -> Iterator[pl.DataFrame]:
    """`quality` a batch at a time, for more rows than memory holds: give an iterator of texts."""
    config = config or QualityConfig()
    limit = config.batch_characters
    for batch in batches(texts, lambda text: len(text or ""), limit, limit // 100 + 1):
        yield _measured(batch, config)


def batches(
    items: Iterable[T], characters_of: Callable[[T], int], max_characters: int, max_items: int
) -> Iterator[list[T]]:
    """Cut items into lists that end where their characters or their number reach a limit."""
    batch: list[T] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += characters_of(item)
        if characters >= max_characters or len(batch) >= max_items:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _measured(texts: Sequence[str | None], config: QualityConfig) -> pl.DataFrame:
    frame = pl.Series("text", texts, dtype=pl.String).fill_null("").to_frame()
    prose = frame["text"].str.replace_all(_CODE, "\n")
    repeated, loops, total = _repetition(prose.str.extract_all(_WORD))
    text, words = pl.col("text").str, prose.str.count_matches(rf"{_LETTER}+").cast(pl.Int64)
    doubts = prose.str.count_matches(_DOUBT).cast(pl.Int64)
    foreign = _foreign(frame["text"])
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
        repetitive=pl.col("repeated_share") > config.max_repeated_share,
        ends_in_loop=pl.col("loop_words") > config.max_loop_words,
        self_doubting=(pl.col("doubt_per_1000_words") > config.max_doubt_per_1000_words)
        & (pl.col("doubt_markers") >= config.min_doubt_markers),
        mixed_language=pl.col("foreign_letters") > config.max_foreign_letters,
        truncated=pl.any_horizontal("unclosed_fence", "unclosed_thought", "ends_mid_sentence"),
    )


def _foreign(texts: pl.Series) -> pl.DataFrame:
    """Of each text: letters outside its main script, and their share of all letters."""
    rest = texts.str.replace_all(r"[\x00-\x7F]+", "")
    counts = pl.DataFrame(
        {name: rest.str.count_matches(f"[{blocks}]") for name, blocks in _SCRIPTS.items()}
    ).with_columns(pl.col("latin") + texts.str.replace_all("[^A-Za-z]+", "").str.len_bytes())
    total, most = pl.sum_horizontal(pl.all()), pl.max_horizontal(pl.all())
    letters = (total - most).cast(pl.Int64)
    return counts.select(letters=letters, share=(letters / total).fill_nan(0.0))


def _repetition(words: pl.Series) -> tuple[Array, Array, Array]:
    """Of each text: the share of its 10-grams that it had before, the words of the loop that it
    ends in, and all its words.

    An n-gram is a polynomial hash of 64 bits: in a text of 10,000 words two different ones collide
    once in 10^11 texts.
    """
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
    """Words at the end that repeat with one period, all repetitions counted; 0 where the end is not
    said twice.

    The period is the distance from the last word to its occurrences before: the nearest few that
    continue backwards are tried.
    """
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


STAGE = "trace-flags"
MAX_THREADS = 8
BATCH_CHARACTERS, BATCH_TEXTS = 2_000_000, 2_000


def planned(verdicts: SnapshotRef, candidates: SnapshotRef, config: QualityConfig) -> Snapshot:
    """The snapshot that `run` with the same arguments fills."""
    return Snapshot.planned(STAGE, keyed(config), [verdicts, candidates], TRACE_FLAG_VERSION)


def run(verdicts: SnapshotRef, candidates: SnapshotRef, config: QualityConfig) -> SnapshotRef:
    """A finished snapshot of TRACE_FLAGS. Its manifest counts each flag. A candidate without
    reasoning has no flag."""
    snapshot = planned(verdicts, candidates, config)
    if snapshot.finished:
        return snapshot.ref
    wanted = correct_among(verdicts.open(), candidates.open())
    conditions = [keyed(config), TRACE_FLAG_VERSION]
    key_of = {name: stable_hash([name, conditions]) for name in wanted["candidate_id"]}
    snapshot.recover(TRACE_FLAGS)
    there = snapshot.keys("flag_key")
    missing = [key for key in key_of.values() if key not in there]
    known = known_rows(
        snapshot.root, STAGE, "flag_key", missing, TRACE_FLAGS, exclude=snapshot.fingerprint
    )
    snapshot.append(known, TRACE_FLAGS)
    done = snapshot.index(["candidate_id"])
    left = wanted.join(done, on="candidate_id", how="anti", maintain_order="left")
    count = wanted.height - left.height
    rows = candidates.open().rows_of(left, ["candidate_id", "reasoning"])
    texts = ((row["candidate_id"], row["reasoning"]) for row in rows)
    with closing(flagged(texts, config)) as measured, snapshot.journal(TRACE_FLAGS) as add:
        for frame in measured:
            for row in frame.to_dicts():
                add(row | {"flag_key": key_of[row["candidate_id"]]})
            count += frame.height
            report(STAGE, count, wanted.height, "")
    flags = snapshot.read(columns=["candidate_id", "trace_flags"], unique="candidate_id")
    return snapshot.publish(
        config=keyed(config), rows=wanted.height, extra={"flag_counts": counted(flags)}
    ).ref


def correct_among(verdicts: Snapshot, candidates: Snapshot) -> pl.DataFrame:
    """candidate_id and place of the candidates that a verdict calls correct, part by part."""
    judged = verdicts.read(columns=["candidate_id", "status"], unique="candidate_id")
    if judged.is_empty():
        judged = pl.DataFrame(schema={"candidate_id": pl.String, "status": pl.String})
    return places_of(candidates, judged.filter(CORRECT))


def flagged(
    texts: Iterable[tuple[str, str | None]], config: QualityConfig
) -> Generator[pl.DataFrame]:
    """candidate_id, `trace_flags` and MEASURES of traces (id, text), a batch at a time, in no
    particular order; several threads measure."""
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(threads)
    running: set[Future[pl.DataFrame]] = set()
    try:
        for batch in batches(texts, lambda pair: len(pair[1] or ""), BATCH_CHARACTERS, BATCH_TEXTS):
            running.add(pool.submit(_with_flags, batch, config))
            if len(running) > threads:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        for future in running:
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _with_flags(batch: list[tuple[str, str | None]], config: QualityConfig) -> pl.DataFrame:
    names, texts = zip(*batch, strict=True)
    raised = pl.concat_list(pl.when(name).then(pl.lit(name)) for name in FLAGS).list.drop_nulls()
    ids = pl.Series("candidate_id", names, dtype=pl.String)
    return quality(texts, config).select(ids, raised.alias("trace_flags"), *MEASURES)


def counted(rows: pl.DataFrame) -> dict[str, int]:
    """How many rows have each flag, in the order of FLAGS, zeros included."""
    raised = rows["trace_flags"].to_list() if rows.height else []
    return {name: sum(name in (flags or ()) for flags in raised) for name in FLAGS}
