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

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kernels_eval.errors import EvalError, UsageError
from kernels_eval.records import stable_hash
from tasks.sources.small_model import count_tokens, load_causal_model, load_tokenizer
from tasks.synthesis.sampler import Request, Requests, Response

if TYPE_CHECKING:
    import torch


class TransformersSampler:
    """A `Sampler` over a causal model directory or hub id, with or without a LoRA adapter (merged
    once, so it costs nothing).

    The text of a response is what follows the generation prompt: with a template that opens the
    think block it begins inside it and keeps `</think>`. `name` is the generator's identity in
    every candidate. The model is loaded at the first request. Raises UsageError where model or
    adapter cannot be loaded, where a prompt leaves no room in the model's window, and where the
    device is too small.
    """

    def __init__(
        self,
        model: str | Path,
        adapter: Path | None,
        name: str,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        batch_size: int = 16,
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}", "give 1 or more")
        self.generator = name
        self._location, self._adapter, self._device = model, adapter, device
        self._batch_size = batch_size
        self._loaded: _Loaded | None = None

    def sample(self, requests: Requests) -> Iterator[Response]:
        """One response per request, in the order in which they finish."""
        requests = list(requests)
        if not requests:
            return
        loaded = self._load()
        prompts = [loaded.encode(request) for request in requests]
        # neighbours in length share a batch: less padding, and requests of one prompt stay together
        order = sorted(
            range(len(requests)),
            key=lambda index: (len(prompts[index]), prompts[index], requests[index].request_key),
        )
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            yield from self._sample_batch(
                loaded, [requests[index] for index in batch], [prompts[index] for index in batch]
            )

    def count_tokens(self, texts: Sequence[str]) -> list[int] | None:
        return count_tokens(self._location, texts)

    def close(self) -> None:
        """Lets the model go. Sampling again loads it again."""
        self._loaded = None

    def _load(self) -> _Loaded:
        if self._loaded is None:
            self._loaded = _Loaded(self._location, self._adapter, self._device)
        return self._loaded

    def _sample_batch(
        self, loaded: _Loaded, requests: Sequence[Request], prompts: Sequence[list[int]]
    ) -> Iterator[Response]:
        import torch

        try:
            yield from _generate(loaded, requests, prompts)
        except torch.OutOfMemoryError as error:
            longest = max(
                len(prompt) + request.sampling.max_tokens
                for request, prompt in zip(requests, prompts, strict=True)
            )
            raise UsageError(
                f"out of memory while sampling {len(requests)} responses of up to {longest} tokens"
                " at once",
                f"lower batch_size (now {self._batch_size}), lower max_tokens, or serve the model"
                " with vLLM",
            ) from error


class _Loaded:
    """Tokenizer and model on their device."""

    def __init__(self, location: str | Path, adapter: Path | None, device: str) -> None:
        import torch

        self.tokenizer: Any = load_tokenizer(location)
        if not getattr(self.tokenizer, "chat_template", None):
            raise UsageError(
                f"the tokenizer of {location} has no chat template",
                "sample from an instruct or reasoning model",
            )
        gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
        if gpu and not torch.cuda.is_available():
            raise UsageError("no CUDA device is here", "set device to auto or cpu")
        model: Any = load_causal_model(
            location, dtype=torch.bfloat16 if gpu else torch.float32, adapter=adapter
        )
        self.model: Any = model.to("cuda" if gpu else "cpu")
        self.ends = _end_ids(self.model, self.tokenizer)
        self.window = int(getattr(self.model.config, "max_position_embeddings", 0) or 1 << 30)
        pad = self.tokenizer.pad_token_id
        self.pad = min(self.ends) if pad is None else pad

    def encode(self, request: Request) -> list[int]:
        """Token ids of the chat up to the generation prompt."""
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": request.prompt}],
            tokenize=False,
            add_generation_prompt=True,
        )
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= self.window:
            raise UsageError(
                f"the prompt for {request.task.task_id} has {len(ids)} tokens and the model's"
                f" window is {self.window}",
                "use a model with a longer window, or leave the task out",
            )
        return ids

    def respond(self, request: Request, tokens: list[int], finish_reason: str) -> Response:
        """Special tokens are left out of the text; `<think>` and `</think>` are no special tokens
        and stay."""
        text = self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return Response(
            request_key=request.request_key,
            text=text,
            completion_tokens=len(tokens),
            finish_reason=finish_reason,
        )


def _end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    configured = model.generation_config.eos_token_id
    found = {
        tokenizer.eos_token_id,
        *(configured if isinstance(configured, list) else [configured]),
    } - {None}
    if not found:
        raise UsageError("the model has no end token", "sample from an instruct or reasoning model")
    return frozenset(found)


