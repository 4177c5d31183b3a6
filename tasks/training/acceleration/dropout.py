"""Dropout whose mask depends on (seed, module, element index) alone, so that recomputed passes and
resumed runs see the same masks; none is stored."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

# 32-bit finaliser of MurmurHash3 (Austin Appleby, public domain,
# https://github.com/aappleby/smhasher, MurmurHash3.cpp, fmix32), as signed integers: torch has no
# wrapping uint32 arithmetic on every device
_M1 = 0x85EBCA6B - 2**32
_M2 = 0xC2B2AE35 - 2**32
_MASK_64 = 2**64 - 1


def split_mix(value: int) -> int:
    """One output of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014;
    https://prng.di.unimi.it/splitmix64.c): 64 well-mixed bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    # logical: torch shifts signed integers arithmetically
    shifted: Tensor = (value >> bits) & (2 ** (32 - bits) - 1)
    return shifted


def keep_mask(shape: Sequence[int], key: Tensor, rate: float) -> Tensor:
    """True where an element is kept, with probability 1 - `rate`; `key` holds two int32 on the
    mask's device.

    fmix32 of the element's index, with half of the key added before and half in between. Indices
    wrap at 2^32.
    """
    index = torch.arange(math.prod(shape), dtype=torch.int32, device=key.device).view(shape)
    mixed = index ^ key[0]
    mixed = (mixed ^ _shift_right(mixed, 16)) * _M1
    mixed = mixed ^ key[1]
    mixed = (mixed ^ _shift_right(mixed, 13)) * _M2
    mixed = mixed ^ _shift_right(mixed, 16)
    return (mixed & 0x7FFFFFFF) >= round(rate * 2**31)


class CounterDropout(nn.Module):
    """Dropout of `rate` with masks from `key`, two int32 that `DropoutKeys` sets before each
    pass."""

    key: Tensor

    def __init__(self, rate: float, device: torch.device) -> None:
        super().__init__()
        if not 0 < rate < 1:
            raise ValueError(f"a dropout rate must be between 0 and 1, not {rate}")
        self.rate = rate
        self.scale = 1 / (1 - rate)
        # a tensor of its own (no view of a table): compiled code wants aligned inputs
        self.register_buffer(
            "key", torch.zeros(2, dtype=torch.int32, device=device), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return torch.where(keep_mask(x.shape, self.key, self.rate), x * self.scale, 0)


class DropoutKeys:
    """Sets the keys of CounterDropout modules, on their device: one per module, micro step, seed
    and rank."""

    def __init__(self, modules: Sequence[CounterDropout], seed: int, rank: int = 0) -> None:
        self._keys = [module.key for module in modules]
        self._seed = seed = split_mix(seed) ^ split_mix(~rank & _MASK_64)
        device = self._keys[0].device if self._keys else torch.device("cpu")
        salts = [_signed(split_mix(split_mix(seed) ^ index)) for index in range(len(self._keys))]
        self._salts = torch.tensor(salts, dtype=torch.int64, device=device)

    def set(self, micro_step: int) -> None:
        """Use the masks of forward pass `micro_step`, counted from 0 over the whole run."""
        if not self._keys:
            return
        mixed = self._salts ^ _signed(split_mix(split_mix(self._seed + 1) ^ micro_step))
        # SplitMix64 again, on the device: salt and step are mixed, so keys of two steps do not
        # differ by one constant
        mixed = (mixed ^ ((mixed >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ ((mixed >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB)
        mixed = mixed ^ ((mixed >> 31) & (2**33 - 1))
        torch._foreach_copy_(self._keys, list(mixed.view(torch.int32).view(-1, 2).unbind()))


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
