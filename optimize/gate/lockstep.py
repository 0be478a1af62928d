"""Measuring a pair: fresh processes again and again, and in each of them rounds of one block a side.

Only one process runs at a time. The first of a round is drawn by a fair coin, the next round is in the other order
(ABBA), so that neither side is always the one that finds warm caches or a clock that just went down. Processes are
started again because memory layout is drawn anew with each: the ratio of equal files moves by 0.4 % between processes.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from optimize.gate.rounds import SIDES, Block, Restart, Round, SideName, Start, Trace
from optimize.gate.verdict import FIRST_LOOK
from optimize.measure.fleet import Fleet, Progress, Session, WorkerFailed
from optimize.measure.latency import BLOCK_S, MAX_RUNS_PER_BLOCK, WARM_UP
from optimize.measure.subjects import AgreedPair
from optimize.measure.worker import write_arrays

#: From this run time on, what a switch of processes costs the next run is lost in it.
LONG_RUN_S = 0.05
#: The longest an answer may take, at least: a runtime may compile its kernels at the first run.
PATIENCE_S = 60.0
#: Told everything measured so far after a round; True ends the measurement.
Decided = Callable[[Trace], bool]


@dataclass(frozen=True)
class Protocol:
    """How a pair is measured.

    Attributes:
        threads: Compute threads of each worker.
        affinity: Processors both may run on; all of them where empty.
        max_seconds: No round begins after this time; starts and warm-up count.
        max_restarts: Most restarts.
        rounds: Rounds of one restart, fewer where so many restarts would not fit into the time.
        seed: Of the coins; None for other ones each time.
    """

    threads: int = 1
    affinity: tuple[int, ...] = ()
    max_seconds: float = 120.0
    max_restarts: int = 10
    rounds: int = 10
    seed: int | None = None

    @property
    def patience_s(self) -> float:
        """The longest one answer of a worker may take."""
        return max(self.max_seconds, PATIENCE_S)


class SideFailed(Exception):
    """A worker crashed, hung or refused.

    Attributes:
        side: Whose worker.
        reason: Its last words.
    """

    def __init__(self, side: SideName, reason: str) -> None:
        super().__init__(f"the {side} {reason}")
        self.side = side
        self.reason = reason


def start_fleet(pair: AgreedPair, protocol: Protocol, order: Sequence[int] = (0, 1)) -> Fleet:
    """Return the fleet of a pair, its processes started in this order (0 is the base) when it is entered."""
    return Fleet(
        [pair.models[index].artifact for index in order],
        threads=protocol.threads,
        patience_s=protocol.patience_s,
        interpreters=[pair.models[index].interpreter for index in order],
        affinity=protocol.affinity,
    )


def sessions(fleet: Fleet, order: Sequence[int] = (0, 1)) -> dict[SideName, Session]:
    """Return the sessions of a fleet by side.

    Raises:
        SideFailed: One did not load.
    """
    found: dict[SideName, Session] = {SIDES[index]: session for index, session in zip(order, fleet, strict=True)}
    for side, session in found.items():
        if session.failure is not None:
            raise SideFailed(side, session.failure)
    return found


def measure(
    pair: AgreedPair,
    inputs: Sequence[np.ndarray],
    protocol: Protocol,
    decided: Decided,
    progress: Progress | None = None,
    opened: Fleet | None = None,
) -> Trace:
    """Measure until a decision, the last restart or the end of the time.

    Args:
        pair: The two sides.
        inputs: Of a timed run, for ``pair.specs``.
        protocol: How.
        decided: Asked after every round of the restarts behind ``FIRST_LOOK``.
        progress: Told the share of the time that is used.
        opened: Processes of the pair that run already, the base first: those of the first restart, closed behind it.

    Raises:
        SideFailed: A worker crashed, hung or refused.
    """
    with tempfile.TemporaryDirectory(prefix="optimize-") as folder:
        files = {}
        for side, model in zip(SIDES, pair.models, strict=True):
            files[side] = Path(folder) / f"{side}.npz"
            write_arrays(files[side], model.arranged(inputs))
        return _Measurement(pair, protocol, files, decided, progress, opened).run()


class _Measurement:
    """One measurement while it goes on."""

    def __init__(
        self,
        pair: AgreedPair,
        protocol: Protocol,
        files: dict[SideName, Path],
        decided: Decided,
        progress: Progress | None,
        opened: Fleet | None,
    ) -> None:
        self.trace = Trace()
        self._opened = opened
        self._pair, self._protocol, self._files = pair, protocol, files
        self._decided, self._progress = decided, progress
        self._coin = np.random.default_rng(protocol.seed)
        self._began = time.monotonic()

    def run(self) -> Trace:
        for number in range(1, self._protocol.max_restarts + 1):
            if self._restart(may_decide=number > FIRST_LOOK) or self._over():
                break
        self.trace.seconds = self._spent_s()
        return self.trace

    def _restart(self, *, may_decide: bool) -> bool:
        """Start both processes, run their rounds, and return whether that decided."""
        began, fresh = time.monotonic(), self._opened is None
        with self._processes() as workers:
            lanes = {side: _Lane(side, session, self._files[side]) for side, session in workers.items()}
            for lane in lanes.values():
                lane.warm_up(fresh=fresh)
            restart = Restart(lanes["base"].start, lanes["candidate"].start)
            self.trace.restarts.append(restart)
            try:
                return self._rounds(restart, lanes, time.monotonic() - began, may_decide)
            finally:
                _note_memory(restart, lanes)

    @contextmanager
    def _processes(self) -> Iterator[dict[SideName, Session]]:
        """Yield the sessions of a restart, started in random order unless they run already, and end them."""
        if self._opened is not None:
            fleet, self._opened = self._opened, None
            try:
                yield sessions(fleet)
            finally:
                fleet.close()
            return
        order = tuple(int(index) for index in self._coin.permutation(2))
        with start_fleet(self._pair, self._protocol, order) as fleet:
            yield sessions(fleet, order)

    def _rounds(self, restart: Restart, lanes: dict[SideName, _Lane], start_s: float, may_decide: bool) -> bool:
        run_s = min(lane.run_s for lane in lanes.values())
        runs = block_runs(run_s)
        base_first = bool(self._coin.integers(2))
        for _ in range(rounds_that_fit(self._protocol, start_s, sum(lane.round_s(runs) for lane in lanes.values()))):
            if self._over():
                return False
            order = SIDES if base_first else SIDES[::-1]
            blocks = {side: lanes[side].block(runs) for side in order}
            restart.rounds.append(Round(blocks["base"], blocks["candidate"], base_first))
            base_first = not base_first
            self._tell()
            if may_decide and self._decided(self.trace):
                return True
        return False

    def _over(self) -> bool:
        return self._spent_s() >= self._protocol.max_seconds

    def _spent_s(self) -> float:
        return time.monotonic() - self._began

    def _tell(self) -> None:
        if self._progress:
            planned = self._protocol.max_restarts * self._protocol.rounds
            share = max(self._spent_s() / self._protocol.max_seconds, len(self.trace.rounds) / planned)
            self._progress("measure", min(share, 1.0))


@dataclass
class _Lane:
    """One side's process: warmed up once, then asked for blocks."""

    side: SideName
    session: Session
    inputs: Path
    start: Start = field(default_factory=lambda: Start(0.0, 0.0))
    run_s: float = 0.0

    def warm_up(self, *, fresh: bool) -> None:
        reply = self._ask("inputs", path=str(self.inputs)) | self._ask("warm", **WARM_UP)
        self.start, self.run_s = Start(self.session.load_s, reply["first_call_s"] if fresh else None), reply["run_s"]

    def block(self, runs: int) -> Block:
        reply = self._ask("time", runs=runs, untimed=self._untimed)
        wall_s, cpu_s = (tuple(round(sample, 9) for sample in reply[clock]) for clock in ("samples_s", "cpu_s"))
        return Block(wall_s, cpu_s, reply["preempted"], reply["waited"])

    def round_s(self, runs: int) -> float:
        """Return about how long a block takes."""
        return (runs + self._untimed) * self.run_s

    @property
    def _untimed(self) -> int:
        return 0 if self.run_s >= LONG_RUN_S else 1

    def _ask(self, command: str, **fields: object) -> dict[str, Any]:
        try:
            return self.session.ask(command, **fields)
        except WorkerFailed as error:
            raise SideFailed(self.side, str(error)) from error


def block_runs(run_s: float) -> int:
    """Return how many runs of this length make a block.

    >>> block_runs(20e-6), block_runs(0.0015), block_runs(0.023), block_runs(2.0)
    (50, 4, 1, 1)
    """
    return min(max(math.ceil(BLOCK_S / max(run_s, 1e-9)), 1), MAX_RUNS_PER_BLOCK)


def rounds_that_fit(protocol: Protocol, start_s: float, round_s: float) -> int:
    """Return the rounds of one restart: those wanted, or fewer where that lets the fewest restarts fit into the time.

    >>> rounds_that_fit(Protocol(), 0.5, 0.02), rounds_that_fit(Protocol(), 14.0, 4.0)
    (10, 6)
    """
    share_s = protocol.max_seconds / (FIRST_LOOK + 1) - start_s
    return min(max(math.floor(share_s / max(round_s, 1e-9)), 1), protocol.rounds)


def _note_memory(restart: Restart, lanes: dict[SideName, _Lane]) -> None:
    """Write down the largest memory of both processes before they end."""
    restart.base, restart.candidate = (
        Start(lane.start.load_s, lane.start.first_call_s, lane.session.peak_memory_bytes())
        for lane in (lanes["base"], lanes["candidate"])
    )
