"""Layers of signs in OpenVINO: bits compared and counted, and the numbers are those of a float convolution of signs."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import optimize
from optimize.errors import Refused, UsageError
from optimize.program import Program
from optimize.targets.base import Artifact
from optimize.targets.openvino import OpenVINO
from tests.targets.programs import coverage_of, draw, installed

pytestmark = installed
COUNTED = "BinaryConvolution@u1"


class Signs(nn.Module):
    """A convolution of signs by signs that its output shows, behind one that makes its input."""

    def __init__(self, channels: int, outputs: int, kernel: int, **places: object) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 1)
        self.signs = nn.Conv2d(channels, outputs, kernel, bias=False, **places)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        read = self.first(x)
        return read, self.signs(read)


class Chain(nn.Module):
    """Layers of signs one behind another, BatchNorm with scales of both signs between, one around which a sum goes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        widths = ((16, 24), (24, 16), (16, 16))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(*pair, 3, padding=1, bias=False), nn.BatchNorm2d(pair[1])) for pair in widths
        )
        self.last = nn.Linear(16, 5)
        for norm in (module for module in self.modules() if isinstance(module, nn.BatchNorm2d)):
            norm.weight.data.uniform_(-1, 1.5)
            norm.bias.data.uniform_(-0.5, 0.5)
            norm.running_var.uniform_(0.5, 20)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        value = self.blocks[1](torch.relu(self.blocks[0](self.first(x))).relu())
        return self.last((value + self.blocks[2](value.relu())).mean((2, 3)))


class Two(nn.Module):
    """Two layers of signs, and between them what is made of the first one, of what that reads, and of a constant."""

    def __init__(self, between: Callable[[Tensor, Tensor, Tensor], Tensor], constant: Tensor) -> None:
        super().__init__()
        self.between = between
        self.first, self.last = nn.Conv2d(3, 16, 1), nn.Linear(16, 5)
        self.signs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.register_buffer("constant", constant)

    def forward(self, x: Tensor) -> Tensor:
        read = self.first(x)
        value = self.between(self.signs[0](read.relu()), read, self.constant)
        return self.last(self.signs[1](value.relu()).mean((2, 3)))


def untrained(net: nn.Module, seed: int = 0, size: int = 9, **options: object) -> Program:
    program = optimize.capture(net.eval(), (draw((3, size, size), 2, seed),))
    step = optimize.QuantizeAware(lambda _: None, [draw((3, size, size), 8, 1)], **{"quantizer": "xnor", **options})  # type: ignore[arg-type]
    return step.apply(program)[0]


def answers(artifact: Artifact, x: Tensor) -> list[np.ndarray]:
    runner = artifact.load(threads=1)
    return [np.concatenate(parts) for parts in zip(*(runner.run([part.numpy()]) for part in x.split(1)), strict=True)]


