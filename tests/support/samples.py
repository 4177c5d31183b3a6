"""Verified samples as frames of the real schemas, small enough to decide by hand, and a strategy of
hypothesis for any of them."""

from __future__ import annotations

from typing import Any

import polars as pl
import pyarrow as pa
from hypothesis import strategies as st

from tasks.tables import CANDIDATES, VERDICTS

SINGLE, FUSION = (
    ["torch.nn.functional.linear"],
    [
        "torch.nn.functional.linear",
        "torch.nn.functional.gelu",
    ],
)
SCHEMA = pa.schema(
    [*VERDICTS, *(field for field in CANDIDATES if field.name not in VERDICTS.names)]
)


def sample(
    task: str,
    index: int,
    tokens: int | None,
    speedup: float | None,
    *,
    status: str = "correct",
    ops: list[str] = FUSION,
    lower: float | None = None,
) -> dict[str, Any]:
    timing = None
    if speedup is not None and status == "correct":
        low = speedup * 0.9 if lower is None else lower
        timing = {
            "reference_ms": speedup,
            "candidate_ms": 1.0,
            "speedup": speedup,
            "speedup_lower": low,
            "speedup_upper": speedup * 1.1,
        }
        timing |= {"pairs": 50, "calls_per_sample": 1, "clock_bound_ms": 1.0}
    return {
        "candidate_id": f"{task}-{index}",
        "task_id": task,
        "status": status,
        "timing": timing,
        "reference_operators": ops,
        "generator": "org/writer",
        "sample_index": index,
        "reasoning_tokens": tokens,
        "response": "kept as it is",
        "reasoning": f"thoughts of {task}-{index}",
        "turn": 1,
    }


def frame(*rows: dict[str, Any]) -> pl.DataFrame:
    read = pl.from_arrow(pa.Table.from_pylist(list(rows), schema=SCHEMA))
    assert isinstance(read, pl.DataFrame)
    return read


SPEEDUPS = (None, float("nan"), 0.5, 1.0, 1.05, 6.0, 8.0)  # few, so that ties are common


@st.composite
def any_samples(draw: st.DrawFn, max_size: int = 24) -> list[dict[str, Any]]:
    """Samples of up to six tasks, each task of one kind, with ties in length and speedup, untimed
    and incorrect ones among them."""
    drawn = draw(
        st.lists(
            st.tuples(
                st.sampled_from("abcdef"),
                st.integers(1, 4),
                st.sampled_from(SPEEDUPS),
                st.booleans(),
            ),
            min_size=1,
            max_size=max_size,
        )
    )
    kinds = {task: draw(st.booleans()) for task in sorted({task for task, *_ in drawn})}
    return [
        sample(
            task,
            index,
            tokens,
            speedup,
            status="correct" if ok else "incorrect",
            ops=SINGLE if kinds[task] else FUSION,
        )
        for index, (task, tokens, speedup, ok) in enumerate(drawn)
    ]
