"""Traces drawn from a generator: two sides with a true ratio, the noise of rounds and restarts, and disturbances."""

import numpy as np

from optimize.gate.rounds import GateTrace, Restart, Round
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

    def block(center_s: float, side: int) -> Block:
        cpu_s = center_s * np.exp(noise * generator.standard_normal()) * np.ones(runs)
        wall_s = cpu_s / threads * (1 + generator.exponential(stolen)) + waiting_s[side]
        counted = {"preempted": int(stolen > 0), "waited": waited[side]}
        return Block(0, 0, tuple(wall_s.tolist()), tuple(cpu_s.tolist()), float(wall_s.sum()), **counted)

    def restart() -> Restart:
        true = ratio * np.exp(between * generator.standard_normal())
        pairs = [(block(run_s, 0), block(run_s * true, 1)) for _ in range(rounds)]
        found = [Round(base, candidate, index % 2 == 0) for index, (base, candidate) in enumerate(pairs)]
        start = Start(0, 0.03, {}, 5e-8, 70_000_000, 0.005)
        return Restart(start, start, found)

    return GateTrace([restart() for _ in range(restarts)], seconds=1.5)
