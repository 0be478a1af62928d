"""BatchNorm in inference: one scale and one shift a channel."""

from __future__ import annotations

import torch
from torch import fx

from optimize import graph


def scale_and_shift(module: fx.GraphModule, norm: fx.Node) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return a BatchNorm as ``scale * x + shift``, float64 ``[C]`` each; None when it uses batch statistics.

    ``scale = gamma / sqrt(var + eps)`` and ``shift = beta - scale * mean``.

    Args:
        module: The graph's owner.
        norm: A call of ``aten.batch_norm``.
    """
    if graph.argument(norm, "training") or graph.argument(norm, "running_mean") is None:
        return None
    names = ("running_mean", "running_var", "weight", "bias")
    mean, var, gamma, beta = (graph.constant(module, graph.argument(norm, name)) for name in names)
    if mean is None or var is None:
        return None
    scale = torch.rsqrt(var.double() + float(graph.argument(norm, "eps")))
    if gamma is not None:
        scale = scale * gamma.double()
    shift = -mean.double() * scale
    return scale, shift if beta is None else shift + beta.double()
