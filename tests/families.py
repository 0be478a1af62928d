"""Every published block that merges into one convolution or linear layer, in its training form, and what must remain.

Each is rebuilt from its paper, at the size of a test; where a public implementation differs from the paper in a way a
compiler can see (Diverse-Branch's padding written in place, MobileOne's sum that begins with 0), so does this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import randomize_batch_norm

CHANNELS = 8
_CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def assert_equal(want: Tensor, got: Tensor) -> None:
    """Compare whole outputs, and the outermost pixels on their own: that is where a wrong padding shows."""
    assert want.shape == got.shape and bool(want.isfinite().all())
    largest = float(want.abs().max())
    assert_close(want, got, largest)
    for axis in range(2, want.dim()):
        ends = torch.tensor([0, want.shape[axis] - 1])
        edge, found = want.index_select(axis, ends), got.index_select(axis, ends)
        assert_close(edge, found, max(float(edge.abs().max()), largest / 100))


def assert_close(want: Tensor, got: Tensor, scale: float) -> None:
    """Compare to the tolerance of the dtype, relative to ``scale``."""
    assert float((want - got).abs().max()) < TOLERANCE[want.dtype] * scale


@dataclass(frozen=True)
class Family:
    """One block and what must be left of it.

    Attributes:
        build: Makes the block.
        left: Every operator that must remain, with its count, whatever the order of the passes.
        shape: One input sample.
    """

    build: Callable[[], nn.Module]
    left: Mapping[str, int]
    shape: tuple[int, ...] = (CHANNELS, 13, 10)

    def block(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return the block in evaluation mode with statistics that hide no mistake."""
        torch.manual_seed(0)
        return randomized(self.build()).to(dtype)

    def inputs(self, batch: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw one batch."""
        return torch.randn(batch, *self.shape, dtype=dtype, generator=torch.Generator().manual_seed(batch))


@torch.no_grad()
def randomized(net: nn.Module, seed: int = 0) -> nn.Module:
    """Draw weights, and BatchNorm statistics with gammas of both signs and tiny variances; evaluation mode."""
    torch.manual_seed(seed)
    for layer in net.modules():
        if isinstance(layer, (nn.Linear, *_CONVOLUTIONS.values())):
            layer.reset_parameters()
    randomize_batch_norm(net, seed)
    for layer in net.modules():
        if isinstance(layer, tuple(_NORMS.values())):
            layer.get_buffer("running_var")[seed % 3 :: 5] = 1e-5
    return net.eval()


def conv_bn(
    inputs: int,
    outputs: int,
    kernel: int | tuple[int, ...],
    stride: int = 1,
    groups: int = 1,
    dilation: int = 1,
    bias: bool = False,
    dims: int = 2,
) -> nn.Sequential:
    """A convolution that keeps the size at stride 1, and its BatchNorm."""
    sizes = (kernel,) * dims if isinstance(kernel, int) else kernel
    padding = tuple(dilation * (size - 1) // 2 for size in sizes)
    conv = _CONVOLUTIONS[dims](inputs, outputs, sizes, stride, padding, dilation, groups, bias)
    return nn.Sequential(conv, _NORMS[dims](outputs))


class Parallel(nn.Module):
    """The sum of branches of one input; ``shortcut`` adds the input itself."""

    def __init__(self, *branches: nn.Module, shortcut: bool = False) -> None:
        super().__init__()
        self.branches, self.shortcut = nn.ModuleList(branches), shortcut

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.branches
        y = first(x)
        for branch in others:
            y = y + branch(x)
        return y + x if self.shortcut else y


class Concat(nn.Module):
    """The outputs of branches of one input, one after another along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def repvgg(
    kernel: int = 3, stride: int = 1, groups: int = 1, dilation: int = 1, bias: bool = False, dims: int = 2
) -> nn.Module:
    """kxk, 1x1 and identity, a BatchNorm each (Ding et al., "RepVGG", 2021, arXiv 2101.03697)."""
    dense = conv_bn(CHANNELS, CHANNELS, kernel, stride, groups, dilation, bias, dims)
    point = conv_bn(CHANNELS, CHANNELS, 1, stride, groups, bias=bias, dims=dims)
    identity = [_NORMS[dims](CHANNELS)] if stride == 1 else []
    return nn.Sequential(Parallel(*identity, dense, point), nn.ReLU())


def qarepvgg(stride: int = 1, groups: int = 1) -> nn.Module:
    """No BatchNorm on 1x1 and identity, one after the sum (Chu et al., "QARepVGG", 2022, arXiv 2212.01593)."""
    dense = conv_bn(CHANNELS, CHANNELS, 3, stride, groups)
    point = nn.Conv2d(CHANNELS, CHANNELS, 1, stride, groups=groups)
    return nn.Sequential(Parallel(dense, point, shortcut=stride == 1), nn.BatchNorm2d(CHANNELS), nn.ReLU())


def acnet(kernel: int = 3, stride: int = 1, groups: int = 1, dilation: int = 1) -> nn.Module:
    """kxk, kx1 and 1xk, a BatchNorm each (Ding et al., "ACNet", 2019, arXiv 1908.03930)."""
    shapes = ((kernel, kernel), (kernel, 1), (1, kernel))
    return Parallel(*(conv_bn(CHANNELS, CHANNELS, shape, stride, groups, dilation) for shape in shapes))


class BNAndPad(nn.Module):
    """BatchNorm, then a border of what it makes of zero, written in place as the authors' code does."""

    def __init__(self, channels: int, padding: int) -> None:
        super().__init__()
        self.bn, self.padding = nn.BatchNorm2d(channels), padding

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(x)
        if self.padding == 0:
            return y
        mean, variance = self.bn.get_buffer("running_mean"), self.bn.get_buffer("running_var")
        border = self.bn.bias.detach() - mean * self.bn.weight.detach() / torch.sqrt(variance + self.bn.eps)
        y = functional.pad(y, [self.padding] * 4)
        border = border.view(1, -1, 1, 1)
        for side in (slice(None, self.padding), slice(-self.padding, None)):
            y[:, :, side, :] = border
            y[:, :, :, side] = border
        return y


class IdentityBased(nn.Conv2d):
    """A 1x1 convolution that starts as the identity: the weight is added to a constant."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__(channels, channels, 1, groups=groups, bias=False)
        self.identity = torch.eye(channels // groups).repeat(groups, 1)[:, :, None, None]

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.weight + self.identity, groups=self.groups)


def pointwise_then_square(kernel: int = 3, stride: int = 1, groups: int = 1, hidden: int | None = None) -> nn.Module:
    """1x1, BatchNorm with its border, kxk without padding, BatchNorm."""
    if hidden is None:
        point: nn.Module = IdentityBased(CHANNELS, groups)
    else:
        point = nn.Conv2d(CHANNELS, hidden, 1, groups=groups, bias=False)
    square = nn.Conv2d(hidden or CHANNELS, CHANNELS, kernel, stride, groups=groups, bias=False)
    return nn.Sequential(point, BNAndPad(hidden or CHANNELS, kernel // 2), square, nn.BatchNorm2d(CHANNELS))


def diverse_branch(kernel: int = 3, stride: int = 1, groups: int = 1, hidden: int | None = None) -> nn.Module:
    """kxk, 1x1, 1x1-average and 1x1-kxk (Ding et al., "Diverse Branch Block", 2021, arXiv 2103.13425).

    The depthwise form has no 1x1, averages its input with zero padding, and doubles the hidden channels.
    """
    half = kernel // 2
    dense = conv_bn(CHANNELS, CHANNELS, kernel, stride, groups)
    if groups == CHANNELS:
        average = nn.Sequential(nn.AvgPool2d(kernel, stride, half), nn.BatchNorm2d(CHANNELS))
        return Parallel(dense, average, pointwise_then_square(kernel, stride, groups, hidden or 2 * CHANNELS))
    point = nn.Conv2d(CHANNELS, CHANNELS, 1, groups=groups, bias=False)
    pool = nn.AvgPool2d(kernel, stride)
    average = nn.Sequential(point, BNAndPad(CHANNELS, half), pool, nn.BatchNorm2d(CHANNELS))
    serial = pointwise_then_square(kernel, stride, groups, hidden)
    return Parallel(dense, conv_bn(CHANNELS, CHANNELS, 1, stride, groups), average, serial)


def average_beside_square(kernel: int = 3, stride: int = 1) -> nn.Module:
    """An average pool, as a convolution, on a kxk one."""
    pool = nn.Sequential(nn.AvgPool2d(kernel, stride, kernel // 2), nn.BatchNorm2d(CHANNELS))
    return Parallel(conv_bn(CHANNELS, CHANNELS, kernel, stride), pool)


def many_kernels() -> nn.Module:
    """Kernels of five shapes on the largest of them."""
    shapes = ((1, 1), (1, 3), (3, 1), (3, 3), (5, 5))
    return Parallel(*(conv_bn(CHANNELS, CHANNELS, shape, bias=True) for shape in shapes))


class MobileOne(nn.Module):
    """k convolutions, a 1x1 scale and the identity (Vasu et al., "MobileOne", 2022, arXiv 2206.04040)."""

    def __init__(
        self, branches: int = 4, kernel: int = 3, stride: int = 1, groups: int = CHANNELS, scale: bool = True
    ) -> None:
        super().__init__()
        self.branches = nn.ModuleList(conv_bn(CHANNELS, CHANNELS, kernel, stride, groups) for _ in range(branches))
        self.scale = conv_bn(CHANNELS, CHANNELS, 1, stride, groups) if scale else None
        self.identity = nn.BatchNorm2d(CHANNELS) if stride == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        identity = 0 if self.identity is None else self.identity(x)
        y = 0 if self.scale is None else self.scale(x)
        y = y + identity
        for branch in self.branches:
            y += branch(x)
        return y


class RepMixer(nn.Module):
    """``x + ls * (mixer(x) - norm(x))`` (Vasu et al., "FastViT", 2023, arXiv 2303.14189)."""

    def __init__(self, kernel: int = 3) -> None:
        super().__init__()
        self.mixer, self.norm = MobileOne(1, kernel), MobileOne(0, kernel, scale=False)
        self.scale = nn.Parameter(torch.randn(CHANNELS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * (self.mixer(x) - self.norm(x))


def rep_cpe(kernel: int = 7) -> nn.Module:
    """A depthwise convolution as position encoding, added to its input (FastViT, arXiv 2303.14189)."""
    return Parallel(nn.Conv2d(CHANNELS, CHANNELS, kernel, padding=kernel // 2, groups=CHANNELS), shortcut=True)


def repvgg_dw(kernel: int = 3) -> nn.Module:
    """``bn(conv_bn(x) + conv1(x) + x)``, depthwise (Wang et al., "RepViT", 2023, arXiv 2307.09283)."""
    point = nn.Conv2d(CHANNELS, CHANNELS, 1, groups=CHANNELS)
    both = Parallel(conv_bn(CHANNELS, CHANNELS, kernel, groups=CHANNELS), point, shortcut=True)
    return nn.Sequential(both, nn.BatchNorm2d(CHANNELS))


def bn_linear(bias: bool = True) -> nn.Module:
    """BatchNorm before the classifier (RepViT, arXiv 2307.09283)."""
    return nn.Sequential(nn.BatchNorm1d(CHANNELS), nn.Linear(CHANNELS, 10, bias))


class AveragedHeads(nn.Module):
    """The classifier and the distilled one, averaged (RepViT, arXiv 2307.09283)."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.distilled = bn_linear(), bn_linear()

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(x) + self.distilled(x)) / 2


