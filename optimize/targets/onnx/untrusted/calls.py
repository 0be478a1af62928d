"""What nodes call: operators with the inputs they need, and functions that stay few when every call is written out."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto

from optimize.errors import Refused
from optimize.regular import shown

#: Nodes with every call written out, and what they take as they stand in the file, beyond so many times what is in it:
#: layers call functions of a few nodes, or share one. The largest language models have some 1e5 nodes.
MOST_NODES, _MOST_BYTES, _TIMES = 100_000, 16 << 20, 32
#: Calls inside one another.
MOST_DEPTH = 64
#: Operators that other domains have with the same inputs.
_ALIKE = ("QuantizeLinear", "DequantizeLinear")
Key = tuple[str, str, str]


def key_of(node: NodeProto) -> Key:
    """Return the name that a node calls its operator or function by."""
    return "" if node.domain == "ai.onnx" else node.domain, node.op_type, node.overload


def functions_of(model: ModelProto) -> dict[Key, FunctionProto]:
    """Return the functions of a model by the names they are called by."""
    return {("" if f.domain == "ai.onnx" else f.domain, f.name, f.overload): f for f in model.functions}


def graphs_of(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the graphs in a node's attributes; protobuf itself bounds how deep they nest."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


@functools.cache
def _input_counts() -> Mapping[str, tuple[int, int]]:
    """Return the fewest and the most inputs of each operator of ONNX, over all its versions."""
    found: dict[str, tuple[int, int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.domain:
            fewest, most = found.get(schema.name, (schema.min_input, schema.max_input))
            found[schema.name] = min(fewest, schema.min_input), max(most, schema.max_input)
    return found


def check_calls(model: ModelProto, path: Path) -> None:
    """Check that every node has the inputs of its operator, and that a model stays small when calls are written out.

    Raises:
        Refused: An input is missing or one too many; it has far more nodes then, a function calls itself, or one name
            is that of two things.
    """
    functions = functions_of(model)
    if len(functions) < len(model.functions):
        raise Refused(f"'{shown(path)}' has two functions of one name.", hint="Export the model again.")
    hidden = next((name for domain, name, _ in functions if not domain), None)
    if hidden is not None:  # it depends on the runtime which of the two a node of that name is
        raise Refused(f"'{shown(path)}' has a function by the name of an operator, '{shown(hidden)}'.")
    counter = _Counter(functions, path)
    written = [counter.of_function(function, 0) for function in functions]
    written.append(counter.of_nodes(model.graph.node, 0))
    nodes, length = MOST_NODES + _TIMES * counter.nodes, _MOST_BYTES + _TIMES * counter.length
    if any(found.nodes > nodes or found.length > length for found in written):
        raise Refused(
            f"'{shown(path)}' has more than {nodes} nodes or {length} bytes when its functions are written out.",
            hint="Do not open this file, unless you know who made it and why it is so.",
        )


class _Size(NamedTuple):
    """Nodes with every call written out, their bytes, and how many calls are inside one another."""

    nodes: int
    length: int
    height: int


class _Counter:
    """Multiplies what functions hold by how often they are called, each function looked at once.

    Attributes:
        nodes: That were looked at.
        length: Their bytes.
    """

    def __init__(self, functions: dict[Key, FunctionProto], path: Path) -> None:
        self._functions, self._path = functions, path
        self._known: dict[Key, _Size | None] = {}
        self.nodes, self.length = 0, 0

    def of_function(self, key: Key, depth: int) -> _Size:
        """Return the size of a function."""
        if key not in self._known:
            self._check_depth(depth)
            self._known[key] = None
            self._known[key] = self.of_nodes(self._functions[key].node, depth)
        found = self._known[key]
        if found is None:
            raise Refused(
                f"'{shown(self._path)}' has a function '{shown(key[1])}' that calls itself, which ONNX does not allow.",
                hint="Export the model again.",
            )
        return found

    def of_nodes(self, nodes: Iterable[NodeProto], depth: int) -> _Size:
        """Return the size of nodes and of the graphs in them."""
        count, total, height = 0, 0, 0
        for node in nodes:
            self._check_inputs(node)
            length = node.ByteSize()
            self.nodes, self.length = self.nodes + 1, self.length + length
            called = [self.of_function(key_of(node), depth + 1)] if key_of(node) in self._functions else []
            inside = [self.of_nodes(graph.node, depth) for graph in graphs_of(node)]
            count += 1 + sum(found.nodes for found in (*called, *inside))
            total += length + sum(found.length for found in (*called, *inside))
            height = max([height, *(1 + found.height for found in called), *(found.height for found in inside)])
        self._check_depth(depth + height)
        return _Size(count, total, height)

    def _check_inputs(self, node: NodeProto) -> None:
        """Check the number of a node's inputs: who reads a graph takes the first ones of an operator for granted."""
        if key_of(node)[0] and node.op_type not in _ALIKE:
            return
        fewest, most = _input_counts().get(node.op_type, (0, len(node.input)))
        if not fewest <= len(node.input) <= most:
            raise Refused(
                f"'{shown(self._path)}' has a node {shown(node.op_type)} with {len(node.input)} inputs; "
                f"ONNX wants {fewest} to {most}.",
                hint="Export the model again.",
            )

    def _check_depth(self, depth: int) -> None:
        if depth > MOST_DEPTH:
            raise Refused(
                f"'{shown(self._path)}' has calls of functions more than {MOST_DEPTH} deep.",
                hint="Export the model with its functions inlined.",
            )
