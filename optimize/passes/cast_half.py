"""Half precision: casts written into the graph, with what must stay in float32 left there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from optimize import graph
from optimize.errors import Refused
from optimize.graph import aten
from optimize.passes.base import Exactness, Outcome, Pass, Rewrite, Skip, Stage
from optimize.program import Program, tensor_value
from optimize.quantization.calibrate import learn_ranges
from optimize.quantization.numerics import TensorFormat
from optimize.quantization.plan import Range
from optimize.registry import register_pass

#: Lose precision or overflow in half by what they compute: exponentials, logarithms, normalisations, long sums.
_PRECISE = {
    "softmax", "_softmax", "log_softmax", "_log_softmax", "layer_norm", "native_layer_norm", "group_norm", "rms_norm",
    "batch_norm", "instance_norm", "exp", "expm1", "log", "log10", "log2", "log1p", "pow", "rsqrt", "reciprocal", "sum",
    "prod", "cumsum", "cumprod", "var", "std", "norm", "linalg_vector_norm", "softplus", "erfinv", "acos", "asin",
    "cosh", "sinh", "tan", "lstm", "gru", "upsample_bilinear2d", "upsample_bicubic2d",
}  # fmt: skip
#: Make a value of a stated dtype: their dtype argument decides, not ours.
_TYPED = {
    "zeros", "ones", "full", "arange", "empty", "_to_copy", "to", "zeros_like", "ones_like", "full_like",
    "scalar_tensor",
}  # fmt: skip
#: Move or select values without arithmetic: follow their input, so that casts stay few.
_NEUTRAL = {
    "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "flatten", "slice", "select", "expand",
    "cat", "stack", "split", "split_with_sizes", "chunk", "relu", "max_pool1d", "max_pool2d", "max_pool3d",
    "getitem", "index_select", "constant_pad_nd", "pad", "clamp", "hardtanh", "upsample_nearest2d", "where",
    "masked_fill", "repeat", "gather",
}  # fmt: skip


@dataclass(frozen=True)
class _CastHalf(Pass):
    """Cast a program to a 16-bit float type, keeping float32 where 16 bits do not hold the values."""

    stage: ClassVar[Stage] = Stage.PRECISION
    exactness: ClassVar[Exactness] = Exactness.ROUNDING
    dtype: ClassVar[torch.dtype]

    def rewrite(self, program: Program) -> Outcome:
        """Assign a precision to every call, then write the casts between them."""
        if program.quantization is not None:
            raise Refused(f"{self.name} cannot follow quantization: the integer layers keep their own precision.")
        if _is_cast_already(program):
            return Outcome(notes=("The program holds 16-bit values already.",))
        kept = dict(_kept(program, self.dtype))
        halves = [node for node in program.graph.nodes if _is_float_call(node) and node not in kept]
        halves = _follow_inputs(program, set(halves))
        layers = [
            node for node in halves if graph.is_call(node, *graph.WEIGHTED, aten.matmul.default, aten.bmm.default)
        ]
        if not halves:
            return Outcome(skips=tuple(_skip(node, reason) for node, reason in kept.items()))
        _write_casts(program, set(halves), self.dtype)
        short = str(self.dtype).removeprefix("torch.")
        rewrites = tuple(Rewrite(graph.origin(node), f"{graph.op_name(node)} to {short}") for node in layers or halves)
        notes = (f"{len(halves)} calls in {short}, {len(kept)} kept in float32; inputs and outputs stay float32.",)
        return Outcome(rewrites, tuple(_skip(node, reason) for node, reason in kept.items()), notes)


@register_pass
@dataclass(frozen=True)
class CastFP16(_CastHalf):
    """Cast to float16 with explicit casts in the graph, keeping in float32 what would overflow or lose precision.

    Kept in float32, each with its reason: exponentials, logarithms, normalisations, long sums, recurrent layers, and
    every value that leaves float16's range (65504) on the example inputs. Inputs and outputs of the program stay
    float32. Run it after ``FuseConvBN``: values before a BatchNorm are often too large.

    What it costs: half the file. Float16 is slow on CPUs (measured 40x slower than float32 in eager PyTorch): meant
    for GPUs.

    Example:
        >>> import torch, optimize
        >>> program = optimize.capture(torch.nn.Linear(8, 4).eval(), (torch.rand(2, 8),))
        >>> program, outcome = CastFP16().apply(program)
        >>> program.graph_module.get_parameter("weight").dtype
        torch.float16

    Source: P. Micikevicius et al., "Mixed Precision Training", 2017, arXiv 1710.03740.
    """

    tolerance: ClassVar[float] = 5e-3
    dtype: ClassVar[torch.dtype] = torch.float16


@register_pass
@dataclass(frozen=True)
class CastBF16(_CastHalf):
    """Cast to bfloat16 with explicit casts in the graph, keeping in float32 what would lose precision.

    The same rules as ``CastFP16``; bfloat16 has float32's range, so nothing overflows, and 8 bits of precision.

    What it costs: half the file; fast on CPUs with AVX512-BF16 or AMX and on GPUs.

    Example:
        >>> import torch, optimize
        >>> program = optimize.capture(torch.nn.Linear(8, 4).eval(), (torch.rand(2, 8),))
        >>> program, outcome = CastBF16().apply(program)
        >>> outcome.notes
        ('1 calls in bfloat16, 0 kept in float32; inputs and outputs stay float32.',)

    Source: D. Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", 2019, arXiv 1905.12322.
    """

    tolerance: ClassVar[float] = 4e-2
    dtype: ClassVar[torch.dtype] = torch.bfloat16


def _is_float_call(node: fx.Node) -> bool:
    """Say whether a call returns float32, alone or as the parts of a tuple (LSTM, split)."""
    value = node.meta.get("val")
    parts = value if isinstance(value, tuple | list) else (value,)
    floats = [part for part in parts if isinstance(part, torch.Tensor) and part.dtype is torch.float32]
    return node.op == "call_function" and bool(floats)


def _is_cast_already(program: Program) -> bool:
    values = (tensor_value(node) for node in program.graph.nodes)
    return any(value is not None and value.dtype in (torch.float16, torch.bfloat16) for value in values)


def _kept(program: Program, dtype: torch.dtype) -> Iterator[tuple[fx.Node, str]]:
    """Yield the calls that stay in float32, with the reason."""
    limit = torch.finfo(dtype).max
    ranges, _ = learn_ranges(
        program, [program.inputs], calibrator="minmax", form=TensorFormat("uint8", symmetric=False)
    )
    for node in program.graph.nodes:
        name = graph.op_name(node) if node.op == "call_function" else ""
        if name in _PRECISE and _is_float_call(node):
            yield node, f"{name} loses precision in {str(dtype).removeprefix('torch.')}"
        elif name in _TYPED and _is_float_call(node):
            yield node, "it makes float32 by its own argument"
        elif _is_float_call(node) and _magnitude(node, ranges) > limit:
            yield node, f"its values reach {_magnitude(node, ranges):.3g}, beyond {limit:.3g}"


def _magnitude(node: fx.Node, ranges: Mapping[str, Range]) -> float:
    """Largest magnitude among a call's output and its activations."""
    found = [ranges[entry.name] for entry in (node, *node.all_input_nodes) if entry.name in ranges]
    return max((max(-interval.low, interval.high) for interval in found), default=0.0)


