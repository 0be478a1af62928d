"""Cross-layer equalization: the outputs stay, and what rounding loses shrinks where channels differ in width."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import optimize
from optimize import graph, recipe
from optimize.errors import Refused, UsageError
from optimize.passes.equalize_channels import THROUGH, EqualizeChannels
from optimize.pipeline import Pipeline
from optimize.program import Program
from optimize.quantization import attempts, links
from optimize.quantization.simulation import simulated_db
from optimize.workflow import transform

WIDTHS = torch.logspace(-2, 0, 16)


def images(count: int = 16, seed: int = 0, channels: int = 3) -> torch.Tensor:
    return torch.randn(count, channels, 10, 9, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def unequal(maker: nn.Module, *readers: nn.Module) -> None:
    """Make the channels between layers of very different width, without changing what the layers compute together."""
    maker.weight.mul_(WIDTHS.reshape(-1, *[1] * (maker.weight.dim() - 1)))
    if maker.bias is not None:
        maker.bias.mul_(WIDTHS)
    for reader in readers:
        inputs = reader.weight.shape[1]
        along = (-1, *[1] * (reader.weight.dim() - 1)) if inputs == 1 else (1, -1, *[1] * (reader.weight.dim() - 2))
        reader.weight.div_(WIDTHS.reshape(along))


class Gated(nn.Module):
    """A value that a squeeze, a product with its gate and a second layer read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 1)
        self.up, self.last = nn.Conv2d(4, 16, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).relu()
        return self.last(y * self.up(self.down(y.mean((2, 3), keepdim=True)).relu()).sigmoid())


class Sum(nn.Module):
    """A value that a layer and a sum read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).relu()
        return y + self.second(y)


class Residual(nn.Module):
    """A stage: what three layers make is added up, a ReLU and a pool on the way; five layers read it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.deep, self.flat, self.last = nn.Conv2d(16, 16, 1), nn.Linear(16, 4), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.first(x)
        y = functional.max_pool2d(y, 2) + functional.max_pool2d(self.second(y), 2)
        y = (y + self.third(self.deep(y).relu())).relu()
        return self.last(y), self.flat(y.mean((2, 3)))


class Added(nn.Module):
    """A layer's value, and something else added to it, that a second layer reads."""

    def __init__(self, other: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.other = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 4, 1), other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(functional.pad(x, (0, 0, 0, 0, 0, 13)))
        return self.last(y + self.other(y))


class GatedSum(nn.Module):
    """What a gate leaves of a layer's value, added to the value that the block began with."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 4, 1)
        self.squeeze = nn.Conv2d(16, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = self.second(x)
        return self.last(x + y * self.squeeze(y.mean((2, 3), keepdim=True)).sigmoid())


class Outer(nn.Module):
    """A product of a row and a column, added to a layer's value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last(y + y.amax(2, keepdim=True) * y.amax(3, keepdim=True))


class Positions(nn.Module):
    """A map whose positions became channels, and what a linear layer makes of others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 2, 1), nn.Linear(270, 180), nn.Linear(180, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).flatten(1) + self.second(x.flatten(1)))


class Clipped(nn.Module):
    """A sum of two layers behind a ReLU6."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 16, 1), nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(functional.relu6(self.first(x) + self.second(x)))


def _shuffled(y: torch.Tensor) -> torch.Tensor:
    return y.unflatten(1, (2, 8)).transpose(1, 2).flatten(1, 2)


class Joined(nn.Module):
    """Two values side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([self.one(x), self.two(x)], 1).relu())


class Square(nn.Module):
    """A product of a value with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last(y * functional.relu(y))


class Shared(nn.Module):
    """One layer behind two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 16, 1), nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu()) + self.last(self.second(x))


class Biased(nn.Module):
    """Two layers, of which one gets its bias from the picture."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.one, self.two, self.first = nn.Conv2d(3, 16, 1, bias=False), nn.Conv2d(16, 4, 1, bias=False), first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = x.mean().expand(16 if self.first else 4)
        y = functional.relu(functional.conv2d(x, self.one.weight, bias if self.first else None))
        return functional.conv2d(y, self.two.weight, None if self.first else bias)


def chain(*middle: nn.Module, reader: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *middle, reader or nn.Conv2d(16, 6, 3, padding=1))


def _flat() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(16 * 9, 5))


