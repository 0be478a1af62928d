"""Quantization-aware training through the pass: what it recovers, what is deployed, and what it refuses."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import optimize
from models import REFERENCES
from optimize import graph, recipe
from optimize.errors import Refused, UsageError
from optimize.program import Program
from optimize.quantization.quantizers import QUANTIZERS
from optimize.quantization.simulation import Simulation
from tests.elsewhere import GPU, Elsewhere
from tests.quantization.test_aware import Tied
from tests.slow import but_slowly


def deployed(program: Program, folder: Path, flat: tuple[Tensor, ...]) -> list[Tensor]:
    """Export to ONNX and return what ONNX Runtime answers."""
    artifact = optimize.export(program, "onnx", folder / "model.onnx")
    return [torch.from_numpy(value) for value in artifact.load(threads=1).run([value.numpy() for value in flat])]


def sqnr_db(wanted: list[Tensor], got: list[Tensor]) -> float:
    signal = sum(float(want.square().sum()) for want in wanted)
    noise = sum(float((want - found).square().sum()) for want, found in zip(wanted, got, strict=True))
    return 10 * math.log10(signal / max(noise, 1e-20 * signal))


def descend(module: nn.Module, loss: Callable[[], Tensor], steps: int, rate: float) -> None:
    optimizer = torch.optim.Adam(module.parameters(), rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def rings(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points of the plane, and which of three rings they lie in."""
    points = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 4 - 2
    return points, torch.bucketize(points.norm(dim=1), torch.tensor([0.8, 1.5]))


@pytest.fixture(scope="module")
def classifier() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    x, y = rings(1000, 1)
    descend(net, lambda: functional.cross_entropy(net(x), y), 300, 0.01)
    return net.eval()


def test_training_recovers_what_two_bits_lose(classifier: nn.Module, tmp_path: Path) -> None:
    x, y = rings(1000, 1)
    points, wanted = rings(2000, 2)
    program = optimize.capture(classifier, (x[:2],))

    def train(module: nn.Module) -> None:
        descend(module, lambda: functional.cross_entropy(module(x), y), 300, 0.01)

    def accuracy(answers: Tensor) -> float:
        return float((answers.argmax(1) == wanted).float().mean())

    after = optimize.QuantizeStatic([x], bits=2, alike=True).apply(program)[0]
    trained = optimize.QuantizeAware(train, [x], bits=2).apply(program)[0]
    calibrated, learned = (accuracy(deployed(entry, tmp_path, (points,))[0]) for entry in (after, trained))
    whole = accuracy(program.run((points,))[0])
    assert whole > 0.95
    assert calibrated < whole - 0.05
    assert learned > calibrated + 0.3 * (whole - calibrated)


