"""Reward functions for TRL's GRPOTrainer (trl 1.16, `trainer/grpo_trainer.py`): give one of them
in `reward_funcs`.

TRL calls them with the prompts, completions and columns of the data set, as lists. None is kept:
TRL leaves such a completion out of its group's mean and gives it no advantage. Beside the reward,
the share of each status and the mean of each part are logged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kernels_eval.records import Status
from kernels_eval.service.adapters.scoring import FIELDS, Row, Score, Scorer

Log = Callable[[str, float], None]
Rewards = list[float | None]


class KernelReward:
    """Judges a batch and waits for it."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    def __call__(
        self, completions: Sequence[object], *, log_metric: Log | None = None, **columns: Any
    ) -> Rewards:
        rows = _rows(columns, len(completions))
        return _logged(self.scorer.scores(rows, completions), log_metric)


class AsyncKernelReward:
    """Judges a batch while other asynchronous reward functions work."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    async def __call__(
        self, completions: Sequence[object], *, log_metric: Log | None = None, **columns: Any
    ) -> Rewards:
        rows = _rows(columns, len(completions))
        return _logged(await self.scorer.ascores(rows, completions), log_metric)


def _rows(columns: dict[str, Any], count: int) -> list[Row]:
    known = {name: values for name, values in columns.items() if name in {*FIELDS, "least_ms"}}
    return [{name: values[index] for name, values in known.items()} for index in range(count)]


def _logged(scores: Sequence[Score], log: Log | None) -> Rewards:
    if log and scores:
        found = Counter(score.verdict.status for score in scores if score.verdict)
        for status in Status:
            log(f"status/{status}", found[status] / len(scores))
        earned = [score.parts for score in scores if score.parts is not None]
        for part in sorted({name for parts in earned for name in parts}):
            log(f"part/{part}", sum(parts.get(part, 0.0) for parts in earned) / len(earned))
    return [score.reward for score in scores]