EQUALIZED: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: chain(nn.ReLU()),
    "nothing": lambda: chain(),
    "leaky": lambda: chain(nn.LeakyReLU(0.1)),
    "pools": lambda: chain(nn.ReLU(), nn.MaxPool2d(2, padding=1), nn.AvgPool2d(2)),
    "padded": lambda: chain(nn.ReLU(), nn.ZeroPad2d(1)),
    "depthwise": lambda: chain(nn.ReLU(), reader=nn.Conv2d(16, 16, 3, groups=16)),
    "grouped": lambda: chain(nn.ReLU(), reader=nn.Conv2d(16, 8, 3, groups=4)),
    "flattened": _flat,
    "gated": Gated,
    "residual": Residual,
    "gated sum": GatedSum,
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(270, 16), nn.ReLU(), nn.Linear(16, 4)),
}
LEFT_ALONE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sum": (Sum, "the output reads it"),
    "shuffled": (lambda: Added(_shuffled), "reshape reads it"),
    "outer": (Outer, "amax reads it"),
    "positions": (Positions, "its channels are added in another order"),
    "function": (lambda: Added(functional.gelu), "gelu reads it"),
    "constant": (lambda: Added(lambda y: torch.ones(16, 1, 1)), "something of another shape is added to it"),
    "clipped": (Clipped, "a sum of it is clipped"),
    "concat": (Joined, "cat reads it"),
    "square": (Square, "mul reads it"),
    "shared": (Shared, "shared"),
    "a computed bias": (lambda: Biased(True), "its bias is computed"),
    "a reader's computed bias": (lambda: Biased(False), "the bias of a layer that reads it is computed"),
    "hardtanh": (lambda: chain(nn.Hardtanh()), "a clip on the way ends below zero"),
    "gelu": (lambda: chain(nn.GELU()), "gelu reads it"),
    "output": (lambda: nn.Conv2d(3, 16, 1), "the output reads it"),
}


def captured(build: Callable[[], nn.Module]) -> tuple[nn.Module, Program]:
    torch.manual_seed(0)
    net = build().eval()
    return net, optimize.capture(net, (images(2),))


def uneven() -> Program:
    """Return a chain captured whose channels are of very different width."""
    torch.manual_seed(0)
    net = chain(nn.ReLU()).eval()
    unequal(net[0], net[2])
    return optimize.capture(net, (images(2),))


def deployed_db(program: Program, reference: Program, images: Callable[[int, int], torch.Tensor] = images) -> float:
    """Quantize as a user does and simulate on samples that nothing was learned from."""
    quantized, _ = optimize.QuantizeStatic(calibration=[images(16, 1)], calibrator="mse").apply(program)
    return simulated_db(quantized, [(images(16, 7),)], reference=reference)


@pytest.mark.parametrize("name", EQUALIZED)
def test_any_positive_scale_leaves_the_outputs(name: str) -> None:
    _, program = captured(EQUALIZED[name])
    wanted = program.run((images(3),))[0]
    found, _ = links.find(program, links.LAYERS, THROUGH)
    assert found
    for link in found:
        scale = torch.logspace(-2, 2, link.channels, dtype=torch.float64)[torch.randperm(link.channels)]
        links.rewrite(program.graph_module, link, scale, torch.zeros_like(scale))
    program.refresh()
    program.check()
    got = program.run((images(3),))[0]
    assert float((wanted - got).abs().max()) < 1e-5 * float(wanted.abs().max())


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_no_scale_passes_is_left_with_the_reason(name: str) -> None:
    build, reason = LEFT_ALONE[name]
    _, program = captured(build)
    changed, outcome = EqualizeChannels([images()]).apply(program)
    assert changed is program and not outcome.rewrites
    assert any(reason in skip.reason for skip in outcome.skips)


@pytest.mark.parametrize(
    "reader", [nn.Conv2d(16, 6, 3, padding=1), nn.Conv2d(16, 16, 3, groups=16)], ids=["dense", "depthwise"]
)
def test_channels_of_different_width_gain(reader: nn.Module) -> None:
    torch.manual_seed(0)
    net = chain(nn.ReLU(), reader=reader).eval()
    reader.reset_parameters()
    unequal(net[0], reader)
    program = optimize.capture(net, (images(2),))
    trace = Pipeline([EqualizeChannels([images(16, 0), images(16, 1)])]).run(program)
    assert len(trace.steps[0].outcome.rewrites) == 1
    assert trace.steps[0].relative_error is not None and trace.steps[0].relative_error < 2e-5
    assert deployed_db(trace.program, program) > deployed_db(program, program) + 5


@pytest.mark.parametrize("widest", [0.05, 30.0], ids=["never at its bound", "often at its bound"])
def test_a_relu6_is_passed_with_its_bound_in_view(widest: float) -> None:
    """Narrow channels are stretched, those at the bound stay; twice what the data shows goes through unclipped."""
    torch.manual_seed(0)
    reader = nn.Conv2d(16, 16, 3, groups=16)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.ReLU6(), reader).eval()
    unequal(net[0], reader)
    with torch.no_grad():
        net[0].weight.mul_(widest)
    program = optimize.capture(net, (images(2),))
    data = torch.cat([images(16, 0), images(16, 1)])
    changed, outcome = EqualizeChannels([data]).apply(program)
    assert len(outcome.rewrites) == 1
    seen = data[0::2] * 1.9
    wanted, got = program.run((seen,))[0], changed.run((seen,))[0]
    assert torch.allclose(wanted, got, rtol=1e-4, atol=1e-6 * float(wanted.abs().max()))
    assert deployed_db(changed, program) > deployed_db(program, program) + 2


