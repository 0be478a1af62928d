"""A quantized program that can be trained: the forward pass does what integers do, and gradients pass rounding.

Weights and what layers read are rounded by the quantizers of ``quantizers.py``, everything else that is stored by steps
of 8 bits, learned as in S. Esser et al., "Learned Step Size Quantization", 2019, arXiv 1902.08153. BatchNorm behind a
layer runs on the statistics of the batch and keeps its running ones, as it does in any network that is trained; its
result is what is rounded, for it is folded into the layer afterwards: a factor a channel leaves a channel on its grid.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from optimize import graph, ops
from optimize.bounds import require_trained
from optimize.graph import aten
from optimize.plan import Range
from optimize.program import Program, tensor_value
from optimize.quantization.calibrate import not_finite
from optimize.quantization.numerics import USUAL, TensorFormat, planned, scale_and_zero_point
from optimize.quantization.observers import Statistics
from optimize.quantization.quantizers import (
    QUANTIZERS,
    LearnedStep,
    LearnedWeights,
    Quantizer,
    Reading,
    WeightQuantizer,
    binarize,
    closest_step,
    fake_quantize,
    quantize_gradient,
)
from optimize.quantization.simulation import MOVES, stored_values

Steps = Literal["learned", "frozen"]

#: Share of a batch in the statistics of BatchNorm, torch's default: a captured graph has lost the network's own.
_MOMENTUM = 0.1
#: What operators call the weights that training moves; other constants, such as statistics, stay.
_TRAINED = ("weight", "bias", "params")
_SIGNS = {"above": 1.0, "below": -1.0}
#: Share of a value's power that its range takes away, 30 dB, from which on a clamp is worth its time: up to 6 % of a
#: network of sums in OpenVINO.
_CLIPPED = 1e-3
#: What signs are stored as: -1 and 1 are integers of it, and so is the zero that convolutions pad with.
SIGNS = Range(-128.0, 127.0)


@dataclass(frozen=True)
class Scheme:
    """How the layers between the ends of a network are quantized; the others have learned steps.

    Attributes:
        quantizer: By name.
        layers: Names of those layers.
        bits: Of their weights.
        activation_bits: Of what they read.
        gradient_bits: Of the gradients of what they compute; 0 leaves those.
        by_layer: Bits of the weights of some of them and of what those read, by name, where they are others.
        signs: Names of the signs that some of them read.
        norms: The layer that a BatchNorm is to be folded into, by name.
        folded: The program in which they are; the plan's names are its.
    """

    quantizer: Quantizer = "lsq"
    layers: frozenset[str] = frozenset()
    bits: int = 8
    activation_bits: int = 8
    gradient_bits: int = 0
    by_layer: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    signs: frozenset[str] = frozenset()
    norms: Mapping[str, str] = field(default_factory=dict)
    folded: Program | None = None

    @property
    def windowed(self) -> frozenset[str]:
        """The layers that read through a quantizer of their own: 8 learned bits are what every value is stored in."""
        is_narrow = any(self.bits_of(layer)[1] < 8 for layer in self.layers)
        reads = QUANTIZERS[self.quantizer].reads
        return self.layers if not self.signs and (is_narrow or reads is not Reading) else frozenset()

    def bits_of(self, layer: str) -> tuple[int, int]:
        """Return the bits of a layer's weights, and of what it reads."""
        return self.by_layer.get(layer, (self.bits, self.activation_bits))


