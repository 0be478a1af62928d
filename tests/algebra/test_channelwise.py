from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import optimize
from models import randomize_batch_norm
from optimize.algebra import channelwise
from optimize.program import tensor_value
from tests.nets import Called

CHANNEL = torch.linspace(-1, 2, 4, dtype=torch.float64).reshape(4, 1, 1)


def with_constant(function: Callable[[Tensor, Tensor], Tensor], constant: Tensor = CHANNEL) -> nn.Module:
    """Return a module that calls a function of a constant and a value."""
    return Called(lambda module, x: function(module.constant, x), constant=constant.clone())


def read(net: nn.Module, x: Tensor) -> tuple[channelwise.Channelwise | None, optimize.Program]:
    program = optimize.capture(net.eval(), (x,))
    return channelwise.read(program.graph_module, program.outputs[0]), program


X = torch.randn(2, 4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
CHANNELWISE = {
    "mul": lambda c, x: x * c,
    "mul reversed": lambda c, x: c * x,
    "div": lambda c, x: x / (c + 3),
    "add with alpha": lambda c, x: torch.add(x, c, alpha=3),
    "constant plus alpha times value": lambda c, x: torch.add(c, x, alpha=3),
    "sub": lambda c, x: x - c,
    "sub reversed": lambda c, x: c - x,
    "rsub with alpha": lambda c, x: torch.rsub(x, c, alpha=2),
    "number": lambda c, x: 1 - x,
    "number with alpha": lambda c, x: torch.rsub(x, 2.0, alpha=0.5),
    "neg": lambda c, x: -x,
}


@pytest.mark.parametrize("name", CHANNELWISE)
def test_what_is_read_is_what_is_computed(name: str) -> None:
    operator, program = read(with_constant(CHANNELWISE[name]), X)
    assert operator is not None and operator.axis in (None, 1)
    scale, shift = operator.along(1) or (None, None)
    assert scale is not None and shift is not None and scale.shape == (4,)
    found = scale.reshape(4, 1, 1) * X + shift.reshape(4, 1, 1)
    assert torch.allclose(found, program(X), rtol=0, atol=1e-14)


def test_batch_norm() -> None:
    net = nn.Sequential(nn.BatchNorm2d(4)).double()
    randomize_batch_norm(net, 0)
    operator, program = read(net, X)
    assert operator is not None and operator.axis == 1
    found = operator.scale.reshape(4, 1, 1) * X + operator.shift.reshape(4, 1, 1)
    assert torch.allclose(found, program(X), rtol=0, atol=1e-13)


NOT_CHANNELWISE = {
    "two axes": (lambda c, x: x * c, torch.ones(4, 5, 1)),
    "the constant makes the value larger": (lambda c, x: x[:, :1] * c, CHANNEL),
    "the constant has another dtype": (lambda c, x: x.float() * c, CHANNEL),
    "a quotient by the value": (lambda c, x: c / x, CHANNEL),
    "a quotient rounded": (lambda c, x: torch.div(x, c, rounding_mode="floor"), CHANNEL),
    "two values": (lambda c, x: x * x, CHANNEL),
}


@pytest.mark.parametrize("name", NOT_CHANNELWISE)
def test_what_is_something_else_is_not_read(name: str) -> None:
    function, constant = NOT_CHANNELWISE[name]
    assert read(with_constant(function, constant.double()), X)[0] is None


def test_numbers_along_another_axis_are_not_channels() -> None:
    operator, _ = read(with_constant(lambda c, x: x * c, torch.arange(6.0).double()), X)
    assert operator is not None and operator.axis == 3
    assert operator.along(1) is None and tensor_value(operator.source).shape[3] == 6
