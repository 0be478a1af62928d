"""Laws over every registered pass: a new pass is tested before its author writes a test."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

import optimize
from models import REFERENCES, randomize_batch_norm
from optimize import invariants, registry
from optimize.distances import output_error
from optimize.invariants import EXACT_TOLERANCE
from optimize.passes.base import Exactness, Pass
from optimize.program import Program
from tests import nets, references
from tests.slow import but_slowly

PASSES = sorted(registry.passes())
SUBJECTS = [*REFERENCES, *nets.CASES]
REQUIRED = {"ratio": 0.25}


def build(name: str, program: Program) -> Pass:
    """Make a pass with the program's own inputs for data and small values for required options."""
    cls = registry.find_pass(name)
    fields = {f.name: f.default is f.default_factory is dataclasses.MISSING for f in dataclasses.fields(cls)}
    required = [option for option, is_needed in fields.items() if is_needed or option in REQUIRED]
    channels = program.inputs[0].shape[-1 if program.inputs[0].dtype == torch.uint8 else 1]
    pictures = {"mean": (0.4, 0.5, 0.6)[:channels], "std": (0.2, 0.25, 0.3)[:channels]}
    values = {
        **REQUIRED,
        **pictures,
        "calibration": [program.inputs],
        "train": functools.partial(train_once, inputs=program.inputs),
    }
    return cls(**{option: values[option] for option in required})


def train_once(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Take one step of an optimizer that pulls the outputs towards zero."""
    optimizer = torch.optim.SGD(module.parameters(), 1e-3)
    module(*inputs).square().mean().backward()
    optimizer.step()


def subject(name: str) -> tuple[nn.Module, torch.Tensor]:
    if name in nets.CASES:
        return nets.build(name), torch.randn(2, *nets.INPUT)
    net = REFERENCES[name].build()
    randomize_batch_norm(net, 0)
    return net.eval(), REFERENCES[name].inputs(2)


@functools.cache
def captured(name: str) -> tuple[nn.Module, Program]:
    """Return a network and its program, the same for all passes: none may touch either."""
    torch.manual_seed(0)
    net, x = subject(name)
    return net, optimize.capture(net, (x,))


@pytest.mark.parametrize("subject_name", but_slowly(SUBJECTS, references.SAME))
@pytest.mark.parametrize("pass_name", PASSES)
def test_laws(pass_name: str, subject_name: str) -> None:
    net, program = captured(subject_name)
    entry = build(pass_name, program)
    state = {key: value.clone() for key, value in net.state_dict().items()}
    text, weights = program.text(), [tensor.clone() for tensor in program.graph_module.parameters()]

    changed, outcome = entry.apply(program)

    assert program.text() == text, "the caller's program was touched"
    assert all(torch.equal(a, b) for a, b in zip(weights, program.graph_module.parameters(), strict=True))
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items()), "the module was touched"
    if not outcome.rewrites:
        assert changed is program
        return
    invariants.check(changed)
    changed.export()
    _agree(entry, program, changed)
    again, second = build(pass_name, changed).apply(changed)
    assert not second.rewrites and again is changed, "a second run changed something"


def _agree(entry: Pass, before: Program, after: Program) -> None:
    for batch in (1, 3):
        inputs = before.sample(batch)
        given, same = entry.pair(inputs)
        for want, got in zip(before.run(given), after.run(same), strict=True):
            error, scale = output_error(want, got)
            if entry.exactness is Exactness.EXACT:
                assert error / scale <= EXACT_TOLERANCE[want.dtype]
            elif entry.exactness is Exactness.ROUNDING:
                assert error / scale <= entry.tolerance


@pytest.mark.parametrize("pass_name", PASSES)
def test_a_pass_is_documented(pass_name: str) -> None:
    cls = registry.find_pass(pass_name)
    assert cls.summary().endswith(".")
    assert ("Example:" in (cls.__doc__ or "") and "rewrite" in vars(cls)) or cls.rewrite is not Pass.rewrite
