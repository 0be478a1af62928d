"""What a value of TorchScript does not exceed: its magnitude, of each operator's result by what it is given.

Operators are told apart by what they do to sizes, in one table: torch's own mark of those that work element by element,
and the words below. What is in none, lays several sizes together, or makes as many as data says has no bound: a loop
over it is refused.
"""

from __future__ import annotations

import cmath
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from optimize.load.operators import words

#: Of numbers, texts and containers: whose result does not exceed what they are first given, or all they are given,
#: tensors as well.
_OF_FIRST = words(
    """
    TupleIndex TupleUnpack TupleSlice ListUnpack unchecked_cast unchecked_unwrap_optional annotate _unwrap_optional
    __getitem__ slice copy list sorted keys values items Size neg abs Int Float NumToTensor
    """
)
_OF_ALL, _HOLDING = words("min max broadcast_shapes _infer_size"), words("TupleConstruct get pop Uninitialized")
#: Of tensors: whose result has no larger sizes, and no more of them, than the largest tensor they are given.
_KEEPING = words(
    """
    linear matmul mm bmm addmm addmv addbmm baddbmm mv dot vdot bilinear chain_matmul linalg_matmul transpose
    permute t T mT H mH numpy_T matrix_H adjoint swapaxes swapdims movedim moveaxis rot90 fliplr flipud select narrow
    unbind chunk unsafe_chunk split unsafe_split squeeze slice data contiguous clone copy to _to_copy type_as cpu detach
    alias lift lift_fresh lift_fresh_copy dropout alpha_dropout feature_dropout feature_alpha_dropout native_dropout
    softmax log_softmax _softmax _log_softmax _safe_softmax layer_norm batch_norm batch_norm1d batch_norm2d batch_norm3d
    instance_norm group_norm rms_norm native_layer_norm native_group_norm _native_batch_norm_legit_no_training
    _weight_norm norm_except_dim renorm embedding_bag gather take index_select index_add index_copy index_fill index_put
    index_reduce scatter scatter_add scatter_reduce select_scatter slice_scatter masked_fill masked_scatter fill
    searchsorted bucketize isin mean sum prod amax amin aminmax argmax argmin all any norm frobenius_norm std var
    std_mean var_mean nansum nanmean median nanmedian mode kthvalue logsumexp count_nonzero trace cumsum cumprod cummax
    cummin logcumsumexp sort argsort msort topk flip roll tril triu diagonal channel_shuffle native_channel_shuffle
    scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu gru
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell zeros_like ones_like full_like empty_like rand_like randn_like
    randint_like bernoulli reshape_as view_as expand_as min max abs neg unchecked_cast unchecked_unwrap_optional
    annotate _unwrap_optional hardswish hardsigmoid hardtanh prelu _prelu_kernel glu log_sigmoid relu6 absolute negative
    multiply subtract divide true_divide floor_divide rsub greater greater_equal less less_equal not_equal __and__
    __or__ arctan2 isclose conj _conj resolve_conj resolve_neg real imag complex polar view_as_complex fix grid_sampler
    grid_sampler_2d grid_sampler_3d cdist _cdist_forward _euclidean_dist dist cosine_similarity pairwise_distance cross
    linalg_cross fft_fftshift fft_ifftshift inverse linalg_inv pinverse det linalg_det svd linalg_svd qr linalg_qr
    linalg_eigh cholesky linalg_cholesky linalg_solve linalg_pinv linalg_norm linalg_vector_norm linalg_matrix_norm
    mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits
    cross_entropy_loss nll_loss nll_loss_nd nll_loss2d dequantize quantize_per_tensor quantize_per_channel
    quantize_per_tensor_dynamic int_repr fake_quantize_per_tensor_affine fake_quantize_per_channel_affine
    q_per_channel_scales q_per_channel_zero_points _autocast_to_full_precision _autocast_to_reduced_precision
    """
)
#: Whose sizes are those of the tensors or told.
_TOLD = words(
    """
    zeros ones full empty new_zeros new_ones new_full new_empty expand broadcast_to split_with_sizes
    unsafe_split_with_sizes
    """
)
#: The same, and some dimensions more: two, one a tensor of a list, as many as are told.
_MORE = words(
    """
    eye linspace logspace rand randn randint randperm normal uniform multinomial hann_window hamming_window
    blackman_window bartlett_window kaiser_window tensor as_tensor scalar_tensor _shape_as_tensor as_strided unfold
    unflatten view_as_real affine_grid_generator col2im meshgrid broadcast_tensors histc _native_multi_head_attention
    _transformer_encoder_layer_fwd _transform_bias_rescale_qkv
    """
)
#: Whose result has the dimensions of all tensors together.
_CROSSING = words("inner tensordot einsum outer ger addr")
#: Those that add a margin: twice the largest number they are told.
_WIDENING = words(
    """
    conv1d conv2d conv3d _convolution_mode max_pool1d max_pool2d max_pool3d max_pool1d_with_indices
    max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d pad constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d
    replication_pad2d fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2 fft_rfftn fft_ihfft
    fft_fftfreq fft_rfftfreq
    """
)
#: Those that multiply a size by a number they are told, a stride or a factor, and may add a window to it.
_SCALING = words(
    """
    convolution _convolution conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d slow_conv_transpose2d
    slow_conv_transpose3d slow_conv3d slow_conv_dilated2d slow_conv_dilated3d thnn_conv2d conv_depthwise3d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d
    upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa __upsample __upsample_bilinear
    __upsample_nearest __interpolate pixel_shuffle repeat tile stft istft fft_irfft fft_irfft2 fft_irfftn fft_hfft diag
    diag_embed diff reflection_pad3d replication_pad3d _pad_circular _pad_enum max_unpool2d max_unpool3d rnn_tanh
    rnn_relu
    """
)
#: Those that stand several tensors side by side; what they are one of, in a new dimension.
_JOINING = words("cat concat concatenate hstack vstack dstack column_stack row_stack block_diag")
_STACKING = words("stack pad_sequence")
_ADDING = words("add sub __range_length")
#: What is behind the name of an operator on quantized tensors that does something to values beside.
_BESIDE = re.compile(
    r"(_leaky_relu|(?<!leaky)_relu|_tanh|_dynamic|_fp16|_scalar|_byte|_4bit)+$|(?<=conv2d)_add(_relu)?$"
)
#: Properties that are small numbers, whatever they are of.
_PROPERTIES, _MOST_PROPERTY = words("dtype layout device get_device ScalarType"), 64
#: As many factors of two are more turns than there can be.
_MOST_FACTORS = 64


