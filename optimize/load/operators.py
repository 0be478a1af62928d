"""The operators that an untrusted file may name: pure functions of tensors and numbers, of torch's own library.

None of them reads or writes a file, looks at memory that is not its arguments', draws on the network, or keeps a state
beyond the random generator's. A name stands for all its overloads that return something new, and with an underscore
behind it for the one in place. What is not here is refused by name; it is a table to add to, never a rule to widen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from optimize.ops import OF_SIZES


def words(text: str) -> frozenset[str]:
    """Return the words of a text: how the tables here are written."""
    return frozenset(text.split())


#: Names in ``torch.ops.aten``.
ATEN = words(
    """
    __and__ __lshift__ __or__ __rshift__ __xor__ _adaptive_avg_pool2d _adaptive_avg_pool3d
    _cast_Byte _cast_Char _cast_Double _cast_Float _cast_Half _cast_Int _cast_Long _cast_Short _cdist_forward
    _conj _conj_physical _convolution _convolution_mode _embedding_bag _euclidean_dist _fft_c2c _fft_c2r _fft_r2c
    _fused_rms_norm _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd _local_scalar_dense
    _log_softmax _logcumsumexp _masked_softmax _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _native_multi_head_attention _neg_view _pad_circular _pad_enum
    _pack_padded_sequence _pad_packed_sequence _pdist_forward _prelu_kernel _safe_softmax
    _scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu _shape_as_tensor _softmax
    _to_copy _transformer_encoder_layer_fwd _transform_bias_rescale_qkv _trilinear _unique2 _unsafe_index
    _unsafe_view _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d _weight_norm _weight_norm_interface abs absolute acos
    acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d add addbmm addcdiv addcmul addmm addmv addr adjoint affine_grid_generator alias alias_copy
    all allclose alpha_dropout amax amin aminmax angle any arange arccos arccosh arcsin arcsinh arctan arctan2
    arctanh argmax argmin argsort argwhere as_strided asin asinh atan atan2 atanh atleast_1d atleast_2d atleast_3d
    avg_pool1d avg_pool2d avg_pool3d baddbmm bartlett_window batch_norm bernoulli bilinear bincount bitwise_and
    bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor blackman_window block_diag bmm
    broadcast_tensors broadcast_to bucketize cartesian_prod cat cdist ceil celu chain_matmul channel_shuffle
    cholesky chunk clamp clamp_max clamp_min clip clone col2im column_stack combinations complex concat
    concatenate conj conj_physical constant_pad_nd contiguous conv1d conv2d conv3d conv_depthwise3d conv_tbc
    conv_transpose1d conv_transpose2d conv_transpose3d convolution copy copy_ copysign corrcoef cos cosh
    cosine_similarity count_nonzero cov cross cummax cummin cumprod cumsum cumulative_trapezoid deg2rad det detach
    detach_copy diag diag_embed diagflat diagonal diagonal_copy diagonal_scatter diff digamma dist div divide dot
    dropout dsplit dstack einsum elu embedding embedding_bag embedding_renorm
    eq equal erf erfc erfinv exp exp2 expand expand_as expand_copy expm1 eye feature_alpha_dropout
    feature_dropout fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_ifft fft_ifft2 fft_ifftn
    fft_ifftshift fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftfreq fft_rfftn fill fix
    flatten flip fliplr flipud float_power floor floor_divide fmax fmin fmod frac fractional_max_pool2d frexp
    frobenius_norm full full_like gather gcd ge gelu ger glu grid_sampler grid_sampler_2d grid_sampler_3d greater
    greater_equal group_norm gru gru_cell gt hamming_window hann_window hardshrink hardsigmoid hardswish hardtanh
    heaviside histc hsplit hstack hypot i0 im2col imag index index_add index_copy index_fill index_put
    index_reduce index_select inner instance_norm inverse isclose isfinite isin isinf isnan isneginf isposinf
    isreal istft item kaiser_window kron kthvalue layer_norm ldexp le leaky_relu lerp less less_equal lgamma
    lift lift_fresh lift_fresh_copy linalg_cholesky linalg_cross linalg_det linalg_diagonal linalg_eigh linalg_inv
    linalg_inv_ex linalg_lstsq linalg_matmul linalg_matrix_exp linalg_matrix_norm linalg_matrix_power
    linalg_multi_dot linalg_norm linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_triangular
    linalg_svd linalg_svdvals linalg_tensorinv linalg_vander linalg_vecdot linalg_vector_norm linear linspace log
    log10 log1p log2 log_sigmoid log_sigmoid_forward log_softmax logaddexp logaddexp2 logcumsumexp logdet
    logical_and logical_not logical_or logical_xor logit logspace logsumexp lstm lstm_cell lt mH mT masked_fill
    masked_scatter masked_select matmul matrix_H matrix_exp matrix_power max max_pool1d max_pool1d_with_indices
    max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool2d max_unpool3d maximum mean
    median meshgrid min minimum mish mm mode moveaxis movedim msort mul multinomial multiply mv mvlgamma
    nan_to_num nanmean nanmedian nanquantile nansum narrow narrow_copy native_channel_shuffle
    native_dropout native_group_norm native_layer_norm ne neg negative new_full
    new_ones new_zeros nextafter nonzero nonzero_static norm norm_except_dim normal normal_functional not_equal
    numel numpy_T one_hot ones ones_like outer pad pad_sequence pairwise_distance pdist permute permute_copy
    pinverse pixel_shuffle pixel_unshuffle polar polygamma positive pow prelu prod qr quantile rad2deg rand
    rand_like randint randint_like randn randn_like randperm range ravel real reciprocal reflection_pad1d
    reflection_pad2d reflection_pad3d relu relu6 remainder renorm repeat repeat_interleave replication_pad1d
    replication_pad2d replication_pad3d reshape reshape_as resolve_conj resolve_neg result_type rms_norm rnn_relu
    rnn_relu_cell rnn_tanh rnn_tanh_cell roll rot90 round row_stack rrelu rrelu_with_noise
    rrelu_with_noise_functional rsqrt rsub scalar_tensor scaled_dot_product_attention scatter scatter_add
    scatter_reduce searchsorted select select_copy select_scatter selu sgn sigmoid sign signbit silu sin sinc sinh
    slice slice_copy slice_scatter slogdet slow_conv3d slow_conv_dilated2d slow_conv_dilated3d
    slow_conv_transpose2d slow_conv_transpose3d smooth_l1_loss softmax softplus softshrink sort special_digamma
    special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2 special_expit special_expm1
    special_gammaln special_i0 special_i0e special_i1 special_i1e special_log1p special_log_ndtr
    special_log_softmax special_logit special_logsumexp special_ndtr special_ndtri special_psi special_round
    special_sinc special_softmax special_xlog1py special_xlogy split split_copy split_with_sizes
    split_with_sizes_copy sqrt square squeeze squeeze_copy stack std std_mean stft sub subtract sum sum_to_size
    svd swapaxes swapdims t take take_along_dim tan tanh tensor_split tensordot thnn_conv2d threshold tile to topk
    trace transpose trapezoid trapz tril tril_indices triu triu_indices true_divide trunc type_as unbind unflatten
    unfold unfold_copy uniform unique_consecutive unique_dim unsafe_chunk unsafe_split unsafe_split_with_sizes
    unsqueeze unsqueeze_copy upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
    upsample_nearest2d upsample_nearest3d upsample_trilinear3d vander var var_mean vdot view view_as
    view_as_complex view_as_real view_copy vsplit vstack where xlogy zeros zeros_like is_nonzero is_same_size
    mse_loss l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits cross_entropy_loss nll_loss
    nll_loss_nd nll_loss2d nll_loss_forward nll_loss2d_forward kl_div soft_margin_loss sym_size sym_numel
    sym_stride sym_storage_offset sym_is_contiguous
    """
)
#: What leaves memory as it finds it is read as what fills it with zeros: it may hold anything of the process.
FILLED = {
    "aten.empty.memory_format": "aten.zeros.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
}
#: Overloads of listed operators whose kernels add up numbers of the file unchecked, or end or hold up who asks for
#: their shapes alone; TorchScript may call them in its confined process, captured graphs have others in their place.
_UNCHECKED = words(
    """
    aten.repeat_interleave.Tensor aten.repeat_interleave.self_Tensor aten._transform_bias_rescale_qkv.default
    aten._masked_softmax.default aten.slow_conv_transpose3d.default aten.combinations.default
    aten.tensor_split.tensor_indices_or_sections aten.slow_conv3d.default aten.slow_conv_dilated2d.default
    aten.slow_conv_dilated3d.default aten.thnn_conv2d.default aten.conv_depthwise3d.default aten.mvlgamma.default
    aten.bincount.default
    """
)
#: Calls that check or state something about a value and return nothing of use: left out when a graph is read.
ASSERTIONS = words(
    """
    _assert_async _assert_scalar _assert_tensor_metadata _functional_assert_async _functional_assert_scalar
    _functional_sym_constrain_range _functional_sym_constrain_range_for_size sym_constrain_range
    sym_constrain_range_for_size
    """
)
_NAMES = {function: name for name, function in OF_SIZES.items()}


class NotListed(Exception):
    """An operator that is not in the table; its text names it."""


def find(name: str) -> Callable[..., Any]:
    """Return the operator called ``aten.conv2d.default``, or a function of sizes such as ``_operator.add``.

    Raises:
        NotListed: It is not in the table, torch has no such overload, or it is about no tensor.
    """
    if name in OF_SIZES:
        return OF_SIZES[name]
    library, _, rest = FILLED.get(name, name).partition(".")
    short, _, overload = rest.partition(".")
    if library != "aten" or not is_listed(short) or name in _UNCHECKED:
        raise NotListed(name)
    try:
        found: torch._ops.OpOverload = getattr(getattr(torch.ops.aten, short), overload)
    except (AttributeError, RuntimeError) as error:
        raise NotListed(name) from error
    if not isinstance(found, torch._ops.OpOverload) or any(argument.is_out for argument in found._schema.arguments):
        raise NotListed(name)
    if "Tensor" not in str(found._schema):  # of TorchScript, about numbers, texts and lists: 1 % 0 ends the process
        raise NotListed(name)
    return found


def is_listed(short: str) -> bool:
    """Say whether the table has ``conv2d``, or of ``relu_`` the form that returns something new."""
    return short in ATEN or (short.endswith("_") and not short.endswith("__") and short[:-1] in ATEN)


def name_of(function: Any) -> str:
    """Return the name that ``find`` knows an operator by.

    Raises:
        NotListed: It has none.
    """
    if isinstance(function, torch._ops.OpOverload):
        name = f"{function.namespace}.{function._schema.name.partition('::')[2]}.{function._overloadname}"
    else:
        name = _NAMES.get(function, f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', function)}")
    find(name)
    return name
