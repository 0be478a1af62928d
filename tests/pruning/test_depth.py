"""One layer for several: which segments there are, the layer that comes nearest, what is chosen and trained."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import optimize
from models import randomize_batch_norm
from optimize import graph
from optimize.errors import Refused, UsageError
from optimize.load import weights
from optimize.merged import Merged
from optimize.pruning.merging import apply, choose, fit, merge
from optimize.pruning.segments import Form, Segment, find_segments

torch.set_num_threads(1)


class Block(nn.Module):
    """An inverted residual block."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        hidden = 4 * inputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, hidden, 1), nn.BatchNorm2d(hidden), activation(),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden), nn.BatchNorm2d(hidden), activation(),
            nn.Conv2d(hidden, outputs, 1), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.residual else self.body(x)


def blocks(activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    segments = [
        Block(16, 16, activation=activation),
        Block(16, 24, 2, activation),
        Block(24, 24, activation=activation),
    ]
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *segments, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5)
    )
    randomize_batch_norm(net, 0)
    return net.eval()


def captured(net: nn.Module, *shape: int) -> optimize.Program:
    return optimize.capture(net.eval(), (torch.rand(2, *shape),))


IMAGES = torch.rand(96, 3, 12, 12, generator=torch.Generator().manual_seed(0))


@functools.cache
def captured_blocks() -> optimize.Program:
    """Return ``blocks`` captured, for passes: they change a copy."""
    torch.manual_seed(0)
    return optimize.capture(blocks(), (IMAGES[:2],))


def shallow(
    net: nn.Module | optimize.Program, ratio: float = 0.5, data: torch.Tensor = IMAGES, **options: Any
) -> optimize.Program:
    """Return a network of fewer layers, made of a module or of a program."""
    program = net if isinstance(net, optimize.Program) else optimize.capture(net, (data[:2],))
    return optimize.ReduceDepth(ratio, calibration=[data], **options).apply(program)[0]


def test_segments_are_modules_with_one_value_in_and_one_out() -> None:
    torch.manual_seed(0)
    found = {segment.where: segment for segment in find_segments(captured(blocks(), 3, 12, 12))}
    assert {"0 to 1", "1", "1.body", "1 to 2", "1 to 3", "2", "2 to 3", "3"} <= found.keys()
    assert not any(where.startswith("0 to 6") for where in found)  # it ends in a vector
    assert [str(form) for form in found["1"].forms] == ["nothing", "a convolution of 1x1", "a convolution of 3x3"]
    assert found["2"].forms[0].stride == (2, 2) and found["1"].forms[1].stride == (1, 1)
    assert found["1"].layers == ("1.body.0", "1.body.3", "1.body.6")


def test_what_reads_two_values_or_gives_two_is_none() -> None:
    class Branched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return self.third(self.second(y).relu()) + y

    found = {segment.where for segment in find_segments(captured(Branched(), 8, 6, 6))}
    assert "first to third" not in found and "first to second" not in found and "second to third" in found