class Implicit(nn.Module):
    """``m * conv(x + a)``: implicit knowledge around a 1x1 head (Wang et al., "YOLOR", 2021, arXiv 2105.04206)."""

    def __init__(self, outputs: int = 6) -> None:
        super().__init__()
        self.added = nn.Parameter(torch.randn(1, CHANNELS, 1, 1))
        self.conv = nn.Conv2d(CHANNELS, outputs, 1)
        self.factor = nn.Parameter(torch.randn(1, outputs, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.conv(self.added + x)


def yolo_head() -> nn.Module:
    """RepConv with identity, SiLU, implicit head (Wang et al., "YOLOv7", 2022, arXiv 2207.02696)."""
    dense, point = conv_bn(CHANNELS, CHANNELS, 3), conv_bn(CHANNELS, CHANNELS, 1)
    return nn.Sequential(Parallel(dense, point, nn.BatchNorm2d(CHANNELS)), nn.SiLU(), Implicit())


def depthwise_sum(*kernels: tuple[int, int], shortcut: bool = False) -> nn.Module:
    """Depthwise convolutions given as (kernel, dilation), a BatchNorm each.

    RepLKNet (arXiv 2203.06717): one large and one small kernel. UniRepLKNet (arXiv 2311.15599): a large one and dilated
    ones inside it. Sums of growing kernels: arXiv 2404.10518, 2206.10589.
    """
    branches = (conv_bn(CHANNELS, CHANNELS, k, groups=CHANNELS, dilation=d) for k, d in kernels)
    return Parallel(*branches, shortcut=shortcut)


def repghost() -> nn.Module:
    """1x1, ReLU, then depthwise plus identity BatchNorm, ReLU (Chen et al., "RepGhost", 2022, arXiv 2211.06088)."""
    primary = nn.Sequential(conv_bn(CHANNELS, CHANNELS, 1), nn.ReLU())
    cheap = Parallel(conv_bn(CHANNELS, CHANNELS, 3, groups=CHANNELS), nn.BatchNorm2d(CHANNELS))
    return nn.Sequential(primary, cheap, nn.ReLU())


class LowRank(nn.Module):
    """``W x + s * B (A x)`` (Hu et al., "LoRA", 2021, arXiv 2106.09685)."""

    def __init__(self, rank: int = 2, scale: float = 4.0) -> None:
        super().__init__()
        self.base, self.scale = nn.Linear(CHANNELS, CHANNELS), scale
        self.down, self.up = nn.Linear(CHANNELS, rank, bias=False), nn.Linear(rank, CHANNELS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.up(self.down(x))


def linear_sum(shortcut: bool = False) -> nn.Module:
    """Three linear layers of one input."""
    return Parallel(*(nn.Linear(CHANNELS, CHANNELS, bias) for bias in (True, False, True)), shortcut=shortcut)


def serial_points(middle: nn.Module) -> nn.Module:
    """1x1, something affine, 1x1."""
    return nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), middle, nn.Conv2d(CHANNELS, 6, 1))


def shared_padding(mode: str) -> nn.Module:
    """Two convolutions that both pad their input by the same rule, which is not zero."""
    return Parallel(*(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, padding_mode=mode) for _ in range(2)))


