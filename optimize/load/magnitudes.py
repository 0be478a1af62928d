"""What a value of TorchScript does not exceed: its magnitude, of each operator's result by what it is given.

Operators are told apart by what they do to sizes; what lays several together, or makes as many as data says, has no
bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from optimize import bounds
from optimize.load.operators import words

#: Whose result does not exceed what they are first given, and the largest of the tensors, and of all they are given.
_OF_FIRST = words(
    """
    TupleIndex TupleUnpack TupleSlice ListUnpack unchecked_cast unchecked_unwrap_optional annotate _unwrap_optional
    __getitem__ slice copy list sorted keys values items pop Size neg abs Int Float FloatImplicit
    IntImplicit ScalarImplicit floordiv data T mT H mH NumToTensor rangelist
    """
)
_OF_TENSORS = words(
    """
    linear matmul mm bmm addmm baddbmm mv dot einsum transpose permute t select narrow unbind chunk split squeeze
    contiguous clone to detach alias dropout softmax log_softmax layer_norm batch_norm instance_norm group_norm
    rms_norm embedding gather index_select masked_fill mean sum prod amax amin argmax argmin norm std var cumsum sort
    topk flip roll tril triu scaled_dot_product_attention lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell zeros_like ones_like full_like empty_like reshape_as view_as min max hardswish hardsigmoid hardtanh
    prelu glu
    """
)
_OF_ALL = words(
    """
    TupleConstruct min max get broadcast_shapes _infer_size zeros ones full empty new_zeros new_ones new_full new_empty
    expand expand_as broadcast_to split_with_sizes Uninitialized
    """
)
#: Those that add a margin: twice the largest number they are told.
_WIDENING = words(
    """
    conv1d conv2d conv3d max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d pad
    constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
    """
)
#: Those that multiply a size by a number they are told, a stride or a factor, and may add a window to it.
_SCALING = words(
    """
    convolution _convolution conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d slow_conv_transpose2d
    slow_conv_transpose3d slow_conv3d slow_conv_dilated2d slow_conv_dilated3d thnn_conv2d conv_depthwise3d
    conv_transpose1d_dynamic conv_transpose2d_dynamic conv_transpose3d_dynamic upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d _upsample_bilinear2d_aa
    _upsample_bicubic2d_aa _upsample_lanczos2d_aa __upsample __upsample_bilinear __upsample_nearest __interpolate
    pixel_shuffle repeat tile stft istft fft_irfft fft_irfft2 fft_irfftn fft_hfft diag_embed diff reflection_pad3d
    replication_pad3d _pad_circular _pad_enum max_unpool2d max_unpool3d
    """
)
#: Those that lay several sizes together, or make as many as data says: nothing is known of their result.
_MERGING = words(
    """
    ravel view_copy _unsafe_view index _unsafe_index masked_select nonzero nonzero_numpy argwhere where _unique2
    unique_consecutive unique_dim repeat_interleave im2col pixel_unshuffle diagflat kron cartesian_prod combinations
    tril_indices triu_indices vander linalg_vander one_hot bincount _pack_padded_sequence _pad_packed_sequence range
    quantized_lstm quantized_gru
    """
)
_JOINING = words("cat concat concatenate hstack vstack dstack column_stack row_stack block_diag cat_relu")
_ADDING = words("add sub __range_length")
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
        return Magnitude(max(value.shape, default=0), 0, value.dim())
    if isinstance(value, bool | int | float):
        return Magnitude(abs(value) if math.isfinite(value) else math.inf)
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
    of_tensors = _makes_tensors(node) and short not in _OF_FIRST
    return _of_tensors(node, given) if of_tensors else _of_numbers(node, given)


def _of_tensors(node: Any, given: Sequence[tuple[Any, Magnitude]]) -> Magnitude:
    """Return what no tensor that an operator makes exceeds."""
    short = short_name(node)
    largest, length, rank = join(size for value, size in given if "Tensor" in type_name(value))
    told = join(size for value, size in given if "Tensor" not in type_name(value))
    if short == "flatten":
        return Magnitude(_flattened(largest, rank, *(value.toIValue() for value, _ in given[1:])), rank=max(rank, 1))
    if node.kind().startswith("quantized::"):
        largest = max(largest, told.largest)  # the weights are not among the tensors
    if short in ("view", "reshape") and not _is_counted(given[1][0]):
        return Magnitude(math.inf, rank=max(rank, told.length))  # there may be one that is left to be found
    if short in (*_OF_ALL, "view", "reshape"):
        return Magnitude(max(largest, told.largest), max(length, told.length), max(rank, told.length))
    if short in _WIDENING:
        spatial = int(short[-2]) + 2 if short[-2].isdigit() else math.inf
        return Magnitude(largest + 2 * max(1.0, told.largest), rank=min(rank, spatial))
    if short in ("unsqueeze", "embedding"):
        return Magnitude(largest, rank=rank + 1)
    if short == "stack":
        return Magnitude(max(largest, length), rank=rank + 1)
    if short in _JOINING:
        return Magnitude(_product(largest, length), rank=rank + 2)
    many = largest if any("List" in type_name(value) for value in node.outputs()) else 0.0
    return Magnitude(largest, many, rank) if _keeps(node, short) else _of_others(node, given)


def _flattened(largest: float, rank: float, start: int | None, end: int | None) -> float:
    """Return what a size does not exceed that some of a tensor's, from one to another, are laid together into."""
    if start is None or end is None:
        return math.inf
    together = end - start + 1 + (rank if start >= 0 > end else 0)
    if start < 0 <= end:
        together = rank
    return math.prod([max(largest, 1.0)] * max(1, int(min(together, _MOST_FACTORS))))


