"""OpenEnv (openenv-core 0.3): an environment of several turns, one object a session.

    app = create_fastapi_app(lambda: KernelEnvironment(rows, scorer), KernelAction,
                             KernelObservation, max_concurrent_envs=64)

A row has a `prompt` and names its task. The reward of a step is None where machine or task failed;
the episode then ends.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from kernels_eval.errors import UsageError
from kernels_eval.service.adapters.scoring import Feedback, Row, Scorer, plain_feedback


class KernelAction(Action):
    response: str
    """a whole answer, from which the module is parsed"""


class KernelObservation(Observation):
    text: str = ""
    """the task's prompt, or what the last answer is told"""
    facts: dict[str, float] = {}


class KernelState(State):
    rewards: list[float | None] = []
    done: bool = True


class KernelEnvironment(Environment[KernelAction, KernelObservation, KernelState]):
    """`reset` draws a task, or takes the `index` it is given; each `step` judges an answer."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(
        self,
        rows: Sequence[Row],
        scorer: Scorer,
        max_turns: int = 1,
        feedback: Feedback = plain_feedback,
    ) -> None:
        super().__init__()
        self.rows, self.scorer, self.max_turns, self.feedback = rows, scorer, max_turns, feedback
        self._state, self._row = KernelState(), rows[0]

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        index: int | None = None,
        **_: Any,
    ) -> KernelObservation:
        self._row = random.Random(seed).choice(self.rows) if index is None else self.rows[index]
        self._state = KernelState(
            episode_id=episode_id or uuid4().hex,
            done=False,
        )
        return KernelObservation(text=str(self._row.get("prompt", "")))

    def step(
        self, action: KernelAction, timeout_s: float | None = None, **_: Any
    ) -> KernelObservation:
        state = self._state
        if state.done:
            raise UsageError("this episode is over", "call reset")
        row = {**self._row, "deadline_s": timeout_s or self._row.get("deadline_s")}
        (score,) = self.scorer.scores([row], [action.response])
        state.step_count += 1
        state.rewards = [*state.rewards, score.reward]
        state.done = score.reward is None or state.step_count >= self.max_turns
        said = "" if state.done else self.feedback(score)
        return KernelObservation(text=said, facts=score.facts, reward=score.reward, done=state.done)

    @property
    def state(self) -> KernelState:
        return self._state