_ONE = {"conv2d": 1}
_LINEAR = {"linear": 1}

FAMILIES: dict[str, Family] = {
    "repvgg": Family(repvgg, {"conv2d": 1, "relu": 1}),
    "repvgg_stride_2": Family(partial(repvgg, stride=2), {"conv2d": 1, "relu": 1}),
    "repvgg_groups_2": Family(partial(repvgg, groups=2, bias=True), {"conv2d": 1, "relu": 1}),
    "repvgg_dilated": Family(partial(repvgg, dilation=2), {"conv2d": 1, "relu": 1}),
    "repvgg_kernel_5": Family(partial(repvgg, kernel=5), {"conv2d": 1, "relu": 1}),
    "repvgg_1d": Family(partial(repvgg, dims=1), {"conv1d": 1, "relu": 1}, (CHANNELS, 17)),
    "repvgg_3d": Family(partial(repvgg, dims=3), {"conv3d": 1, "relu": 1}, (CHANNELS, 5, 7, 6)),
    "qarepvgg": Family(qarepvgg, {"conv2d": 1, "relu": 1}),
    "qarepvgg_stride_2": Family(partial(qarepvgg, stride=2, groups=4), {"conv2d": 1, "relu": 1}),
    "acnet": Family(acnet, _ONE),
    "acnet_kernel_5": Family(partial(acnet, kernel=5, stride=2), _ONE),
    "acnet_dilated": Family(partial(acnet, groups=2, dilation=2), _ONE),
    "dbb_1_conv_bn": Family(partial(conv_bn, CHANNELS, 6, 3, bias=True), _ONE),
    "dbb_2_sum": Family(lambda: Parallel(conv_bn(CHANNELS, 6, 3), conv_bn(CHANNELS, 6, 3)), _ONE),
    "dbb_3_serial": Family(pointwise_then_square, _ONE),
    "dbb_3_serial_grouped": Family(partial(pointwise_then_square, 5, 2, 2, hidden=CHANNELS), _ONE),
    "dbb_4_concat": Family(lambda: Concat(conv_bn(CHANNELS, 4, 3), conv_bn(CHANNELS, 6, 3, bias=True)), _ONE),
    "dbb_5_average": Family(average_beside_square, _ONE),
    "dbb_5_average_stride_2": Family(partial(average_beside_square, 5, 2), _ONE),
    "dbb_6_many_kernels": Family(many_kernels, _ONE),
    "dbb": Family(diverse_branch, _ONE),
    "dbb_kernel_5_stride_2": Family(partial(diverse_branch, 5, 2), _ONE),
    "dbb_groups_2": Family(partial(diverse_branch, groups=2), _ONE),
    "dbb_depthwise": Family(partial(diverse_branch, groups=CHANNELS), _ONE),
    "dbb_narrow": Family(partial(diverse_branch, hidden=3), _ONE),
    "mobileone": Family(MobileOne, _ONE),
    "mobileone_pointwise": Family(partial(MobileOne, 2, 1, groups=1, scale=False), _ONE),
    "mobileone_stride_2": Family(partial(MobileOne, 1, 5, 2), _ONE),
    "replknet": Family(partial(depthwise_sum, (13, 1), (5, 1)), _ONE),
    "unireplknet": Family(partial(depthwise_sum, (13, 1), (5, 1), (7, 2), (3, 3), (3, 4), (3, 5)), _ONE),
    "depthwise_sum": Family(partial(depthwise_sum, (3, 1), (5, 1), (7, 1), shortcut=True), _ONE),
    "repmixer": Family(RepMixer, _ONE),
    "repcpe": Family(rep_cpe, _ONE),
    "repvgg_dw": Family(repvgg_dw, _ONE),
    "bn_linear": Family(bn_linear, _LINEAR, (CHANNELS,)),
    "bn_linear_without_bias": Family(partial(bn_linear, False), _LINEAR, (CHANNELS,)),
    "averaged_heads": Family(AveragedHeads, _LINEAR, (CHANNELS,)),
    "yolov7": Family(yolo_head, {"conv2d": 2, "silu": 1}),
    "repghost": Family(repghost, {"conv2d": 2, "relu": 2}),
    "lora": Family(LowRank, _LINEAR, (5, CHANNELS)),
    "linear_sum": Family(linear_sum, _LINEAR, (5, CHANNELS)),
    "linear_sum_shortcut": Family(partial(linear_sum, True), _LINEAR, (CHANNELS,)),
    "serial_linear": Family(lambda: nn.Sequential(nn.Linear(CHANNELS, 9), nn.Linear(9, 5)), _LINEAR, (5, CHANNELS)),
    "serial_unbiased": Family(
        lambda: nn.Sequential(
            nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        ),
        _ONE,
    ),
    "serial_points": Family(partial(serial_points, nn.Identity()), _ONE),
    "serial_points_norm": Family(lambda: serial_points(nn.BatchNorm2d(CHANNELS)), _ONE),
    "concat": Family(lambda: Concat(*(nn.Conv2d(CHANNELS, 4, 3, padding=1, bias=b) for b in (True, False))), _ONE),
    "reflect": Family(partial(shared_padding, "reflect"), {"conv2d": 1, "pad": 1}),
    "replicate": Family(partial(shared_padding, "replicate"), {"conv2d": 1, "pad": 1}),
    "circular": Family(partial(shared_padding, "circular"), {"conv2d": 1, "pad": 1}),
}
