"""Links: values whose channels may be scaled or shifted, because what makes them and all that reads them takes it back.

With positive numbers ``s``, one a channel, ``W2 f(W1 x + b1) = (W2 diag(s)) f(diag(1/s) (W1 x + b1))`` for every ``f``
that keeps channels apart and is positively homogeneous: ReLU, leaky ReLU, pools, a product with a gate. A sum is scaled
when all that is added is, so the stream of a residual stage is one link with many makers. Without ``f`` channels may be
shifted too: ``W2 (y + c) + b2 = W2 y + (W2 c + b2)``, where no padding stands in between.

Where nothing takes a scale, because another ``f`` or another reader is in the way, linear layers can have a product of
their own in front of them: ``W2 y = (W2 diag(s)) (diag(1/s) y)``. It costs a pass over the value.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx

from optimize import graph, ops
from optimize.algebra import carrying, folding
from optimize.algebra.channelwise import Channelwise
from optimize.errors import Refused
from optimize.graph import aten
from optimize.program import Program, is_one_position, tensor_value

LAYERS = (*ops.CONVOLUTIONS, aten.linear.default)
#: What a scale a channel passes without changing the result.
SCALES_PASS = (*ops.HOMOGENEOUS, aten.mean.dim, aten.mul.Tensor, aten.select.int)
#: What a shift a channel passes without changing the result.
SHIFTS_PASS = (*ops.AVERAGES, aten.select.int)


@dataclass(frozen=True)
class Reader:
    """A layer that reads a link's value.

    Attributes:
        layer: The convolution or linear layer.
        channels: Which of the link's channels each of its input channels is, int64 ``[C_in]``.
    """

    layer: fx.Node
    channels: torch.Tensor

    @property
    def value(self) -> fx.Node:
        """The layer's input."""
        return cast(fx.Node, graph.argument(self.layer, "input"))


@dataclass(frozen=True)
class Link:
    """A value and all that it becomes before layers read it.

    Attributes:
        makers: The layers or the normalisation whose rows make its channels; several where their results are added.
            The value itself where ``apart``.
        axis: The axis of the makers' results that its channels lie on.
        channels: How many.
        between: Values on the way that no layer reads, factors of products and parts of sums: they have steps too.
        clips: Calls on the way that are passed only where the data says that they may be.
        apart: Its readers get a product of their own in front of them; what makes the value stays as it is.
    """

    makers: tuple[fx.Node, ...]
    axis: int
    channels: int
    readers: tuple[Reader, ...]
    between: tuple[fx.Node, ...] = ()
    clips: tuple[fx.Node, ...] = ()
    apart: bool = False

    @property
    def maker(self) -> fx.Node:
        """The first of its makers."""
        return self.makers[0]


