"""How long each layer takes in ONNX Runtime: its profiler's time of every node, counted to the layer the node serves.

ONNX Runtime runs another graph than the file holds: it fuses, changes layouts and adds conversions. Every node of that
graph is counted to one weighted layer, so the layers' times add up to the file's:

1. a weighted node, by its name, which the runtime keeps but for an ending (``conv_token_3``), or by the name of the
   value it computes (``relu_nchwc`` is the convolution that the value ``relu`` comes from in the file);
2. what prepares integers or a layout (``QuantizeLinear``, ``ReorderInput``): to the layer that reads the result;
3. all else (activations, sums, poolings, attention between projections): to the layer computed last before it.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from optimize.targets.onnx.runner import feed_of, import_runtime, keep_optimized, open_session, run_of, session_options
from optimize.targets.onnx_graph.nodes import MOVES

#: The profiler writes whole microseconds, rounded down.
_ROUNDED_OFF_S = 0.5e-6
#: Noting one time takes no longer than this; a greater difference to a run without the profiler is noise.
_LARGEST_EXCESS_S = 6e-6
#: What is left of a node's time at least.
_LEAST_SHARE = 0.1
_PREPARE = frozenset({"QuantizeLinear", "DynamicQuantizeLinear", "ReorderInput"})
_VALUE_ENDING = "_nchwc"
_ENDINGS = re.compile(r"(_token_\d+|_nchwc|/MatMulAddFusion)+$")


class ProfiledSession:
    """A session that notes the time of every node.

    Args:
        path: The file.
        layers: Names of its weighted nodes.
        folder: An empty folder for what the profiler writes.
        threads: Threads inside one operator.

    Raises:
        TargetUnavailable: ONNX Runtime is not installed, or cannot run the file.
    """

    def __init__(self, path: Path, layers: Collection[str], folder: Path, *, threads: int = 1) -> None:
        runtime = import_runtime()
        self._plain = open_session(runtime, str(path), session_options(runtime, threads=threads))
        options = session_options(runtime, threads=threads)
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "profile")
        keep_optimized(options, folder / "optimized.onnx")
        self._profiled = open_session(runtime, str(path), options)
        self._unprofiled_s: list[float] = []
        nodes = list(onnx.load(folder / "optimized.onnx", load_external_data=False).graph.node)
        file_nodes = onnx.load(path, load_external_data=False).graph.node
        self._nodes, self._owners = nodes, owners(nodes, file_nodes, layers)

    def run(self, inputs: Sequence[np.ndarray], times: int) -> None:
        """Run so many times on flat arrays with the profiler, and as often without."""
        feed, profiled, plain = feed_of(self._plain, inputs), run_of(self._profiled), run_of(self._plain)
        for _ in range(times):
            profiled(feed)
        for _ in range(times):
            start = time.perf_counter()
            plain(feed)
            self._unprofiled_s.append(time.perf_counter() - start)

    def finish(self) -> dict[str, np.ndarray]:
        """End profiling; return the seconds ``[runs]`` of each layer, and under an empty name of what serves none.

        Noting a time takes time, about the same for every node: it is taken off, so that all add up to a run without
        the profiler.
        """
        events = json.loads(Path(self._profiled.end_profiling()).read_text(encoding="utf-8"))
        times = _node_times(events, self._nodes)
        profiled = np.sum(np.broadcast_arrays(*times), axis=0)
        excess = float(np.percentile(profiled, 25) - np.percentile(self._unprofiled_s, 25)) / len(times)
        found: dict[str, np.ndarray] = {}
        for owner, taken in zip(self._owners, times, strict=True):
            net = taken - min(max(excess, 0.0), _LARGEST_EXCESS_S)
            found[owner] = found.get(owner, 0.0) + np.maximum(net, _LEAST_SHARE * taken)
        return found


def owners(nodes: Sequence[onnx.NodeProto], file_nodes: Iterable[onnx.NodeProto], layers: Collection[str]) -> list[str]:
    """Return the layer that each node of an optimized graph serves, empty where there is none.

    Args:
        nodes: The graph ONNX Runtime runs, in execution order.
        file_nodes: The graph of the file.
        layers: Names of the weighted nodes of the file.
    """
    values = _behind(file_nodes, lambda node: node.name if node.name in layers else "")

    def layer(node: onnx.NodeProto) -> str:
        name = _ENDINGS.sub("", node.name)
        if name in layers:
            return name
        return values.get(name, "") if node.name.endswith(_VALUE_ENDING) else ""

    behind, ahead = _behind(nodes, layer), _ahead(nodes, layer)
    return [layer(node) or _served(node, behind, ahead) for node in nodes]


def _served(node: onnx.NodeProto, behind: Mapping[str, str], ahead: Mapping[str, str]) -> str:
    before, after = behind.get(node.output[0], ""), ahead.get(node.output[0], "")
    return after or before if node.op_type in _PREPARE else before or after


def _behind(nodes: Iterable[onnx.NodeProto], layer: Callable[[onnx.NodeProto], str]) -> dict[str, str]:
    """Return the layer each value comes from: of several inputs, the one computed last decides."""
    found: dict[str, tuple[int, str]] = {}
    for index, node in enumerate(nodes):
        inherited = max((found[value] for value in node.input if value in found), default=(-1, ""))
        own = layer(node)
        for value in node.output:
            found[value] = (index, own or inherited[1])
    return {value: name for value, (_, name) in found.items() if name}


def _ahead(nodes: Sequence[onnx.NodeProto], layer: Callable[[onnx.NodeProto], str]) -> dict[str, str]:
    """Return the first layer that reads each value, at once or behind conversions and moves."""
    found: dict[str, str] = {}
    for node in reversed(nodes):
        passes = node.op_type in _PREPARE or node.op_type in MOVES
        reader = layer(node) or (found.get(node.output[0], "") if passes else "")
        if reader:
            found.update(dict.fromkeys(node.input[:1], reader))
    return found


def _node_times(events: Iterable[Mapping[str, Any]], nodes: Sequence[onnx.NodeProto]) -> list[np.ndarray]:
    """Return the seconds ``[runs]`` of each node; nodes of one name and operator are told apart by their order.

    The profiler makes up a name for a node without.
    """
    taken: dict[tuple[str, str], list[float]] = defaultdict(list)
    names = {node.name for node in nodes}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            name = event["name"].removesuffix("_kernel_time")
            key = name if name in names else "", event["args"]["op_name"]
            taken[key].append(event["dur"] * 1e-6 + _ROUNDED_OFF_S)
    alike: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, node in enumerate(nodes):
        alike[node.name, node.op_type].append(index)
    times = [np.zeros(1)] * len(nodes)
    for key, places in alike.items():
        runs = np.asarray(taken[key][: len(taken[key]) // len(places) * len(places)]).reshape(-1, len(places))
        for column, index in enumerate(places if len(runs) else ()):
            times[index] = runs[:, column]
    return times
