from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import optimize
from optimize import graph
from optimize.data.conform import Batch
from optimize.data.samples import Samples
from optimize.distances import output_error
from optimize.errors import UsageError
from optimize.graph import aten
from optimize.program import Program, tensor_value
from tests import references
from tests.nets import Called


@pytest.mark.parametrize("entry, tolerance", [(optimize.CastFP16(), 2e-3), (optimize.CastBF16(), 2e-2)])
@pytest.mark.parametrize("name", references.each("diverse_branch", "vit", "lstm", "unet"))
def test_half_precision_is_close_and_halves_the_weights(name: str, entry: optimize.CastFP16, tolerance: float) -> None:
    program = references.folded(name, 0)
    half, _outcome = entry.apply(program)
    error, scale = output_error(program.run(program.inputs)[0], half.run(program.inputs)[0])
    assert error / scale < tolerance
    assert half.run(program.inputs)[0].dtype is torch.float32
    if name != "lstm":  # its recurrent weights stay in float32
        assert half.stats().weight_bytes < 0.55 * program.stats().weight_bytes


class Overflowing(nn.Module):
    """Reaches 1e6 between two layers that bring it back."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.up.weight.data = torch.eye(8) * 1e6
        self.down.weight.data = torch.eye(8) * 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def test_what_overflows_is_kept_with_the_value_it_reaches() -> None:
    program = optimize.capture(Overflowing().eval(), (torch.ones(2, 8),))
    half, outcome = optimize.CastFP16().apply(program)
    assert not outcome.rewrites and half is program
    assert all("beyond 6.55e+04" in skip.reason for skip in outcome.skips) and len(outcome.skips) == 2
    wide, outcome = optimize.CastBF16().apply(program)
    assert len(outcome.rewrites) == 2 and wide.run(program.inputs)[0].isfinite().all()


class Averaging(nn.Module):
    """Averages 64 values that come from a convolution."""

    def __init__(self, value: float, average: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv, self.average = nn.Conv2d(1, 1, 1, bias=False), average
        nn.init.constant_(self.conv.weight, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.average(self.conv(x)) * 1e-3


@pytest.mark.parametrize("value, told", [(2000.0, ["the sums inside it reach 1.28e+05, beyond 6.55e+04"]), (500.0, [])])
@pytest.mark.parametrize(
    "average", [lambda x: x.mean((2, 3)), nn.AdaptiveAvgPool2d(1), nn.AvgPool2d(8), nn.AvgPool2d((8, 8), stride=1)]
)
def test_averages_whose_sums_overflow_are_kept(
    average: Callable[[torch.Tensor], torch.Tensor], value: float, told: list[str]
) -> None:
    """ONNX Runtime's CUDA provider sums in half: a ResNet-50 whose average was 2,857 of 49 answered infinity."""
    program = optimize.capture(Averaging(value, average).eval(), (torch.ones(2, 1, 8, 8),))
    _, outcome = optimize.CastFP16().apply(program)
    assert [skip.reason for skip in outcome.skips] == told
    assert not optimize.CastBF16().apply(program)[1].skips


WITHOUT_KERNEL: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "rfft": (lambda x: torch.fft.rfft(x).abs(), "complex numbers are made of float32"),
    "irfft": (lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2), "complex numbers are made of float32"),
    "avg_pool3d": (lambda x: nn.functional.avg_pool3d(x.reshape(-1, 1, 4, 2, 2), 2).flatten(1), "no {} kernel"),
    "local_response_norm": (
        lambda x: nn.functional.local_response_norm(x.reshape(-1, 4, 2, 2), 3).flatten(1), "no {} kernel"
    ),
    "inv": (lambda x: torch.linalg.inv(x.reshape(-1, 4, 4) + 9 * torch.eye(4)).flatten(1), "no {} kernel"),
    "cdist": (lambda x: torch.cdist(x.reshape(-1, 8, 2), x.reshape(-1, 8, 2)).flatten(1), "no {} kernel"),
}  # fmt: skip


