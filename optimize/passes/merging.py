"""Takes branches out of a model: each block is captured and merged by ``Reparameterize``, which holds the algebra."""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import fx, nn

from optimize import graph, ops
from optimize.algebra import padding
from optimize.branches import kinds
from optimize.branches.insertion import replaced
from optimize.branches.layers import Branches, Conv
from optimize.errors import Refused, require
from optimize.frontend import capture
from optimize.passes.reparameterize import Reparameterize
from optimize.preparation import private_copy


def merge_branches(model: nn.Module) -> nn.Module:
    """Return a copy of a branched model in which every block is again the one convolution it computes.

    Classes, state-dict keys and shapes are those of the model that :func:`insert_branches` was given, so its state dict
    loads strictly into a fresh one of them. Outputs are those of the branched model in evaluation mode, whatever mode
    it is in. The kernels are computed in float64 and rounded once.

    Args:
        model: The branched model; it is not touched.

    Raises:
        UsageError: What is given is no module.
        Refused: The model has no branches, or some were changed so that they are no longer one convolution.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> from optimize.branches.insertion import insert_branches
        >>> merged = merge_branches(insert_branches(net, "acb"))
        >>> net.load_state_dict(merged.state_dict(), strict=True)
        <All keys matched successfully>
    """
    require(model, nn.Module, "model", "Give the nn.Module that insert_branches returned, trained.")
    merged = private_copy(model)
    blocks = {path: block for path, block in merged.named_modules() if isinstance(block, Branches)}
    if not blocks:
        raise Refused("The model has no branches to merge.", hint="optimize.insert_branches(model, kind) puts them in.")
    return replaced(merged, {block: _merged(block, path) for path, block in blocks.items()})


def _merged(block: Branches, path: str) -> Conv:
    """Return the convolution of a block with the weights of all its branches."""
    conv = cast(Conv, block.main.conv)
    call, module = _one_convolution(block, path)
    weight, bias = (graph.constant(module, graph.argument(call, name), wide=True) for name in ("weight", "bias"))
    if weight is None or weight.shape != conv.weight.shape or (bias is not None) != block.biased:
        raise Refused(f"The branches at '{path}' merge into another convolution than the one they stand for.")
    conv.weight = _like(conv.weight, weight)
    if bias is not None:
        conv.bias = _like(block.get_parameter("main.norm.bias"), bias)
    return conv.train(block.training)


def _one_convolution(block: Branches, path: str) -> tuple[fx.Node, fx.GraphModule]:
    """Capture a block in float64 on a small input and merge it; return the convolution that is left."""
    alone = copy.deepcopy(block).cpu().double().eval()
    program = capture(alone, (_probe(cast(Conv, alone.main.conv)),), dynamic_batch=False)
    program, outcome = Reparameterize().apply(program)
    left = [node for node in program.graph.nodes if node.op == "call_function"]
    others = [node for node in left if not graph.is_call(node, *ops.CONVOLUTIONS, *padding.OPERATORS[:2])]
    convolutions = [node for node in left if graph.is_call(node, *ops.CONVOLUTIONS)]
    if others or len(convolutions) != 1:
        names = ", ".join(sorted({graph.op_name(node) for node in (*convolutions, *others)}))
        reasons = "; ".join(dict.fromkeys(skip.reason for skip in outcome.skips))
        raise Refused(
            f"The branches at '{path}' do not merge into one convolution: {len(convolutions)} are left ({names}).",
            hint=reasons,
        )
    return convolutions[0], program.graph_module


def _probe(conv: Conv) -> torch.Tensor:
    """Return a float64 input ``[2, C_in, *S]`` somewhat larger than the kernel and its padding."""
    axes = zip(conv.dilation, conv.kernel_size, conv.stride, kinds.padding_widths(conv), strict=True)
    sizes = [distance * taps + 2 * step + max(widths) for distance, taps, step, widths in axes]
    return torch.zeros(2, conv.in_channels, *sizes, dtype=torch.float64)


def _like(old: torch.Tensor, value: torch.Tensor) -> nn.Parameter:
    """Return a parameter with the dtype, device, layout and ``requires_grad`` of another."""
    return nn.Parameter(torch.empty_like(old).copy_(value), requires_grad=old.requires_grad)
