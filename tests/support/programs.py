"""Task programs that tests share."""

EMPTY = "class Model: pass\ndef get_inputs(): return []\ndef get_init_inputs(): return []\n"
ADDS_ONE = """import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x + 1

def get_inputs():
    return [torch.rand(4)]

def get_init_inputs():
    return []
"""
