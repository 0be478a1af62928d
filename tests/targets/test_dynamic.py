"""Dynamic INT8 of attention and of recurrent speech nets, on ONNX Runtime and TorchScript."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimize
from optimize.passes.quantize_dynamic import QuantizeDynamic
from optimize.targets.base import Artifact
from tests.nets import sqnr_db
from tests.passes.test_quantize_weights import capture
from tests.targets.scripted import draw

TARGETS = ("onnx", "torchscript")


class Attention(nn.Module):
    """Self attention, or attention to the first three positions, whose packed projection is cut into parts."""

    def __init__(self, *, cross: bool = False, **options: Any) -> None:
        super().__init__()
        self.attend, self.cross = nn.MultiheadAttention(64, 4, batch_first=True, **options), cross

    def forward(self, x: Tensor) -> Tensor:
        seen = x[:, :3] if self.cross else x
        return self.attend(x, seen, seen, need_weights=self.cross)[0]


NETS = {
    "self": (lambda: Attention(), 2),
    "cross": (lambda: Attention(cross=True, bias=False), 3),
    "encoder": (lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 4),
    "decoder": (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(64, 4, 128, batch_first=True), 1), 7),
}


def dynamic(net: nn.Module, target: str, folder: Path, *inputs: Tensor) -> tuple[Artifact, optimize.Program]:
    program = capture(net, *inputs)
    return optimize.export(QuantizeDynamic().apply(program)[0], target, folder / f"net.{target}"), program


def inputs_of(name: str, batch: int, seed: int = 0) -> list[Tensor]:
    return [draw(batch, 7, 64, seed=seed)] * (2 if name == "decoder" else 1)


@functools.cache
def attending(name: str) -> optimize.Program:
    torch.manual_seed(0)
    return capture(NETS[name][0](), *inputs_of(name, 2))


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_projection_of_attention_runs_in_integers(target: str, name: str, tmp_path: Path) -> None:
    program, layers = attending(name), NETS[name][1]
    artifact = optimize.export(QuantizeDynamic().apply(program)[0], target, tmp_path / f"net.{target}")
    coverage = artifact.coverage
    assert coverage is not None
    assert len(coverage.quantized) == layers
    reasons = {layer.reason for layer in coverage.left_float}
    assert "both its inputs are computed at run time" in reasons
    assert not reasons & {"its weight is computed at run time", "the quantization plan leaves it in float"}
    for batch in (1, 5):
        fresh = inputs_of(name, batch, seed=batch)
        assert sqnr_db(program(*fresh), artifact.load(threads=1)(*fresh)) > 30


class Speech(nn.Module):
    """A convolution over time, a recurrent layer and a head."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv1d(24, 40, 3, padding=1)
        self.rnn = nn.GRU(40, 256, batch_first=True, **options)
        self.head = nn.Linear(512 if options.get("bidirectional") else 256, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        states, last = self.rnn(self.conv(x).transpose(1, 2))
        return self.head(states), last


@pytest.mark.parametrize("options", [{}, {"bias": False, "num_layers": 2, "bidirectional": True}], ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_a_gru_runs_in_integers_and_the_convolution_says_why_not(
    target: str, options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    artifact, program = dynamic(Speech(**options), target, tmp_path, draw(2, 24, 9))
    coverage = artifact.coverage
    assert coverage is not None
    assert {name.removesuffix("_1") for name in coverage.quantized} == {"rnn", "head"}
    (left,) = coverage.left_float
    assert (left.name, left.op) == ("conv", "conv1d") and "a convolution is slower" in left.reason
    for batch in (1, 3):
        x = draw(batch, 24, 9, seed=batch)
        for want, got in zip(program(x), artifact.load(threads=1)(x), strict=True):
            assert sqnr_db(want, got) > 35


def test_a_gru_written_out_for_onnx_is_about_a_quarter(tmp_path: Path) -> None:
    artifact, program = dynamic(Speech(), "onnx", tmp_path, draw(2, 24, 9))
    assert artifact.coverage is not None and artifact.coverage.kernels["Scan"] == 1
    assert optimize.export(program, "onnx", tmp_path / "float.onnx").size_bytes > 3.3 * artifact.size_bytes


def test_a_small_gru_stays_in_float_and_says_from_where_on_it_pays(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.GRU(8, 16, batch_first=True))
    artifact, _ = dynamic(net, "onnx", tmp_path, draw(2, 5, 8))
    assert artifact.coverage is not None and artifact.coverage.quantized == ("0",)
    assert ["pays from 256 hidden units on" in layer.reason for layer in artifact.coverage.left_float] == [True]
