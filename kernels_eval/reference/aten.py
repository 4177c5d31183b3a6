"""aten operators by their names: those that move values, make them, or normalise."""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload

Values = tuple[Any, ...]
"""An operator's arguments, typed by its schema."""

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
"""Operators that only ask for their tensor arguments' shape, or overwrite them."""

NORMALISATIONS = frozenset(
    """native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit
    _native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update
    cudnn_batch_norm""".split()
)


def operator_name(function: OpOverload) -> str:
    """aten's name of the out-of-place variant, without namespace and overload."""
    return str(function._schema.name).split("::")[-1].removesuffix("_")