class Nested(nn.Module):
    """Takes a tuple and a dict, returns a dict with a tuple in it."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(4, 8)

    def forward(self, pair: tuple[Tensor, Tensor], more: Mapping[str, Tensor]) -> dict[str, Any]:
        total = functional.relu(self.left(pair[0]) + self.right(pair[1]))
        return {"sum": total, "parts": (self.left(pair[0]) * 0.5, self.right(more["x"]))}


def images(*layers: nn.Module) -> tuple[nn.Module, tuple[Any, ...]]:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), *layers), (torch.randn(16, 3, 10, 10),)


def subject(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    rows = torch.randn(32, 6)
    return {
        "linear": lambda: (nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)), (rows,)),
        "conv": lambda: images(nn.Conv2d(8, 6, 3)),
        "depthwise": lambda: images(nn.Conv2d(8, 8, 3, groups=8), nn.ReLU6(), nn.Conv2d(8, 5, 1)),
        "transposed": lambda: images(nn.ConvTranspose2d(8, 6, 3, 2), nn.ReLU(), nn.Conv2d(6, 4, 3)),
        "pooled": lambda: images(nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4)),
        "signed": lambda: images(nn.Conv2d(8, 8, 3), nn.LeakyReLU(0.2), nn.Conv2d(8, 4, 3)),
        "tied": lambda: (Tied(), (rows,)),
        "nested": lambda: (Nested(), ((rows, rows[:, :4]), {"x": rows[:, 2:]})),
    }[name]()


@pytest.mark.parametrize("bits", but_slowly([8, 3], {3}))
@pytest.mark.parametrize("steps", ["learned", "frozen"])
@pytest.mark.parametrize("name", ["linear", "conv", "depthwise", "transposed", "pooled", "signed", "tied", "nested"])
def test_the_deployed_file_answers_as_the_trained_module(name: str, steps: Any, bits: int, tmp_path: Path) -> None:
    net, inputs = subject(name)
    program = optimize.capture(net.eval(), inputs)
    targets = [torch.randn_like(value) for value in program.run(program.flatten(inputs))]
    answers: list[Tensor] = []

    def answer(module: nn.Module) -> list[Tensor]:
        return pytree.tree_flatten(module(*inputs))[0]

    def train(module: nn.Module) -> None:
        pairs = lambda: zip(answer(module), targets, strict=True)  # noqa: E731
        descend(module, lambda: torch.stack([(got - want).square().mean() for got, want in pairs()]).sum(), 10, 0.01)
        answers.extend(value.detach() for value in answer(module))

    flat = program.flatten(inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trained, outcome = optimize.QuantizeAware(train, [flat], steps=steps, bits=bits).apply(program)
    trained.check()
    assert outcome.rewrites and "Training moved" in outcome.notes[-1]
    assert sqnr_db(answers, deployed(trained, tmp_path, flat)) >= 30


class Residual(nn.Module):
    """Convolutions with BatchNorm, a shortcut, pooling, and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = (
            nn.Conv2d(3, 16, 3, padding=1),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.Conv2d(16, 16, 3, padding=1),
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.norms[0](self.stem(x))), 2)
        y = functional.relu6(self.norms[1](self.first(x)))
        y = functional.relu(self.norms[2](self.second(y)) + x)
        return self.head(y.mean((2, 3)))


SCHEMES: list[dict[str, Any]] = [
    {},
    {"quantizer": "iao"},
    {"quantizer": "iao", "bits": 4, "activation_bits": 4},
    {"quantizer": "lsq", "bits": 2, "activation_bits": 2},
    {"quantizer": "lsq", "bits": 4, "activation_bits": 4, "steps": "frozen"},
    {"quantizer": "lsq+", "bits": 3, "activation_bits": 3},
    {"quantizer": "pact", "bits": 4, "activation_bits": 4},
    {"quantizer": "dorefa", "bits": 1, "activation_bits": 2, "gradient_bits": 6},
    {"quantizer": "dorefa", "ends": 0, "bits": 4, "activation_bits": 4},
    {"quantizer": "wrpn", "bits": 4, "activation_bits": 4},
    {"quantizer": "twn"},
    {"quantizer": "twn", "activation_bits": 1},
    {"quantizer": "bwn"},
    {"quantizer": "xnor"},
    {"quantizer": "bnn"},
]


