"""A module with pruned widths: its own class, trainable, and rebuilt from its state dict alone."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional

import optimize
from models import REFERENCES
from optimize.errors import Refused, UsageError
from optimize.load import ModelSource, load_trusted, weights
from tests import references

torch.set_num_threads(1)


def pruned(net: nn.Module, *shape: int, ratio: float = 0.5) -> optimize.Program:
    return optimize.PruneChannels(ratio).apply(optimize.capture(net, (torch.rand(2, *shape),)))[0]


@pytest.mark.parametrize("name", references.each("resnet", "vit", "mobilenetv3"))
def test_every_reference_network_is_trained_and_rebuilt(name: str) -> None:
    reference = REFERENCES[name]
    net = reference.build().train()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    program = pruned(net, *reference.input_shape)
    thin = optimize.narrow(net, program)
    assert type(thin) is type(net) and thin.training
    assert sum(value.numel() for value in thin.parameters()) < sum(value.numel() for value in net.parameters())
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    statistics = {key: value.clone() for key, value in thin.named_buffers()}
    optimizer = torch.optim.SGD(thin.parameters(), 0.1)
    thin(torch.randn(4, *reference.input_shape)).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(value, statistics[key]) for key, value in thin.named_buffers() if "running" in key)
    again = optimize.narrow(reference.build(), thin.state_dict()).eval()
    again.load_state_dict(thin.state_dict())
    x = torch.randn(3, *reference.input_shape)
    assert torch.equal(again(x), thin.eval()(x))
    assert torch.allclose(optimize.capture(again, (x,)).run([x])[0], again(x), atol=1e-4)


class Cells(nn.Module):
    """What else counts its channels: recurrent layers, depthwise and transposed convolutions, PReLU, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 3, padding=1, groups=8)
        self.prelu, self.up = nn.PReLU(16), nn.ConvTranspose2d(16, 16, 2, stride=2, groups=16)
        self.left, self.right = nn.Conv2d(16, 6, 1), nn.Conv2d(16, 6, 1)
        self.right.weight = self.left.weight
        self.recurrent, self.head = nn.GRU(6, 10, 2, batch_first=True, bidirectional=True), nn.Linear(20, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(self.prelu(self.depthwise(self.stem(x))))
        x = self.left(x) + self.right(functional.max_pool2d(x, 3, 1, 1))
        return self.head(self.recurrent(x.flatten(2).transpose(1, 2))[0])


def test_layers_count_the_channels_that_are_left() -> None:
    net = Cells().eval()
    thin = optimize.narrow(net, pruned(net, 3, 4, 4))
    assert isinstance(thin, Cells)
    assert (thin.stem.out_channels, thin.depthwise.groups, thin.depthwise.out_channels) == (4, 4, 8)
    assert (thin.prelu.num_parameters, thin.up.groups, thin.up.in_channels, thin.up.out_channels) == (8, 8, 8, 8)
    assert (thin.left.in_channels, thin.left.out_channels, thin.recurrent.input_size) == (8, 3, 3)
    assert (thin.recurrent.hidden_size, thin.head.in_features) == (5, 10)
    assert thin.left.weight is thin.right.weight


def test_what_a_pipeline_returns_is_told_where_its_program_is() -> None:
    net = nn.Linear(4, 4).eval()
    trace = optimize.Pipeline([]).run(optimize.capture(net, (torch.rand(2, 4),)))
    with pytest.raises(UsageError, match=r"narrow takes a program or a state dict, and got a Trace") as told:
        optimize.narrow(net, trace)  # type: ignore[arg-type]
    assert "trace.program" in told.value.hint


def test_integers_are_told_where_the_weights_before_them_are() -> None:
    net, data = nn.Linear(4, 4).eval(), [torch.rand(8, 4)]
    program, _ = optimize.QuantizeStatic(calibration=data).apply(optimize.capture(net, (data[0],)))
    with pytest.raises(Refused, match="rounded for INT8") as told:
        optimize.narrow(net, program)
    assert "program.unquantized" in told.value.hint and program.unquantized is not None
    assert torch.equal(optimize.narrow(net, program.unquantized).weight, net.weight)


class Block(nn.Module):
    """A module that counts heads, and holds a perceptron whose hidden units are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.q, self.kv = 4, nn.Linear(8, 16), nn.Linear(8, 32)
        self.out, self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in (self.q(x), *self.kv(x).chunk(2, 2))
        )
        mixed = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return self.second(torch.relu(self.first(self.out(mixed))))


@pytest.mark.parametrize(("intact", "heads"), [((), 2), (("q",), 4)])
def test_heads_are_counted_by_their_projections(intact: tuple[str, ...], heads: int) -> None:
    net = Block().eval()
    program = optimize.capture(net, (torch.rand(2, 5, 8),))
    thin = optimize.narrow(net, optimize.PruneChannels(0.5, intact=intact).apply(program)[0])
    assert (thin.num_heads, thin.first.out_features) == (heads, 6)
    again = optimize.narrow(Block().eval(), thin.state_dict())
    again.load_state_dict(thin.state_dict())
    x = torch.rand(3, 7, 8)
    assert again.num_heads == heads and torch.equal(again(x), thin(x))


class Plain(nn.Module):
    """Attention that takes the width of its heads from its input, as much code does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(6, 8), nn.Linear(8, 24)
        self.project, self.num_heads = nn.Linear(8, 8), 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        samples, steps, width = x.shape
        parts = self.attention(x).view(samples, steps, 3, self.num_heads, width // self.num_heads)
        mixed = functional.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4).unbind(0))
        return x + self.project(mixed.transpose(1, 2).reshape(samples, steps, width))


