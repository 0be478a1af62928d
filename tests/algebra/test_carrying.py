import random
from math import prod

import pytest
import torch
from torch import Tensor, nn

import optimize
from optimize import graph
from optimize.algebra import carrying
from optimize.algebra.channelwise import Channelwise
from optimize.graph import aten

SIZES = [2, 3, 4]


class Moved(nn.Module):
    """Moves the elements of a value by one call."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.kind = draw.choice(["permute", "transpose", "reshape", "reshape"])
        self.order = draw.sample(range(1, 4), 3)
        sizes = [*SIZES] if draw.random() < 0.5 else [prod(SIZES)]
        while draw.random() < 0.6 and len(sizes) < 5:
            sizes = self.changed(sizes, draw)
        self.sizes = sizes

    @staticmethod
    def changed(sizes: list[int], draw: random.Random) -> list[int]:
        place = draw.randrange(len(sizes))
        factor = draw.choice([factor for factor in range(1, sizes[place] + 1) if sizes[place] % factor == 0])
        split = [*sizes[:place], factor, sizes[place] // factor, *sizes[place + 1 :]]
        return split if draw.random() < 0.7 else [*sizes[:place], prod(sizes[place:])]

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "permute":
            return x.permute(0, *self.order)
        if self.kind == "transpose":
            return x.transpose(*self.order[:2])
        return x.reshape(-1, *self.sizes)


def along(numbers: Tensor, axis: int | None, dims: int) -> Tensor:
    return numbers if axis is None else numbers.reshape([-1 if place == axis else 1 for place in range(dims)])


@pytest.mark.parametrize("seed", range(60))
def test_an_operator_carried_past_a_move_does_the_same(seed: int) -> None:
    net, x = Moved(seed), torch.randn(2, *SIZES, generator=torch.Generator().manual_seed(seed)).double()
    program = optimize.capture(net.eval(), (x,))
    move = program.outputs[0]
    if net.kind == "reshape" and net.sizes == [*SIZES]:
        assert move.op == "placeholder"  # it moves nothing
        return
    assert graph.is_call(move, *carrying.MOVES)
    for axis in (*range(1, 4), None):
        size = () if axis is None else (SIZES[axis - 1],)
        scale, shift = torch.randn(2, *size, generator=torch.Generator().manual_seed(seed)).double()
        start = next(iter(program.graph.nodes))
        carried = carrying.after(Channelwise(start, axis, scale, shift), move)
        y = program(x)
        if carried is None:
            assert graph.is_call(move, aten.reshape.default)
            continue
        want = program(along(scale, axis, 4) * x + along(shift, axis, 4))
        found = along(carried.scale, carried.axis, y.dim()) * y + along(carried.shift, carried.axis, y.dim())
        assert torch.equal(found, want)
        back = carrying.before(carried)
        if back is not None:
            assert torch.equal(along(back.scale, back.axis, 4).expand_as(x), along(scale, axis, 4).expand_as(x))


@pytest.mark.parametrize("mode", ["reflect", "circular", "replicate", "constant"])
def test_a_pad_lets_through_what_gives_its_border(mode: str) -> None:
    class Padded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.pad(x, (1, 1, 2, 0), mode)

    x = torch.randn(2, 3, 4, 5).double()
    program = optimize.capture(Padded(), (x,))
    start, move = next(iter(program.graph.nodes)), program.outputs[0]
    scale, shift = torch.randn(2, 3).double()
    carried = carrying.after(Channelwise(start, 1, scale, shift), move)
    assert (carried is None) == (mode == "constant")
    carried = carrying.after(Channelwise(start, 1, scale, 0 * shift), move)
    assert carried is not None
    assert torch.equal(along(carried.scale, carried.axis, 4) * program(x), program(along(scale, 1, 4) * x))
    assert carrying.after(Channelwise(start, 2, *torch.randn(2, 4).double()), move) is None


def test_a_reshape_repeats_the_numbers_of_axes_it_joins() -> None:
    program = optimize.capture(nn.Flatten(1), (torch.randn(2, 3, 4, 5),))
    start, move = next(iter(program.graph.nodes)), program.outputs[0]
    numbers = torch.arange(3.0).double()
    carried = carrying.after(Channelwise(start, 1, numbers, numbers), move)
    assert carried is not None and carried.axis == 1
    assert torch.equal(carried.scale, numbers.repeat_interleave(20))
