"""Every rule has a net that it speaks up for and one that it is silent on."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

import models
import optimize
from optimize.advise import advise, registered
from optimize.advise.base import Host, Setting, compare_runs
from optimize.advise.guidelines import convolutions, joins
from optimize.advise.structure import without_biases
from optimize.measure import lockstep, worker
from optimize.measure.latency import Latency
from optimize.program import Program
from tests.advise.nets import UNITS, MobileNetV2, Residual, captured, conv
from tests.profile.nets import LIMITS

CPU = Host(cpu_flags=("avx512_bf16", "avx512_vnni"), cores=4, cuda=False)
PLAIN = Host(cpu_flags=("avx2",), cores=1, cuda=False)
GPU = Host(cpu_flags=(), cores=1, cuda=True)
RULES = {rule.name: rule for rule in registered()}


def case(program: Program, host: Host = PLAIN, **given: object) -> Setting:
    return Setting(program, LIMITS, host, **given)  # type: ignore[arg-type]


def guidelines(program: Program) -> set[str]:
    return {name[:2] for name, rule in RULES.items() if name.startswith("G") and rule.look(case(program))}


@pytest.mark.parametrize(
    ("unit", "flagged"),
    [
        ("mobilenet_v2", {"G1", "G4"}),
        ("shufflenet_v1", {"G2", "G4"}),
        ("nasnet", {"G3"}),
        ("shufflenet_v2", set()),
    ],
)
def test_the_guidelines_flag_what_the_paper_says_of_each_network(unit: str, flagged: set[str]) -> None:
    found = guidelines(UNITS[unit]())
    assert flagged <= found and (flagged or not found)


def test_the_worst_place_comes_first_with_its_figures() -> None:
    found = RULES["G1 equal widths"].look(case(UNITS["mobilenet_v2"]()))
    assert found is not None and len(found.places) == 4 and found.places[0] == "blocks.0.0.0"
    assert "24 to 144" in found.what and "1.41 times" in found.what
    groups = RULES["G2 few groups"].look(case(UNITS["shufflenet_v1"]()))
    assert groups is not None and groups.places == ("reduce.0", "expand.0") and groups.saved_s > 0  # type: ignore[operator]


def test_parallel_branches_are_counted_and_a_chain_of_residuals_is_none() -> None:
    assert max(count for _, count in joins(UNITS["nasnet"]())) == 4
    assert max(count for _, count in joins(captured(MobileNetV2(), 24, 14, 14))) <= 2
    assert max(count for _, count in joins(UNITS["shufflenet_v2"]())) == 1


def test_sizes_of_convolutions() -> None:
    (first, *_) = [conv for _, conv in convolutions(case(UNITS["shufflenet_v1"](), batch=2))]
    assert (first.hw, first.c1, first.c2, first.groups, first.kernel) == (2 * 28 * 28, 96, 24, 4, 1)
    assert first.macs == 2 * 28 * 28 * 96 * 24 // 4


class Biased(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, bias=bias), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).relu()


def normed(*, bias: bool) -> Program:
    return captured(Biased(bias), 3, 8, 8)


def _repvgg() -> Program:
    reference = models.REFERENCES["repvgg"]
    return optimize.capture(reference.build(), (reference.inputs(),))


def _warm(program: Program, first_s: float) -> Setting:
    return case(program, startup=Latency(0.01, None, 0.01, 0.01, (0.01,), first_s, 1.0, 1, 1))


PLAIN_NET = captured(Residual(chain=False), 3, 12, 12)
BOTTLENECKS = UNITS["mobilenet_v2"]()
TRIGGERS = {
    "bias before BatchNorm": (lambda: case(normed(bias=True)), lambda: case(normed(bias=False))),
    "unmerged branches": (lambda: case(_repvgg()), lambda: case(PLAIN_NET)),
    "BatchNorm not folded": (lambda: case(normed(bias=False)), lambda: case(PLAIN_NET)),
    "element-wise chains": (lambda: case(captured(Residual(), 3, 12, 12)), lambda: case(PLAIN_NET)),
    "channels_last": (lambda: case(PLAIN_NET), lambda: case(captured(nn.Linear(4, 4), 4))),
    "channels in multiples of 8": (lambda: case(captured(Residual(12), 3, 12, 12)), lambda: case(PLAIN_NET)),
    "bfloat16": (lambda: case(PLAIN_NET, CPU), lambda: case(PLAIN_NET, PLAIN)),
    "int8": (lambda: case(PLAIN_NET, CPU), lambda: case(captured(nn.ReLU(), 4), CPU)),
    "float inside INT8": (lambda: case(captured(_Sandwich(nn.Tanh()), 3, 12, 12)), lambda: case(PLAIN_NET)),
    "threads": (lambda: case(BOTTLENECKS, CPU, batch=64), lambda: case(BOTTLENECKS, PLAIN, batch=64)),
    "cudnn.benchmark": (lambda: case(PLAIN_NET, GPU), lambda: case(PLAIN_NET, CPU)),
    "first call": (lambda: _warm(PLAIN_NET, 0.2), lambda: _warm(PLAIN_NET, 0.02)),
}  # fmt: skip


class _Sandwich(nn.Module):
    """An activation without an integer kernel between two convolutions."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.first, self.inside, self.second = nn.Conv2d(3, 16, 3), inside, nn.Conv2d(16, 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.inside(self.first(x)))


