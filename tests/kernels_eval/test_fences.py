"""Bytes around a candidate's inputs: the tensors are as others, and who reaches outside shows."""

import pytest
import torch

from kernels_eval.model.model_runner import layout_of
from kernels_eval.model.shared_memory import Fences, copied

FORMS = {
    "plain": lambda: torch.randn(48, 65),
    "transposed": lambda: torch.randn(3, 4).t(),
    "expanded": lambda: torch.randn(1, 5).expand(4, 5),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "integers": lambda: torch.arange(7),
    "truth": lambda: torch.tensor([True, False]),
    "bf16": lambda: torch.randn(3, dtype=torch.bfloat16),
    "fp8": lambda: torch.randn(8).to(torch.float8_e4m3fn),
    "complex": lambda: torch.randn(4, dtype=torch.complex64),
    "empty": lambda: torch.empty(0, 3),
    "number": lambda: torch.tensor(1.5),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("form", FORMS)
def test_a_fenced_tensor_is_as_any_other(form, device):
    value, fences = FORMS[form]().to(device), Fences()
    made, plain = copied(value, fences), copied(value)
    numbers = torch.complex64 if value.is_complex() else torch.float32
    assert type(made) is torch.Tensor
    assert torch.equal(made.cpu().to(numbers), value.cpu().to(numbers))
    assert made.device == plain.device
    assert made.untyped_storage().nbytes() == plain.untyped_storage().nbytes()
    assert (made.stride(), made.dtype, made.storage_offset()) == (plain.stride(), value.dtype, 0)
    assert made.data_ptr() % (64 if device == "cpu" else 512) == 0
    assert fences.intact


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("place", [-1, 5])
def test_who_reads_or_writes_outside_shows(device, place):
    fences = Fences()
    made = copied(torch.randn(5, device=device), fences)
    before, after = fences.around
    beside = before[-4:] if place < 0 else after[:4]
    assert beside.data_ptr() == made.data_ptr() + 4 * place
    assert beside.view(torch.float32).isnan().all() and fences.intact
    beside[0] = 0
    assert not fences.intact


X = torch.randn(4, 8)
OUTPUTS = {
    "own": (lambda: [X + 1], 0),
    "transposed": (lambda: [(X + 1).t()], 1),
    "parts_of_one": (lambda: (X + 1).chunk(2, 0), 0),
    "columns_of_one": (lambda: (X + 1).chunk(2, 1), 1),
    "an_input": (lambda: [X], 2),
    "a_view_of_an_input": (lambda: [X[:, 0]], 2),
    "repeated": (lambda: [(X + 1)[:, :1].expand(4, 8)], 2),
    "overlapping": (lambda: [(X + 1).unfold(1, 4, 1)], 2),
    "twice_the_same": (lambda: [X + 1] * 2, 2),
    "negated_when_read": (lambda: [torch._neg_view(X + 1)], 2),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_without_memory_of_their_own_are_told(name):
    outputs, layout = OUTPUTS[name]
    assert layout_of(list(outputs()), [X, 3]) == layout
