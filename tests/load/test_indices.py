"""Indices that an untrusted graph computes are clamped: torch answers as before, and no runtime leaves a tensor."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn

import optimize
from optimize import graph
from optimize.errors import Refused
from optimize.load import stored
from optimize.load.identify import Kind
from optimize.load.taking import take_over
from optimize.program import Program

aten = torch.ops.aten


class Computed(nn.Module):
    """Takes places that it computes from its input, each within bounds."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        self.table, self.lookup = nn.Parameter(torch.randn(9, 5)), nn.Embedding(9, 5)
        self.register_buffer("held", torch.tensor([[0, 2], [1, 0]]))
        self.pool = nn.MaxPool2d(2, return_indices=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        best = flat.argmax(1)  # [N], below 16
        rows = (flat[:, :3] > 0).to(torch.int64).cumsum(1)  # [N, 3], up to 3
        some = torch.arange(x.shape[0])
        return {
            "gather": lambda: flat.gather(1, rows),
            "scatter": lambda: torch.zeros_like(flat).scatter(1, rows, flat[:, :3]),
            "scatter_add": lambda: torch.zeros_like(flat).scatter_add(1, rows, flat),
            "index_select": lambda: self.table.index_select(0, best % 9),
            "index": lambda: self.table[rows],
            "index from the end": lambda: self.table[-1 - rows],
            "pairs": lambda: flat[some, best],
            "rows of a batch": lambda: flat[some.flip(0) * 1],
            "index_put": lambda: flat.index_put((some, best), flat[:, 0]),
            "_unsafe_index": lambda: aten._unsafe_index.Tensor(self.table, [rows]),
            "index_add": lambda: flat.index_add(1, rows[0], flat[:, :3]),
            "take": lambda: torch.take(self.table, rows),
            "embedding": lambda: self.lookup(rows),
            "unpool": lambda: nn.functional.max_unpool2d(*self.pool(x), 2),
            "given": lambda: self.table[self.held] + flat.sum(),
            "moved": lambda: self.table[self.held.t().reshape(-1)[1:].unsqueeze(0)] + flat.sum(),
            "mask": lambda: torch.where(self.table[:4, :4] > 0, flat[:, None, :4], 0.0),
        }[self.use]()


CLAMPED = (
    "gather", "scatter", "scatter_add", "index_select", "index", "index from the end", "pairs", "rows of a batch",
    "index_put", "_unsafe_index", "index_add", "take", "embedding", "unpool",
)  # fmt: skip
X = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))


def taken(use: str, folder: Path) -> tuple[nn.Module, Program]:
    module = Computed(use).eval()
    stored.store(optimize.capture(module, (X,)), folder)
    return module, stored.restore(folder)


def clamps(program: Program) -> list[fx.Node]:
    return list(graph.calls(program.graph, aten.clamp.default))


@pytest.mark.parametrize("use", CLAMPED)
def test_an_index_that_is_computed_is_clamped_and_answers_stay(use: str, tmp_path: Path) -> None:
    module, program = taken(use, tmp_path)
    assert clamps(program)
    for samples in (1, 3, 5):
        x = torch.randn(samples, 1, 4, 4)
        torch.testing.assert_close(program(x), module(x), rtol=0, atol=0)


@pytest.mark.parametrize("use", ["given", "moved", "mask"])
def test_an_index_that_the_file_holds_is_left_alone(use: str, tmp_path: Path) -> None:
    module, program = taken(use, tmp_path)
    assert not clamps(program)
    torch.testing.assert_close(program(X), module(X))


@pytest.mark.parametrize("target, ending", [("onnx", ".onnx"), ("openvino", ".xml"), ("torchscript", ".pt")])
@pytest.mark.parametrize("use", ["gather", "scatter", "index", "pairs", "rows of a batch", "embedding"])
def test_files_are_written_with_it(use: str, target: str, ending: str, tmp_path: Path) -> None:
    module, program = taken(use, tmp_path)
    runner = optimize.export(program, target, tmp_path / f"net{ending}").load()
    for samples in (1, 4):
        x = torch.randn(samples, 1, 4, 4)
        torch.testing.assert_close(runner(x), module(x), rtol=1e-5, atol=1e-5)


class Drifting(nn.Module):
    """An index that is right where numbers are added in torch's order, and far outside in another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * 1e6)
        self.register_buffer("expected", torch.zeros(()))
        self.expected.copy_(self.total(X))

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return ((x * 0).sum() + self.numbers).sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(4) + ((self.total(x) - self.expected) * 6e7).to(torch.int64)
        return torch.zeros(1, 4).expand(x.shape[0], 4).scatter(1, places.expand(x.shape[0], 4), x.flatten(1)[:, :4])


@pytest.mark.parametrize("target, ending", [("onnx", ".onnx"), ("openvino", ".xml")])
def test_no_runtime_writes_where_a_file_tells_it_to(target: str, ending: str, tmp_path: Path) -> None:
    torch.export.save(torch.export.export(Drifting().eval(), (X,)), tmp_path / "net.pt2")
    program = take_over(tmp_path / "net.pt2", Kind.EXPORTED, lambda _: (X,)).program
    assert program is not None and clamps(program)
    answer = optimize.export(program, target, tmp_path / f"net{ending}").load()(X)
    written = X.flatten(1)[:, :4].numpy()
    assert np.isin(np.asarray(answer), [*written.ravel(), 0.0]).all()


class Classes(nn.Module):
    def __init__(self, use: Any) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(x, x.flatten(1).argmax(1))


@pytest.mark.parametrize(
    "use",
    [
        lambda x, best: nn.functional.one_hot(best, 16) + x.sum(),
        lambda x, best: nn.functional.nll_loss(x.flatten(1), best, reduction="none"),
    ],
    ids=["one_hot", "nll_loss"],
)
def test_classes_that_are_computed(use: Any, tmp_path: Path) -> None:
    program = optimize.capture(Classes(use).eval(), (X,))
    stored.store(program, tmp_path)
    try:
        found = stored.restore(tmp_path)
    except Refused as error:
        assert "are computed" in str(error)
    else:
        assert clamps(found)
        torch.testing.assert_close(found(X), program(X))