class QuantizedModule(nn.Module):
    """Takes and returns what the captured module did; its parameters are the float weights and the integers' steps.

    Args:
        program: A program that is not touched until :meth:`adopt`, its static plan by the names of ``scheme.folded``.
        steps: ``learned`` trains the steps of weights and activations; ``frozen`` keeps the activations' as they begin,
            those of weights where the largest of a channel is the largest integer, and the statistics of BatchNorm.
        scheme: How layers are quantized.
    """

    def __init__(self, program: Program, steps: Steps = "learned", scheme: Scheme = Scheme()) -> None:
        super().__init__()
        plan = (scheme.folded or program).plan
        plan = dataclasses.replace(plan, ranges={**plan.ranges, **_centred(scheme.folded or program, scheme.signs)})
        self._program, self._plan, self.scheme = program.clone(), plan, scheme
        self.body = self._program.graph_module
        for path in _trained_paths(self.body):
            self.body.get_parameter(path).requires_grad_(True)
        self.learns = steps == "learned"
        self.share = _MOMENTUM
        self._leaders = _leaders(scheme.folded or program, tied=self.learns or bool(scheme.windowed))
        self._leaders = {name: leader for name, leader in self._leaders.items() if name not in scheme.signs}
        self._sources = {
            node.name: self._named(graph.argument(node, "input"))
            for node in graph.calls(self.body.graph, *ops.WEIGHTED)
        }
        self._ends, self._clamped = dict[str, tuple[int, int]](), dict[str, Range]()
        self.readings = nn.ModuleDict(self._begin_reading())
        # In the graph's order, in every process: a checkpoint knows parameters by their number.
        others = (name for name in dict.fromkeys(self._leaders.values()) if name not in self.readings)
        self.activation_steps = nn.ModuleDict({name: self._start(name) for name in others})
        for steps_of in (self.activation_steps, self.readings) if not self.learns else ():
            steps_of.requires_grad_(False)
        self._own, self.weight_quantizers = dict[str, str](), nn.ModuleDict()
        for layer, name in _own_weights(self._program, plan.layers).items():
            self._own[layer.name] = name
            if name not in self.weight_quantizers:
                self.weight_quantizers[name] = self._quantizer(layer)
        self.scheme = dataclasses.replace(scheme, folded=None)
        self._run = _Run(self)

    def extra_repr(self) -> str:
        """Say how many bits weights have, by which trainings that follow each other are told apart, and what else."""
        scheme, steps = self.scheme, "learned" if self.learns else "frozen"
        others = [f"{name} {pair}" for name, pair in sorted(scheme.by_layer.items())]
        bits = f"{scheme.bits} bits, {scheme.activation_bits} read, {scheme.gradient_bits} of gradients"
        return ", ".join([bits, scheme.quantizer, steps, *others])

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedModule:
        """Return a copy with weights and steps of its own, as moving averages of a training want."""
        copied = QuantizedModule.__new__(QuantizedModule)
        memo[id(self)] = copied
        shared = {"_program", "_run"}  # the values in a graph's metadata have no storage to copy
        copied.__dict__.update(copy.deepcopy({key: self.__dict__[key] for key in self.__dict__.keys() - shared}, memo))
        copied._program = dataclasses.replace(self._program, graph_module=copied.body)
        copied._run = _Run(copied)
        return copied

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run on what the captured module took; return what it returned."""
        flat = self._program.flatten(args, kwargs)
        return pytree.tree_unflatten(list(self.run(flat)), self._program.out_spec)

    def run(self, flat: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the flat outputs for flat inputs."""
        outputs: tuple[torch.Tensor, ...] = self._run.run(*flat, enable_io_processing=False)
        return outputs

    @property
    def keeps_statistics(self) -> bool:
        """Whether a BatchNorm has running statistics that training changes."""
        norms = graph.calls(self.body.graph, aten.batch_norm.default)
        return self.learns and any(graph.argument(norm, "running_mean") is not None for norm in norms)

    @torch.no_grad()
    def take_statistics(self, batches: Iterable[Sequence[torch.Tensor]]) -> None:
        """Take the statistics of every BatchNorm anew, all samples alike, and leave training mode.

        Running ones are those of the last ten batches or so, and of weights that still moved: with few bits that may be
        points of accuracy.

        Args:
            batches: Flat inputs, enough samples each for statistics of their own.
        """
        seen = 0
        self.train()
        for flat in batches:
            seen += len(flat[0])
            self.share = len(flat[0]) / seen
            self.run(flat)
        self.share = _MOMENTUM
        self.eval()

    def adopt(self, program: Program) -> None:
        """Write what was trained onto the program this was made from.

        That is weights as the integers stand for them, the statistics of BatchNorm, clamps where layers read fewer bits
        than are stored, and the plan.

        A weight that other calls read too, or that is computed from others, is written in float: targets round it.

        Raises:
            Refused: Training left a weight or a step that is not finite.
        """
        require_trained(self.state_dict())
        with torch.no_grad():
            layers = [node for node in self.body.graph.nodes if node.name in self._own]
            rounded = {_path(node): self.rounded_weight(node, self.body.get_parameter(_path(node))) for node in layers}
            for path, value in self.body.named_parameters():
                program.graph_module.get_parameter(path).copy_(rounded.get(path, value))
        bits = self.scheme.bits if self.scheme.layers else self._plan.bits
        grids = {layer: planned(USUAL.weight, self._plan, layer).bits for layer in self._plan.layers}
        grids |= {layer: self._rounding(name).bits for layer, name in self._own.items()}
        grids = {layer: grid for layer, grid in grids.items() if grid != bits}
        self._clamped = self._clamp(program)
        self._settle_signs(program)
        ranges = {**self._plan.ranges, **self.ranges()}
        program.quantization = dataclasses.replace(self._plan, ranges=ranges, bits=bits, grids=grids)

    def ranges(self) -> dict[str, Range]:
        """Return the range of every value that is rounded here, by the plan's names."""
        nodes = {node.name: node for node in self._program.graph.nodes}
        found = {name: self._range(nodes[name]) for name in self._leaders}
        return {**found, **dict.fromkeys(self.scheme.signs, SIGNS), **self._clamped}

    def rounded(self, value: torch.Tensor, node: fx.Node) -> torch.Tensor:
        """Return the value of a node as integers store it, or as it is where they do not."""
        name = self._named(node)
        leader = self._leaders.get(name) if name != node.name or name not in self.scheme.norms.values() else None
        if leader is None or name in self._only_read:
            return value
        if leader in self.activation_steps:
            return fake_quantize(value, self.activation_steps[leader](), *self._ends[leader])
        step, low, high = self._storage(self._reading(leader, value))
        return fake_quantize(value, torch.tensor(step), low, high)

    def read(self, value: torch.Tensor, layer: fx.Node) -> torch.Tensor:
        """Return what a layer of the plan reads of a value."""
        leader = self._leaders.get(self._sources[layer.name], "")
        is_windowed = layer.name in self.scheme.windowed and leader in self.readings
        return self.readings[leader](value) if is_windowed else value

    def rounded_weight(self, layer: fx.Node, weight: torch.Tensor) -> torch.Tensor:
        """Return a layer's weight on the grid that targets find: a learned step never outgrows the largest weight."""
        if layer.name in self._own:
            rounded: torch.Tensor = self._rounding(self._own[layer.name])(weight)
            return rounded
        return WeightQuantizer(weight, self._form(layer), scale_axis(layer))(weight)

    def quantizes(self, node: fx.Node) -> bool:
        """Say whether a node is a layer of the plan."""
        return node.name in self._plan.layers

    def _named(self, node: fx.Node) -> str:
        """Return what a value is called in the plan: a BatchNorm is the layer that it is folded into."""
        return self.scheme.norms.get(node.name, node.name)

    def _form(self, layer: fx.Node) -> TensorFormat:
        return planned(USUAL.weight, self._plan, layer.name)

    def _quantizer(self, layer: fx.Node) -> WeightQuantizer:
        """Return what rounds a layer's weight."""
        weight, form = self.body.get_parameter(_path(layer)).detach(), self._form(layer)
        kind: type[WeightQuantizer] = LearnedWeights
        if layer.name in self.scheme.layers:
            kind = QUANTIZERS[self.scheme.quantizer].weights
            form = dataclasses.replace(form, bits=self.scheme.bits_of(layer.name)[0])
        if kind is LearnedWeights and not self.learns:
            kind = WeightQuantizer
        return kind(weight, form, scale_axis(layer))

    def _rounding(self, name: str) -> WeightQuantizer:
        found = self.weight_quantizers[name]
        assert isinstance(found, WeightQuantizer)
        return found

    def _begin_reading(self) -> dict[str, Reading]:
        """Return a quantizer for each stored value that layers read through one, and note which nothing else reads."""
        leaders = dict[str, int]()  # the bits that most are asked for, where several layers read a value
        for name in self._sources.keys() & self.scheme.windowed:
            leader = self._leaders[self._sources[name]]
            leaders[leader] = max(leaders.get(leader, 0), self.scheme.bits_of(name)[1])
        kind = QUANTIZERS[self.scheme.quantizer].reads or Reading
        found, self._only_read = {}, set[str]()
        for node in (self.scheme.folded or self._program).graph.nodes:
            if node.name in leaders:
                is_signed = any(self._plan.ranges[member].low < 0 for member in self._members(node.name))
                found[node.name] = kind(leaders[node.name], is_signed, _features(node))
            if self._leaders.get(node.name) in leaders and self._is_only_read(node):
                self._only_read.add(node.name)
        return found

    def _is_only_read(self, node: fx.Node) -> bool:
        return all(
            user.name in self.scheme.windowed
            or (graph.is_call(user, *MOVES) and user.name in self._leaders and self._is_only_read(user))
            for user in node.users
        )

    def _reading(self, leader: str, value: torch.Tensor) -> Reading:
        """Return the quantizer of a value, which begins with it unless it has begun."""
        reading = self.readings[leader]
        assert isinstance(reading, Reading)
        reading.begin(value)
        return reading

    def _members(self, name: str) -> list[str]:
        return [member for member, leader in self._leaders.items() if leader == name]

    def _start(self, name: str) -> LearnedStep:
        """Return the step of the values that share this one's, and note the integers they reach."""
        members = [self._plan.ranges[member] for member in self._members(name)]
        scale, zero_point = scale_and_zero_point(members[0].union(*members), USUAL.activation)
        low, high = USUAL.activation.bounds
        self._ends[name] = (low - zero_point, high - zero_point)
        node = next(node for node in self._program.graph.nodes if node.name == name)
        return LearnedStep(torch.tensor(scale), _features(node), high)

    def _storage(self, reading: Reading) -> tuple[float, int, int]:
        """Return the step and the 256 integers that a value is stored in of which layers read a window."""
        step, low, high = reading.window()
        least = low if high - low == 255 else -128 if low < 0 else 0
        return step, least, least + 255

    def _grid(self, leader: str) -> tuple[float, int, int]:
        """Return the step of a value and the integers that it is stored in, the least and the largest."""
        if leader in self.readings:
            return self._storage(self.readings[leader])  # type: ignore[arg-type]
        return self.activation_steps[leader]().item(), *self._ends[leader]

    def _range(self, node: fx.Node) -> Range:
        leader = self._leaders[node.name]
        step, low, high = self._grid(leader)
        # A range beyond a clip's bound would be taken for that of what is clipped; a window has a bound of its own.
        bounds = None if leader in self.readings else ops.clip_bounds(node)
        return Range(low * step, min(high * step, bounds[1] if bounds else math.inf))

    def _clamp(self, program: Program) -> dict[str, Range]:
        """Let layers read what their window holds; return the ranges of the clamps."""
        ranges: dict[str, Range] = {}
        clamps: dict[fx.Node, fx.Node] = {}
        for layer in graph.calls(program.graph, *ops.WEIGHTED):
            leader, source = self._leaders.get(self._sources[layer.name], ""), graph.argument(layer, "input")
            if layer.name not in self.scheme.windowed or leader not in self.readings:
                continue
            _unbound(program, leader)
            step, low, high = self.readings[leader].window()  # type: ignore[operator]
            if high - low < 255 and source not in clamps:
                clamps[source] = _insert_clamp(program, layer, source, (low * step if low else None, high * step))
                ranges[clamps[source].name] = self.ranges()[self._named(source)]
            graph.set_argument(layer, "input", clamps.get(source, source))
        return ranges

    def _settle_signs(self, program: Program) -> None:
        """Let signs be positive from half a step below zero on, in place: that is zero where values are rounded."""
        for sign in (node for node in program.graph.nodes if node.name in self.scheme.signs):
            condition = graph.argument(sign, "condition")
            leader = self._leaders.get(self._named(graph.argument(condition, "self")))
            if leader is not None:
                graph.set_argument(condition, "other", -self._grid(leader)[0] / 2)

    def clamp_clipped(self, program: Program, seen: Mapping[str, Statistics]) -> None:
        """Clamp, in place, what training clipped: not every target stores each of these values as integers.

        Args:
            program: What this was adopted by, BatchNorm folded.
            seen: What calibration saw of its values, by name.
        """
        learned = self.ranges()
        for node in [node for node in program.graph.nodes if self._leaders.get(node.name) == node.name]:
            bound = learned[node.name]
            if node.name not in seen or seen[node.name].beyond(bound) < _CLIPPED:
                continue
            readers = [user for user in node.users if not _reads_integers(user, self._sources)]
            if readers and node.name not in self._only_read:
                # As a file holds them: the range that is stored is then the one that is clipped.
                bound = Range(*torch.tensor([bound.low, bound.high]).tolist())
                first = next(each for each in program.graph.nodes if each in readers)
                clamp = _insert_clamp(program, first, node, (bound.low, bound.high))
                for user in readers:
                    user.replace_input_with(node, clamp)
                self._clamped[clamp.name] = bound
        program.refresh()