@pytest.mark.parametrize(
    "options", SCHEMES, ids=[" ".join(map(str, options.values())) or "default" for options in SCHEMES]
)
def test_each_quantizer_trains_beside_batch_norm_and_is_deployed_as_it_answered(
    options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(64, 3, 12, 12), torch.randint(5, (64,))
    net = Residual()
    net(x)
    program = optimize.capture(net.eval(), (x[:2],))
    answers, statistics = list[Tensor](), list[bool]()

    def train(module: nn.Module) -> None:
        names = [name for name, _ in module.named_parameters() if "running" in name]
        before = {name: module.get_parameter(name).clone() for name in names}
        descend(module, lambda: functional.cross_entropy(module(x), y), 10, 0.003)
        statistics.extend(not torch.equal(module.get_parameter(name), before[name]) for name in names)
        with torch.no_grad():
            answers.append(module.eval()(x))

    trained, _ = optimize.QuantizeAware(train, [x], **options).apply(program)
    trained.check()
    assert len(statistics) == 6 and set(statistics) == {options.get("steps") != "frozen"}
    assert not list(graph.calls(trained.graph, graph.aten.batch_norm.default))
    with torch.no_grad():
        simulated = Simulation(trained).outputs((x,))[0]
    (found,) = deployed(trained, tmp_path, (x,))
    for got in (simulated, found):
        assert sqnr_db([answers[0]], [got]) >= 25
        assert float((got.argmax(1) == answers[0].argmax(1)).float().mean()) >= 0.95


class Summed(nn.Module):
    """A sum of what a branch gives and of what it reads."""

    def __init__(self, stem: list[nn.Module], *branch: nn.Module) -> None:
        super().__init__()
        self.stem, self.branch, self.head = nn.Sequential(*stem), nn.Sequential(*branch), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return self.head(functional.relu(self.branch(y) + y).mean((2, 3)))


def shifted(channels: int) -> nn.BatchNorm2d:
    """Return a BatchNorm as training leaves it."""
    norm = nn.BatchNorm2d(channels)
    nn.init.normal_(norm.bias, 0, 0.7)
    nn.init.uniform_(norm.running_var, 0.2, 1)
    return norm


def clipped() -> Summed:
    """Weights of -1 and 1 take the branch far beyond the range that its weights gave before."""
    stem = [nn.Conv2d(3, 16, 3, padding=1), shifted(16), nn.ReLU()]
    down = [nn.Conv2d(16, 24, 3, 2, padding=1), shifted(24), nn.ReLU()]
    return Summed(stem, *down, nn.Upsample(scale_factor=2), nn.Conv2d(24, 16, 3, padding=1))


def signed() -> Summed:
    """The sign is taken of what the sum reads."""
    convolutions = [nn.Conv2d(width, 16, 3, padding=1) for width in (3, 16, 16)]
    return Summed([convolutions[0], nn.ReLU(), convolutions[1]], convolutions[2])


@pytest.mark.parametrize("target", ["openvino", "torchscript"])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (clipped, {"quantizer": "bnn"}),
        (signed, {"quantizer": "xnor"}),
        (signed, {"quantizer": "twn", "activation_bits": 1}),
    ],
    ids=["clipped bnn", "signed xnor", "signed twn"],
)
def test_a_file_clips_what_training_clipped_and_takes_signs_of_what_it_rounded(
    make: Callable[[], nn.Module], options: dict[str, Any], target: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(64, 3, 12, 12), torch.randint(5, (64,))
    trained: list[nn.Module] = []

    def train(module: nn.Module) -> None:
        descend(module, lambda: functional.cross_entropy(module(x), y), 40, 0.003)
        trained.append(module)

    program = optimize.capture(make().eval(), (x[:2],))
    quantized, _ = optimize.QuantizeAware(train, [x], **options).apply(program)
    file = optimize.export(quantized, target, tmp_path / ("model.xml" if target == "openvino" else "model.pt"))
    with torch.no_grad():
        wanted = trained[0].eval()(x)
    (found,) = file.load(threads=1).run([x.numpy()])
    assert sqnr_db([wanted], [torch.from_numpy(found)]) >= 30


def test_an_input_that_training_clipped_is_clipped_behind_all_inputs(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + self.left(x) + self.right(y)

    def train(module: nn.Module) -> None:
        with torch.no_grad():
            for name, moved in module.named_parameters():
                if name.endswith("moved"):
                    moved.sub_(10.0)  # steps of which the calibration data needs many more
            answers.append(module.eval()(*inputs))

    torch.manual_seed(0)
    answers, inputs = list[Tensor](), (torch.randn(16, 6), torch.randn(16, 6))
    trained, _ = optimize.QuantizeAware(train, [inputs]).apply(optimize.capture(Net().eval(), inputs))
    trained.check()
    kinds = [node.op for node in trained.graph.nodes if node.op != "get_attr"]
    clamped = [graph.argument(clamp, "self").op for clamp in graph.calls(trained.graph, graph.aten.clamp.default)]
    assert kinds[:3] == ["placeholder", "placeholder", "call_function"] and "placeholder" in clamped
    for target, name in (("onnx", "model.onnx"), ("openvino", "model.xml")):
        (found,) = optimize.export(trained, target, tmp_path / name).load(threads=1).run([x.numpy() for x in inputs])
        assert sqnr_db(answers, [torch.from_numpy(found)]) >= 25


def test_each_layer_has_the_bits_that_are_said_for_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(4)))
    x, shown = torch.randn(16, 8, 6, 6), list[Tensor]()

    def train(module: nn.Module) -> None:
        with torch.no_grad():
            shown.append(module.eval()(x))

    said = {"1": (2, 3), "2.*": [4, 2], "3.0": (5, 8)}
    step = optimize.QuantizeAware(train, [x], bits=6, activation_bits=5, by_layer=said)
    trained, _ = step.apply(optimize.capture(net.eval(), (x[:2],)))
    layers = list(graph.calls(trained.graph, graph.aten.conv2d.default))
    bits = [trained.plan.bits_of(layer.name) for layer in layers]
    assert bits == [8, 2, 4, 5]
    for layer, most in zip(layers, (8, 2, 4, 5), strict=True):
        weight = graph.constant(trained.graph_module, graph.argument(layer, "weight"))
        assert weight is not None
        assert all(len(channel.unique()) <= 2**most for channel in weight)
    ends = [graph.argument(layer, "input") for layer in layers[1:]]
    levels = [len(value.unique()) for value in _values(trained, ends, x)]
    assert levels[0] <= 2**3 and levels[1] <= 2**2
    assert sqnr_db(shown, deployed(trained, tmp_path, (x,))) > 25


