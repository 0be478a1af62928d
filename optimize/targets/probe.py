"""What every runtime's profiler is asked for, and which calls of the graph each kernel computes.

Runtimes fuse, rename and reorder. What they keep is the name of some call or value, so a kernel *claims* the calls it
is known to compute by name, and the rest follows from the data flow:

1. a layer (a call that multiplies by weights or matrices) that nobody claims belongs to the kernel whose claimed call
   comes from it, with what lies between: ``relu`` names the convolution, BatchNorm and ReLU in one kernel;
2. any other unclaimed call belongs to the last kernel that computes what it reads: runtimes fuse activations and sums
   into what they follow;
3. what reads nothing that is computed (a scaling of the input) belongs to the first kernel that reads it.

So every call of the graph belongs to exactly one kernel, and every kernel serves one weighted layer at most
(``serve``), so that the layers' times add up to the file's.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import fx

from optimize import graph
from optimize.costs import MULTIPLYING, Costs
from optimize.program import Program


@dataclass(frozen=True)
class TimedKernel:
    """One thing a runtime executes.

    Attributes:
        name: Its name in the runtime.
        op: Its kind, in the runtime's word.
        nodes: Names of the calls of the graph that it computes; empty for conversions and layout changes.
        dtype: What it computes in, where the runtime says so; empty otherwise.
    """

    name: str
    op: str
    nodes: tuple[str, ...]
    dtype: str = ""


@dataclass(frozen=True)
class Run:
    """One profiled run.

    Attributes:
        wall_s: Seconds from call to return.
        starts_s: When each kernel began ``[kernels]``, from the start of the run.
        durations_s: How long it took ``[kernels]``.
        notes: Times noted while it ran ``[kernels]``: its own and those of what it calls.
    """

    wall_s: float
    starts_s: np.ndarray
    durations_s: np.ndarray
    notes: np.ndarray


class Probe(ABC):
    """A loaded model that runs with and without its runtime's profiler."""

    @abstractmethod
    def run(self) -> None:
        """Run once, without the profiler."""

    @abstractmethod
    def profile(self, times: int) -> None:
        """Run so many times with the profiler."""

    @abstractmethod
    def finish(self) -> tuple[tuple[TimedKernel, ...], list[Run]]:
        """End profiling; return the kernels in execution order and every profiled run."""

    def costs(self) -> Costs:
        """Return what each call costs where a file alone is known; nothing by default."""
        return Costs({}, frozenset())


@dataclass(frozen=True)
class Calls:
    """The calls of a graph in execution order.

    Attributes:
        reads: Names of the calls that each call reads.
        layers: Those that multiply by weights or matrices.
    """

    reads: Mapping[str, tuple[str, ...]]
    layers: frozenset[str]


