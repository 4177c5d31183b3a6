"""One seed for the generators that a process uses."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Seed what tasks draw from: torch's generators (every GPU's, once CUDA is in use), NumPy's
    and Python's.

    `torch.manual_seed` takes half a millisecond more: it formats its caller's stack.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
