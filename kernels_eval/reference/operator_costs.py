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
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

Values = tuple[Any, ...]
"""An operator's arguments: what its schema says."""
Cost = Callable[[Values, Tensor], int]

MOVES = frozenset(
    """clone copy _to_copy cat stack constant_pad_nd reflection_pad1d reflection_pad2d
    reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
    index_select gather index index_put _index_put_impl embedding take scatter
    slice_scatter select_scatter where masked_fill masked_select masked_scatter
    nonzero flip roll repeat repeat_interleave tril triu im2col pixel_shuffle
    pixel_unshuffle channel_shuffle upsample_nearest1d upsample_nearest2d
    upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    diagonal_copy diag_embed view_as_real view_as_complex complex one_hot tril_indices
    triu_indices max_unpool2d max_unpool3d _unsafe_index _local_scalar_dense equal
    is_same_size unfold_copy alias_copy _conj_physical unsafe_split
    unsafe_split_with_sizes unsafe_chunk as_strided""".split()
)
"""Operators that read values and compute none."""

SOURCES = frozenset(
    """empty empty_like empty_strided new_empty new_empty_strided zeros zeros_like ones
    ones_like full full_like new_zeros new_ones new_full arange linspace logspace eye
    scalar_tensor rand rand_like randn randn_like randint randint_like randperm
    normal_functional uniform bernoulli normal exponential random fill zero lift_fresh
    lift resize set""".split()
)
"""Operators whose tensor arguments are asked for their shape only, or are overwritten."""


def _costs(*rows: tuple[int, str]) -> dict[str, int]:
    """Operations by operator, from rows of a number and the operators that cost so many."""
    return {name: cost for cost, names in rows for name in names.split()}


PER_INPUT = _costs(
    (
        1,
        """sum nansum mean prod amax amin aminmax max min argmax argmin any all count_nonzero
        median nanmedian kthvalue mode topk cumsum cumprod cummax cummin
        _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d
        prelu _prelu_kernel embedding_bag histc trace""",
    ),
    (2, "norm linalg_vector_norm native_dropout glu"),
    (
        3,
        """logcumsumexp mse_loss multi_margin_loss multilabel_margin_loss_forward renorm
        _weight_norm_interface logit""",
    ),
    (4, "var std var_mean std_mean logsumexp smooth_l1_loss huber_loss _fused_rms_norm"),
    (5, "_softmax _log_softmax _safe_softmax soft_margin_loss"),
    (7, "binary_cross_entropy"),
)
"""Operations for each element of the first tensor argument. A log-sum-exp is largest, difference,
exponential and sum, a softmax the same and a division."""

PER_OUTPUT = _costs(
    (1, "col2im rrelu_with_noise rrelu_with_noise_functional heaviside"),
    (2, "xlogy"),
    (3, "lerp addcmul addcdiv upsample_linear1d linalg_cross hardswish"),
    (9, "upsample_bilinear2d _upsample_bilinear2d_aa grid_sampler_2d"),
    (21, "upsample_trilinear3d grid_sampler_3d"),
    (35, "upsample_bicubic2d _upsample_bicubic2d_aa"),
)
"""Operations for each element of the first result: a linear interpolation is 3, and n dimensions
are 2**n - 1 of them."""

NORMALISATIONS = frozenset(
    """native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit
    _native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update
    cudnn_batch_norm""".split()
)
POOLS = frozenset(
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool2d_with_indices"
    " max_pool3d_with_indices".split()
)
TARGETS = frozenset({"nll_loss_forward", "nll_loss2d_forward"})


def operator_name(function: OpOverload) -> str:
    """aten's name without namespace and overload, the one of the out-of-place variant."""
    return str(function._schema.name).split("::")[-1].removesuffix("_")


def flops_of(function: OpOverload, args: Values, kwargs: dict[str, Any], out: object) -> int | None:
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
    if name in NORMALISATIONS:
        # mean, difference, square and sum, scale: 5; then what the weights do
        weights = (value for value in args[1:4] if isinstance(value, Tensor))
        affine = sum(value.dim() == 1 for value in weights)
        return ((2 if "no_" in name else 5) + affine) * first.numel()
    if name in POOLS:
        return result.numel() * _window(args, first)
    if name in TARGETS:
        return int(args[1].numel())
    if name in _SPECIAL:
        return _SPECIAL[name](args, result)
    return result.numel() if torch.Tag.pointwise in function.tags else None


def tensors(*values: object) -> list[Tensor]:
    """The tensors in nested values, in order."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _bias(name: str, args: Values, result: Tensor) -> int:
    if name in ("addmm", "baddbmm"):
        return result.numel()
    if name in ("convolution", "_convolution") and args[2] is not None:
        return result.numel()
    return 0


def _window(args: Values, given: Tensor) -> int:
    kernel = args[1] if len(args) > 1 else 1
    dims = max(1, given.dim() - 2)
    sizes = [kernel] if isinstance(kernel, int) else list(kernel)
    return int(math.prod(sizes * dims if len(sizes) == 1 else sizes))


def _log2(size: int) -> int:
    return math.ceil(math.log2(size)) if size > 1 else 0


def _dim(args: Values) -> int:
    numbers = (value for value in args[1:] if type(value) is int)
    return int(args[0].shape[next(numbers, -1)]) if args[0].dim() else 1


def _fft(args: Values, result: Tensor) -> int:
    larger: Tensor = max((args[0], result), key=lambda tensor: tensor.numel())
    return 5 * larger.numel() * _log2(math.prod(larger.shape[dim] for dim in args[1]))


def _attention(args: Values, result: Tensor) -> int:
    query, key, value = args[:3]
    scores: int = math.prod(query.shape[:-1]) * key.shape[-2]
    each: int = 2 * query.shape[-1] + 2 * value.shape[-1] + 5
    return scores * each


_SPECIAL: dict[str, Cost] = {
    **dict.fromkeys(("dot", "vdot", "mv"), lambda args, _: 2 * args[0].numel()),
    **dict.fromkeys(
        ("_cdist_forward", "_euclidean_dist", "_pdist_forward"),
        lambda args, result: 3 * result.numel() * args[0].shape[-1],
    ),
    **dict.fromkeys(
        ("scatter_add", "scatter_reduce", "index_add"), lambda args, _: args[3].numel()
    ),
    **dict.fromkeys(("_fft_r2c", "_fft_c2r", "_fft_c2c"), _fft),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "addmv": lambda args, result: 2 * args[1].numel() + result.numel(),
    "addbmm": lambda args, result: 2 * args[1].numel() * args[2].shape[-1] + result.numel(),
    "addr": lambda _, result: 2 * result.numel(),
    "sort": lambda args, _: args[0].numel() * _log2(_dim(args)),
}
