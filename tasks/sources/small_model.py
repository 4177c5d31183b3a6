"""The demo's small model, built on this machine with random weights or pretrained ones: equal texts
and configuration give the same tokenizer and, on one torch build, the same weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from pydantic import Field, PositiveInt, model_validator

from kernels_eval.errors import UsageError
from kernels_eval.protocol import storable
from kernels_eval.records import Record, stable_hash
from tasks.files import atomic_directory
from tasks.models import load_tokenizer, quiet_progress
from tasks.sources import bundled
from tasks.sources.bundled import pairs
from tasks.sources.pretraining import PretrainingConfig, pretrain

SMALL, PRETRAINED = "small", "small-pretrained"
_building = Lock()
PAIR_WEIGHT = 4
"""How often pairs are read for the tokenizer: a function's name becomes one token."""
MARKER = "concur_model.json"
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

# Behaves as QwQ-32B's (https://huggingface.co/Qwen/QwQ-32B): the generation prompt opens the think
# block for the model, and an assistant turn of the history keeps only what follows `</think>`. The
# second is why training never uses conversational rows.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- set content = message['content'] -%}
{%- if message['role'] == 'assistant' and '</think>' in content -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n<think>\\n' -}}
{%- endif -%}
"""


class SmallModelConfig(Record):
    """Shape of the small model: Qwen2's architecture, so that everything that serves Qwen2 serves
    it."""

    vocab_size: int = Field(default=2048, ge=512)
    """tokens, the five added ones included; fewer where the texts are few"""
    hidden_size: int = Field(default=128, ge=16)
    layers: PositiveInt = 2
    heads: PositiveInt = 4
    """attention heads"""
    kv_heads: PositiveInt = 2
    """key and value heads, shared by groups of attention heads"""
    intermediate_size: int = Field(default=384, ge=16)
    """width of the gated MLP"""
    max_positions: int = Field(default=32768, ge=512)
    """longest prompt and response together, tokens"""
    seed: int = 0
    pretraining: PretrainingConfig | None = Field(default=None, exclude_if=lambda it: it is None)
    """None: the weights stay random"""

    @model_validator(mode="after")
    def _heads_divide(self) -> SmallModelConfig:
        if self.hidden_size % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(
                "hidden_size must be a multiple of 2 * heads, and heads a multiple of kv_heads"
            )
        return self


def pretrained_texts() -> list[str]:
    """What the tokenizer of `small-pretrained` is made of."""
    read = [text for pair in pairs.read() for text in (pair.code, pair.response)]
    return bundled.texts() + read * PAIR_WEIGHT


def resolve_model(name: str, root: str) -> str:
    """A directory or hub id for a configured model name. `small` and `small-pretrained` are built
    under `root/models`. Raises UsageError for a missing path or where the model cannot be
    written."""
    if name in (SMALL, PRETRAINED):
        texts, config = bundled.texts(), SmallModelConfig()
        if name == PRETRAINED:
            texts, config = pretrained_texts(), SmallModelConfig(pretraining=PretrainingConfig())
        folder = f"{name}-{small_model_key(texts, config)[:12]}"
        with _building:
            return str(build_small_model(Path(root) / "models" / folder, texts, config))
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise UsageError(
            f"model directory {name} does not exist",
            "give a hub id, an existing directory, or 'small' for the demo model",
        )
    return name


def small_model_key(texts: Sequence[str], config: SmallModelConfig) -> str:
    """Identity of a small model: hash(texts, configuration, chat template)."""
    return stable_hash([list(texts), config.model_dump(), CHAT_TEMPLATE])


def build_small_model(
    directory: Path, texts: Sequence[str], config: SmallModelConfig | None = None
) -> Path:
    """Build or reuse the model in `directory`; return it. `texts` train the tokenizer. Raises
    UsageError for no texts, other content in the directory, or one that cannot be written."""
    config = config or SmallModelConfig()
    directory = Path(directory)
    if not any(texts):
        raise UsageError(
            "no text to train the small model's tokenizer on",
            "pass the prompts and responses it will read",
        )
    key = small_model_key(texts, config)
    if _marker_key(directory) == key:
        return directory
    if (directory.is_dir() and any(directory.iterdir())) or directory.is_file():
        raise UsageError(
            f"{directory} holds something other than this small model",
            "choose another directory, or remove this one",
        )
    marker = json.dumps({"key": key, "config": config.model_dump()}, indent=2)
    try:
        with atomic_directory(directory) as folder, quiet_progress():
            _write_tokenizer(folder, texts, config)
            _write_model(folder, config)
            (folder / MARKER).write_text(marker, encoding="utf-8")
    except OSError as error:
        if _marker_key(directory) == key:  # another process finished the same model first
            return directory
        raise UsageError(
            f"cannot write the small model to {directory}: {error}",
            "choose a directory that can be written",
        ) from error
    return directory


def _marker_key(directory: Path) -> str | None:
    try:
        return str(json.loads((directory / MARKER).read_text(encoding="utf-8"))["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_tokenizer(directory: Path, texts: Sequence[str], config: SmallModelConfig) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer as untyped

    Qwen2Tokenizer: Any = untyped
    added = [
        AddedToken(token, special=not token.startswith(("<think", "</think")), normalized=False)
        for token in (END_OF_TEXT, TURN_START, TURN_END, THINK_OPEN, THINK_CLOSE)
    ]
    # learning through Qwen2's own normaliser and pre-tokeniser is what keeps ids stable when
    # AutoTokenizer loads the folder again
    qwen2 = Qwen2Tokenizer().backend_tokenizer
    learner = Tokenizer(models.BPE())
    learner.normalizer, learner.pre_tokenizer = qwen2.normalizer, qwen2.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size - len(added),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator((storable(text) for text in texts), trainer)
    learnt = json.loads(learner.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learnt["vocab"],
        merges=[tuple(merge) for merge in learnt["merges"]],
        unk_token=None,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        model_max_length=config.max_positions,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(added)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)


def _write_model(directory: Path, config: SmallModelConfig) -> None:
    import torch
    import transformers

    made: Any = transformers  # its constructors are typed in part only
    tokenizer = load_tokenizer(directory)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in (TURN_END, END_OF_TEXT)]
    options: dict[str, Any] = {"tie_word_embeddings": False}
    if config.pretraining:
        rope = {"rope_type": "default", "rope_theta": config.pretraining.rope_theta}
        # tied, a token that is read can be written: copying a name is not learned for each anew
        options = {"tie_word_embeddings": True, "rope_parameters": rope}
        options["initializer_range"] = config.pretraining.initial_std
    shape = made.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_positions,
        bos_token_id=None,
        eos_token_id=ends[0],
        pad_token_id=ends[1],
        **options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = made.Qwen2ForCausalLM(shape)
        if config.pretraining:
            pretrain(model, tokenizer, config.pretraining, config.seed)
    model.generation_config = made.GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=ends, pad_token_id=ends[1]
    )
    model.save_pretrained(directory)