@dataclass
class _Search:
    """Follows a value to its readers.

    Attributes:
        through: Calls that are passed.
        clips: Calls that are passed and remembered.
        values: The values seen, which all carry the link's channels.
        makers: The calls that make them.
        readers: The layers found.
        between: What products and sums on the way read.
        clipped: The clips passed.
        obstacle: Why the value is no link, empty where it is one.
    """

    module: fx.GraphModule
    through: Collection[Any]
    clips: Collection[Any]
    values: list[fx.Node] = field(default_factory=list)
    makers: list[fx.Node] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    between: list[fx.Node] = field(default_factory=list)
    clipped: list[fx.Node] = field(default_factory=list)
    obstacle: str = ""

    def link(self) -> Link | None:
        """Return what was found, None where an obstacle is in the way."""
        sums = [value for value in self.values if graph.is_call(value, aten.add.Tensor)]
        if any(source not in self.values for total in sums for source in total.all_input_nodes):
            self.obstacle = self.obstacle or "something else is added to it"
        if self.clipped and len(self.makers) > 1:
            self.obstacle = "a sum of it is clipped"
        if self.obstacle or not self.readers:
            return None
        maker, channels = self.makers[0], cast(int, _channels(self.module, self.makers[0]))
        found = (tuple(self.readers), tuple(self.between), tuple(self.clipped))
        return Link(tuple(self.makers), ops.channel_axis(maker, maker), channels, *found)

    def begin(self, maker: fx.Node, *, shifts: bool = False) -> None:
        """Visit all that a maker's result becomes."""
        channels = _channels(self.module, maker)
        if channels is None or not is_own(maker):
            self.obstacle = "its weight is shared, or not a float32 constant with a number a channel"
            return
        if _computes_bias(self.module, maker):
            self.obstacle = "its bias is computed"
            return
        self.makers.append(maker)
        numbers = torch.arange(1, channels + 1, dtype=torch.float64)
        shift = numbers if shifts else torch.zeros_like(numbers)
        self.follow(Channelwise(maker, ops.channel_axis(maker, maker), numbers, shift))

    def follow(self, operator: Channelwise) -> None:
        """Visit all that reads ``operator.source``; its numbers are the channels, counted from 1."""
        if operator.source in self.values:
            return
        self.values.append(operator.source)
        if graph.reads(operator.source) != len(operator.source.users):
            self.obstacle = "a call reads it twice"
        for user in operator.source.users:
            if self.obstacle:
                return
            if graph.is_call(user, *LAYERS) and graph.argument(user, "input") is operator.source:
                self._read(user, operator)
                continue
            following = self._passed(user, operator)
            if following is not None:
                if graph.is_call(user, aten.mul.Tensor, aten.add.Tensor) and self._is_plain(operator):
                    self.between.append(operator.source)
                self.follow(following)
            elif not self.obstacle:
                self.obstacle = f"{graph.op_name(user) if user.op == 'call_function' else 'the output'} reads it"

    def _read(self, layer: fx.Node, operator: Channelwise) -> None:
        numbers = operator.along(ops.channel_axis(layer, operator.source))
        if numbers is None or graph.constant(self.module, graph.argument(layer, "weight")) is None:
            self.obstacle = f"{graph.op_name(layer)} reads it along another axis or has no constant weight"
        elif not is_own(layer):
            self.obstacle = "the weight of a layer that reads it is shared"
        elif _computes_bias(self.module, layer):
            self.obstacle = "the bias of a layer that reads it is computed"
        elif bool(operator.shift.any()) and ops.pads_with_zeros(layer):
            self.obstacle = f"{graph.op_name(layer)} pads it with zeros, which a shift would move"
        else:
            self.readers.append(Reader(layer, numbers[0].long() - 1))

    def _passed(self, call: fx.Node, operator: Channelwise) -> Channelwise | None:
        """Return the operator on the result of a call that keeps channels apart, or None."""
        if graph.is_call(call, *carrying.MOVES):
            return carrying.after(operator, call)
        if graph.is_call(call, *self.clips):
            self.clipped.append(call)
            return replace(operator, source=call)
        if not graph.is_call(call, *self.through):
            return None
        if graph.is_call(call, aten.add.Tensor):
            return self._added(call, operator)
        if graph.is_call(call, aten.mean.dim, aten.select.int):
            return _reduced(call, operator)
        if graph.is_call(call, aten.mul.Tensor) and not self._is_gate(call, operator.source):
            return None
        pooled = ops.SPATIAL_AXES.get(call.target, 0)
        if pooled and operator.axis is not None and operator.axis >= call.meta["val"].dim() - pooled:
            return None  # a pool over features, which lie last behind a linear layer, mixes them
        return replace(operator, source=call)

    def _added(self, total: fx.Node, operator: Channelwise) -> Channelwise | None:
        """Return the operator on a sum whose other part is brought into the link, or None."""
        other = next((each for each in total.args[:2] if each is not operator.source), None)
        if not isinstance(other, fx.Node) or _shape(other) != _shape(operator.source):
            self.obstacle = "something of another shape is added to it"
        elif not self._is_plain(operator):
            self.obstacle = "its channels are added in another order"
        else:
            self._trace(other)
        return None if self.obstacle else replace(operator, source=total)

    def _trace(self, value: fx.Node) -> None:
        """Begin at all that makes a value which is added to one of the link's."""
        if self.obstacle or value in self.values:
            return
        if graph.is_call(value, *ops.HOMOGENEOUS, aten.add.Tensor, aten.mul.Tensor):
            is_product = graph.is_call(value, aten.mul.Tensor)  # its other factor is a gate
            for source in value.all_input_nodes:
                if not is_product or _shape(source) == _shape(value):
                    self._trace(source)
        elif not graph.is_call(value, *LAYERS):
            kind = graph.op_name(value) if value.op == "call_function" else "an input"
            self.obstacle = f"{kind} is added to it"
        else:
            self.begin(value)

    def _is_plain(self, operator: Channelwise) -> bool:
        """Say whether a value has the channels where its first maker has them, in the same order."""
        numbers = torch.arange(1, operator.scale.numel() + 1)
        return operator.axis == ops.channel_axis(self.makers[0], self.makers[0]) and bool(
            (operator.scale == numbers).all()
        )

    def _is_gate(self, product: fx.Node, value: fx.Node) -> bool:
        """Say whether a product's other factor scales a value, and depends on it through other layers at most."""
        other = next((each for each in product.args[:2] if each is not value), None)
        return isinstance(other, fx.Node) and other not in self.values and _shape(product) == _shape(value)


