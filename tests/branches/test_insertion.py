import copy

import pytest
import torch
from torch import nn

from optimize.branches import explain_branches, insert_branches
from optimize.branches.kinds import KINDS
from optimize.errors import Refused, UsageError
from optimize.passes.merging import merge_branches
from tests.branches.nets import NETS, TOLERANCE, blocks, inputs, largest, resnet, trained, wave

CASES = [(net, kind) for net in NETS for kind in KINDS if (net, kind) != ("wave", "acb")]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_starts_as_the_model(name: str, kind: str, dtype: torch.dtype) -> None:
    net, x = trained(name, dtype), inputs(name, dtype)
    before, wanted = copy.deepcopy(net.state_dict()), net(x)
    for branched in (insert_branches(net, kind), insert_branches(net, kind, inputs=x)):
        assert blocks(branched)
        assert largest(branched(x), wanted) < TOLERANCE[dtype]
    assert not blocks(net)
    assert list(before) == list(net.state_dict())
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_starts_as_the_model_in_training(name: str, kind: str) -> None:
    net, x = trained(name), inputs(name)
    bare, settled = (insert_branches(net, kind, inputs=start).train() for start in (None, x))
    wanted = net.train()(x)
    if name == "vgg_without_norm":  # nothing behind the branches takes their scale out: it must be right from the start
        assert largest(settled(x), wanted) < 1e-10
        assert largest(bare(x), wanted) > 0.01
        return
    assert largest(bare(x), wanted) < 0.01 * float(wanted.detach().abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_make_training_exact(kind: str) -> None:
    """Where the model is run as it is trained, the first step sees the model's own outputs."""
    net, x = trained("resnet"), inputs("resnet")
    bare = net[0][0]
    branched = insert_branches(bare, kind, inputs=x).train()
    assert largest(branched(x), bare(x)) < 1e-12


def test_tied_weights_stay_tied() -> None:
    net = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)))
    net[1].weight = net[0].weight
    skips = explain_branches(net, "acb")
    assert [(skip.where, skip.reason) for skip in skips] == [
        (path, "another module has the same weight") for path in ("0", "1")
    ]
    branched = insert_branches(net, "acb")
    assert branched[0].weight is branched[1].weight


def test_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean 'repvgg'") as caught:
        insert_branches(resnet(), "rep_vgg")
    assert "There is no kind of branches 'rep_vgg'" in caught.value.what
    with pytest.raises(UsageError, match="Known: acb, dbb, mobileone, repvgg"):
        explain_branches(resnet(), "zzz")


def test_inputs_leave_modes_and_other_buffers_as_they_were() -> None:
    net, x = trained("resnet"), inputs("resnet")
    net.train()
    net[1].bn1.eval()
    branched = insert_branches(net, "acb", inputs=(x,))
    modes = {path: module.training for path, module in branched.named_modules()}
    assert all(modes[path] == module.training for path, module in net.named_modules())
    assert modes["1.conv1.main.norm"] and not modes["1.bn1"]
    tracked = {key: value for key, value in net.state_dict().items() if "bn" in key}
    assert all(torch.equal(branched.state_dict()[key], value) for key, value in tracked.items())
    assert not any(norm._forward_pre_hooks for block in blocks(branched) for norm in block.norms())


def test_refusals() -> None:
    branched = insert_branches(resnet(), "acb")
    with pytest.raises(Refused, match="has branches already"):
        insert_branches(branched, "acb")
    with pytest.raises(Refused, match="has branches already"):
        explain_branches(branched, "dbb")
    with pytest.raises(Refused, match="no branches to merge"):
        merge_branches(resnet())
    with pytest.raises(Refused, match=r"No convolution .* 'acb'[\s\S]*'0': rows and columns need two"):
        insert_branches(wave(), "acb")
    with pytest.raises(Refused, match="The model fails on the inputs"):
        insert_branches(resnet(), "acb", inputs=torch.zeros(1, 5, 8, 8))


class Aside(nn.Module):
    """Reads its convolution from a list, which no module is replaced in."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.held = [self.conv]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.held[0](x)


def test_a_convolution_held_aside_is_no_silent_other_model() -> None:
    with pytest.raises(Refused, match="has no attribute 'weight'"):
        insert_branches(Aside(), "acb", inputs=torch.ones(2, 3, 8, 8))
    with pytest.raises(AttributeError):
        insert_branches(Aside(), "acb")(torch.ones(2, 3, 8, 8))


@pytest.mark.parametrize("batch", [torch.full((2, 3, 8, 8), torch.nan), torch.empty(0, 3, 8, 8)])
def test_inputs_that_give_no_statistics_are_refused(batch: torch.Tensor) -> None:
    with pytest.raises(Refused, match="answers with no number"):
        insert_branches(nn.Sequential(nn.Conv2d(3, 4, 3)), "acb", inputs=batch)


def test_what_is_no_model_or_kind_is_refused() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3))
    for model, kind, given in ((None, "acb", None), (nn.Conv2d, "acb", None), (net, ["acb"], None), (net, "acb", 3)):
        with pytest.raises(UsageError, match="is wanted, not"):
            insert_branches(model, kind, inputs=given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is wanted, not"):
        merge_branches(None)  # type: ignore[arg-type]
