"""verifiers up to 0.3 (`verifiers.legacy` there): an environment of several turns and its rubric.

Each answer is judged when it is given, because an exception of a rubric would count as a reward of
0: a fault of machine or task is an InfraError of the rollout instead. The reward of a rollout is
the return of its first turn under the recipe's `gamma`.
"""

from __future__ import annotations

from typing import Any

import verifiers as vf
from verifiers.errors import InfraError

from kernels_eval.rewards import discounted
from kernels_eval.service.adapters.scoring import (
    NoRewardError,
    Scorer,
    plain_feedback,
    row_of,
)


class KernelEnv(vf.MultiTurnEnv):
    """`info` of a row of the data set names the task; where it does not, `answer` is its id."""

    feedback = staticmethod(plain_feedback)
    """what the next turn is told"""

    def __init__(
        self,
        scorer: Scorer,
        turns: int = 1,
        **given: object,
    ) -> None:
        self.scorer, self.turns = scorer, turns
        super().__init__(rubric=vf.Rubric(funcs=[self.kernel]), max_turns=-1, **given)

    async def env_response(self, messages: object, state: Any, **_: object) -> list[dict[str, str]]:
        row = row_of(state.get("info") or {}, state.get("answer"))
        score = await self.scorer.score(row, messages)
        earned = state.setdefault("kernel_rewards", [])
        try:
            earned.append(score.earned())
        except NoRewardError as error:
            raise InfraError(str(error)) from error
        if len(earned) >= self.turns:
            state["final_env_response"] = []
            return []
        return [{"role": "user", "content": self.feedback(score)}]

    async def kernel(self, state: Any) -> float:
        returns = discounted(state["kernel_rewards"], self.scorer.recipe.gamma)
        return returns[0] or 0.0
