"""What a rule is: it looks at a case, says what it found and what that costs, and where it can, tries the remedy."""

from __future__ import annotations

import functools
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import fx

from optimize.advise.trials import Measured
from optimize.costs import Costs, NodeCost, Values, program_costs, values_at
from optimize.passes.fuse_conv_bn import FuseConvBN
from optimize.passes.reparameterize import Reparameterize
from optimize.profile.machine import Limits
from optimize.profile.result import FreshProcess
from optimize.program import Program

#: What a remedy asks for: another setting, a rewriting that keeps the outputs, one that rounds them, another network.
Effort = Literal["setting", "exact", "rounding", "retrain"]


@dataclass(frozen=True)
class Host:
    """What the machine offers.

    Attributes:
        cpu_flags: Instruction sets that matter (``optimize.measure.environment``).
        cores: Processors this process may run on.
        cuda: Whether torch sees a CUDA device.
    """

    cpu_flags: tuple[str, ...]
    cores: int
    cuda: bool

    @classmethod
    def current(cls) -> Host:
        """Return what this machine offers."""
        from optimize.measure.environment import current

        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(current().cpu_flags, affinity, torch.cuda.is_available())


@dataclass
class Case:
    """What rules look at.

    Attributes:
        program: The model as it was captured.
        limits: What this machine can do.
        host: What it offers.
        batch: Samples in one run.
        loader: The caller's ``torch.utils.data.DataLoader``; None where there is none.
        startup: The model's first call in a process of its own; None where it was not made.
        steady_s: Seconds of a later call, where ``startup`` is known.
    """

    program: Program
    limits: Limits
    host: Host
    batch: int = 1
    loader: Any = None
    startup: FreshProcess | None = None
    steady_s: float = 0.0
    kept: dict[str, Any] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def merged(self) -> Program:
        """The program with its branches merged."""
        return Reparameterize().apply(self.program)[0]

    @functools.cached_property
    def fused(self) -> Program:
        """The program as ``--fuse`` leaves it: what the architecture itself costs."""
        return FuseConvBN().apply(self.merged)[0]

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

    def inputs(self, program: Program) -> tuple[torch.Tensor, ...]:
        """Return flat inputs of one run."""
        return program.sample(self.batch) if program.batch else program.inputs


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
        rule: Name of the rule.
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


class Rule(ABC):
    """One piece of advice. Subclasses are registered with ``register_rule``.

    Attributes:
        name: What it is called in reports.
        effort: What its remedy asks for.
        untried: Why its remedy is not tried, for a rule without ``attempt``.
        needs_trial: Whether looking itself makes files and runs them, so that it is left out where nothing is tried.
    """

    name: ClassVar[str]
    effort: ClassVar[Effort]
    untried: ClassVar[str] = "needs another network"
    needs_trial: ClassVar[bool] = False

    @abstractmethod
    def look(self, case: Case) -> Finding | None:
        """Return what could be faster, or None."""

    def attempt(self, case: Case) -> Measured | None:
        """Try the remedy and return what it gains; None where it cannot be tried."""
        return None

    @classmethod
    def summary(cls) -> str:
        """Return what the rule looks for: the first line of its docstring."""
        return (inspect.getdoc(cls) or "").split("\n")[0]


_rules: dict[str, Rule] = {}
_R = TypeVar("_R", bound="type[Rule]")


def register_rule(cls: _R) -> _R:
    """Register one instance of a rule under its ``name`` (a class decorator)."""
    _rules[cls.name] = cls()
    return cls


def registered() -> tuple[Rule, ...]:
    """Return every rule that was imported, in order."""
    return tuple(_rules.values())


def by_cost(found: dict[str, float]) -> tuple[str, ...]:
    """Return places by what they cost, the dearest first."""
    return tuple(sorted(found, key=lambda place: -found[place]))
