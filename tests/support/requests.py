"""Tasks and requests for tests of synthesis, and an environment in which local servers are asked
directly."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels_eval.records import KernelTask, Language, SamplingParams
from tasks.sources.stage import keep
from tasks.store import SnapshotRef
from tasks.synthesis.client import OpenAISampler
from tasks.synthesis.sampler import Request, Response
from tests.support.chat_server import Server

KEY, KEY_ENV = "sk-very-secret-0123456789", "CONCUR_TEST_KEY"
MINE = KernelTask(task_id="user/mine", name="mine", code="class Model: pass")


def tasks_snapshot(root: Path | str, count: int = 1) -> SnapshotRef:
    """A snapshot of tasks t/0, t/1, ... whose code is a comment."""
    found = [KernelTask(task_id=f"t/{n}", name=f"t{n}", code=f"# {n}") for n in range(count)]
    return keep(found, str(root), {})


def make_request(
    index: int = 0,
    task: KernelTask = MINE,
    prompt: str = "prompt",
    key: str | None = None,
    language: Language = Language.CPP,
    **sampling: object,
) -> Request:
    """Sample `index` of a task; `key` is the number where None, the seed too unless it is given."""
    return Request(
        request_key=str(index) if key is None else key,
        task=task,
        language=language,
        prompt=prompt,
        sample_index=index,
        sampling=SamplingParams.model_validate({"seed": index} | sampling),
    )


def without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local servers are asked directly, whatever the environment says."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def client(url: str | list[str], **options: object) -> OpenAISampler:
    """A client that tries again without delay."""
    given = {"backoff_s": 0.001, "retries": 2} | options
    return OpenAISampler(url, "org/model", KEY_ENV, **given)


def ask(server: Server, count: int = 1, **options: object) -> list[Response]:
    """The answers to requests with the prompts "prompt 0", "prompt 1", ..."""
    requests = [make_request(n, prompt=f"prompt {n}") for n in range(count)]
    return list(client(server.url, **options).sample(requests))
