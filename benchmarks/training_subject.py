"""What `benchmarks.training_speed` trains: a model of a given shape with random weights, and seeded
rows of one length.

Guarantees: the same weights and rows in every process on one kind of device; weights are made where
they are used, so that 66 GB take seconds. Does not guarantee that such a model says anything: only
its speed, its memory and the course of its loss are looked at.
"""

from __future__ import annotations

from typing import Any

from benchmarks.shapes import QWQ_32B, ROPE_THETA
from tasks.training.recipe import PROJECTIONS
from tasks.training.telemetry import TrainingFlops

COMPLETION_SHARE = 0.8
SHAPES: dict[str, dict[str, int]] = {
    "qwq": QWQ_32B,
    "half": {**QWQ_32B, "num_hidden_layers": 32},
    "short": {**QWQ_32B, "num_hidden_layers": 4},
    "tiny": {
        **QWQ_32B,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}


def random_model(shape: dict[str, int], device: Any, place: Any = None, drawn: bool = True) -> Any:
    """A Qwen2 model with weights drawn on the device: normal with deviation 0.02, norms 1, biases
    0; without values where not `drawn`. bfloat16 on a GPU, else float32. It lies at `place`, by
    default there."""
    import torch

    model = _without_weights(shape)
    config = model.config
    place = place or device
    model = model.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    model = model.to_empty(device=place)
    # its frequencies are computed, not loaded: they are not in what to_empty leaves
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(place)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters() if drawn else ():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1)
            else:
                values = torch.empty_like(parameter, device=device)
                parameter.copy_(values.normal_(0, 0.02, generator=generator))
    return model


def _without_weights(shape: dict[str, int]) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    # what the base class takes, which the signature does not name
    named: dict[str, Any] = {"rope_theta": ROPE_THETA, "attn_implementation": "sdpa"}
    config = Qwen2Config(
        **shape,
        **named,
        tie_word_embeddings=False,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.device("meta"):
        return Qwen2ForCausalLM(config)


def adapter_config(dropout: float) -> Any:
    """The adapter of the recipe: rank 32 on the seven projections."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=32,
        lora_alpha=32,
        lora_dropout=dropout,
        target_modules=list(PROJECTIONS),
        bias="none",
    )


def counted_flops(shape: dict[str, int]) -> TrainingFlops:
    """FLOPs by row of a model of this shape with that adapter; no weights are made."""
    import torch
    from peft import get_peft_model

    with torch.device("meta"):
        model = get_peft_model(_without_weights(shape), adapter_config(0.0))
    return TrainingFlops.of(model, COMPLETION_SHARE)


def rows(length: int, vocabulary: int, steps: int) -> dict[str, list[list[int]]]:
    """Two rows in turn, token ids log-uniform (frequent and rare ones, as in text), labels on the
    last COMPLETION_SHARE."""
    import numpy as np

    generator = np.random.default_rng(0)
    distinct = np.exp(generator.uniform(0, np.log(vocabulary - 1), size=(2, length))).astype(int)
    prompt = round(length * (1 - COMPLETION_SHARE))
    ids = [distinct[step % 2].tolist() for step in range(steps)]
    return {"input_ids": ids, "labels": [[-100] * prompt + row[prompt:] for row in ids]}


def dataset(columns: dict[str, list[list[int]]]) -> Any:
    """`Dataset.from_dict` without its fingerprint, which pickles the table and fails where packages
    lie outside the environment."""
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable

    return Dataset(InMemoryTable(pyarrow.table(columns)), fingerprint="training_speed")


def tokenizer(vocabulary: int) -> Any:
    """TRL wants one for its padding token; the rows are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<end>": 0, "a": 1}, "a")),
        eos_token="<end>",
        pad_token="<end>",
    )
