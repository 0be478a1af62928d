"""The listing, letter for letter, and what it leaves out. UPDATE_GOLDEN=1 rewrites the texts."""

import functools

import pytest
import torch
from rich.cells import cell_len
from torch import nn

import models
import optimize
from optimize.report import operations
from optimize.report.model import Comparison
from optimize.report.side_by_side import _joints, listing
from tests.report.conftest import HOSTILE, block
from tests.report.test_golden import compare
from tests.slow import but_slowly


def change(module: nn.Module, x: torch.Tensor) -> Comparison:
    models.randomize_batch_norm(module, 0)
    program = optimize.capture(module.eval(), (x,))
    trace = optimize.Pipeline([optimize.Reparameterize(), optimize.FuseConvBN()]).run(program)
    return operations.compare(program, trace.program)


@functools.cache
def reference(name: str) -> Comparison:
    entry = models.REFERENCES[name]
    return change(entry.build(), entry.inputs())


def text(comparison: Comparison, width: int, *, whole: bool = False) -> str:
    return "".join(f"{line.plain}\n" for line in listing(comparison, width, whole=whole))


@pytest.mark.parametrize("width", [80, 132])
@pytest.mark.parametrize("name", ["repvgg", "resnet"])
def test_listing(name: str, width: int) -> None:
    compare(f"show_{name}_{width}.txt", text(reference(name), width))


@pytest.mark.parametrize("width", [40, 60, 80, 132])
@pytest.mark.parametrize("name", but_slowly(["repvgg", "mobilenetv3", "unet", "vit", "lstm"], {"mobilenetv3", "vit"}))
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    assert max(cell_len(line) for line in text(reference(name), width).splitlines()) <= width


def test_without_a_change_there_is_one_column() -> None:
    found = text(reference("vit"), 132)
    assert "before" not in found and found.count("attention 4 heads × 16") == 3


def test_long_graphs_leave_out_what_is_unchanged_unless_asked() -> None:
    shown, whole = text(reference("mobilenetv3"), 80), text(reference("mobilenetv3"), 80, whole=True)
    assert "… 5 operations unchanged …" in shown and "unchanged" not in whole
    assert len(whole.splitlines()) > 80 > len(shown.splitlines()) - 8


def test_blocks_that_repeat_are_shown_once() -> None:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())

    found = text(change(nn.Sequential(*(layer() for _ in range(16))), torch.zeros(2, 4, 8, 8)), 100).splitlines()
    assert found[-1] == "1 … 15: like 0"
    assert sum("batch_norm" in line for line in found) == 1


def test_hostile_names_are_text() -> None:
    found = text(block(f"{HOSTILE}\x1b[2J"), 132)
    assert HOSTILE in found and "\x1b" not in found


@pytest.mark.parametrize(
    ("before", "after", "pieces"),
    [
        (1, 1, [" ─── "]),
        (2, 1, [" ─┬─ ", " ─╯  "]),
        (4, 1, [" ─╮  ", "  ├─ ", "  │  ", " ─╯  "]),
        (1, 3, ["  ╭─ ", " ─┼─ ", "  ╰─ "]),
        (3, 0, [" ─╮  ", "  ├× ", " ─╯  "]),
        (1, 0, [" ──× "]),
        (0, 2, ["  +─ ", "  +─ "]),
    ],
)
def test_a_bracket_joins_what_was_replaced_with_what_replaced_it(before: int, after: int, pieces: list[str]) -> None:
    assert _joints(before, after) == pieces
