"""What adapters share: a row of a trainer's data set and a response in, a score out.

A row names its task as `EvaluationRequest` does and may hold `language`, `priority`, `deadline_s`
and `least_ms`. A reward is None exactly where the machine or the task failed; `Score.earned` then
raises.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from pydantic import Field, NonNegativeFloat, ValidationError

from kernels_eval.errors import EvalError, UsageError, first_problem
from kernels_eval.records import Row, Status, Verdict
from kernels_eval.rewards import RewardRecipe, recipe_of, reward
from kernels_eval.service.client import VerifierClient
from kernels_eval.service.schema import Evaluation, EvaluationRequest

TASK = ("task_id", "task", "definition")


class _Request(EvaluationRequest):
    least_ms: NonNegativeFloat | None = Field(default=None, exclude=True)
    """see `reward`; not for the service"""


FIELDS = frozenset(_Request.model_fields) - {"code", "response", "solution", "id"}


class NoRewardError(EvalError):
    """There is no reward, and the trainer has no way to leave a sample out."""


class Score(NamedTuple):
    verdict: Verdict | None
    reward: float | None
    problem: str
    """what failed, where there is no reward"""

    def earned(self) -> float:
        """The reward. Raises NoRewardError where there is none."""
        if self.reward is None:
            hint = "drop the sample, or this task from the data set"
            raise NoRewardError(f"no reward: {self.problem}", hint)
        return self.reward

    @property
    def facts(self) -> dict[str, float]:
        """Numbers for a trainer's metrics, under the same names for every score."""
        status = self.verdict and self.verdict.status
        return {
            "correct": float(status is Status.CORRECT),
            "rejected": float(status is Status.REJECTED),
            "speedup": self.verdict.speedup if self.verdict else 0.0,
        }


class Scorer:
    def __init__(self, recipe: str | RewardRecipe = "concur", url: str | None = None) -> None:
        """`recipe` is what `recipe_of` takes. `url` and the token default to CONCUR_SERVE_URL and
        CONCUR_SERVE_TOKEN.
        """
        self.recipe = recipe_of(recipe)
        url = url or os.environ.get("CONCUR_SERVE_URL") or "http://127.0.0.1:8700"
        self.client = VerifierClient(url, os.environ.get("CONCUR_SERVE_TOKEN"))

    async def score(self, row: Row, response: object) -> Score:
        return (await self.scores([row], [response]))[0]

    async def scores(self, rows: Sequence[Row], responses: Sequence[object]) -> list[Score]:
        """One score per response, in order. Raises UsageError for an unusable row, ServiceError."""
        requests = list(map(_request, rows, responses))
        evaluations = await asyncio.wrap_future(self.client.begin_batch(requests))
        return list(map(self._score, requests, evaluations))

    def _score(self, request: _Request, found: Evaluation) -> Score:
        verdict = found.verdict
        earned = reward(verdict, self.recipe, least_ms=request.least_ms)
        problem = f"{verdict.task_id}: {verdict.detail}" if verdict else found.error or found.state
        return Score(verdict, earned, problem)


shared_scorer = cache(Scorer)
"""One scorer per process, recipe and address, for trainers that make an object per sample."""


def cacheable(recipe: str | Mapping[str, object]) -> str | RewardRecipe:
    """A recipe as `shared_scorer` takes it: hashable. The scorer reads a file, once."""
    return recipe if isinstance(recipe, str) else recipe_of(recipe)


def _request(row: Row, response: object) -> _Request:
    given = {name: row[name] for name in FIELDS if row.get(name) is not None}
    if isinstance(given.get("task"), str):
        given["task"] = {"code": given["task"]}
    try:
        return _Request(**given, response=text_of(response))
    except ValidationError as error:
        field, said = first_problem(error)
        raise UsageError(
            f"a row with {list(row)} is no request: {field or 'task'}: {said}",
            f"give each row one of {', '.join(TASK)}",
        ) from error


def row_of(row: Row, truth: object) -> Row:
    """The row; where it names no task, with `truth` as the task's id."""
    return row if any(row.get(name) for name in TASK) else {**row, "task_id": truth}


def text_of(response: object) -> str:
    """The text of a response: a string, or a conversation's last message."""
    while response and not isinstance(response, str):
        if isinstance(response, Sequence):
            response = response[-1]
        elif isinstance(response, Mapping):
            response = response.get("content") or response.get("text")
        else:
            response = getattr(response, "content", None)
    return str(response or "")
