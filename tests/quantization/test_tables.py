"""Embeddings of INT8 programs: their rows are integers in the file, floats on the same grid elsewhere."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import optimize
from optimize.passes.base import IntegerPass
from optimize.program import Program
from optimize.quantization.blocks import read_blocks
from optimize.quantization.weights import round_tables

ROWS, WIDTH = 2048, 96


class Reader(nn.Module):
    """A large table, a small one, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.layer = nn.Embedding(ROWS, WIDTH), nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.words(tokens) + self.places(tokens % 9))


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, ROWS, (4, 9), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def program() -> Program:
    torch.manual_seed(0)
    return optimize.capture(Reader().eval(), (tokens(),))


STEPS = [optimize.QuantizeStatic(calibration=[tokens(1), tokens(2)]), optimize.QuantizeDynamic()]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_the_large_table_is_stored_in_a_quarter(step: IntegerPass, program: Program, tmp_path: Path) -> None:
    quantized, outcome = step.apply(program)
    assert quantized.quantization is not None and len(quantized.quantization.tables) == 1
    assert [entry.what for entry in outcome.rewrites if entry.where == "words"] == ["rows of an embedding to int8"]
    artifact = optimize.export(quantized, "onnx", tmp_path / "net.onnx")
    assert artifact.coverage is not None and set(artifact.coverage.quantized) == {"words", "layer"}
    assert artifact.coverage.kernels["GatherBlockQuantized"] == 1
    assert artifact.size_bytes < 0.32 * 4 * ROWS * WIDTH
    want, found = program(tokens(7)), artifact.load()(tokens(7))
    assert float((want - found).norm() / want.norm()) < 0.02


@pytest.mark.parametrize("target", ["torchscript", "eager"])
def test_a_target_without_such_a_kernel_stores_the_same_numbers(target: str, program: Program, tmp_path: Path) -> None:
    rounded = program.clone()
    assert len(round_tables(rounded, ())) == 1
    rounded.refresh()
    weight = rounded.graph_module.get_parameter("words.weight").data
    torch.testing.assert_close(read_blocks(weight, 8, 0).weight, weight, rtol=0, atol=0)
    artifact = optimize.export(rounded, target, tmp_path / f"net.{target}")
    torch.testing.assert_close(artifact.load()(tokens(7)), rounded(tokens(7)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [33, 100, 384])
def test_a_row_of_any_width_takes_a_byte_a_number_and_one_scale(width: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(ROWS, width), torch.nn.Linear(width, 4)).eval()
    program = optimize.capture(net, (tokens(),))
    artifact = optimize.export(optimize.QuantizeDynamic().apply(program)[0], "onnx", tmp_path / "net.onnx")
    assert artifact.size_bytes < ROWS * (width + 4) + 16 * width + 4000
    want, found = program(tokens(7)), artifact.load()(tokens(7))
    assert float((want - found).norm() / want.norm()) < 0.03


class TwiceReader(Reader):
    """Reads its table at two places, as encoders and decoders that share one do, which are two calls."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.words(tokens) * self.words((tokens + 1) % ROWS))


def test_a_table_that_two_calls_read_is_rounded_once_and_can_be_read_at_once() -> None:
    torch.manual_seed(0)
    program = optimize.capture(TwiceReader().eval(), (tokens(),))
    before = program(tokens())
    assert len(round_tables(program, ())) == 2
    held = [name for name, _ in program.graph_module.named_parameters() if name.startswith("words")]
    assert len(held) == 1 and 0 < float((program(tokens()) - before).norm() / before.norm()) < 0.02


def test_what_the_user_keeps_stays_in_float(program: Program) -> None:
    quantized, _ = optimize.QuantizeDynamic(keep=("words",)).apply(program)
    assert quantized.quantization is not None and not quantized.quantization.tables
    held, given = (entry.graph_module.get_parameter("words.weight") for entry in (quantized, program))
    assert torch.equal(held, given)


def test_a_table_that_is_not_finite_stays_in_float(program: Program) -> None:
    program.graph_module.get_parameter("words.weight").data[3, 5] = torch.inf
    assert round_tables(program, ()) == []
