"""Fold every scale and shift a channel, BatchNorm first among them, into the layer beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from optimize import graph, ops
from optimize.algebra import channelwise, folding, monotone
from optimize.algebra.channelwise import Channelwise
from optimize.algebra.folding import Folded
from optimize.graph import aten
from optimize.passes.base import Outcome, Pass, Rewrite, Skip
from optimize.program import Program
from optimize.registry import register_pass


@register_pass
@dataclass(frozen=True)
class FuseConvBN(Pass):
    """Fold BatchNorm and every other scale and shift a channel into the convolution or linear layer beside it.

    1. *After* a layer (convolution, transposed convolution, linear) that nothing else reads: BatchNorm, LayerScale,
       products with and sums of constants, ``s y + t``, become ``weight' = s * weight`` and ``bias' = s * bias + t``.
       For BatchNorm ``s = gamma / sqrt(var + eps)`` and ``t = beta - s * mean``. The weight is
       ``[C_out, C_in/groups, *K]``, of a transposed convolution ``[C_in, C_out/groups, *K]``.
    2. *Before* a layer that alone reads the result: ``weight' = weight * s`` over the input channels and
       ``bias' = bias + sum(weight * t)`` over input channels and taps.
    3. A weight or bias that is computed from weights alone (weight norm, spectral norm, a mask) is stored as the plain
       ``<module>.weight`` it stands for, as the program computes it.

    Permutes, transposes, reshapes that keep the channels apart and padding with the value's own elements may stand in
    between. The arithmetic is in float64. A weight that several calls share gets one new copy a call where the values
    differ, so a convolution called twice with two BatchNorms stays right.

    When it applies: always, but for a BatchNorm with one of these reasons: statistics of the batch (training mode,
    ``track_running_stats=False``); a layer whose output is used elsewhere; no layer beside it; channels on another axis
    than the layer's; zero padding after its shift (border pixels); a weight computed at run time; weights that
    overflow; a sign or rounding of its result, which re-associated sums could flip (``FuseBNSign`` is for those).

    What it costs: nothing at run time; it removes one pass over the activations for each.

    Example:
        >>> import torch, optimize
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).eval()
        >>> program = optimize.capture(net, (torch.zeros(2, 3, 8, 8),))
        >>> program, outcome = FuseConvBN().apply(program)
        >>> outcome.rewrites
        (Rewrite(where='1', what='batch_norm folded into conv2d'),)

    Source: S. Ioffe, C. Szegedy, "Batch Normalization", 2015, arXiv 1502.03167, section 3; T. Salimans, D. P. Kingma,
    "Weight Normalization", 2016, arXiv 1602.07868, equation 2.
    """

    def rewrite(self, program: Program) -> Outcome:
        """Fold until nothing is left to fold: what one fold frees, the next may take."""
        module = program.graph_module
        known = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
        rewrites: list[Rewrite] = []
        while found := [*_store_computed(module), *_fold_after(module), *fold_before(module, module.graph.nodes)]:
            rewrites += found
        if rewrites:
            graph.remove_unused(module)
            graph.release_numbers(module, known)
        skips = [
            Skip(graph.origin(norm), "batch_norm", _reason(module, norm))
            for norm in graph.calls(module.graph, aten.batch_norm.default)
        ]
        return Outcome(tuple(rewrites), tuple(skips))


def _fold_each(
    module: fx.GraphModule,
    nodes: Iterable[fx.Node],
    into: Callable[[fx.GraphModule, fx.Node, Channelwise], Folded | str],
) -> Iterator[Rewrite]:
    """Fold those of some calls that are scales and shifts into the layer that ``into`` says, one after the other."""
    for node in nodes:
        operator = channelwise.read(module, node)
        if operator is not None and isinstance(folded := into(module, node, operator), Folded):
            folded.write(module)
            node.replace_all_uses_with(operator.source)
            module.graph.erase_node(node)
            yield Rewrite(graph.origin(node), f"{graph.op_name(node)} folded into {graph.op_name(folded.layer)}")


def _fold_after(module: fx.GraphModule) -> Iterator[Rewrite]:
    """Fold what follows a layer, in execution order, so that a chain folds from its layer on."""
    return _fold_each(module, graph.calls(module.graph, *channelwise.OPERATORS), _into_layer_before)


def fold_before(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> Iterator[Rewrite]:
    """Fold those nodes that stand before a layer, in reverse order, so that a chain folds from its layer back."""
    return _fold_each(module, reversed(list(nodes)), _into_layer_after)


def fold_norms(module: fx.GraphModule, names: Iterable[str]) -> None:
    """Fold the named BatchNorms, signs behind them or not, into the layers that :func:`norms_behind` says."""
    wanted = {*names}
    norms = [node for node in graph.calls(module.graph, aten.batch_norm.default) if node.name in wanted]
    list(_fold_each(module, norms, lambda module, _, operator: folding.into_layer_before(module, operator)))
    graph.remove_unused(module)


def norms_behind(module: fx.GraphModule, layers: Set[str]) -> dict[str, str]:
    """Return each BatchNorm that alone reads one of these layers and can be folded into it, with the layer, by name."""
    found = {}
    for node in graph.calls(module.graph, aten.batch_norm.default):
        operator, layer = channelwise.read(module, node), graph.argument(node, "input")
        folded = "" if operator is None else folding.into_layer_before(module, operator)
        if isinstance(folded, Folded) and folded.layer is layer and layer.name in layers:
            found[node.name] = layer.name
    return found


def _into_layer_before(module: fx.GraphModule, node: fx.Node, operator: Channelwise) -> Folded | str:
    folded = folding.into_layer_before(module, operator)
    return (isinstance(folded, Folded) and monotone.reason_for_last_bit(node)) or folded


def _into_layer_after(module: fx.GraphModule, node: fx.Node, operator: Channelwise) -> Folded | str:
    folded = folding.into_layer_after(module, node, operator)
    return (isinstance(folded, Folded) and monotone.reason_for_last_bit(folded.layer)) or folded


def _reason(module: fx.GraphModule, norm: fx.Node) -> str:
    """Say why a BatchNorm was left: what keeps it from the layer before it and, where one follows, from that one."""
    operator = channelwise.read(module, norm)
    if operator is None:
        return "it normalises with the statistics of the batch (training mode or no running statistics)"
    before, after = _into_layer_before(module, norm, operator), _into_layer_after(module, norm, operator)
    assert isinstance(before, str) and isinstance(after, str)
    return f"{before}; {after}" if after else before


def _store_computed(module: fx.GraphModule) -> list[Rewrite]:
    """Store every weight and bias that is computed from weights alone as the plain weight it stands for."""
    found = [
        (layer, name, cast(torch.Tensor, graph.constant(module, graph.argument(layer, name))))
        for layer, name in _computed(module)
    ]
    for layer, name, _ in found:
        graph.set_argument(layer, name, None)
    if found:
        graph.remove_unused(module)  # frees the paths that the plain weights take over
    stored: dict[str, torch.Tensor] = {}
    for layer, name, value in found:
        path = f"{graph.origin(layer)}.{name}"
        if path not in stored or not torch.equal(stored[path], value):
            path = graph.store(module, path, value)
            stored[path] = value
        with module.graph.inserting_before(layer):
            graph.set_argument(layer, name, module.graph.get_attr(path))
    return [
        Rewrite(graph.origin(layer), f"{name} parametrization folded into {graph.op_name(layer)}")
        for layer, name, _ in found
    ]


def _computed(module: fx.GraphModule) -> list[tuple[fx.Node, str]]:
    """Return the (layer, argument) whose value is computed from weights that nothing else reads.

    A weight that stays for another reader, such as an embedding that the last layer reads transposed, is no
    parametrization: a copy of it would make the model larger.
    """
    found = [
        (layer, name)
        for layer in graph.calls(module.graph, *ops.WEIGHTED)
        for name in ("weight", "bias")
        if getattr(graph.argument(layer, name), "op", "") == "call_function"
        and graph.constant(module, graph.argument(layer, name)) is not None
    ]
    kept = _weights_read(module, cut={(layer, graph.argument(layer, name)) for layer, name in found})
    return [(layer, name) for layer, name in found if not graph.weights_behind(graph.argument(layer, name)) <= kept]


def _weights_read(module: fx.GraphModule, cut: Set[tuple[fx.Node, fx.Node]]) -> set[str]:
    """Return the paths of the weights that the outputs still depend on without the edges (reader, value) of ``cut``."""
    waiting, seen = [module.graph.output_node()], set[fx.Node]()
    while waiting:
        reader = waiting.pop()
        if reader not in seen:
            seen.add(reader)
            waiting += [value for value in reader.all_input_nodes if (reader, value) not in cut]
    return {str(node.target) for node in seen if node.op == "get_attr"}
