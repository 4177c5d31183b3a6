"""Whether a task is one operator or several, for criterion (c) of the curation: operators that
verification saw executed decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import polars as pl

COUNTED_BATCH_NORM = r"^([^\n]*\.)?add_\n([^\n]*\.)?batch_norm$"
OperatorKind = Literal["single_operator", "fusion"]


def operator_kind(reference_operators: Sequence[str]) -> OperatorKind:
    """The kind of a task from a verdict's `reference_operators`: names of the outermost torch
    calls, without views, copies and creation.

    One call is a single operator, whatever it decomposes into. The same call twice is a fusion; so
    is no call. In training mode a batch norm counts batches with an `add_` before it; the pair is
    one operator.
    """
    calls = [name.rsplit(".", 1)[-1] for name in reference_operators]
    return "single_operator" if len(calls) == 1 or calls == ["add_", "batch_norm"] else "fusion"


def is_single_operator(names: pl.Expr) -> pl.Expr:
    calls = names.cast(pl.List(pl.String))
    count = calls.list.len() - calls.list.count_matches(None)
    batch_norm = calls.list.join("\n").str.contains(COUNTED_BATCH_NORM)
    return ((count == 1) | batch_norm).fill_null(False)
