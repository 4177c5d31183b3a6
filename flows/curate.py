"""Training sets by strategies from existing verdicts, and why a candidate is in one. Does not write
snapshots."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from flows.config import load_strategy, strategy_names
from kernels_eval.errors import UsageError
from kernels_eval.records import Json
from tasks.curation.config import CurationConfig
from tasks.files import Content, atomic_write, explain_write_errors

if TYPE_CHECKING:
    from tasks.curation.decisions import Decided

SUMMARY_FILE, TABLE_FILE = "curation.json", "composition.md"


class Choice:
    """Verdicts (places for `tasks.curation.source.Source`) and strategies (`all`: every one) at
    sizes (none: the file's own). Raises UsageError as `load_strategy` and `Source` do."""

    def __init__(
        self,
        verdicts: str | None = None,
        candidates: str | None = None,
        root: str = ".concur",
        strategies: Sequence[str] = ("concur",),
        sizes: Sequence[int] = (),
        overrides: Sequence[str] = (),
    ) -> None:
        from tasks.curation.source import Source

        loaded = [load_strategy(name, overrides) for name in strategy_names(strategies)]
        sized = [each.model_copy(update={"size": size}) for each in loaded for size in sizes]
        self.configs, self.sized = sized or loaded, bool(sizes)
        self.source = Source(verdicts, candidates, root)
        self.frame = self.source.deciding(flags=any(each.exclude_flags for each in self.configs))

    def name(self, config: CurationConfig) -> str:
        return f"{config.strategy}-{config.size}" if self.sized else config.strategy

    def frame_for(self, config: CurationConfig) -> pl.DataFrame:
        from tasks.curation.kernels import with_kernels
        from tasks.decontamination.config import DeduplicationConfig
        from tasks.decontamination.deduplication import equal_kernels

        equal = equal_kernels(DeduplicationConfig())
        return with_kernels(self.frame, config, self.source.candidates, equal)


def curate_table(asked: Choice, out: str | None = None) -> Json:
    """Make training sets of every strategy and size. Returns `source`, and `sets`
    with their counts and composition.

    With `out`, writes `DIR/NAME.parquet` (`NAME-SIZE.parquet` with sizes), decisions to
    `DIR/NAME.decisions.parquet`, the result to `DIR/curation.json`, and a table. Raises UsageError,
    leaving DIR as it was, for unusable input, where no strategy takes anything, and where two sets
    would be one file. Of several, one that cannot move reasoning has a `problem` and no samples.
    """
    from flows.set_tables import task_families
    from tasks.curation.stage import caution_unconfirmed, nothing_taken, operators_from
    from tasks.observe.composition import composition, markdown_table
    from tasks.tables import CORRECT

    source, frame = asked.source, asked.frame
    names = [asked.name(config) for config in asked.configs]
    if out and len(set(names)) < len(names):
        raise UsageError(
            "two of these strategies have the same name and would write one file",
            "write them to two directories",
        )
    sets: list[Json] = []
    refusals: list[UsageError] = []
    families, held = task_families(frame), []
    for config, name in zip(asked.configs, names, strict=True):
        decided, found = _decided(asked, config)
        sets.append(found)
        if isinstance(decided, UsageError):
            refusals.append(decided)
        elif decided.taken.is_empty():
            refusals.append(nothing_taken(decided.decisions, config))
            found["problem"] = str(refusals[-1])
        elif out:
            place = Path(out) / f"{name}.parquet"
            found["file"] = str(place)
            _write(place, source.curated(decided.taken).write_parquet)
            _write(place.with_suffix(".decisions.parquet"), decided.decisions.write_parquet)
            held.append(composition(name, decided.taken, families))
    if len(refusals) == len(sets):
        raise refusals[0]
    screened = {
        name: found for name, found in zip(names, sets, strict=True) if found["unconfirmed"]
    }
    count, taken = (
        sum(found[key] for found in screened.values()) for key in ("unconfirmed", "samples")
    )
    caution_unconfirmed(count, taken, f" of {', '.join(screened)}")
    about = {
        "verdicts": source.verdicts.path,
        "candidates": source.candidates.path,
        "rows": frame.height,
        "correct": frame.filter(CORRECT).height,
        "operators_from": operators_from(frame),
    }
    data: Json = {"source": about, "sets": sets}
    if out:
        _write(Path(out) / TABLE_FILE, markdown_table(held))
        _write(Path(out) / SUMMARY_FILE, json.dumps(data, indent=2) + "\n")
    return data


def _write(path: Path, content: Content) -> None:
    with explain_write_errors(path, "choose another --out, or free some disk"):
        atomic_write(path, content)


def _decided(asked: Choice, config: CurationConfig) -> tuple[Decided | UsageError, Json]:
    from tasks.curation.decisions import decide
    from tasks.curation.stage import summary

    began_s = time.monotonic()
    try:
        frame = asked.frame_for(config)
        decided = decide(frame, config)
    except UsageError as error:
        if len(asked.configs) == 1 or config.strategy != "shuffled_reasoning":
            raise
        return error, _composition(asked.frame.clear(), config) | {"problem": str(error)}
    found = _composition(decided.taken, config)
    found["seconds"] = round(time.monotonic() - began_s, 3)
    return decided, found | summary(frame, decided)


def _composition(taken: pl.DataFrame, config: CurationConfig) -> Json:
    from tasks.observe.composition import composition

    held = composition(config.strategy, taken)
    return {
        "strategy": config.strategy,
        "size": config.size,
        "samples": held.samples,
        "tasks": held.tasks,
        "unconfirmed": 0,
        "criterion_counts": {},
        "composition": {"single_operator": held.single_operator, "fusion": held.fusion},
        "median_reasoning_tokens": held.median_tokens,
        "median_speedup": held.median_speedup,
        "min_kernel_share": [each.model_dump() for each in held.left_out],
        "config": config.model_dump(mode="json"),
        "seconds": 0.0,
    }


def explain_candidate(asked: Choice, candidate_id: str) -> list[Json]:
    """Decision of every strategy and size on one candidate: the row of tasks.tables.DECISIONS,
    `meaning`, `strategy` and `size`."""
    from tasks.curation.decisions import decide, explained

    rows = []
    for config in asked.configs:
        decisions = decide(asked.frame_for(config), config).decisions
        row = explained(decisions, candidate_id)
        rows.append({"strategy": config.strategy, "size": config.size, **row})
    return rows