@pytest.mark.parametrize(
    ("channels", "outputs", "kernel", "places"),
    [
        (8, 5, 1, {}),
        (16, 33, 3, {"padding": 1}),
        (40, 64, 3, {"padding": 1, "stride": 2}),
        (24, 8, 3, {"padding": 2, "dilation": 2}),
        (16, 16, 5, {"padding": (4, 0)}),
        (128, 128, 3, {"padding": 1}),
    ],
)
def test_counted_bits_are_the_convolution_of_signs_whatever_pads_it(
    channels: int, outputs: int, kernel: int, places: dict[str, object], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net = Signs(channels, outputs, kernel, **places)
    program = untrained(net, ends=0, keep=["first"])
    artifact = OpenVINO(batch=1).export(program, tmp_path / "net.xml")
    assert coverage_of(artifact).kernels[COUNTED] == 1
    assert artifact.inputs[0].shape[0] == 1
    read, found = answers(artifact, draw((3, 9, 9), 3, 5))
    weight = net.signs.weight.detach()
    scale = weight.abs().mean((1, 2, 3), keepdim=True)
    signs = torch.where(torch.from_numpy(read) >= 0, 1.0, -1.0)
    want = functional.conv2d(signs, torch.where(weight >= 0, scale, -scale), **places)  # type: ignore[arg-type]
    np.testing.assert_allclose(found, want.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantizer", ["xnor", "bnn"])
def test_a_chain_answers_as_its_int8_file_does_in_an_eighth_of_the_bytes(quantizer: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    program = untrained(Chain(), quantizer=quantizer)
    bits = OpenVINO(batch=1).export(program, tmp_path / "bits.xml")
    whole = optimize.export(program, "openvino", tmp_path / "bytes.xml")
    assert coverage_of(bits).kernels[COUNTED] == 3
    assert len(coverage_of(bits).quantized) == len(coverage_of(whole).quantized) == 5
    assert any("3 layers of signs count bits" in note for note in bits.notes)
    assert any("3 layers of signs are computed in INT8" in note for note in whole.notes)
    x = draw((3, 9, 9), 16, 7)
    for found, want in zip(answers(bits, x), answers(whole, x), strict=True):
        np.testing.assert_array_equal(found, want)
    weights = sum(block[0].weight.numel() for block in Chain().blocks)  # type: ignore[index, operator]
    assert bits.path.with_suffix(".bin").stat().st_size < whole.path.with_suffix(".bin").stat().st_size - 0.8 * weights


@pytest.mark.parametrize(
    ("between", "constant"),
    [
        (lambda value, read, _: value + read, torch.zeros(1)),
        (lambda value, read, constant: value + constant + read, draw((16, 1, 1), 1, 3)),
        (lambda value, read, constant: (value + constant + read).relu() + read, draw((16, 1, 1), 1, 3)),
        (lambda value, _, constant: value + constant, draw((16, 1, 1), 1, 3)),
        (lambda value, _, constant: value + constant, 1e-36 * draw((16, 1, 1), 1, 3)),
        (lambda value, _, constant: value + constant, draw((16, 9, 9), 1, 3)),
        (lambda value, _, constant: value + constant, draw((9,), 9, 3)),
        (lambda value, *_: value, torch.zeros(1)),
    ],
    ids=["shortcut", "bias, shortcut", "two shortcuts", "bias", "tiny", "a pixel", "a place", "nothing"],
)
def test_whatever_stands_between_two_layers_the_answers_are_those_of_int8(
    between: Callable[[Tensor, Tensor, Tensor], Tensor], constant: Tensor, tmp_path: Path
) -> None:
    """A sum with a shortcut is compared by itself, and a bias that is not one a channel with it."""
    torch.manual_seed(0)
    program = untrained(Two(between, constant))
    bits = OpenVINO(batch=1).export(program, tmp_path / "bits.xml")
    whole = optimize.export(program, "openvino", tmp_path / "bytes.xml")
    assert coverage_of(bits).kernels[COUNTED] == 2
    x = draw((3, 9, 9), 8, 7)
    np.testing.assert_array_equal(answers(bits, x), answers(whole, x))


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda value, _, constant: value + constant, "answers otherwise in bits"),
        (lambda value, _, constant: functional.max_pool2d(value + constant[:, None, None], 2), "cannot compile them"),
    ],
    ids=["a bias along the width, as wide as there are channels", "pooling"],
)
def test_where_bits_answer_otherwise_or_are_not_compiled_the_file_is_in_int8(
    between: Callable[[Tensor, Tensor, Tensor], Tensor], reason: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    program = untrained(Two(between, draw((), 16, 3)), size=16)
    artifact = OpenVINO(batch=1).export(program, tmp_path / "net.xml")
    assert COUNTED not in coverage_of(artifact).kernels
    assert any(f"2 layers of signs are computed in INT8: OpenVINO {reason}" in note for note in artifact.notes)
    assert not any("count bits" in note for note in artifact.notes)
    whole = optimize.export(program, "openvino", tmp_path / "bytes.xml")
    assert coverage_of(artifact).quantized == coverage_of(whole).quantized
    x = draw((3, 16, 16), 4, 7)
    np.testing.assert_array_equal(answers(artifact, x), answers(whole, x))


@pytest.mark.parametrize("bias", [True, False])
def test_signs_of_a_layer_of_signs_are_taken_in_its_kernel(bias: bool, tmp_path: Path) -> None:
    layers = [nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, bias=bias), nn.ReLU(), nn.Conv2d(16, 16, 3)]
    program = untrained(nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 25, 5)))
    kernels = coverage_of(OpenVINO(batch=1).export(program, tmp_path / "net.xml")).kernels
    assert (kernels[COUNTED], kernels["FakeQuantize@f32"]) == (2, 1)  # for the first of them alone


@pytest.mark.parametrize(("channels", "quantizer"), [(12, "xnor"), (16, "twn")])
def test_what_bits_cannot_say_stays_bytes(channels: int, quantizer: str, tmp_path: Path) -> None:
    """Channels that fill no bytes; weights that are zero, too."""
    net = Signs(channels, 8, 3)
    options = {"activation_bits": 1} if quantizer == "twn" else {}
    artifact = OpenVINO(batch=1).export(untrained(net, ends=0, quantizer=quantizer, **options), tmp_path / "net.xml")
    assert COUNTED not in coverage_of(artifact).kernels
    assert not any("signs" in note for note in artifact.notes)


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_signs_of_what_is_not_finite_are_refused(number: float) -> None:
    with pytest.raises(Refused, match=r"a value that is not finite at 'add' \(add\)"):
        untrained(Two(lambda value, _, constant: value + constant, torch.tensor(number)))


@pytest.mark.parametrize(("batch", "hint"), [(4, "\n--static-batch 4 fixes it for all files."), (-1, "")])
def test_a_file_takes_one_sample_or_any_number(batch: int, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        OpenVINO(batch=batch)
    assert str(refused.value) == f"openvino.batch={batch}: a file takes one sample (1) or any number (0).{hint}"
