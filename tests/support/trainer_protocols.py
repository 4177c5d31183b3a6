"""The classes of trainers that adapters build on, as far as adapters use them: for a machine where
a trainer is not installed. Where it is, tests run against the trainer itself.

Signatures are those of verl 0.9.1 (`experimental/reward_loop/reward_manager/naive.py`) and
verifiers 0.4.0 (`v1/task.py`, `v1/taskset.py`, `v1/utils/decorators.py`).
"""

import asyncio
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
from pydantic import BaseModel, ConfigDict

A, B, C = TypeVar("A"), TypeVar("B"), TypeVar("C")


class NaiveRewardManager:
    def __init__(
        self,
        config,
        tokenizer,
        compute_score,
        reward_router_address=None,
        reward_model_tokenizer=None,
    ):
        assert asyncio.iscoroutinefunction(compute_score)
        self.tokenizer, self.compute_score = tokenizer, compute_score

    async def run_single(self, data):
        given = data.non_tensor_batch
        result = await self.compute_score(
            data_source=given["data_source"],
            solution_str=self.tokenizer.decode(data.batch["responses"][0]),
            ground_truth=given["reward_model"]["ground_truth"],
            extra_info=given["extra_info"] | {"num_turns": None, "rollout_reward_scores": {}},
        )
        return {"reward_score": result["score"], "reward_extra_info": result}


class State(BaseModel):
    pass


class TaskData(BaseModel):
    model_config = ConfigDict(frozen=True)
    idx: int | None = None
    id: str | None = None
    prompt: str | None = None


class TaskConfig(BaseModel):
    pass


class TasksetConfig(BaseModel):
    task: TaskConfig = TaskConfig()


class Task(Generic[A, B, C]):
    def __init__(self, data, config):
        self.data, self.config = data, config

    async def score(self, trace, runtime=None):
        for name in dir(self):
            if getattr(getattr(self, name), "reward", False):
                given = await getattr(self, name)(trace=trace)
                named = given if isinstance(given, Mapping) else {name: given}
                trace.rewards |= {k: SimpleNamespace(score=float(v)) for k, v in named.items()}


class Taskset(Generic[A, B]):
    def __init__(self, config):
        self.config = config

    def __iter__(self):
        return iter(self.load())


def reward(func):
    func.reward = True
    return func


MODULES = {
    "verl": {"experimental.reward_loop.reward_manager.naive": (NaiveRewardManager,)},
    "verifiers": {"v1": (TaskData, TaskConfig, TasksetConfig, Task, Taskset, State, reward)},
}


def provide(trainer, monkeypatch):
    """Make a trainer importable: itself where it is installed (True), else its protocol. Skips the
    test where another line of its versions is installed."""
    provided = trainer in sys.modules and sys.modules[trainer].__spec__ is None
    if not provided and importlib.util.find_spec(trainer):
        if trainer == "verifiers" and importlib.util.find_spec("verifiers.legacy"):
            pytest.skip("the tasks of this version of verifiers are older than the adapter's")
        return True
    for path, contents in MODULES[trainer].items():
        parts = [trainer, *filter(None, path.split("."))]
        for end in range(1, len(parts) + 1):
            dotted = ".".join(parts[:end])
            if dotted not in sys.modules:
                module = ModuleType(dotted)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, dotted, module)
                if end > 1:
                    setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
        for each in contents:
            setattr(sys.modules[".".join(parts)], each.__name__, each)
    if trainer == "verifiers":
        sys.modules["verifiers.v1"].Trace = Any
    return False
