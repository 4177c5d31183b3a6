"""Too little memory, the wrong base model, no rows: one clear error each, with the numbers and what
to do."""

from pathlib import Path

import pytest

from kernels_eval.errors import EvalError, UsageError
from tasks.training import faults
from tasks.training.faults import explain, is_out_of_memory
from tasks.training.formatting import Example
from tasks.training.recipe import FIXED, TrainingRecipe
from tasks.training.trainer import train
from tests.support.training import REASONING, row


def example(tokens):
    return Example("c", "", "", "", "", input_ids=range(tokens), prompt_tokens=1)


EXAMPLES = [example(100 + 100 * index) for index in range(1, 21)]


def told(error, **recipe):
    decided = TrainingRecipe(base_model="Qwen/QwQ-32B", **recipe).resolve(gpu=False)
    answer = explain(error, decided, EXAMPLES, Path("out"))
    assert isinstance(answer, UsageError)
    return str(answer)


def test_out_of_memory_gives_the_numbers_and_ways_out():
    import torch

    message = told(
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"),
        batch_size=2,
    )
    for part in (
        "Qwen/QwQ-32B",
        "Tried to allocate 20.00 GiB",
        "batch_size 2 x up to 2100 tokens",
    ):
        assert part in message
    for way in ("fsdp2", "max_length", "batch_size", "base_model"):
        assert way in message


def test_what_is_used_already_is_told():
    message = told(MemoryError(), acceleration="on", workers=8, parallelism="fsdp2")
    assert "acceleration on, parallelism fsdp2 over 8" in message


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "NCCL error in: ProcessGroupNCCL.cpp:94, Last error:\nCuda failure 2 'out of memory'",
    ],
)
def test_memory_that_a_library_did_not_get_is_recognised_below_other_errors(words):
    try:
        try:
            raise RuntimeError(words)
        except RuntimeError as cause:
            raise ValueError("the step failed") from cause
    except ValueError as error:
        assert is_out_of_memory(error)


def test_anything_else_says_what_it_was_and_where_it_goes_on(tmp_path):
    answer = explain(ConnectionError("power cut\nmore"), TrainingRecipe(), EXAMPLES, tmp_path)
    assert type(answer) is EvalError
    assert str(answer).startswith("training failed: ConnectionError: power cut (")
    assert f"resume from {tmp_path / 'checkpoints'}" in str(answer)


# -- what cannot be trained on ---------------------------------------------------------------------


def refused(base, out, rows, **recipe):
    with pytest.raises(UsageError) as caught:
        train(rows, TrainingRecipe(**recipe), base, out)
    assert not (out / "adapter").exists()
    return str(caught.value)


def test_an_empty_set_is_refused(base, tmp_path):
    assert (
        refused(base, tmp_path, [])
        == "no row is left to train on (of 0): the set is empty (curate more rows)"
    )


def test_a_set_of_rows_over_the_limit_is_refused_by_name_and_length(base, tmp_path):
    message = refused(base, tmp_path, [row(1, reasoning=REASONING * 30)], max_length=500)
    assert message.startswith("no row is left to train on (of 1): c1 (overlong, ")
    assert "raise max_length to" in message


def test_a_base_model_without_the_projections_is_refused_even_where_it_has_some(
    base, tmp_path, monkeypatch
):
    """PEFT trains those that match and says nothing of the others."""
    other = ("q_proj", "v_proj", "c_fc", "query_key_value")
    monkeypatch.setattr(faults, "FIXED", FIXED.model_copy(update={"target_modules": other}))
    message = refused(base, tmp_path, [row(0)])
    assert "small (Qwen2ForCausalLM) has no layer named c_fc, query_key_value" in message
    assert (
        "its linear layers: down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
        in message
    )
