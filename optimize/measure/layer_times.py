"""Seconds of each layer in float and in INT8, in the target's own runtime on this machine, runs of both interleaved."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from optimize.errors import UsageError
from optimize.measure.lockstep import TURNS, take_turns
from optimize.measure.subjects import running
from optimize.ops import layer_paths
from optimize.progress import Progress, silent
from optimize.registry import find_target, targets
from optimize.targets.base import Artifact, Probing
from optimize.targets.probe import Probe, calls_of, serve

if TYPE_CHECKING:
    from optimize.program import Program

#: Runs of a block; there are fewer rounds where the time ends before, and one block more for warm-up.
_RUNS = 5
_PLAN = replace(TURNS, rounds=23, least=3, budget_s=4.0, block_runs=(_RUNS + 1, 1) * 2)
#: A layer is slower in INT8 when it is by this much, in both halves of the rounds.
SLOWER_RATIO, SLOWER_S = 1.1, 2e-6
#: Noting one time takes no longer than this; a greater difference to a run without the profiler is noise.
_LARGEST_EXCESS_S = 6e-6
#: What is left of a kernel's time at least.
_LEAST_SHARE = 0.1


@dataclass(frozen=True)
class LayerTime:
    """What one layer costs in two files; conversions around it and what follows it up to the next layer count to it.

    Attributes:
        float_s: Seconds of one run in the float file.
        int8_s: Seconds of one run in the INT8 file.
        is_slower: Whether INT8 took longer by more than the noise, twice.
    """

    float_s: float
    int8_s: float
    is_slower: bool = False

    @property
    def saved_s(self) -> float:
        """Seconds that INT8 saves; negative where it costs some."""
        return self.float_s - self.int8_s


def require_layer_times(target: str) -> None:
    """Check that a target's runtime tells the time of each layer.

    Raises:
        UsageError: It does not.
    """
    if not find_target(target).times_layers:
        names = " or ".join(name for name, entry in targets().items() if entry.times_layers)
        raise UsageError(
            f"The time of each layer cannot be measured on the target '{target}'.",
            hint=f"Use --to {names}: their runtimes tell the time of every kernel.",
        )


def layer_times(
    plain: tuple[Program, Artifact],
    quantized: tuple[Program, Artifact],
    inputs: Sequence[np.ndarray],
    *,
    threads: int = 1,
    progress: Progress = silent,
) -> dict[str, LayerTime]:
    """Return the times of each layer of a quantized program by node name, in execution order.

    Args:
        plain: A program and its float file.
        quantized: The same in INT8.
        inputs: Flat inputs of one run.
        threads: Threads inside one operator.
        progress: Told how much is done.

    Raises:
        UsageError: The target's runtime does not tell the time of each layer.
        TargetUnavailable: The runtime is not installed, or cannot run a file.
        Refused: It fails while it runs one.
    """
    target = plain[1].target
    require_layer_times(target)
    with tempfile.TemporaryDirectory(prefix="optimize-") as folder, running(quantized[1].path):
        probes, backend = [], find_target(target)
        for index, (program, artifact) in enumerate((plain, quantized)):
            place = Path(folder) / str(index)
            place.mkdir()
            probes.append(backend.probe(Probing(artifact, inputs, place, threads, program)))
        calls = [call for probe in probes for call in (probe.run, functools.partial(probe.profile, _RUNS))]
        blocks = take_turns(calls, _PLAN, progress=lambda _, share: progress("time layers", share))[::2]
        # The run behind the profiler's bookkeeping finds cold caches: each block of plain runs has one more, left out.
        unprofiled_s = ([sample for block in each for sample in block.samples_s[1:]] for each in blocks)
        found = zip(probes, (plain[0], quantized[0]), unprofiled_s, strict=True)
        real, integer = (_by_layer(probe, program, samples_s) for probe, program, samples_s in found)
    paths = layer_paths(quantized[0].graph).items()
    return {name: _time(real[path], integer[path]) for name, path in paths if path in real and path in integer}


def _by_layer(probe: Probe, program: Program, unprofiled_s: Sequence[float]) -> dict[str, np.ndarray]:
    """Return the seconds ``[runs]`` of each layer by its path, and under an empty name of what serves none.

    Noting a time takes time, about the same for every kernel: it is taken off, so that all add up to a run without the
    profiler.
    """
    paths = {**layer_paths(program.graph), "": ""}
    kernels, runs = probe.finish()
    owners = [paths[name] for name in serve(kernels, calls_of(program), paths)]
    taken = np.array([run.durations_s for run in runs])
    excess = float(np.percentile(taken.sum(1), 25) - np.percentile(unprofiled_s, 25)) / len(owners)
    net = np.maximum(taken - min(max(excess, 0.0), _LARGEST_EXCESS_S), _LEAST_SHARE * taken)
    return {name: net[:, [owner == name for owner in owners]].sum(1) for name in dict.fromkeys(owners)}


def _time(real: np.ndarray, integer: np.ndarray) -> LayerTime:
    """Return the times from samples ``[runs]`` of both files; the first round is warm-up.

    A runtime that tells means alone gives one sample, which has nothing to be halved.
    """
    real, integer = (samples[_RUNS:] if len(samples) > 2 * _RUNS else samples for samples in (real, integer))
    halves = [(_middle(real[half::2]), _middle(integer[half::2])) for half in range(min(2, len(real), len(integer)))]
    slower = all(b >= SLOWER_RATIO * a and b - a >= SLOWER_S for a, b in halves)
    return LayerTime(_middle(real), _middle(integer), slower)


def _middle(samples: np.ndarray) -> float:
    """Return the mean of the middle half: robust like a median, and finer than the profiler's microseconds."""
    ordered, quarter = np.sort(samples), len(samples) // 4
    return float(ordered[quarter : len(ordered) - quarter].mean())
