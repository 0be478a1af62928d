"""How values lie in memory: channels last, and channel counts that fill the machine's vectors."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from optimize import graph, ops
from optimize.advise.base import Finding, Measured, Setting, by_cost, compare_runs, on_noise, rule
from optimize.graph import aten

#: Vector registers and tensor cores take channels in multiples of this.
MULTIPLE = 8


@rule("channels_last", "setting")
def find_contiguous_maps(setting: Setting) -> Finding | None:
    """Two-dimensional convolutions on contiguous maps convert the layout around each call.

    oneDNN and cuDNN compute with the channels innermost. On contiguous maps each dense convolution reads and writes its
    input and output once more to convert them.
    """
    moved = {
        cost.layer: 2.0 * (cost.written_bytes + setting.values[node.args[0]][0].nbytes)  # type: ignore[index]
        for node, cost in setting.calls(aten.conv2d.default)
        if setting.shape(node.args[1])[1] > 1
    }
    if not moved:
        return None
    return Finding(
        what=f"{len(moved)} two-dimensional convolutions run on contiguous maps.",
        places=by_cost(moved),
        saved_s=sum(moved.values()) / setting.limits.copy_bytes_per_s,
        formula="2 * bytes of their inputs and outputs / copy bandwidth; nothing where the kernel converts nothing",
        action="model.to(memory_format=torch.channels_last), and the inputs too; ONNX Runtime and OpenVINO choose "
        "their own layout.",
    )


@find_contiguous_maps.remedy
def try_channels_last(setting: Setting) -> Measured | None:
    """Time the network with weights and inputs in channels_last."""
    last = setting.fused.clone()
    for weight in last.graph_module.parameters():
        weight.data = _channels_last(weight.data)
    inputs = tuple(_channels_last(tensor) for tensor in last.sample(setting.batch))
    return compare_runs(setting.runner(setting.fused), lambda: last.run(inputs), "the fused network in eager")


@rule("channels in multiples of 8", "retrain")
def find_ragged_channels(setting: Setting) -> Finding | None:
    """Channel counts that are no multiple of 8 leave lanes of vector registers and tensor cores idle.

    A layer of ``c`` channels costs what one of ``8 * ceil(c / 8)`` does, so ``1 - c / (8 * ceil(c / 8))`` of its time
    is idle. Input channels of the first layer and outputs of the last are the task's and not counted.
    """
    found = _ragged(setting)
    if not found:
        return None
    costs = {cost.layer: cost for _, cost in setting.calls(*ops.WEIGHTED)}
    idle = {place: setting.limits.least_s(costs[place].macs, 0) * _idle(width) for place, width in found.items()}
    worst = max(idle, key=lambda place: idle[place])
    return Finding(
        what=f"{len(found)} layers have channels that are no multiple of {MULTIPLE}; '{worst}' has {found[worst]}.",
        places=by_cost(idle),
        saved_s=sum(idle.values()),
        formula="time of their MACs * (1 - c / (8 ceil(c / 8)))",
        action="Round widths to multiples of 8 (16 for INT8) when the network is designed or pruned.",
    )


@find_ragged_channels.remedy
def try_multiples(setting: Setting) -> Measured | None:
    """Time the largest such convolution against one with the next multiple: a ratio of 1 means padding is free."""
    found = _ragged(setting)
    nodes = {cost.layer: (node, cost) for node, cost in setting.calls(aten.conv2d.default) if cost.layer in found}
    if not nodes:
        return None
    node, cost = max(nodes.values(), key=lambda entry: entry[1].macs)
    ragged, padded = (_width(setting, node, grow) for grow in (False, True))
    return compare_runs(ragged, padded, f"'{cost.layer}' alone against its next multiple of {MULTIPLE}")


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _ragged(setting: Setting) -> dict[str, int]:
    """Return the layers with a ragged channel count that is not the task's, with that count."""
    layers = list(setting.calls(*ops.WEIGHTED))
    found = {}
    for index, (node, cost) in enumerate(layers):
        weight = setting.shape(node.args[1])
        counted = [*([weight[1]] if index else []), *([weight[0]] if index < len(layers) - 1 else [])]
        ragged = [width for width in counted if width % MULTIPLE and width > 1]
        if ragged:
            found[cost.layer] = max(ragged, key=_idle)
    return found


def _idle(width: int) -> float:
    """Return the share of idle lanes.

    >>> _idle(12), _idle(16)
    (0.25, 0.0)
    """
    return 1.0 - width / (MULTIPLE * math.ceil(width / MULTIPLE))


def _width(setting: Setting, node: torch.fx.Node, grow: bool) -> Callable[[], object]:
    """Return a convolution like this one to run on noise, its channels grown to the next multiples where asked."""
    made, weight, given = (setting.shape(value) for value in (node, node.args[1], node.args[0]))
    groups = graph.argument(node, "groups")
    widths = [weight[1] * groups, weight[0]]
    if grow:
        widths = [MULTIPLE * math.ceil(width / MULTIPLE) for width in widths]
    depthwise = groups > 1
    module = torch.nn.Conv2d(
        widths[0],
        widths[1],
        (weight[2], weight[3]),
        padding=graph.argument(node, "padding"),
        stride=graph.argument(node, "stride"),
        groups=math.gcd(*widths) if depthwise and groups == weight[0] else groups,
    )
    return on_noise(module, made[0], widths[0], *given[2:])
