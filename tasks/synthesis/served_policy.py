"""Answers of a policy that is still being trained, by vLLM servers: each step loads its adapter.

Guarantees: prompts and answers are token ids, so the policy learns from exactly what was written;
every answer of a call is by the adapter of that call, which the servers know under a name of its
own (a prefix cache never holds another step's). Does not guarantee the probabilities that the
trainer computes for the same tokens: the servers' matrix kernels round differently.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from kernels_eval.errors import EvalError, UsageError, cause_of
from kernels_eval.records import Json
from tasks.synthesis.client import CONNECT_TIMEOUT_S, OpenAISampler
from tasks.synthesis.sampler import Request, Response

LOAD_TIMEOUT_S = 300.0
NEUTRAL: Json = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sent where a recipe leaves them open: a server would take the model's own."""
STARTED = (
    "start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment and"
    " --enable-lora --max-lora-rank RANK"
)


class ServedPolicy(OpenAISampler):
    """vLLM servers that serve the policy's base model and can read `folder`, where its adapters are
    written. `base_url` and key are as for `OpenAISampler`; `model` is the adapter that they hold,
    "" at first."""

    path = "/completions"

    def __init__(self, base_url: str | Sequence[str], folder: Path) -> None:
        super().__init__(base_url, model="")
        self.folder, self.prompts = folder, dict[str, Sequence[int]]()

    def body(self, request: Request) -> Json:
        # no seed: vLLM draws the tokens of seeded requests one by one, and a run whose kernels are
        # timed never comes out the same
        asked = NEUTRAL | request.sampling.model_dump(exclude_none=True, exclude={"seed"})
        prompt = list(self.prompts[request.request_key])
        return {"model": self.model, "prompt": prompt, "return_token_ids": True, **asked}

    def read(self, request: Request, body: Any) -> Response:
        choice = body["choices"][0]
        return Response(
            request_key=request.request_key,
            text=choice["text"],
            tokens=tuple(map(int, choice["token_ids"])),
            finish_reason=choice.get("finish_reason"),
        )

    def write(
        self, policy: Any, requests: Sequence[Request], prompts: Mapping[str, Sequence[int]]
    ) -> Iterator[Response]:
        """Answers of a PEFT model to prompts in token ids (by request key), as they finish. Raises
        UsageError for servers that cannot take its adapter, EvalError for those that do not answer,
        or not every request."""
        self._load(policy)
        self.prompts, self.concurrency, answered = dict(prompts), len(requests), 0
        for response in self.sample(requests):
            answered += 1
            yield response
        if answered < len(requests):
            missing = f"{len(requests) - answered} of {len(requests)} answers of the policy"
            raise EvalError(
                f"{', '.join(self.urls)} left {missing} out",
                "see the server's log, and check sampling.max_tokens against its --max-model-len",
            )

    def close(self) -> None:
        """Let the servers forget the adapter, and remove it."""
        if self.model:
            told = {"lora_name": self.model}
            for url in self.urls:
                with suppress(EvalError):  # one that was started again does not know it
                    self._tell(url, "unload_lora_adapter", told, CONNECT_TIMEOUT_S)
            shutil.rmtree(self.folder / self.model, ignore_errors=True)
            self.model = ""

    def _load(self, policy: Any) -> None:
        name = f"policy-{uuid.uuid4().hex[:12]}"
        place = self.folder / name
        # not the reference that the trainer keeps beside it
        policy.save_pretrained(place, selected_adapters=["default"])
        self.close()
        told = {"lora_name": name, "lora_path": str(place.absolute())}
        for url in self.urls:
            self._tell(url, "load_lora_adapter", told, LOAD_TIMEOUT_S)
        self.model = name

    def _tell(self, url: str, what: str, told: Json, timeout_s: float) -> None:
        headers = {"authorization": f"Bearer {self._key}"}
        try:
            answer = httpx.post(f"{url}/{what}", json=told, headers=headers, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise EvalError(
                f"the server of the policy, {url}, does not answer: {cause_of(error)}",
                "start it, or correct reinforcement.base_url; rerun the same command to resume",
            ) from error
        if not answer.is_success:
            status, said = answer.status_code, self._line(answer.text)
            raise UsageError(f"{url} did not take {what} (HTTP {status}): {said}", STARTED)
