"""One seed for the generators that a process uses."""

from __future__ import annotations

import torch


def seed_generators(seed: int) -> None:
    """Seed the CPU's generator and, once CUDA is in use, every GPU's, as `torch.manual_seed` does.

    That takes half a millisecond more: it formats its caller's stack.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
