"""Weights packed for the integer kernels: the fast forms of slow convolutions, and the check that they are right."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from optimize.errors import Refused
from optimize.graph import aten
from optimize.plan import Quantization
from optimize.targets.torchscript import packing
from tests import fresh
from tests.cpus import NEEDS_VNNI
from tests.nets import sqnr_db
from tests.targets.scripted import BATCHES, TARGET, captured, draw, int8, quantized, seeded

# More than 100 groups: kernels FBGEMM lacks run in parts of at most 100 groups; (shape, layer, number of kernels).
MANY_GROUPS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module], int]] = {
    "fast": ((144, 9, 9), lambda: nn.Conv2d(144, 144, 3, 2, 1, groups=144), 1),
    "fast 7x7": ((104, 9, 9), lambda: nn.Conv2d(104, 104, 7, 1, 3, groups=104), 1),
    "fast 3d": ((104, 4, 6, 6), lambda: nn.Conv3d(104, 104, 3, padding=1, groups=104), 1),
    "fast pairs": ((256, 9, 9), lambda: nn.Conv2d(256, 256, 3, padding=1, groups=128), 1),
    "no padding, stride 2": ((144, 11, 13), lambda: nn.Conv2d(144, 144, 5, 2, groups=144), 2),
    "no padding, no bias": ((250, 9, 8), lambda: nn.Conv2d(250, 250, 3, groups=250, bias=False), 3),
    "dilated": ((144, 11, 11), lambda: nn.Conv2d(144, 144, 3, 1, 2, 2, groups=144), 2),
    "not a multiple of 8": ((180, 9, 9), lambda: nn.Conv2d(180, 180, 3, 1, 1, groups=180), 2),
    "two outputs a group": ((128, 9, 9), lambda: nn.Conv2d(128, 256, 3, padding=1, groups=128), 2),
    "128 groups of 2": ((256, 9, 9), lambda: nn.Conv2d(256, 256, 3, 2, groups=128), 2),
    "conv1d": ((144, 21), lambda: nn.Conv1d(144, 144, 9, padding=4, groups=144), 2),
    "conv3d": ((128, 5, 6, 6), lambda: nn.Conv3d(128, 128, 3, groups=128), 2),
}


@pytest.mark.parametrize("name", MANY_GROUPS)
def test_a_layer_of_many_groups_is_one_integer_layer(name: str, tmp_path: Path) -> None:
    shape, factory, parts = MANY_GROUPS[name]
    artifact, want, got = int8(captured(lambda net, x: net.f(x), shape, f=seeded(factory)), tmp_path, shape)
    assert artifact.coverage.quantized == ("f",)
    assert artifact.coverage.left_float == ()
    assert sum(count for kernel, count in artifact.coverage.kernels.items() if "::conv" in kernel) == parts
    assert artifact.coverage.kernels.get("quantized::cat", 0) == (parts > 1)
    assert sqnr_db(want, got) > 30


# Depthwise layers after an explicit padding: (input, padding, layer, whether the weights absorb the padding).
PADDED: dict[str, tuple[tuple[int, ...], list[int], Callable[[], nn.Module], bool]] = {
    "3x3": ((144, 12, 14), [0, 1, 0, 1], lambda: nn.Conv2d(144, 144, 3, 2, groups=144), True),
    "5x5": ((136, 12, 14), [1, 2, 1, 2], lambda: nn.Conv2d(136, 136, 5, 2, groups=136), True),
    "few groups": ((16, 12, 14), [0, 1, 0, 1], lambda: nn.Conv2d(16, 16, 3, 2, groups=16), True),
    "odd by even": ((144, 13, 12), [0, 1, 1, 1], lambda: nn.Conv2d(144, 144, 3, 2, groups=144), True),
    "with own padding": ((16, 12, 12), [0, 1, 0, 1], lambda: nn.Conv2d(16, 16, 5, 2, 1, groups=16), True),
    "more at the start": ((16, 11, 11), [2, 0, 2, 0], lambda: nn.Conv2d(16, 16, 3, groups=16), True),
    "rectangular": ((16, 12, 12), [1, 1, 0, 1], lambda: nn.Conv2d(16, 16, (3, 5), 2, (0, 1), groups=16), True),
    "odd size, padding beyond": ((144, 13, 13), [0, 1, 0, 1], lambda: nn.Conv2d(144, 144, 3, 2, groups=144), False),
    "too large": ((144, 12, 12), [2, 3, 2, 3], lambda: nn.Conv2d(144, 144, 7, 2, groups=144), False),
    "negative": ((16, 12, 12), [0, -1, 0, -1], lambda: nn.Conv2d(16, 16, 3, 2, groups=16), False),
}


@pytest.mark.parametrize("pad", [aten.constant_pad_nd.default, aten.pad.default], ids=str)
@pytest.mark.parametrize("name", PADDED)
def test_a_depthwise_layer_absorbs_the_padding_before_it(name: str, pad: Any, tmp_path: Path) -> None:
    shape, amounts, factory, absorbed = PADDED[name]
    layers = {"first": seeded(nn.Conv2d, shape[0], shape[0], 1), "last": seeded(factory)}

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.last(pad(F.relu6(net.first(x)), amounts, value=0.0))

    artifact, want, got = int8(captured(forward, shape, **layers), tmp_path, shape)
    assert artifact.coverage.quantized == ("first", "last")
    assert artifact.coverage.left_float == ()
    assert ({"aten::constant_pad_nd", "aten::pad"}.isdisjoint(artifact.coverage.kernels)) == absorbed
    assert sqnr_db(want, got) > 30


def test_a_padding_that_others_read_is_kept(tmp_path: Path) -> None:
    layers = {"f": seeded(nn.Conv2d, 8, 8, 3, 2, groups=8), "g": seeded(nn.Conv2d, 8, 8, 3, 2)}

    def forward(net: Any, x: Tensor) -> Tensor:
        y = F.pad(F.gelu(x), (0, 1, 0, 1))
        return net.f(y) + net.g(y)

    artifact, want, got = int8(captured(forward, (8, 12, 12), **layers), tmp_path, (8, 12, 12))
    assert artifact.coverage.kernels["aten::pad"] == 1
    assert sqnr_db(want, got) > 30


@pytest.mark.parametrize("options", [{"mode": "reflect"}, {"value": 1.0}])
def test_a_padding_of_other_values_is_kept(options: dict[str, Any], tmp_path: Path) -> None:
    layers = {"first": seeded(nn.Conv2d, 8, 8, 1), "last": seeded(nn.Conv2d, 8, 8, 3, 2, groups=8)}

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.last(F.pad(net.first(x), (0, 1, 0, 1), **options))

    artifact, want, got = int8(captured(forward, (8, 12, 12), **layers), tmp_path, (8, 12, 12))
    assert artifact.coverage.kernels["aten::pad"] == 1
    assert sqnr_db(want, got) > 30


def test_a_sum_before_an_absorbed_padding_stays_in_integers(tmp_path: Path) -> None:
    layers = {"first": seeded(nn.Conv2d, 8, 8, 1), "last": seeded(nn.Conv2d, 8, 8, 3, 2, groups=8)}

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.first(x)
        return net.last(aten.constant_pad_nd.default(y + F.relu(y), [0, 1, 0, 1], 0.0))

    artifact, want, got = int8(captured(forward, (8, 12, 12), **layers), tmp_path, (8, 12, 12))
    assert artifact.coverage.kernels.keys() >= {"quantized::add"}
    assert artifact.coverage.kernels["aten::quantize_per_tensor"] == 1
    assert sqnr_db(want, got) > 30


def test_an_absorbed_padding_after_a_float_operator_is_not_reported(tmp_path: Path) -> None:
    layers = {"first": seeded(nn.Conv2d, 8, 8, 1), "last": seeded(nn.Conv2d, 8, 8, 3, 2, groups=8)}

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.last(aten.constant_pad_nd.default(F.gelu(net.first(x)), [0, 1, 0, 1], 0.0))

    artifact, want, got = int8(captured(forward, (8, 12, 12), **layers), tmp_path, (8, 12, 12))
    assert [layer.op for layer in artifact.coverage.left_float] == ["gelu"]
    assert "aten::constant_pad_nd" not in artifact.coverage.kernels
    assert sqnr_db(want, got) > 30


def test_layers_in_parts_and_absorbed_paddings_load_in_a_fresh_process(tmp_path: Path) -> None:
    layers = {
        "first": seeded(nn.Conv2d, 8, 144, 1),
        "same": seeded(nn.Conv2d, 144, 144, 5, 2, groups=144),
        "parts": seeded(nn.Conv2d, 144, 144, 3, 2, groups=144),
        "last": seeded(nn.Conv2d, 144, 8, 1),
    }

    def forward(net: Any, x: Tensor) -> Tensor:
        y = aten.constant_pad_nd.default(F.relu(net.first(x)), [1, 2, 1, 2], 0.0)
        return net.last(net.parts(net.same(y)))

    program = captured(forward, (8, 18, 18), **layers)
    artifact = TARGET.export(quantized(program, [draw(8, 8, 18, 18)]), tmp_path / f"net{TARGET.suffix}")
    asked = [(artifact.path, draw(batch, 8, 18, 18, seed=batch)) for batch in BATCHES]
    for (_, x), got in zip(asked, fresh.answers(tmp_path, asked), strict=True):
        assert sqnr_db(program(x), got) > 25


@NEEDS_VNNI
def test_the_kernel_check_finds_a_wrong_result() -> None:
    program = captured(lambda net, x: net.f(x), (8,), f=seeded(nn.Linear, 8, 4))
    node = next(node for node in program.graph.nodes if node.target is aten.linear.default)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed = packing.pack(program.graph_module, node, Quantization("static", frozenset()))
        weight = program.graph_module.get_parameter("f.weight")
        bias = program.graph_module.get_parameter("f.bias")
        packing.check(node, packed, weight, bias)
        with pytest.raises(Refused, match="wrong values"):
            packing.check(node, packed, weight * 1.2, bias)


@pytest.mark.parametrize(("cpu", "groups", "pairs"), [("any", 1, True), ("vnni", 1, False), ("vnni", 101, True)])
def test_weights_leave_room_where_products_are_added_in_sixteen_bits(cpu: str, groups: int, pairs: bool) -> None:
    plan = Quantization("static", frozenset(), cpu=cpu)
    assert packing.weight_format(plan, groups=groups).pairs is pairs
