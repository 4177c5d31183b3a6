"""Which family an operator belongs to, by the name of its torch function.

Guarantees: in-place, reflected and overloaded spellings (`add_`, `__radd__`, `torch.Tensor.add`)
belong where their plain name does; a name that no family lists is "other". The table covers what
KernelBench's levels 1 to 3 and the bundled tasks call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, get_args

Family = Literal[
    "matmul",
    "convolution",
    "attention",
    "rnn",
    "normalisation",
    "activation",
    "softmax",
    "pooling",
    "reduction",
    "cumulative",
    "loss",
    "elementwise",
    "indexing",
    "resampling",
    "movement",
    "random",
    "linear_algebra",
    "fft",
    "other",
]
FAMILIES: tuple[str, ...] = get_args(Family)

TABLE: dict[str, str] = {
    "matmul": (
        """
        matmul mm bmm addmm addbmm baddbmm addmv mv dot vdot inner outer ger linear
        bilinear einsum tensordot chain_matmul multi_dot kron rmatmul addr spmm smm
    """
    ),
    "convolution": (
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc"
        " convolution"
    ),
    "attention": "scaled_dot_product_attention multi_head_attention_forward",
    "rnn": "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
    "normalisation": (
        """
        batch_norm layer_norm group_norm instance_norm rms_norm local_response_norm
        normalize renorm weight_norm native_batch_norm native_layer_norm
    """
    ),
    "activation": (
        """
        relu relu6 leaky_relu elu selu celu gelu silu mish sigmoid logsigmoid hardsigmoid
        hardswish hardtanh tanh tanhshrink softplus softsign softshrink hardshrink
        threshold prelu rrelu glu logit expit
    """
    ),
    "softmax": "softmax log_softmax softmin gumbel_softmax",
    "pooling": (
        """
        max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
        adaptive_max_pool2d adaptive_max_pool3d lp_pool1d lp_pool2d lp_pool3d
        fractional_max_pool2d fractional_max_pool3d max_unpool1d max_unpool2d max_unpool3d
        boolean_dispatch max_pool2d_with_indices
    """
    ),
    "reduction": (
        """
        sum mean max min amax amin aminmax argmax argmin prod std var std_mean var_mean
        median nanmedian mode nansum nanmean norm vector_norm logsumexp all any
        count_nonzero kthvalue topk sort argsort msort unique unique_consecutive quantile
        nanquantile histc bincount trace cosine_similarity pairwise_distance cdist pdist
        dist allclose equal
    """
    ),
    "cumulative": (
        "cumsum cumprod cummax cummin logcumsumexp cumulative_trapezoid diff trapz trapezoid"
    ),
    "loss": (
        """
        mse_loss l1_loss smooth_l1_loss huber_loss cross_entropy nll_loss kl_div
        binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss
        margin_ranking_loss cosine_embedding_loss triplet_margin_loss
        triplet_margin_with_distance_loss ctc_loss poisson_nll_loss gaussian_nll_loss
        soft_margin_loss multi_margin_loss multilabel_margin_loss
        multilabel_soft_margin_loss
    """
    ),
    "elementwise": (
        """
        add sub mul div true_divide floor_divide divide multiply subtract truediv floordiv
        mod remainder fmod neg negative positive pow float_power square sqrt rsqrt
        reciprocal exp exp2 expm1 log log2 log10 log1p abs absolute sign sgn sin cos tan
        asin acos atan atan2 sinh cosh asinh acosh atanh arctan arctan2 erf erfc erfinv
        lgamma digamma sinc floor ceil round trunc frac clamp clip clamp_min clamp_max
        maximum minimum fmax fmin lerp addcmul addcdiv eq ne gt ge lt le greater less
        greater_equal less_equal not_equal logical_and logical_or logical_not logical_xor
        bitwise_and bitwise_or bitwise_not bitwise_xor and or xor invert lshift rshift
        isnan isinf isfinite nan_to_num where masked_fill heaviside hypot xlogy cross conj
        real imag angle polar complex deg2rad rad2deg isclose ldexp copysign logaddexp
        logaddexp2 dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d
        dropout3d
    """
    ),
    "indexing": (
        """
        embedding embedding_bag gather scatter scatter_add scatter_reduce index_select
        index_add index_copy index_fill index_put setitem take take_along_dim
        masked_select masked_scatter nonzero one_hot searchsorted bucketize select_scatter
        slice_scatter
    """
    ),
    "resampling": (
        """
        interpolate upsample upsample_nearest upsample_bilinear grid_sample affine_grid
        pixel_shuffle pixel_unshuffle channel_shuffle unfold fold
    """
    ),
    "movement": (
        """
        cat concat concatenate stack hstack vstack dstack pad flip fliplr flipud roll
        rot90 repeat repeat_interleave tile meshgrid block_diag diag diagonal diag_embed
        diagflat column_stack cartesian_prod tensor_split hsplit vsplit moveaxis
        atleast_1d atleast_2d to_sparse to_dense half double int long cpu cuda fill zero
        set resize as_strided unflatten ravel view_as_complex view_as_real tril_indices
        triu_indices numpy tolist data set_ contiguous
    """
    ),
    "random": (
        """
        rand randn rand_like randn_like randint randint_like randperm bernoulli normal
        uniform multinomial poisson exponential manual_seed
    """
    ),
    "linear_algebra": (
        """
        inverse inv det logdet slogdet svd eig eigh eigvals eigvalsh qr cholesky
        cholesky_solve lu lu_solve solve triangular_solve solve_triangular lstsq pinverse
        pinv matrix_power matrix_exp matrix_norm matrix_rank
    """
    ),
    "fft": (
        "fft ifft rfft irfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn hfft ihfft fftshift"
        " ifftshift stft istft"
    ),
}

_FAMILY = {name: family for family, names in TABLE.items() for name in names.split()}
_DUNDER = re.compile(r"__(?P<name>\w+)__")


def family_of(operator: str) -> str:
    """The family of one operator, such as "torch.nn.functional.conv2d" or
    "torch.Tensor.__rsub__"."""
    name = operator.rsplit(".", 1)[-1]
    found = _DUNDER.fullmatch(name)
    plain = found["name"] if found else name.rstrip("_").lstrip("_")
    if plain in _FAMILY:
        return _FAMILY[plain]
    if found and plain[:1] in "ri" and plain[1:] in _FAMILY:
        return _FAMILY[plain[1:]]
    return "other"


def families_of(operators: Sequence[str]) -> tuple[str, ...]:
    """The families of a task's operators, each once, in the order of FAMILIES."""
    found = {family_of(operator) for operator in operators}
    return tuple(family for family in FAMILIES if family in found)
