"""What a rule is: it looks at a setting, says what it found and what that costs, and where it can, tries the remedy.

Two ways to compute are run in turns in this process, and their ratio gets an interval.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import fx

from optimize import processor
from optimize.costs import Costs, NodeCost, Values, program_costs, values_at
from optimize.measure.latency import Latency
from optimize.measure.lockstep import TURNS, take_turns
from optimize.measure.runs import Speedup
from optimize.measure.statistics import nested_interval
from optimize.passes.base import Outcome
from optimize.passes.fuse_conv_bn import FuseConvBN
from optimize.passes.reparameterize import Reparameterize
from optimize.profile.machine import MachineLimits
from optimize.program import Program

#: Rounds of one block each way; two of them are a round there and back.
_PLAN = replace(
    TURNS, rounds=48, least=12, warm_up={"runs": 2, "seconds": 0.0, "cap_s": 0.0}, block_s=0.01, least_runs=1
)


@dataclass(frozen=True)
class Measured(Speedup):
    """How many times faster the second way is.

    Attributes:
        before_s: Seconds before, the median of the rounds.
        after_s: Seconds after, likewise.
        what: What was timed.
    """

    before_s: float
    after_s: float
    what: str

    @property
    def helps(self) -> bool:
        """Whether the second way is surely faster."""
        return self.ci_low > 1.0


def compare_runs(
    before: Callable[[], object], after: Callable[[], object], what: str, *, budget_s: float = 2.0
) -> Measured:
    """Run both ways in short blocks, in the order ABBA, and return their ratio.

    Args:
        before: The way it is.
        after: The way it could be.
        what: What is timed, for the report.
        budget_s: Seconds after which no further round begins.
    """
    found = take_turns([before, after], replace(_PLAN, budget_s=budget_s))
    # What interrupts a run only makes it longer: the shortest of a block there and back stands for both.
    shortest = np.array([[min(block.samples_s) for block in blocks] for blocks in found]).T
    rounds = shortest[: len(shortest) // 2 * 2].reshape(-1, 2, 2).min(1)
    ratios = rounds[:, 0] / rounds[:, 1]
    low, high = nested_interval([[np.array([ratio]) for ratio in ratios]], seed=0)
    before_s, after_s = np.median(rounds, axis=0).tolist()
    return Measured(float(np.median(ratios)), low, high, before_s, after_s, what)


def on_noise(module: torch.nn.Module, *shape: int) -> Callable[[], object]:
    """Return a module on noise of this shape as something to run."""
    ready, noise = module.eval(), torch.randn(shape)
    return torch.inference_mode()(lambda: ready(noise))


#: What a remedy asks for: another setting, a rewriting that keeps the outputs, one that rounds them, another network.
Effort = Literal["setting", "exact", "rounding", "retrain"]


@dataclass(frozen=True)
class Host:
    """What the machine offers.

    Attributes:
        cpu_flags: Instruction sets, as Linux names them.
        cores: Processors this process may run on.
        cuda: Whether torch sees a CUDA device.
    """

    cpu_flags: tuple[str, ...]
    cores: int
    cuda: bool

    @classmethod
    def current(cls) -> Host:
        """Return what this machine offers."""
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(tuple(processor.host().flags), affinity, torch.cuda.is_available())


@dataclass
class Setting:
    """What rules look at.

    Attributes:
        program: The model as it was captured.
        limits: What this machine can do.
        host: What it offers.
        batch: Samples in one run.
        startup: The model's first call in a process of its own, and later ones; None where they were not made.
    """

    program: Program
    limits: MachineLimits
    host: Host
    batch: int = 1
    startup: Latency | None = None
    kept: dict[str, Any] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def merging(self) -> tuple[Program, Outcome]:
        """The program with its branches merged, and what was merged."""
        return Reparameterize().apply(self.program)

    @functools.cached_property
    def folding(self) -> tuple[Program, Outcome]:
        """The merged program with its norms folded, and what was folded."""
        return FuseConvBN().apply(self.merging[0])

    @property
    def fused(self) -> Program:
        """The program as ``--fuse`` leaves it: what the architecture itself costs."""
        return self.folding[0]

    @functools.cached_property
    def costs(self) -> Costs:
        """What each call of ``fused`` costs."""
        return program_costs(self.fused, self.batch)

    @functools.cached_property
    def values(self) -> Values:
        """Shapes of the values of ``fused``."""
        return values_at(self.fused, self.batch)

    def calls(self, *targets: Any) -> Iterator[tuple[fx.Node, NodeCost]]:
        """Yield the calls of these operators in ``fused`` with their costs."""
        for node in self.fused.graph.nodes:
            if node.op == "call_function" and node.target in targets and node.name in self.costs.calls:
                yield node, self.costs.calls[node.name]

    def shape(self, node: Any) -> tuple[int, ...]:
        """Return the shape of a value of ``fused``."""
        return tuple(self.values[node][0].shape)

    def least_s(self, program: Program) -> float:
        """Return the roofline's time of a program run operator by operator, calls included."""
        costs = program_costs(program, self.batch).calls.values()
        least = (self.limits.least_s(cost.macs, cost.moved_bytes, cost.dtype) for cost in costs)
        return sum(least) + self.limits.call_s * len(costs)

    def runner(self, program: Program) -> Callable[[], object]:
        """Return a program on its inputs as something to run."""
        return functools.partial(program.run, program.sample(self.batch))

    def compare(self, before: Program, after: Program) -> Measured:
        """Run two programs in eager in turns."""
        what = f"the {'fused ' if before is self.fused else ''}network in eager"
        return compare_runs(self.runner(before), self.runner(after), what)