def _reads_integers(node: fx.Node, layers: Collection[str]) -> bool:
    """Say whether every target has a node read what is stored, or the clip changes nothing of it: signs."""
    if node.name in layers or graph.is_call(node, aten.ge.Scalar):
        return True
    return graph.is_call(node, *MOVES) and all(_reads_integers(user, layers) for user in node.users)


def _insert_clamp(
    program: Program, before: fx.Node, value: fx.Node, bounds: tuple[float | None, float | None]
) -> fx.Node:
    """Return a clamp of a value, a part of the module that the value is a part of."""
    with program.graph.inserting_before(before):
        clamp = program.graph.call_function(aten.clamp.default, (value, *bounds))
    clamp.meta["nn_module_stack"] = value.meta.get("nn_module_stack", {})
    return clamp


def _unbound(program: Program, name: str) -> None:
    """Make a plain clip at zero of a value that is read through a window: the window has a bound of its own."""
    node = next(node for node in program.graph.nodes if node.name == name)
    if ops.is_clip_at_zero(node):
        node.target, node.args, node.kwargs = aten.relu.default, node.args[:1], {}


def clip_weights(program: Program, layers: Collection[str], bits: int) -> None:
    """Clip each weight of the named layers, in place, to what so few integers stand for with the least squared error.

    Where the largest weight decides, two or three bits leave most weights at zero, and training cannot bring them back.
    """
    form = dataclasses.replace(USUAL.weight, bits=bits)
    for layer in _own_weights(program, layers):
        weight = program.graph_module.get_parameter(_path(layer))
        end = closest_step(weight.detach(), form, scale_axis(layer)) * form.bounds[1]
        with torch.no_grad():
            weight.copy_(torch.minimum(torch.maximum(weight, -end), end))


