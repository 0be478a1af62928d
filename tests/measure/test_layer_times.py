"""Times of single layers in ONNX Runtime, joined to the program's layers."""

from pathlib import Path

import onnx
import pytest
import torch
from onnx import helper

import optimize
from models import REFERENCES
from optimize.errors import UsageError
from optimize.measure.layer_times import LayerTime, layer_times, require_layer_times
from optimize.ops import layer_paths
from optimize.program import Program
from optimize.targets.onnx.probe import owners_of
from tests import references


def both(name: str) -> tuple[Program, Program]:
    reference = REFERENCES[name]
    program = references.folded(name, None)
    found, _ = optimize.QuantizeStatic(calibration=[reference.inputs(8)], rounding="nearest").apply(program)
    return program, found


@pytest.mark.parametrize("name", ["resnet", "mobilenetv3", "vit"])
def test_every_layer_of_a_reference_network_has_its_times(name: str, tmp_path: Path) -> None:
    """Fused activations and sums, other memory layouts and nodes without a name included."""
    program, quantized = both(name)
    files = [
        optimize.export(entry, "onnx", tmp_path / f"{index}.onnx") for index, entry in enumerate((program, quantized))
    ]
    paths = list(layer_paths(quantized.graph).values())
    told: list[tuple[str, float]] = []
    inputs = [REFERENCES[name].inputs(1).numpy()]
    times = layer_times(files[0], files[1], paths, inputs, progress=lambda phase, share: told.append((phase, share)))
    assert set(paths) <= set(times)
    assert all(times[path].float_s > 0 and times[path].int8_s > 0 for path in paths)
    assert told[-1] == ("time layers", 1.0)


def test_the_nodes_of_an_optimized_graph_are_counted_to_their_layers() -> None:
    file = [
        helper.make_node("Conv", ["x", "w"], ["y"], name="stem"),
        helper.make_node("Relu", ["y"], ["relu"], name="act/Relu"),
        helper.make_node("Gemm", ["relu", "v"], ["z"], name="head"),
    ]
    optimized = [
        helper.make_node("ReorderInput", ["x"], ["a"], name="ReorderInput"),
        helper.make_node("Conv", ["a", "b"], ["c"], name="relu_nchwc"),
        helper.make_node("ReorderOutput", ["c"], ["d"], name="ReorderOutput_token_4"),
        helper.make_node("GlobalAveragePool", ["d"], ["e"], name="pool"),
        helper.make_node("QuantizeLinear", ["e", "s", "o"], ["f"], name=""),
        helper.make_node("Reshape", ["f", "n"], ["g"], name="flat"),
        helper.make_node("QGemm", ["g"], ["h"], name="head_token_7"),
        helper.make_node("Shape", ["k"], ["l"], name="unrelated"),
    ]
    assert owners_of(optimized, file, {"stem", "head"}) == ["stem", "stem", "stem", "stem", "head", "stem", "head", ""]


def test_a_sum_counts_to_the_layer_computed_last() -> None:
    nodes: list[onnx.NodeProto] = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="first"),
        helper.make_node("Conv", ["x", "w"], ["b"], name="second"),
        helper.make_node("Add", ["b", "a"], ["c"], name="sum"),
    ]
    assert owners_of(nodes, nodes, {"first", "second"})[2] == "second"


def test_targets_that_do_not_tell_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot be measured on the target 'torchscript'") as caught:
        require_layer_times("torchscript")
    assert "--to onnx" in caught.value.hint


def test_what_int8_saves_may_be_negative() -> None:
    assert LayerTime(1e-5, 3e-5).saved_s == pytest.approx(-2e-5)
    assert torch.get_num_threads() == 1
