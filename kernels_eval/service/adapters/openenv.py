"""OpenEnv (openenv-core 0.3): an environment of several turns, one object a session.

    app = create_fastapi_app(lambda: KernelEnvironment(rows, scorer), KernelAction,
                             KernelObservation, max_concurrent_envs=64)

A row has a `prompt` and names its task. The reward of a step is None where machine or task failed;
the episode then ends.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from kernels_eval.errors import UsageError
from kernels_eval.records import Row
from kernels_eval.service.adapters.scoring import Scorer, plain_feedback


class KernelAction(Action):
    response: str
    """a whole answer, from which the module is parsed"""


class KernelObservation(Observation):
    text: str = ""
    """the task's prompt, or what the last answer is told"""
    facts: dict[str, float] = {}


class KernelEnvironment(Environment[KernelAction, KernelObservation, State]):
    """`reset` takes the row whose number is the seed, or draws one; each `step` judges an answer.
    The state holds the `rewards` of the episode's answers, and whether it is `done`."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    feedback = staticmethod(plain_feedback)
    """what the next turn is told"""

    def __init__(self, rows: Sequence[Row], scorer: Scorer, max_turns: int = 1) -> None:
        super().__init__()
        if not rows:
            raise UsageError("an environment without rows has nothing to ask", "give it some")
        self.rows, self.scorer, self.max_turns = rows, scorer, max_turns
        self._state, self._row = State(done=True), rows[0]

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **_: object
    ) -> KernelObservation:
        number = random.randrange(len(self.rows)) if seed is None else seed
        self._row = self.rows[number % len(self.rows)]
        self._state = State(episode_id=episode_id, rewards=[], done=False)
        return KernelObservation(text=str(self._row.get("prompt", "")))

    def step(
        self, action: KernelAction, timeout_s: float | None = None, **_: object
    ) -> KernelObservation:
        state = self._state
        if state.done:
            raise UsageError("this episode is over", "call reset")
        row = {"deadline_s": timeout_s, **self._row}
        (score,) = self.scorer.scores([row], [action.response])
        state.step_count += 1
        state.rewards.append(score.reward)
        state.done = score.reward is None or state.step_count >= self.max_turns
        said = "" if state.done else self.feedback(score)
        return KernelObservation(text=said, facts=score.facts, reward=score.reward, done=state.done)

    @property
    def state(self) -> State:
        return self._state
