"""Seeded draws, independent of library versions and other rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

Array = np.ndarray[Any, Any]
# The end of a candidate_id that a draw depends on; ids that agree there are drawn in their own
# order.
ID_BYTES = 64


def with_draw(pool: pl.DataFrame, seed: int) -> pl.DataFrame:
    """The pool with `_draw`, of (seed, candidate_id) alone: sorting by it draws without
    replacement."""
    numbers = draw_numbers(pool["candidate_id"], seed)
    return pool.with_columns(_draw=pl.Series(numbers, dtype=pl.UInt64))


def draw(rows: pl.DataFrame, count: int) -> pl.DataFrame:
    """`count` rows drawn by `_draw`, in the order of `rows`."""
    ordered = rows.with_row_index("_order").sort("_draw", "candidate_id").head(count)
    return ordered.sort("_order").drop("_order")


def draw_numbers(ids: pl.Series, seed: int) -> Array:
    """One 64-bit number per id: SplitMix64's finaliser (Steele, Lea and Flood 2014) over the id's
    last 64 bytes. Unlike hashes of polars and Python, it never changes."""
    padded = ids.str.pad_start(ID_BYTES, "\0").cast(pl.Binary).bin.slice(-ID_BYTES, ID_BYTES)
    words = padded.bin.reinterpret(dtype=pl.Array(pl.UInt64, ID_BYTES // 8), endianness="little")
    state = np.full(len(ids), _mixed(np.array([seed], dtype=np.uint64))[0], dtype=np.uint64)
    for word in words.to_numpy().T:
        state = _mixed(state ^ word)
    return state


def _mixed(state: Array) -> Array:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state
