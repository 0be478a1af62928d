"""Times of the kernels that ONNX Runtime executes, read from its profile and joined to the graph by name.

ONNX Runtime runs another graph than the file holds: it fuses, changes layouts and adds conversions.
"""

from __future__ import annotations

import bisect
import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from optimize.costs import Costs, Formula, NodeCost, convolution_macs, product_macs, transposed_macs
from optimize.targets.base import Probing
from optimize.targets.onnx.coverage import is_integer
from optimize.targets.onnx.reading import read_checked
from optimize.targets.onnx.runner import feed_of, import_runtime, keep_optimized, open_session, run_of, session_options
from optimize.targets.onnx.untrusted.tensors import load_outside
from optimize.targets.onnx_graph.export import FileNames
from optimize.targets.probe import Calls, Probe, Run, TimedKernel, attribute, calls_of

#: The profiler writes whole microseconds, rounded down.
_ROUNDED_OFF_S = 0.5e-6
_ENDING = "_kernel_time"


class OnnxProbe(Probe):
    """Two sessions of one file, one with the profiler.

    Args:
        asked: The file, and the program where it is known: else its kernels are joined to the file's own nodes.

    Raises:
        TargetUnavailable: ONNX Runtime is not installed, or cannot run the file.
    """

    def __init__(self, asked: Probing) -> None:
        runtime, path, folder, threads = import_runtime(), asked.artifact.path, asked.folder, asked.threads
        self._plain = open_session(runtime, str(path), session_options(runtime, threads=threads))
        options = session_options(runtime, threads=threads)
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "profile")
        keep_optimized(options, folder / "optimized.onnx")
        self._profiled = open_session(runtime, str(path), options)
        self._path, self._inputs, self._feed = path, asked.inputs, feed_of(self._plain, asked.inputs)
        self._run_plain, self._run_profiled = run_of(self._plain), run_of(self._profiled)
        self._executed = list(onnx.load(folder / "optimized.onnx", load_external_data=False).graph.node)
        self._names = (
            onnx_names(path) if asked.program is None else FileNames(calls_of(asked.program), asked.artifact.origins)
        )
        self._walls_s: list[float] = []

    def run(self) -> None:
        """Run once."""
        self._run_plain(self._feed)

    def profile(self, times: int) -> None:
        """Run so many times with the profiler."""
        for _ in range(times):
            start = time.perf_counter()
            self._run_profiled(self._feed)
            self._walls_s.append(time.perf_counter() - start)

    def finish(self) -> tuple[tuple[TimedKernel, ...], list[Run]]:
        """Return a kernel a node of the graph that ONNX Runtime executes."""
        events = json.loads(Path(self._profiled.end_profiling()).read_text(encoding="utf-8"))
        runs = [_with_nodes(run, self._executed) for run in split_runs(events)]
        self._executed = [node for _, node in runs[0]]
        found = attribute(self._names.calls, claims_of(self._executed, self._names))
        pairs = zip(self._executed, found, strict=True)
        kernels = tuple(
            TimedKernel(node.name or node.output[0], node.op_type, mine, "int8" if is_integer(node) else "")
            for node, mine in pairs
        )
        timed = ([event for event, _ in run] for run in runs)
        return kernels, [_read(run, wall_s) for run, wall_s in zip(timed, self._walls_s, strict=True)]

    def costs(self) -> Costs:
        """Return what each node of the file costs."""
        return onnx_costs(self._path, self._inputs)


def onnx_names(path: Path) -> FileNames:
    """Return the nodes of an ONNX file, called by their own names (or by their first output where they have none)."""
    nodes = list(read_checked(path, trust=True).graph.node)  # what it asks for was judged when it was opened
    keys = [node.name or node.output[0] for node in nodes]
    made = {value: key for key, node in zip(keys, nodes, strict=True) for value in node.output if value}
    reads = {
        key: tuple(made[value] for value in node.input if value in made) for key, node in zip(keys, nodes, strict=True)
    }
    layers = frozenset(key for key, node in zip(keys, nodes, strict=True) if node.op_type in MULTIPLYING)
    return FileNames(Calls(reads, layers), {**made, **dict(zip(keys, keys, strict=True))})


