"""A published set's README.md card, with front matter for the hub and `datasets` (`card.md.jinja`).
Data is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from kernels_eval.records import Json
from tasks.publishing.columns import COLUMNS
from tasks.publishing.config import DATA, UNKNOWN, PublishOptions
from tasks.publishing.lineage import VERIFICATION, settings
from tasks.reporting.choice import CHOICE
from tasks.reporting.page import markdown
from tasks.reporting.parts import table_of
from tasks.reporting.templates import environment
from tasks.reporting.text import by_count, cell, fenced, moment, printable
from tasks.scores import SHARE_COLUMN
from tasks.shares import LEFT_OUT_COLUMNS, left_out

COUNTED = (
    *("criterion", "operator_kind", "language", "generator"),
    *("device", "task_source", "task_license"),
)
MEASURED = ("reasoning_tokens", "speedup", SHARE_COLUMN)
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
EXTREMES = (0.0, 0.5, 1.0)
FEW_ROWS = 20
"""Rows below which only the median and the extremes are shown."""
OWN_PLACE = ("fingerprint", "rows", "config", *CHOICE)
"""Facts that the card names elsewhere."""
MOST_CHARACTERS = 400  # of a setting


@dataclass(frozen=True)
class Card:
    """A card's content: rows by split, `facts` of the lineage, and `observations`, sentences."""

    options: PublishOptions
    tag: str
    splits: Mapping[str, pl.DataFrame]
    facts: Json
    observations: Sequence[str] = ()


def card(context: Card) -> str:
    from huggingface_hub import DatasetCard

    rows = pl.concat(context.splits.values())
    counts = {name: _counts(rows[name]) for name in COUNTED}
    shares = QUANTILES if rows.height >= FEW_ROWS else EXTREMES
    filters = {"cell": cell, "fenced": fenced, "moment": moment, "number": "{:,}".format}
    template = environment(Path(__file__).parent, filters=filters).get_template("card.md.jinja")
    text = template.render(
        card=context,
        facts=context.facts,
        front_matter=_front_matter(context, list(counts["language"])),
        settings={stage: _settings(stage, each) for stage, each in context.facts.items()},
        choice=CHOICE,
        rows=rows.height,
        tasks=rows["task_id"].n_unique(),
        counts=counts,
        quantiles={name: _quantiles(rows[name], shares) for name in MEASURED},
        shares=shares,
        left_out=markdown(table_of(left_out(rows), LEFT_OUT_COLUMNS)),
        repaired=int(rows["repaired"].sum()),
        shared_programs=_shared_programs(context.splits),
        columns=[(name, COLUMNS.get(name, "as curation wrote it")) for name in rows.columns],
        unknown=UNKNOWN,
    )
    return f"{DatasetCard(text)}\n"


def _front_matter(context: Card, languages: Sequence[str]) -> str:
    from huggingface_hub import DatasetCardData

    subject = "kernels" if set(languages) == {"cpp"} else "gpu-kernels"
    files = [{"split": each, "path": f"{DATA}/{each}-*.parquet"} for each in context.splits]
    return DatasetCardData(
        pretty_name=printable(context.options.name).strip(),
        license=context.options.license,
        language=["en"],
        task_categories=["text-generation"],
        tags=["concur", "code", subject, "reasoning", *languages],
        configs=[{"config_name": "default", "data_files": files}],
    ).to_yaml()


def _settings(stage: str, facts: object) -> str:
    if not isinstance(facts, Mapping):
        return ""
    config = facts.get("config", {})
    if stage == VERIFICATION:  # forty numbers
        config = {"protocol": f"see facts.{stage} in publication.json"}
    others = {name: facts[name] for name in facts if name not in OWN_PLACE}
    return "; ".join(
        f"{cell(name)} {cell(value, MOST_CHARACTERS)}"
        for name, value in settings({**config, **others})
        if value != ""
    )


def _counts(values: pl.Series) -> dict[str, int]:
    counts = values.drop_nulls().value_counts().iter_rows()
    return dict(by_count({str(name): count for name, count in counts}))


def _quantiles(values: pl.Series, shares: Sequence[float]) -> list[float | None]:
    numbers = values.cast(pl.Float64, strict=False)
    known = numbers.filter(numbers.is_finite() & (numbers > 0))
    return [known.quantile(share, "linear") for share in shares]


def _shared_programs(splits: Mapping[str, pl.DataFrame]) -> int:
    programs = [part["task_code"].unique() for part in splits.values()]
    return len(set(programs[0]) & set(programs[1])) if len(programs) > 1 else 0
