"""Weight-only INT8 and INT4: layers that read integers, as TorchScript modules that need nothing but torch to load.

Linear layers multiply in bfloat16 (``aten::_weight_int8pack_mm``, ``aten::_weight_int4pack_mm_for_cpu``: their float32
forms run at a tenth of float's speed), which adds noise of about -50 dB; embeddings are plain operators and exact.
Weights of more than 4 bits in blocks have no kernel: the file holds their integers, whoever loads it floats. On one
thread, against float: at one row 1 to 2 times its speed in 8 bits and 1 to 5 in 4 bits (the larger the weight, the
more), at 128 rows 0.7 to 0.8 and 0.9 to 1.5.

Three traps of torch 2.13: the 8-bit kernel reads past rows that are no multiple of 32 and crashes, so rows are padded;
the 4-bit kernel takes multiples of 16 outputs alone; and its packed layout is that of one instruction set, so that a
file packed on AVX-512 would answer garbage on AVX2. So the file holds plain integers and packs them when it is loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from optimize import graph
from optimize.errors import Refused
from optimize.graph import aten
from optimize.program import Program
from optimize.quantization.blocks import read_blocks
from optimize.targets.base import FloatLayer
from optimize.targets.packaging import convert_layers, planned_floats

_COLUMNS = 32
_ROWS = 16
#: Share of a product's energy that the rounding of bfloat16 may take; it takes 1e-5, in short rows up to 1e-3.
_LARGEST_ERROR = 1e-2


class Int8Linear(nn.Module):
    """``y = x W' + b`` with int8 weights and one scale an output.

    Args:
        integers: int8 ``[outputs, columns]``; columns a multiple of 32, zeros behind the last input.
        scales: float32 ``[outputs]``.
        bias: float32 ``[outputs]``.
    """

    def __init__(self, integers: Tensor, scales: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.integers = integers
        self.scales = scales
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., inputs]`` to ``[..., outputs]``."""
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        rows = functional.pad(rows, [0, self.integers.shape[1] - x.shape[-1]])
        product = torch._weight_int8pack_mm(rows, self.integers, self.scales.to(torch.bfloat16))
        return (product.to(torch.float32) + self.bias).reshape(x.shape[:-1] + self.bias.shape)


class Int4Linear(nn.Module):
    """``y = x W' + b`` with 4-bit weights in blocks, packed for the CPU of the process that loads the file.

    Args:
        nibbles: uint8 ``[rows, columns / 2]``, two levels of 0 to 15 in each; rows a multiple of 16.
        scales: float32 ``[rows, blocks]``.
        bias: float32 ``[outputs]``.
    """

    def __init__(self, nibbles: Tensor, scales: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.nibbles = nibbles
        self.scales = scales
        self.bias = bias
        self.packed, self.steps = self.pack(nibbles, scales)

    @torch.jit.export
    def pack(self, nibbles: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights in the layout of this CPU's kernel, and its scales with zero points."""
        levels = torch.stack([nibbles & 15, nibbles >> 4], -1).flatten(1)
        steps = scales.t().to(torch.bfloat16)
        packed = torch._convert_weight_to_int4pack_for_cpu(levels.to(torch.int32), 1)
        return packed, torch.stack([steps, torch.zeros_like(steps)], -1)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., inputs]`` to ``[..., outputs]``."""
        columns = 2 * self.nibbles.shape[1]
        rows = functional.pad(x.reshape(-1, x.shape[-1]).to(torch.bfloat16), [0, columns - x.shape[-1]])
        product = torch._weight_int4pack_mm_for_cpu(rows, self.packed, columns // self.scales.shape[1], self.steps)
        product = product[:, : self.bias.shape[0]].to(torch.float32)
        return (product + self.bias).reshape(x.shape[:-1] + self.bias.shape)

    @torch.jit.export
    def __getstate__(self) -> tuple[Tensor, Tensor, Tensor, bool]:
        return self.nibbles, self.scales, self.bias, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[Tensor, Tensor, Tensor, bool]) -> None:
        self.nibbles, self.scales, self.bias, self.training = state
        self.packed, self.steps = self.pack(self.nibbles, self.scales)


class BlockLinear(nn.Module):
    """``y = x W' + b`` with weights of more than 4 bits in blocks, which no kernel multiplies: floats once loaded.

    Args:
        integers: int8 ``[outputs, columns]``, zeros behind the last input.
        scales: bfloat16 or float32 ``[outputs, blocks]``.
        bias: float32 ``[outputs]``.
        width: Columns that are not padding.
    """

    def __init__(self, integers: Tensor, scales: Tensor, bias: Tensor, width: int) -> None:
        super().__init__()
        self.integers = integers
        self.scales = scales
        self.bias = bias
        self.width = width
        self.weight = self.unpack(integers, scales, width)

    @torch.jit.export
    def unpack(self, integers: Tensor, scales: Tensor, width: int) -> Tensor:
        """Return the weights, float32 ``[outputs, inputs]``."""
        blocks = integers.unflatten(-1, [scales.shape[1], -1])
        return (blocks * scales.to(torch.float32).unsqueeze(-1)).flatten(1)[:, :width].contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., inputs]`` to ``[..., outputs]``."""
        return functional.linear(x, self.weight, self.bias)

    @torch.jit.export
    def __getstate__(self) -> tuple[Tensor, Tensor, Tensor, int, bool]:
        return self.integers, self.scales, self.bias, self.width, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[Tensor, Tensor, Tensor, int, bool]) -> None:
        self.integers, self.scales, self.bias, self.width, self.training = state
        self.weight = self.unpack(self.integers, self.scales, self.width)