def find(
    program: Program,
    makers: Collection[Any],
    through: Collection[Any],
    *,
    clips: Collection[Any] = (),
    shifts: bool = False,
) -> tuple[list[Link], dict[fx.Node, str]]:
    """Return the links of a program, and the calls whose value is none with the reason.

    Args:
        program: A float32 program.
        makers: Calls that may begin a link, of ``LAYERS`` and ``ops.NORMS``.
        through: Calls that may stand in between besides those that only move elements.
        clips: More of them, remembered on the link.
        shifts: Look for values that can be shifted; else for such that can be scaled.
    """
    links: list[Link] = []
    others: dict[fx.Node, str] = {}
    for maker in graph.calls(program.graph, *makers):
        if any(maker in link.makers for link in links):
            continue
        search = _Search(program.graph_module, through, clips)
        search.begin(maker, shifts=shifts)
        link = search.link()
        if link is None:
            others[maker] = search.obstacle or "no layer reads it"
        else:
            links.append(link)
    return links, others


def find_apart(program: Program, makers: Collection[Any], others: Collection[Link]) -> list[Link]:
    """Return the values of many positions that linear layers can read through a product of their own.

    Args:
        program: A float32 program.
        makers: The calls whose values may be such.
        others: Links that are known: what reads them needs no product.
    """
    known = {reader.layer for link in others for reader in link.readers}
    found: dict[fx.Node, list[Reader]] = {}
    for layer in graph.calls(program.graph, aten.linear.default):
        value = graph.argument(layer, "input")
        weight = graph.constant(program.graph_module, graph.argument(layer, "weight"))
        is_free = layer not in known and graph.is_call(value, *makers) and not is_one_position(value)
        if is_free and weight is not None and weight.dtype is torch.float32 and is_own(layer):
            found.setdefault(value, []).append(Reader(layer, torch.arange(weight.shape[1])))
    return [
        Link((value,), ops.channel_axis(readers[0].layer, value), len(readers[0].channels), tuple(readers), apart=True)
        for value, readers in found.items()
    ]


