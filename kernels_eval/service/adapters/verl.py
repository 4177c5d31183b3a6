"""verl 0.9: `compute_score` for `reward.custom_reward_function`.

    reward.custom_reward_function.path=pkg://kernels_eval.service.adapters.verl
    reward.custom_reward_function.name=compute_score
    +reward.custom_reward_function.reward_kwargs.recipe=kevin

A sample's `extra_info` is its row; where it names no task, `ground_truth` is a task's id. verl has
no missing reward (`RewardManagerBase.assemble_rm_scores` wants a float): a fault of machine or task
raises NoRewardError.
"""

from __future__ import annotations

from collections.abc import Mapping

from kernels_eval.service.adapters.scoring import cacheable, row_of, shared_scorer


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping[str, object] | None = None,
    *,
    recipe: str | Mapping[str, object] = "concur",
    url: str | None = None,
    **_: object,
) -> dict[str, float]:
    """The `score` of one response, and numbers that verl logs beside it."""
    row = row_of(extra_info or {}, ground_truth)
    score = await shared_scorer(cacheable(recipe), url).score(row, solution_str)
    return {"score": score.earned(), "acc": score.facts["correct"], **score.facts}
