"""What can be taken out of a network without changing what it computes: biases, norms and branches."""

from __future__ import annotations

from torch import fx

from optimize import graph, ops
from optimize.advise.base import Finding, Measured, Setting, rule
from optimize.graph import aten
from optimize.passes.base import Outcome
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
    return setting.compare(setting.program, without_biases(setting.program))


@rule("unmerged branches", "exact")
def find_unmerged_branches(setting: Setting) -> Finding | None:
    """Parallel linear branches of one input that are one convolution (RepVGG, ACNet, Diverse Branch Block)."""
    what, action = "groups of parallel branches compute one layer each.", "optimize MODEL --fuse merges them, exactly."
    return _by_pass(setting, setting.program, setting.merging, what, action)


@find_unmerged_branches.remedy
def try_merged(setting: Setting) -> Measured | None:
    """Time the network with its branches merged."""
    return setting.compare(setting.program, setting.merging[0])


@rule("BatchNorm not folded", "exact")
def find_unfolded_norms(setting: Setting) -> Finding | None:
    """BatchNorms that fold into the layer beside them."""
    action = "optimize MODEL --fuse folds them, exactly; ONNX Runtime and OpenVINO fold them by themselves."
    what = "BatchNorms run on their own in eager and TorchScript."
    return _by_pass(setting, setting.merging[0], setting.folding, what, action)


@find_unfolded_norms.remedy
def try_folded(setting: Setting) -> Measured | None:
    """Time the network with its norms folded."""
    return setting.compare(setting.merging[0], setting.fused)


def _by_pass(
    setting: Setting, before: Program, passed: tuple[Program, Outcome], what: str, action: str
) -> Finding | None:
    """Return what an exact pass found to take out of a program, None where it found nothing."""
    after, outcome = passed
    if not outcome.rewrites:
        return None
    return Finding(
        what=f"{len(outcome.rewrites)} {what}",
        places=tuple(rewrite.where for rewrite in outcome.rewrites),
        saved_s=setting.least_s(before) - setting.least_s(after),
        formula="roofline time of the operators before less after, with the cost of a call for each",
        action=action,
    )


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
