"""Trying advice: two ways to compute are run in turns in this process, and their ratio gets an interval."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from optimize.measure.lockstep import Plan, take_turns
from optimize.measure.statistics import nested_interval

#: Rounds of one block each way; two of them are a round there and back.
_PLAN = Plan(
    restarts=1,
    rounds=48,
    least=12,
    warm_up={"runs": 2, "seconds": 0.0, "cap_s": 0.0},
    block_s=0.01,
    least_runs=1,
    settle=False,
    alternate=True,
)


@dataclass(frozen=True)
class Measured:
    """How many times faster the second way is: the median of the rounds' ratios with its 95 % interval.

    Attributes:
        ratio: Time before over time after.
        ci_low: Lower end.
        ci_high: Upper end.
        before_s: Seconds before, the median of the rounds.
        after_s: Seconds after, likewise.
        what: What was timed.
    """

    ratio: float
    ci_low: float
    ci_high: float
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
