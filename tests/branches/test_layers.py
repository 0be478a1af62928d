import pytest
import torch
from torch import nn

from optimize.branches import insert_branches
from optimize.branches.layers import BatchScale
from optimize.errors import UsageError
from tests.branches.nets import blocks, inputs, largest, trained


def test_batch_scale_is_batch_norm_without_its_shift() -> None:
    scale, norm = BatchScale(4).double(), nn.BatchNorm2d(4).double()
    x = torch.randn(8, 4, 5, 6, dtype=torch.float64) * 3 + 1
    with torch.no_grad():
        for layer in (scale, norm):
            layer.weight.copy_(torch.tensor([0.5, -1.0, 2.0, 0.0]))
    for _ in range(3):
        shift = norm.weight * x.mean((0, 2, 3)) * torch.rsqrt(x.var((0, 2, 3), correction=0) + 1e-5)
        assert largest(scale(x), norm(x) + shift.reshape(-1, 1, 1)) < 1e-12
    assert largest(scale.running_var, norm.running_var) < 1e-12
    factor = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    assert largest(scale.eval()(x), x * factor.reshape(-1, 1, 1)) < 1e-12
    assert torch.equal(scale(torch.zeros(1, 4, 2, 2)), torch.zeros(1, 4, 2, 2))


def test_one_value_a_channel_cannot_be_trained_on() -> None:
    branched = insert_branches(nn.Conv2d(4, 4, 1, bias=False), "mobileone").train()
    with pytest.raises(UsageError, match=r"one value a channel.*\[1, 4, 1, 1\]"):
        branched(torch.zeros(1, 4, 1, 1))


def test_trains_under_autocast() -> None:
    net, x = trained("resnet", torch.float32), inputs("resnet", torch.float32)
    branched = insert_branches(net, "dbb", inputs=x).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = branched(x).square().mean()
    loss.backward()
    assert all(block.main.conv.weight.grad.isfinite().all() for block in blocks(branched))