def test_code_that_cannot_be_told_its_widths_is_refused_with_a_way_out() -> None:
    net = Plain().eval()
    program = optimize.capture(net, (torch.rand(2, 5, 6),))
    heads, _ = optimize.PruneChannels(0.5).apply(program)
    with pytest.raises(Refused, match="does not run with fewer channels") as caught:
        optimize.narrow(net, heads)
    assert "intact=" in caught.value.hint
    whole, outcome = optimize.PruneChannels(0.5, intact=("attention",)).apply(program)
    assert whole is program
    assert "you leave 'attention' intact" in {skip.reason for skip in outcome.skips}


def test_a_buffer_over_channels_is_in_the_state_dict_once_it_is_cut() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(16, 8), nn.Linear(8, 2)
            self.register_buffer("scale", torch.linspace(0.1, 1, 8), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return self.head(y * self.scale[: y.shape[-1]])

    net, x = Scaled().eval(), torch.randn(3, 16)
    thin = optimize.narrow(net, pruned(net, 16))
    assert torch.equal(optimize.narrow(net, thin.state_dict())(x), thin(x))


def test_what_cannot_be_known_is_refused() -> None:
    norm = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)).eval()
    state = {key: value[:4] if value.dim() else value for key, value in norm.state_dict().items()}
    del state["1.running_mean"]
    with pytest.raises(Refused, match=r"no '1.running_mean'"):
        optimize.narrow(norm, state)
    with pytest.raises(Refused, match="has no weights yet"):
        optimize.narrow(nn.Sequential(nn.LazyConv2d(8, 1)), state)
    four_bits = torch.zeros(4, 3, 1, 1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(Refused, match=r"does not become the module's torch.float32"):
        optimize.narrow(norm[0], {"weight": four_bits, "bias": torch.rand(4)})


def test_weights_of_another_module_are_refused() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    program = pruned(net, 3, 8, 8)
    fused = optimize.FuseConvBN().apply(program)[0]
    with pytest.raises(Refused, match=r"have no '0.bias'|have no '1.weight'"):
        optimize.narrow(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)), fused)
    for other, message in ((nn.Conv2d(3, 2, 3), "cannot be"), (nn.Conv2d(3, 8, 5), "a kernel of")):
        with pytest.raises(Refused, match=message):
            optimize.narrow(other, {"weight": torch.rand(8, 3, 3, 3), "bias": torch.rand(8)})


def test_a_file_of_pruned_weights_opens_with_the_factory(tmp_path: Path) -> None:
    net = REFERENCES["mobilenetv3"].build().eval()
    program = pruned(net, *REFERENCES["mobilenetv3"].input_shape)
    file = tmp_path / "thin.safetensors"
    safetensors.torch.save_file(optimize.narrow(net, program).state_dict(), file)
    loaded = load_trusted(ModelSource.of(file, model="models.mobilenetv3:mobilenetv3_tiny"))
    assert torch.allclose(loaded.module.eval()(program.inputs[0]), program.run(program.inputs)[0], atol=1e-5)
    told = " ".join(loaded.warnings)
    assert "weights are narrower than --model makes them (" in told and "taken as pruned: if" in told


def test_fewer_outputs_are_no_pruning_and_are_refused() -> None:
    wide, few = (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, count)) for count in (8, 6))
    assert weights.narrowed(wide, few.state_dict()) == (wide, [])
    with pytest.raises(Refused, match=r"2 of another shape: 1.weight is \[6, 4\] and should be \[8, 4\]"):
        weights.fit(wide, few.state_dict(), "six.pt")
    thin, (told,) = weights.narrowed(wide, nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 8)).state_dict())
    assert "(0.weight is [2, 3], not [4, 3]) and were taken as pruned" in told and thin[0].weight.shape == (2, 3)


