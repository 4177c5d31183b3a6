"""The classes of verifiers that its adapter builds on, as far as it uses them: for a machine where
verifiers is not installed. Where it is, tests run against it.

Signatures are those of verifiers 0.4.0 (`v1/task.py`, `v1/taskset.py`, `v1/utils/decorators.py`).
"""

import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
from pydantic import BaseModel, ConfigDict

A, B, C = TypeVar("A"), TypeVar("B"), TypeVar("C")


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


PROTOCOL = (TaskData, TaskConfig, TasksetConfig, Task, Taskset, State, reward)


def provide_verifiers(monkeypatch):
    """Make verifiers importable: itself where it is installed, else its protocol. Skips the test
    where another line of its versions is installed."""
    provided = "verifiers" in sys.modules and sys.modules["verifiers"].__spec__ is None
    if not provided and importlib.util.find_spec("verifiers"):
        if importlib.util.find_spec("verifiers.legacy"):
            pytest.skip("the tasks of this version of verifiers are older than the adapter's")
        return
    package, v1 = ModuleType("verifiers"), ModuleType("verifiers.v1")
    package.__path__, package.v1 = [], v1
    for each in PROTOCOL:
        setattr(v1, each.__name__, each)
    v1.Trace = Any
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.setitem(sys.modules, "verifiers.v1", v1)