class IntegerEmbedding(nn.Module):
    """Rows of an integer table, dequantized after they are taken.

    Args:
        table: int8 ``[rows, columns]``, or uint8 ``[rows, columns / 2]`` with two levels of 0 to 15 in each.
        scales: float32 ``[rows, blocks]``.
        width: Columns that are not padding.
    """

    def __init__(self, table: Tensor, scales: Tensor, width: int) -> None:
        super().__init__()
        self.table = table
        self.scales = scales
        self.width = width

    def forward(self, indices: Tensor) -> Tensor:
        """Map int64 ``[...]`` to ``[..., width]``."""
        rows = functional.embedding(indices, self.table)
        if rows.dtype == torch.uint8:
            rows = torch.stack([rows & 15, rows >> 4], -1).flatten(-2).to(torch.int8) - 8
        steps = functional.embedding(indices, self.scales).to(torch.float32).unsqueeze(-1)
        blocks = rows.unflatten(-1, [self.scales.shape[1], -1])
        return (blocks * steps).flatten(-2)[..., : self.width]


def pack_weights(program: Program) -> tuple[dict[fx.Node, nn.Module], tuple[FloatLayer, ...]]:
    """Make the modules that stand for the layers of a plan for weights alone; a shared weight is held once.

    Returns:
        The module of each layer, and what stays in float, with the reason.
    """
    plan = program.plan
    tables: dict[str, tuple[Tensor, Tensor]] = {}

    def convert(node: fx.Node) -> nn.Module:
        source = graph.argument(node, "weight")
        weight = graph.constant(program.graph_module, source)
        assert weight is not None
        path = str(source.target) if source.op == "get_attr" else node.name
        if path not in tables:
            tables[path] = _table(weight, plan.bits_of(node.name), plan.group)
        return _module(program, node, weight, tables[path])

    nodes = graph.calls(program.graph, aten.linear.default, aten.embedding.default)
    modules, left = convert_layers((node for node in nodes if node.name in plan.layers), convert)
    return modules, (*left, *planned_floats(program))


def _table(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Return a weight ``[rows, columns]`` that was rounded to blocks as the modules hold it.

    Returns:
        Integers, int8 ``[rows, columns]`` with columns a multiple of 32, or uint8 ``[rows, columns / 2]`` with two
        levels of 0 to 15 in each and rows a multiple of 16; and their scales, ``[rows, blocks]``.
    """
    blocks = read_blocks(weight, bits, group)
    if blocks.kernel_bits == 8:
        integers = blocks.integers.flatten(1)
        return functional.pad(integers, [0, -integers.shape[1] % _COLUMNS]), blocks.short
    blocks = blocks.resized()
    rows = [0, 0, 0, -weight.shape[0] % _ROWS]
    return functional.pad(blocks.stored().flatten(1), rows), functional.pad(blocks.short, rows)


def _module(program: Program, node: fx.Node, weight: Tensor, table: tuple[Tensor, Tensor]) -> nn.Module:
    """Return the module of a layer.

    Raises:
        Refused: torch has no kernel for it, or one that is wrong here; the message is the reason, without a full stop.
    """
    integers, scales = table
    if node.target is aten.embedding.default:
        return IntegerEmbedding(integers, scales, weight.shape[1])
    given = graph.argument(node, "bias")
    bias = torch.zeros(weight.shape[0]) if given is None else graph.constant(program.graph_module, given)
    if bias is None:
        raise Refused("its bias is computed at run time")
    if integers.dtype is torch.uint8:
        module: nn.Module = Int4Linear(integers, scales, bias)
    elif scales.shape[1] == 1:
        module = Int8Linear(integers, scales[:, 0].float(), bias)
    else:
        module = BlockLinear(integers, scales, bias, weight.shape[1])
    x = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0))
    want = functional.linear(x, weight)
    error = (module(x) - bias - want).double().square().sum()
    if not error <= want.double().square().sum() * _LARGEST_ERROR:  # NaN is neither
        raise Refused("the kernel of this torch build returns wrong values for this shape")
    return module
