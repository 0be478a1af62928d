"""Times of single layers in ONNX Runtime, joined to the program's layers."""

from pathlib import Path

import pytest
import torch

import optimize
from models import REFERENCES
from optimize.errors import UsageError
from optimize.measure.layer_times import LayerTime, layer_times, require_layer_times
from optimize.ops import layer_paths
from optimize.program import Program
from optimize.registry import find_target
from optimize.targets.probe import Calls, TimedKernel, serve
from tests import references


def both(name: str) -> tuple[Program, Program]:
    reference = REFERENCES[name]
    program = references.folded(name, None)
    found, _ = optimize.QuantizeStatic(calibration=[reference.inputs(8)], rounding="nearest").apply(program)
    return program, found


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("resnet", "onnx"), pytest.param("mobilenetv3", "onnx", marks=pytest.mark.slow), ("vit", "onnx"),
        pytest.param("resnet", "openvino", marks=pytest.mark.slow), ("vit", "openvino"),
        ("resnet", "torchscript"), pytest.param("vit", "torchscript", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_every_layer_of_a_reference_network_has_its_times(name: str, target: str, tmp_path: Path) -> None:
    """Fused activations and sums, other memory layouts and nodes without a name included."""
    suffix, programs = find_target(target).suffix, both(name)
    plain, quantized = (
        (entry, optimize.export(entry, target, tmp_path / f"{index}{suffix}")) for index, entry in enumerate(programs)
    )
    told: list[tuple[str, float]] = []
    inputs = [REFERENCES[name].inputs(1).numpy()]
    times = layer_times(plain, quantized, inputs, progress=lambda phase, share: told.append((phase, share)))
    names = set(layer_paths(programs[1].graph))
    assert names <= set(times)
    assert all(times[name].float_s > 0 and times[name].int8_s > 0 for name in names)
    shares = [share for _, share in told]
    assert {phase for phase, _ in told} == {"time layers"} and shares == sorted(shares)


def served(reads: dict[str, tuple[str, ...]], layers: set[str], *ran: tuple[str, ...]) -> list[str]:
    return serve([TimedKernel("", "", nodes) for nodes in ran], Calls(reads, frozenset(layers)), layers)


def test_kernels_are_counted_to_the_layers_that_they_serve() -> None:
    reads: dict[str, tuple[str, ...]] = {
        "scale": (), "stem": ("scale",), "relu": ("stem",), "pool": ("relu",), "head": ("pool",), "shape": (),
    }  # fmt: skip
    ran = ("scale",), (), ("stem", "relu"), ("pool",), (), ("head",), ("shape",), ()
    found = ["", "stem", "stem", "stem", "head", "head", "", ""]
    assert served(reads, {"stem", "head"}, *ran) == found


def test_a_sum_counts_to_the_layer_computed_last() -> None:
    reads: dict[str, tuple[str, ...]] = {"first": (), "second": (), "sum": ("second", "first")}
    assert served(reads, {"first", "second"}, ("first",), ("second",), ("sum",))[2] == "second"


def test_targets_that_do_not_tell_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot be measured on the target 'pt2'") as caught:
        require_layer_times("pt2")
    assert "--to" in caught.value.hint and "openvino" in caught.value.hint


def test_what_int8_saves_may_be_negative() -> None:
    assert LayerTime(1e-5, 3e-5).saved_s == pytest.approx(-2e-5)
    assert torch.get_num_threads() == 1
