"""Sampling in this process with transformers: for the demo's small model and for checking an
adapter where no server is at hand.

Guarantees: one response per request, yielded as it finishes; the random draws of a response depend
on its request alone (request key and seed), never on the batch it shares. Does not guarantee
bit-equal logits across batch shapes, devices or dtypes: matrix kernels round differently, and a
draw that two tokens tie for within that rounding may go the other way (about 1e-6 per token in
float32, more often in bfloat16). The same requests in the same batches on the same machine give the
same text. Does not refill a batch while it runs: for throughput use a vLLM server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import torch

from kernels_eval.errors import EvalError, UsageError
from kernels_eval.records import stable_hash
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

GOING = 0.9
"""Share of a batch's rows that are still written, below which the finished ones leave it."""
GOLDEN, MIX_1, MIX_2 = (
    value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""SplitMix64's constants, as signed numbers."""
ROOM = 256
"""Tokens for which keys and values get memory at once."""
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
        """One response per request, in the order in which they finish."""
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
        if vars(self).pop("loaded", None):
            torch.cuda.empty_cache()

    @cached_property
    def loaded(self) -> Loaded:
        return Loaded.load(self._location, self._adapter, self._device)


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
        if self.model.device.type != "cuda":
            return 16
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
        return max(1, min(1024, int(free // (2 * each * min(tokens, self.window)))))

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
        """Write responses, `size` at once (None: as many as memory holds; halved where it ends);
        each row as it is finished. Raises UsageError where one alone is too much."""
        # neighbours in length share a batch: less padding, and requests of one prompt stay together
        waiting = sorted(rows, key=lambda r: (len(r.prompt), r.prompt, r.request.request_key))
        size = size or self.batch_size(max((len(r.prompt) + r.limit for r in waiting), default=1))
        while waiting:
            batch, done = waiting[:size], set[Row]()
            try:
                for row in self.respond(batch):
                    done.add(row)
                    yield row
            except torch.OutOfMemoryError as error:
                if size == 1:
                    longest = len(batch[0].prompt) + batch[0].limit
                    raise UsageError(
                        f"out of memory while sampling one response of up to {longest} tokens",
                        "lower max_tokens, or serve the model with vLLM",
                    ) from error
                size = max(1, len(batch) // 2)
                caution(f"Out of memory: {size} responses are sampled at once from here on")
            left = [row.again() for row in batch if row not in done]
            waiting = left + waiting[len(batch) :]

    def respond(self, rows: list[Row]) -> Iterator[Row]:
        """Token by token for one batch, left-padded. Finished rows leave the batch as soon as they
        are a tenth of it: each time, all keys and values are copied."""
        device, longest = self.model.device, max(len(row.prompt) for row in rows)
        padding = [longest - len(row.prompt) for row in rows]
        padded = [[self.pad] * n + row.prompt for n, row in zip(padding, rows, strict=True)]
        ids = torch.tensor(padded, device=device)
        mask = torch.arange(longest, device=device) >= torch.tensor(padding, device=device)[:, None]
        mask = mask.long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = growing_cache(self.model.config)
        while rows:
            with torch.inference_mode(), attention_of_any_length():
                out = self.model(
                    input_ids=ids,
                    attention_mask=mask,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                tokens = draw(out.logits[:, -1], rows)
            going = []
            for index, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
                if row.finish_reason:
                    continue
                row.take(token, self.ends)
                if row.finish_reason is None:
                    going.append(index)
                    continue
                yield row
            if len(going) <= GOING * len(rows):
                keep = torch.tensor(going, dtype=torch.long, device=device)
                cache.batch_select_indices(keep)
                tokens, mask, positions = tokens[keep], mask[keep], positions[keep]
                rows = [rows[index] for index in going]
            ids, positions = tokens[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)


def growing_cache(config: Any) -> Any:
    """A `DynamicCache` whose layers of full attention take room for `ROOM` tokens at a time. Its
    own ones concatenate at every token, which copies all keys and values and takes new memory."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    class GrowingLayer(DynamicLayer):
        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            length = self.get_seq_length()
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
                self.roomy = [key_states[:, :, :0], value_states[:, :, :0]]
            end = length + key_states.shape[-2]
            for index, states in enumerate((key_states, value_states)):
                if end > self.roomy[index].shape[-2]:
                    batch, heads, _, width = states.shape
                    larger = states.new_empty(batch, heads, end + ROOM, width)
                    larger[:, :, :length] = self.roomy[index][:, :, :length]
                    self.roomy[index] = larger
                self.roomy[index][:, :, length:end] = states
            self.keys, self.values = (each[:, :, :end] for each in self.roomy)
            return self.keys, self.values

        def batch_select_indices(self, indices: torch.Tensor) -> None:
            if length := self.get_seq_length():
                self.roomy = [each[indices] for each in self.roomy]
                self.keys, self.values = (each[:, :, :length] for each in self.roomy)

    cache, new_layer = DynamicCache(config=config), cast(Callable[[], DynamicLayer], GrowingLayer)
    cache.layers = [new_layer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class Row:
    """One response being written: its tokens so far and the random draws that decide the rest."""

    def __init__(self, request: Request, prompt: list[int], window: int) -> None:
        self.request, self.prompt, self.window = request, prompt, window
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.limit = min(request.sampling.max_tokens, window - len(prompt))
        # the same draws whatever the batch: a function of request key and seed alone
        seed = stable_hash([request.request_key, request.sampling.seed])
        self.stream = int(seed[:15], 16)

    def again(self) -> Row:
        """The same response, not begun."""
        return Row(self.request, self.prompt, self.window)

    def take(self, token: int, ends: set[int]) -> None:
        self.tokens.append(token)
        if token in ends:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"


def draw(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Next tokens, shape (rows,), from logits (rows, vocabulary): repetition penalty, temperature,
    min-p, top-k, nucleus (the order in which vLLM has them; what a request leaves open does
    nothing), then the Gumbel-max trick.

    The penalty divides logits of tokens that were there already where they are positive, and
    multiplies negative ones (Keskar et al. 2019, section 4.1, as transformers and vLLM have it).
    The nucleus is the fewest most likely tokens whose probabilities reach top_p (Holtzman et al.
    2020, section 3.1); temperature 0 takes the most likely token. Gumbel-max (argmax of logit - log
    of an exponential draw per token, Maddison et al. 2014, section 2) rather than inverting the
    cumulative distribution: where many tokens are about equally likely the latter changes its mind
    with the rounding of the logits, a thousand times as often.
    """
    if not bool(torch.isfinite(logits).all()):
        raise EvalError(
            "the model's logits are not finite",
            "check the adapter, or sample in float32 with device cpu",
        )
    logits, count, asked = logits.double(), logits.shape[-1], [r.request.sampling for r in rows]
    for index, (row, each) in enumerate(zip(rows, asked, strict=True)):
        if each.repetition_penalty is not None:
            seen = torch.tensor(
                [*{*row.prompt, *row.tokens}], dtype=torch.long, device=logits.device
            )
            before, penalty = logits[index, seen], each.repetition_penalty
            logits[index, seen] = torch.where(before > 0, before / penalty, before * penalty)

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.double, device=logits.device)[:, None]

    temperature = column([each.temperature for each in asked])
    scaled = logits / temperature.clamp(min=1e-6)
    if any(each.top_k or each.min_p or each.top_p < 1 for each in asked):
        ordered, tokens = scaled.sort(descending=True)
        most = column([min(each.top_k or count, count) - 1 for each in asked])
        least = ordered[:, :1] + column([each.min_p or 0 for each in asked]).log()
        least = torch.maximum(least, ordered.gather(1, most.long()))
        ordered = ordered.masked_fill(ordered < least, -torch.inf)
        shares = ordered.softmax(-1)
        # never the first, which has nothing before it
        beyond = shares.cumsum(-1) - shares >= column([each.top_p for each in asked])
        ordered = ordered.masked_fill(beyond, -torch.inf)
        scaled = torch.empty_like(scaled).scatter_(1, tokens, ordered)
    chosen = (scaled - uniform(rows, count, logits.device).log().neg().log()).argmax(-1)
    return torch.where(temperature[:, 0] == 0, logits.argmax(-1), chosen)


def uniform(rows: Sequence[Row], count: int, device: torch.device) -> torch.Tensor:
    """Random numbers between 0 and 1, shape (rows, count), float64: those of each row's stream for
    its next token.

    SplitMix64 (Steele, Lea and Flood 2014, figure 17), whose nth number needs none before it, so
    that a batch is drawn at once on its device.
    """

    def mixed(values: torch.Tensor, shift: int) -> torch.Tensor:
        return values ^ (values >> shift & (1 << 64 - shift) - 1)

    starts = torch.tensor([[row.stream, len(row.tokens)] for row in rows], device=device)
    place = starts[:, 1:] * count + torch.arange(1, count + 1, device=device)
    state = starts[:, :1] + place * GOLDEN
    state = mixed(mixed(state, 30) * MIX_1, 27) * MIX_2
    return ((mixed(state, 31) >> 11 & (1 << 53) - 1).double() + 0.5) * 2**-53