def split_runs(events: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the kernel events of each run in the order they began."""
    runs = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == "model_run")
    kernels = [event for event in events if event.get("cat") == "Node" and event["name"].endswith(_ENDING)]
    kernels.sort(key=lambda event: event["ts"])
    times = [event["ts"] for event in kernels]
    return [kernels[bisect.bisect_left(times, start) : bisect.bisect_right(times, end)] for start, end in runs]


def claims_of(nodes: Sequence[onnx.NodeProto], names: FileNames) -> list[set[str]]:
    """Return the calls that each executed node is known to compute.

    A node says what it computes by its name and by the values it gives; a value in another layout gets its name only
    from the conversion behind it, and is counted to the node in front of that.
    """
    makers = {value: index for index, node in enumerate(nodes) for value in node.output}
    claims = [set(names.claimed([node.name])) for node in nodes]
    for index, node in enumerate(nodes):
        maker = makers.get(node.input[0], index) if node.op_type == "ReorderOutput" else index
        claims[maker] |= set(names.claimed(node.output))
    return claims


def _with_nodes(
    run: Sequence[Mapping[str, Any]], nodes: Sequence[onnx.NodeProto]
) -> list[tuple[Mapping[str, Any], onnx.NodeProto]]:
    """Return each event with its node; nodes of one name and operator run in their order.

    The profiler makes up a name for a node without. What runs inside a Loop, an If or a Scan is part of that one.
    """
    names = {node.name for node in nodes}
    waiting: dict[tuple[str, str], list[onnx.NodeProto]] = defaultdict(list)
    for node in nodes:
        waiting[node.name, node.op_type].append(node)
    kept = []
    for event in run:
        name, op = _key(event)
        if mine := waiting[name if name in names else "", op]:
            kept.append((event, mine.pop(0)))
    return kept


def _key(event: Mapping[str, Any]) -> tuple[str, str]:
    return event["name"].removesuffix(_ENDING), event["args"]["op_name"]


def _read(events: Sequence[Mapping[str, Any]], wall_s: float) -> Run:
    first = events[0]["ts"] if events else 0
    return Run(
        wall_s=wall_s,
        starts_s=np.array([1e-6 * (event["ts"] - first) for event in events]),
        durations_s=np.array([1e-6 * event["dur"] + _ROUNDED_OFF_S for event in events]),
        notes=np.ones(len(events), dtype=int),
    )


_VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Shape", "Constant"})


@dataclass(frozen=True)
class _Value:
    shape: tuple[int, ...]
    size_bytes: int
    dtype: str
    is_weight: bool


def onnx_costs(path: Path, inputs: Sequence[np.ndarray]) -> Costs:
    """Return the cost of every node of a file for one run on these inputs, by node name.

    Values whose shape ONNX cannot infer count no bytes.
    """
    model = read_checked(path, trust=True)  # what it asks for was judged when it was opened
    load_outside(model.graph.initializer, path.parent)
    for entry, array in zip(model.graph.input, inputs, strict=False):
        for dim, size in zip(entry.type.tensor_type.shape.dim, array.shape, strict=True):
            dim.dim_value = size
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    values = _values(inferred)
    owners = _owners(inferred.node)
    costs = [_cost(node, values, owners) for node in inferred.node]
    outputs = frozenset(owners[entry.name] for entry in inferred.output if entry.name in owners)
    return Costs({cost.name: cost for cost in costs}, outputs)


def _values(whole: onnx.GraphProto) -> dict[str, _Value]:
    found = {
        entry.name: _Value(tuple(entry.dims), _size(entry.dims, entry.data_type), _dtype(entry.data_type), True)
        for entry in whole.initializer
    }
    for info in (*whole.input, *whole.value_info, *whole.output):
        kind = info.type.tensor_type
        shape = tuple(dim.dim_value for dim in kind.shape.dim)
        entry = _Value(shape, _size(shape, kind.elem_type), _dtype(kind.elem_type), False)
        found.setdefault(info.name, entry)
    return found


def _owners(nodes: Sequence[onnx.NodeProto]) -> dict[str, str]:
    """Return the node whose bytes each value holds: the one that makes it, or that makes what it is a view of."""
    owners: dict[str, str] = {}
    for node in nodes:
        is_view = node.op_type in _VIEWS and node.input
        for value in node.output:
            owners[value] = owners.get(node.input[0], node.input[0]) if is_view else _name(node)
    return owners


def _cost(node: onnx.NodeProto, values: Mapping[str, _Value], owners: Mapping[str, str]) -> NodeCost:
    moves = node.op_type not in _VIEWS
    known = [values[name] for name in node.input if name in values]
    made = [values[name] for name in node.output if name in values]
    reads: dict[str, int] = {}
    for name in node.input if moves else ():
        if name in values:
            owner = owners.get(name, name)
            reads[owner] = reads.get(owner, 0) + values[name].size_bytes
    formula = _FORMULAS.get(node.op_type)
    return NodeCost(
        name=_name(node),
        op=node.op_type,
        layer=_name(node),
        macs=formula([entry.shape for entry in known], made[0].shape) if formula and made else 0,
        parameters=sum(math.prod(entry.shape) for entry in known if entry.is_weight),
        reads=reads,
        written_bytes=sum(entry.size_bytes for entry in made) if moves else 0,
        dtype=made[0].dtype if made else "",
    )


def _name(node: onnx.NodeProto) -> str:
    return node.name or node.output[0]


def _size(shape: Sequence[int], kind: int) -> int:
    return math.prod(shape) * np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind)).itemsize if kind else 0


def _dtype(kind: int) -> str:
    return str(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind))) if kind else ""


#: Those of ``optimize.costs`` on the shapes of a node's inputs and of its first output.
_FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("Conv", "ConvInteger"), convolution_macs),
    "QLinearConv": lambda shapes, made: convolution_macs(shapes[2:], made),
    "ConvTranspose": transposed_macs,
    "Gemm": lambda shapes, made: math.prod(made) * (math.prod(shapes[0]) // made[0]),
    **dict.fromkeys(("MatMul", "MatMulInteger"), product_macs),
    **dict.fromkeys(("LSTM", "GRU"), lambda x, made: math.prod(x[0][:-1]) * (math.prod(x[1]) + math.prod(x[2]))),
}
#: Kinds of nodes with multiply-accumulates.
MULTIPLYING = frozenset(_FORMULAS)