@pytest.mark.parametrize("policy", ["measured", "O2", "O3"])
@pytest.mark.parametrize("entry", [optimize.CastFP16, optimize.CastBF16])
@pytest.mark.parametrize("name", WITHOUT_KERNEL)
def test_what_torch_has_no_kernel_of_stays_in_float32(name: str, entry: type[optimize.CastFP16], policy: Any) -> None:
    torch.manual_seed(0)
    compute, reason = WITHOUT_KERNEL[name]
    net = Called(lambda m, x: compute(m.linear(x)), linear=nn.Linear(16, 16)).eval()
    program = optimize.capture(net, (torch.randn(2, 16),))
    half, outcome = entry(policy=policy).apply(program)
    said = reason.format(str(entry.dtype).removeprefix("torch."))
    if name != "local_response_norm" or entry is optimize.CastBF16:  # float16 has a kernel of it
        assert any(said in skip.reason for skip in outcome.skips), outcome.skips
    assert outcome.rewrites
    error, scale = output_error(program.run(program.inputs)[0], half.run(program.inputs)[0])
    assert error < 0.1 * scale


def test_softmax_stays_in_float32_and_is_named() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)).eval()
    _, outcome = optimize.CastFP16().apply(optimize.capture(net, (torch.rand(2, 4),)))
    assert [(skip.where, skip.op) for skip in outcome.skips] == [("1", "softmax")]


class BeforeNorm(nn.Module):
    """A convolution that reaches 1e6 before the BatchNorm that divides it again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)
        nn.init.normal_(self.conv.weight, 0, 2e5)
        nn.init.constant_(self.norm.running_var, 1e12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x)).relu()).mean((2, 3))


class ResidualStream(nn.Module):
    """A sum that grows past 1e5 while what is read from it is normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, norm in zip(self.blocks, self.norms, strict=False):
            x = x + block(norm(x)) * 8e4
        return self.head(self.norms[3](x))


class MaskedBeforeScaling(nn.Module):
    """Attention whose products reach 1e6 before they are scaled, and a mask of minus infinity."""

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        x = x * 64
        scores = (x @ x.transpose(1, 2)) * 1e-5
        return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ x


class MaskedByNumber(nn.Module):
    """Attention that adds -1e9 where there is nothing to attend to: everywhere, in one row."""

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        scores = x @ x.transpose(1, 2) * 0.1
        return torch.softmax(scores + hidden.to(torch.float32) * -1e9, -1) @ x


