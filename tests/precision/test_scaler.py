import pytest
import torch
from torch import nn

from optimize.errors import Refused
from optimize.precision.scaler import LossScaler


def net(gradient: float) -> tuple[nn.Linear, torch.optim.Optimizer]:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    layer.weight.grad = torch.full((1, 1), gradient)
    return layer, torch.optim.SGD(layer.parameters(), 1.0)


def steps(scaler: LossScaler, gradients: list[float]) -> list[tuple[bool, float]]:
    """Return, of each gradient in turn, whether the step was made and the scale after it."""
    found = []
    for gradient in gradients:
        layer, optimizer = net(gradient)
        found.append((scaler.step(optimizer, layer.named_parameters()), scaler.scale))
    return found


def test_it_starts_halves_and_doubles_as_apex_does() -> None:
    scaler = LossScaler()
    assert scaler.scale == 2.0**16
    assert steps(scaler, [float("inf"), float("nan")]) == [(False, 2.0**15), (False, 2.0**14)]
    assert {made for made, _ in steps(scaler, [1.0] * 1999)} == {True} and scaler.scale == 2.0**14
    assert steps(scaler, [1.0]) == [(True, 2.0**15)]
    assert (scaler.good, scaler.skipped) == (0, 2)


def test_an_overflow_starts_the_count_anew() -> None:
    scaler = LossScaler(interval=3)
    found = steps(scaler, [1.0, 1.0, float("inf"), 1.0, 1.0, 1.0])
    assert [scale for _, scale in found] == [2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**15, 2.0**16]


def test_it_stops_growing_at_the_largest() -> None:
    scaler = LossScaler(scale=2.0**23, interval=1)
    assert [scale for _, scale in steps(scaler, [1.0] * 3)] == [2.0**24] * 3


def test_a_skipped_step_leaves_the_weights_and_a_good_one_sees_the_plain_gradient() -> None:
    scaler = LossScaler(scale=4.0)
    layer, optimizer = net(float("inf"))
    assert not scaler.step(optimizer, layer.named_parameters()) and layer.weight.item() == 1.0
    layer, optimizer = net(1.0)
    assert scaler.step(optimizer, layer.named_parameters()) and layer.weight.item() == 0.5


def test_the_first_parameter_that_overflows_is_named_at_the_floor() -> None:
    scaler = LossScaler(scale=2.0)
    assert steps(scaler, [float("nan")]) == [(False, 1.0)]
    module = nn.ModuleDict({"first": nn.Linear(1, 1), "second": nn.Linear(1, 1)})
    for name, parameter in module.named_parameters():
        parameter.grad = torch.full_like(parameter, float("nan") if "second" in name else 1.0)
    with pytest.raises(Refused, match=r"'second.weight' is not finite even at a loss scale of 1"):
        scaler.step(torch.optim.SGD(module.parameters(), 1.0), module.named_parameters())


def test_a_half_loss_is_scaled_in_float32() -> None:
    scaled = LossScaler().scaled(torch.tensor(2.0, dtype=torch.float16))
    assert scaled.dtype is torch.float32 and scaled.item() == 2.0**17


def test_small_gradients_survive_in_float16_with_it() -> None:
    weight = nn.Parameter(torch.tensor(1.0, dtype=torch.float16))
    (weight * 1e-8).backward()
    assert weight.grad is not None and weight.grad.item() == 0.0
    weight.grad = None
    LossScaler().scaled(weight.float() * 1e-8).backward()
    assert weight.grad is not None and weight.grad.item() / 2.0**16 == pytest.approx(1e-8, rel=1e-2)