def _generate(
    loaded: _Loaded, requests: Sequence[Request], prompts: Sequence[list[int]]
) -> Iterator[Response]:
    """Token by token for one batch, left-padded; a finished row leaves the batch, so a long one
    does not drag the others along."""
    import torch

    device = loaded.model.device
    ids, mask = _left_pad(prompts, loaded.pad, device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    rows = [
        _Row(request, prompt, loaded.window)
        for request, prompt in zip(requests, prompts, strict=True)
    ]
    cache = None
    while rows:
        with torch.inference_mode():
            out = loaded.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = out.past_key_values
            tokens = _draw(out.logits[:, -1], rows)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.take(token, loaded.ends)
        going = [index for index, row in enumerate(rows) if row.finish_reason is None]
        finished = [row for row in rows if row.finish_reason is not None]
        if finished and going:
            keep = torch.tensor(going, device=device)
            cache.batch_select_indices(keep)
            tokens, mask, positions = tokens[keep], mask[keep], positions[keep]
        rows = [rows[index] for index in going]
        ids, positions = tokens[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        for row in finished:
            yield loaded.respond(row.request, row.tokens, row.finish_reason or "length")


class _Row:
    """One response being written: its tokens so far and the random draws that decide the rest."""

    def __init__(self, request: Request, prompt: Sequence[int], window: int) -> None:
        import numpy as np

        self.request = request
        self.tokens: list[int] = []
        self.seen = set(prompt)
        self.finish_reason: str | None = None
        self.limit = min(request.sampling.max_tokens, window - len(prompt))
        # the same draws whatever the batch: a function of request key and seed alone
        self.random = np.random.default_rng(
            int(stable_hash([request.request_key, request.sampling.seed]), 16)
        )

    def take(self, token: int, ends: frozenset[int]) -> None:
        self.tokens.append(token)
        self.seen.add(token)
        if token in ends:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"


def _left_pad(
    prompts: Sequence[list[int]], pad: int, device: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask, both (rows, longest prompt)."""
    import torch

    longest = max(map(len, prompts))
    ids = [[pad] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _penalised(logits: torch.Tensor, rows: Sequence[_Row]) -> torch.Tensor:
    """Logits of tokens that are in the prompt or the response already, divided by the penalty where
    positive and multiplied by it where negative (Keskar et al. 2019, section 4.1, as transformers
    and vLLM have it)."""
    import torch

    for number, row in enumerate(rows):
        penalty = row.request.sampling.repetition_penalty
        if penalty is not None and penalty != 1:
            seen = torch.tensor(sorted(row.seen), dtype=torch.long, device=logits.device)
            before = logits[number, seen]
            logits[number, seen] = torch.where(before > 0, before / penalty, before * penalty)
    return logits


def _draw(logits: torch.Tensor, rows: Sequence[_Row]) -> torch.Tensor:
    """Next tokens, shape (rows,), from logits (rows, vocabulary): repetition penalty, temperature,
    min-p, top-k, nucleus (the order in which vLLM has them; what a request leaves open does
    nothing), then the Gumbel-max trick.

    The nucleus is the fewest most likely tokens whose probabilities reach top_p (Holtzman et al.
    2020, section 3.1); temperature 0 takes the most likely token. Gumbel-max (argmax of logit - log
    of an exponential draw per token, Maddison et al. 2014, section 2) rather than inverting the
    cumulative distribution: where many tokens are about equally likely the latter changes its mind
    with the rounding of the logits, a thousand times as often.
    """
    import numpy as np
    import torch

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    sampling = [row.request.sampling for row in rows]
    temperature = column([item.temperature for item in sampling])
    top_p = column([item.top_p for item in sampling])
    scaled = _penalised(logits.double(), rows) / temperature.clamp(min=1e-6)
    if not bool(torch.isfinite(scaled).all()):
        raise EvalError(
            "the model's logits are not finite",
            "check the adapter, or sample in float32 with device cpu",
        )
    if any(item.top_k or item.min_p for item in sampling):
        top_k = torch.tensor(
            [min(item.top_k or scaled.shape[-1], scaled.shape[-1]) for item in sampling],
            device=logits.device,
        )[:, None]
        ordered = scaled.sort(dim=-1, descending=True).values
        least = torch.maximum(
            ordered.gather(-1, top_k - 1),
            ordered[:, :1] + column([item.min_p or 0.0 for item in sampling]).log(),
        )
        # never the first, whatever rounding says of min-p 1
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    ordered, tokens = scaled.softmax(-1).sort(dim=-1, descending=True)
    # never the first, which has nothing before it
    outside = (ordered.cumsum(-1) - ordered) >= top_p
    outside = torch.zeros_like(outside).scatter(-1, tokens, outside)
    noise = np.stack([row.random.standard_exponential(logits.shape[-1]) for row in rows])
    raced = scaled - torch.from_numpy(noise).to(logits.device).log()
    raced = torch.where(temperature == 0, scaled, raced)
    return raced.masked_fill(outside, -torch.inf).argmax(-1)
