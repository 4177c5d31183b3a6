"""A leaky integrator run over time: each state mixes the previous one with the tanh of the input."""

import torch
import torch.nn as nn

BATCH = 32
STEPS = 128
FEATURES = 64
DECAY = 0.9


class Model(nn.Module):
    def __init__(self, decay):
        super().__init__()
        self.decay = decay

    def forward(self, x):
        state = torch.zeros_like(x[:, 0])
        states = []
        for t in range(x.size(1)):
            state = self.decay * state + (1.0 - self.decay) * torch.tanh(x[:, t])
            states.append(state)
        return torch.stack(states, dim=1)


def get_inputs():
    return [torch.randn(BATCH, STEPS, FEATURES)]


def get_init_inputs():
    return [DECAY]
