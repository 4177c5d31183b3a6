"""Pairwise L1 (Manhattan) distances between the rows of two matrices."""

import torch
import torch.nn as nn

NUM_QUERIES = 256
NUM_KEYS = 256
FEATURES = 64


class Model(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cdist(x, y, p=1.0)


def get_inputs():
    return [torch.randn(NUM_QUERIES, FEATURES), torch.randn(NUM_KEYS, FEATURES)]


def get_init_inputs():
    return []
