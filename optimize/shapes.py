"""The shape and dtype of every value of a program at one batch size, found without computing anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from optimize.program import Program

#: A tensor's shape, and the bytes it holds.
Values = Mapping[fx.Node, tuple[torch.Tensor, ...]]


def values_at(program: Program, batch: int) -> Values:
    """Return the tensors (fake: shape and dtype, no memory) each node gives for a batch of this size.

    Args:
        program: Its graph is read and not changed.
        batch: Samples in one run; ignored where the program fixes its batch.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    inputs = program.sample(batch) if program.batch else program.inputs
    fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in inputs]
    # Composite operators (LSTM) have shape rules in Python only.
    with mode, torch.no_grad(), enable_python_dispatcher():
        run = _Shapes(program.graph_module, mode)
        run.run(*fakes)
    return run.found


class _Shapes(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.mode = mode
        self.found: dict[fx.Node, tuple[torch.Tensor, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "get_attr":
            result = self.mode.from_tensor(result, static_shapes=True)
        self.found[n] = tuple(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result