class Magnitude(NamedTuple):
    """What a value does not exceed.

    Attributes:
        largest: The number; of tensors their sizes, of a container the numbers and tensors in it.
        length: Of a list, a text or a dictionary, and of those in it.
        rank: How many dimensions tensors have.
    """

    largest: float = 0.0
    length: float = 0.0
    rank: float = 0.0


UNBOUNDED = Magnitude(math.inf, math.inf, math.inf)


def join(found: Iterable[Magnitude]) -> Magnitude:
    """Return what none of some values exceeds."""
    return Magnitude(*(max(parts) for parts in zip(Magnitude(), *found, strict=True)))


def magnitude(value: Any) -> Magnitude:
    """Return what a value of Python does not exceed."""
    if isinstance(value, torch.Tensor):
        return Magnitude(max((1, *value.shape)), 0, value.dim())
    if isinstance(value, bool | int | float | complex):
        return Magnitude(abs(value) if cmath.isfinite(value) else math.inf)
    if isinstance(value, str):
        return Magnitude(0, len(value))
    if isinstance(value, torch.ScriptObject):
        return _of_packed(value)
    parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    if not isinstance(parts, list | tuple):
        return Magnitude()
    return join([Magnitude(0, len(value)), *map(magnitude, parts)])


def _of_packed(value: Any) -> Magnitude:
    """Return what the weights of a quantized layer do not exceed, and what it pads and strides by."""
    told = [name for name in ("unpack", "stride", "padding", "output_padding", "dilation") if value._has_method(name)]
    return join(magnitude(getattr(value, name)()) for name in told)


def nodes(block: Any) -> Iterable[Any]:
    """Yield the nodes of a graph or block, those of nested blocks behind their own."""
    for node in block.nodes():
        yield node
        for child in node.blocks():
            yield from nodes(child)


def short_name(node: Any) -> str:
    """Return what an operator is called in its library."""
    return str(node.kind().partition("::")[2])