def test_fewer_bits_begin_where_more_bits_ended() -> None:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3))
    net, x, begun, ended = nn.Sequential(*blocks), torch.randn(32, 4, 6, 6), list[Any](), list[Any]()

    def train(module: Any) -> None:
        state = module.body.state_dict()
        begun.append((module.scheme.bits_of("conv2d_1"), copy.deepcopy(state)))
        with torch.no_grad():
            state["1.0.weight"].add_(0.3 * torch.randn(4, 4, 3, 3))
            state["1.1.running_mean"].add_(100)
        ended.append(copy.deepcopy(state))

    step = optimize.QuantizeAware(train, [x], bits=2, activation_bits=4, by_layer={"1": (3, 5)}, through=(8, 4))
    trained, _ = step.apply(optimize.capture(net.eval(), (x[:2],)))
    assert [bits for bits, _ in begun] == [(8, 8), (4, 5), (3, 5)]
    for before, (_, after) in zip(ended, begun[1:], strict=False):
        assert all(torch.equal(before[name], after[name]) for name in before if "running" not in name)
        assert after["1.1.running_mean"].min() > 50  # one batch, by which the steps begin, has moved it since
    assert trained.plan.bits_of("conv2d_1") == 3


def test_each_training_with_fewer_bits_has_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    """One file for all of them took the second training for the first, at its end: the last bits were not trained."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    data = [(torch.randn(32, 8), torch.randint(3, (32,))) for _ in range(2)]
    program = optimize.capture(net, (data[0][0][:2],))

    def trained(folder: Path | None) -> Program:
        train = optimize.Training(data, epochs=2, rate=0.05, folder=folder)
        step = optimize.QuantizeAware(train, [x for x, _ in data], bits=2, activation_bits=2, through=(4,))
        return step.apply(program)[0]

    wanted, first = (trained(folder).graph_module.state_dict() for folder in (None, tmp_path))
    files = ["checkpoint-2-bits.safetensors", "checkpoint-4-bits.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    (tmp_path / files[0]).unlink()  # as one leaves it that was killed between the two
    with warnings.catch_warnings(action="error", category=UserWarning):  # what is over is gone on from, not over
        resumed = trained(tmp_path).graph_module.state_dict()
    for state in (first, resumed):
        assert all(torch.equal(value, wanted[name]) for name, value in state.items())


def test_a_checkpoint_is_of_one_quantizer_and_its_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    data = [(torch.randn(32, 8), torch.randint(3, (32,)))]
    program, train = optimize.capture(net, (data[0][0][:2],)), optimize.Training(data, folder=tmp_path)
    asked: list[dict[str, Any]] = [
        {"quantizer": "lsq", "activation_bits": 4}, {"quantizer": "lsq", "activation_bits": 2},
        {"quantizer": "dorefa", "activation_bits": 4}, {"quantizer": "lsq", "by_layer": {"2": (3, 4)}},
    ]  # fmt: skip
    optimize.QuantizeAware(train, [x for x, _ in data], bits=4, **asked[0]).apply(program)
    for other in asked[1:]:
        with pytest.raises(Refused, match=r"The checkpoint is of .*4 bits, 4 read, 0 of gradients, lsq"):
            optimize.QuantizeAware(train, [x for x, _ in data], bits=4, **other).apply(program)


def _values(program: Program, nodes: list[Any], x: Tensor) -> list[Tensor]:
    """Return values between layers, as their ranges are stored."""
    stored = []
    names = {node.name for node in nodes}

    class Watch(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            value = super().run_node(n)
            if n.name in names:
                known = program.plan.ranges[n.name]
                step = (known.high - known.low) / 255
                stored.append((value / step).round())
            return value

    with torch.no_grad():
        Watch(program.graph_module).run(x)
    return stored


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ({"nowhere": (4, 4)}, "by_layer 'nowhere': the program has no such module"),
        ({"0": 4}, "by_layer '0': 4 is no pair of bits"),
        ({"0": (1, 4)}, "by_layer '0': weights=1: weights have 2 to 8 bits"),
        ({"0": (4, 9)}, "by_layer '0': what is read=9: layers read 1 to 8 bits"),
    ],
    ids=str,
)
def test_bits_of_a_layer_that_do_not_fit_are_told(said: dict[str, Any], what: str) -> None:
    program = optimize.capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval(), (torch.rand(2, 4),))
    with pytest.raises(UsageError, match=re.escape(what)):
        optimize.QuantizeAware(lambda _: None, [torch.rand(4, 4)], by_layer=said).apply(program)


@pytest.mark.parametrize("target", ["openvino", "torchscript"])
def test_what_iao_evaluates_in_training_is_what_the_integers_of_a_file_compute(target: str, tmp_path: Path) -> None:
    """But where products add up to a tie, in an order of each kernel's own. ONNX has biases of integers."""
    torch.manual_seed(0)
    layers = [(3, 16, 1), (16, 24, 2), (24, 24, 1)]
    net = nn.Sequential(
        *(
            part
            for inputs, outputs, stride in layers
            for part in (nn.Conv2d(inputs, outputs, 3, stride, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())
        ),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5)),
    )
    x, y, answers = torch.randn(64, 3, 12, 12), torch.randint(5, (64,)), list[Tensor]()

    def train(module: nn.Module) -> None:
        descend(module.train(), lambda: functional.cross_entropy(module(x), y), 10, 0.003)
        with torch.no_grad():
            answers.append(module.eval()(x))

    trained, _ = optimize.QuantizeAware(train, [x], quantizer="iao").apply(optimize.capture(net.eval(), (x[:2],)))
    artifact = optimize.export(trained, target, tmp_path / f"net{'.xml' if target == 'openvino' else '.pt'}")
    (found,) = artifact.load(threads=1).run([x.numpy()])
    alike = torch.isclose(torch.from_numpy(found), answers[0], rtol=1e-5, atol=1e-5)
    assert int((~alike).any(1).sum()) <= 3  # samples: a tie moves all that comes behind it
    assert sqnr_db(answers, [torch.from_numpy(found)]) >= 60


