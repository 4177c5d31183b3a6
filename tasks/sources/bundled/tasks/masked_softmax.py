"""Scaled softmax of attention scores under a causal mask."""

import math

import torch
import torch.nn as nn

BATCH = 8
HEADS = 4
LENGTH = 128
HEAD_DIM = 64


class Model(nn.Module):
    def __init__(self, head_dim):
        super().__init__()
        self.head_dim = head_dim

    def forward(self, scores):
        length = scores.size(-1)
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device=scores.device), diagonal=1)
        scaled = scores / math.sqrt(self.head_dim)
        return torch.softmax(scaled.masked_fill(mask, float("-inf")), dim=-1)


def get_inputs():
    return [torch.randn(BATCH, HEADS, LENGTH, LENGTH) * 8.0]


def get_init_inputs():
    return [HEAD_DIM]
