"""What ``optimize targets`` says a backend supports is what its target writes, and nothing else is."""

import pytest
import torch
from torch import Tensor, nn

import optimize
from optimize.errors import OptimizeError
from optimize.passes.cast_half import CastBF16, CastFP16
from optimize.program import Program
from optimize.registry import find_target

#: Those that write a file within a second; the others' own tests export each precision they claim.
QUICK = ("eager", "onnx", "openvino", "torchscript")
#: Written as well, computed in float32 and said so: no precision of its own.
WIDENED = {("openvino", "float16"), ("openvino", "int8-float16")}


class Net(nn.Module):
    """A convolution, linear layers large enough for integer weights, and products of activations, which half takes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.hidden, self.line = nn.Conv2d(3, 16, 3), nn.Linear(16, 256), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        y = self.hidden(torch.relu(self.conv(x)).flatten(2).transpose(1, 2))
        return self.line(torch.softmax(y @ y.transpose(1, 2), -1) @ y).mean(1)


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    torch.manual_seed(0)
    plain = optimize.capture(Net().eval(), (torch.randn(2, 3, 8, 8),))
    data = [torch.randn(4, 3, 8, 8)]
    int8, _ = optimize.QuantizeStatic(calibration=data, calibrator="minmax").apply(plain)
    passes = (
        *((CastFP16(data), plain), (CastBF16(data), plain)),
        *((optimize.QuantizeDynamic(), plain), (optimize.QuantizeWeights(), plain)),
        *((CastFP16(data, mixed=True), int8), (CastBF16(data, mixed=True), int8)),
    )
    found = [plain, int8, *(entry.apply(program)[0] for entry, program in passes)]
    return {program.precision: program for program in found}


@pytest.mark.parametrize("name", QUICK)
def test_precisions_are_written_as_said(name: str, programs: dict[str, Program], tmp_path) -> None:
    target = find_target(name)
    if not target.available().run:
        pytest.skip(f"{name}: {target.available().install}")
    written = set()
    for precision, program in programs.items():
        try:
            artifact = target.export(program, tmp_path / f"{precision}{target.suffix}")
            artifact.load(threads=1)(torch.randn(3, 3, 8, 8))
        except OptimizeError:
            continue
        written.add(precision)
    assert len(programs) == 8
    assert written - {kind for target_, kind in WIDENED if target_ == name} == set(target.support.precisions)
