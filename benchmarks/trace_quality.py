"""Distribution of the trace measures and how many recorded responses each flag marks.

    python -m benchmarks.trace_quality --responses qwq32b_candidates.parquet --out trace-quality.md

The file needs `response`; with `recorded_correct` the share of correct responses with and without
each flag is told too. Hostile texts of 10 MB are timed. No text of a response is written.
"""

from __future__ import annotations

import argparse
import datetime
import resource
import time
from pathlib import Path

import polars as pl

from tasks.curation.config import FLAGS, QualityConfig
from tasks.curation.flags import quality, stream_quality

SHOWN = ("words", "repeated_share", "loop_words", "doubt_per_1000_words", "foreign_letters")
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
HOSTILE = {
    "one character": "a" * 10_000_000,
    "one word": "a " * 5_000_000,
    "a marker": "wait " * 2_000_000,
    "empty lines": "\n" * 10_000_000,
    "fences": "```\n" * 2_500_000,
    "Chinese (30 MB)": "\u6f22\u5b57" * 5_000_000,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--responses", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument(
        "--rows",
        type=int,
        default=20_000,
        help="rows streamed to show that memory stays flat (0: none)",
    )
    given = parser.parse_args()
    frame = pl.read_parquet(given.responses)
    lines = report(frame) + (streamed(frame["response"], given.rows) if given.rows else [])
    given.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def report(frame: pl.DataFrame) -> list[str]:
    started = time.perf_counter()
    measured = quality(frame["response"])
    seconds, characters = time.perf_counter() - started, int(measured["characters"].sum())
    lines = [
        (
            f"{frame.height} responses, {characters / 1e6:.1f} MB, {seconds:.1f} s"
            f" ({1e3 * seconds / frame.height:.1f} ms each)."
            f" {datetime.datetime.now(datetime.UTC):%Y-%m-%d}. Thresholds:"
            f" {QualityConfig().model_dump_json()}"
        ),
        "",
        f"| measure | {' | '.join(f'{100 * q:.0f} %' for q in QUANTILES)} |",
        "| --- |" + " ---: |" * len(QUANTILES),
    ]
    lines += [
        f"| {name} | {' | '.join(f'{measured[name].quantile(q):.4g}' for q in QUANTILES)} |"
        for name in SHOWN
    ]
    lines += [
        "",
        "| flag | marked | correct of the marked | correct of the others |",
        "| --- | ---: | ---: | ---: |",
    ]
    for flag in (*FLAGS, "unclosed_fence", "unclosed_thought", "ends_mid_sentence"):
        marked = measured[flag]
        shares = ["", ""]
        if "recorded_correct" in frame.columns:
            shares = [_share(frame["recorded_correct"].filter(mask)) for mask in (marked, ~marked)]
        lines.append(
            f"| {flag} | {marked.sum()} ({100 * marked.mean():.1f} %) | {shares[0]} | {shares[1]} |"
        )
    lines += ["", "| 10 MB of | seconds | flags |", "| --- | ---: | --- |"]
    for name, text in HOSTILE.items():
        started = time.perf_counter()
        row = quality([text]).row(0, named=True)
        lines.append(
            f"| {name} | {time.perf_counter() - started:.1f} |"
            f" {', '.join(flag for flag in FLAGS if row[flag])} |"
        )
    return lines


def streamed(texts: pl.Series, rows: int) -> list[str]:
    """Peak memory before and after `rows` texts, read from a generator as from a file."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    started, seen = time.perf_counter(), 0
    for part in stream_quality(texts[i % len(texts)][:2000] for i in range(rows)):
        seen += part.height
    seconds, after = (
        time.perf_counter() - started,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )
    return [
        "",
        (
            f"{seen} rows of at most 2,000 characters streamed: {seconds:.1f} s"
            f" ({1e3 * seconds / rows:.2f} ms each), peak memory {before:.2f} GiB before and"
            f" {after:.2f} GiB after."
        ),
    ]


def _share(correct: pl.Series) -> str:
    return f"{int(correct.sum())} of {len(correct)}" if len(correct) else "none"


if __name__ == "__main__":
    main()