class SmallDivisor(nn.Module):
    """Divides by 1e-9, which is zero in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).relu() + 1
        return self.linear((y * 1e-9) / (y.amax(-1, keepdim=True) * 1e-9))


def hidden() -> torch.Tensor:
    mask = torch.zeros(2, 5, 5, dtype=torch.bool)
    mask[:, :, 4] = True
    return mask


def hidden_row() -> torch.Tensor:
    mask = hidden()
    mask[1, 2] = True
    return mask


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]], set[str]]] = {
    "before a norm": (BeforeNorm, lambda: (torch.randn(4, 3, 8, 8),), {"conv2d", "batch_norm"}),
    "residual": (ResidualStream, lambda: (torch.randn(4, 16),), {"mul", "add", "layer_norm"}),
    "infinite mask": (
        MaskedBeforeScaling,
        lambda: (torch.randn(2, 5, 256), hidden()),
        {"matmul", "mul"},
    ),
    "mask of -1e9": (MaskedByNumber, lambda: (torch.randn(2, 5, 8), hidden_row()), set()),
    "small divisor": (SmallDivisor, lambda: (torch.randn(4, 4),), {"mul", "div"}),
}


def fragile(name: str) -> tuple[Program, tuple[torch.Tensor, ...], set[str]]:
    torch.manual_seed(0)
    build, inputs, kept = CASES[name]
    example = inputs()
    return optimize.capture(build().eval(), example), example, kept


def dtype_of(program: Program, op: str) -> torch.dtype:
    """Return the one type that every call of an operator gives."""
    values = [tensor_value(node) for node in program.graph.nodes if graph.op_name(node) == op]
    (dtype,) = {value.dtype for value in values if value is not None}
    return dtype


@pytest.mark.parametrize("name", CASES)
def test_what_overflows_is_right_with_the_keep_list_and_wrong_with_o3(name: str) -> None:
    program, inputs, kept = fragile(name)
    want = program.run(inputs)[0]
    assert want.isfinite().all()
    naive, _ = optimize.CastFP16(policy="O3").apply(program)
    assert not naive.run(inputs)[0].isfinite().all()
    half, outcome = optimize.CastFP16(calibration=[inputs]).apply(program)
    half.check()
    error, scale = output_error(want, half.run(inputs)[0])
    assert error / scale < 2e-3
    assert outcome.rewrites and {skip.op for skip in outcome.skips} == kept
    known = ("reach", "not finite", "keeps its statistics")
    assert all(any(words in skip.reason for words in known) for skip in outcome.skips)


def test_only_the_two_calls_around_a_large_value_are_kept() -> None:
    program, inputs, _ = fragile("before a norm")
    half, outcome = optimize.CastFP16(calibration=[inputs]).apply(program)
    assert [(skip.where, skip.op) for skip in outcome.skips] == [("conv", "conv2d"), ("norm", "batch_norm")]
    assert "its values reach" in outcome.skips[0].reason and "beyond 6.55e+04" in outcome.skips[0].reason
    assert outcome.notes[0].startswith("3 calls in float16, 2 kept in float32")
    # The input is read in float32; the norm's output goes down, the output up.
    assert len(list(graph.calls(half.graph, aten._to_copy.default))) == 2


@pytest.mark.parametrize("name", ["before a norm", "residual", "mask of -1e9"])
def test_bfloat16_has_the_range(name: str) -> None:
    program, inputs, _ = fragile(name)
    half, outcome = optimize.CastBF16(calibration=[inputs]).apply(program)
    error, scale = output_error(program.run(inputs)[0], half.run(inputs)[0])
    assert error / scale < 2e-2 and {skip.op for skip in outcome.skips} <= {"batch_norm"}


class Cancelling(nn.Module):
    """Adds 2,000 and takes it away again: in half only multiples of 1 survive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last((self.first(x) + 2000).relu() - 2000)


@pytest.mark.parametrize("entry, tolerance", [(optimize.CastFP16, 2e-3), (optimize.CastBF16, 2e-2)])
def test_what_cancels_is_kept_with_the_error_it_causes(entry: type[optimize.CastFP16], tolerance: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    program = optimize.capture(Cancelling().eval(), (x,))
    rules, _ = entry().apply(program)
    assert max(output_error(program.run((x,))[0], rules.run((x,))[0])) > 0.1
    half, outcome = entry(calibration=[x]).apply(program)
    error, scale = output_error(program.run((x,))[0], half.run((x,))[0])
    assert error / scale < tolerance
    assert {skip.op for skip in outcome.skips} == {"add", "relu", "sub"}
    assert all(skip.reason.startswith("its rounding alone moves the outputs by") for skip in outcome.skips)


def test_nothing_is_kept_where_the_outputs_do_not_notice() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Softmax(-1), nn.Linear(16, 4)).eval()
    program = optimize.capture(net, (torch.rand(2, 16),))
    half, outcome = optimize.CastFP16(calibration=[torch.rand(8, 16)]).apply(program)
    assert not outcome.skips and "4 calls in float16, 0 kept" in outcome.notes[0]
    assert {dtype_of(half, name) for name in ("softmax", "layer_norm")} == {torch.float16}