@pytest.mark.parametrize(("samples", "settles"), [(1100, True), (256, False)])
def test_statistics_are_taken_anew_where_calibration_data_is_enough_for_them(samples: int, settles: bool) -> None:
    """A running mean is that of the last batches; what is deployed shall be that of all samples."""
    torch.manual_seed(0)
    x = torch.randn(samples, 3, 6, 6) + torch.linspace(0, 2, samples)[:, None, None, None]  # neighbours are alike
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)).eval()
    program = optimize.capture(net, (x[:2],))
    norm = next(iter(graph.calls(program.graph, graph.aten.batch_norm.default)))
    names = [str(graph.argument(norm, name).target) for name in ("running_mean", "running_var")]
    seen: list[nn.Module] = []

    def train(module: nn.Module) -> None:
        module.train()
        module(x[:64] * 3)  # what training happens to see last
        seen.append(module)

    _, outcome = optimize.QuantizeAware(train, list(x.split(50))).apply(program)
    values = net[0](x)
    mean, variance = (seen[0].body.get_parameter(name) for name in names)
    assert any("BatchNorm were taken anew on 1,100" in note for note in outcome.notes) is settles
    assert torch.allclose(mean, values.mean((0, 2, 3)), atol=0.02) is settles
    assert torch.allclose(variance, values.var((0, 2, 3)), rtol=0.05) is settles
    assert not seen[0].training


