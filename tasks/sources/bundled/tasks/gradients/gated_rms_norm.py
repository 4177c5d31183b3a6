import torch
import torch.nn as nn


class Model(nn.Module):
    """RMS normalisation with a weight, gated by SiLU of a second input."""

    def __init__(self, features, epsilon):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.epsilon = epsilon

    def forward(self, x, gate):
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + self.epsilon)
        return x * scale * self.weight * torch.nn.functional.silu(gate)


def get_inputs():
    return [torch.randn(256, 512), torch.randn(256, 512)]


def get_init_inputs():
    return [512, 1e-5]


GRADIENTS = True