def test_a_recurrent_layer_is_kept_whatever_the_data_says() -> None:
    program = references.captured("lstm", None)
    _, outcome = optimize.CastFP16(calibration=[program.inputs]).apply(program)
    assert {skip.op for skip in outcome.skips} == {"lstm"}


@pytest.mark.parametrize("entry", [optimize.CastFP16, optimize.CastBF16])
def test_io_in_half_takes_and_gives_halves_without_a_cast(entry: type[optimize.CastFP16], tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
    program = optimize.capture(net, (torch.rand(2, 3, 8, 8),))
    half = optimize.Pipeline([entry(io="half")]).run(program).program
    x = torch.rand(3, 3, 8, 8).to(entry.dtype)
    assert half(x).dtype is entry.dtype and half.inputs[0].dtype is entry.dtype
    assert not list(graph.calls(half.graph, aten._to_copy.default))
    torch.testing.assert_close(half(x).float(), net(x.float()), rtol=0.03, atol=0.03)
    half.check()
    half.export()


def test_dtypes_and_numbers_in_the_graph_are_rewritten() -> None:
    class Made(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            steps = torch.arange(4, dtype=torch.float32) + torch.full((4,), 0.5, dtype=torch.float32)
            mask = torch.full((4, 4), -1e9).triu(1)
            share = torch.arange(4) / 4
            return torch.softmax(x @ x.transpose(1, 2) + mask, -1, dtype=torch.float32) @ x + steps * share

    x = torch.rand(3, 4, 4)
    program = optimize.capture(Made().eval(), (x,))
    half, outcome = optimize.CastFP16(calibration=[x]).apply(program)
    assert [(skip.op, skip.reason) for skip in outcome.skips] == [("div", "it makes float32 of integers")]
    assert {dtype_of(half, name) for name in ("triu", "softmax", "matmul")} == {torch.float16}
    assert dtype_of(half, "div") is torch.float32
    mask = next(node for node in half.graph.nodes if graph.op_name(node) == "full" and node.args[1] != 0.5)
    assert mask.args[1] == torch.finfo(torch.float16).min / 4 and mask.kwargs["dtype"] is torch.float16
    # The input goes down, the product up: what is made of integers is added in float32, where the output is.
    assert len(list(graph.calls(half.graph, aten._to_copy.default))) == 2
    torch.testing.assert_close(half(x), program(x), rtol=2e-3, atol=2e-3)


def test_a_weight_read_in_both_precisions_is_held_in_both_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = (self.weight @ x) * 1e5
            return (self.weight @ wide) * 1e-6 + self.weight @ (self.weight @ x)

    program = optimize.capture(Tied().eval(), (torch.rand(4, 2),), dynamic_batch=False)
    half, _ = optimize.CastFP16(calibration=[program.inputs]).apply(program)
    assert sorted(str(tensor.dtype) for tensor in half.graph_module.parameters()) == ["torch.float16", "torch.float32"]


def test_float16_says_that_it_is_for_gpus_and_names_bfloat16() -> None:
    program = optimize.capture(nn.Linear(4, 4).eval(), (torch.rand(2, 4),))
    _, outcome = optimize.CastFP16().apply(program)
    assert "slower" in outcome.notes[-1] and "bfloat16" in outcome.notes[-1]
    _, outcome = optimize.CastBF16().apply(program)
    assert not any("slower" in note for note in outcome.notes)


def mixed_inputs(count: int, seed: int) -> torch.Tensor:
    """Return inputs that go together, as real ones do."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    return torch.relu(torch.randn(count, 16, generator=generator) + 1) @ mixing


def deep(bias: bool = True) -> Program:
    torch.manual_seed(0)
    layers = (nn.Linear(16, 32, bias=bias), nn.ReLU(), nn.Linear(32, 32, bias=bias), nn.ReLU(), nn.Linear(32, 8))
    return optimize.capture(nn.Sequential(*layers).eval(), (mixed_inputs(2, 1),))


@pytest.mark.parametrize("entry", [optimize.CastFP16, optimize.CastBF16])
def test_compensated_rounding_is_nearer_on_data_it_has_not_seen(entry: type[optimize.CastFP16]) -> None:
    program, data, fresh = deep(), [mixed_inputs(64, 2)], mixed_inputs(256, 3)
    before = {name: value.clone() for name, value in program.graph_module.state_dict().items()}
    errors = {}
    for rounding in ("nearest", "compensated"):
        half, _ = entry(calibration=data, rounding=rounding).apply(program)
        # In float32 with the rounded weights: the rounding of activations is the same for both.
        wide = optimize.capture(nn.Sequential(*held(half)).eval(), (fresh[:2],))
        errors[rounding] = float((wide(fresh) - program(fresh)).square().mean())
    assert errors["compensated"] < 0.7 * errors["nearest"]
    assert all(torch.equal(value, before[name]) for name, value in program.graph_module.state_dict().items())


def held(half: Program) -> list[nn.Module]:
    """Return layers in float32 with the weights a program of linear layers holds."""
    state = {name: value.float() for name, value in half.graph_module.state_dict().items()}
    found: list[nn.Module] = []
    for name in ("0", "2", "4"):
        layer = nn.Linear(*reversed(state[f"{name}.weight"].shape))
        layer.load_state_dict({part: state[f"{name}.{part}"] for part in ("weight", "bias")})
        found += [layer, nn.ReLU()]
    return found[:-1]


@pytest.mark.parametrize(
    "options",
    [{"rounding": "nearest"}, {"policy": "O3"}, {"policy": "O2"}, {"calibration": None}, {"calibration": "synthetic"}],
)
def test_each_weight_is_rounded_by_itself_where_that_is_asked_for_or_there_is_no_data(options: dict[str, str]) -> None:
    data = mixed_inputs(64, 2)
    given: dict[str, Any] = {"calibration": [data]} | options
    if given["calibration"] == "synthetic":
        given["calibration"] = Samples("made up", lambda: iter([Batch((data,))]), synthetic=True)
    program = deep(bias=False)
    half, _ = optimize.CastBF16(**given).apply(program)
    state, want = half.graph_module.state_dict(), program.graph_module.state_dict()
    assert state.keys() == want.keys()
    assert all(torch.equal(value, want[name].bfloat16()) for name, value in state.items())


def test_layers_that_stay_in_float32_keep_their_weights_and_have_no_new_bias() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.first = nn.Linear(16, 16, bias=False)
            nn.init.uniform_(self.up.weight, -2e4, 2e4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(self.first(x)) * 1e-4)

    torch.manual_seed(0)
    program = optimize.capture(Large().eval(), (mixed_inputs(2, 1),))
    half, outcome = optimize.CastFP16(calibration=[mixed_inputs(64, 2)]).apply(program)
    assert "up" in {skip.where for skip in outcome.skips}  # its values are too large, its weights are not
    state, want = half.graph_module.state_dict(), program.graph_module.state_dict()
    assert torch.equal(state["up.weight"], want["up.weight"]) and "up.bias" not in state
    assert state["first.weight"].dtype is torch.float16 and "first.bias" in state
    assert not torch.equal(state["first.weight"], want["first.weight"].half())


def test_options_are_checked() -> None:
    with pytest.raises(UsageError, match="no policy 'O4'"):
        optimize.CastFP16(policy="O4")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="rounding='up'"):
        optimize.CastFP16(rounding="up")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="io='int8'"):
        optimize.CastFP16(io="int8")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="re-iterable"):
        optimize.CastFP16(calibration=iter([torch.rand(1)]))


def test_without_data_a_run_synthesises_none_for_it() -> None:
    from optimize.recipe import PassEntry

    assert PassEntry(name="CastFP16").takes_data and not PassEntry(name="CastFP16").needs_data
    assert PassEntry(name="QuantizeStatic").needs_data
