"""A profile: what one run of a model is made of, kernel by kernel, on one runtime and this machine."""

from __future__ import annotations

from dataclasses import dataclass

from optimize.measure.latency import Timing
from optimize.profile.kernels import Clock
from optimize.profile.machine import MachineLimits
from optimize.profile.memory import LiveMemory
from optimize.profile.python_cost import PythonCost


@dataclass(frozen=True)
class KernelProfile:
    """One thing the runtime executes, and which layers it is.

    Attributes:
        name: Its name in the runtime.
        op: Its kind, in the runtime's word.
        layers: Paths of the modules it computes, all of them where it is fused; nodes without a module by their name.
        serves: For a conversion or a change of layout, the layers of the kernel it serves; empty otherwise.
        nodes: The calls of the graph it computes.
        seconds: Of one run.
        start_s: When it began in a typical run, from the start of the run.
        dtype: What it computes in.
        macs: Multiply-accumulates; None where they are not known.
        moved_bytes: Bytes it reads and writes, values inside a fused kernel left out; None where not known.
    """

    name: str
    op: str
    layers: tuple[str, ...]
    serves: tuple[str, ...]
    nodes: tuple[str, ...]
    seconds: float
    start_s: float
    dtype: str
    macs: int | None
    moved_bytes: int | None

    @property
    def intensity(self) -> float | None:
        """MACs a byte moved."""
        return self.macs / self.moved_bytes if self.macs and self.moved_bytes else None

    @property
    def macs_per_s(self) -> float | None:
        """MACs a second that it reached."""
        return self.macs / self.seconds if self.macs and self.seconds else None


@dataclass(frozen=True)
class FreshProcess:
    """What the artifact cost in a process of its own.

    Attributes:
        load_s: Importing the runtime and loading the file.
        first_call_s: The first run.
        peak_memory_bytes: Largest resident memory, runtime included; None where the system does not say.
    """

    load_s: float
    first_call_s: float
    peak_memory_bytes: int | None

    @classmethod
    def of(cls, timing: Timing) -> FreshProcess | None:
        """Return what running it so came to; None where it does not run there."""
        taken = timing.latency
        return cls(taken.load_s, taken.first_call_s, timing.peak_memory_bytes) if taken else None


@dataclass(frozen=True)
class Profile:
    """What one run of a model is made of.

    Attributes:
        target: The runtime.
        batch: Samples in the run.
        threads: Compute threads.
        total_s: Seconds of a run without the profiler, end to end: the lower quartile.
        clock: What that is on: ``wall``, or ``processor`` where other processes interrupted every run.
        runs: Runs without the profiler.
        kernels: In execution order.
        limits: What this machine can do.
        fresh: The artifact in a process of its own; None where it was not run so.
        live: Activations alive, from the graph; None where only a file is known.
        python: Where the module spends time in Python; eager only.
    """

    target: str
    batch: int
    threads: int
    total_s: float
    clock: Clock
    runs: int
    kernels: tuple[KernelProfile, ...]
    limits: MachineLimits
    fresh: FreshProcess | None = None
    live: LiveMemory | None = None
    python: PythonCost | None = None

    @property
    def layers_s(self) -> float:
        """Sum of the kernels' times."""
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def outside_s(self) -> float:
        """Seconds of a run outside all kernels: the interpreter, allocation, copies of inputs and outputs."""
        return self.total_s - self.layers_s

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one run."""
        return sum(kernel.macs or 0 for kernel in self.kernels)
