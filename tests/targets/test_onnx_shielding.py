"""What the plan leaves in float stays in float inside ONNX Runtime."""

from pathlib import Path

import pytest
import torch
from torch import nn

import optimize
from optimize.ops import layer_paths
from optimize.quantization.weights import give_back


def middles() -> dict[str, nn.Module]:
    return {
        "conv": nn.Conv2d(8, 8, 3),
        "depthwise": nn.Conv2d(8, 8, 3, groups=8, bias=False),
        "grouped": nn.Sequential(nn.Conv2d(8, 8, 3, groups=2), nn.ReLU6()),
    }


@pytest.mark.parametrize("name", list(middles()))
def test_a_float_layer_between_integer_ones_has_no_integer_kernel(name: str, tmp_path: Path) -> None:
    """With one scale ONNX Runtime rounds the weight by itself: 3 integer kernels instead of 2."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), middles()[name], nn.Conv2d(8, 8, 3)).eval()
    data = torch.rand(16, 4, 10, 10)
    program = optimize.capture(net, (data[:2],))
    quantized, _ = optimize.QuantizeStatic(calibration=[data], rounding="nearest").apply(program)
    layer, path = list(layer_paths(quantized.graph).items())[1]
    artifact = optimize.export(give_back(quantized, {layer: "it is asked"}), "onnx", tmp_path / "net.onnx")
    assert artifact.coverage is not None
    assert artifact.coverage.kernels["QLinearConv"] == 2
    assert [(entry.name, entry.reason) for entry in artifact.coverage.left_float] == [(path, "it is asked")]
    with torch.no_grad():
        wanted = net(data)
    error = artifact.load()(data) - wanted
    assert float(error.square().mean() / wanted.square().mean()) < 1e-3
