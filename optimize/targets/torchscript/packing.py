"""Weights of one layer, packed for the integer kernels of torch, and proof that the kernel computes them right here.

Two traps of the ``x86`` engine (torch 2.13, oneDNN 3.12), both found by comparing with float arithmetic:

* products of pairs are added in 16 bits on hosts without VNNI, and everywhere in convolutions of more than 100 groups,
  which go to FBGEMM: such weights leave room for the sums (``quantization/grid.py``);
* transposed convolutions return garbage for some channel counts; ``check`` finds them and they stay in float.

Two slow paths of the same engine are avoided:

* FBGEMM has fast kernels for few geometries (``_FAST_SIDES``) and is up to 170 times slower at most others, so other
  convolutions of more than 100 groups are packed in parts that stay on oneDNN;
* padding integers costs more than the depthwise convolution after it (5 ms against 0.3 ms at 96 x 112 x 112), so an
  uneven zero padding, as "same" with stride 2 is written in TensorFlow, becomes zeros around the kernel: the same
  sums, hence the same integers.

Layers that FBGEMM's fast kernels cover stay there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx

from optimize import graph, ops
from optimize.errors import Refused, first_line
from optimize.graph import aten
from optimize.plan import Quantization
from optimize.quantization.grid import quantize_weight, weight_scales
from optimize.quantization.numerics import USUAL, TensorFormat, planned
from optimize.quantization.weights import read_parameters

quantized = torch.ops.quantized

#: The best engine first. A process that imports torch begins with the first of them that the host has.
ENGINES = ("x86", "fbgemm", "onednn", "qnnpack")

#: Beyond this many groups the x86 engine leaves oneDNN for FBGEMM, whose grouped kernels accumulate in 16 bits.
_MOST_GROUPS = 100
#: Sides of the kernels that FBGEMM computes fast, by (spatial dimensions, channels a group).
_FAST_SIDES = {(2, 1): (3, 5, 7), (2, 2): (3,), (2, 4): (3,), (3, 1): (3,)}
_CONVOLUTION = ("stride", "padding", "dilation", "groups")
_TRANSPOSED = ("stride", "padding", "output_padding", "dilation", "groups")


@dataclass(frozen=True)
class PackedLayer:
    """The weights of one layer in the form its integer kernel takes.

    Attributes:
        source: The value it reads: the layer's input, or what precedes the zero padding that its weights absorb.
        kernel: Computes ``(input, packed, scale, zero_point)``.
        weights: The packed weights of each part.
        bounds: Input channels ``bounds[i]`` to ``bounds[i + 1]`` are read by part ``i``; empty for a single part.
    """

    source: fx.Node
    kernel: Any
    weights: tuple[Any, ...]
    bounds: tuple[int, ...] = ()

    def apply(
        self, call: Callable[[Any, tuple[Any, ...]], Any], x: Any, weights: Sequence[Any], scale: float, zero_point: int
    ) -> Any:
        """Compute the layer, or write it into a graph: ``call`` runs, or records, an operator on its arguments."""
        if not self.bounds:
            return call(self.kernel, (x, weights[0], scale, zero_point))
        slices = [call(aten.slice.Tensor, (x, 1, start, end)) for start, end in pairwise(self.bounds)]
        parts = [
            call(self.kernel, (part, *rest, scale, zero_point)) for part, *rest in zip(slices, weights, strict=True)
        ]
        return call(quantized.cat.default, (parts, 1, scale, zero_point))


#: What packs ``(weight, bias, *geometry)`` of a layer, and what computes ``(input, packed, scale, zero_point)``.
LAYERS: dict[Any, tuple[Any, Any]] = {
    aten.conv1d.default: (quantized.conv1d_prepack.default, quantized.conv1d.default),
    aten.conv2d.default: (quantized.conv2d_prepack.default, quantized.conv2d.new),
    aten.conv3d.default: (quantized.conv3d_prepack.default, quantized.conv3d.new),
    aten.conv_transpose1d.default: (quantized.conv_transpose1d_prepack.default, quantized.conv_transpose1d.default),
    aten.conv_transpose2d.input: (quantized.conv_transpose2d_prepack.default, quantized.conv_transpose2d.default),
    aten.conv_transpose3d.input: (quantized.conv_transpose3d_prepack.default, quantized.conv_transpose3d.default),
    aten.linear.default: (quantized.linear_prepack.default, quantized.linear.default),
}


@contextmanager
def fresh_engine() -> Iterator[None]:
    """Let torch's integer kernels be those of a fresh process, whatever this one was left with.

    ``torch.ao.quantization`` examples set ``torch.backends.quantized.engine`` and leave it set; weights packed for
    another engine than the one that the file meets lose 3 dB on a ViT.
    """
    before = torch.backends.quantized.engine
    has = torch.backends.quantized.supported_engines
    torch.backends.quantized.engine = next((name for name in ENGINES if name in has), before)
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


def weight_format(plan: Quantization, layer: str = "", *, per_channel: bool = True, groups: int = 1) -> TensorFormat:
    """Return how kernels want a weight: FBGEMM adds pairs on every processor, so layers that go there leave room."""
    form = planned(USUAL.weight, plan, layer)
    return dataclasses.replace(form, per_channel=per_channel, pairs=form.pairs or groups > _MOST_GROUPS)


def pack(module: fx.GraphModule, node: fx.Node, plan: Quantization) -> PackedLayer:
    """Quantize and pack the weights of a convolution, transposed convolution or linear layer.

    Raises:
        Refused: The layer has no integer kernel here; the message is the reason, without a full stop.
    """
    is_transposed = node.target in ops.TRANSPOSED_CONVOLUTIONS
    names = () if node.target is aten.linear.default else _TRANSPOSED if is_transposed else _CONVOLUTION
    weight, bias = read_parameters(module, node)
    geometry = {name: _per_dimension(graph.argument(node, name), weight.dim() - 2) for name in names}
    source, kernel = graph.argument(node, "input"), weight
    if (absorbed := _absorb(node, weight, geometry)) is not None:
        source, kernel, geometry["padding"] = source.args[0], absorbed, [absorbed.shape[2] // 2] * 2
    groups = _part_groups(kernel.shape, geometry) if names is _CONVOLUTION else [geometry.get("groups", 1)]
    form = weight_format(plan, node.name, per_channel=not is_transposed, groups=max(groups))
    try:
        steps = [weight_scales(each, form, ops.output_axis(node)) for each in (kernel, weight)]
        stored, plain = (make_quantized(each, form, torch.maximum(*steps)) for each in (kernel, weight))
        packed = _pack_parts(LAYERS[node.target], source, stored, bias, geometry, groups)
        check(node, packed, plain.dequantize(), bias)
    except RuntimeError as error:
        raise Refused(first_line(error).rstrip(".")) from error
    return packed


def _pack_parts(
    kernels: tuple[Any, Any],
    source: fx.Node,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    geometry: dict[str, Any],
    groups: list[int],
) -> PackedLayer:
    """Pack a quantized weight in parts of so many groups each."""
    prepack, kernel = kernels
    if len(groups) == 1:
        return PackedLayer(source, kernel, (prepack(weight, bias, *geometry.values()),))
    ends = np.cumsum([0, *groups])
    outputs = (ends * (weight.shape[0] // geometry["groups"])).tolist()
    packed = [
        prepack(weight[start:end], None if bias is None else bias[start:end], *{**geometry, "groups": n}.values())
        for (start, end), n in zip(pairwise(outputs), groups, strict=True)
    ]
    return PackedLayer(source, kernel, tuple(packed), tuple((ends * weight.shape[1]).tolist()))


def _part_groups(shape: torch.Size, geometry: dict[str, Any]) -> list[int]:
    """Return the groups of each part of a convolution: one part where its kernel is fast, else at most 100 each."""
    groups = geometry["groups"]
    if groups <= _MOST_GROUPS or _is_fast_beyond(shape, geometry):
        return [groups]
    return [len(part) for part in np.array_split(np.arange(groups), -(-groups // _MOST_GROUPS))]


def _is_fast_beyond(shape: torch.Size, geometry: dict[str, Any]) -> bool:
    """Say whether FBGEMM has a fast kernel for a convolution of more than 100 groups (measured with torch 2.13)."""
    outputs, per_group, side, *_ = shape
    return (
        side in _FAST_SIDES.get((len(shape) - 2, per_group), ())
        and outputs == per_group * geometry["groups"]
        and geometry["groups"] % 8 == 0
        and set(shape[2:]) == {side}
        and set(geometry["padding"]) == {side // 2}
        and set(geometry["dilation"]) == {1}
        and set(geometry["stride"]) in ({1}, {2})
    )


def make_quantized(weight: torch.Tensor, form: TensorFormat, least: torch.Tensor | None = None) -> torch.Tensor:
    """Return a quantized copy of a weight ``[C_out, ...]`` (per tensor: any layout) of steps no smaller than these."""
    axis = 0 if form.per_channel else 1  # transposed convolutions alone have one step for all
    integers, scales = quantize_weight(weight, form, axis, least=least)
    if not form.per_channel:
        return torch._make_per_tensor_quantized_tensor(integers, float(scales[0]), 0)
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    return torch._make_per_channel_quantized_tensor(integers, scales.double(), zeros, 0)


def _absorb(node: fx.Node, weight: torch.Tensor, geometry: dict[str, Any]) -> torch.Tensor | None:
    """Return the kernel of a depthwise convolution with zeros in place of the zero padding before it.

    Padded by half its side all around, the larger kernel has to begin to read where the padding began. None where that
    takes a side beyond 7 or gives another size.
    """
    pad = graph.argument(node, "input")
    if weight.dim() != 4 or weight.shape[:2] != (geometry.get("groups"), 1) or not _pads_planes(pad):
        return None
    before = [first + own for first, own in zip(graph.argument(pad, "pad")[2::-2], geometry["padding"], strict=True)]
    shifts = [side - 1 - 2 * zeros for side, zeros in zip(weight.shape[2:], before, strict=True)]
    side = max(size + abs(shift) for size, shift in zip(weight.shape[2:], shifts, strict=True))
    around = [side - size for size in weight.shape[2:]]
    sizes = zip(pad.args[0].meta["val"].shape[-2:], node.meta["val"].shape[-2:], geometry["stride"], strict=True)
    same = all(isinstance(read, int) and (read - 1) // step + 1 == written for read, written, step in sizes)
    if not same or side not in (3, 5, 7) or set(geometry["dilation"]) != {1}:
        return None
    ends = [((zeros + shift) // 2, (zeros - shift) // 2) for zeros, shift in zip(around, shifts, strict=True)]
    return F.pad(weight, (*ends[1], *ends[0]))


def _pads_planes(node: fx.Node) -> bool:
    """Say whether a node adds zeros around planes, for one reader."""
    if not ops.is_zero_pad(node) or len(node.users) != 1:
        return False
    amounts = graph.argument(node, "pad")
    return len(amounts) == 4 and min(amounts) >= 0


def check(node: fx.Node, packed: PackedLayer, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Compare the integer kernel with float arithmetic on the extremes of uint8, at the layer's own input size.

    Raises:
        Refused: It is more than one step of the output off (rounding alone is half a step).
    """
    shape = packed.source.meta["val"].shape
    sizes = [size if isinstance(size, int) else (64 if dim else 1) for dim, size in enumerate(shape)]
    levels = np.random.default_rng(0).choice(np.array([0, 255], np.uint8), sizes)
    integers = torch._make_per_tensor_quantized_tensor(torch.from_numpy(levels), 1 / 255, 128)
    values: Callable[..., torch.Tensor] = node.target  # type: ignore[assignment]
    floats = integers.dequantize()
    if packed.source is not (pad := graph.argument(node, "input")):
        floats = F.pad(floats, graph.argument(pad, "pad"))
    want = values(floats, weight, bias, *node.args[3:])
    scale = max(float(want.max() - want.min()) / 255, 1e-9)
    zero_point = int(min(max(round(-float(want.min()) / scale), 0), 255))
    got = packed.apply(lambda run, values: run(*values), integers, packed.weights, scale, zero_point).dequantize()
    low, high = -zero_point * scale, (255 - zero_point) * scale
    if float((got - want.clamp(low, high)).abs().max()) > scale:
        raise Refused("the integer kernel of this torch build returns wrong values for this shape")


def _per_dimension(value: Any, dims: int) -> Any:
    """Write a one-element stride, padding or dilation once a dimension."""
    return list(value) * dims if isinstance(value, list | tuple) and len(value) == 1 else value
