"""Masks that are looked up by counting are masks with axes put in; a table that is read in one place is a row."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import optimize
from optimize import counting
from optimize.graph import aten
from tests.slow import but_slowly

Mask = Callable[[Tensor], Tensor]


class Encoder(nn.Module):
    """Looks its mask up as ``transformers`` does, and token types in a buffer that nobody writes."""

    def __init__(self, mask: Mask, kinds: Tensor | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.types, self.mask = nn.Embedding(20, 8), nn.Embedding(2, 8), mask
        self.register_buffer("kinds", torch.ones(1, 32, dtype=torch.int64) if kinds is None else kinds)

    def forward(self, ids: Tensor, seen: Tensor) -> Tensor:
        kinds = self.kinds.expand(ids.shape[0], -1)[:, : ids.shape[1]]
        x = self.words(ids) + self.types(kinds)
        mask = self.mask(seen.bool()).expand(ids.shape[0], -1, ids.shape[1], ids.shape[1])
        return nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], mask)


def counted(seen: Tensor) -> Tensor:
    rows, columns = torch.arange(seen.shape[0]), torch.arange(seen.shape[1]) + 0
    here = seen[rows[:, None, None, None], columns[None, None, None, :]]
    return seen.new_ones((), dtype=torch.bool) & (columns[None, None, :, None] >= 0) & here


def causal(seen: Tensor) -> Tensor:
    columns = torch.arange(seen.shape[1])
    return (columns[None, None, None, :] <= columns[None, None, :, None]) & counted(seen)


def shifted(seen: Tensor) -> Tensor:
    rows, columns = torch.arange(seen.shape[0]), torch.arange(seen.shape[1])
    return seen[rows[:, None, None, None], (columns + 1)[None, None, None, :] % seen.shape[1]]


def turned(seen: Tensor) -> Tensor:
    rows, columns = torch.arange(seen.shape[0]), torch.arange(seen.shape[1])
    return seen[rows[:, None, None, None], columns.flip(0)[None, None, None, :]]


def crossed(seen: Tensor) -> Tensor:
    rows, columns = torch.arange(seen.shape[0]), torch.arange(seen.shape[1])
    return seen[rows[None, None, None, :], columns[:, None, None, None]].permute(3, 1, 2, 0)


def later(seen: Tensor) -> Tensor:
    columns = torch.arange(seen.shape[1])
    return ((columns[None, None, :, None] >= 1) | (columns >= 0)) & counted(seen)


def example() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 20, (2, 6)), (torch.arange(6)[None] < torch.tensor([[6], [4]])).long()


@pytest.mark.parametrize("dynamic", but_slowly([None, "sequence"], {None}))
@pytest.mark.parametrize(
    ("mask", "looks_up"),
    [(counted, False), (causal, False), (shifted, True), (turned, True), (crossed, True), (later, False)],
)
def test_a_mask_is_itself_where_it_is_looked_up_by_counting(mask: Mask, looks_up: bool, dynamic: str | None) -> None:
    net = Encoder(mask).eval()
    program = optimize.capture(net, example(), dynamic=dynamic)
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert (aten.index.Tensor in calls) is looks_up
    ids, seen = torch.randint(0, 20, (5, 9 if dynamic else 6)), torch.ones(5, 9 if dynamic else 6, dtype=torch.int64)
    seen[1, 3:] = seen[3, :2] = 0
    with torch.no_grad():
        torch.testing.assert_close(program(ids, seen), net(ids, seen))


def test_a_mask_that_lets_nothing_but_counting_decide_is_not_joined() -> None:
    calls = [node.target for node in optimize.capture(Encoder(counted).eval(), example()).graph.nodes]
    assert not {aten.ge.Scalar, aten.new_ones.default, aten.arange.default, *counting._ANDS} & {*calls}


@pytest.mark.parametrize(("kinds", "looks_up"), [(None, False), (torch.arange(32)[None] % 2, True)])
def test_a_table_that_is_read_in_one_place_is_a_row(kinds: Tensor | None, looks_up: bool) -> None:
    net = Encoder(counted, kinds).eval()
    program = optimize.capture(net, example(), dynamic="sequence")
    tables = [node for node in program.graph.nodes if node.target is aten.embedding.default]
    assert len(tables) == 1 + looks_up
    given = example()
    with torch.no_grad():
        torch.testing.assert_close(program(*given), net(*given))


class Narrow(nn.Module):
    """Counts in a type that 200 numbers do not fit."""

    def forward(self, x: Tensor) -> Tensor:
        return (x > 0) & (torch.arange(200, dtype=torch.int8) >= 0)


class Bits(nn.Module):
    """Joins what is true with the bits of integers."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ones(200, dtype=torch.bool) & (x > 0).long() * 2


class OneRow(nn.Module):
    """Looks a row up by one number that is no row of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 200)
        self.register_buffer("place", torch.tensor(1))

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0) + self.table(self.place)


@pytest.mark.parametrize("net", [Narrow, Bits, OneRow])
def test_what_only_looks_like_counting_is_left(net: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module, x = net().eval(), torch.randn(3, 200)
    with torch.no_grad():
        want = module(x)
        assert torch.equal(optimize.capture(module, (x,)).run([x])[0], want) and want.shape[-1] == 200
