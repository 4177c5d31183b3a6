"""What one aten operator costs in floating-point operations, from the shapes it was called with.

Guarantees: matrix products, convolutions and attention are counted exactly (torch's own formulas, a
multiply-add counts 2, a bias 1 for each output). Everything else is an estimate by the table below:
one for each output of a pointwise operator whatever it computes (an exponential counts 1), one for
each input of a reduction, and the few steps of what aten fuses. Moving, choosing and creating
values costs nothing, and neither does integer work. Does not guarantee that an implementation needs
as many (Winograd's convolution needs fewer), and an operator that no rule covers is reported as
unknown instead of guessed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

MOVES = frozenset(
    """clone copy _to_copy cat stack constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
    replication_pad3d index_select gather index index_put _index_put_impl embedding take scatter slice_scatter select_scatter where
    masked_fill masked_select masked_scatter nonzero flip roll repeat repeat_interleave tril triu im2col pixel_shuffle pixel_unshuffle
    channel_shuffle upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    diagonal_copy diag_embed view_as_real view_as_complex complex one_hot tril_indices triu_indices max_unpool2d max_unpool3d
    _unsafe_index _local_scalar_dense equal is_same_size unfold_copy alias_copy _conj_physical unsafe_split
    unsafe_split_with_sizes unsafe_chunk as_strided""".split()
)
"""Operators that read values and compute none."""

SOURCES = frozenset(
    """empty empty_like empty_strided new_empty new_empty_strided zeros zeros_like ones ones_like full full_like new_zeros new_ones new_full
    arange linspace logspace eye scalar_tensor rand rand_like randn randn_like randint randint_like randperm normal_functional uniform
    bernoulli normal exponential random fill zero lift_fresh lift resize set""".split()
)
"""Operators whose tensor arguments are asked for their shape only, or are overwritten."""

PER_INPUT = {
    "sum": 1,
    "nansum": 1,
    "mean": 1,
    "prod": 1,
    "amax": 1,
    "amin": 1,
    "aminmax": 1,
    "max": 1,
    "min": 1,
    "argmax": 1,
    "argmin": 1,
    "any": 1,
    "all": 1,
    "count_nonzero": 1,
    "median": 1,
    "nanmedian": 1,
    "kthvalue": 1,
    "mode": 1,
    "topk": 1,
    "cumsum": 1,
    "cumprod": 1,
    "cummax": 1,
    "cummin": 1,
    "logcumsumexp": 3,
    "norm": 2,
    "linalg_vector_norm": 2,
    "var": 4,
    "std": 4,
    "var_mean": 4,
    "std_mean": 4,
    "logsumexp": 4,  # largest, difference, exponential, sum
    "_softmax": 5,
    "_log_softmax": 5,
    "_safe_softmax": 5,  # the same and a division
    "mse_loss": 3,
    "smooth_l1_loss": 4,
    "huber_loss": 4,
    "binary_cross_entropy": 7,
    "soft_margin_loss": 5,
    "multi_margin_loss": 3,
    "multilabel_margin_loss_forward": 3,
    "_adaptive_avg_pool2d": 1,
    "_adaptive_avg_pool3d": 1,
    "adaptive_max_pool2d": 1,
    "adaptive_max_pool3d": 1,
    "renorm": 3,
    "_weight_norm_interface": 3,
    "_fused_rms_norm": 4,
    "native_dropout": 2,
    "glu": 2,
    "prelu": 1,
    "_prelu_kernel": 1,
    "embedding_bag": 1,
    "histc": 1,
    "trace": 1,
    "logit": 3,
}
"""Operations for each element of the first tensor argument."""

PER_OUTPUT = {
    "lerp": 3,
    "addcmul": 3,
    "addcdiv": 3,
    "upsample_linear1d": 3,
    "upsample_bilinear2d": 9,
    "_upsample_bilinear2d_aa": 9,
    "upsample_trilinear3d": 21,
    "upsample_bicubic2d": 35,
    "_upsample_bicubic2d_aa": 35,
    "grid_sampler_2d": 9,
    "grid_sampler_3d": 21,
    "col2im": 1,
    "rrelu_with_noise": 1,
    "rrelu_with_noise_functional": 1,
    "linalg_cross": 3,
    "heaviside": 1,
    "xlogy": 2,
    "hardswish": 3,
}
"""Operations for each element of the first result: a linear interpolation is 3, and n dimensions
are 2**n - 1 of them."""

NORMALISATIONS = frozenset(
    """native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
    _batch_norm_with_update _batch_norm_no_update cudnn_batch_norm""".split()
)
POOLS = frozenset(
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool2d_with_indices"
    " max_pool3d_with_indices".split()
)
TARGETS = frozenset({"nll_loss_forward", "nll_loss2d_forward"})


def operator_name(function: Any) -> str:
    """aten's name without namespace and overload, the one of the out-of-place variant."""
    return function._schema.name.split("::")[-1].removesuffix("_")


