"""Reward functions for TRL's GRPOTrainer (trl 1.16, `trainer/grpo_trainer.py`), for `reward_funcs`.
TRL gives a reward of None no advantage. Also logged: shares of correct and rejected kernels, and
the mean speedup."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from kernels_eval.records import Row
from kernels_eval.service.adapters.scoring import FIELDS, Score, Scorer

Log = Callable[[str, float], None]
Rewards = list[float | None]


@dataclass
class KernelReward:
    """Judges a batch while other asynchronous reward functions work."""

    scorer: Scorer

    async def __call__(
        self,
        completions: Sequence[object],
        log_metric: Log | None = None,
        **columns: Sequence[object],
    ) -> Rewards:
        scores = await self.scorer.scores(_rows(completions, columns), completions)
        return _logged(scores, log_metric)


def _rows(completions: Sequence[object], columns: Mapping[str, Sequence[object]]) -> list[Row]:
    known = [name for name in FIELDS if name in columns]
    return [{name: columns[name][i] for name in known} for i in range(len(completions))]


def _logged(scores: Sequence[Score], log: Log | None) -> Rewards:
    if log:
        for name in scores[0].facts:
            log(name, mean(score.facts[name] for score in scores))
    return [score.reward for score in scores]