def _follow_inputs(program: Program, halves: set[fx.Node]) -> list[fx.Node]:
    """Leave value-moving calls in the precision of their inputs, so that no cast is written just for them."""
    for node in program.graph.nodes:
        if node not in halves or graph.op_name(node) not in _NEUTRAL:
            continue
        floats = [entry for entry in node.all_input_nodes if entry.op == "placeholder" or _is_float_call(entry)]
        if floats and not any(entry in halves for entry in floats):
            halves.discard(node)
    return [node for node in program.graph.nodes if node in halves]


def _skip(node: fx.Node, reason: str) -> Skip:
    return Skip(graph.origin(node), graph.op_name(node), reason)


def _write_casts(program: Program, halves: set[fx.Node], dtype: torch.dtype) -> None:
    """Give every call its inputs in its own precision; each value is cast once, right after it is made."""
    module, casts = program.graph_module, dict[tuple[fx.Node, torch.dtype], fx.Node]()
    in_half = halves | _cast_weights(module, halves, dtype)

    def precision(node: fx.Node) -> torch.dtype:
        return dtype if node in in_half else torch.float32

    def wanted(value: fx.Node, want: torch.dtype) -> fx.Node:
        carried = tensor_value(value)
        if carried is None or carried.dtype is not torch.float32 or precision(value) is want:
            return value
        if (value, want) not in casts:
            casts[value, want] = _cast(module, value, want)
        return casts[value, want]

    for node in list(module.graph.nodes):
        if node.op not in ("call_function", "output"):
            continue
        want = torch.float32 if node.op == "output" else precision(node)
        mapping = {value: wanted(value, want) for value in node.all_input_nodes}
        node.args = fx.node.map_arg(node.args, mapping.__getitem__)
        node.kwargs = fx.node.map_arg(node.kwargs, mapping.__getitem__)


def _cast_weights(module: fx.GraphModule, halves: set[fx.Node], dtype: torch.dtype) -> set[fx.Node]:
    """Cast in place, under their own paths, the float32 weights that only 16-bit calls read; return their nodes."""
    nodes = [node for node in module.graph.nodes if node.op == "get_attr"]
    readers = Counter(str(node.target) for node in nodes)
    cast = set()
    for node in nodes:
        path = str(node.target)
        tensor = graph.attribute(module, path)
        if readers[path] == 1 and tensor.dtype is torch.float32 and halves.issuperset(node.users):
            graph.remove_attribute(module, path)
            graph.store(module, path, tensor.to(dtype))
            cast.add(node)
    return cast


def _cast(module: fx.GraphModule, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Return a node that holds ``value`` in another precision: a new weight, or a cast call."""
    with module.graph.inserting_after(value):
        if value.op == "get_attr":
            path = str(value.target)
            tensor = graph.attribute(module, path)
            return module.graph.get_attr(graph.store(module, path, tensor.to(dtype)))
        cast = module.graph.call_function(aten._to_copy.default, (value,), {"dtype": dtype})
    cast.meta = {key: item for key, item in value.meta.items() if key != "val"}
    return cast
