"""SkyRL (skyrl-gym 0.4): an environment of as many turns as the generator has, registered as

    skyrl_gym.register(id="concur", entry_point="kernels_eval.service.adapters.skyrl:KernelEnv")

The other columns of a data set's row name the task; where they do not, `reward_spec.ground_truth`
is its id. `environment.skyrl_gym.concur` may hold `recipe` and `url`. SkyRL has no missing reward:
a fault of machine or task raises NoRewardError.
"""

from __future__ import annotations

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from kernels_eval.records import Row
from kernels_eval.service.adapters.scoring import cacheable, plain_feedback, row_of, shared_scorer


class KernelEnv(BaseTextEnv):
    """Each turn is an answer, and earns its own reward."""

    feedback = staticmethod(plain_feedback)
    """what the next turn is told"""

    def __init__(self, env_config: Row | None = None, extras: Row | None = None) -> None:
        super().__init__()
        extras, config = extras or {}, dict(env_config or {})
        self.scorer = shared_scorer(cacheable(config.pop("recipe", "concur")), **config)
        self.row = row_of(extras, (extras.get("reward_spec") or {}).get("ground_truth"))
        self.max_turns = int(extras.get("max_turns", 1))

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        (score,) = self.scorer.scores([self.row], [action])
        reward = score.earned()
        done = self.turns >= self.max_turns
        said = [] if done else [{"role": "user", "content": self.feedback(score)}]
        return BaseTextEnvStepOutput(
            observations=said, reward=reward, done=done, metadata={**score.facts}
        )
