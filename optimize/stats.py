"""Size and work of a program, counted while its graph runs once on the example inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from optimize import graph
from optimize.records import Stats


def count(module: fx.GraphModule, inputs: Sequence[torch.Tensor], samples: int) -> Stats:
    """Run the graph once on ``inputs``, which hold ``samples`` samples, and count."""
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    weights = {id(t): t for t in (*module.parameters(), *module.buffers())}.values()
    traffic = _Traffic(module)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        traffic.run(*inputs)
    return Stats(
        ops=dict(sorted(Counter(map(graph.op_name, calls)).items())),
        parameters=sum(t.numel() for t in weights),
        weight_bytes=sum(t.numel() * t.element_size() for t in weights),
        macs=counter.get_total_flops() // 2 // samples + sum(map(_recurrent_macs, calls)),
        moved_bytes=traffic.activation_bytes // samples + traffic.weight_bytes,
    )


class _Traffic(fx.Interpreter):
    """Runs the graph and adds up what every call reads and writes, apart for weights and for what depends on inputs."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.activation_bytes = 0
        self.weight_bytes = 0
        self._activations: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "placeholder" or any(source in self._activations for source in n.all_input_nodes):
            self._activations.add(n)
        if n.op == "call_function" and _bytes(result) and not is_view(n):
            for value, held in ((n, result), *((source, self.env[source]) for source in n.all_input_nodes)):
                if value in self._activations:
                    self.activation_bytes += _bytes(held)
                else:
                    self.weight_bytes += _bytes(held)
        return result


def is_view(node: fx.Node) -> bool:
    """Say whether a call only looks at its input's bytes: its schema says that the result aliases an argument."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True  # getitem and arithmetic on sizes
    casts = node.target.overloadpacket in (torch.ops.aten.to, torch.ops.aten.contiguous)
    return not casts and any(entry.alias_info is not None for entry in node.target._schema.returns)


def _bytes(value: Any) -> int:
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _recurrent_macs(node: fx.Node) -> int:
    """Multiply-accumulates of one sample through an LSTM or GRU, each matrix once a step; torch does not count them."""
    if not graph.is_call(node, *graph.RECURRENT):
        return 0
    x, _, weights, *_, batch_first = node.args
    steps = x.meta["val"].shape[1 if batch_first else 0]  # type: ignore[union-attr]
    matrices = [weight.meta["val"] for weight in weights if weight.meta["val"].dim() == 2]  # type: ignore[union-attr]
    return sum(matrix.numel() for matrix in matrices) * int(steps) if isinstance(steps, int) else 0
