"""A quantized program that can be trained: the forward pass does what integers do, and gradients pass rounding.

Rounding passes gradients of values on (the straight-through estimator) and gives each step of an integer grid its own:
``round(v/s) - v/s`` inside the grid and the outermost integer beyond it (S. Esser et al., "Learned Step Size
Quantization", 2019, arXiv 1902.08153).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from optimize import graph, ops
from optimize.errors import Refused
from optimize.plan import Range
from optimize.program import Program, tensor_value
from optimize.quantization.grid import along, sum_scales, weight_scales
from optimize.quantization.numerics import SMALLEST_SCALE, USUAL, TensorFormat, planned, scale_and_zero_point
from optimize.quantization.simulation import MOVES, stored_values

Steps = Literal["learned", "frozen"]

#: Shares of the largest weight that the outermost integer is tried at.
_SHARES = torch.linspace(1.0, 0.3, 36)
#: What operators call the weights that training moves; other constants, such as statistics, stay.
_TRAINED = ("weight", "bias", "params")


class QuantizedModule(nn.Module):
    """Takes and returns what the captured module did; its parameters are the float weights and the integers' steps.

    Args:
        program: A program with a static plan; it is not touched until :meth:`adopt`.
        steps: ``learned`` trains the steps of weights and activations; ``frozen`` keeps the activations' as calibrated
            and those of weights where the largest of a channel is the largest integer.
    """

    def __init__(self, program: Program, steps: Steps = "learned") -> None:
        super().__init__()
        plan = program.plan
        self._program, self._plan = program.clone(), plan
        self._form = planned(USUAL.weight, plan)
        self.body = self._program.graph_module
        for path in _trained_paths(self.body):
            self.body.get_parameter(path).requires_grad_(True)
        learns = steps == "learned"
        self._leaders = _leaders(self._program, tied=learns)
        self._ends: dict[str, tuple[int, int]] = {}
        self.activation_steps = nn.ModuleDict({name: self._start(name) for name in {*self._leaders.values()}})
        self.activation_steps.requires_grad_(learns)
        self._own = _own_weights(self._program, plan.layers)
        self.weight_steps = nn.ModuleDict()
        for layer in self._own if learns else ():
            self.weight_steps[self._own[layer]] = self._start_of_weight(layer)
        self._run = _Run(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run on what the captured module took; return what it returned."""
        flat = self._program.flatten(args, kwargs)
        outputs = self._run.run(*flat, enable_io_processing=False)
        return pytree.tree_unflatten(list(outputs), self._program.out_spec)

    def adopt(self, program: Program) -> None:
        """Write the trained weights, as the integers stand for them, and ranges onto the program this was made from.

        A weight that other calls read too, or that is computed from others, is written in float: targets round it.

        Raises:
            Refused: Training left a weight or a step that is not finite.
        """
        for name, value in self.state_dict().items():
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise Refused(f"Training left '{name}' not finite.", hint="Lower the learning rate.")
        with torch.no_grad():
            for layer in self._own:
                weight = self.body.get_parameter(_path(layer))
                weight.copy_(self.rounded_weight(layer, weight))
            for path, value in self.body.named_parameters():
                program.graph_module.get_parameter(path).copy_(value)
        program.quantization = dataclasses.replace(self._plan, ranges={**self._plan.ranges, **self.ranges()})

    def ranges(self) -> dict[str, Range]:
        """Return the range of every value that is rounded here, by node name."""
        return {node.name: self._range(node) for node in self._program.graph.nodes if node.name in self._leaders}

    def rounded(self, value: torch.Tensor, name: str) -> torch.Tensor:
        """Return the value of a node as integers store it, or as it is where they do not."""
        leader = self._leaders.get(name)
        return value if leader is None else fake_quantize(value, self.activation_steps[leader](), *self._ends[leader])

    def rounded_weight(self, layer: fx.Node, weight: torch.Tensor) -> torch.Tensor:
        """Return a layer's weight on the grid that targets find: a learned step never outgrows the largest weight."""
        step, name = largest_step(weight, self._form, _axis(layer)), self._own.get(layer, "")
        if name in self.weight_steps:
            least = smallest_step(weight, self._form, _axis(layer))
            step = torch.minimum(self.weight_steps[name](), step).maximum(least)
        return fake_quantize(weight, step, *self._form.bounds)

    def quantizes(self, node: fx.Node) -> bool:
        """Say whether a node is a layer of the plan."""
        return node.name in self._plan.layers

    def _start(self, name: str) -> LearnedStep:
        """Return the step of the values that share this one's, and note the integers they reach."""
        members = [self._plan.ranges[member] for member, leader in self._leaders.items() if leader == name]
        scale, zero_point = scale_and_zero_point(members[0].union(*members), USUAL.activation)
        low, high = USUAL.activation.bounds
        self._ends[name] = (low - zero_point, high - zero_point)
        node = next(node for node in self._program.graph.nodes if node.name == name)
        return LearnedStep(torch.tensor(scale), _features(node), high)

    def _start_of_weight(self, layer: fx.Node) -> LearnedStep:
        weight = self.body.get_parameter(_path(layer)).detach()
        start = closest_step(weight, self._form, _axis(layer))
        return LearnedStep(start, weight.numel() // start.numel(), self._form.bounds[1])

    def _range(self, node: fx.Node) -> Range:
        leader = self._leaders[node.name]
        step, (low, high) = self.activation_steps[leader]().item(), self._ends[leader]
        bounds = ops.clip_bounds(node)  # a range beyond it would be taken for that of what is clipped
        return Range(low * step, min(high * step, bounds[1] if bounds else math.inf))


def clip_weights(program: Program, layers: Collection[str], bits: int) -> None:
    """Clip each weight of the named layers, in place, to what so few integers stand for with the least squared error.

    Where the largest weight decides, two or three bits leave most weights at zero, and training cannot bring them back.
    """
    form = dataclasses.replace(USUAL.weight, bits=bits)
    for layer in _own_weights(program, layers):
        weight = program.graph_module.get_parameter(_path(layer))
        end = closest_step(weight.detach(), form, _axis(layer)) * form.bounds[1]
        with torch.no_grad():
            weight.copy_(torch.minimum(torch.maximum(weight, -end), end))


class _Run(fx.Interpreter):
    """Runs the graph with the module's rounding."""

    def __init__(self, owner: QuantizedModule) -> None:
        super().__init__(owner.body)
        # Kept in a list: a module that holds itself through an attribute could not be saved or walked.
        self._owner = [owner]

    def run_node(self, n: fx.Node) -> Any:
        owner = self._owner[0]
        if graph.is_call(n, *ops.WEIGHTED) and owner.quantizes(n):
            (value, weight, *others), keywords = self.fetch_args_kwargs_from_env(n)
            rounded = owner.rounded_weight(n, weight)
            result = n.target(value, rounded, *others, **keywords)  # type: ignore[operator]
        else:
            result = super().run_node(n)
        return owner.rounded(result, n.name)


def _trained_paths(module: fx.GraphModule) -> set[str]:
    """Return the paths of the floating-point weights behind arguments that operators call weight or bias."""
    found: set[str] = set()
    for call in module.graph.nodes:
        if isinstance(call.target, torch._ops.OpOverload):
            names = [entry.name for entry in call.target._schema.arguments if entry.name in _TRAINED]
            fx.node.map_arg([graph.argument(call, name) for name in names], lambda node: found.update(_leaves(node)))
    return {path for path in found if graph.attribute(module, path).is_floating_point()}


def _leaves(node: fx.Node) -> set[str]:
    """Return the paths of the weights that a constant is computed from; none for a value computed from inputs."""
    found, waiting, seen = set(), [node], set[fx.Node]()
    while waiting:
        current = waiting.pop()
        if current.op == "placeholder":
            return set()
        if current.op == "get_attr":
            found.add(str(current.target))
        waiting.extend(source for source in current.all_input_nodes if source not in seen)
        seen.update(current.all_input_nodes)
    return found


def _own_weights(program: Program, names: Collection[str]) -> dict[fx.Node, str]:
    """Return those of the layers whose weight none but them reads, all alike, with the name of its step."""
    readers: dict[str, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.op == "get_attr":
            readers.setdefault(str(node.target), []).extend(node.users)
    own: dict[fx.Node, str] = {}
    for path, users in readers.items():
        if all(node.name in names and _path(node) == path for node in users) and len({*map(_axis, users)}) == 1:
            own.update(dict.fromkeys(users, users[0].name))
    return own


def _path(layer: fx.Node) -> str:
    """Return where a layer's weight is stored; empty where it is computed."""
    weight = graph.argument(layer, "weight")
    return str(weight.target) if weight.op == "get_attr" else ""


def _axis(layer: fx.Node) -> int | None:
    """Return the axis of a layer's weight that counts its scales; None where the groups of a layer share that axis."""
    grouped = graph.is_call(layer, *ops.TRANSPOSED_CONVOLUTIONS) and graph.argument(layer, "groups") > 1
    return None if grouped else ops.output_axis(layer)


def _leaders(program: Program, *, tied: bool) -> dict[str, str]:
    """Return each value that is stored as integers, with the one whose step it takes: itself unless ``tied``."""
    plan = program.plan
    stored = stored_values(program, plan.layers)
    leaders: dict[str, str] = {}
    for node in program.graph.nodes:
        if node in stored and node.name in plan.ranges:
            source = str(node.args[0]) if tied and graph.is_call(node, *MOVES) else ""
            leaders[node.name] = leaders.get(source, node.name)
    return leaders


def _features(node: fx.Node) -> int:
    """Return how many numbers of one sample a value holds."""
    value = tensor_value(node)
    assert value is not None
    return math.prod(size for size in value.shape[1:] if isinstance(size, int))


class LearnedStep(nn.Module):
    """A positive step, trained as ``start * exp(pace * moved)``.

    With this pace, plain gradient descent on ``moved`` changes the step at the rate of the published rule (gradients
    scaled by ``1 / sqrt(elements * high)``), while optimizers that normalise gradients change it by a small factor and
    not by a small number, which could be the step itself. Weight decay pulls it to the start.

    Args:
        start: Positive float32 steps, in a shape that broadcasts against the values.
        elements: Values that share one step.
        high: The largest integer.
    """

    def __init__(self, start: torch.Tensor, elements: int, high: int) -> None:
        super().__init__()
        self.moved = nn.Parameter(torch.zeros_like(start))
        self.start, self.pace = nn.Buffer(start), nn.Buffer((elements * high) ** -0.25 / start)

    def forward(self) -> torch.Tensor:
        """Return the step, in the shape of the start."""
        return self.start * torch.exp(self.pace * self.moved)


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, step: torch.Tensor, low: int, high: int) -> torch.Tensor:
        ratio = value * (1 / step)
        integers = ratio.round().clamp_(low, high)
        ctx.save_for_backward(ratio, integers)
        ctx.step = step
        return integers * step

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ratio, integers = ctx.saved_tensors
        inside = (ratio - integers).abs() <= 0.5
        moves = None
        if ctx.needs_input_grad[1]:
            moves = (gradient * torch.where(inside, integers - ratio, integers)).sum_to_size(ctx.step.shape)
        return gradient * inside, moves, None, None


def fake_quantize(value: torch.Tensor, step: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Return the nearest of the multiples ``low * step`` to ``high * step``, with gradients for value and step.

    Args:
        value: Floats.
        step: Positive, in a shape that broadcasts against the value.
        low: Smallest integer; minus the zero point where integers have one.
        high: Largest integer, alike.

    >>> fake_quantize(torch.tensor([0.26, 9.0]), torch.tensor(0.5), 0, 3)
    tensor([0.5000, 1.5000])
    """
    result: torch.Tensor = _Rounding.apply(value, step, low, high)
    return result


def largest_step(weight: torch.Tensor, form: TensorFormat, axis: int | None) -> torch.Tensor:
    """Return the steps of the grid that targets find, in a shape that broadcasts against the weight.

    Args:
        weight: Float weight.
        form: Format of weights.
        axis: The axis that counts output channels; None for one step a tensor.
    """
    whole = dataclasses.replace(form, per_channel=axis is not None)
    return _along(weight, weight_scales(weight, whole, 1 if axis is None else axis), axis)


def smallest_step(weight: torch.Tensor, form: TensorFormat, axis: int | None) -> torch.Tensor:
    """Return the steps below which two neighbours would add up to too much, shaped as :func:`largest_step`'s."""
    scales = sum_scales(weight, form, 1 if axis is None else axis).float()
    return _along(weight, scales if axis is not None else scales.amax(0, keepdim=True), axis)


def closest_step(weight: torch.Tensor, form: TensorFormat, axis: int | None) -> torch.Tensor:
    """Return the steps of least squared rounding error, at most :func:`largest_step`: few integers clip the largest.

    Args:
        weight: Float weight.
        form: Format of weights.
        axis: As for :func:`largest_step`.
    """
    others = [dim for dim in range(weight.dim()) if dim != axis]
    largest = largest_step(weight, form, axis)
    steps = [largest * share for share in _SHARES]
    errors = [(fake_quantize(weight, step, *form.bounds) - weight).square().sum(others, keepdim=True) for step in steps]
    best = torch.stack(errors).argmin(0, keepdim=True)
    return torch.stack(steps).gather(0, best)[0].clamp_min(SMALLEST_SCALE)


def _along(weight: torch.Tensor, steps: torch.Tensor, axis: int | None) -> torch.Tensor:
    """Return steps ``[C_out]`` in a shape that broadcasts against the weight; one where they are all equal."""
    if axis is None:
        return steps[:1].reshape([1] * weight.dim())
    return along(weight, steps, axis)
