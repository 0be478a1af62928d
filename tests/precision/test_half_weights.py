"""Weights on the grid of a 16-bit float type with the data in view, of float programs and of those with integers."""

import dataclasses
import functools

import pytest
import torch
from torch import fx, nn

import optimize
from optimize import graph, ops
from optimize.program import Program
from optimize.quantization.batches import FlatBatches
from optimize.quantization.weights import give_back, restore, round_to_half
from tests.nets import Called

HALVES = (torch.float16, torch.bfloat16)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.point = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 16, 1, bias=False)
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.point(self.conv(x).relu()).relu().mean((2, 3)))


def images(count: int, seed: int) -> torch.Tensor:
    """Return images whose channels go together, as real ones do."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    return torch.einsum("nchw,cd->ndhw", torch.rand(count, 4, 8, 8, generator=generator), mixing)


def captured() -> Program:
    """Return ``Net`` captured, nothing of it shared."""
    return _captured().clone()


@functools.cache
def _captured() -> Program:
    torch.manual_seed(0)
    return optimize.capture(Net().eval(), (images(2, 1),))


def rounded(program: Program, dtype: torch.dtype, data: torch.Tensor) -> Program:
    before = round_to_half(program, FlatBatches(program, [data]).first(64), dtype)
    program.refresh()
    return before


def layers(program: Program) -> dict[str, fx.Node]:
    return {graph.origin(node): node for node in graph.calls(program.graph, *ops.WEIGHTED)}


def parameter(program: Program, layer: str, name: str = "weight") -> torch.Tensor | None:
    return graph.constant(program.graph_module, graph.argument(layers(program)[layer], name))


def weight(program: Program, layer: str) -> torch.Tensor:
    found = parameter(program, layer)
    assert found is not None
    return found


def is_held(values: torch.Tensor, dtype: torch.dtype) -> bool:
    return values.dtype is torch.float32 and torch.equal(values.to(dtype).float(), values)


def nearest(program: Program, dtype: torch.dtype) -> Program:
    changed = program.clone()
    with torch.no_grad():
        for name in layers(changed):
            weight(changed, name).copy_(weight(program, name).to(dtype))
    return changed


def state(program: Program) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in program.graph_module.state_dict().items()}


def same(program: Program, values: dict[str, torch.Tensor]) -> bool:
    found = program.graph_module.state_dict()
    return found.keys() == values.keys() and all(torch.equal(found[name], value) for name, value in values.items())


@pytest.mark.parametrize("dtype", HALVES)
def test_weights_are_held_by_the_type_and_answers_move_less_than_by_the_nearest(dtype: torch.dtype) -> None:
    program, data, fresh = captured(), images(64, 2), images(128, 3)
    plain = program.clone()
    before = rounded(program, dtype, data)
    assert before is not None and same(before, state(plain))
    assert all(is_held(weight(program, name), dtype) for name in layers(program))
    assert not all(torch.equal(weight(program, name), weight(nearest(plain, dtype), name)) for name in layers(plain))
    for x, share in ((data, 0.7), (fresh, 0.8)):
        want = plain(x)
        errors = [(other(x) - want).square().mean() for other in (program, nearest(plain, dtype))]
        assert errors[0] < share * errors[1]
    program.check()


def test_the_bias_takes_what_the_mean_of_a_layer_moves_by() -> None:
    data = images(64, 2).mean((2, 3)) + 3
    torch.manual_seed(0)
    program = optimize.capture(nn.Sequential(nn.Linear(4, 32, bias=False)).eval(), (data[:2],))
    plain = program.clone()
    rounded(program, torch.bfloat16, data)
    bias, moved = parameter(program, "0", "bias"), program(data) - plain(data)
    assert bias is not None and moved.std() > 0
    assert moved.mean(0).abs().max() < 1e-6
    assert (nearest(plain, torch.bfloat16)(data) - plain(data)).mean(0).abs().max() > 1e-3


@pytest.mark.parametrize("size, dtype, moves", [(40000, torch.float16, False), (40000, torch.bfloat16, True)])
def test_weights_near_the_types_largest_are_left_alone(size: float, dtype: torch.dtype, moves: bool) -> None:
    program = captured()
    with torch.no_grad():
        weight(program, "conv")[0, 0, 0, 0] = size
    plain = state(program)
    rounded(program, dtype, images(64, 2))
    assert torch.equal(weight(program, "conv"), plain["conv.weight"]) is not moves
    assert torch.equal(program.graph_module.state_dict()["conv.bias"], plain["conv.bias"]) is not moves
    assert is_held(weight(program, "head"), dtype) and weight(program, "conv").isfinite().all()


def test_a_weight_that_two_calls_share_stays_as_it_is() -> None:
    data = images(64, 2).mean((2, 3))
    program = optimize.capture(Called(lambda m, x: m.layer(m.layer(x)), layer=nn.Linear(4, 4)).eval(), (data[:2],))
    plain = state(program)
    rounded(program, torch.bfloat16, data)
    assert same(program, plain)


def quantized() -> Program:
    """Return a program with its convolutions in integers, and the head given back to float; nothing of it shared."""
    program = _quantized()
    assert program.unquantized is not None
    return dataclasses.replace(program.clone(), unquantized=program.unquantized.clone())


@functools.cache
def _quantized() -> Program:
    program = optimize.QuantizeStatic(calibration=[images(64, 2)], spare=0, cpu="vnni").apply(captured())[0]
    return give_back(program, {layers(program)["head"].name: "it is small"})


def step_of(program: Program, layer: str) -> torch.Tensor:
    rows = weight(program, layer).flatten(1).double()
    return rows / rows.abs().amax(1, keepdim=True) * 127


@pytest.mark.parametrize("dtype", HALVES)
def test_integers_keep_their_grid_and_the_float_weights_behind_them_are_rounded(dtype: torch.dtype) -> None:
    data = images(64, 2)
    program = quantized()
    plain, before = state(program), program.unquantized
    assert before is not None
    was = state(before)
    kept = rounded(program, dtype, data)
    for name in ("conv", "point"):
        assert torch.equal(weight(program, name), plain[f"{name}.weight"])
        assert torch.allclose(step_of(program, name), step_of(program, name).round(), atol=1e-4)
        assert not is_held(weight(program, name), dtype)
    assert is_held(weight(program, "head"), dtype) and not torch.equal(weight(program, "head"), was["head.weight"])
    assert program.unquantized is not None and program.unquantized is not before
    assert all(is_held(weight(program.unquantized, name), dtype) for name in layers(program))
    program.unquantized.check()
    close = [program.unquantized(data), nearest(before, dtype)(data)]
    assert (close[0] - before(data)).square().mean() < (close[1] - before(data)).square().mean()
    assert kept is before and same(before, was)


@pytest.mark.parametrize("entry", [optimize.CastFP16, optimize.CastBF16])
def test_a_layer_given_back_after_the_cast_has_weights_of_the_type(entry: type[optimize.CastFP16]) -> None:
    data = images(64, 2)
    program = quantized()
    plain, behind = state(program), program.unquantized
    assert behind is not None
    was = state(behind)
    mixed, _ = entry(calibration=[data], mixed=True).apply(program)
    assert mixed.quantization is not None and mixed.quantization.half is not None
    assert not is_held(weight(mixed, "point"), entry.dtype) and is_held(weight(mixed, "head"), entry.dtype)
    given = give_back(mixed, {layers(mixed)["point"].name: "it errs"})
    assert is_held(weight(given, "point"), entry.dtype)
    assert not torch.equal(weight(given, "point"), was["point.weight"].to(entry.dtype).float())
    assert torch.equal(weight(given, "conv"), plain["conv.weight"])
    assert same(program, plain) and program.unquantized is behind and same(behind, was)
    assert not is_held(weight(mixed, "point"), entry.dtype)


def test_restore_gives_named_layers_what_another_program_holds() -> None:
    program, source = captured(), captured()
    with torch.no_grad():
        for name in layers(source):
            weight(source, name).mul_(2)
    plain = state(program)
    rounded(program, torch.bfloat16, images(64, 2))
    assert "point.bias" in state(program)  # what the mean moves by is beside the weight
    held = weight(program, "head").clone()
    restore(program, {layers(program)[name].name for name in ("conv", "point")} | {"no_such_layer"}, source)
    assert torch.equal(weight(program, "conv"), 2 * plain["conv.weight"])
    assert torch.equal(weight(program, "point"), 2 * plain["point.weight"])
    assert parameter(program, "point", "bias") is None and torch.equal(weight(program, "head"), held)
