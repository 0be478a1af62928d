"""From a trace to a verdict: slower, not slower, or not known, each with its error rate.

``max_regression`` T means two things. FAIL needs evidence that the slowdown exceeds T/2, and happens at a slowdown of
T/2 or less with probability ``alpha`` at most. PASS needs evidence that it is below T, and happens at T or more with
probability ``beta`` at most. Between the two either is right. A gate that failed only on evidence of more than T itself
would hardly ever fail at a slowdown of T: measured, it caught 1 to 4 % of them.

Rounds are taken as exchangeable given the restart; restarts guard against the luck of one memory layout.

The evidence may be looked at after every round: e-values of signs. A round says one thing: whether the candidate's
block took longer than a threshold times the base's. If the median of the ratio is at the threshold or below, the sign
is "longer" with probability one half at most. A gambler who bets the share ``2p - 1`` of a stake of one on "longer" in
every round owns ``(2p)^k (2 - 2p)^(n - k)`` after ``k`` of ``n``: a non-negative supermartingale, and so is the mean
over several ``p``. By Ville's inequality it ever reaches ``1 / alpha`` with probability ``alpha`` at most, so that
measuring may stop at any time for any reason.

Peter Gruenwald, Rianne de Heide, Wouter Koolen, "Safe testing", arXiv:1906.07801; Michael Lindon, Chris Sanden, Vache
Shirikian, "Rapid regression detection in software deployments through sequential testing", KDD 2022, arXiv:2205.14762.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from optimize import wording as form
from optimize.gate.rounds import FIRST_LOOK, SIDES, GateTrace
from optimize.measure.clock import Choice, choose, ticks
from optimize.measure.runs import Clock
from optimize.measure.statistics import order_interval

#: The probabilities that are bet on, 0.52 to 0.98: near one half finds small effects, near one ends soon.
BETS = np.arange(26, 50) / 50
#: Restarts without which a verdict is not given while restarts disagree, and rounds of one that has a say in that.
BIMODAL_RESTARTS, SAY = 5, 6


def e_value(successes: npt.ArrayLike, rounds: npt.ArrayLike) -> np.ndarray:
    """Return the evidence that a sign is positive more often than not, for arrays of any one shape.

    Args:
        successes: Positive signs.
        rounds: All signs.

    >>> [int(e_value(n, n)) for n in (9, 10)], int(e_value(20, 40))
    ([96, 173], 0)
    """
    won = np.asarray(successes, np.float64)[..., None]
    lost = np.asarray(rounds, np.float64)[..., None] - won
    # A sum of exponentials: 2^rounds stays far below the largest float for any number of rounds a budget allows.
    wealth: np.ndarray = np.exp(won * np.log(2 * BETS) + lost * np.log(2 * (1 - BETS))).mean(-1)
    return wealth


class Verdict(StrEnum):
    """What is said of a comparison; ``warn`` says that stored numbers differ, which fails nothing."""

    PASS = "pass"  # noqa: S105
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    NOT_COMPARABLE = "not comparable"
    WARN = "warn"


@dataclass(frozen=True)
class Demand:
    """What is asked of the candidate's time, and how surely it is to be answered.

    Attributes:
        max_regression: The slowdown that must be found, as a share: 0.05 is 5 %.
        alpha: The largest probability of a false alarm, over all cases of the suite.
        beta: The largest probability of letting such a slowdown pass.
        cases: Cases of the suite.
        max_latency_s: The longest median run of the candidate; None asks nothing.
        threads: Compute threads of both sides.
        targets: Names of their targets.
    """

    max_regression: float = 0.05
    alpha: float = 0.01
    beta: float = 0.01
    cases: int = 1
    max_latency_s: float | None = None
    threads: int = 1
    targets: tuple[str, ...] = ()

    @property
    def fail_at(self) -> float:
        """The evidence that fails: Bonferroni's correction over the cases."""
        return self.cases / self.alpha

    @property
    def pass_at(self) -> float:
        """The evidence that passes."""
        return 1 / self.beta

    def outcome(self, e_fail: float, e_pass: float) -> Verdict:
        """Return what the evidence says."""
        if e_fail >= self.fail_at:
            return Verdict.FAIL
        return Verdict.PASS if e_pass >= self.pass_at else Verdict.INCONCLUSIVE


@dataclass(frozen=True)
class Ratio:
    """How many times longer the candidate takes, with the 95 % interval by order statistics of the rounds.

    There is no interval with fewer than 6 rounds.
    """

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, log_ratios: np.ndarray) -> Ratio:
        """Return the median ratio of rounds, from their logarithms ``[rounds]``."""
        ends = (math.exp(end) for end in order_interval(log_ratios) or ())
        return cls(math.exp(float(np.median(log_ratios))), *ends)


