"""ShuffleNet V2's first two guidelines on this machine: what the memory access formula says beside what is measured.

    python -m benchmarks.shufflenet_guidelines [--side 56] [--blocks 10] [--threads 1] [--budget-s 2]

As in the paper, a network is a stack of blocks of two pointwise convolutions, c1 to c2 channels and back, all columns
of a table with about the same multiply-accumulates: table 1 makes widths unequal, table 2 adds groups. Each network is
timed against the first of its table, runs of both in turns, in eager PyTorch and in ONNX Runtime.

Access is hw(c1+c2)+c1c2/g; the paper (N. Ma et al., 2018, arXiv 1807.11164) measures on a GPU and an ARM. The ratios of
access hold everywhere; how much time they cost is the machine's: one whose arithmetic is the bound pays nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import optimize
from optimize.advise.base import Measured, compare_runs
from optimize.advise.guidelines import access
from optimize.profile.machine import torch_threads

TARGETS = ("eager", "onnx")


@dataclass(frozen=True)
class Column:
    """One network of a table: its widths and groups, and the paper's slow-down on a GPU and an ARM."""

    c1: int
    c2: int
    groups: int
    gpu: float
    arm: float


TABLES = {
    "Table 1, widths c1:c2": (
        Column(128, 128, 1, 1.0, 1.0),
        Column(90, 180, 1, 1480 / 1296, 76.2 / 72.9),
        Column(52, 312, 1, 1480 / 876, 76.2 / 69.1),
        Column(36, 432, 1, 1480 / 748, 76.2 / 57.6),
    ),
    "Table 2, groups": (
        Column(128, 128, 1, 1.0, 1.0),
        Column(180, 180, 2, 2451 / 1725, 40.0 / 35.0),
        Column(256, 256, 4, 2451 / 1026, 40.0 / 32.9),
        Column(360, 360, 8, 2451 / 634, 40.0 / 27.8),
    ),
}


def network(column: Column, blocks: int) -> nn.Module:
    """Return a stack of blocks of two pointwise convolutions, there and back."""
    torch.manual_seed(0)
    pairs = [
        nn.Conv2d(*widths, 1, groups=column.groups)
        for _ in range(blocks)
        for widths in ((column.c1, column.c2), (column.c2, column.c1))
    ]
    return nn.Sequential(*pairs).eval()


def measure(
    columns: Sequence[Column], target: str, *, side: int, blocks: int, threads: int, budget_s: float
) -> list[Measured]:
    """Return the speed of every network against the first: ratio is the first's time over its own."""
    with tempfile.TemporaryDirectory() as folder, torch_threads(threads):
        runs = []
        for index, column in enumerate(columns):
            x = torch.randn(2, column.c1, side, side)
            program = optimize.capture(network(column, blocks), (x,))
            runner = optimize.export(program, target, Path(folder) / f"{index}.{target}").load(threads=threads)
            one = [x[:1].numpy()]
            runs.append(lambda runner=runner, one=one: runner.run(one))
        return [compare_runs(runs[0], run, target, budget_s=budget_s) for run in runs]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=56)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--budget-s", type=float, default=2.0)
    given = parser.parse_args()
    for title, columns in TABLES.items():
        measured = {target: measure(columns, target, **vars(given)) for target in TARGETS}
        least = access(given.side**2, columns[0].c1, columns[0].c2)
        print(f"\n{title}, {given.side}x{given.side}, {given.threads} thread(s); slow-down against the first column")
        print(
            f"{'c1':>4} {'c2':>4} {'g':>2} {'access':>7} {'GPU*':>6} {'ARM*':>6}   "
            + "   ".join(f"{t:^22}" for t in TARGETS)
        )
        for index, column in enumerate(columns):
            moved = access(given.side**2, column.c1, column.c2, column.groups) / least
            cells = [
                f"{1 / found.ratio:5.2f} [{1 / found.ci_high:5.2f}, {1 / found.ci_low:5.2f}]"
                for found in (measured[target][index] for target in TARGETS)
            ]
            paper = f"{column.gpu:6.2f} {column.arm:6.2f}"
            print(
                f"{column.c1:>4} {column.c2:>4} {column.groups:>2} {moved:7.2f} {paper}   "
                + "   ".join(f"{c:^22}" for c in cells)
            )
    print("\n* the paper's; access and these are exact, the rest is measured here with a 95 % interval")


if __name__ == "__main__":
    main()
