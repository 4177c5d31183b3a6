"""Two-dimensional max pooling with a 3x3 window, stride 2 and padding 1."""

import torch
import torch.nn as nn

BATCH = 8
CHANNELS = 32
SIDE = 56
KERNEL_SIZE = 3
STRIDE = 2
PADDING = 1


class Model(nn.Module):
    def __init__(self, kernel_size, stride, padding):
        super().__init__()
        self.pool = nn.MaxPool2d(kernel_size, stride=stride, padding=padding)

    def forward(self, x):
        return self.pool(x)


def get_inputs():
    return [torch.randn(BATCH, CHANNELS, SIDE, SIDE)]


def get_init_inputs():
    return [KERNEL_SIZE, STRIDE, PADDING]
