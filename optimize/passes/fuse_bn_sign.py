"""Turn BatchNorm followed by a sign or a comparison into a comparison with one threshold a channel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from optimize import graph
from optimize.algebra import folding, monotone
from optimize.algebra.channelwise import Channelwise
from optimize.algebra.folding import Folded
from optimize.algebra.monotone import COMPARISONS, SHAPES, SIGNS, Chain, Ending, first_true
from optimize.graph import aten
from optimize.passes.base import Outcome, Pass, Rewrite, Skip
from optimize.program import Program
from optimize.registry import register_pass

_RISING = (aten.ge.Scalar, aten.gt.Scalar)
#: Whether a value is at or past its threshold, or short of it, by the direction in which it passes.
_PAST = {1: aten.ge.Tensor, -1: aten.le.Tensor}
_SHORT = {1: aten.lt.Tensor, -1: aten.gt.Tensor}


@register_pass
@dataclass(frozen=True)
class FuseBNSign(Pass):
    """Turn BatchNorm followed by a sign or a comparison into a comparison with a threshold a channel.

    ``BN(z) >= theta`` is ``z >= T`` where gamma is positive, ``z <= T`` where it is negative, and constant where it is
    zero, with one ``T`` a channel, ``[C, 1, 1]`` for ``z`` ``[N, C, H, W]``. ``T`` is not computed from a formula but
    found by bisection over the floating-point numbers with the operators themselves, so the answers are the same to
    the last bit, ties included. ``sign(BN(z))`` is ``where(z >= T, 1, -1)``, with a second threshold where some number
    gives exactly zero. Scales, shifts and clamps around the BatchNorm (LayerScale, hardtanh) go with it.

    Where the gammas have both signs, the layer that computes ``z`` gets the weights and biases of the channels with a
    negative one negated, which negates ``z`` exactly; where it cannot, ``z`` is multiplied by 1 or -1 a channel.
    The weights of a binary layer stay as they are but for that sign: folding the BatchNorm into them would not.

    When it applies: signs and comparisons with a number are all that is read of the BatchNorm. Skipped, with the
    reason: another reader; statistics of the batch; scales along different axes. Inputs that are not finite may
    differ.

    What it costs: nothing at run time. The thresholds belong to the arithmetic of this machine's operators; another
    runtime's BatchNorm may round a tie otherwise, its comparison may not.

    Example:
        >>> import torch, optimize
        >>> class Binary(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.conv, self.norm = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)
        ...     def forward(self, x):
        ...         return self.norm(self.conv(x)) >= 0.5
        >>> program = optimize.capture(Binary().eval(), (torch.zeros(2, 3, 8, 8),))
        >>> program, outcome = FuseBNSign().apply(program)
        >>> dict(program.stats().ops)
        {'conv2d': 1, 'ge': 1}

    Source: M. Courbariaux et al., "Binarized Neural Networks", 2016, arXiv 1602.02830; Y. Umuroglu et al., "FINN",
    2016, arXiv 1612.07119 (BatchNorm and sign as a threshold).
    """

    def rewrite(self, program: Program) -> Outcome:
        """Rewrite every chain, from the first call that can be part of it."""
        module = program.graph_module
        rewrites: list[Rewrite] = []
        for head in graph.calls(module.graph, *monotone.HEADS):
            chain = monotone.read(module, head) if head.users else ""
            if isinstance(chain, Chain):
                rewrites += _Thresholds(module, chain).write()
                for ending in chain.endings:
                    _erase(module, ending)
        skips = [
            Skip(graph.origin(norm), "batch_norm", str(monotone.read(module, norm)))
            for norm in graph.calls(module.graph, aten.batch_norm.default)
            if any(graph.is_call(reader, *SIGNS, *COMPARISONS) for reader in norm.users)
        ]
        return Outcome(tuple(rewrites), tuple(skips))


def _erase(module: fx.GraphModule, ending: Ending) -> None:
    """Remove a rewritten sign or comparison, and the calls before it that nothing else reads."""
    for node in (ending.node, *reversed(ending.calls)):
        if not node.users:
            module.graph.erase_node(node)


@dataclass(frozen=True)
class _Thresholds:
    """Writes the signs and comparisons of one chain as comparisons of its source with thresholds."""

    module: fx.GraphModule
    chain: Chain

    def write(self) -> list[Rewrite]:
        """Add the comparisons and let the readers read them."""
        flips = self._flips()
        value = self._flipped(flips)
        rewrites = []
        for ending in self.chain.endings:
            direction = -1 if bool((ending.signs * flips < 0).any()) else 1
            with self.module.graph.inserting_before(ending.node):
                replacement = self._replacement(ending, value, flips, direction)
            ending.node.replace_all_uses_with(replacement)
            names = ", ".join(graph.op_name(node) for node in (*ending.calls, ending.node))
            self._read_shapes(ending)
            rewrites.append(Rewrite(self._where, f"{names} became a comparison with a threshold a channel"))
        return rewrites

    def _read_shapes(self, ending: Ending) -> None:
        """Let what reads only the shape of a call read that of the source, which is the same."""
        for call in ending.calls:
            for reader in list(call.users):
                if graph.is_call(reader, *SHAPES):
                    reader.replace_input_with(call, self.chain.source)

    def _flips(self) -> Tensor:
        """Return -1 for each channel to negate so that all pass their thresholds in one direction, else 1."""
        signs = self.chain.endings[0].signs
        is_mixed = bool((signs > 0).any()) and bool((signs < 0).any())
        return torch.where(signs < 0, -1.0, 1.0).double() if is_mixed else torch.ones_like(signs)

    def _flipped(self, flips: Tensor) -> fx.Node:
        """Negate channels of the source: in the weights that compute it, or by a product where others read it too."""
        source, heads = self.chain.source, [ending.calls[0] for ending in self.chain.endings]
        if bool((flips > 0).all()):
            return source
        operator = Channelwise(source, self.chain.axis, flips, torch.zeros_like(flips))
        folded = folding.into_layer_before(self.module, operator) if len(source.users) == 1 else ""
        if isinstance(folded, Folded):
            folded.write(self.module)
            return source
        with self.module.graph.inserting_before(heads[0]):
            return self.module.graph.call_function(aten.mul.Tensor, (source, self._weight("signs", flips)))

    def _replacement(self, ending: Ending, value: fx.Node, flips: Tensor, direction: int) -> fx.Node:
        """Write one ending as comparisons of ``value``."""
        if graph.is_call(ending.node, *SIGNS):
            return self._sign(ending, value, flips, direction)
        is_rising = graph.is_call(ending.node, *_RISING)
        condition = (lambda answer: answer) if is_rising else torch.logical_not
        operators = _PAST if is_rising else _SHORT
        return self._compare(operators[direction], value, direction * self._first(ending, flips * direction, condition))

    def _sign(self, ending: Ending, value: fx.Node, flips: Tensor, direction: int) -> fx.Node:
        """Write a sign: 1 from one threshold on, -1 before it; 0 between two where some number gives exactly 0."""
        zero = self._first(ending, flips * direction, lambda sign: sign >= 0)
        positive = self._first(ending, flips * direction, lambda sign: sign > 0)
        below = self._scalar(-1.0)
        if not torch.equal(zero, positive):
            is_zero = self._compare(_PAST[direction], value, direction * zero)
            below = self._where_self(is_zero, 0.0, below)
        return self._where_self(self._compare(_PAST[direction], value, direction * positive), 1.0, below)

    def _first(self, ending: Ending, signs: Tensor, condition: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the smallest number a channel that, with its sign, makes the answer meet a condition."""
        factors = (signs * ending.signs.abs()).to(self.chain.value.dtype)  # a constant is asked at 0: inf * 0 is nan

        def holds(numbers: Tensor) -> Tensor:
            return condition(self.chain.answer(self.module, ending, factors * numbers))

        return first_true(holds, len(signs), factors.dtype)

    def _compare(self, operator: Any, value: fx.Node, numbers: Tensor) -> fx.Node:
        return self.module.graph.call_function(operator, (value, self._weight("threshold", numbers)))

    def _where_self(self, condition: fx.Node, number: float, other: fx.Node) -> fx.Node:
        return self.module.graph.call_function(aten.where.self, (condition, self._scalar(number), other))

    def _scalar(self, number: float) -> fx.Node:
        return self.module.graph.call_function(
            aten.scalar_tensor.default, (number,), kwargs={"dtype": self.chain.value.dtype}
        )

    def _weight(self, name: str, numbers: Tensor) -> fx.Node:
        """Store one number a channel beside the module that the chain belongs to."""
        shape = [-1, *[1] * (self.chain.value.dim() - self.chain.axis - 1)]
        tensor = numbers.to(self.chain.value.dtype).reshape(shape)
        return self.module.graph.get_attr(graph.store(self.module, f"{self._where}.{name}", tensor))

    @property
    def _where(self) -> str:
        """The path of the BatchNorm, or of what else stands in its place."""
        calls = self.chain.endings[0].calls
        return graph.origin(next((call for call in calls if graph.is_call(call, aten.batch_norm.default)), calls[0]))