def test_a_stage_is_one_link_with_all_that_is_added_up() -> None:
    _, program = captured(Residual)
    found, _ = links.find(program, links.LAYERS, THROUGH)
    stage = max(found, key=lambda link: len(link.makers))
    assert {graph.origin(node) for node in stage.makers} == {"first", "second", "third"}
    assert {graph.origin(reader.layer) for reader in stage.readers} == {"second", "deep", "last", "flat"}
    assert {graph.op_name(node) for node in stage.between} == {"conv2d", "max_pool2d", "add"}


def test_the_stage_of_a_residual_network_gains() -> None:
    torch.manual_seed(0)
    net = Residual().eval()
    for maker, readers in ((net.first, [net.second, net.deep, net.last, net.flat]), (net.second, []), (net.third, [])):
        unequal(maker, *readers)
    program = optimize.capture(net, (images(2),))
    changed, outcome = EqualizeChannels([images(16, 0), images(16, 1)]).apply(program)
    assert any(rewrite.where == "first" for rewrite in outcome.rewrites)
    assert deployed_db(changed, program) > deployed_db(program, program) + 5


@pytest.mark.parametrize("build", [Gated, Residual], ids=["gated", "residual"])
def test_no_value_on_the_way_gets_a_larger_step(build: Callable[[], nn.Module]) -> None:
    """A squeeze reads what its gate multiplies: scales that are right for the product would stretch it."""
    _, program = captured(build)
    maker = next(node for node in graph.calls(program.graph, *links.LAYERS) if graph.origin(node) == "first")
    with torch.no_grad():
        graph.constant(program.graph_module, graph.argument(maker, "weight")).mul_(WIDTHS.reshape(-1, 1, 1, 1))
    found, _ = links.find(program, links.LAYERS, THROUGH)
    link = next(each for each in found if each.maker is maker)
    assert link.between
    seen = attempts._extrema(program, [link], [(images(),)])
    for attempt in attempts.migrations(program.graph_module, link, seen, (0.3, 1.0)):
        for value in link.between:
            assert float((seen[value].width / attempt.scale).max()) <= 1.0001 * float(seen[value].width.max())


def test_near_answers_need_no_help() -> None:
    program, data = uneven(), [images(16, 0), images(16, 1)]
    far = EqualizeChannels(data, unless_near=True).apply(program)[1]
    assert len(far.rewrites) == 1
    torch.manual_seed(5)
    even = optimize.capture(chain(nn.ReLU()).eval(), (images(2),))
    unchanged, near = EqualizeChannels(data, unless_near=True).apply(even)
    assert unchanged is even and "near enough" in near.notes[0]


def test_a_net_that_gains_nothing_is_returned_as_it_was() -> None:
    _, program = captured(lambda: chain(nn.ReLU()))
    entry = EqualizeChannels([torch.zeros(4, 3, 10, 9)])
    changed, outcome = entry.apply(program)
    assert changed is program and outcome.notes


def test_it_runs_once_and_never_on_a_quantized_program() -> None:
    program = uneven()
    entry = EqualizeChannels([images()])
    changed, outcome = entry.apply(program)
    assert outcome.rewrites and entry.apply(changed)[0] is changed
    quantized, _ = optimize.QuantizeStatic(calibration=[images()], calibrator="mse").apply(program)
    assert entry.apply(quantized)[0] is quantized


@pytest.mark.parametrize(
    "data, message",
    [([], "empty"), ([torch.full((2, 3, 10, 9), float("nan"))], "not finite"), ([torch.rand(2, 1, 10, 9)], "shape")],
)
def test_bad_calibration_data_is_refused(data: list[torch.Tensor], message: str) -> None:
    _, program = captured(lambda: chain(nn.ReLU()))
    with pytest.raises(Refused, match=message):
        EqualizeChannels(data).apply(program)


def test_one_sample_judges_itself_and_says_so() -> None:
    _, outcome = EqualizeChannels([images(1)]).apply(uneven())
    assert "the same samples" in outcome.notes[0]


def test_a_variant_holds_it_and_float_does_not() -> None:
    program, data = uneven(), [images()]
    quantize = optimize.QuantizeStatic(calibration=data, calibrator="mse")
    plain, int8, half = transform(program, [EqualizeChannels(data), quantize, optimize.CastFP16()])
    assert [step.pass_name for step in int8.steps] == ["EqualizeChannels", "QuantizeStatic"]
    assert not plain.steps and plain.program is program
    assert [step.pass_name for step in half.steps] == ["CastFP16"]


def test_preparing_for_nothing_is_a_mistake() -> None:
    _, program = captured(lambda: chain(nn.ReLU()))
    with pytest.raises(UsageError, match="EqualizeChannels: no precision pass follows"):
        transform(program, [optimize.CastFP16(), EqualizeChannels([images()])])


def test_a_recipe_names_it() -> None:
    read = recipe.parse({"passes": ["EqualizeChannels", "QuantizeStatic"]})
    assert recipe.parse({"passes": [entry.name for entry in read.passes]}) == read
    entry = read.passes[0].build([images()])
    assert isinstance(entry, EqualizeChannels) and read.passes[0].takes_data