def type_name(value: Any) -> str:
    """Return the type of a value as TorchScript writes it."""
    return str(value.type().annotation_str)


def of_operator(node: Any, given: Sequence[tuple[Any, Magnitude]]) -> Magnitude:
    """Return what no output of an operator exceeds.

    Args:
        node: The operator.
        given: Its inputs, each with its magnitude.
    """
    short, first = short_name(node), given[0][1] if given else Magnitude()
    if short.endswith("_") and not short.endswith("__"):
        return first  # it writes to that; `turns` knows those that give it another shape
    if short in _PROPERTIES:
        return Magnitude(_MOST_PROPERTY)
    if short in ("size", "shape"):
        return Magnitude(first.largest, first.rank)
    if short == "len":
        return Magnitude(first.largest if type_name(given[0][0]) == "Tensor" else first.length)
    if short == "dim":
        return Magnitude(first.rank)
    if not _makes_tensors(node) or (short in _OF_FIRST and type_name(given[0][0]) != "Tensor"):
        return _of_numbers(node, given)
    if short in _HOLDING:
        return join(size for _, size in given)
    found = _of_tensors(node, given)
    return found._replace(largest=max(found.largest, 1.0))  # a number becomes one of many, too


def _of_tensors(node: Any, given: Sequence[tuple[Any, Magnitude]]) -> Magnitude:
    """Return what no tensor that an operator makes exceeds: without bound where no rule says it."""
    short = _BESIDE.sub("", short_name(node)) if node.kind().startswith("quantized::") else short_name(node)
    tensors = [size for value, size in given if "Tensor" in type_name(value)]
    largest, length, rank = join(tensors)
    told = join(size for value, size in given if "Tensor" not in type_name(value))
    if node.kind().startswith("quantized::"):
        largest = max(largest, told.largest)  # the weights are not among the tensors
    if short == "lstm":  # both directions' projections stand side by side; of what it reads, samples and steps are kept
        return Magnitude(max(largest, 2 * join(tensors[1:]).largest), rank=rank)
    if short == "flatten":
        return Magnitude(_flattened(largest, rank, *(value.toIValue() for value, _ in given[1:])), rank=max(rank, 1))
    if short in ("view", "reshape"):  # where one is left to be found it may be all of the tensor
        return Magnitude(told.largest if _is_counted(given[1][0]) else math.inf, rank=max(rank, told.length))
    if short in _TOLD:
        return Magnitude(max(largest, told.largest), max(length, told.length), max(rank, told.length))
    if short in _WIDENING:
        spatial = int(short[-2]) + 2 if short[-2].isdigit() and short[-1] == "d" else math.inf
        return Magnitude(largest + 2 * max(1.0, told.largest), rank=min(rank, spatial) or 1.0)
    if short in ("unsqueeze", "embedding"):
        return Magnitude(largest, rank=rank + 1)
    if short in _STACKING:
        return Magnitude(max(largest, length), rank=rank + 1)
    if short in _JOINING:
        return Magnitude(_product(largest, length), rank=rank + 3)
    if short in _CROSSING:
        return Magnitude(largest, rank=sum(size.rank * max(1.0, size.length) for size in tensors))
    if short in _SCALING:
        return Magnitude((largest + 1) * (2 * told.largest + 2), rank=rank + told.length + 2)
    if short in _MORE:
        most = max(largest, *told[:2], rank, 1) + 1
        return Magnitude(most, max(most, length), rank + told.length + length + 2)
    if short == "arange":
        return _of_arange(node, given)
    many = max(largest, *told[:2]) if any("List" in type_name(value) for value in node.outputs()) else 0.0
    return Magnitude(largest, many, rank) if _keeps(node, short) else UNBOUNDED


def _of_arange(node: Any, given: Sequence[tuple[Any, Magnitude]]) -> Magnitude:
    """Return what numbers from one to another come to, which may be of two signs; a step may be a billionth."""
    numbers = given[: 1 + node.schema().count("Scalar start") + node.schema().count("Scalar step")]
    if "step" in node.schema() and any(type_name(value) != "int" for value, _ in numbers):
        return UNBOUNDED
    return Magnitude(1 + sum(size.largest for _, size in numbers), rank=1)


