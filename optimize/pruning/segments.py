"""Segments of a network that one layer could stand for: neighbouring modules with one value in and one out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from optimize import costs, graph, ops
from optimize.graph import aten
from optimize.merged import Merged
from optimize.program import Program, tensor_value
from optimize.quantization.rounding import LONGEST_ROW

#: Layers in one segment, and kernels that may stand for it.
_MOST_LAYERS, _KERNELS = 12, (1, 3, 5)


@dataclass(frozen=True)
class Form:
    """What may stand for a segment of a network.

    Attributes:
        op: ``conv2d``, ``linear``, or ``none`` for nothing at all.
        kernel: Of a convolution, square and odd, padded by its half; 1 for others.
        stride: Likewise.
        inputs: Channels.
        outputs: Likewise.
        macs: Multiply-accumulates of one run with one sample.
    """

    op: str
    kernel: int
    stride: tuple[int, int]
    inputs: int
    outputs: int
    macs: int

    @property
    def row(self) -> int:
        """Weights of each output."""
        return 0 if self.op == "none" else self.inputs * self.kernel**2

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        return self.outputs * (self.row + 1) if self.row else 0

    def __str__(self) -> str:
        """Return it as a report names it."""
        words = {"none": "nothing", "linear": "a linear layer"}
        return words.get(self.op, f"a convolution of {self.kernel}x{self.kernel}")


@dataclass(frozen=True)
class Segment:
    """A segment of a program, by the names of its nodes, so that it is one of its clones too.

    Attributes:
        modules: The modules whose calls it has, in order.
        source: What it reads.
        target: What a form gives: the segment's result, or what an activation at its end makes that of.
        result: What it gives.
        first: Place of its first call among all that depend on inputs.
        last: Place of its last.
        macs: Multiply-accumulates of one run with one sample.
        parameters: Of its layers.
        layers: Paths of its layers, as timings name them.
        forms: What may stand for it.
    """

    modules: tuple[str, ...]
    source: str
    target: str
    result: str
    first: int
    last: int
    macs: int
    parameters: int
    layers: tuple[str, ...]
    forms: tuple[Form, ...]

    @property
    def where(self) -> str:
        """The modules, as a report names them."""
        return self.modules[0] if len(self.modules) == 1 else f"{self.modules[0]} to {self.modules[-1]}"


def find_segments(program: Program) -> list[Segment]:
    """Return the segments of a program that something smaller may stand for, in the order they run.

    A segment is a module, or neighbours within one, that reads one tensor, and of which one tensor is read elsewhere. A
    layer stands for two at least; nothing, for what keeps its shape.
    """
    steps = _steps(program)
    runs = dict.fromkeys(run for units in _units(steps) for run in _runs(units, steps))
    work, paths = costs.program_costs(program).calls, ops.layer_paths(program.graph)
    found: dict[tuple[int, int], Segment] = {}
    for modules, first, last in runs:
        segment = _segment(program.graph_module, steps[first : last + 1], (modules, first, last), work, paths)
        if segment is not None:
            found.setdefault((first, last), segment)
    return list(found.values())


def _steps(program: Program) -> list[fx.Node]:
    """Return the calls that depend on inputs, in order."""
    known = set(program.placeholders)
    for node in program.graph.nodes:
        if node.op == "call_function" and not known.isdisjoint(node.all_input_nodes):
            known.add(node)
    return [node for node in program.graph.nodes if node in known and node.op == "call_function"]


_Unit = tuple[str, int, int]
_Run = tuple[tuple[str, ...], int, int]


def _units(steps: Sequence[fx.Node]) -> Iterator[list[_Unit]]:
    """Yield the modules of each parent whose calls stand together, in the order they run."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, node in enumerate(steps):
        if node.meta.get("nn_module_stack"):
            for path in graph.modules_of(graph.origin(node)):
                places[path].append(place)
    siblings: dict[str, list[_Unit]] = defaultdict(list)
    for path, taken in places.items():
        if taken[-1] - taken[0] + 1 == len(taken):
            siblings[path.rpartition(".")[0]].append((path, taken[0], taken[-1]))
    yield from (sorted(units, key=lambda unit: unit[1:]) for units in siblings.values())


