"""Small models, accelerated, and rows for them."""

import torch

from tasks.training.acceleration.layers import AccelerationOptions, accelerate
from tests.support.training import adapted_qwen

TOKENS = 24


def model(dropout=0.0, layers=3):
    return adapted_qwen(dropout=dropout, num_hidden_layers=layers, attn_implementation="sdpa")


def accelerated(adapted, seed=0, **options):
    """Uncompiled unless it is asked for."""
    made = AccelerationOptions(**{"compile": False} | options)
    return accelerate(adapted, tokens=TOKENS, seed=seed, options=made)


def line(length=TOKENS, seed=1):
    """A micro batch of one row; its first third has no loss."""
    ids = torch.randint(1, 128, (1, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, : length // 3] = -100
    return {"input_ids": ids, "labels": labels}
