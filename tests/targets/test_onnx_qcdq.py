"""Integers that say their bits, as FPGA flows read them: QuantizeLinear, Clip, DequantizeLinear."""

from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import optimize
from optimize.program import Program
from optimize.targets.onnx import Onnx
from tests.nets import sqnr_db


def draw(seed: int, batch: int = 16) -> Tensor:
    return torch.randn(batch, 3, 10, 10, generator=torch.Generator().manual_seed(seed))


def quantized(**options: Any) -> Program:
    torch.manual_seed(0)
    widths = ((3, 8), (8, 12), (12, 8))
    layers = [part for pair in widths for part in (nn.Conv2d(*pair, 3, bias=False), nn.BatchNorm2d(pair[1]), nn.ReLU())]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()
    program = optimize.capture(net, (draw(0, 2),))
    return optimize.QuantizeAware(lambda _: None, [draw(1)], **options).apply(program)[0]


def bounds(model: onnx.ModelProto) -> Counter[tuple[int, int]]:
    """Return the bounds of all clips of integers; answers are clipped in float to what training left of them."""
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    ends = [[held[name] for name in node.input[1:]] for node in model.graph.node if node.op_type == "Clip"]
    return Counter((int(low), int(high)) for low, high in ends if low.dtype.kind in "iu")


@pytest.mark.parametrize(
    ("options", "clips"),
    [
        ({"quantizer": "lsq", "bits": 4, "activation_bits": 4}, {(-7, 7): 2, (0, 15): 2}),
        ({"quantizer": "lsq+", "bits": 3, "activation_bits": 2}, {(-3, 3): 2, (0, 3): 2}),
        ({"quantizer": "twn"}, {(-1, 1): 2}),
        ({"quantizer": "iao"}, {}),
    ],
    ids=str,
)
def test_clips_say_how_many_bits_there_are_and_the_answers_are_those_of_the_usual_file(
    options: dict[str, Any], clips: dict[tuple[int, int], int], tmp_path: Path
) -> None:
    program = quantized(**options)
    artifact = Onnx(qcdq=True).export(program, tmp_path / "fpga.onnx")
    model = onnx.load(artifact.path)
    assert bounds(model) == clips
    assert {node.op_type for node in model.graph.node} <= {
        *("QuantizeLinear", "Clip", "DequantizeLinear", "Conv", "Relu", "ReduceMean", "GlobalAveragePool", "Reshape"),
        *("Gemm", "Flatten"),
    }
    makers = {name: node for node in model.graph.node for name in node.output}
    for node in model.graph.node:  # what qonnx takes for one quantizer, weights too
        if node.op_type == "DequantizeLinear":
            before = makers[node.input[0]]
            rounding = makers[before.input[0]] if before.op_type == "Clip" else before
            assert rounding.op_type == "QuantizeLinear" and list(rounding.input[1:]) == list(node.input[1:])
    x = draw(5).numpy()
    usual = optimize.export(program, "onnx", tmp_path / "usual.onnx")
    (want,), (found,) = (file.load(threads=1).run([x]) for file in (usual, artifact))
    assert sqnr_db(want, found) > 30


def test_what_is_not_static_is_written_as_ever(tmp_path: Path) -> None:
    program = optimize.capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), (torch.rand(2, 8),))
    dynamic = optimize.QuantizeDynamic().apply(program)[0]
    for name, made in (("float", program), ("dynamic", dynamic)):
        paths = [tmp_path / f"{name}{kind}.onnx" for kind in (0, 1)]
        for kind, path in enumerate(paths):
            Onnx(qcdq=bool(kind)).export(made, path)
        assert paths[0].read_bytes() == paths[1].read_bytes()