@dataclass(frozen=True)
class Decision:
    """The verdict on time, and everything it rests on.

    Attributes:
        outcome: Pass, fail or inconclusive.
        reason: Why, as a sentence without a full stop.
        clock: Which clock decided, and why.
        ratios: By clock.
        e_fail: Evidence of a slowdown above half of what is allowed.
        e_pass: Evidence of one below what is allowed.
        restart_ratios: The median ratio of each restart, on the deciding clock.
        bimodal: Whether restarts disagree by more than half of what is allowed, beyond their own noise.
        absolute: The evidence above and below ``max_latency_s``; None where nothing was asked.
    """

    outcome: Verdict
    reason: str
    clock: Choice
    ratios: dict[Clock, Ratio]
    e_fail: float
    e_pass: float
    restart_ratios: tuple[float, ...]
    bimodal: bool
    absolute: tuple[float, float] | None = None


def decide(trace: GateTrace, demand: Demand) -> Decision:
    """Return the verdict on what was measured so far, which must be a round at least."""
    choice = choose_clock(trace, demand)
    told = [clock for clock in Clock if clock is choice.clock or ticks(map(trace.blocks, SIDES), clock)]
    ratios = {clock: Ratio.of(trace.log_ratios(clock)) for clock in told}
    e_fail, e_pass = evidence(trace.log_ratios(choice.clock), demand.max_regression)
    restart_ratios = tuple(math.exp(float(np.median(values))) for values in trace.by_restart(choice.clock))
    bimodal = is_bimodal(trace, choice.clock, demand.max_regression)
    outcome, reason = demand.outcome(e_fail, e_pass), ""
    doubt = _doubt(trace, choice.clock, bimodal)
    if doubt or outcome is Verdict.INCONCLUSIVE:
        outcome, reason = Verdict.INCONCLUSIVE, doubt or _undecided(e_fail, e_pass, demand)
    absolute = None
    if demand.max_latency_s is not None:
        absolute = _beyond(trace.medians("candidate", Clock.WALL), demand.max_latency_s, demand.max_latency_s)
    reason = reason or _found(outcome, ratios[choice.clock], demand)
    return Decision(outcome, reason, choice, ratios, e_fail, e_pass, restart_ratios, bimodal, absolute)


def is_decided(trace: GateTrace, demand: Demand, *, alone: bool = False) -> bool:
    """Say whether measuring can stop: a failure is known, or everything that was asked is.

    Args:
        trace: What was measured so far.
        demand: What is asked.
        alone: Whether there is no base, so that nothing is asked of the ratio.
    """
    found = decide(trace, demand)
    outcomes = [] if alone else [found.outcome]
    outcomes += [demand.outcome(*found.absolute)] if found.absolute else []
    return Verdict.FAIL in outcomes or Verdict.INCONCLUSIVE not in outcomes


def evidence(log_ratios: np.ndarray, max_regression: float) -> tuple[float, float]:
    """Return the evidence of a slowdown above half of ``max_regression``, and of one below all of it."""
    return _beyond(log_ratios, math.log1p(max_regression / 2), math.log1p(max_regression))


def _beyond(values: np.ndarray, above: float, below: float) -> tuple[float, float]:
    """Return the evidence that values lie above a number, and that they lie below one."""
    return float(e_value((values > above).sum(), len(values))), float(e_value((values < below).sum(), len(values)))


def choose_clock(trace: GateTrace, demand: Demand) -> Choice:
    """Return the clock that decides, from the restarts before the first look."""
    early = [pair for pair in trace.rounds if pair[0].restart < FIRST_LOOK]
    return choose(early, threads=demand.threads, targets=demand.targets)


def is_bimodal(trace: GateTrace, clock: Clock, max_regression: float) -> bool:
    """Say whether restarts disagree: medians further apart than half of what is allowed, intervals that do not meet."""
    found = (values for values in trace.by_restart(clock) if len(values) >= SAY)
    known = [(np.median(values), order_interval(values)) for values in found]
    intervals = [interval for _, interval in known if interval]
    if not intervals:
        return False
    medians = [float(median) for median, _ in known]
    apart = max(low for low, _ in intervals) > min(high for _, high in intervals)
    return apart and max(medians) - min(medians) > max_regression / 2


def _doubt(trace: GateTrace, clock: Clock, bimodal: bool) -> str:
    """Return why no verdict may be given whatever the evidence; empty where nothing speaks against it."""
    restarts = len({base.restart for base, _ in trace.rounds})
    if not ticks(map(trace.blocks, SIDES), clock):
        return "a run is too short for the clock of this machine; time a larger batch"
    if restarts <= FIRST_LOOK:
        return f"the time allowed {restarts} restarts only; {FIRST_LOOK + 1} are needed"
    if bimodal and restarts < BIMODAL_RESTARTS:
        return f"restarts disagree, and {restarts} are too few to average that"
    return ""


def _undecided(e_fail: float, e_pass: float, demand: Demand) -> str:
    return (
        f"the evidence does not suffice: {e_fail:.3g} of {demand.fail_at:g} that it is slower, "
        f"{e_pass:.3g} of {demand.pass_at:g} that it is not"
    )


def _found(outcome: Verdict, ratio: Ratio, demand: Demand) -> str:
    change = f"{form.percent_change(ratio.value)} time"
    limit, half = (f"{share * demand.max_regression:g} %" for share in (100, 50))
    if outcome is not Verdict.FAIL:
        return f"{change}, less than {limit} beyond doubt"
    return f"{change}, beyond doubt more than {half}, half of the {limit} asked: there FAIL begins"
