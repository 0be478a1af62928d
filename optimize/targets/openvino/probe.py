"""Times of the kernels that OpenVINO executes, read from its counters and joined to the graph by name.

A counter holds the mean of all runs so far in whole microseconds, so after ``n`` runs the sum is ``n * mean``. Sums are
taken apart only for runs to be left out, the first one and those that the machine interrupted: the rest then keeps the
precision of the mean. A kernel with a mean below one microsecond is said not to have run: it ran where any of its means
says so, which the first one does, as memory is cold then.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from optimize.targets.base import Probing
from optimize.targets.onnx_graph.export import FileNames
from optimize.targets.openvino.coverage import ExecutedNode, read_kernels
from optimize.targets.openvino.runner import compile_file, core
from optimize.targets.probe import Calls, Probe, Run, TimedKernel, attribute, calls_of

_IR_LAYERS = frozenset(
    {
        "Convolution", "BinaryConvolution", "GroupConvolution", "ConvolutionBackpropData",
        "GroupConvolutionBackpropData", "MatMul", "LSTMSequence", "GRUSequence",
    }
)  # fmt: skip
_RECURRENT = ("RNNSeq", "RNNCell")
#: Counters are whole microseconds, rounded down.
_ROUNDED_OFF_S = 0.5e-6
#: A run this many times as long as the lower quartile was interrupted.
_INTERRUPTED = 1.25


class OpenVinoProbe(Probe):
    """One file compiled twice, once with counters.

    Args:
        asked: The file, and the program where it is known: else its kernels are joined to the file's own nodes.

    Raises:
        TargetUnavailable: OpenVINO is not installed.
        Refused: OpenVINO cannot compile the file here.
    """

    def __init__(self, asked: Probing) -> None:
        path, threads = asked.artifact.path, asked.threads
        weights = path.with_suffix(".bin")
        plain = compile_file(path, weights, threads=threads)
        counting = compile_file(path, weights, threads=threads, counters=True)
        self._counting, self._plain = counting.create_infer_request(), plain.create_infer_request()
        model = core().read_model(path, weights)
        self._inputs = list(asked.inputs)
        self._names = (
            ir_names(model) if asked.program is None else FileNames(calls_of(asked.program), asked.artifact.origins)
        )
        self._kernels = read_kernels(counting, {node.get_friendly_name() for node in model.get_ordered_ops()})
        self._walls_s: list[float] = []
        self._counters: list[list[float]] = []

    def run(self) -> None:
        """Run once."""
        self._plain.infer(self._inputs, share_inputs=True)

    def profile(self, times: int) -> None:
        """Run so many times with counters."""
        for _ in range(times):
            start = time.perf_counter()
            self._counting.infer(self._inputs, share_inputs=True)
            self._walls_s.append(time.perf_counter() - start)
            counted = {info.node_name: info.real_time for info in self._counting.profiling_info}
            self._counters.append([counted[kernel.name].total_seconds() for kernel in self._kernels])

    def finish(self) -> tuple[tuple[TimedKernel, ...], list[Run]]:
        """Return a kernel a node that OpenVINO executed, and one run: the mean of those that nothing interrupted."""
        ran = [index for index, means in enumerate(zip(*self._counters, strict=True)) if any(means)]
        executed = [self._kernels[index] for index in ran]
        # Each compiled model puts the stack for signals back that it found: the last one made must be the first to go,
        # or the next signal that Python handles ends the process.
        self._counting = None
        self._plain = None
        found = attribute(self._names.calls, [self._names.claimed(_origins(kernel)) for kernel in executed])
        pairs = zip(executed, found, strict=True)
        kernels = tuple(TimedKernel(kernel.name, kernel.op, mine, kernel.precision) for kernel, mine in pairs)
        means_s = np.array([[counters[index] for index in ran] for counters in self._counters])
        durations_s, wall_s = undisturbed(means_s + _ROUNDED_OFF_S, np.array(self._walls_s))
        starts_s = np.cumsum(durations_s) - durations_s
        return kernels, [Run(wall_s, starts_s, durations_s, np.ones(len(kernels), dtype=int))]


def undisturbed(means_s: np.ndarray, walls_s: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the mean seconds of each kernel and the median seconds of the runs that nothing interrupted.

    Args:
        means_s: The counters after each run ``[runs, kernels]``, at least two runs.
        walls_s: Seconds of each run, end to end ``[runs]``.

    >>> durations, wall = undisturbed(np.array([[9.0], [6.0], [5.0], [104.0]]), np.array([9.0, 3.0, 3.0, 401.0]))
    >>> durations.tolist(), wall
    ([3.0], 3.0)
    """
    sums = means_s * np.arange(1, len(means_s) + 1)[:, None]
    each = np.diff(sums, axis=0)
    kept = walls_s[1:] <= _INTERRUPTED * np.percentile(walls_s[1:], 25)
    durations = (sums[-1] - sums[0] - each[~kept].sum(0)) / kept.sum()
    return np.maximum(durations, _ROUNDED_OFF_S / len(means_s)), float(np.median(walls_s[1:][kept]))


def ir_names(model: Any) -> FileNames:
    """Return the nodes of an OpenVINO model that depend on its inputs, called by their own names."""
    reads: dict[str, tuple[str, ...]] = {}
    inputs = {node.get_friendly_name() for node in model.get_parameters()}
    layers = set()
    for node in model.get_ordered_ops():
        sources = [port.get_source_output().get_node().get_friendly_name() for port in node.inputs()]
        if node.get_type_name() != "Result" and any(source in reads or source in inputs for source in sources):
            reads[node.get_friendly_name()] = tuple(source for source in sources if source in reads)
            layers |= {node.get_friendly_name()} if node.get_type_name() in _IR_LAYERS else set()
    return FileNames(Calls(reads, frozenset(layers)), {name: name for name in reads})


def _origins(kernel: ExecutedNode) -> tuple[str, ...]:
    """Return the nodes of the file that a kernel computes; an LSTM's goes by the name of the layer it lies in."""
    parents = (name.rpartition("/")[0] for name in kernel.origins)
    return (*kernel.origins, *parents) if kernel.op in _RECURRENT else kernel.origins
