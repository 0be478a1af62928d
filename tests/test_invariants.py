"""Each invariant with a program that breaks it: a check that cannot fail would be none."""

import functools
import operator
from collections.abc import Callable

import pytest
import torch
from torch import nn

import optimize
from optimize.errors import Refused, VerificationFailed
from optimize.graph import aten, calls
from optimize.plan import Quantization
from optimize.program import Program


def program() -> Program:
    """Return a small network captured, to be broken."""
    return _captured().clone()


@functools.cache
def _captured() -> Program:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    return optimize.capture(net, (torch.rand(2, 3, 8, 8),))


def foreign_call(broken: Program) -> None:
    next(calls(broken.graph, aten.relu.default)).target = torch.relu


def shared_weight(broken: Program) -> None:
    assert broken.source is not None
    broken.graph_module.get_submodule("0").weight.data = broken.source[0].weight.data


def missing_shape(broken: Program) -> None:
    del next(calls(broken.graph, aten.relu.default)).meta["val"]


def wrong_weight_shape(broken: Program) -> None:
    broken.graph_module.get_submodule("0").weight = nn.Parameter(torch.zeros(5, 3, 3, 3), requires_grad=False)


def in_place(broken: Program) -> None:
    next(calls(broken.graph, aten.relu.default)).target = aten.relu_.default


def training_norm(broken: Program) -> None:
    next(calls(broken.graph, aten.batch_norm.default)).update_arg(5, True)


def gradient(broken: Program) -> None:
    broken.graph_module.get_submodule("0").weight.requires_grad_(True)


def hook(broken: Program) -> None:
    broken.graph_module.register_forward_hook(operator.pos)


def unknown_layer(broken: Program) -> None:
    broken.quantization = Quantization("dynamic", frozenset({"nowhere"}))


@pytest.mark.parametrize(
    "break_it, name",
    [
        (foreign_call, "node_kinds"),
        (shared_weight, "weights_owned"),
        (missing_shape, "values_typed"),
        (wrong_weight_shape, "values_typed"),
        (in_place, "functional"),
        (training_norm, "inference_form"),
        (gradient, "inference_form"),
        (hook, "nothing_attached"),
        (unknown_layer, "quantization_placed"),
    ],
)
def test_each_invariant_can_fail(break_it: Callable[[Program], None], name: str) -> None:
    broken = program()
    broken.check()
    break_it(broken)
    with pytest.raises(VerificationFailed, match=name):
        broken.check()


def test_what_torch_does_not_export_again_is_refused() -> None:
    broken = program()
    broken.export()
    next(calls(broken.graph, aten.conv2d.default)).update_arg(6, 2)  # groups that do not divide the channels
    with pytest.raises(Refused, match="cannot be re-exported"):
        broken.export()
