"""What can be taken out of a network without changing what it computes: biases, norms and branches."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import fx

from optimize import graph, ops
from optimize.advise.base import Finding, Setting, rule
from optimize.advise.trials import Measured, compare_runs
from optimize.graph import aten
from optimize.program import Program


@rule("bias before BatchNorm", "exact")
def find_bias_before_norm(setting: Setting) -> Finding | None:
    """A bias in front of a BatchNorm does nothing: the norm subtracts it again with the mean."""
    layers = [layer for layer, _ in _biased(setting.program)]
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


@find_bias_before_norm.remedy
def try_without_biases(setting: Setting) -> Measured | None:
    """Time the network without those biases, moved into the norms' means."""
    bare = without_biases(setting.program)
    return compare_runs(runner(setting, setting.program), runner(setting, bare), "the network in eager")


@rule("unmerged branches", "exact")
def find_unmerged_branches(setting: Setting) -> Finding | None:
    """Parallel linear branches of one input that are one convolution (RepVGG, ACNet, Diverse Branch Block)."""
    merged, outcome = setting.merging
    if not outcome.rewrites:
        return None
    return Finding(
        what=f"{len(outcome.rewrites)} groups of parallel branches compute one layer each.",
        places=tuple(rewrite.where for rewrite in outcome.rewrites),
        saved_s=setting.least_s(setting.program) - setting.least_s(merged),
        formula="roofline time of the operators before less after, with the cost of a call for each",
        action="optimize MODEL --fuse merges them, exactly.",
    )


@find_unmerged_branches.remedy
def try_merged(setting: Setting) -> Measured | None:
    """Time the network with its branches merged."""
    return compare_runs(runner(setting, setting.program), runner(setting, setting.merging[0]), "the network in eager")


@rule("BatchNorm not folded", "exact")
def find_unfolded_norms(setting: Setting) -> Finding | None:
    """BatchNorms that fold into the layer beside them."""
    (merged, _), (_, outcome) = setting.merging, setting.folding
    if not outcome.rewrites:
        return None
    return Finding(
        what=f"{len(outcome.rewrites)} BatchNorms run on their own in eager and TorchScript.",
        places=tuple(rewrite.where for rewrite in outcome.rewrites),
        saved_s=setting.least_s(merged) - setting.least_s(setting.fused),
        formula="roofline time of the operators before less after, with the cost of a call for each",
        action="optimize MODEL --fuse folds them, exactly; ONNX Runtime and OpenVINO fold them by themselves.",
    )


@find_unfolded_norms.remedy
def try_folded(setting: Setting) -> Measured | None:
    """Time the network with its norms folded."""
    return compare_runs(runner(setting, setting.merging[0]), runner(setting, setting.fused), "the network in eager")


def runner(setting: Setting, program: Program) -> Callable[[], object]:
    """Return a program on the setting's inputs as something to run."""
    return functools.partial(program.run, setting.inputs(program))


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
