"""The TorchScript target in float: exact, and at home in a process that knows nothing but torch."""

from collections.abc import Callable
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from models import REFERENCES
from optimize.errors import Refused
from optimize.graph import aten
from optimize.passes.cast_half import CastBF16, CastFP16
from optimize.registry import find_target
from optimize.scripting import compile_graph
from optimize.targets.torchscript import _of_chance
from tests import references
from tests.targets.scripted import TARGET, captured, draw, seeded

# Laws on the reference networks


@pytest.mark.parametrize("name", REFERENCES)
def test_compilation_is_exact_and_keeps_the_state_dict_keys(name: str) -> None:
    program = references.captured(name)
    compiled = compile_graph(program.graph_module)
    assert set(compiled.state_dict()) == set(program.graph_module.state_dict())
    for batch in (1, 2, 5):
        x = REFERENCES[name].inputs(batch, seed=batch)
        with torch.inference_mode():
            torch.testing.assert_close(compiled(x), program(x), rtol=0, atol=0)


def test_a_file_of_a_fixed_batch_refuses_others(tmp_path: Path) -> None:
    def thirds(net: Any, x: Tensor) -> Tensor:
        first, second, third = x.chunk(3)
        return first * second * third

    loaded = torch.jit.load(TARGET.export(captured(thirds, (4,)), tmp_path / "net.pt").path)
    assert loaded(torch.ones(3, 4)).shape == (1, 4)
    with pytest.raises(torch.jit.Error, match="The first size of input 'x' must be 3"):
        loaded(torch.ones(6, 4))


