"""The demo's small model, built on this machine, and the loaders of tokenizers and causal models
that stages share.

Guarantees: the same texts and configuration give the same tokenizer, and with the same torch build
the same weights; the directory is there whole or not at all; a directory that already holds this
model is reused, one that holds anything else is refused. The tokenizer is the one `AutoTokenizer`
makes of a qwen2 folder, so ids do not change when it is loaded again. Does not guarantee sensible
text: the weights are random, and exist so that every stage runs for real where no language model is
at hand.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field, PositiveInt, model_validator

from kernels_eval.errors import UsageError, cause_of
from kernels_eval.records import Record, stable_hash
from tasks.files import atomic_directory
from tasks.sources import bundled

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SMALL = "small"
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

    @model_validator(mode="after")
    def _heads_divide(self) -> SmallModelConfig:
        if self.hidden_size % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(
                "hidden_size must be a multiple of 2 * heads, and heads a multiple of kv_heads"
            )
        return self


def resolve_model(name: str, root: str) -> str:
    """A directory or hub id for a configured model name. `small` is built under `root/models` once
    per content of the bundled data.

    Raises UsageError for a path that does not exist, and where the model cannot be written.
    """
    if name == SMALL:
        texts, config = bundled.texts(), SmallModelConfig()
        folder = f"small-{small_model_key(texts, config)[:12]}"
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
    """Build the model into `directory` (created), or reuse it where the same model is there
    already. Returns the directory.

    `texts` train the tokenizer: give it what the model will read (prompts, reasoning, code). Raises
    UsageError for no texts, for a directory that holds something else, and for one that cannot be
    written.
    """
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


def load_tokenizer(location: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or hub id. Raises UsageError where there is none."""
    from transformers import AutoTokenizer

    return cast("PreTrainedTokenizerBase", _load(AutoTokenizer, location))


def chat_text(tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """A user's turn, rendered up to where the model's answer begins."""
    turn = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))


def load_causal_model(
    location: str | Path, *, dtype: Any, adapter: Path | None = None
) -> PreTrainedModel:
    """A causal language model in evaluation mode, with a LoRA adapter merged into its weights where
    one is given.

    Raises UsageError where the model or the adapter cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    model = _load(AutoModelForCausalLM, location, dtype=dtype)
    if adapter is not None:
        from peft import PeftModel

        try:
            with renamed_option():
                model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
        except (OSError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"cannot load the adapter {adapter} onto {location}: {error}",
                "give a directory that training on this base model wrote",
            ) from error
    return cast("PreTrainedModel", model.eval())


@contextmanager
def renamed_option() -> Iterator[None]:
    """Without the warning that PEFT and TRL read a name which transformers renames in version 6."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*gradient_checkpointing.* is deprecated", category=FutureWarning
        )
        yield


def count_tokens(location: str | Path, texts: Sequence[str]) -> list[int]:
    """Tokens of each text under the tokenizer at `location`, without special tokens added. Raises
    UsageError where there is none."""
    if not texts:
        return []
    encode = _counting_tokenizer(str(location))
    encoded = encode([_utf8(text) for text in texts], add_special_tokens=False)
    return [len(ids) for ids in encoded["input_ids"]]


def _utf8(text: str) -> str:
    """The text with lone surrogates, which model output may hold and tokenizers refuse, replaced by
    question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


@lru_cache(maxsize=4)
def _counting_tokenizer(location: str) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(location)
    # counting a text longer than the model's window is no reason to warn
    tokenizer.model_max_length = int(1e30)
    return tokenizer


def _load(auto_class: Any, location: str | Path, **options: Any) -> Any:
    try:
        with quiet_progress():
            return auto_class.from_pretrained(str(location), **options)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot load {location}: {cause_of(error)}",
            "give a model directory (config.json and tokenizer.json in it) or a hub id",
        ) from error


def attention_of_any_length() -> AbstractContextManager[None]:
    """Meanwhile, attention is not cuDNN's, which plans anew for every length, and so for every
    token that is sampled and for every step that learns from answers."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
    chosen: AbstractContextManager[None] = sdpa_kernel(list(backends))
    return chosen


@contextmanager
def quiet_progress() -> Iterator[None]:
    """transformers and datasets draw no progress bars inside; what was set before is restored."""
    import datasets
    from transformers.utils import logging as untyped

    logging: Any = untyped
    bars = logging.is_progress_bar_enabled()
    dataset_bars = not datasets.are_progress_bars_disabled()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()
        if dataset_bars:
            datasets.enable_progress_bars()


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
    learner.train_from_iterator((_utf8(text) for text in texts), trainer)
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
    shape = made.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=ends[0],
        pad_token_id=ends[1],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = made.Qwen2ForCausalLM(shape)
    model.generation_config = made.GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=ends, pad_token_id=ends[1]
    )
    model.save_pretrained(directory)