def linear() -> tuple[Program, Tensor]:
    x = torch.randn(8, 6)
    return optimize.capture(nn.Sequential(nn.Linear(6, 4)).eval(), (x,)), x


def one_step(module: nn.Module) -> None:
    """Take one step of an optimizer; recipes name it."""
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    module(torch.ones(8, 6)).square().mean().backward()
    optimizer.step()


def test_a_loop_is_named_in_a_recipe() -> None:
    name = f"{__name__}:one_step"
    entry = recipe.parse({"passes": [{"QuantizeAware": {"train": name, "bits": 4}}]}).passes[0]
    program, x = linear()
    trained, outcome = entry.build([x]).apply(program)
    assert entry.takes_data and outcome.notes[-1].startswith("Training moved")
    assert trained.quantization is not None and trained.quantization.bits == 4


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "QuantizeAware needs the option 'train'"),
        ({"train": 3}, "QuantizeAware.train = 3"),
        ({"train": "a:b", "steps": "both"}, "QuantizeAware.steps = 'both'"),
    ],
)
def test_a_recipe_is_checked_before_anything_runs(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        recipe.parse({"passes": [{"QuantizeAware": options}]})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"train": "no_colon"}, "function of the module"),
        ({"steps": "both"}, "'learned' or 'frozen'"),
        ({"bits": 9}, "2 to 8 bits"),
        ({"quantizer": "lsd"}, "no quantizer 'lsd'"),
        ({"quantizer": "twn", "bits": 4}, "the weights of 'twn' have 2"),
        ({"quantizer": "lsq", "bits": 1}, "2 to 8 bits with 'lsq'"),
        ({"quantizer": "dorefa", "bits": 0}, "1 to 8 bits with 'dorefa'"),
        ({"quantizer": "xnor", "activation_bits": 2}, "signs with 'xnor'"),
        ({"activation_bits": 9}, "layers read 1 to 8 bits"),
        ({"through": (4, 8)}, "bits above 8 and up to 8, the most first"),
        ({"bits": 2, "through": (4, 6)}, "bits above 2 and up to 8"),
        ({"quantizer": "twn", "through": (8,)}, "Leave bits, by_layer and through out"),
        ({"gradient_bits": 1}, "gradients have 2 to 8 bits"),
        ({"ends": 4}, "have 8 bits, or 0"),
        ({"calibration": iter([])}, "re-iterable"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        optimize.QuantizeAware(**{"train": one_step, "calibration": [torch.ones(2, 6)], **options})


def test_a_loop_that_raises_or_diverges_is_refused() -> None:
    program, x = linear()

    def stumble(module: nn.Module) -> None:
        raise RuntimeError("no more data")

    def diverge(module: nn.Module) -> None:
        with torch.no_grad():
            next(module.parameters()).fill_(float("inf"))

    with pytest.raises(Refused, match=r"'stumble' raised RuntimeError: no more data"):
        optimize.QuantizeAware(stumble, [x]).apply(program)
    with pytest.raises(Refused, match="not finite"):
        optimize.QuantizeAware(diverge, [x]).apply(program)
    with pytest.raises(Refused, match="no module 'nowhere'"):
        optimize.QuantizeAware("nowhere:loop", [x]).apply(program)


@pytest.mark.parametrize("options", [{}, {"bits": 2, "activation_bits": 2}, {"quantizer": "xnor"}], ids=str)
def test_a_moving_average_of_the_weights_is_trained(options: dict[str, Any]) -> None:
    x, y = torch.randn(16, 3, 12, 12), torch.randint(5, (16,))
    program = optimize.capture(Residual().eval(), (x[:2],))
    loop = optimize.Training([(x, y)] * 3, average=0.5, rate=1e-3)
    trained, outcome = optimize.QuantizeAware(loop, [x], **options).apply(program)
    trained.check()
    assert "Training moved" in outcome.notes[-1] and "Training moved 0" not in outcome.notes[-1]


FEW = [{"quantizer": name, "bits": 4, "activation_bits": 4} for name in ("iao", "lsq", "lsq+", "dorefa", "pact")]


@pytest.mark.parametrize("options", but_slowly([*({"quantizer": name} for name in QUANTIZERS), *FEW], FEW), ids=str)
def test_a_loop_may_train_on_a_gpu(options: dict[str, Any]) -> None:
    x, y = torch.randn(16, 3, 12, 12), torch.randint(5, (16,))
    program = optimize.capture(Residual().eval(), (x[:2],))

    def train(module: nn.Module) -> None:
        with Elsewhere():
            module.to(GPU).train()
            optimizer = torch.optim.SGD(module.parameters(), 1e-3, momentum=0.9)
            for _ in range(2):
                functional.cross_entropy(module(x.to(GPU)), y.to(GPU)).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert module.eval()(x.to(GPU)).device == GPU
            module.cpu()

    trained, outcome = optimize.QuantizeAware(train, [x], **options).apply(program)
    trained.check()
    assert "Training moved 0" not in outcome.notes[-1]


def test_it_trains_where_gradients_are_switched_off() -> None:
    program, x = linear()
    with torch.inference_mode():
        _, outcome = optimize.QuantizeAware(one_step, [x]).apply(program)
    assert outcome.notes[-1] == "Training moved 4 of 4 weights and steps."


def test_recurrent_layers_are_left_with_the_reason_and_the_others_trained() -> None:
    reference = REFERENCES["lstm"]
    x = reference.inputs(4)
    program = optimize.capture(reference.build(), (x,))
    called: list[Tensor] = []
    _, outcome = optimize.QuantizeAware(lambda module: called.append(module(x)), [x]).apply(program)
    assert any("recurrent layers have no static INT8 kernel" in skip.reason for skip in outcome.skips)
    assert called and outcome.rewrites


def test_without_a_layer_nothing_is_trained() -> None:
    x = torch.randn(4, 6)
    program = optimize.capture(nn.ReLU().eval(), (x,))
    found, outcome = optimize.QuantizeAware(lambda module: pytest.fail("trained"), [x]).apply(program)
    assert found is program and not outcome.rewrites