def test_compilation_shares_the_weights() -> None:
    program = captured(lambda net, x: net.first(x) + net.second(x), (4,), first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    compiled = compile_graph(program.graph_module)
    theirs = {tensor.data_ptr() for tensor in program.graph_module.parameters()}
    assert {tensor.data_ptr() for tensor in compiled.parameters()} == theirs


# What TorchScript must be able to say


def _tied(net: Any, x: Tensor) -> Tensor:
    return net.layer(net.layer(x))


NETWORKS: dict[str, tuple[Callable[..., Any], tuple[int, ...], dict[str, Any]]] = {
    "conv1d same": (lambda net, x: net.f(x), (3, 16), {"f": lambda: nn.Conv1d(3, 4, 4, padding="same")}),
    "conv3d": (lambda net, x: net.f(x), (4, 4, 5, 5), {"f": lambda: nn.Conv3d(4, 6, 3, 2, 1, groups=2, bias=False)}),
    "transposed": (lambda net, x: net.f(x), (3, 8, 8), {"f": lambda: nn.ConvTranspose2d(3, 4, 3, 2, 1, 1)}),
    "lstm": (lambda net, x: net.f(x), (5, 3), {"f": lambda: nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True)}),
    "gru": (lambda net, x: net.f(x), (5, 3), {"f": lambda: nn.GRU(3, 4, 2, batch_first=True)}),
    "layer norm": (lambda net, x: net.f(x), (5, 8), {"f": lambda: nn.LayerNorm(8)}),
    "group norm": (lambda net, x: net.f(x), (8, 4, 4), {"f": lambda: nn.GroupNorm(2, 8)}),
    "encoder": (lambda net, x: net.f(x), (5, 8), {"f": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)}),
    "causal": (lambda net, x: F.scaled_dot_product_attention(x, x, x, is_causal=True), (2, 5, 8), {}),
    "embedding": (lambda net, x: net.f((x > 0).long()).mean(1), (6,), {"f": lambda: nn.Embedding(2, 4)}),
    "tied": (_tied, (4,), {"layer": lambda: nn.Linear(4, 4)}),
    "pools": (
        lambda net, x: (F.adaptive_avg_pool2d(x, (3, 2)), F.adaptive_max_pool2d(x, 2), F.max_pool2d(x, 2)),
        (3, 7, 7),
        {},
    ),
    "indices": (lambda net, x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), (3, 8, 8), {}),
    **{
        f"pad {mode}": (lambda net, x, mode=mode: F.pad(x, (1, 2, 2, 1), mode=mode), (3, 7, 7), {})
        for mode in ("constant", "reflect", "replicate", "circular")
    },
    "slices": (lambda net, x: x[:, 1:, ::2, -3:] + x[:, :1, ::2, :3], (3, 8, 8), {}),
    "gathers": (lambda net, x: x[:, :, torch.tensor([0, 2]), None], (3, 8, 8), {}),
    "lists": (
        lambda net, x: (torch.cat(x.split(1, 1)[::-1], 1), x.chunk(2, -1)[1], torch.stack(x.unbind(1))),
        (3, 8),
        {},
    ),
    "einsum": (lambda net, x: torch.einsum("bchw,bdhw->bcd", x, x), (3, 8, 8), {}),
    "infinity": (lambda net, x: x.masked_fill(x > 0, float("-inf")).softmax(-1), (3, 8), {}),
    "sizes": (lambda net, x: x.reshape(x.shape[0] * 3, -1) + torch.arange(x.shape[0] * 3)[:, None], (3, 8), {}),
    "size arithmetic": (lambda net, x: x.new_zeros(x.shape[0] // 2 + 1, 2) + x.sum() / x.shape[0], (3, 8), {}),
    "scalar": (lambda net, x: x.sum().reshape(()) + x, (3, 8), {}),
    "device": (lambda net, x: torch.zeros(x.shape[0], 3, dtype=torch.float32, device=x.device) + x, (3,), {}),
    "resize": (
        lambda net, x: (F.interpolate(x, scale_factor=2.0), F.interpolate(x, size=(5, 9), mode="bilinear")),
        (3, 8, 8),
        {},
    ),
    "truth": (
        lambda net, x: (~((x > 0) ^ True), ~torch.where(x > 0, True, False), (x > 0) + True, torch.full((2,), True)),
        (6,),
        {},
    ),
    "integers": (lambda net, x: {"class": x.argmax(1), "positive": x > 0}, (6,), {}),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_compilation_is_exact_on(name: str) -> None:
    function, shape, factories = NETWORKS[name]
    program = captured(function, shape, **{key: seeded(factory) for key, factory in factories.items()})
    compiled = compile_graph(program.graph_module)
    for batch in (1, 2, 5, 2):
        x = draw(batch, *shape, seed=batch)
        with torch.inference_mode():
            answer = compiled(x)
        answer = (answer,) if isinstance(answer, Tensor) else answer
        torch.testing.assert_close(answer, program.run((x,)), rtol=0, atol=0)


def test_an_operator_that_python_defines_is_refused_by_name() -> None:
    @torch.library.custom_op("optimize_tests::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    program = captured(lambda net, x: twice(x), (4,))
    with pytest.raises(Refused, match=r"optimize_tests\.twice.*'twice'"):
        compile_graph(program.graph_module)


def test_a_refusal_names_the_operator_and_the_layer() -> None:
    broken = fx.Graph()
    x = broken.placeholder("x")
    call = broken.call_function(aten.relu.default, ([x, x],))
    call.meta["nn_module_stack"] = {"": ("body.activation", nn.ReLU)}
    broken.output((call,))
    with pytest.raises(Refused, match=r"cannot express relu of 'body\.activation'"):
        compile_graph(fx.GraphModule({}, broken))


# The file


def test_the_file_is_described_and_answers_in_kind(tmp_path: Path) -> None:
    program = captured(lambda net, x: {"a": net.f(x), "b": x}, (4,), f=seeded(nn.Linear, 4, 2))
    first = TARGET.export(program, tmp_path / "first.torchscript.pt")
    assert first.path.name.encode() not in first.path.read_bytes()
    assert first.inputs[0].shape == ("batch", 4)
    assert [spec.shape for spec in first.outputs] == [("batch", 2), ("batch", 4)]
    assert first.versions == {"torch": metadata.version("torch")}
    x = draw(5, 4)
    answer = first.load(threads=1)(x)
    torch.testing.assert_close(answer, program(x), rtol=0, atol=0)
    arrays = first.load()(x.numpy())
    assert isinstance(arrays["a"], np.ndarray)


def test_the_compilation_that_was_verified_is_what_is_saved(tmp_path: Path) -> None:
    program = captured(lambda net, x: x + 1, (4,))
    program.compiled = compile_graph(captured(lambda net, x: x + 2, (4,)).graph_module)
    x = draw(2, 4)
    torch.testing.assert_close(TARGET.export(program, tmp_path / "net.pt").load()(x), x + 2)


@pytest.mark.parametrize(("step", "name"), [(CastFP16(), "float16"), (CastBF16(), "bfloat16")])
def test_half_precision_is_saved_as_it_comes(step: Any, name: str, tmp_path: Path) -> None:
    program, _ = step.apply(references.folded("resnet"))
    artifact = TARGET.export(program, tmp_path / "net.pt")
    assert artifact.precision == program.precision == name
    x = REFERENCES["resnet"].inputs(5)
    torch.testing.assert_close(artifact.load()(x), program(x), rtol=0, atol=0)


def reads(x: Tensor) -> Tensor:
    return x + torch.empty(list(x.shape))


def reads_a_row(x: Tensor) -> Tensor:
    known = torch.empty([8, x.size(0)])
    answer = x.tanh() if bool((known[1:] == x).all()) else x.relu()
    known.copy_(answer)
    return answer


def reads_what_grew(x: Tensor) -> Tensor:
    known = torch.zeros(0)
    known.resize_(x.shape)
    return known + x


def fills_what_grew(x: Tensor) -> Tensor:
    known = x.tanh()
    if x.size(0) > 4:
        known.resize_(x.shape)
    known.zero_()
    return known + x


def reads_what_is_spread(x: Tensor) -> Tensor:
    return x + torch.empty_strided([4], [0])


def fills_a_row(x: Tensor) -> Tensor:
    known = torch.empty_like(x)
    known[0] = x[0]
    return known + x


def gives(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def fills(x: Tensor) -> Tensor:
    made, ones = torch.empty_like(x), torch.empty(x.size(0)).fill_(1.0)
    if x.size(0) > 4:
        made.zero_()
    else:
        made.copy_(x)
    return x.to(made.dtype) + made + ones


def fills_at_times(x: Tensor) -> Tensor:
    made = torch.empty_like(x)
    if x.size(0) > 1000:
        made.zero_()
    return made + x


def fills_the_other(x: Tensor) -> Tensor:
    made = torch.empty_like(x)
    if x.size(0) > 1000:
        made.zero_()
        x = x + made
    else:
        x = x - made
    return x


def fills_in_turns(x: Tensor) -> Tensor:
    made = torch.empty_like(x)
    for _ in range(x.size(0)):
        made.copy_(x)
        x = x + made
    return x


def grows(x: Tensor) -> Tensor:
    made = torch.empty([64])
    torch.add(x[0], x[0], out=made)
    return made.as_strided([64], [1])


def cats(x: Tensor) -> Tensor:
    return torch.cat([torch.empty(0), x])


@pytest.mark.parametrize(
    ("function", "named", "is_stateful"),
    [
        (reads, {"aten::empty"}, True),
        (reads_a_row, {"aten::empty"}, True),
        (reads_what_grew, {"aten::resize_"}, True),
        (reads_what_is_spread, {"aten::empty_strided"}, True),
        (fills_a_row, {"aten::empty_like"}, False),
        (gives, {"aten::new_empty"}, False),
        (fills, set(), False),
        (fills_at_times, {"aten::empty_like"}, True),
        (fills_the_other, {"aten::empty_like"}, True),
        (fills_what_grew, set(), False),
        (fills_in_turns, set(), False),
        (grows, {"aten::empty"}, False),
        (cats, set(), False),
    ],
)
def test_memory_that_nobody_cleared_is_a_state(
    function: Callable[[Tensor], Tensor], named: set[str], is_stateful: bool
) -> None:
    """It holds what the run before has left there: a file found its last answers, and was the faster one."""

    class Network(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    assert _of_chance(torch.jit.script(Network().eval())) == (named, [], is_stateful)


class Recorded(nn.Module):
    """Answers with zeros where gradients are recorded, as they are in a plain call."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0 if torch.is_grad_enabled() else x * 2


class Attending(nn.Module):
    """Asks the same, to choose between two roads to one answer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize(("net", "is_refused"), [(Recorded, True), (Attending, False)])
def test_a_file_answers_alike_whether_gradients_are_recorded(
    net: type[nn.Module], is_refused: bool, tmp_path: Path
) -> None:
    torch.jit.script(net().eval()).save(str(tmp_path / "net.pt"))
    target = find_target("torchscript")
    runner, x = target.load(target.open(tmp_path / "net.pt", trust=True)), np.ones((2, 3, 8), np.float32)
    with pytest.raises(Refused, match="where gradients are recorded") if is_refused else nullcontext():
        assert np.array_equal(runner.answer([x])[0], runner.run([x])[0])


def test_where_torch_is_told_not_to_compile_that_is_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = captured(lambda _, x: x.relu(), (3,))
    monkeypatch.setattr(torch.jit._state._enabled, "enabled", False)  # what PYTORCH_JIT=0 does
    with pytest.raises(Refused, match="PYTORCH_JIT=0"):
        TARGET.export(program, tmp_path / "model.pt")