def test_a_state_dict_is_recognised_by_its_layers() -> None:
    told = str(weights.needs_model(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)).state_dict(), "x.pt"))
    assert "(0.weight, 0.bias, 0.running_mean, 0.running_var and 2 more)" in told


def test_weights_whose_kernels_do_not_look_fit_each_other() -> None:
    """A file of weights is somebody else's: oneDNN reads, and weight norm writes, as far as the larger says."""
    recurrent = nn.LSTM(4, 8, 2, bidirectional=True, proj_size=3)
    normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 1))
    with pytest.warns(FutureWarning, match="deprecated"):
        of_old = nn.utils.weight_norm(nn.Conv2d(3, 8, 1))
    for net, cut in (
        (recurrent, {"weight_ih_l0": (5, 4)}),
        (recurrent, {"weight_hh_l1_reverse": (31, 3)}),
        (recurrent, {"bias_hh_l1": (1,)}),
        (recurrent, {"weight_hr_l0": (3, 7)}),
        (
            recurrent,
            {name: (0, *value.shape[1:]) for name, value in recurrent.state_dict().items() if "hr" not in name},
        ),
        (normed, {"parametrizations.weight.original0": (1, 1, 1, 1)}),
        (
            normed,
            {"parametrizations.weight.original1": (8, 0, 1, 1), "parametrizations.weight.original0": (7, 1, 1, 1)},
        ),
        (of_old, {"weight_g": (2, 1, 1, 1)}),
    ):
        state = {**net.state_dict(), **{name: torch.rand(shape) for name, shape in cut.items()}}
        with pytest.raises(Refused, match=r"do not fit each other|A weight norm has lengths"):
            optimize.narrow(net, state)


def test_projections_and_lengths_that_were_cut_together_are_taken() -> None:
    for wide, thin in (
        (nn.LSTM(4, 8, 2, proj_size=3), nn.LSTM(3, 6, 2, proj_size=2)),
        *[(norm(nn.Conv2d(3, 8, 1)), norm(nn.Conv2d(3, 5, 1))) for norm in [nn.utils.parametrizations.weight_norm]],
    ):
        x = torch.rand(2, 3, 4, 4) if isinstance(wide, nn.Conv2d) else torch.rand(2, 5, 3)
        found, wanted = optimize.narrow(wide, thin.state_dict())(x), thin(x)
        for got, want in zip(
            *([value] if torch.is_tensor(value) else value[:1] for value in (found, wanted)), strict=True
        ):
            assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64, torch.float16, torch.complex64])
def test_pruned_weights_become_of_the_modules_type_as_whole_ones_do(dtype: torch.dtype) -> None:
    wide = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8))
    state = {key: value[:4].to(dtype) if value.dim() else value for key, value in wide.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the imaginary part
        thin, notes = weights.narrowed(wide.eval(), state)
        notes += weights.fit(thin, state, "thin.pt")
    assert {value.dtype for value in thin.parameters()} == {torch.float32} and f"{dtype} to" in notes[-1]
    assert thin(torch.rand(2, 3, 4, 4)).shape == (2, 4, 4, 4)


def test_a_layer_that_stands_for_others_has_a_weight_of_real_numbers() -> None:
    wide = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    for words, weight in (
        ("linear - -", torch.zeros(4, 4, dtype=torch.int8)),
        ("linear - -", torch.zeros(4, 4, dtype=torch.complex64)),
        ("none - -", torch.tensor(1.0)),
        ("none - -", torch.tensor(1)),
    ):
        state = {"0.stands_for": torch.tensor(list(words.encode()), dtype=torch.uint8), "0.0.weight": weight}
        with pytest.raises(Refused, match="with a weight is no layer that stands for others"):
            weights.narrowed(wide, state)


def test_weights_that_others_are_computed_from_fit_each_other() -> None:
    layer = nn.Linear(7, 7)
    normed = nn.utils.parametrizations.spectral_norm(layer).eval()
    cut = {**normed.state_dict(), "parametrizations.weight.original": torch.rand(6, 6)}
    place = "parametrizations.weight.stands_for"
    swapped = {**normed.state_dict(), place: torch.tensor(list(b"none - -"), dtype=torch.uint8)}
    for state in (cut, {**cut, "parametrizations.weight.0._u": torch.rand(3)}, swapped):
        with pytest.raises(Refused, match="do not fit each other"):
            weights.narrowed(normed, state)
