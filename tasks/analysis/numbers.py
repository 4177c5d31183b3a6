"""The headline numbers of an analysis as rows: what runs are compared by.

Guarantees: every row has its value or the reason why there is none, never both; names do not depend
on the data. Holds no curve: bins, tenths and groups of tasks are in the records.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from tasks.analysis.records import Difficulty, Observations

NUMBERS = pa.schema(
    [
        ("name", pa.string()),
        ("value", pa.float64()),
        ("lower", pa.float64()),  # of its 95 % interval
        ("upper", pa.float64()),
        ("p", pa.float64()),
        ("samples", pa.int64()),
        ("tasks", pa.int64()),
        ("method", pa.string()),
        ("why_not", pa.string()),  # why there is no value; null where there is one
    ]
)


def number_rows(observations: Observations, difficulty: Difficulty) -> list[dict[str, Any]]:
    """Return rows of NUMBERS: the findings that have a key.

    They are ratios, shares and correlations, as the records define them; `..._tokens` are tokens.
    `all/` is of all samples, `complete/` of those that the token limit did not cut off (absent
    where it cut off none).
    """
    rows = []
    for finding in (*observations.findings, *difficulty.findings):
        found = finding.estimate
        if finding.key:
            row = found.model_dump(include={"value", "lower", "upper", "p", "tasks", "method"})
            why_not = None if found.value is not None else found.why_not or "unknown"
            rows.append({"name": finding.key, **row, "samples": found.n, "why_not": why_not})
    return rows