def _of_others(node: Any, given: Sequence[tuple[Any, Magnitude]]) -> Magnitude:
    """Return what a tensor does not exceed whose sizes are counted as an input's: no operator here makes more of them.

    Torch has no limit of dimensions: there are as many as the tensors have together, as are told, and two.
    """
    short = short_name(node)
    told = join(size for value, size in given if "Tensor" not in type_name(value))
    tensors = [size for value, size in given if "Tensor" in type_name(value)]
    largest, length, rank = join(tensors)
    if short in ("tensordot", *_MERGING):
        rank = sum(size.rank for size in tensors)
    rank += told.length + length + 2
    if short in _MERGING or (short == "arange" and ".start_step" in node.schema()):  # a step may be a billionth
        return Magnitude(math.inf, math.inf, rank)
    largest = max(bounds.LOOPED_SIZE, largest, *told[:2])
    if short in _SCALING:
        largest = (largest + 1) * (2 * told.largest + 2)
    return Magnitude(largest, max(largest, length), rank)


def _of_numbers(node: Any, given: Sequence[tuple[Any, Magnitude]]) -> Magnitude:
    """Return what no number or list that an operator makes exceeds."""
    short, sizes = short_name(node), [size for _, size in given]
    if any(type_name(value) == "Tensor" for value, _ in given) and not _makes_tensors(node):
        return UNBOUNDED  # what is in a tensor
    if short in _OF_FIRST:
        return join(sizes[:1])
    if short in _OF_ALL:
        return join(sizes)
    if short in _ADDING:
        return Magnitude(*map(sum, zip(*sizes, strict=True)))
    if short == "mul":
        lists = [size for size in sizes if size.length]
        times = _product(*(size.largest for size in sizes if size not in lists))
        return lists[0]._replace(length=_product(lists[0].length, times)) if lists else Magnitude(times)
    if short == "__derive_index":
        return Magnitude(_product(*(1 + size.largest for size in sizes)))
    if short in ("remainder", "ceil", "floor", "round"):
        return Magnitude(sizes[-1].largest + 1)
    divided = short == "div" and given[1][0].node().kind() == "prim::Constant" and sizes[1].largest >= 1
    return sizes[0] if divided else UNBOUNDED


def _product(*numbers: float) -> float:
    """Return a product, that of nothing and infinity being nothing."""
    return math.prod(numbers) if all(numbers) else 0.0


def _makes_tensors(node: Any) -> bool:
    return any("Tensor" in type_name(value) for value in node.outputs())


def _keeps(node: Any, short: str) -> bool:
    """Say whether an operator makes nothing larger than the largest tensor it is given."""
    if short in _OF_TENSORS or not node.kind().startswith("aten::"):
        return short in _OF_TENSORS
    overload = node.schema().partition("(")[0].partition(".")[2] or "default"
    found = getattr(getattr(torch.ops.aten, short, None), overload, None)
    return found is not None and torch.Tag.pointwise in found.tags


def size_told(tensor: Any, dim: Any) -> Any:
    """Return the value that a size of a tensor was told to be, in this function; None where that is not seen."""
    node, place = tensor.node(), dim.toIValue() if dim.node().kind() == "prim::Constant" else None
    while place is not None:
        short, inputs = short_name(node), list(node.inputs())
        if short in ("view", "reshape"):
            told = list(inputs[1].node().inputs()) if inputs[1].node().kind() == "prim::ListConstruct" else []
            return told[place] if -len(told) <= place < len(told) and _is_positive(told[place]) else None
        order = [value.toIValue() for value in inputs[1].node().inputs()] if short == "permute" else None
        if short == "permute" and order and None not in order and -len(order) <= place < len(order):
            place = order[place]
        elif short != "contiguous":
            return None
        node = inputs[0].node()
    return None


def _is_counted(sizes: Any) -> bool:
    """Say whether sizes are written down and none of them is left to be found (-1)."""
    made = sizes.node().kind() == "prim::ListConstruct"
    return made and all(_is_positive(value) for value in sizes.node().inputs())


def _is_positive(value: Any) -> bool:
    if value.node().kind() in ("aten::mul", "aten::add", "aten::floordiv"):
        return all(map(_is_positive, value.node().inputs()))
    if value.node().kind() == "prim::Constant":
        return bool(value.toIValue() >= 0)
    return value.node().kind() in ("aten::size", "aten::len", "aten::dim")
