import functools
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

import optimize
from models import randomize_batch_norm
from optimize import graph
from optimize.errors import Refused, UsageError, VerificationFailed
from optimize.graph import aten
from optimize.passes.base import Exactness, Outcome, Pass, Rewrite
from optimize.program import Program
from optimize.recipe import read
from tests import references


def small() -> Program:
    """Return a small network captured, nothing of it shared."""
    return _small().clone()


@functools.cache
def _small() -> Program:
    return optimize.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), (torch.randn(2, 4),))


MISTAKES = {
    "a pass without parentheses": (lambda: optimize.Pipeline([optimize.FuseConvBN]), "FuseConvBN()"),
    "a module for a program": (lambda: optimize.Pipeline([]).run(nn.ReLU()), "optimize.capture"),
    "a trace for a program": (
        lambda: optimize.export(optimize.Pipeline([]).run(small()), "onnx", "net.onnx"),
        "trace.program",
    ),
    "a path for a module": (lambda: optimize.capture("net.pth"), "load its weights"),
    "a module alone": (lambda: optimize.capture(nn.ReLU()), "optimize.capture(module, (x,))"),
    "a pass without parentheses in a run": (
        lambda: optimize.optimize(nn.ReLU(), passes=[optimize.FuseConvBN]),  # type: ignore[list-item]
        "[FuseConvBN()]",
    ),
    "a pass for a list": (
        lambda: optimize.optimize(nn.ReLU(), passes=optimize.Reparameterize()),  # type: ignore[arg-type]
        "[Reparameterize()]",
    ),
    "the name of a pass": (
        lambda: optimize.optimize(nn.ReLU(), passes=["Reparameterize"]),  # type: ignore[list-item]
        "[Reparameterize()]",
    ),
    "a misspelt name of a pass": (lambda: optimize.Pipeline("FuseConBN"), "Did you mean 'FuseConvBN'?"),
    "a misspelt option": (
        lambda: optimize.QuantizeStatic(calibraton=[]),  # type: ignore[call-arg]
        "Did you mean 'calibration'?",
    ),
    "an option's beginning": (lambda: optimize.QuantizeStatic(calib=[]), "Did you mean 'calibration'?"),  # type: ignore[call-arg]
    "a pass without its data": (lambda: optimize.QuantizeStatic(), "Known: alike, bits, cache, calibration"),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_given_in_place_of_another_is_named_with_the_mend(name: str) -> None:
    call, mend = MISTAKES[name]
    told = "is wanted, not |needs example inputs|no pass 'FuseConBN'|no option 'calib(raton)?'|argument: 'calibration'"
    with pytest.raises(optimize.UsageError, match=told) as refused:
        call()
    assert mend in refused.value.hint


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


@dataclass(frozen=True)
class Unlisted(Pass):
    """Rounds weights, and says so where it is told to."""

    exactness: ClassVar[Exactness] = Exactness.LOSSY
    told: bool = False

    def rewrite(self, program: Program) -> Outcome:
        weight = program.graph_module.get_parameter(next(iter(dict(program.graph_module.named_parameters()))))
        weight.data = weight.data.half().float()
        return Outcome((Rewrite("0", "weight rounded"),) if self.told else (), notes=("in halves",))


@dataclass(frozen=True)
class Silent(Pass):
    """Says nothing of what it did."""

    def rewrite(self, program: Program) -> Outcome:
        return None  # type: ignore[return-value]


def test_a_change_that_is_not_listed_is_refused_and_not_called_none() -> None:
    program = small()
    with pytest.raises(Refused, match=r"Unlisted of the package 'tests' changed the program, and its Outcome lists no"):
        optimize.Pipeline([Unlisted()]).run(program)
    assert optimize.Pipeline([Unlisted(told=True)]).run(program).program.applied
    with pytest.raises(Refused, match="returned a NoneType"):
        optimize.Pipeline([Silent()]).run(program)


def test_a_lossy_pass_that_is_not_registered_is_not_judged_on_noise_and_its_module_is_told(tmp_path: Path) -> None:
    passes = [optimize.FuseConvBN(), Unlisted(told=True)]
    report = optimize.optimize(nn.Linear(4, 4), (torch.rand(2, 4),), passes=passes, out=tmp_path)
    assert report.rows[0].agreement is not None and not report.rows[0].agreement.judged
    assert "in halves" in report.warnings and not any("no file of it" in warning for warning in report.warnings)
    assert [step.origin for step in report.trace] == ["", f"the module {__name__}"]
    text = (tmp_path / "recipe.yaml").read_text()
    assert f"# Unlisted is of the module {__name__}." in text and f"- {__name__}:Unlisted" in text
    assert [type(entry.build(None)) for entry in read(tmp_path / "recipe.yaml", trust=True).passes][1] is Unlisted


def test_a_wrong_pass_is_stopped_by_name() -> None:
    with pytest.raises(VerificationFailed, match="Negate: the outputs differ") as told:
        optimize.Pipeline([Negate()]).run(small())
    assert told.value.hint.startswith("It declares Exactness.EXACT: ")  # its author reads that, not ours
    with pytest.raises(VerificationFailed, match="Corrupt: Invariant 'node_kinds'"):
        optimize.Pipeline([Corrupt()]).run(small())


class Cancelling(nn.Module):
    """Tells rounding ten thousandfold, as deep networks do: most of what it adds up it takes away again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.large = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
        nn.init.constant_(self.large.bias, 1e4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(self.norm(self.conv(x))) - 1e4


def test_an_exact_pass_may_round_as_much_as_the_network_itself_does() -> None:
    torch.manual_seed(0)
    net = Cancelling().eval()
    randomize_batch_norm(net, seed=0)
    program = optimize.capture(net, (torch.randn(2, 3, 8, 8),))
    (step,) = optimize.Pipeline([optimize.FuseConvBN()]).run(program).steps
    assert step.relative_error is not None and 2e-5 < step.relative_error < 1e-2
    with pytest.raises(VerificationFailed, match="Drop: the outputs differ by"):
        optimize.Pipeline([Drop()]).run(program)


@dataclass(frozen=True)
class Drop(Pass):
    """Says to be exact, and moves a kernel by a tenth."""

    exactness: ClassVar[Exactness] = Exactness.EXACT

    def rewrite(self, program: Program) -> Outcome:
        program.graph_module.get_parameter("conv.weight").data.mul_(1.1)
        return Outcome((Rewrite("conv", "moved"),))


@dataclass(frozen=True)
class Shrink(Pass):
    """Rounds by more than it states."""

    exactness: ClassVar[Exactness] = Exactness.ROUNDING
    tolerance: ClassVar[float] = 1e-3
    remedy: ClassVar[str] = "Leave it out."
    factor: float = 0.5

    def rewrite(self, program: Program) -> Outcome:
        node = next(iter(graph.calls(program.graph, aten.relu.default)))
        with program.graph.inserting_after(node):
            scaled = program.graph.call_function(aten.mul.Tensor, (node, self.factor))
        node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
        return Outcome((Rewrite("1", "scaled"),))


def test_what_a_rounding_pass_costs_beyond_its_statement_is_a_warning() -> None:
    step = optimize.Pipeline([Shrink()]).run(small()).steps[0]
    assert step.relative_error == pytest.approx(0.5, rel=1e-3)
    assert "Shrink moves the outputs by 5.0e-01 of the largest" in step.warning
    assert "the 1e-03 it usually stays within" in step.warning and step.warning.endswith("Leave it out.")
    assert optimize.Pipeline([Shrink(factor=0.9999)]).run(small()).steps[0].warning == ""


def test_an_output_that_is_no_longer_finite_stops_a_rounding_pass_too() -> None:
    with pytest.raises(VerificationFailed, match="Shrink: an output is no longer finite"):
        optimize.Pipeline([Shrink(factor=float("inf"))]).run(small())


def test_a_wrong_order_is_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match=r"FuseConvBN .* cannot run after CastFP16"):
        optimize.Pipeline([optimize.CastFP16(), optimize.FuseConvBN()])


def test_a_step_records_what_was_done() -> None:
    program = references.captured("repvgg", 0)
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


def test_an_error_in_somebody_elses_pass_is_told_as_the_passs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is none of this package's defects: its package, line and words are named, and the exit code is 1."""
    raised = KeyError("axis")

    def rewrite(self: Pass, program: Program) -> Outcome:
        raise raised

    monkeypatch.setattr(Negate, "rewrite", rewrite)
    with pytest.raises(Refused) as told:
        optimize.Pipeline([Negate()]).run(small())
    assert told.value.what.startswith(f"The pass Negate of the package 'tests' failed in {__name__}, line ")
    assert told.value.what.endswith("KeyError: 'axis'.")
    assert told.value.exit_code == 1 and told.value.__cause__ is raised
    monkeypatch.setattr(Negate, "__module__", "optimize.passes.negate")
    with pytest.raises(KeyError):
        optimize.Pipeline([Negate()]).run(small())