def flops_of(function: Any, args: Any, kwargs: Any, out: Any) -> int | None:
    """Floating-point operations of one call with these arguments and results (tensors of any
    device). None where no rule covers it."""
    name = operator_name(function)
    if name in MOVES or name in SOURCES or function.is_view or name in ("_unsafe_view", "detach"):
        return 0
    given, results = tensors(args, kwargs), tensors(out)
    if not any(tensor.is_floating_point() or tensor.is_complex() for tensor in (*given, *results)):
        return 0
    first, result = (given[0] if given else None), (results[0] if results else None)
    if result is None:
        return None
    counted = flop_registry.get(getattr(torch.ops.aten, name, None))
    if counted is not None:
        return int(counted(*args, **kwargs, out_val=out)) + _bias(name, args, result)
    if first is None:
        return None
    if name in PER_INPUT:
        return PER_INPUT[name] * first.numel()
    if name in PER_OUTPUT:
        return PER_OUTPUT[name] * result.numel()
    if (
        name in NORMALISATIONS
    ):  # mean, difference, square and sum, scale: 5; then what the weights do
        affine = sum(
            1 for value in args[1:4] if isinstance(value, torch.Tensor) and value.dim() == 1
        )
        return ((2 if "no_" in name else 5) + affine) * first.numel()
    if name in POOLS:
        return result.numel() * _window(args, first)
    if name in TARGETS:
        return args[1].numel()
    special = _SPECIAL.get(name)
    if special:
        return int(special(args, result))
    return result.numel() if torch.Tag.pointwise in function.tags else None


def tensors(*values: Any) -> list[torch.Tensor]:
    """The tensors in nested values, in order."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _bias(name: str, args: Any, result: torch.Tensor) -> int:
    if name in ("addmm", "baddbmm"):
        return result.numel()
    if name in ("convolution", "_convolution") and args[2] is not None:
        return result.numel()
    return 0


def _window(args: Any, given: torch.Tensor) -> int:
    kernel = args[1] if len(args) > 1 else 1
    dims = max(1, given.dim() - 2)
    sizes = (
        [kernel] * dims
        if isinstance(kernel, int)
        else list(kernel) * (dims if len(kernel) == 1 else 1)
    )
    return math.prod(sizes)


def _log2(size: int) -> int:
    return math.ceil(math.log2(size)) if size > 1 else 0


def _dim(args: Any, default: int = -1) -> int:
    given = args[0]
    dim = next(
        (value for value in args[1:] if isinstance(value, int) and not isinstance(value, bool)),
        default,
    )
    return given.shape[dim] if given.dim() else 1


def _fft(args: Any, result: torch.Tensor) -> int:
    larger = max((args[0], result), key=lambda tensor: tensor.numel())
    return 5 * larger.numel() * _log2(math.prod(larger.shape[dim] for dim in args[1]))


def _attention(args: Any, result: torch.Tensor) -> int:
    query, key, value = args[:3]
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    return scores * (2 * query.shape[-1] + 2 * value.shape[-1] + 5)


_SPECIAL = {
    "dot": lambda args, _: 2 * args[0].numel(),
    "vdot": lambda args, _: 2 * args[0].numel(),
    "mv": lambda args, _: 2 * args[0].numel(),
    "addmv": lambda args, result: 2 * args[1].numel() + result.numel(),
    "addbmm": lambda args, result: 2 * args[1].numel() * args[2].shape[-1] + result.numel(),
    "addr": lambda _, result: 2 * result.numel(),
    "_cdist_forward": lambda args, result: 3 * result.numel() * args[0].shape[-1],
    "_euclidean_dist": lambda args, result: 3 * result.numel() * args[0].shape[-1],
    "_pdist_forward": lambda args, result: 3 * result.numel() * args[0].shape[-1],
    "sort": lambda args, _: args[0].numel() * _log2(_dim(args)),
    "scatter_add": lambda args, _: args[3].numel(),
    "scatter_reduce": lambda args, _: args[3].numel(),
    "index_add": lambda args, _: args[3].numel(),
    "_fft_r2c": _fft,
    "_fft_c2r": _fft,
    "_fft_c2c": _fft,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
}
