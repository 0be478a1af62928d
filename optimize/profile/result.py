"""A profile: what one run of a model is made of, kernel by kernel, on one runtime and this machine."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import fx

from optimize import graph
from optimize.costs import size_bytes, storage_owners, values_at
from optimize.measure.latency import Timing
from optimize.measure.lockstep import TURNS, take_turns
from optimize.profile.kernels import Clock
from optimize.profile.machine import MachineLimits
from optimize.program import Program

_RUNS = 20
_SHOWN = 12


@dataclass(frozen=True)
class PythonFunction:
    """One function in the profile.

    Attributes:
        name: Where it is written and what it is called, such as ``conv.py:553 forward``.
        calls: Calls in one run of the module.
        own_s: Seconds of one run spent in it and not in what it calls.
        is_python: Whether it is written in Python; operators and other built-ins are not.
    """

    name: str
    calls: float
    own_s: float
    is_python: bool


@dataclass(frozen=True)
class PythonCost:
    """What Python costs in one run of a module.

    Attributes:
        own_share: Share of the profiled time that is spent in functions written in Python. The profiler makes each call
            dearer, so it is an upper bound.
        total_s: Lower quartile of a run without the profiler.
        functions: Those that take the most, the dearest first.
    """

    own_share: float
    total_s: float
    functions: tuple[PythonFunction, ...]


def python_cost(call: Callable[[], object], *, runs: int = _RUNS) -> PythonCost:
    """Profile calls of a module and return where Python takes time."""
    ((block,),) = take_turns([call], replace(TURNS, rounds=1, block_runs=(runs,)))
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(runs):
        call()
    profiler.disable()
    found = sorted(_functions(pstats.Stats(profiler), runs), key=lambda entry: -entry.own_s)
    whole = sum(entry.own_s for entry in found)
    own = sum(entry.own_s for entry in found if entry.is_python)
    return PythonCost(own / whole if whole else 0.0, sorted(block.samples_s)[runs // 4], tuple(found[:_SHOWN]))


def _functions(stats: pstats.Stats, runs: int) -> list[PythonFunction]:
    entries: dict[tuple[str, int, str], tuple[int, int, float, float, object]] = stats.stats  # type: ignore[attr-defined]
    return [
        PythonFunction(_name(*place), calls / runs, own_s / runs, is_python=place[0] != "~")
        for place, (_, calls, own_s, _, _) in entries.items()
    ]


def _name(file: str, line: int, function: str) -> str:
    """Return where a function is written, without the folders.

    >>> _name("/lib/torch/nn/modules/conv.py", 553, "forward"), _name("~", 0, "<built-in method torch.conv2d>")
    ('conv.py:553 forward', 'torch.conv2d')
    """
    if file == "~":
        return function.removeprefix("<").removesuffix(">").removeprefix("built-in method ")
    return f"{Path(file).name}:{line} {function}"


@dataclass(frozen=True)
class LiveMemory:
    """What is alive while a program runs.

    Attributes:
        peak_bytes: The most bytes of activations, inputs and outputs included, that are alive at once.
        peak_node: The call that runs then.
        peak_layer: Path of that call's module.
        weight_bytes: Bytes of the weights, which live throughout beside the activations.
        live_bytes: Bytes alive while each call runs, by node name in execution order.
    """

    peak_bytes: int
    peak_node: str
    peak_layer: str
    weight_bytes: int
    live_bytes: Mapping[str, int]


def live_memory(program: Program, batch: int = 1) -> LiveMemory:
    """Return what is alive at each call of a run with ``batch`` samples, from the graph alone.

    A value lives from the call that makes it to the last call that reads it, under any of its names: a view (reshape,
    transpose, slice) keeps alive the tensor it looks at. Inputs belong to the caller and live throughout, outputs until
    the end. While a call runs, its inputs and its results are there together:

        peak = max over calls t of  sum of bytes of the values v with  made(v) <= t <= last_read(v)

    This is what an allocator without fragmentation needs when operators run one by one. A runtime needs less where it
    fuses or writes in place, and more for scratch space of its kernels.
    """
    values = values_at(program, batch)
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    owners = storage_owners(program.graph)
    spans = _spans(program, owners)
    live = {
        node.name: sum(size_bytes(values[owner]) for owner, (made, last) in spans.items() if made <= index <= last)
        for index, node in enumerate(calls)
    }
    peak = max(live, key=lambda name: live[name], default="")
    found = next((node for node in calls if node.name == peak), None)
    weights = [
        tensor
        for node in {n.target: n for n in program.graph.nodes if n.op == "get_attr"}.values()
        for tensor in values[node]
    ]
    layer = graph.origin(found) if found is not None else ""
    return LiveMemory(live.get(peak, 0), peak, layer, size_bytes(weights), live)


def _spans(program: Program, owners: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, tuple[int, int]]:
    """Return the first and last call, by index, during which each activation is alive."""
    calls = {node: index for index, node in enumerate(n for n in program.graph.nodes if n.op == "call_function")}
    kept = {owners[node] for node in program.outputs}
    spans: dict[fx.Node, tuple[int, int]] = {}
    for node in program.graph.nodes:
        owner = owners[node]
        if owner.op not in ("placeholder", "call_function") or graph.weights_behind(owner):
            continue
        forever = owner.op == "placeholder" or owner in kept
        made, last = spans.get(owner, (calls.get(owner, 0), 0))
        reads = [calls[user] for user in node.users if user in calls]
        spans[owner] = (made, len(calls) if forever else max([last, made, *reads]))
    return spans


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