def insert_signs(program: Program, layers: Collection[str]) -> frozenset[str]:
    """Let layers read -1 or 1, ``where(x >= 0, 1, -1)``, in place; return the names of these signs.

    A clip at zero before a layer is left out of what it reads: everything behind one would be 1.
    """
    module, signs = program.graph_module, dict[fx.Node, fx.Node]()
    for layer in graph.calls(module.graph, *ops.WEIGHTED):
        source = graph.argument(layer, "input")
        if layer.name in layers and source not in signs:
            with module.graph.inserting_before(layer):
                value = _unclipped(module.graph, source)
                condition = module.graph.call_function(aten.ge.Scalar, (value, 0.0))
                ends = [
                    graph.store(module, f"{layer.name}_{name}", torch.tensor(sign)) for name, sign in _SIGNS.items()
                ]
                above, below = (module.graph.get_attr(path) for path in ends)
                signs[source] = module.graph.call_function(aten.where.self, (condition, above, below))
        if layer.name in layers:
            graph.set_argument(layer, "input", signs[source])
    graph.remove_unused(module)
    program.refresh()
    return frozenset(node.name for node in signs.values())


def _centred(program: Program, signs: Collection[str]) -> dict[str, Range]:
    """Return ranges with zero in the middle for what signs are taken of, and for what that moves.

    Raises:
        Refused: One of them is not finite.
    """
    found: dict[str, Range] = {}
    for sign in (node for node in program.graph.nodes if node.name in signs):
        moved = [graph.argument(sign, "condition").all_input_nodes[0]]
        while graph.is_call(moved[-1], *MOVES):
            moved.append(moved[-1].all_input_nodes[0])
        for value in moved:
            if (known := program.plan.ranges.get(value.name)) is None:
                raise not_finite(value)
            half = max(-known.low, known.high)
            found[value.name] = Range(SIGNS.low / SIGNS.high * half, half)
    return found


