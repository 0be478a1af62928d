"""Whether a captured model answers at another height and width: what its export promises is tried."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from optimize import graph
from optimize.errors import Refused
from optimize.pipeline import EXACT_TOLERANCE, output_error
from optimize.program import Program

_HINT = (
    "Resample an embedding that has one size, pool to one size before a Linear, or leave --dynamic-size "
    "(dynamic_size=True) out."
)


def check_sizes(program: Program) -> None:
    """Run a program whose height and width are free at twice and three times its own, beside its module.

    Raises:
        Refused: It computes with the size of the example; the message names the layer.
    """
    inputs = program.enlarged(program.batch or 1)
    shapes = ", ".join(str(list(tensor.shape)) for tensor in inputs)
    located = _Located(program)
    try:
        with torch.inference_mode():
            found: tuple[torch.Tensor, ...] = located.run(*inputs)
    except Exception as error:
        where = graph.origin(located.reached) if located.reached is not None else ""
        raise Refused(
            f"The model fixes its height or width: '{where}' fails on {shapes}: {str(error).splitlines()[0]}",
            hint=_HINT,
        ) from error
    for want, got in zip(_expected(program, inputs), found, strict=True):
        difference, scale = output_error(want, got)
        if difference > EXACT_TOLERANCE.get(want.dtype, 0.0) * scale:
            raise Refused(f"The captured graph answers differently from the module on {shapes}.", hint=_HINT)


class _Located(fx.Interpreter):
    """Runs a graph and remembers the node it has come to."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.graph_module)
        self.reached: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.reached = n
        return super().run_node(n)


def _expected(program: Program, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    assert program.source is not None
    arguments, keywords = pytree.tree_unflatten(list(inputs), program.in_spec)
    with torch.inference_mode():
        flat, _ = pytree.tree_flatten(program.source(*arguments, **keywords))
    return flat
