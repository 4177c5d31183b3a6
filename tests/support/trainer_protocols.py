"""The classes of trainers that adapters build on, as far as adapters use them: for a machine where
a trainer is not installed. Where it is, tests run against the trainer itself.

Signatures are those of skyrl-gym 0.4.0 (`envs/base_text_env.py`), openenv-core 0.3.0
(`core/env_server/interfaces.py`, `types.py`), nemo-gym 0.4.0 (`base_resources_server.py`), verl
0.9.1 (`experimental/reward_loop/reward_manager/naive.py`), verifiers 0.4.0 (`v1/task.py`,
`v1/taskset.py`, `v1/utils/decorators.py`) and verifiers 0.3.1 (`legacy/envs/multiturn_env.py`,
`legacy/rubrics/rubric.py`).
"""

import asyncio
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypedDict, TypeVar

import pytest
from pydantic import BaseModel, ConfigDict, Field

A, B, C = TypeVar("A"), TypeVar("B"), TypeVar("C")
ENTRIES = {}


class BaseTextEnv:
    def __init__(self):
        self.turns, self.max_turns = 0, 1

    def init(self, prompt):
        return prompt, {}


def register(id, entry_point):
    ENTRIES[id] = entry_point


def make(id, **given):
    module, _, name = ENTRIES[id].partition(":")
    return getattr(importlib.import_module(module), name)(**given)


class BaseTextEnvStepOutput(TypedDict):
    observations: list[dict[str, str]]
    reward: float
    done: bool
    metadata: dict[str, Any]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)
    metadata: dict[str, Any] = Field(default_factory=dict)


class Action(_Message):
    pass


class Observation(_Message):
    done: bool = False
    reward: bool | int | float | None = None


class State(BaseModel):
    model_config = ConfigDict(extra="allow", validate_assignment=True)
    episode_id: str | None = None
    step_count: int = Field(default=0, ge=0)


class Environment(Generic[A, B, C]):
    SUPPORTS_CONCURRENT_SESSIONS = False

    def __init__(self, transform=None, rubric=None):
        self.transform, self.rubric = transform, rubric


def create_fastapi_app(env, action_cls, observation_cls, max_concurrent_envs=None):
    return SimpleNamespace(env=env, observation=observation_cls, action=action_cls)


class BaseResourcesServerConfig(BaseModel):
    host: str
    port: int
    entrypoint: str
    name: str


class _Response(BaseModel):
    output: list[dict[str, Any]]

    @property
    def output_text(self):
        return "".join(part["text"] for each in self.output for part in each["content"])


class BaseVerifyRequest(BaseModel):
    responses_create_params: Any
    response: _Response


class BaseVerifyResponse(BaseVerifyRequest):
    reward: float


class SimpleResourcesServer(BaseModel):
    config: BaseResourcesServerConfig
    server_client: Any

    def setup_webserver(self):
        app = importlib.import_module("fastapi").FastAPI()
        app.post("/verify")(self.verify)
        return app


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


class Rubric:
    def __init__(self, funcs):
        self.funcs = funcs


class MultiTurnEnv:
    def __init__(self, rubric, max_turns=-1, dataset=None):
        self.rubric, self.max_turns = rubric, max_turns


class InfraError(Exception):
    pass


MODULES = {
    "skyrl_gym": {"": (register, make), "envs.base_text_env": (BaseTextEnv, BaseTextEnvStepOutput)},
    "openenv": {
        "core.env_server.interfaces": (Environment,),
        "core.env_server.types": (Action, Observation, State),
        "core.env_server.http_server": (create_fastapi_app,),
    },
    "nemo_gym": {
        "base_resources_server": (
            *(BaseResourcesServerConfig, BaseVerifyRequest),
            *(BaseVerifyResponse, SimpleResourcesServer),
        )
    },
    "verl": {"experimental.reward_loop.reward_manager.naive": (NaiveRewardManager,)},
    "verifiers": {"v1": (TaskData, TaskConfig, TasksetConfig, Task, Taskset, State, reward)},
    "verifiers_legacy": {"": (Rubric, MultiTurnEnv), "errors": (InfraError,)},
}


def provide(trainer, monkeypatch):
    """Make a trainer importable: itself where it is installed (True), else its protocol. Skips the
    test where another line of its versions is installed."""
    name = trainer.removesuffix("_legacy")
    provided = name in sys.modules and sys.modules[name].__spec__ is None
    if not provided and importlib.util.find_spec(name):
        if trainer == "verifiers_legacy" and not importlib.util.find_spec("verifiers.legacy"):
            pytest.skip("this version of verifiers has no legacy environments")
        if trainer == "verifiers" and importlib.util.find_spec("verifiers.legacy"):
            pytest.skip("the tasks of this version of verifiers are older than the adapter's")
        return True
    for path, contents in MODULES[trainer].items():
        parts = [name, *filter(None, path.split("."))]
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


def nemo_response(word):
    """A response with this text, as NeMo Gym has it from a model."""
    text = {"type": "output_text", "text": word, "annotations": []}
    message = {"id": "m", "type": "message", "role": "assistant", "status": "completed"}
    response = {"id": "r", "created_at": 0, "model": "m", "object": "response"}
    response |= {"parallel_tool_calls": False, "tool_choice": "none", "tools": []}
    return {**response, "output": [{**message, "content": [text]}]}
