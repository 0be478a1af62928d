from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import optimize
from models import REFERENCES, randomize_batch_norm
from optimize import graph
from optimize.errors import UsageError, VerificationFailed
from optimize.graph import aten
from optimize.passes.base import Exactness, Outcome, Pass, Rewrite
from optimize.program import Program


def small() -> Program:
    return optimize.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), (torch.randn(2, 4),))


@dataclass(frozen=True)
class Negate(Pass):
    """Claims to be exact and is wrong."""

    exactness: ClassVar[Exactness] = Exactness.EXACT

    def rewrite(self, program: Program) -> Outcome:
        for node in graph.calls(program.graph, aten.relu.default):
            node.target = aten.neg.default
        return Outcome((Rewrite("1", "relu to neg"),))


@dataclass(frozen=True)
class Corrupt(Pass):
    """Leaves a call that is not ATen."""

    def rewrite(self, program: Program) -> Outcome:
        for node in graph.calls(program.graph, aten.relu.default):
            node.target = torch.relu
        return Outcome((Rewrite("1", "relu to torch.relu"),))


def test_a_wrong_pass_is_stopped_by_name() -> None:
    with pytest.raises(VerificationFailed, match="Negate: the outputs differ"):
        optimize.Pipeline([Negate()]).run(small())
    with pytest.raises(VerificationFailed, match="Corrupt: Invariant 'node_kinds'"):
        optimize.Pipeline([Corrupt()]).run(small())


def test_a_wrong_order_is_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match=r"FuseConvBN .* cannot run after CastFP16"):
        optimize.Pipeline([optimize.CastFP16(), optimize.FuseConvBN()])


def test_a_step_records_what_was_done() -> None:
    net = REFERENCES["repvgg"].build()
    randomize_batch_norm(net, 0)
    program = optimize.capture(net.eval(), (REFERENCES["repvgg"].inputs(2),))
    trace = optimize.Pipeline([optimize.FuseConvBN(), optimize.Reparameterize()]).run(program)
    fuse, merge = trace.steps
    assert fuse.before.ops["batch_norm"] > fuse.after.ops["batch_norm"]
    assert merge.after.ops["conv2d"] < merge.before.ops["conv2d"]
    assert merge.after.macs < merge.before.macs
    assert 0 <= merge.relative_error < 1e-5
    assert trace.program.source is None and program.source is not None


def test_a_pass_without_a_match_returns_the_same_program() -> None:
    program = small()
    trace = optimize.Pipeline([optimize.FuseConvBN(), optimize.Reparameterize()]).run(program)
    assert trace.program is program
    assert trace.steps[0].max_error is None