def _runs(units: Sequence[_Unit], steps: Sequence[fx.Node]) -> Iterator[_Run]:
    """Yield neighbours with a layer in the first and in the last of them."""
    layers = [sum(graph.is_call(node, *ops.LAYERS) for node in steps[first : last + 1]) for _, first, last in units]
    for start, (_, first, end) in enumerate(units):
        count, path = 0, list[str]()
        for place in range(start, len(units)):
            name, low, last = units[place]
            if place > start and low != end + 1:
                break
            end, count = last, count + layers[place]
            path.append(name)
            if count > _MOST_LAYERS or not layers[start]:
                break
            if layers[place]:
                yield tuple(path), first, last


def _segment(
    module: fx.GraphModule,
    inside: Sequence[fx.Node],
    run: _Run,
    work: Mapping[str, costs.NodeCost],
    paths: Mapping[str, str],
) -> Segment | None:
    """Return a segment, unless it reads or gives more than one value, or nothing smaller may stand for it."""
    held, result = set(inside), inside[-1]
    outside = {
        source
        for node in inside
        for source in node.all_input_nodes
        if source not in held and tensor_value(source) is not None and not graph.weights_behind(source)
    }
    if len(outside) != 1 or any(user not in held for node in inside[:-1] for user in node.users):
        return None
    source, target = outside.pop(), _before_activation(result, held)
    macs = sum(work[node.name].macs for node in inside if node.name in work)
    weights = {path for node in inside for each in node.all_input_nodes for path in graph.weights_behind(each)}
    parameters = sum(graph.attribute(module, path).numel() for path in weights - ops.measured(result.graph))
    layers = [node for node in inside if graph.is_call(node, *ops.LAYERS)]
    forms = tuple(form for form in _forms(source, target, layers) if form.macs < macs)
    if not forms:
        return None
    names = tuple(paths[node.name] for node in layers if node.name in paths)
    return Segment(run[0], source.name, target.name, result.name, *run[1:], macs, parameters, names, forms)


def _before_activation(result: fx.Node, held: set[fx.Node]) -> fx.Node:
    """Return what an activation at the end is of, else the end itself."""
    if Merged.activation(result) is None:
        return result
    before = result.all_input_nodes[0]
    return before if before in held and len(before.users) == 1 else result


def _forms(source: fx.Node, target: fx.Node, layers: Sequence[fx.Node]) -> Iterator[Form]:
    """Yield what may stand for layers between two values."""
    one, other = tensor_value(source), tensor_value(target)
    if one is None or other is None or one.dim() != other.dim() or one.dtype != other.dtype:
        return
    is_image = one.dim() == 4 and any(graph.is_call(layer, aten.conv2d.default) for layer in layers)
    if not is_image and not all(graph.is_call(layer, aten.linear.default) for layer in layers):
        return
    axis = 1 if is_image else one.dim() - 1
    channels, sizes = (int(one.shape[axis]), int(other.shape[axis])), _sizes(one, other, is_image)
    if sizes is None:
        return
    stride, positions = sizes
    if channels[0] == channels[1] and stride == (1, 1):
        yield Form("none", 1, stride, *channels, 0)
    if len(layers) < 2:
        return
    reach = 1 + sum(_layer_kernel(layer) - 1 for layer in layers) if is_image else 1
    for kernel in _KERNELS:
        row = channels[0] * kernel**2
        if kernel <= reach and row <= LONGEST_ROW:
            yield Form("conv2d" if is_image else "linear", kernel, stride, *channels, positions * row * channels[1])


def _layer_kernel(layer: fx.Node) -> int:
    """Return the longest side of what a layer sees of an image."""
    if not graph.is_call(layer, aten.conv2d.default):
        return 1
    weight, dilation = tensor_value(graph.argument(layer, "weight")), graph.argument(layer, "dilation")
    if weight is None:
        return 1
    return max(1 + (int(size) - 1) * each for size, each in zip(weight.shape[2:], dilation, strict=True))


def _sizes(one: torch.Tensor, other: torch.Tensor, is_image: bool) -> tuple[tuple[int, int], int] | None:
    """Return the stride between two values, and the positions of one sample; None where the sizes do not say."""
    before = one.shape[2:] if is_image else one.shape[1:-1]
    after = other.shape[2:] if is_image else other.shape[1:-1]
    if not all(isinstance(size, int) and size > 0 for size in (*before, *after)):
        return None
    if not is_image:
        return ((1, 1), math.prod(after)) if before == after else None
    stride = tuple(-(-size // less) for size, less in zip(before, after, strict=True))
    fits = all(-(-size // each) == less for size, each, less in zip(before, stride, after, strict=True))
    return ((stride[0], stride[1]), math.prod(after)) if fits else None
