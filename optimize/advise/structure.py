"""What can be taken out of a network without changing what it computes: biases, norms and branches."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import fx

from optimize import graph, ops
from optimize.advise.base import Case, Finding, Rule, register_rule
from optimize.advise.trials import Measured, compare_runs
from optimize.graph import aten
from optimize.passes.fuse_conv_bn import FuseConvBN
from optimize.passes.reparameterize import Reparameterize
from optimize.program import Program


@register_rule
class BiasBeforeNorm(Rule):
    """A bias in front of a BatchNorm does nothing: the norm subtracts it again with the mean."""

    name = "bias before BatchNorm"
    effort = "exact"

    def look(self, case: Case) -> Finding | None:
        """Find layers with a bias whose only reader is a BatchNorm."""
        layers = [layer for layer, _ in _biased(case.program)]
        if not layers:
            return None
        width = sum(layer.meta["val"].shape[1] for layer in layers)
        return Finding(
            what=f"{len(layers)} layers in front of a BatchNorm have a bias, {width} parameters that do nothing.",
            places=tuple(map(graph.origin, layers)),
            saved_s=0.0,
            formula="0: runtimes add a bias inside the layer; what is saved are parameters and their optimizer states",
            action="Write bias=False in layers that a BatchNorm follows.",
        )

    def attempt(self, case: Case) -> Measured | None:
        """Time the network without those biases, moved into the norms' means."""
        bare = without_biases(case.program)
        return compare_runs(runner(case, case.program), runner(case, bare), "the network in eager")


@register_rule
class UnmergedBranches(Rule):
    """Parallel linear branches of one input that are one convolution (RepVGG, ACNet, Diverse Branch Block)."""

    name = "unmerged branches"
    effort = "exact"

    def look(self, case: Case) -> Finding | None:
        """Find branches that ``Reparameterize`` merges."""
        rewrites = Reparameterize().apply(case.program)[1].rewrites
        if not rewrites:
            return None
        return Finding(
            what=f"{len(rewrites)} groups of parallel branches compute one layer each.",
            places=tuple(rewrite.where for rewrite in rewrites),
            saved_s=case.least_s(case.program) - case.least_s(case.merged),
            formula="roofline time of the operators before less after, with the cost of a call for each",
            action="optimize MODEL --fuse merges them, exactly.",
        )

    def attempt(self, case: Case) -> Measured | None:
        """Time the network with its branches merged."""
        return compare_runs(runner(case, case.program), runner(case, case.merged), "the network in eager")


@register_rule
class UnfoldedNorms(Rule):
    """BatchNorms that fold into the layer beside them."""

    name = "BatchNorm not folded"
    effort = "exact"

    def look(self, case: Case) -> Finding | None:
        """Find norms that ``FuseConvBN`` folds once branches are merged."""
        rewrites = FuseConvBN().apply(case.merged)[1].rewrites
        if not rewrites:
            return None
        return Finding(
            what=f"{len(rewrites)} BatchNorms run on their own in eager and TorchScript.",
            places=tuple(rewrite.where for rewrite in rewrites),
            saved_s=case.least_s(case.merged) - case.least_s(case.fused),
            formula="roofline time of the operators before less after, with the cost of a call for each",
            action="optimize MODEL --fuse folds them, exactly; ONNX Runtime and OpenVINO fold them by themselves.",
        )

    def attempt(self, case: Case) -> Measured | None:
        """Time the network with its norms folded."""
        return compare_runs(runner(case, case.merged), runner(case, case.fused), "the network in eager")


def runner(case: Case, program: Program) -> Callable[[], object]:
    """Return a program on the case's inputs as something to run."""
    return functools.partial(program.run, case.inputs(program))


def without_biases(program: Program) -> Program:
    """Return a copy whose layers in front of a BatchNorm have no bias, and whose norms have it in their means."""
    bare = program.clone()
    module = bare.graph_module
    for layer, norm in _biased(bare):
        bias = graph.constant(module, graph.argument(layer, "bias"))
        mean = graph.constant(module, graph.argument(norm, "running_mean"))
        assert bias is not None and mean is not None
        graph.replace_weight(module, norm, "running_mean", mean - bias)
        graph.set_argument(layer, "bias", None)
    bare.refresh()
    return bare


def _biased(program: Program) -> list[tuple[fx.Node, fx.Node]]:
    """Return the layers with a bias and the BatchNorm in inference form that alone reads each."""
    found = []
    for layer in graph.calls(program.graph, *ops.WEIGHTED):
        reader = next(iter(layer.users), None)
        has_bias = graph.constant(program.graph_module, graph.argument(layer, "bias")) is not None
        if has_bias and len(layer.users) == 1 and _is_norm(reader) and reader is not None and reader.args[0] is layer:
            found.append((layer, reader))
    return found


def _is_norm(node: fx.Node | None) -> bool:
    is_norm = graph.is_call(node, aten.batch_norm.default)
    return is_norm and node is not None and isinstance(graph.argument(node, "running_mean"), fx.Node)
