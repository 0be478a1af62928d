"""Times of the operators that torch dispatches, in eager PyTorch and in TorchScript, read from torch.profiler.

Both run the graph's operators one after another, so the operators seen running are laid beside the calls of the graph.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd.profiler import profile, record_function

from optimize import graph
from optimize.targets.arrays import to_tensor
from optimize.targets.base import Probing, Runner
from optimize.targets.probe import Probe, Run, TimedKernel, align, attribute, calls_of
from optimize.targets.torch_runner import TorchRunner

RUN = "optimize::run"
#: What TorchScript calls around the operators of a module.
_FRAMES = (RUN, "forward")


class TorchProbe(Probe):
    """A module in this process, in torch's profiler.

    Args:
        asked: Its inputs, and the program whose graph its module runs, where that is known.
    """

    def __init__(self, runner: Runner, asked: Probing) -> None:
        assert isinstance(runner, TorchRunner)
        self._module, self._inputs, self._program = runner.module, tuple(map(to_tensor, asked.inputs)), asked.program
        self._runs: list[list[Any]] = []

    def run(self) -> None:
        """Run once."""
        with torch.inference_mode():
            self._module(*self._inputs)

    def profile(self, times: int) -> None:
        """Run so many times with the profiler."""
        self._runs += _record_runs(self.run, times)

    def finish(self) -> tuple[tuple[TimedKernel, ...], list[Run]]:
        """Return a kernel an operator that no other calls."""
        runs = _alike(self._runs)
        names = [event.name for event in _operators(runs[0])]
        return self.kernels(names), [_read_run(events) for events in runs]

    def kernels(self, names: Sequence[str]) -> tuple[TimedKernel, ...]:
        """Return the kernels of operators that ran, joined by their order to the calls of the graph."""
        if self._program is None:
            return tuple(TimedKernel(name, name.partition("::")[2], ()) for name in names)
        calls = calls_of(self._program)
        nodes = [node for node in self._program.graph.nodes if node.name in calls.reads]
        places = align([_plain(name) for name in names], [graph.op_name(node) for node in nodes])
        claims = [() if place is None else (nodes[place].name,) for place in places]
        found = attribute(calls, claims)
        return tuple(TimedKernel(name, name.partition("::")[2], mine) for name, mine in zip(names, found, strict=True))


def _plain(name: str) -> str:
    """Return the operator that a kernel computes, in ATen's word.

    >>> _plain("aten::relu"), _plain("quantized::conv2d_relu"), _plain("quantized::linear_with_input_q_dq_output_fp32")
    ('relu', 'conv2d', 'linear')
    """
    space, _, kernel = name.partition("::")
    return re.sub(r"_(relu|dynamic|with_\w+)$", "", kernel) if space == "quantized" else kernel


def _record_runs(run: Callable[[], None], times: int) -> list[list[Any]]:
    """Return the profiler's events of each run: the run's own first, then all within it by their start."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch prints a line at each start and stop
    with profile() as recorded:
        for _ in range(times):
            with record_function(RUN):
                run()
    runs: list[list[Any]] = []
    for event in sorted(recorded.function_events, key=lambda event: (event.time_range.start, -event.time_range.end)):
        if event.name == RUN:
            runs.append([event])
        elif runs and event.time_range.end <= runs[-1][0].time_range.end:
            runs[-1].append(event)
    return runs


def _operators(events: Sequence[Any]) -> list[Any]:
    """Return the operators of one run that no other operator calls."""
    return [event for event in events[1:] if _is_outermost(event)]


def _alike(runs: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """Return the runs that called the same operators as the last one: TorchScript changes its mind in the first two."""
    last = [event.name for event in _operators(runs[-1])]
    return [events for events in runs if [event.name for event in _operators(events)] == last]


def _read_run(events: Sequence[Any]) -> Run:
    """Return the times of one run's operators."""
    whole, found = events[0].time_range, _operators(events)
    return Run(
        wall_s=1e-6 * (whole.end - whole.start),
        starts_s=np.array([1e-6 * (event.time_range.start - whole.start) for event in found]),
        durations_s=np.array([1e-6 * (event.time_range.end - event.time_range.start) for event in found]),
        notes=np.array([1 + _descendants(event) for event in found]),
    )


def _is_outermost(event: Any) -> bool:
    parent = event.cpu_parent
    return event.name not in _FRAMES and (parent is None or parent.name in _FRAMES)


def _descendants(event: Any) -> int:
    return sum(1 + _descendants(child) for child in event.cpu_children)