@pytest.mark.parametrize("kernels, stride", [((1, 3), 1), ((3, 1), 2), ((3, 3), 1), ((1, 1), 2)])
def test_what_is_linear_is_found_as_it_is(kernels: tuple[int, int], stride: int) -> None:
    """Inside, where no padding lies between: least squares finds the product of two convolutions."""
    torch.manual_seed(0)
    one, two = kernels
    net = nn.Sequential(
        nn.Conv2d(4, 32, one, padding=one // 2, bias=False), nn.Conv2d(32, 4, two, stride, two // 2, bias=False)
    ).eval()
    data = functional.pad(torch.randn(1024, 4, 8, 8), (4,) * 4)  # zeros at the border: what lies between pads like them
    program = optimize.capture(net, (data[:2],))
    (segment,) = find_segments(program)
    form = max(segment.forms, key=lambda form: form.kernel)
    layer = fit(program, program, [(segment, form)], [[(data,)]], {})[segment, form]
    merged = program.clone()
    merge(merged, (segment, form), layer, {})
    merged.refresh()
    x = functional.pad(torch.randn(3, 4, 8, 8), (4,) * 4)
    want, got = net(x), merged.run([x])[0]
    assert form.kernel == one + two - 1
    assert torch.allclose(want, got, atol=0.02 * float(want.abs().max()))


def test_linear_layers_become_the_product_of_their_matrices() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 4)).double().eval()
    data = torch.randn(4096, 6, dtype=torch.float64)
    program, outcome = optimize.ReduceDepth(0.5, calibration=[data]).apply(optimize.capture(net, (data[:2],)))
    assert [str(rewrite.what) for rewrite in outcome.rewrites] == ["2 layers -> a linear layer"]
    product = net[1].weight @ net[0].weight
    assert torch.allclose(program.graph_module.get_parameter("0.0.weight"), product, atol=0.01)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.ReLU6, nn.Hardswish, nn.SiLU])
def test_the_copy_is_trained_and_made_again_from_its_weights_alone(activation: type[nn.Module]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Block(16, 16), nn.Conv2d(16, 32, 1), activation()).eval()
    program = shallow(net, 0.3)
    thin = optimize.narrow(net, program)
    assert any(isinstance(child, Merged) for child in thin.modules()) and type(thin) is type(net)
    thin.train()(IMAGES[:4]).square().mean().backward()
    torch.optim.SGD(thin.parameters(), 0.1).step()
    state = thin.eval().state_dict()
    torch.manual_seed(1)
    fresh = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Block(16, 16), nn.Conv2d(16, 32, 1), activation()).eval()
    again, told = weights.narrowed(fresh, state)
    assert not weights.fit(again, state, "thin") and "Took layers that stand for several" in told[0]
    assert torch.equal(again.eval()(IMAGES), thin(IMAGES))
    assert optimize.capture(again, (IMAGES[:2],)).stats().macs == program.stats().macs


def test_an_activation_at_the_end_of_a_part_stays() -> None:
    class Ending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Block(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.relu6(self.body(x))

    net = nn.Sequential(Ending(), Ending()).eval()
    data = torch.rand(64, 16, 8, 8)
    thin = optimize.narrow(net, program := shallow(net, 0.4, data))
    assert "hardtanh" in program.stats().ops or "relu6" in program.stats().ops
    merged = [child for child in thin.modules() if isinstance(child, Merged) and child]
    assert merged and all(isinstance(child[-1], nn.ReLU6) for child in merged)


def test_layers_make_up_for_those_before_them() -> None:
    """Fitted one after the other, they lose less than each fitted to the untouched network."""
    torch.manual_seed(0)
    net, x = blocks(), IMAGES[:32]
    program = optimize.capture(net, (IMAGES[:2],))
    segments = {segment.where: segment for segment in find_segments(program)}
    choices = [(segments[where], segments[where].forms[-1]) for where in ("1", "2", "3")]
    alone = program.clone()
    layers, names = fit(program, program, choices, [[(IMAGES,)]], {}), dict[str, str]()
    for choice in choices:
        old, new = merge(alone, choice, layers[choice], names)
        names[old] = new
    alone.refresh()
    together = program.clone()
    apply(program, choices, [[(IMAGES,)]], together)
    together.refresh()
    assert together.stats().macs == alone.stats().macs < program.stats().macs
    want = program.run([x])[0]
    errors = [float((each.run([x])[0] - want).square().mean()) for each in (alone, together)]
    assert errors[1] < errors[0]


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(1, 20), st.floats(0.01, 1.0)),
        min_size=1,
        max_size=8,
    ),
    st.floats(1, 40),
)
def test_the_choice_is_the_best_there_is(segments: list[tuple[int, int, int, float]], wanted: float) -> None:
    """Beside all ways that do not overlap; a step of the count is a four-hundredth of what is wanted."""
    form = Form("none", 1, (1, 1), 1, 1, 0)
    candidates = []
    for place, (first, length, gain, noise) in enumerate(segments):
        segment = Segment((str(place),), "", "", "", first, first + length - 1, 0, 0, (), (form,))
        candidates.append(((segment, form), float(gain), noise))
    known = {choice[0].modules: (gain, noise) for choice, gain, noise in candidates}
    chosen = choose(candidates, wanted)
    for one, other in itertools.pairwise(sorted((segment.first, segment.last) for segment, _ in chosen)):
        assert one[1] < other[0]
    ways = [
        subset
        for count in range(len(candidates) + 1)
        for subset in itertools.combinations(candidates, count)
        if all(
            one[0][0].last < other[0][0].first or other[0][0].last < one[0][0].first
            for one, other in itertools.combinations(subset, 2)
        )
    ]
    slack = len(segments) * wanted / 400
    enough = [sum(noise for *_, noise in way) for way in ways if sum(gain for _, gain, _ in way) >= wanted + slack]
    gain, noise = (sum(known[segment.modules][which] for segment, _ in chosen) for which in (0, 1))
    if enough:
        assert gain >= wanted - slack and noise <= min(enough) + 1e-9
    else:
        assert gain >= min(wanted, max(sum(gain for _, gain, _ in way) for way in ways)) - slack


