"""Sampling in this process with transformers' `generate`, for small models and adapter checks. The
same batches on one machine give the same text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kernels_eval.errors import UsageError
from kernels_eval.records import SamplingParams, stable_hash
from tasks.models import (
    attention_of_any_length,
    chat_text,
    load_causal_model,
    load_tokenizer,
    written_text,
)
from tasks.progress import caution
from tasks.sources.small_model import resolve_model
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.sampler import (
    Request,
    Requests,
    Response,
    Sampler,
    adapter_digest,
    adapter_of,
    model_name,
    required,
)

CPU_BATCH, GPU_BATCH = 16, 256
NO_CHAT = "sample from an instruct or reasoning model"


class TransformersSampler(Sampler):
    """A `Sampler` over a causal model directory or hub id, with an optional LoRA adapter (merged
    once).

    A response is the text after the generation prompt; where the template opens the think block it
    keeps `</think>`. `name` identifies the generator. 16 responses are written at once, on a GPU
    256, halved where memory runs out. The model loads at the first request. Raises UsageError where
    model or adapter cannot be loaded, a prompt leaves no room in the window, or the device cannot
    hold one response."""

    def __init__(
        self,
        model: str | Path,
        adapter: Path | None,
        name: str,
    ) -> None:
        super().__init__(tokenizer=model)
        self.generator = name
        self._location, self._adapter = model, adapter

    @classmethod
    def from_config(
        cls, config: SynthesisConfig, root: str, adapter: Path | None = None
    ) -> TransformersSampler:
        model = resolve_model(required(config, "model", "NAME"), root)
        chosen = adapter_of(config, adapter)
        return cls(model, chosen, name=model_name(config.model, chosen))

    @classmethod
    def data_version(cls, config: SynthesisConfig) -> str:
        return adapter_digest(config)

    def sample(self, requests: Requests) -> Iterator[Response]:
        """One response per request, batch by batch. Raises UsageError where the device cannot hold
        one alone."""
        import torch

        loaded = self.loaded
        # neighbours in length share a batch: less padding
        waiting = sorted(map(loaded.encode, requests), key=_order)
        size = GPU_BATCH if loaded.model.device.type == "cuda" else CPU_BATCH
        while waiting:
            batch = [row for row in waiting[:size] if row.settings == waiting[0].settings]
            try:
                answers = loaded.respond(batch)
            except torch.OutOfMemoryError as error:
                if len(batch) == 1:
                    most = len(batch[0].prompt) + batch[0].room
                    raise UsageError(
                        f"out of memory while sampling one response of up to {most} tokens",
                        "lower max_tokens, or serve the model with vLLM",
                    ) from error
                size = len(batch) // 2
                caution(f"Out of memory: {size} responses are sampled at once from here on")
                continue
            waiting = waiting[len(batch) :]
            for row, tokens in zip(batch, answers, strict=True):
                yield loaded.response(row, tokens)

    def close(self) -> None:
        import torch

        if vars(self).pop("loaded", None):
            torch.cuda.empty_cache()

    @cached_property
    def loaded(self) -> Loaded:
        return Loaded.load(self._location, self._adapter)


class Row(NamedTuple):
    """A request with its prompt's token ids and its answer's token limit."""

    request: Request
    prompt: list[int]
    room: int

    @property
    def settings(self) -> dict[str, Any]:
        return generate_settings(self.request.sampling)


class Loaded:
    """Tokenizer and model on their device."""

    def __init__(self, tokenizer: Any, model: Any) -> None:
        self.tokenizer, self.model = tokenizer, model
        configured = model.generation_config.eos_token_id
        configured = configured if isinstance(configured, list) else [configured]
        self.ends = {tokenizer.eos_token_id, *configured} - {None}
        if not self.ends:
            raise UsageError("the model has no end token", NO_CHAT)
        self.window = int(getattr(model.config, "max_position_embeddings", 0) or 1 << 30)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(min(self.ends))

    @classmethod
    def load(cls, location: str | Path, adapter: Path | None) -> Loaded:
        """Load both, onto a GPU where there is one. Raises UsageError where that fails."""
        import torch

        tokenizer: Any = load_tokenizer(location)
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError(f"the tokenizer of {location} has no chat template", NO_CHAT)
        gpu = torch.cuda.is_available()
        dtype = torch.bfloat16 if gpu else torch.float32
        model: Any = load_causal_model(location, dtype=dtype, adapter=adapter)
        return cls(tokenizer, model.to("cuda" if gpu else "cpu"))

    def encode(self, request: Request) -> Row:
        """Token ids of the chat up to the generation prompt. Raises UsageError where it fills the
        window."""
        text = chat_text(self.tokenizer, request.prompt)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= self.window:
            raise UsageError(
                f"the prompt for {request.task.task_id} has {len(ids)} tokens and the model's"
                f" window is {self.window}",
                "use a model with a longer window, or leave the task out",
            )
        return Row(request, ids, min(request.sampling.max_tokens, self.window - len(ids)))

    def response(self, row: Row, tokens: Sequence[int]) -> Response:
        tokens = tokens[: row.room]
        end = next((place for place, token in enumerate(tokens, 1) if token in self.ends), None)
        written = list(tokens[:end])
        return Response(
            request_key=row.request.request_key,
            text=written_text(self.tokenizer, written),
            completion_tokens=len(written),
            finish_reason="length" if end is None else "stop",
        )

    def respond(self, rows: Sequence[Row]) -> list[list[int]]:
        """Tokens of one batch of responses with equal settings. Padding follows a row's end."""
        import torch
        from transformers import GenerationConfig

        prompts = {"input_ids": [row.prompt for row in rows]}
        padded = self.tokenizer.pad(prompts, padding_side="left", return_tensors="pt")
        given = padded.to(self.model.device)
        config = GenerationConfig(
            **rows[0].settings,
            max_new_tokens=max(row.room for row in rows),
            eos_token_id=sorted(self.ends),
            pad_token_id=self.tokenizer.pad_token_id,
        )
        # the draws of a batch are those of its requests and their seeds
        asked = [[row.request.request_key, row.request.sampling.seed] for row in rows]
        device = self.model.device
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.inference_mode(),
            attention_of_any_length(),
        ):
            torch.manual_seed(int(stable_hash(asked)[:15], 16))
            written = self.model.generate(**given, generation_config=config)
        tokens: list[list[int]] = written[:, given["input_ids"].shape[1] :].tolist()
        return tokens


def _order(row: Row) -> tuple[str, int, list[int], str]:
    return str(row.settings), len(row.prompt), row.prompt, row.request.request_key


def generate_settings(sampling: SamplingParams) -> dict[str, Any]:
    return {
        "do_sample": sampling.temperature > 0,
        "temperature": sampling.temperature or 1.0,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty or 1.0,
    }
