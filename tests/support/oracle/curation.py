"""Training sets: what every shipped strategy takes of the judged table, in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import yaml

from kernels_eval.errors import UsageError
from tests.support.oracle.inputs import Inputs

STRATEGIES = Path(__file__).parents[3] / "deployments" / "strategies"
VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "size 100": {"size": 100},
    "size 37, seed 3": {"size": 37, "seed": 3},
    "lower bound": {"require_speedup_lower_above": 1.0},
    "interval": {"equal_speedups": "interval"},
    "cut off": {"cut_off_answers": True},
    "two per task": {"max_per_task": 2, "size": 150},
    "no limit per task": {"max_per_task": None, "size": 250, "seed": 1},
    "criterion sizes": {"criterion_sizes": (60, 20, 20)},
    "quota": {"single_operator_quota": 12},
    "custom kernel": {"require_custom_kernel": True},
}


def selected(frame: pl.DataFrame, settings: dict[str, Any]) -> pl.DataFrame:
    """Adapter: the rows taken, in the order of the rule, with the column `criterion`."""
    from tasks.curation.config import CurationConfig
    from tasks.curation.decisions import curate

    return curate(frame, CurationConfig.model_validate(settings))


def section(inputs: Inputs) -> Any:
    frame = inputs.judged
    found = {}
    for file in sorted(STRATEGIES.glob("*.yaml")):
        settings = yaml.safe_load(file.read_text())
        found[file.stem] = {
            name: _taken(frame, settings | changes) for name, changes in VARIANTS.items()
        }
    shuffled = frame.sample(fraction=1.0, shuffle=True, seed=1)
    found["another order of rows"] = _taken(shuffled, {"strategy": "concur"})
    return found


def _taken(frame: pl.DataFrame, settings: dict[str, Any]) -> list[str]:
    try:
        rows = selected(frame, settings)
    except UsageError:
        return ["UsageError"]
    moved = rows.get_column("reasoning_from", default=pl.repeat("", rows.height, eager=True))
    named = rows.select("candidate_id", "criterion", moved.alias("moved"))
    return [" ".join(filter(None, row)) for row in named.iter_rows()]