def test_every_rule_is_tested() -> None:
    assert {name for name in RULES if not name.startswith("G")} == set(TRIGGERS)


@pytest.mark.parametrize("name", sorted(TRIGGERS))
def test_a_rule_speaks_up_where_it_should_and_only_there(name: str) -> None:
    speaks, silent = TRIGGERS[name]
    found = RULES[name].look(speaks())
    assert found is not None and found.what and found.action and found.formula
    assert found.saved_s is None or found.saved_s >= 0
    assert RULES[name].look(silent()) is None


@pytest.mark.parametrize(
    "name", ["G1 equal widths", "G2 few groups", "bias before BatchNorm", "unmerged branches", "BatchNorm not folded",
             "channels_last", "channels in multiples of 8", "bfloat16", "int8", "threads"]
)  # fmt: skip
def test_a_remedy_is_tried(name: str) -> None:
    units = {"G1 equal widths": "mobilenet_v2", "G2 few groups": "shufflenet_v1"}
    speaks = (lambda: case(UNITS[units[name]]())) if name in units else TRIGGERS[name][0]
    made = dataclasses.replace(speaks(), batch=1)
    found = RULES[name].attempt(made)
    assert found is not None and found.ratio > 0 and found.ci_low <= found.ratio <= found.ci_high
    assert found.before_s > 0 and found.after_s > 0 and found.what


def test_biases_move_into_the_means_exactly() -> None:
    program = normed(bias=True)
    bare = without_biases(program)
    bare.check()
    assert program.graph_module.get_parameter("conv.bias") is not None  # the caller's program is left alone
    assert "conv.bias" not in dict(bare.graph_module.named_parameters())
    for want, got in zip(program.run(program.inputs), bare.run(program.inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_int8_names_what_falls_out_of_it() -> None:
    found = RULES["float inside INT8"].look(TRIGGERS["float inside INT8"][0]())
    assert found is not None and "Tanh" in found.what and any("inside" in place for place in found.places)


class Work:
    """Ways to compute that take what they say on a clock that stands still beside them, and the order they ran in."""

    now_s = 0.0

    def __init__(self) -> None:
        self.order: list[str] = []

    def perf_counter(self) -> float:
        return self.now_s

    monotonic = process_time = perf_counter

    def way(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.order.append(name)
            self.now_s += seconds

        return run


@pytest.mark.parametrize(("after_s", "ratio"), [(0.125, 2.0), (0.25, 1.0), (0.5, 0.5)])
def test_a_trial_tells_twice_the_work_from_half(after_s: float, ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work()
    for module in (lockstep, worker):
        monkeypatch.setattr(module, "time", work)
    found = compare_runs(work.way("before", 0.25), work.way("after", after_s), "products", budget_s=0.5)
    assert (found.before_s, found.after_s, found.ratio, found.ci_low, found.ci_high) == (0.25, after_s, *[ratio] * 3)
    assert found.helps is (ratio > 1) and found.what == "products"
    way, other = work.order[4:6]  # behind two runs of each that size the blocks; a coin draws who is first
    assert work.order[4:] == [way, other, other, way] * 6 and {way, other} == {"before", "after"}


def test_advice_is_sorted_and_says_what_was_not_tried() -> None:
    program = captured(nn.Sequential(conv(3, 12, 3), nn.Sigmoid(), conv(12, 16, 3)), 3, 12, 12)
    found = advise(program, limits=LIMITS, host=CPU, fresh=False, attempt=False)
    assert {advice.rule for advice in found.advice} | set(found.clean) == set(RULES) - {"float inside INT8"}
    assert all(advice.measured is None and "--try" in advice.untried for advice in found.advice)
    saved = [advice.finding.saved_s for advice in found.advice if advice.finding.saved_s]
    assert saved == sorted(saved, reverse=True) and found.run_s is None
    only = advise(program, limits=LIMITS, host=CPU, fresh=False, rules=[RULES["BatchNorm not folded"]])
    (advice,) = only.advice
    assert advice.measured is not None and advice.untried == "" and advice.finding.places == ("0.1", "2.1")


def test_an_attempt_that_fails_is_said_and_the_others_go_on() -> None:
    def fail(setting: Setting) -> None:
        raise RuntimeError("no kernel\nand a long story")

    failing = dataclasses.replace(RULES["threads"], attempt=fail)
    found = advise(
        BOTTLENECKS, batch=64, limits=LIMITS, host=CPU, fresh=False, rules=[failing, RULES["G1 equal widths"]]
    )
    assert {advice.rule: advice.untried for advice in found.advice} == {
        "threads": "the attempt failed: no kernel", "G1 equal widths": ""
    }  # fmt: skip
