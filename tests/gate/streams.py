"""Traces drawn from a generator: two sides with a true ratio, the noise of rounds and restarts, and disturbances."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from optimize.gate.rounds import GateTrace
from optimize.measure.runs import Block, Start


def draw(
    ratio: float = 1.0,
    *,
    noise: float = 0.01,
    between: float = 0.002,
    restarts: int = 3,
    rounds: int = 10,
    run_s: float = 0.004,
    runs: int = 2,
    stolen: float = 0.0,
    waited: tuple[int, int] = (0, 0),
    waiting_s: tuple[float, float] = (0.0, 0.0),
    threads: int = 1,
    seed: int = 0,
) -> GateTrace:
    """Return a trace.

    Args:
        ratio: True median of candidate over base, in processor time.
        noise: Standard deviation of a block's logarithm.
        between: The same of a restart's log-ratio.
        restarts: How many.
        rounds: Of each.
        run_s: Of the base.
        runs: Of each block.
        stolen: Mean share of the processor time that neighbours take on top, exponential for each block.
        waited: How often each side gives up the processor in a block.
        waiting_s: Seconds that each side waits in a run.
        threads: That work at the same time.
        seed: Of the generator.
    """
    generator = np.random.default_rng(seed)

    def block(center_s: float, number: int, at: int, side: int) -> Block:
        cpu_s = center_s * np.exp(noise * generator.standard_normal()) * np.ones(runs)
        wall_s = cpu_s / threads * (1 + generator.exponential(stolen)) + waiting_s[side]
        counted = {"preempted": int(stolen > 0), "waited": waited[side], "place": (side + at) % 2}
        return Block(number, at, tuple(wall_s.tolist()), tuple(cpu_s.tolist()), float(wall_s.sum()), **counted)

    trace = GateTrace(seconds=1.5)
    for number in range(restarts):
        true = ratio * np.exp(between * generator.standard_normal())
        trace.rounds += [(block(run_s, number, at, 0), block(run_s * true, number, at, 1)) for at in range(rounds)]
        for starts in trace.starts.values():
            starts.append(Start(number, 0.03, {}, 5e-8, 70_000_000, 0.005))
    return trace


def first(trace: GateTrace, restarts: int) -> GateTrace:
    """Return what a trace was after so many restarts."""
    return GateTrace([pair for pair in trace.rounds if pair[0].restart < restarts])


def joined(traces: Sequence[GateTrace]) -> GateTrace:
    """Return the rounds of traces as those of one, each a restart of its own."""
    rounds = (
        (replace(base, restart=number), replace(candidate, restart=number))
        for number, trace in enumerate(traces)
        for base, candidate in trace.rounds
    )
    return GateTrace(list(rounds))
