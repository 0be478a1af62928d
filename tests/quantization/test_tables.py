"""Embeddings of INT8 programs: integers in the file, a scale a column or a row, floats on the same grid elsewhere."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import optimize
from optimize.passes.base import IntegerPass
from optimize.program import Program
from optimize.quantization.blocks import read_blocks, read_columns, round_table
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


@pytest.fixture(scope="module")
def captured() -> Program:
    torch.manual_seed(0)
    return optimize.capture(Reader().eval(), (tokens(),))


@pytest.fixture
def program(captured: Program) -> Program:
    return captured.clone()


def with_small_rows(program: Program) -> Program:
    """Makes every third row of the large table a hundredth of what it was."""
    program.graph_module.get_parameter("words.weight").data[::3] *= 0.01
    return program


STEPS = [optimize.QuantizeStatic(calibration=[tokens(1), tokens(2)]), optimize.QuantizeDynamic()]


@pytest.mark.parametrize(("small", "kernel"), [(False, "DequantizeLinear"), (True, "GatherBlockQuantized")])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_the_large_table_is_stored_in_a_quarter(
    step: IntegerPass, small: bool, kernel: str, program: Program, tmp_path: Path
) -> None:
    quantized, outcome = step.apply(with_small_rows(program) if small else program)
    assert quantized.quantization is not None and len(quantized.quantization.tables) == 1
    assert [entry.what for entry in outcome.rewrites if entry.where == "words"] == ["rows of an embedding to int8"]
    artifact = optimize.export(quantized, "onnx", tmp_path / "net.onnx")
    assert artifact.coverage is not None and set(artifact.coverage.quantized) == {"words", "layer"}
    assert artifact.coverage.kernels[kernel] >= 1
    assert artifact.size_bytes < 0.32 * 4 * ROWS * WIDTH
    want, found = program(tokens(7)), artifact.load()(tokens(7))
    assert float((want - found).norm() / want.norm()) < 0.02


@pytest.mark.parametrize("target", ["torchscript", "eager"])
def test_a_target_without_such_a_kernel_stores_the_same_numbers(target: str, program: Program, tmp_path: Path) -> None:
    rounded = program.clone()
    assert len(round_tables(rounded, ())) == 1
    rounded.refresh()
    weight = rounded.graph_module.get_parameter("words.weight").data
    columns = read_columns(weight)
    assert columns is not None and torch.equal(columns.weight.T, weight)
    artifact = optimize.export(rounded, target, tmp_path / f"net.{target}")
    torch.testing.assert_close(artifact.load()(tokens(7)), rounded(tokens(7)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("width", [33, 100, 384])
def test_a_row_of_any_width_takes_a_byte_a_number_and_one_scale_at_most(
    width: int, small: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(ROWS, width), torch.nn.Linear(width, 4)).eval()
    if small:
        net[0].weight.data[::3] *= 0.01
    program = optimize.capture(net, (tokens(),))
    artifact = optimize.export(optimize.QuantizeDynamic().apply(program)[0], "onnx", tmp_path / "net.onnx")
    assert artifact.size_bytes < ROWS * (width + 4 * small) + 20 * width + 4000
    want, found = program(tokens(7)), artifact.load()(tokens(7))
    assert float((want - found).norm() / want.norm()) < 0.03


def test_rows_have_the_scales_where_columns_would_lose_one_of_a_hundred() -> None:
    table = torch.randn(1000, 40, generator=torch.Generator().manual_seed(0))
    table[:10] *= 0.01  # one of a hundred rows may be worse, an eleventh may not
    rounded = round_table(table)
    assert read_columns(rounded) is not None and torch.equal(round_table(rounded), rounded)
    kept = (rounded - table).square().sum(1) <= 1e-3 * table.square().sum(1)
    assert kept[10:].all() and not kept[:10].any()
    table[10] *= 0.01
    assert read_columns(round_table(table)) is None
    assert torch.equal(round_table(table), read_blocks(table, 8, 0).weight)
    assert torch.equal(read_blocks(round_table(table), 8, 0).weight, round_table(table))


def test_the_largest_numbers_of_a_table_are_kept() -> None:
    """They are those of words that every text has: clipped for the least squared error, these lost most."""
    table = torch.randn(1000, 40, generator=torch.Generator().manual_seed(0))
    table[3] = 8.0
    for form in (table, table * torch.logspace(0, -3, 1000)[:, None]):
        assert (round_table(form)[3] - form[3]).abs().max() <= 1e-6 * form[3].abs().max()


def test_rows_and_columns_of_zeros_stay_zeros() -> None:
    table = torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
    table[5], table[:, 7] = 0, 0
    rounded = round_table(table)
    assert read_columns(rounded) is not None and not rounded[5].any() and not rounded[:, 7].any()


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
