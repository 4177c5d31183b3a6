"""A training set in the making: what each criterion offered, took and passed over."""

from __future__ import annotations

import polars as pl

from tasks.curation.criteria import without
from tasks.curation.draw import draw
from tasks.curation.reasons import WhyNot


class Choice:
    """The samples taken so far, in the order of the rule.

    `pool` is `tasks.curation.pool.pool_of` with `_draw`; `taken` adds `criterion`. No kernel is
    taken twice.
    """

    def __init__(self, pool: pl.DataFrame) -> None:
        self.pool = pool
        self.taken = pool.clear().with_columns(criterion=pl.lit(None, pl.String))
        self._passed_over = [self.taken.select("_row", "criterion", why=pl.lit(None, pl.String))]

    @property
    def sure(self) -> pl.DataFrame:
        return self.pool.filter(pl.col("_unmet").is_null())

    def left(self, rows: pl.DataFrame) -> pl.DataFrame:
        return without(rows, self.taken)

    def count(self, criterion: str) -> int:
        return self.taken.filter(criterion=criterion).height

    def add(self, criterion: str, offered: pl.DataFrame, kept: pl.DataFrame | None = None) -> None:
        """Take new samples among `kept` (default: all offered). Others offered are passed over for
        a limit."""
        kept = offered if kept is None else kept
        self.taken = pl.concat([self.taken, _named(self.left(kept), criterion)])
        self.pass_over(criterion, offered, WhyNot.LIMIT)

    def pass_over(self, criterion: str, rows: pl.DataFrame, why: WhyNot) -> None:
        self._passed_over.append(
            _named(rows, criterion).select("_row", "criterion", why=pl.lit(why.value))
        )

    def thin(self, size: int | None) -> None:
        """Keep at most `size` samples, each criterion its share to within one sample. Samples of a
        criterion are drawn; a smaller set is part of a larger one."""
        if size is None or size >= self.taken.height:
            return
        whole = self.taken
        rank = pl.struct("_draw", "candidate_id").rank("ordinal").over("criterion")
        place = (rank - 0.5) / pl.len().over("criterion")
        kept = whole.with_row_index("_order").with_columns(_place=place)
        kept = kept.sort("_place", "_order").head(size).sort("_order")
        self.taken = kept.drop("_order", "_place")
        self._passed_over.insert(0, whole.select("_row", "criterion", why=pl.lit(WhyNot.LIMIT)))

    @property
    def passed_over(self) -> pl.DataFrame:
        rows = pl.concat(self._passed_over).unique("_row", keep="first", maintain_order=True)
        return rows.join(self.taken.select("_row"), on="_row", how="anti")


def at_most(rows: pl.DataFrame, count: int | None) -> pl.DataFrame:
    """`count` rows, drawn if there are more; None: all."""
    return rows if count is None else draw(rows, count)


def _named(rows: pl.DataFrame, criterion: str) -> pl.DataFrame:
    return rows.with_columns(criterion=pl.lit(criterion))
