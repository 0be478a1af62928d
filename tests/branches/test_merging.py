import copy
import io

import pytest
import torch
from torch import Tensor, nn

import optimize
from optimize import graph, ops
from optimize.branches import insert_branches
from optimize.branches.kinds import KINDS
from optimize.errors import Refused
from optimize.passes.merging import merge_branches
from tests.branches.nets import NETS, blocks, fit, inputs, largest, resnet, shaken, shapes, trained

#: Every block that is merged is captured by itself, which takes most of a second; the graph tests merge the others.
MERGED = [
    *(("resnet", kind) for kind in KINDS),
    ("vgg", "dbb"),
    ("vgg_without_norm", "mobileone"),
    ("depthwise", "repvgg"),
    ("depthwise", "dbb"),
    ("wave", "dbb"),
]


@pytest.mark.parametrize(("name", "kind"), MERGED)
def test_trains_and_merges_to_the_original_class(name: str, kind: str) -> None:
    net, x = trained(name), inputs(name)
    branched = insert_branches(net, kind, inputs=x)
    starts = kernels(branched)
    fit(branched, x)
    assert all(not torch.equal(starts[path], kernel) for path, kernel in kernels(branched).items())
    merged = merge_branches(branched)
    assert [type(module) for module in merged.modules()] == [type(module) for module in net.modules()]
    assert shapes(merged) == shapes(net)
    assert [weight.requires_grad for weight in merged.parameters()] == [True] * len(list(net.parameters()))
    wanted = branched(x)
    assert largest(wanted, net(x)) > 1e-3
    assert largest(merged(x), wanted) < 1e-12
    fresh = NETS[name]().double().eval()
    fresh.load_state_dict(merged.state_dict(), strict=True)
    assert torch.equal(fresh(x), merged(x))
    assert largest(merged.float()(x.float()), branched.float()(x.float())) < 1e-5


def kernels(branched: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every kernel of the branches, but those of one number a channel: the norm behind cancels it."""
    weights = {
        f"{index} {path}": w for index, block in enumerate(blocks(branched)) for path, w in block.named_parameters()
    }
    return {
        path: weight.detach().clone() for path, weight in weights.items() if weight.dim() > 2 and weight[0].numel() > 1
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [("resnet", "dbb"), ("resnet", "mobileone"), *(("vgg_without_norm", kind) for kind in KINDS)],
)
def test_merges_on_the_graph_to_the_original_keys(name: str, kind: str) -> None:
    net, x = trained(name), inputs(name)
    branched = fit(insert_branches(net, kind), x)
    wanted = branched(x)
    program, _ = optimize.Reparameterize().apply(optimize.capture(branched, (x,)))
    calls = list(graph.calls(program.graph, *ops.CONVOLUTIONS))
    convs = {path: module for path, module in net.named_modules() if isinstance(module, nn.Conv2d)}
    assert [graph.argument(call, "weight").target for call in calls] == [f"{path}.weight" for path in convs]
    for call, (path, conv) in zip(calls, convs.items(), strict=True):
        bias = graph.argument(call, "bias")
        assert graph.attribute(program.graph_module, f"{path}.weight").shape == conv.weight.shape
        assert (bias and bias.target) == (None if conv.bias is None else f"{path}.bias")
    kept = {key for key in net.state_dict() if not key.endswith("num_batches_tracked")}
    assert set(program.graph_module.state_dict()) == kept
    assert largest(program(x), wanted) < 1e-12


def test_a_convolution_on_two_paths_stays_one() -> None:
    conv = nn.Conv2d(3, 3, 3, padding=1)
    net = nn.Sequential(conv, nn.ReLU(), conv).double().eval()
    x = inputs("resnet")
    branched = insert_branches(net, "repvgg", inputs=x)
    assert branched[0] is branched[2]
    assert largest(branched(x), net(x)) < 1e-12
    merged = merge_branches(shaken(branched))
    assert merged[0] is merged[2]
    assert shapes(merged) == shapes(net)
    assert largest(merged(x), branched(x)) < 1e-12


def test_flags_dtype_and_layout_survive() -> None:
    net = resnet().half().to(memory_format=torch.channels_last)
    net[1].bn1.requires_grad_(False)
    net[4].weight.requires_grad_(False)
    branched = insert_branches(net, "repvgg")
    assert {tensor.dtype for tensor in branched.parameters()} == {torch.float16}
    merged = merge_branches(branched)
    flags = {path: weight.requires_grad for path, weight in net.named_parameters()}
    assert {path: weight.requires_grad for path, weight in merged.named_parameters()} == flags
    assert merged[1].conv2.weight.is_contiguous(memory_format=torch.channels_last)
    assert shapes(merged) == shapes(net)


def test_copies_pickles_and_reloads() -> None:
    net, x = trained("vgg"), inputs("vgg")
    branched = fit(insert_branches(net, "dbb"), x)
    file = io.BytesIO()
    torch.save(branched, file)
    file.seek(0)
    pickled = torch.load(file, weights_only=False)
    fresh = insert_branches(NETS["vgg"]().double(), "dbb").eval()
    fresh.load_state_dict(branched.state_dict(), strict=True)
    wanted = branched(x)
    for other in (pickled, fresh, copy.deepcopy(branched)):
        assert torch.equal(other(x), wanted)


def test_a_changed_block_is_refused() -> None:
    branched = insert_branches(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1)), "repvgg")
    bent = shaken(copy.deepcopy(branched))
    bent[0].sides["point"].append(nn.ReLU())
    with pytest.raises(Refused, match="'0' do not merge into one convolution: 2 are left"):
        merge_branches(bent)
    wider = shaken(copy.deepcopy(branched))
    wider[0].sides["point"] = nn.Conv2d(4, 4, 5, padding=2)
    with pytest.raises(Refused, match="'0' merge into another convolution"):
        merge_branches(wider)
