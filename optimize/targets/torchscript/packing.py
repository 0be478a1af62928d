"""Weights of one layer, packed for the integer kernels of torch, and proof that the kernel computes them right here.

Two traps of the ``x86`` engine (torch 2.13, oneDNN 3.12), both found by comparing with float arithmetic:

* products of pairs are added in 16 bits on hosts without VNNI, and everywhere in convolutions of more than 100 groups,
  which go to FBGEMM: 255 * 127 * 2 does not fit, 255 * 63 * 2 does, so those weights get 7 bits;
* transposed convolutions return garbage for some channel counts; ``check`` finds them and they stay in float.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from optimize import graph
from optimize.errors import Refused
from optimize.graph import aten
from optimize.quantization.numerics import TensorFormat, weight_scales

quantized = torch.ops.quantized

ACTIVATION = TensorFormat("uint8", symmetric=False)
#: Beyond this many groups the x86 engine leaves oneDNN for FBGEMM, whose grouped kernels accumulate in 16 bits.
_MOST_GROUPS = 100
_CONVOLUTION = ("stride", "padding", "dilation", "groups")
_TRANSPOSED = ("stride", "padding", "output_padding", "dilation", "groups")


@dataclass(frozen=True)
class IntegerLayer:
    """How one kind of weighted layer runs in integers.

    Attributes:
        prepack: Packs ``(weight, bias, *geometry)``.
        kernel: Computes ``(input, packed, scale, zero_point)``.
        geometry: Names of the node's arguments that ``prepack`` takes as well.
        per_channel: Whether the kernel takes one weight scale an output channel.
    """

    prepack: Any
    kernel: Any
    geometry: tuple[str, ...] = _CONVOLUTION
    per_channel: bool = True


LAYERS: dict[Any, IntegerLayer] = {
    aten.conv1d.default: IntegerLayer(quantized.conv1d_prepack.default, quantized.conv1d.default),
    aten.conv2d.default: IntegerLayer(quantized.conv2d_prepack.default, quantized.conv2d.new),
    aten.conv3d.default: IntegerLayer(quantized.conv3d_prepack.default, quantized.conv3d.new),
    aten.conv_transpose1d.default: IntegerLayer(
        quantized.conv_transpose1d_prepack.default, quantized.conv_transpose1d.default, _TRANSPOSED, False
    ),
    aten.conv_transpose2d.input: IntegerLayer(
        quantized.conv_transpose2d_prepack.default, quantized.conv_transpose2d.default, _TRANSPOSED, False
    ),
    aten.conv_transpose3d.input: IntegerLayer(
        quantized.conv_transpose3d_prepack.default, quantized.conv_transpose3d.default, _TRANSPOSED, False
    ),
    aten.linear.default: IntegerLayer(quantized.linear_prepack.default, quantized.linear.default, ()),
}


def has_vnni() -> bool:
    """Say whether this CPU adds four products at once in 32 bits (AVX512-VNNI)."""
    return torch.cpu._is_vnni_supported()


def weight_format(*, per_channel: bool = True, groups: int = 1) -> TensorFormat:
    """Return how this host's kernels want a weight: symmetric, in 7 bits where 16-bit sums would overflow."""
    bits = 8 if has_vnni() and groups <= _MOST_GROUPS else 7
    return TensorFormat("int8", symmetric=True, per_channel=per_channel, bits=bits)


def pack(module: fx.GraphModule, node: fx.Node) -> Any:
    """Quantize and pack the weights of a convolution, transposed convolution or linear layer.

    Raises:
        Refused: The layer has no integer kernel here; the message is the reason, without a full stop.
    """
    layer = LAYERS[node.target]
    weight, bias = (graph.constant(module, graph.argument(node, name)) for name in ("weight", "bias"))
    if weight is None or (bias is None and graph.argument(node, "bias") is not None):
        raise Refused("its weight is computed at run time")
    if weight.dtype is not torch.float32:
        raise Refused(f"its weight is {weight.dtype}, not float32")
    geometry = [_per_dimension(graph.argument(node, name), weight.dim() - 2) for name in layer.geometry]
    groups = graph.argument(node, "groups") if layer.geometry else 1
    integers = quantize_weight(weight, weight_format(per_channel=layer.per_channel, groups=groups))
    try:
        packed = layer.prepack(integers, bias, *geometry)
        check(node, packed, integers.dequantize(), bias)
    except RuntimeError as error:
        raise Refused(str(error).splitlines()[0].rstrip(".")) from error
    return packed


def quantize_weight(weight: torch.Tensor, form: TensorFormat) -> torch.Tensor:
    """Return a quantized copy of a weight ``[C_out, ...]`` (per tensor: any layout)."""
    scales = torch.from_numpy(weight_scales(weight.numpy(), form, axis=0))
    if not form.per_channel:
        return torch.quantize_per_tensor(weight, float(scales[0]), 0, torch.qint8)
    return torch.quantize_per_channel(weight, scales, torch.zeros_like(scales, dtype=torch.int64), 0, torch.qint8)


def check(node: fx.Node, packed: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Compare the integer kernel with float arithmetic on the extremes of uint8, at the layer's own input size.

    Raises:
        Refused: It is more than one step of the output off (rounding alone is half a step).
    """
    shape = graph.argument(node, "input").meta["val"].shape
    sizes = [size if isinstance(size, int) else (64 if dim else 1) for dim, size in enumerate(shape)]
    levels = np.random.default_rng(0).choice(np.array([0, 255], np.uint8), sizes)
    integers = torch._make_per_tensor_quantized_tensor(torch.from_numpy(levels), 1 / 255, 128)
    values: Callable[..., torch.Tensor] = node.target  # type: ignore[assignment]
    want = values(integers.dequantize(), weight, bias, *node.args[3:])
    scale = max(float(want.max() - want.min()) / 255, 1e-9)
    zero_point = int(min(max(round(-float(want.min()) / scale), 0), 255))
    got = LAYERS[node.target].kernel(integers, packed, scale, zero_point).dequantize()
    low, high = -zero_point * scale, (255 - zero_point) * scale
    if float((got - want.clamp(low, high)).abs().max()) > scale:
        raise Refused("the integer kernel of this torch build returns wrong values for this shape")


def _per_dimension(value: Any, dims: int) -> Any:
    """Write a one-element stride, padding or dilation once a dimension."""
    return list(value) * dims if isinstance(value, list | tuple) and len(value) == 1 else value
