"""Is a task one operator or several: the distinction that criterion (c) of the curation balances.

Guarantees: the answer depends on the operator names that verification saw the reference execute,
not on its source. Does not guarantee anything about a branch of the reference that was not taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import polars as pl

COUNTED_BATCH_NORM = r"^([^\n]*\.)?add_\n([^\n]*\.)?batch_norm$"
OperatorKind = Literal["single_operator", "fusion"]


def operator_kind(reference_operators: Sequence[str]) -> OperatorKind:
    """The kind of a task from a verdict's `reference_operators`.

    The names are those of the outermost torch calls, one per call ("torch.nn.functional.linear",
    "torch.Tensor.add"), with views, copies and creation already left out. Exactly one call is a
    single operator, however many aten operators it decomposes into. The same call twice (a loop) is
    a fusion: one kernel for both is what there is to gain. No call at all is a fusion too: a
    reference that computes nothing is no evidence of a simple operator, and must not count towards
    that half of the balance.

    A batch norm in training mode counts its batches with an `add_` right before it; that pair is
    one operator, not two. (An eval-mode batch norm after an in-place addition reads the same and
    counts as one too.)
    """
    calls = [name.rsplit(".", 1)[-1] for name in reference_operators]
    return "single_operator" if len(calls) == 1 or calls == ["add_", "batch_norm"] else "fusion"


def is_single_operator(names: pl.Expr) -> pl.Expr:
    """Whether `operator_kind` of lists of names is "single_operator"; False for null."""
    calls = names.cast(pl.List(pl.String))
    count = calls.list.len() - calls.list.count_matches(None)
    batch_norm = calls.list.join("\n").str.contains(COUNTED_BATCH_NORM)
    return ((count == 1) | batch_norm).fill_null(False)