def calls_of(program: Program) -> Calls:
    """Return the calls of a program that depend on its inputs."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "call_function" and _is_computed(node)}
    return Calls(
        reads={
            name: tuple(source.name for source in node.all_input_nodes if source.name in nodes)
            for name, node in nodes.items()
        },
        layers=frozenset(name for name, node in nodes.items() if graph.is_call(node, *MULTIPLYING)),
    )


def attribute(calls: Calls, claims: Sequence[Collection[str]]) -> list[tuple[str, ...]]:
    """Return the calls that each kernel computes, every call once, in the order of the graph.

    Args:
        calls: The graph.
        claims: What each kernel, in execution order, is known to compute.

    >>> reads = {"conv": (), "norm": ("conv",), "relu": ("norm",), "add": ("relu",), "conv_1": ("add",)}
    >>> attribute(Calls(reads, frozenset({"conv", "conv_1"})), [("relu",), ("conv_1",)])
    [('conv', 'norm', 'relu', 'add'), ('conv_1',)]
    """
    owners: dict[str, int] = {}
    for kernel, claim in enumerate(claims):
        for name in claim:
            if name in calls.reads:
                owners.setdefault(name, kernel)
    for name, kernel in list(owners.items()):
        for source in calls.reads[name]:
            _take_layers(source, kernel, calls, owners)
    _follow(calls, owners)
    _precede(calls, owners)
    places: list[list[str]] = [[] for _ in claims]
    for name in calls.reads:
        if name in owners:
            places[owners[name]].append(name)
    return [tuple(place) for place in places]


def serve(kernels: Sequence[TimedKernel], calls: Calls, layers: Collection[str]) -> list[str]:
    """Return the weighted layer that each kernel serves, empty where it serves none.

    A kernel serves the layer that it computes, else the layer computed last before what it computes. What computes
    nothing, a conversion, serves what is executed next, and behind all of them what was executed last.

    Args:
        kernels: In execution order.
        calls: The graph.
        layers: Names of the calls that are weighted layers.

    >>> calls = Calls({"conv": (), "relu": ("conv",), "linear": ("relu",)}, frozenset({"conv", "linear"}))
    >>> ran = (), ("conv",), ("relu",), (), ("linear",), ()
    >>> serve([TimedKernel("", "", nodes) for nodes in ran], calls, ["conv", "linear"])
    ['conv', 'conv', 'conv', 'linear', 'linear', 'linear']
    """
    places = {name: place for place, name in enumerate(calls.reads)}
    behind: dict[str, str] = {}
    for name, sources in calls.reads.items():
        found = (behind[source] for source in sources if behind[source])
        behind[name] = name if name in layers else max(found, key=places.__getitem__, default="")
    served = [_layer_of(kernel, behind, layers) for kernel in kernels]
    for order in (range(len(served) - 2, -1, -1), range(1, len(served))):
        for place in order:
            if served[place] is None:
                served[place] = served[place - order.step]
    return [layer or "" for layer in served]


def module_of(name: str) -> str:
    """Return the module in the name of a node; exporters write ``path/Operator``, and converters append their own.

    >>> module_of("stages.0/Relu_1"), module_of("stages.0"), module_of("stages.0/DequantizeLinear/Subtract_4")
    ('stages.0', 'stages.0', 'stages.0')
    """
    return re.sub(r"(?<=.)(/[A-Z]\w*)+$", "", name)


def align(seen: Sequence[str], known: Sequence[str]) -> list[int | None]:
    """Return for each operator that was seen running its place among the known ones, None where it has none.

    Both run in the same order; either may have some that the other lacks. As many as can be have a place (a longest
    common subsequence): integer kernels take in what follows them, so that long stretches seldom agree.

    >>> align(["conv2d", "detach", "relu"], ["conv2d", "add", "relu"])
    [0, None, 2]
    >>> align(["conv2d", "conv2d", "add"], ["conv2d", "relu", "conv2d", "add", "relu", "mean"])
    [0, 2, 3]
    """
    agree = np.array([[one == other for other in known] for one in seen], dtype=bool).reshape(len(seen), len(known))
    # How many of the rest can have places, from each pair on: row by row from behind, each row at once.
    rest = np.zeros((len(seen) + 1, len(known) + 1), dtype=int)
    for row in range(len(seen) - 1, -1, -1):
        best = np.maximum(rest[row + 1, :-1], agree[row] * (1 + rest[row + 1, 1:]))
        rest[row, :-1] = np.maximum.accumulate(best[::-1])[::-1]
    places: list[int | None] = []
    column = 0
    for row in range(len(seen)):
        fits = agree[row, column:] & (rest[row + 1, column + 1 :] + 1 == rest[row, column])
        place = column + int(fits.argmax()) if fits.any() else None
        places.append(place)
        column = column if place is None else place + 1
    return places


def _layer_of(kernel: TimedKernel, behind: Mapping[str, str], layers: Collection[str]) -> str | None:
    """Return the layer of what a kernel computes, the last of several; None where it computes nothing."""
    own = [name for name in kernel.nodes if name in layers] or [behind[name] for name in kernel.nodes[-1:]]
    return own[-1] if own else None


def _take_layers(name: str, kernel: int, calls: Calls, owners: dict[str, int]) -> bool:
    """Give a kernel the nearest unclaimed layers behind a call and what lies between; say whether there are any."""
    if name in owners:
        return False
    # Every source is asked, not only up to the first that has one: a sum may join two layers.
    behind = [] if name in calls.layers else [_take_layers(one, kernel, calls, owners) for one in calls.reads[name]]
    found = name in calls.layers or any(behind)
    if found:
        owners[name] = kernel
    return found


def _follow(calls: Calls, owners: dict[str, int]) -> None:
    for name, sources in calls.reads.items():
        behind = [owners[source] for source in sources if source in owners]
        if name not in owners and behind:
            owners[name] = max(behind)


def _precede(calls: Calls, owners: dict[str, int]) -> None:
    for name in reversed(list(calls.reads)):
        for source in calls.reads[name]:
            if name in owners and source not in owners:
                owners[source] = owners[name]


def _is_computed(node: fx.Node) -> bool:
    """Say whether a call gives tensors that depend on an input: no arithmetic on sizes or on weights."""
    return isinstance(node.meta.get("val"), torch.Tensor | list | tuple) and not graph.weights_behind(node)
