"""Random sums of linear branches of one input stay equal, and become one convolution or say why not."""

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import optimize
from optimize.frontend import capture
from tests.families import BNAndPad, assert_equal, randomized


@dataclass(frozen=True)
class Axis:
    """How a branch reads one axis."""

    kernel: int
    dilation: int
    padding: int

    @property
    def loss(self) -> int:
        """Pixels lost before striding; branches of one loss have one output size."""
        return self.dilation * (self.kernel - 1) - 2 * self.padding

    @property
    def pools(self) -> bool:
        """A pool has no dilation, and at most half a kernel of padding."""
        return self.dilation == 1 and 2 * self.padding <= self.kernel


_AXES = [Axis(k, d, p) for k in range(1, 8) for d in (1, 2) for p in range(7) if d == 1 or k > 1]
_SIZE = 4


@dataclass(frozen=True)
class Branch:
    """One summand of a random sum."""

    kind: str
    axes: tuple[Axis, Axis]
    groups: int
    bias: bool
    norm: bool
    factor: str
    sign: int

    def build(self, stride: int) -> nn.Module:
        layers = [self._operator(stride)]
        layers += [nn.BatchNorm2d(_SIZE)] if self.norm else []
        layers += [Scale(self.factor)] if self.factor else []
        return nn.Sequential(*layers)

    def _operator(self, stride: int) -> nn.Module:
        kernel, dilation, padding = zip(*((a.kernel, a.dilation, a.padding) for a in self.axes), strict=True)
        if self.kind == "pool":
            return nn.AvgPool2d(kernel, stride, padding)
        if self.kind == "identity":
            return nn.BatchNorm2d(_SIZE)
        if self.kind == "serial":
            point = nn.Conv2d(_SIZE, _SIZE, 1, groups=self.groups, bias=False)
            square = nn.Conv2d(_SIZE, _SIZE, kernel, stride, 0, dilation, self.groups, self.bias)
            return nn.Sequential(point, BNAndPad(_SIZE, padding[0]), square)
        return nn.Conv2d(_SIZE, _SIZE, kernel, stride, padding, dilation, self.groups, self.bias)


class Scale(nn.Module):
    """A factor a channel, or one for all."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(_SIZE, 1, 1)) if kind == "channel" else -1.75

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class SignedSum(nn.Module):
    """Branches of one input, added or subtracted."""

    def __init__(self, branches: list[Branch], stride: int) -> None:
        super().__init__()
        self.signs = [branch.sign for branch in branches]
        self.branches = nn.ModuleList(branch.build(stride) for branch in branches)

    def forward(self, x: Tensor) -> Tensor:
        y = self.branches[0](x)
        for sign, branch in zip(self.signs[1:], self.branches[1:], strict=True):
            y = y + branch(x) if sign > 0 else y - branch(x)
        return y


@st.composite
def branches(draw: st.DrawFn, loss: int, stride: int) -> Branch:
    kinds = ["dense", "dense", "serial"] + (["pool"] if loss >= 0 else [])
    kind = draw(st.sampled_from(kinds + (["identity"] if loss == 0 and stride == 1 else [])))
    axes = [axis for axis in _AXES if axis.loss == loss]
    if kind == "pool":
        axes = [axis for axis in axes if axis.pools]
    first = draw(st.sampled_from(axes))
    second = first if kind == "serial" else draw(st.sampled_from(axes))
    return Branch(
        kind=kind,
        axes=(first, second),
        groups=draw(st.sampled_from([1, 2, _SIZE])),
        bias=draw(st.booleans()),
        norm=draw(st.booleans()),
        factor=draw(st.sampled_from(["", "", "one", "channel"])),
        sign=draw(st.sampled_from([1, 1, -1])),
    )


def covering(found: list[Branch]) -> Branch:
    """Return a dense branch whose taps hold those of all others: merging into it costs nothing."""
    axes = []
    for pair in zip(*(branch.axes for branch in found), strict=True):
        padding = max(axis.padding for axis in pair)
        last = max(axis.dilation * (axis.kernel - 1) - axis.padding for axis in pair)
        axes.append(Axis(padding + last + 1, 1, padding))
    return Branch("dense", (axes[0], axes[1]), 1, True, True, "", 1)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data(), loss=st.sampled_from([-2, 0, 0, 1, 2]), stride=st.sampled_from([1, 2]), cover=st.booleans())
def test_a_random_sum_is_equal_and_merges_or_says_why(data: st.DataObject, loss: int, stride: int, cover: bool) -> None:
    found = data.draw(st.lists(branches(loss, stride), min_size=2, max_size=4))
    torch.manual_seed(len(found))
    net = randomized(SignedSum([covering(found), *found] if cover else found, stride)).double()
    x = torch.randn(2, _SIZE, 15, 12, dtype=torch.float64)
    program = capture(net, (x,))
    merged, outcome = optimize.Reparameterize().apply(program)
    assert_equal(program(x), merged(x))
    ops = merged.stats().ops
    if cover:
        assert dict(ops) == {"conv2d": 1}
    if ops.get("conv2d", 0) and ops.get("add", 0) + ops.get("sub", 0):  # pools alone are cheaper than a convolution
        assert outcome.skips and all(skip.reason for skip in outcome.skips)