def _unclipped(nodes: fx.Graph, value: fx.Node) -> fx.Node:
    """Return a value as it is without the clip at zero that it moves on, by moves of its own where there is one."""
    if ops.is_clip_at_zero(value):
        return value.all_input_nodes[0]
    source = value.all_input_nodes[0] if graph.is_call(value, *MOVES) else value
    before = _unclipped(nodes, source) if source is not value else value
    return value if before is source else nodes.node_copy(value, lambda node: before if node is source else node)


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
            result = n.target(owner.read(value, n), rounded, *others, **keywords)  # type: ignore[operator]
            if owner.scheme.gradient_bits and n.name in owner.scheme.layers:
                result = quantize_gradient(result, owner.scheme.gradient_bits)
        elif any(user.name in owner.scheme.signs for user in n.users) and graph.is_call(n, aten.ge.Scalar):
            result = binarize(self.fetch_args_kwargs_from_env(n)[0][0])
        elif n.name in owner.scheme.signs:
            result = self.env[graph.argument(n, "condition")]
        elif graph.is_call(n, aten.batch_norm.default) and owner.training and owner.learns:
            result = self._normalized(n)
        else:
            result = super().run_node(n)
        return owner.rounded(result, n)

    def _normalized(self, norm: fx.Node) -> torch.Tensor:
        """Run a BatchNorm on the statistics of the batch, and keep its running ones, where it has such."""
        arguments, _ = self.fetch_args_kwargs_from_env(norm)
        value, weight, bias, mean, variance, training, _, epsilon, *_ = arguments
        keeps = mean is not None and not training
        share = self._owner[0].share
        return functional.batch_norm(value, mean, variance, weight, bias, keeps or training, share, epsilon)


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
        if all(node.name in names and _path(node) == path for node in users) and len({*map(scale_axis, users)}) == 1:
            own.update(dict.fromkeys(users, users[0].name))
    return own


def _path(layer: fx.Node) -> str:
    """Return where a layer's weight is stored; empty where it is computed."""
    weight = graph.argument(layer, "weight")
    return str(weight.target) if weight.op == "get_attr" else ""


def scale_axis(layer: fx.Node) -> int | None:
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
