"""verl's reward manager over `compute_score` (see `kernels_eval.service.adapters.verl`):

    reward.reward_manager.source=importlib
    reward.reward_manager.name=KernelRewardManager
    reward.reward_manager.module.path=pkg://kernels_eval.service.adapters.verl_manager

`reward.reward_kwargs` may hold `recipe` and `url`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

from kernels_eval.service.adapters import verl


class KernelRewardManager(NaiveRewardManager):
    """Scores each response alone, many at a time, whatever function is configured."""

    def __init__(
        self, config: Any, tokenizer: object, compute_score: object = None, **given: object
    ) -> None:
        options = dict(config.reward.get("reward_kwargs") or {})
        super().__init__(config, tokenizer, partial(verl.compute_score, **options), **given)
