"""Sampling in this process with transformers' `generate`, for small models and adapter checks. The
same batches on one machine give the same text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kernels_eval.errors import UsageError
from kernels_eval.records import SamplingParams, stable_hash
from tasks.models import attention_of_any_length, chat_text, load_causal_model, load_tokenizer
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

CPU_BATCH, MOST_IN_BATCH = 16, 1024
NO_CHAT = "sample from an instruct or reasoning model"


class TransformersSampler(Sampler):
    """A `Sampler` over a causal model directory or hub id, with an optional LoRA adapter (merged
    once).

    A response is the text after the generation prompt; where the template opens the think block it
    starts inside. `name` identifies the generator. `batch_size` is the number of responses at once;
    None: 16 on a CPU; on a GPU as many as have keys and values in half of its free memory, at most
    1,024, halved where memory runs out. Raises UsageError where model or adapter cannot be loaded,
    a prompt leaves no room in the window, or the device cannot hold one response.
    """

    def __init__(
        self,
        model: str | Path,
        adapter: Path | None,
        name: str,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(tokenizer=model)
        self.generator = name
        self._location, self._adapter = model, adapter
        self._batch_size = batch_size

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
        longest = max((len(row.prompt) + row.room for row in waiting), default=1)
        size = self._batch_size or loaded.batch_size(longest)
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
        pad = tokenizer.pad_token_id
        self.pad = min(self.ends) if pad is None else pad

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

    def batch_size(self, tokens: int) -> int:
        import torch

        if self.model.device.type != "cuda":
            return CPU_BATCH
        config = self.model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        each = 2 * config.num_hidden_layers * heads * width * self.model.dtype.itemsize
        device = self.model.device
        free, _ = torch.cuda.mem_get_info(device)
        # what this process holds and does not use: most of the memory, after a step of training
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        fit = int(free // (2 * each * min(tokens, self.window)))
        return max(1, min(MOST_IN_BATCH, fit))

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
            text=self.text_of(written),
            completion_tokens=len(written),
            finish_reason="length" if end is None else "stop",
        )

    def text_of(self, tokens: list[int]) -> str:
        """Text without special tokens; `<think>` and `</think>` are none and stay."""
        return str(
            self.tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def respond(self, rows: Sequence[Row]) -> list[list[int]]:
        """Tokens of one batch of responses with equal settings. Padding follows a row's end."""
        import torch
        from transformers import GenerationConfig, StoppingCriteriaList

        longest = max(len(row.prompt) for row in rows)
        padded = [[self.pad] * (longest - len(row.prompt)) + row.prompt for row in rows]
        ids = torch.tensor(padded, device=self.model.device)
        starts = torch.tensor([longest - len(row.prompt) for row in rows], device=ids.device)
        mask = (torch.arange(longest, device=ids.device) >= starts[:, None]).long()
        rooms = torch.tensor([row.room for row in rows], device=ids.device)

        def room_ends(written: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return written.shape[1] - longest >= rooms

        config = GenerationConfig(
            **rows[0].settings,
            max_new_tokens=max(row.room for row in rows),
            eos_token_id=sorted(self.ends),
            pad_token_id=self.pad,
        )
        # the draws of a batch are those of its requests and their seeds
        asked = [[row.request.request_key, row.request.sampling.seed] for row in rows]
        devices = [ids.device] if ids.device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices),
            torch.inference_mode(),
            attention_of_any_length(),
        ):
            torch.manual_seed(int(stable_hash(asked)[:15], 16))
            written = self.model.generate(
                ids,
                attention_mask=mask,
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([room_ends]),
            )
        tokens: list[list[int]] = written[:, longest:].tolist()
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