def rewrite(module: fx.GraphModule, link: Link, scale: torch.Tensor, shift: torch.Tensor) -> None:
    """Let a link carry ``(x - shift) / scale``, and its readers make of it what they made of ``x``.

    Args:
        scale: Positive numbers, float64 ``[C]``.
        shift: float64 ``[C]``.
    """
    if link.apart:
        _divide(module, link, scale)
    for maker in () if link.apart else link.makers:
        weight, bias = (graph.constant(module, _optional(maker, name), wide=True) for name in ("weight", "bias"))
        assert weight is not None
        moved = ((0.0 if bias is None else bias) - shift) / scale
        if bias is not None or bool(moved.any()):
            graph.replace_weight(module, maker, "bias", moved.float(), near=graph.bias_path(maker))
        graph.replace_weight(module, maker, "weight", (weight / scale.reshape(-1, *[1] * (weight.dim() - 1))).float())
    for reader in link.readers:
        folded = folding.into_inputs(module, reader.layer, scale[reader.channels], shift[reader.channels])
        if isinstance(folded, str):  # ``find`` leaves one reason: numbers beyond float32
            raise Refused(f"'{graph.origin(reader.layer)}' takes no scale: {folded}.", hint="Leave the pass out.")
        folded.write(module)


def _divide(module: fx.GraphModule, link: Link, scale: torch.Tensor) -> None:
    """Let the readers of a link read ``x / scale`` in place of ``x``, the channels on its last axis."""
    value, factors = link.maker, (1 / scale).to(cast(torch.Tensor, tensor_value(link.maker)).dtype)
    with module.graph.inserting_after(value):
        held = module.graph.get_attr(graph.store(module, f"{value.name}_smoothing", factors))
    held.meta["val"] = factors.to("meta")
    with module.graph.inserting_after(held):
        product = module.graph.call_function(aten.mul.Tensor, (value, held))
    product.meta = dict(value.meta)
    for reader in link.readers:
        graph.set_argument(reader.layer, "input", product)


def by_input(layer: fx.Node, weight: torch.Tensor) -> torch.Tensor:
    """Return a layer's weight as ``[groups, C_out / groups, C_in / groups, taps]``."""
    groups = ops.groups(layer)
    return weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)


def is_own(layer: fx.Node) -> bool:
    """Say whether no other call reads a layer's weight or bias."""
    parameters = [_optional(layer, name) for name in ("weight", "bias")]
    return all(len(node.users) == 1 for node in parameters if isinstance(node, fx.Node))


def _computes_bias(module: fx.GraphModule, layer: fx.Node) -> bool:
    """Say whether a layer's bias is a value that is computed at run time."""
    bias = _optional(layer, "bias")
    return bias is not None and graph.constant(module, bias) is None


def _optional(layer: fx.Node, name: str) -> Any:
    """Return an argument by its schema name, None where the operator has none of it."""
    try:
        return graph.argument(layer, name)
    except KeyError:
        return None


def _channels(module: fx.GraphModule, maker: fx.Node) -> int | None:
    """Return how many channels a call's weight makes, None where it is not a float32 constant."""
    weight = graph.constant(module, graph.argument(maker, "weight"))
    is_flat = graph.is_call(maker, *ops.NORMS) and weight is not None and weight.dim() != 1
    return None if weight is None or weight.dtype is not torch.float32 or is_flat else len(weight)


def _shape(value: fx.Node) -> str:
    return str(getattr(tensor_value(value), "shape", ""))


def _reduced(call: fx.Node, operator: Channelwise) -> Channelwise | None:
    """Return the operator on a mean over, or a choice along, axes other than the channels', or None."""
    if operator.axis is None:
        return replace(operator, source=call)
    dims, given = cast(torch.Tensor, tensor_value(operator.source)).dim(), graph.argument(call, "dim")
    axes = {axis % dims for axis in ([given] if isinstance(given, int) else range(dims) if given is None else given)}
    if operator.axis in axes:
        return None
    is_kept = graph.is_call(call, aten.mean.dim) and graph.argument(call, "keepdim")
    gone = 0 if is_kept else sum(axis < operator.axis for axis in axes)
    return replace(operator, source=call, axis=operator.axis - gone)
