"""Whole numbers are computed as torch computes them, also where a runtime would take floats, or bytes at their ends."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import optimize

Binary = Callable[[Tensor, Tensor], Tensor]

ALWAYS: dict[str, Binary] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "rsub": lambda x, _: 7 - x,
    "quarter": lambda x, _: x // 4 - 3,
    "down": lambda x, y: x // y,
    "named down": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "to zero": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "to zero by 33": lambda x, _: torch.div(x, 33, rounding_mode="trunc"),
    "rest": lambda x, y: x % y,
    "rest of 101": lambda x, _: x % 101,
    "fmod": lambda x, y: torch.fmod(x, y),
    "halves": lambda x, _: x >> 1,
    "shifted": lambda x, _: x >> 6,
    "eighths": lambda x, _: x // 8,
    "reshaped": lambda x, _: x.reshape(-1, 2, x.shape[1] // 2).flatten(1) % 33,
    "equal": lambda x, y: x // y * y == x - x % y,
    "next": lambda x, _: x == torch.where(x > 5, x - 1, x),
    "less": lambda x, _: torch.where(x > 5, x - 1, x) < x,
}
#: Of bytes these wrap around; of more bits OpenVINO's are of 32 and saturate.
OF_BYTES: dict[str, Binary] = {
    "mul": lambda x, y: x * y,
    "affine": lambda x, _: x * 2 + 1,
    "twice": lambda x, _: x << 1,
    "opposite": lambda x, _: -x,
    "square": lambda x, _: x**2,
}


class Every(nn.Module):
    def __init__(self, operators: dict[str, Binary]) -> None:
        super().__init__()
        self.operators = operators

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {name: operator(x, y) for name, operator in self.operators.items()}


@pytest.mark.parametrize("target", ["onnx", "openvino"])
@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        (torch.uint8, 0, 256),
        (torch.int8, -128, 128),
        (torch.int32, -(2**31), 2**31),
        (torch.int64, -(10**8), 10**8),
        (torch.int64, 2**27, 2**31),
    ],
)
def test_whole_numbers_are_exact(dtype: torch.dtype, low: int, high: int, target: str, tmp_path: Path) -> None:
    draws = torch.Generator().manual_seed(0)
    operators = ALWAYS | (OF_BYTES if dtype.itemsize == 1 else {})
    if high > 2**30:
        operators = {name: operator for name, operator in operators.items() if name not in ("add", "sub", "rsub")}

    def drawn(least: int, most: int) -> Tensor:
        return torch.randint(least, most, (64, 16), generator=draws).to(dtype)

    x, y = drawn(low, high), drawn(max(-120, min(low, 1)), min(high, 120))
    y[y == 0] = 3
    x.view(-1)[:4] = torch.tensor([low, high - 1, low + 1, high - 2], dtype=dtype)
    y.view(-1)[:4] = 5
    net = Every(operators).eval()
    program = optimize.capture(net, (x[:2], y[:2]))
    file = optimize.export(program, target, tmp_path / ("net.xml" if target == "openvino" else "net.onnx"))
    wanted, found = net(x, y), file.load()(x, y)
    assert [name for name, answer in wanted.items() if not torch.equal(answer, torch.as_tensor(found[name]))] == []


@pytest.mark.parametrize(("target", "name"), [("onnx", "net.onnx"), ("openvino", "net.xml")])
def test_a_clamp_between_a_whole_number_and_a_float(target: str, name: str, tmp_path: Path) -> None:
    class Clamp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.clamp(x, 0, 0.3) + x.clamp(max=1)

    x = torch.linspace(-2, 2, 40).reshape(5, 8)
    file = optimize.export(optimize.capture(Clamp().eval(), (x[:2],)), target, tmp_path / name)
    assert torch.equal(torch.as_tensor(file.load()(x)), Clamp()(x))
