"""Sampling in this process with transformers' `generate`: for the demo's small model and for
checking an adapter where no server is at hand.

Guarantees: one response per request; the same requests in the same batches on the same machine give
the same text. Does not refill a batch while it runs: for throughput use a vLLM server.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from kernels_eval.errors import UsageError
from kernels_eval.records import SamplingParams, stable_hash
from tasks.progress import caution
from tasks.sources.small_model import (
    attention_of_any_length,
    chat_text,
    load_causal_model,
    load_tokenizer,
    resolve_model,
)
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.sampler import (
    Request,
    Requests,
    Response,
    Sampler,
    model_name,
    required,
)

CPU_BATCH, MOST_IN_BATCH = 16, 1024
NO_CHAT = "sample from an instruct or reasoning model"


class TransformersSampler(Sampler):
    """A `Sampler` over a causal model directory or hub id, with or without a LoRA adapter (merged
    once, so it costs nothing).

    The text of a response is what follows the generation prompt: with a template that opens the
    think block it begins inside it and keeps `</think>`. `name` is the generator's identity in
    every candidate. `batch_size` is how many responses are written at once; None: 16 on a CPU, and
    on a GPU as many as half of its free memory holds keys and values of, 1,024 at most. It is
    halved where the device's memory ends. The model is loaded at the first request. Raises
    UsageError where model or adapter cannot be loaded, where a prompt leaves no room in the model's
    window, and where the device cannot hold one response.
    """

    def __init__(
        self,
        model: str | Path,
        adapter: Path | None,
        name: str,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        batch_size: int | None = None,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}", "give 1 or more")
        super().__init__(tokenizer=model)
        self.generator = name
        self._location, self._adapter, self._device = model, adapter, device
        self._batch_size = batch_size

    @classmethod
    def from_config(
        cls, config: SynthesisConfig, root: str, adapter: Path | None = None
    ) -> TransformersSampler:
        model = resolve_model(required(config, "model", "NAME"), root)
        return cls(model, adapter, name=model_name(config, adapter))

    def sample(self, requests: Requests) -> Iterator[Response]:
        """One response per request, batch by batch."""
        rows = [Row(request, *self.loaded.encode(request)) for request in requests]
        for row in self.loaded.written(rows, self._batch_size):
            yield Response(
                request_key=row.request.request_key,
                text=self.loaded.text_of(row.tokens),
                completion_tokens=len(row.tokens),
                finish_reason=row.finish_reason,
            )

    def close(self) -> None:
        """Lets the model and its memory go. Sampling again loads it again."""
        import torch

        if vars(self).pop("loaded", None):
            torch.cuda.empty_cache()

    @cached_property
    def loaded(self) -> Loaded:
        return Loaded.load(self._location, self._adapter, self._device)


class Row:
    """One response: its prompt in token ids, how long it may become, and what was written."""

    def __init__(self, request: Request, prompt: list[int], window: int) -> None:
        self.request, self.prompt = request, prompt
        self.limit = min(request.sampling.max_tokens, window - len(prompt))
        self.tokens: list[int] = []
        self.finish_reason: str | None = None

    def take(self, tokens: list[int], ends: set[int]) -> None:
        """Keep what was written up to the end token or the limit."""
        end = next((place for place, token in enumerate(tokens, 1) if token in ends), None)
        self.finish_reason = "length" if end is None else "stop"
        self.tokens = tokens[:end]


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
    def load(cls, location: str | Path, adapter: Path | None, device: str) -> Loaded:
        """Load them onto the device. Raises UsageError where that cannot be done."""
        import torch

        tokenizer: Any = load_tokenizer(location)
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError(f"the tokenizer of {location} has no chat template", NO_CHAT)
        gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
        if gpu and not torch.cuda.is_available():
            raise UsageError("no CUDA device is available", "set device to auto or cpu")
        dtype = torch.bfloat16 if gpu else torch.float32
        model: Any = load_causal_model(location, dtype=dtype, adapter=adapter)
        return cls(tokenizer, model.to("cuda" if gpu else "cpu"))

    def batch_size(self, tokens: int) -> int:
        """How many responses to write at once, prompt and answer of so many tokens."""
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

    def encode(self, request: Request) -> tuple[list[int], int]:
        """Token ids of the chat up to the generation prompt, and the model's window."""
        text = chat_text(self.tokenizer, request.prompt)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= self.window:
            raise UsageError(
                f"the prompt for {request.task.task_id} has {len(ids)} tokens and the model's"
                f" window is {self.window}",
                "use a model with a longer window, or leave the task out",
            )
        return ids, self.window

    def text_of(self, tokens: list[int]) -> str:
        """Special tokens are left out; `<think>` and `</think>` are no special tokens and stay."""
        return str(
            self.tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def written(self, rows: Iterable[Row], size: int | None = None) -> Iterator[Row]:
        """Write responses, `size` at once (None: as many as memory holds; halved where it ends).
        Raises UsageError where one alone is too much."""
        # neighbours in length share a batch: less padding
        ordered = sorted(rows, key=_order)
        size = size or self.batch_size(max((len(r.prompt) + r.limit for r in ordered), default=1))
        for _, same in groupby(ordered, key=lambda row: generate_settings(row.request.sampling)):
            waiting = list(same)
            while waiting:
                batch = waiting[:size]
                count = self._write(batch)
                if count < len(batch):
                    size = count
                yield from batch[:count]
                waiting = waiting[count:]

    def _write(self, batch: list[Row]) -> int:
        """Write the first rows of a batch, as many as memory holds. Returns how many."""
        import torch

        size = len(batch)
        while True:
            try:
                self.respond(batch[:size])
                return size
            except torch.OutOfMemoryError as error:
                if size == 1:
                    longest = len(batch[0].prompt) + batch[0].limit
                    raise UsageError(
                        f"out of memory while sampling one response of up to {longest} tokens",
                        "lower max_tokens, or serve the model with vLLM",
                    ) from error
            size //= 2
            caution(f"Out of memory: {size} responses are sampled at once from here on")

    def respond(self, rows: list[Row]) -> None:
        """Write one batch of responses with the same settings."""
        import torch
        from transformers import GenerationConfig

        longest = max(len(row.prompt) for row in rows)
        padded = [[self.pad] * (longest - len(row.prompt)) + row.prompt for row in rows]
        ids = torch.tensor(padded, device=self.model.device)
        starts = torch.tensor([longest - len(row.prompt) for row in rows], device=ids.device)
        mask = (torch.arange(longest, device=ids.device) >= starts[:, None]).long()
        config = GenerationConfig(
            **generate_settings(rows[0].request.sampling),
            max_new_tokens=min(row.limit for row in rows),
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
            written = self.model.generate(ids, attention_mask=mask, generation_config=config)
        for row, tokens in zip(rows, written[:, longest:].tolist(), strict=True):
            row.take(tokens, self.ends)


def _order(row: Row) -> tuple[str, int, list[int], str]:
    """Rows of the same settings together, then those of one prompt."""
    settings = str(generate_settings(row.request.sampling))
    return settings, len(row.prompt), row.prompt, row.request.request_key


def generate_settings(sampling: SamplingParams) -> dict[str, Any]:
    """Parameters of `generate`; what a request leaves open does nothing."""
    return {
        "do_sample": sampling.temperature > 0,
        "temperature": sampling.temperature or 1.0,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty or 1.0,
    }
