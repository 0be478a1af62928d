"""A module that stands for several: one layer, or nothing, and the activation that they ended with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import fx, nn
from torch.nn.utils import skip_init

from optimize import graph, ops
from optimize.errors import Refused
from optimize.graph import aten

#: Activations that may follow, by the operator's name.
ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU, "relu6": nn.ReLU6, "hardswish": nn.Hardswish, "silu": nn.SiLU, "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid, "tanh": nn.Tanh,
}  # fmt: skip
_BY_OPERATOR = {
    aten.hardswish.default: "hardswish", aten.silu.default: "silu", aten.gelu.default: "gelu",
    aten.sigmoid.default: "sigmoid", aten.tanh.default: "tanh",
}  # fmt: skip
_BY_BOUNDS = {(0.0, math.inf): "relu", (0.0, 6.0): "relu6"}
#: The record of what stands for modules: in nodes' ``meta``, and the buffer that says it in a state dict.
STANDS_FOR = "stands_for"
NOTHING = "none - -"
#: The weight of each layer: how many axes it has, and that it holds real numbers.
_HELD = {"conv2d": (4, True), "linear": (2, True), "none": None}
_LONGEST = 40


class Merged(nn.Sequential):
    """One layer, or nothing, and an activation, or none.

    Its state dict says what it is (``stands_for``, text as uint8), so that weights alone are enough to make it again.

    Args:
        spec: ``conv2d SxS ACTIVATION`` with its stride, ``linear - ACTIVATION`` or ``none - ACTIVATION``; ``-`` for no
            activation.
        weight: Of the layer, ``[C_out, C_in, k, k]`` or ``[C_out, C_in]``; None for nothing.

    Raises:
        Refused: The words mean nothing, or do not fit the weight.

    Example:
        >>> Merged("conv2d 2x2 relu", torch.zeros(8, 4, 3, 3))
        Merged(
          (0): Conv2d(4, 8, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1))
          (1): ReLU()
        )
    """

    stands_for: torch.Tensor

    def __init__(self, spec: str, weight: torch.Tensor | None) -> None:
        layer, stride, activation = (*spec.split(), "", "", "")[:3]
        held = None if weight is None else (weight.dim(), weight.is_floating_point())
        if layer not in _HELD or held != _HELD[layer]:
            raise Refused(f"'{spec[:_LONGEST]}' with a weight is no layer that stands for others.")
        super().__init__()
        if weight is not None and layer == "conv2d":
            sides = [int(side) for side in stride.split("x") if side.isdecimal() and len(side) < 3]
            rows, columns, *kernel = weight.shape
            if len(sides) != 2 or not all(sides) or any(side % 2 == 0 for side in kernel):
                raise Refused(f"'{spec[:_LONGEST]}' is no convolution.")
            padding = [side // 2 for side in kernel]
            self.append(skip_init(nn.Conv2d, columns, rows, tuple(kernel), tuple(sides), tuple(padding)))
        elif weight is not None:
            self.append(skip_init(nn.Linear, weight.shape[1], weight.shape[0]))
        if activation != "-":
            if activation not in ACTIVATIONS:
                raise Refused(f"'{activation[:_LONGEST]}' is no activation known here.")
            self.append(ACTIVATIONS[activation]())
        if weight is not None:
            self.to(weight.dtype)
        self.register_buffer(STANDS_FOR, torch.tensor(list(spec.encode()), dtype=torch.uint8))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return what the layer makes of a value, of nothing a copy: what comes behind may write to it."""
        return super().forward(input) if len(self) else input.clone()

    @staticmethod
    def activation(node: fx.Node) -> str | None:
        """Return the name of the activation that a call is; None for other calls."""
        if len(node.all_input_nodes) != 1 or node.op != "call_function":
            return None
        if (bounds := ops.clip_bounds(node)) is not None:
            return _BY_BOUNDS.get(bounds)
        if graph.is_call(node, aten.gelu.default) and graph.argument(node, "approximate") != "none":
            return None
        return _BY_OPERATOR.get(node.target)  # type: ignore[call-overload]


def read_spec(text: torch.Tensor) -> str:
    """Return the words that a state dict holds as uint8.

    Raises:
        Refused: They are none.
    """
    if text.dtype is not torch.uint8 or text.dim() != 1 or not 0 < len(text) <= _LONGEST or int(text.max()) > 127:
        raise Refused(f"'{STANDS_FOR}' of the state dict is no words that say what stands for a module.")
    return bytes(text.tolist()).decode("ascii")