@dataclass(frozen=True)
class Finding:
    """Something that could be faster.

    Attributes:
        what: What was found, as a sentence.
        places: Paths of the modules, those that cost most first.
        saved_s: Seconds of one run that the remedy is estimated to save; None where no formula says it.
        formula: How the estimate was made.
        action: What to do, as a sentence.
    """

    what: str
    places: tuple[str, ...]
    saved_s: float | None
    formula: str
    action: str


@dataclass(frozen=True)
class Advice:
    """A finding, and what trying its remedy measured.

    Attributes:
        effort: What the remedy asks for.
        finding: What was found.
        measured: What the remedy gained; None where it was not tried.
        untried: Why it was not tried, empty otherwise.
    """

    rule: str
    effort: Effort
    finding: Finding
    measured: Measured | None = None
    untried: str = ""


@dataclass
class Rule:
    """One piece of advice: how it is found, and how its remedy is tried.

    Attributes:
        name: What it is called in reports.
        effort: What its remedy asks for.
        look: Returns what could be faster, or None.
        untried: Why its remedy is not tried, where nothing tries it.
        needs_trial: Whether looking itself makes files and runs them, so that it is left out where nothing is tried.
        attempt: Tries the remedy and returns what it gains; None where it cannot be tried.
    """

    name: str
    effort: Effort
    look: Callable[[Setting], Finding | None]
    untried: str
    needs_trial: bool
    attempt: Callable[[Setting], Measured | None] = lambda setting: None

    def remedy(self, attempt: Callable[[Setting], Measured | None]) -> Callable[[Setting], Measured | None]:
        """Say how the remedy is tried (a decorator)."""
        self.attempt = attempt
        return attempt


_rules: list[Rule] = []


def rule(
    name: str, effort: Effort, *, untried: str = "needs another network", needs_trial: bool = False
) -> Callable[[Callable[[Setting], Finding | None]], Rule]:
    """Make a rule of a function that looks at a setting (a decorator); see ``Rule``."""

    def register(look: Callable[[Setting], Finding | None]) -> Rule:
        _rules.append(Rule(name, effort, look, untried, needs_trial))
        return _rules[-1]

    return register


def registered() -> tuple[Rule, ...]:
    """Return every rule that was imported, in order."""
    return tuple(_rules)


def by_cost(found: dict[str, float]) -> tuple[str, ...]:
    """Return places by what they cost, the dearest first."""
    return tuple(sorted(found, key=lambda place: -found[place]))
