"""How to serve a file on a machine: what the samples of a benchmark say of requests that come at random."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

import numpy as np

from optimize.bench.figures import Figures

#: Requests of one simulation, and the share of them that comes first and only fills the queue.
REQUESTS, FILLING = 10_000, 0.1
#: How often the interval is halved in which the largest rate lies.
_HALVINGS = 12
#: A rate at which nobody waits for anybody, and one beyond which a little more work anywhere makes the queue endless,
#: as shares of the most that can be computed.
_IDLE, _BUSY = 1e-3, 0.8


@dataclass(frozen=True)
class Traffic:
    """What is to be served.

    Attributes:
        rate: Samples a second, each a request of its own; None for as many as one machine can.
        p99_s: Within which 99 of 100 of them are answered, waiting included; None where nobody says.
    """

    rate: float | None = None
    p99_s: float | None = None


@dataclass(frozen=True)
class Serving:
    """The best way found to serve one file, and how many machines that takes.

    Attributes:
        callers: At the same time, each with the row's threads.
        batch: Requests that a caller takes at once where so many wait.
        most: Samples a second that one machine answers within the time asked for; where none is, that it computes.
        rate: Samples a second that one machine gets where the traffic is shared out.
        p99_s: Within which it answers 99 of 100 of those.
        machines: How many it takes; None where no rate is asked for.
        runs: Timed runs that are the least of what this was drawn from.
        reason: Why there is none; empty where there is one.
    """

    callers: int = 0
    batch: int = 0
    most: float = 0.0
    rate: float = 0.0
    p99_s: float = 0.0
    machines: int | None = None
    runs: int = 0
    reason: str = ""


def advise(scenarios: Sequence[Figures], traffic: Traffic, *, seed: int = 0) -> Serving:
    """Return how one file is served best: the callers and the batch with which a machine answers the most in time.

    Requests come independently of each other (a Poisson process). A caller that is free takes what waits, as many as
    a batch holds, and takes as long over it as one of the measured runs of the next larger batch, with as many callers
    at the same time.

    Args:
        scenarios: What was measured of the file.
        traffic: What is to be served.
        seed: Of the requests and of the runs that are drawn.
    """
    best, least_s = Serving(), math.inf
    for callers, times, runs in _ways(scenarios):
        largest = max(times)
        queue = Queue(times, callers, seed)
        most = queue.most
        if traffic.p99_s is not None:
            least_s = min(least_s, queue.p99_s(_IDLE * most))
            if _BUSY * most <= best.most or queue.p99_s(max(best.most, _IDLE * most)) > traffic.p99_s:
                continue
            most = _largest(queue, traffic.p99_s)
        if most > best.most:
            best = _shared_out(Serving(callers, largest, most, runs=runs), traffic, queue)
    if not best.callers:
        asked = math.isfinite(least_s)
        return Serving(reason=f"99 of 100 take {1e3 * least_s:.3g} ms at least" if asked else "nothing was measured")
    return best


def _ways(scenarios: Sequence[Figures]) -> Iterator[tuple[int, dict[int, np.ndarray], int]]:
    """Yield callers, the seconds of runs by batch up to a largest one, and how many runs there are at least."""
    for callers in sorted({entry.streams for entry in scenarios}):
        times: dict[int, np.ndarray] = {}
        for entry in sorted(scenarios, key=lambda entry: entry.batch):
            if entry.streams == callers and entry.blocks:
                times[entry.batch] = entry.samples_s
                yield callers, dict(times), min(map(len, times.values()))


def _shared_out(found: Serving, traffic: Traffic, queue: Queue) -> Serving:
    if traffic.rate is None:
        return replace(found, rate=found.most, p99_s=queue.p99_s(found.most))
    machines, bound_s = math.ceil(traffic.rate / found.most), traffic.p99_s or math.inf
    # Of times with a long tail a lower rate may have the higher percentile.
    while (p99_s := queue.p99_s(traffic.rate / machines)) > bound_s and traffic.rate / machines > _IDLE * queue.most:
        machines += 1 + machines // 16
    return replace(found, machines=machines, rate=traffic.rate / machines, p99_s=p99_s)


def _largest(queue: Queue, p99_s: float) -> float:
    low, high = _IDLE * queue.most, _BUSY * queue.most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if queue.p99_s(middle) <= p99_s else (low, middle)
    return low


class Queue:
    """Requests that wait for callers.

    Args:
        times: Seconds ``[n]`` of runs by batch.
        callers: At the same time.
        seed: Of when requests come and of the runs that are drawn: the same for every rate.
    """

    def __init__(self, times: Mapping[int, np.ndarray], callers: int, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self._sizes, self._callers = sorted(times), callers
        self._gaps = np.cumsum(generator.exponential(size=REQUESTS))
        self._runs = {size: generator.choice(times[size], REQUESTS).tolist() for size in self._sizes}
        #: Samples a second that can be computed, with nobody idle.
        self.most = max(callers * size / float(np.mean(times[size])) for size in self._sizes)

    def p99_s(self, rate: float) -> float:
        """Return within how many seconds 99 of 100 are answered where so many come a second."""
        return float(np.percentile(self.answer_times(rate)[int(FILLING * REQUESTS) :], 99))

    def answer_times(self, rate: float) -> np.ndarray:
        """Return the seconds ``[n]`` from each request to its answer."""
        come = (self._gaps / rate).tolist()
        free, answered, at = [0.0] * self._callers, np.empty(len(come)), 0
        heapify(free)
        while at < len(come):
            start = max(free[0], come[at])
            end = bisect_right(come, start, at, min(at + self._sizes[-1], len(come)))
            size = self._sizes[bisect_left(self._sizes, end - at)]
            done = start + self._runs[size][at]
            heapreplace(free, done)
            answered[at:end], at = done, end
        return answered - np.array(come)
