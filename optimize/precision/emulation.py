"""Run a graph in float32 beside itself with 16-bit values, both computed in float32.

A call in half reads rounded values, computes in float32 and rounds its result: what kernels with wide accumulators do,
on any machine, at the speed of float32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from optimize import graph
from optimize.errors import Refused, first_line
from optimize.precision.casting import is_mask, narrow_call, narrowed
from optimize.program import Program

Values = dict[fx.Node, Any]


@dataclass(frozen=True)
class Emulation:
    """Evaluates the nodes of a program one by one, each in float32 or as in a 16-bit type.

    Attributes:
        program: In float32.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
    """

    program: Program
    dtype: torch.dtype
    _weights: Values = field(default_factory=dict, init=False, repr=False)
    _narrow: dict[fx.Node, Any] = field(default_factory=dict, init=False, repr=False)

    def start(self, flat: Sequence[torch.Tensor]) -> Values:
        """Return the values of inputs and weights."""
        nodes = [node for node in self.program.graph.nodes if node.op == "placeholder"]
        weights = [node for node in self.program.graph.nodes if node.op == "get_attr"]
        held = {node: graph.attribute(self.program.graph_module, str(node.target)) for node in weights}
        return {**dict(zip(nodes, flat, strict=True)), **held}

    @property
    def calls(self) -> list[fx.Node]:
        """The calls, in execution order."""
        return [node for node in self.program.graph.nodes if node.op == "call_function"]

    def value(self, call: fx.Node, values: Mapping[fx.Node, Any], *, half: bool) -> Any:
        """Return what a call gives for the values it reads, in float32 or as in half.

        Raises:
            Refused: It does not take them rounded, such as an index that is then beyond its table.
        """
        if not half:
            return self._computed(call, *fx.node.map_arg((call.args, call.kwargs), values.__getitem__))
        if call not in self._narrow:
            args, kwargs = narrow_call(call, self.dtype, masks=True)
            # It computes in float32 here whatever dtype it names.
            self._narrow[call] = fx.node.map_aggregate(
                (args, kwargs), lambda each: torch.float32 if each is self.dtype else each
            )
        args, kwargs = fx.node.map_arg(self._narrow[call], lambda source: self._read(source, values))
        return pytree.tree_map(self._round, self._computed(call, args, kwargs))

    def _computed(self, call: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            return call.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, IndexError) as error:
            what = f"'{graph.origin(call)}' cannot be computed from rounded values: {first_line(error)}"
            raise Refused(what, hint="Keep what it is computed from in float32 (--keep).") from error

    def outputs(self, flat: Sequence[torch.Tensor], halves: Collection[fx.Node]) -> tuple[torch.Tensor, ...]:
        """Return the flat outputs with these calls in half."""
        values = self.start(flat)
        for call in self.calls:
            values[call] = self.value(call, values, half=call in halves)
        return tuple(values[node] for node in self.program.outputs)

    def _round(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype is torch.float32:
            return value.to(self.dtype).float()
        return value

    def _read(self, source: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """Return a value as half reads it; weights are rounded once."""
        if source.op != "get_attr":
            return self._round(values[source])
        if source not in self._weights:
            held = values[source]
            is_float = held.dtype is torch.float32
            self._weights[source] = narrowed(held, self.dtype, masks=is_mask(source)).float() if is_float else held
        return self._weights[source]
