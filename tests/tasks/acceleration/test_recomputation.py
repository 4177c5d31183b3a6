"""The recomputation plan: within memory, monotone, and its two ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_eval.errors import UsageError
from tasks.training.acceleration.parallelism import choose_parallelism
from tasks.training.acceleration.recomputation import (
    AHEAD,
    LayerShape,
    plan_recomputation,
)

QWQ = LayerShape(
    layers=64,
    hidden=5120,
    intermediate=27648,
    heads=40,
    key_value_heads=8,
    head_size=128,
    lora_rank=32,
)
WEIGHTS, TRAINED, H200 = 65_500_000_000, 268_435_456, 150_700_000_000


def plan(tokens, device_bytes=H200):
    return plan_recomputation(
        QWQ, device_bytes=device_bytes, weight_bytes=WEIGHTS, trained=TRAINED, tokens=tokens
    )


def shared(tokens, **more):
    """The plan of one of two GPUs that share the model."""
    return plan_recomputation(
        QWQ,
        device_bytes=H200,
        weight_bytes=WEIGHTS // 2,
        trained=TRAINED // 2,
        tokens=tokens,
        **more,
    )


def test_one_short_row_keeps_everything_and_long_rows_do_not():
    assert plan(512).levels() == ["keep"] * 64
    long = plan(16_384)
    assert long.mlp > 0 and long.keep > 0 and long.layer == 0
    assert long.levels() == ["mlp"] * long.mlp + ["keep"] * long.keep, "the last layers keep"


def test_the_peak_of_a_plan_is_within_what_is_allowed():
    for tokens in (1024, 8192, 16_384, 32_768):
        found = plan(tokens)
        assert found.peak_bytes <= H200 * 0.95
        assert len(found.levels()) == 64


def test_what_is_left_keeps_layers_of_a_sharded_model_gathered():
    layer = 975_000_000
    found = shared(8192, gathered_bytes=layer)
    assert found.keep == 64 and 0 < found.gathered < 64
    assert found.peak_bytes == shared(8192).peak_bytes + found.gathered * layer <= H200 * 0.95
    assert shared(16_384, gathered_bytes=layer).gathered <= 1, "activations go first"
    assert shared(512, gathered_bytes=layer).gathered == 64
    assert f"{found.gathered} gathered" in found.describe()


def test_main_memory_takes_what_would_be_computed_again():
    layer = 16_384 * QWQ.wide_bytes
    without, enough, some = (shared(16_384, host_bytes=size) for size in (0, 10**12, 20 * layer))
    assert without.mlp > 30 and without.host == 0
    assert (enough.mlp, enough.host) == (0, without.mlp + AHEAD)
    assert enough.keep == without.keep - AHEAD, "room for those that come and go"
    assert enough.peak_bytes == without.peak_bytes
    assert (some.mlp, some.host) == (without.mlp + AHEAD - 20, 20)
    assert some.levels() == ["mlp"] * some.mlp + ["host"] * 20 + ["keep"] * some.keep
    assert list(some.moved) == list(range(some.mlp, some.mlp + 20))
    assert "20 in main memory" in some.describe()


@pytest.mark.parametrize(("tokens", "host_bytes"), [(512, 10**12), (16_384, 4 * 10**9)])
def test_nothing_moves_where_nothing_is_computed_again_or_too_little_finds_room(tokens, host_bytes):
    assert shared(tokens, host_bytes=host_bytes) == shared(tokens)


def test_what_cannot_fit_is_refused_with_the_numbers():
    with pytest.raises(UsageError, match="131072 tokens .* GB even when every layer is recomputed"):
        plan(131_072)


def test_an_adapter_of_qwq_has_the_parameters_that_peft_gives_it():
    assert QWQ.trained == TRAINED


@pytest.mark.parametrize(
    ("gigabytes", "tokens", "host", "chosen", "why"),
    [
        (80, 8192, 80, "fsdp2", "one GPU does not hold the model and 8,192 tokens"),
        (151, 16_384, 80, "ddp", "the activations of 47 of 64 layers, 44 of them in main memory"),
        (151, 16_384, 66, "ddp", "the activations of 39 of 64 layers, 36 of them in main memory"),
        (151, 8192, 66, "ddp", "the activations of 64 of 64 layers, 23 of them in main memory"),
        (151, 32_768, 66, "fsdp2", "the activations of 0 of 64 layers"),
        (151, 8192, 60, "fsdp2", "each worker reads the model"),
        (300, 8192, 80, "ddp", "the activations of 64 of 64 layers"),
    ],
)
def test_workers_share_a_model_where_one_gpu_would_recompute_most_of_it(
    gigabytes, tokens, host, chosen, why
):
    memory = gigabytes * 10**9
    found = choose_parallelism(
        QWQ,
        weight_bytes=WEIGHTS,
        device_bytes=memory,
        tokens=tokens,
        margin_bytes=int(0.08 * memory),
        host_bytes=host * 10**9,
    )
    assert found[0] == chosen and why in found[1]


@given(st.integers(256, 36_000), st.integers(256, 36_000))
def test_more_tokens_never_keep_more(first, second):
    fewer, more = sorted((first, second))
    rank = {"layer": 0, "mlp": 1, "keep": 2}
    levels = [[rank[level] for level in plan(tokens).levels()] for tokens in (fewer, more)]
    assert all(a >= b for a, b in zip(*levels, strict=True))


@given(st.integers(110, 300), st.integers(110, 300))
def test_more_memory_never_recomputes_more(first, second):
    smaller, larger = sorted((first, second))
    less, more = (plan(8192, gigabytes * 10**9) for gigabytes in (smaller, larger))
    assert (more.keep, more.mlp + more.keep) >= (less.keep, less.mlp + less.keep)
    assert less.peak_bytes <= more.peak_bytes