def _flattened(largest: float, rank: float, start: int | None, end: int | None) -> float:
    """Return what a size does not exceed that some of a tensor's, from one to another, are laid together into."""
    if start is None or end is None:
        return math.inf
    together = end - start + 1 + (rank if start >= 0 > end else 0)
    if start < 0 <= end:
        together = rank
    return math.prod([max(largest, 1.0)] * max(1, int(min(together, _MOST_FACTORS))))


def _of_numbers(node: Any, given: Sequence[tuple[Any, Magnitude]]) -> Magnitude:
    """Return what no number or list that an operator makes exceeds: without bound where no rule says it."""
    short, sizes, kinds = short_name(node), [size for _, size in given], [type_name(value) for value, _ in given]
    if "Tensor" in kinds and not _makes_tensors(node):
        return UNBOUNDED  # what is in a tensor
    if short in ("Int", "Float") and kinds == ["str"]:
        return UNBOUNDED  # what a text says
    if short in _OF_FIRST:
        return join(sizes[:1])
    if short in _OF_ALL or short in _HOLDING:
        return join(sizes)
    if short in _ADDING:
        return Magnitude(*map(sum, zip(*sizes, strict=True)))
    if short == "mul":
        lists = [size for size in sizes if size.length]
        times = _product(*(size.largest for size in sizes if size not in lists))
        return lists[0]._replace(length=_product(lists[0].length, times)) if lists else Magnitude(times)
    if short == "rangelist":
        return Magnitude(sizes[0].largest, sizes[0].largest)
    if short == "__derive_index":
        return Magnitude(_product(*(1 + size.largest for size in sizes)))
    if short in ("remainder", "ceil", "floor", "round"):
        return Magnitude(sizes[-1].largest + 1)
    if short == "floordiv" and kinds == ["int", "int"]:
        return sizes[0]
    divided = short in ("div", "floordiv") and given[1][0].node().kind() == "prim::Constant" and sizes[1].largest >= 1
    return Magnitude(sizes[0].largest + (short == "floordiv")) if divided else UNBOUNDED


def _product(*numbers: float) -> float:
    """Return a product, that of nothing and infinity being nothing."""
    return math.prod(numbers) if all(numbers) else 0.0


def _makes_tensors(node: Any) -> bool:
    return any("Tensor" in type_name(value) for value in node.outputs())


def _keeps(node: Any, short: str) -> bool:
    """Say whether an operator makes nothing larger than the largest tensor it is given."""
    if short in _KEEPING or node.kind().startswith("prim::"):
        return short in _KEEPING
    overload = node.schema().partition("(")[0].partition(".")[2] or "default"
    same = getattr(torch.ops.aten, short, None)
    wanted = (overload,) if node.kind().startswith("aten::") else ("Tensor", "default")  # of what is not quantized
    return any(torch.Tag.pointwise in getattr(same, name).tags for name in wanted if hasattr(same, name))


def size_told(tensor: Any, dim: Any) -> Any:
    """Return the value that a size of a tensor was told to be, in this function; None where that is not seen."""
    node, place = tensor.node(), dim.toIValue() if dim.node().kind() == "prim::Constant" else None
    while place is not None:
        short, inputs = short_name(node), list(node.inputs())
        if short in ("view", "reshape"):
            told = _written(inputs[1])
            return told[place] if -len(told) <= place < len(told) and _is_positive(told[place]) else None
        order = [value.toIValue() for value in _written(inputs[1])] if short == "permute" else None
        if order and None not in order and -len(order) <= place < len(order):
            place = order[place]
        elif short != "contiguous":
            return None
        node = inputs[0].node()
    return None


def _is_counted(sizes: Any) -> bool:
    """Say whether sizes are written down and none of them is left to be found (-1)."""
    told = _written(sizes)
    return bool(told) and all(map(_is_positive, told))


def _written(numbers: Any) -> list[Any]:
    """Return the values in a list that is written where it is used, and changed nowhere; of any other list none."""
    made = numbers.node().kind() == "prim::ListConstruct" and len(numbers.uses()) == 1
    return list(numbers.node().inputs()) if made else []


def _is_positive(value: Any) -> bool:
    if value.node().kind() in ("aten::mul", "aten::add", "aten::floordiv"):
        return all(map(_is_positive, value.node().inputs()))
    if value.node().kind() == "prim::Constant":
        return bool(value.toIValue() >= 0)
    return value.node().kind() in ("aten::size", "aten::len", "aten::dim")