class Attending(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind()
        return x + self.proj(functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


def test_blocks_of_a_transformer_go_with_their_attention() -> None:
    """Torch takes attention for a call that draws random numbers, and leaves it where nobody reads it."""
    torch.manual_seed(0)
    net, data = nn.Sequential(*(Attending(16) for _ in range(4))).eval(), torch.randn(64, 6, 16)
    thin = shallow(net, 0.4, data)
    assert thin.stats().ops["scaled_dot_product_attention"] == 2 and thin.stats().ops["linear"] <= 6
    x = torch.randn(3, 6, 16)
    assert torch.equal(optimize.narrow(net, thin)(x), thin.run([x])[0])


def test_what_was_asked_goes() -> None:
    program = captured_blocks()
    for of, ratio in (("macs", 0.4), ("params", 0.5)):
        thin, outcome = optimize.ReduceDepth(ratio, of=of, calibration=[IMAGES]).apply(program)  # type: ignore[arg-type]
        stats = (program.stats(), thin.stats())
        left = stats[1].macs / stats[0].macs if of == "macs" else stats[1].parameters / stats[0].parameters
        assert left <= 1 - ratio + 0.01
        assert any("were asked for" in note for note in outcome.notes)


def test_time_is_what_the_layers_take() -> None:
    net = captured_blocks()
    times = dict.fromkeys(("0", *(f"{block}.body.{layer}" for block in (1, 2, 3) for layer in (0, 3, 6)), "6"), 1e-6)
    thin = shallow(net, 0.25, of="time", times=times | {"1.body.3": 1e-4})
    assert not any(node.meta.get("nn_module_stack") and "1.body.3" in node.name for node in thin.graph.nodes)
    assert "1" in {path for node in thin.graph.nodes for paths, _ in node.meta.get("stands_for", ()) for path in paths}
    with pytest.raises(UsageError, match="needs the time of each layer"):
        shallow(net, of="time")


def test_what_is_intact_stays() -> None:
    net = captured_blocks()
    thin = shallow(net, 0.6, intact=("1", "2"))
    names = {name.split(".")[0] for name, _ in thin.graph_module.named_parameters() if ".body." in name}
    assert {"1", "2"} <= names
    with pytest.raises(UsageError, match="intact 'nine': no layer is there"):
        shallow(net, intact=("nine",))


def test_data_is_needed_and_nothing_is_nothing() -> None:
    program = captured_blocks()
    made_up = optimize.data.Samples("made up", lambda: iter(()), synthetic=True)
    with pytest.raises(UsageError, match="fits layers to your data"):
        optimize.ReduceDepth(0.5, calibration=made_up).apply(program)
    for nothing in ([], [torch.full((4, 3, 12, 12), float("nan"))]):
        with pytest.raises(Refused, match=r"no samples|not a number|not finite"):
            optimize.ReduceDepth(0.5, calibration=nothing).apply(program)
    same, outcome = optimize.ReduceDepth(0.0, calibration=[IMAGES]).apply(program)
    assert same is program and not outcome.rewrites
    lstm = nn.LSTM(4, 4, batch_first=True)
    other = captured(lstm, 5, 4)
    same, outcome = optimize.ReduceDepth(0.5, calibration=[torch.rand(8, 5, 4)]).apply(other)
    assert same is other and outcome.notes == ("No segment of the network can be one layer and save something.",)


@functools.cache
def thin() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a network and the state of its copy with a layer for a block."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Block(16, 16)).eval()
    return net, optimize.narrow(net, shallow(net, 0.3)).state_dict()


@pytest.mark.parametrize(
    "change",
    [
        {"1.stands_for": torch.tensor([300, 1])},
        {"1.stands_for": torch.tensor(list(b"conv2d 0x1 relu"), dtype=torch.uint8)},
        {"1.stands_for": torch.tensor(list(b"conv2d 1x1 system"), dtype=torch.uint8)},
        {"1.stands_for": torch.tensor(list(b"conv9d 1x1 relu"), dtype=torch.uint8)},
        {"1.stands_for": torch.tensor(list(b"x" * 500), dtype=torch.uint8)},
        {"nine.stands_for": torch.tensor(list(b"none - -"), dtype=torch.uint8)},
        {"1.0.weight": torch.zeros(16, 16)},
        {"1.0.weight": torch.zeros(16, 16, 2, 2)},
        {"1.0.weight": torch.zeros(16, 16, 1, 1, dtype=torch.int64)},
        {".stands_for": torch.tensor(list(b"none - -"), dtype=torch.uint8)},
    ],
)
def test_weights_that_say_nonsense_are_refused(change: dict[str, torch.Tensor]) -> None:
    net, state = thin()
    assert "1.stands_for" in state
    with pytest.raises(Refused):
        again, _ = weights.narrowed(net, {**state, **change})
        weights.fit(again, {**state, **change}, "thin")


@pytest.mark.parametrize("path", ["graph", "__class__", "class", "0.weight", "_modules.0", ".", "L['self'].training"])
def test_a_layer_has_a_place_wherever_a_file_says_its_modules_lie(path: str) -> None:
    """No module is called as the graph's own parts are, and its weights stand in code by their paths."""
    program = captured(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), 4)
    for node in program.graph.nodes:
        node.meta["nn_module_stack"] = {"0": (path, "Sequential")}
    thin, outcome = optimize.ReduceDepth(0.4, calibration=[torch.rand(64, 4)]).apply(program)
    held = [str(node.target) for node in thin.graph.nodes if node.op == "get_attr"]
    assert (
        outcome.rewrites
        and len(held) == 2
        and all(isinstance(graph.attribute(thin.graph_module, name), nn.Parameter) for name in held)
    )
    assert thin.run([torch.rand(3, 4)])[0].shape == (3, 4)


def test_nothing_in_place_of_a_layer_leaves_its_input_as_it_is() -> None:
    """What comes behind may write to what it gives, as activations do."""
    x = torch.randn(4, 3)
    kept, net = x.clone(), nn.Sequential(Merged("none - -", None), nn.ReLU(inplace=True))
    assert (net(x) >= 0).all() and torch.equal(x, kept)
    program = optimize.capture(net.eval(), (x,))
    assert [node.target for node in program.graph.nodes if node.op == "call_function"] == [graph.aten.relu.default]
