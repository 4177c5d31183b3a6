"""Loaders of tokenizers and causal models, and the settings under which they run. One UsageError
names what cannot be loaded."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

from kernels_eval.errors import UsageError, cause_of
from kernels_eval.protocol import storable
from tasks.thoughts import named_in, opened_by

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_loading = Lock()


def load_tokenizer(location: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or hub id. Raises UsageError."""
    from transformers import AutoTokenizer

    return cast("PreTrainedTokenizerBase", _load(AutoTokenizer, location))


def load_causal_model(
    location: str | Path, *, dtype: Any, adapter: Path | None = None
) -> PreTrainedModel:
    """A causal language model in evaluation mode, with `adapter` (LoRA) merged into its weights.

    Raises UsageError where either cannot be loaded.
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


def _load(auto_class: Any, location: str | Path, **options: Any) -> Any:
    try:
        with quiet_progress():
            return auto_class.from_pretrained(str(location), **options)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot load {location}: {cause_of(error)}",
            "give a model directory (config.json and tokenizer.json in it) or a hub id",
        ) from error


def chat_text(tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    turn = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))


def opening_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The mark with which the generation prompt opens the model's thought; empty without one."""
    if not getattr(tokenizer, "chat_template", None):
        return ""
    form = opened_by(chat_text(tokenizer, "x"))
    return form.opening if form else ""


def written_text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Sampled tokens as text: without special tokens, but for the marks of the thoughts of the
    tokenizer's chat template."""
    form = named_in(str(getattr(tokenizer, "chat_template", None) or ""))
    marks = form.opening + form.closing if form else ""
    special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    kept = [token for token in tokens if special.get(token, marks) in marks]
    return str(tokenizer.decode(kept, clean_up_tokenization_spaces=False))


def thought_opening(location: str | Path) -> str:
    """`opening_of` a model directory or hub id. Raises UsageError as `load_tokenizer` does."""
    return opening_of(_counting_tokenizer(str(location)))


def count_tokens(location: str | Path, texts: Sequence[str]) -> list[int]:
    """Tokens of each text, without special tokens. Raises UsageError as `load_tokenizer` does."""
    if not texts:
        return []
    encode = _counting_tokenizer(str(location))
    encoded = encode([storable(text) for text in texts], add_special_tokens=False)
    return [len(ids) for ids in encoded["input_ids"]]


def _counting_tokenizer(location: str) -> PreTrainedTokenizerBase:
    with _loading:  # a thread that loads it ahead is waited for
        return _kept_tokenizer(location)


@lru_cache(maxsize=4)
def _kept_tokenizer(location: str) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(location)
    # counting a text longer than the model's window is no reason to warn
    tokenizer.model_max_length = int(1e30)
    return tokenizer


@contextmanager
def renamed_option() -> Iterator[None]:
    """Silence a warning of PEFT and TRL about a name that transformers 6 changes."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*gradient_checkpointing.* is deprecated", category=FutureWarning
        )
        yield


def attention_of_any_length() -> AbstractContextManager[None]:
    """Disable cuDNN's attention, which plans anew for every length: for every sampled token and
    every step that learns from answers. On Hopper its gradients with a mask of padding hold NaN at
    lengths of 64 modulo 128 (torch 2.11 to 2.13, github.com/pytorch/pytorch/issues/196678)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
    chosen: AbstractContextManager[None] = sdpa_kernel(list(backends))
    return chosen


@contextmanager
def quiet_progress() -> Iterator[None]:
    """Silence progress bars of transformers and datasets, and restore the setting."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    datasets: Any = sys.modules.get("datasets")  # who uses it has imported it
    bars = logging.is_progress_bar_enabled()
    dataset_bars = datasets and not datasets.are_progress_bars_disabled()
    logging.disable_progress_bar()
    if dataset_bars:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()
        if dataset_bars:
            datasets.enable_progress_bars()
