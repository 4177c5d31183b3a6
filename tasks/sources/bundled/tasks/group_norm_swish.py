"""Group normalisation, then swish (x * sigmoid(x)), then a doubling."""

import torch
import torch.nn as nn

BATCH = 8
CHANNELS = 64
SIDE = 32
GROUPS = 8


class Model(nn.Module):
    def __init__(self, groups, channels):
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels)

    def forward(self, x):
        x = self.norm(x)
        x = x * torch.sigmoid(x)
        return x * 2.0


def get_inputs():
    return [torch.randn(BATCH, CHANNELS, SIDE, SIDE)]


def get_init_inputs():
    return [GROUPS, CHANNELS]
