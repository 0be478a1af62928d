import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from optimize.branches import explain_branches, insert_branches
from optimize.branches.kinds import KINDS
from optimize.passes.merging import merge_branches
from tests.branches.nets import largest, shaken, shapes

GEOMETRIES: dict[str, tuple[nn.Module, set[str]]] = {
    "uncovered border": (nn.Conv2d(4, 4, 3), {"acb", "dbb"}),
    "wide border": (nn.Conv2d(4, 4, 3, padding=2, bias=False), {"repvgg"}),
    "dilated": (nn.Conv2d(4, 4, 3, padding=2, dilation=2, bias=False), {"acb", "dbb"}),
    "uneven": (nn.Conv2d(4, 6, (5, 3), stride=(1, 2), padding=(2, 0), groups=2), {"dbb"}),
    "row": (nn.Conv2d(4, 4, (1, 7), padding=(0, 3), bias=False), {"dbb"}),
    "even": (nn.Conv2d(4, 4, 4, stride=2, padding=1, bias=False), {"acb"}),
    "same": (nn.Conv2d(4, 4, 2, padding="same"), {"dbb"}),
    "valid": (nn.Conv2d(4, 4, 3, padding="valid", bias=False), {"repvgg"}),
    "reflect": (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), {"dbb"}),
    "circular": (nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", bias=False), {"acb"}),
    "replicate, cropped": (nn.Conv2d(4, 4, 5, padding=1, padding_mode="replicate", bias=False), {"repvgg"}),
    "3-d": (nn.Conv3d(4, 4, 3, padding=1, bias=False), {"dbb"}),
    "multiplier": (nn.Conv2d(4, 8, 3, padding=1, groups=4, bias=False), {"dbb"}),
    "point": (nn.Conv2d(4, 4, 1), {"mobileone"}),
}


def image(conv: nn.Module) -> Tensor:
    return torch.randn(4, 4, *(9, 8, 7)[: conv.weight.dim() - 2], dtype=torch.float64)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_geometry(geometry: str) -> None:
    conv, merging = copy.deepcopy(GEOMETRIES[geometry])
    conv = conv.double().eval()
    x = image(conv)
    for kind in KINDS:
        if explain_branches(conv, kind):
            assert kind not in merging
            continue
        branched = insert_branches(conv, kind)
        assert largest(branched(x), conv(x)) < 1e-12
        if kind in merging:
            merged = merge_branches(shaken(branched))
            assert type(merged) is type(conv) and shapes(merged) == shapes(conv)
            assert largest(branched(x), conv(x)) > 0.01
            assert largest(merged(x), branched(x)) < 1e-12


@pytest.mark.parametrize(
    ("conv", "kind", "names"),
    [
        (nn.Conv2d(4, 4, 3, padding=1), "repvgg", ["point", "identity"]),
        (nn.Conv2d(4, 8, 3, padding=1), "repvgg", ["point"]),
        (nn.Conv2d(4, 4, 3, padding=1, stride=2), "repvgg", ["point"]),
        (nn.Conv2d(4, 4, 3), "repvgg", ["point"]),
        (nn.Conv2d(4, 4, 1), "repvgg", ["identity"]),
        (nn.Conv2d(4, 4, 3, padding=1), "acb", ["row", "column"]),
        (nn.Conv1d(4, 4, 3, padding=1), "dbb", ["point", "serial", "average"]),
        (nn.Conv2d(4, 4, 3, padding=2, dilation=2), "dbb", ["point", "serial"]),
        (nn.Conv2d(4, 4, 1), "mobileone", ["copy1", "copy2", "copy3", "identity"]),
        (nn.Conv2d(4, 8, 3), "mobileone", ["copy1", "copy2", "copy3", "point"]),
    ],
)
def test_branches_of_a_kind(conv: nn.Module, kind: str, names: list[str]) -> None:
    assert list(insert_branches(conv, kind).sides) == names


class Standardized(nn.Conv2d):
    """A convolution with another forward."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)


def frozen() -> nn.Module:
    return nn.Conv2d(4, 4, 3).requires_grad_(False)


def watched() -> nn.Module:
    conv = nn.Conv2d(4, 4, 3)
    conv.register_forward_hook(print)
    return conv


@pytest.mark.parametrize(
    ("conv", "kind", "operator", "reason"),
    [
        (nn.Conv2d(4, 8, 1), "repvgg", "conv2d", "its kernel has one tap; its 4 input and 8 output channels differ"),
        (nn.Conv2d(4, 4, 1, stride=2), "repvgg", "conv2d", "its kernel has one tap; its stride is 2"),
        (nn.Conv2d(4, 4, 1, padding=1), "repvgg", "conv2d", "its kernel has one tap; its padding changes the size"),
        (nn.Conv1d(4, 4, 3), "acb", "conv1d", "rows and columns need two spatial axes, it has 1"),
        (nn.Conv2d(4, 4, (1, 7)), "acb", "conv2d", "a 1x7 kernel has no rows and columns"),
        (nn.Conv2d(4, 4, 1), "dbb", "conv2d", "its kernel has one tap"),
        (
            nn.Conv2d(4, 4, (3, 5), padding=(2, 1), padding_mode="circular"),
            "repvgg",
            "conv2d",
            "a smaller kernel would crop one side and circular padding fill another; its padding changes the size",
        ),
        (
            nn.ConvTranspose2d(4, 4, 3),
            "mobileone",
            "conv_transpose2d",
            "a transposed convolution has no branches that merge",
        ),
        (Standardized(4, 4, 3), "dbb", "conv2d", "Standardized may compute something else than Conv2d"),
        (
            parametrizations.weight_norm(nn.Conv2d(4, 4, 3)),
            "dbb",
            "conv2d",
            "its weight is computed from others (weight norm, a mask or a parametrization)",
        ),
        (frozen(), "acb", "conv2d", "it is frozen (requires_grad=False)"),
        (watched(), "acb", "conv2d", "it has hooks, which would see one branch of several"),
    ],
)
def test_explains_what_is_left_alone(conv: nn.Module, kind: str, operator: str, reason: str) -> None:
    net = nn.Sequential(conv, nn.Conv2d(4, 4, 3, padding=1))
    (skip,) = explain_branches(net, kind)
    assert (skip.where, skip.op, skip.reason) == ("0", operator, reason)
    kept = [key for key in net.state_dict() if key.startswith("0.")]
    branched = insert_branches(net, kind)
    assert [key for key in branched.state_dict() if key.startswith("0.")] == kept
    assert type(branched[0]) is type(conv)


def test_a_masked_weight_is_explained() -> None:
    pruned = prune.l1_unstructured(nn.Conv2d(4, 4, 3), "weight", 0.5)
    (skip,) = explain_branches(pruned, "acb")
    assert skip.reason == "its weight is computed from others (weight norm, a mask or a parametrization)"
