"""How much a file makes a runtime compute and keep, as far as the file alone tells: loops and growing constants."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from optimize.errors import Refused
from optimize.regular import shown
from optimize.targets.base import HINT, MOST_ELEMENTS, MOST_STEPS
from optimize.targets.onnx.untrusted.calls import functions_of, key_of
from optimize.targets.onnx.untrusted.inference import SMALL, UNKNOWN, Attributes, NodeView, Static, attempt, inferred
from optimize.targets.onnx.untrusted.tensors import elements_of, stored_tensors

#: What is computed from stored weights (transposed, cast, dequantized) may be this many times as large.
_COPIES = 16
#: Operators that make a value as large as their arguments say.
GROWING = frozenset({
    "ConstantOfShape", "Expand", "Tile", "Range", "OneHot", "Pad", "Resize", "Upsample",
    "RandomNormal", "RandomUniform",
})  # fmt: skip
_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
#: Products of integers, whose output ONNX Runtime leaves as memory was where there is nothing to sum over.
_INTEGER_PRODUCTS = frozenset(
    {"MatMulInteger", "ConvInteger", "QLinearMatMul", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QGemm"}
)
#: Products that become one of those between DequantizeLinear and QuantizeLinear.
_PRODUCTS = frozenset({"MatMul", "Gemm"})
Scope = MutableMapping[str, Static]


def check_work(model: ModelProto, path: Path) -> None:
    """Check that loops end, that constants stay small, and that products have something to sum over.

    A loop over what the user puts in (its trip count is computed from an input) is not judged here: the process that
    runs the file is limited.

    Raises:
        Refused: What is executed or kept is more than an honest file asks for, or a loop has no bound; or a factor of
            a product has no elements: of integers any, of others a constant.
    """
    stored = sum(map(elements_of, stored_tensors(model)))
    survey = _Survey(functions_of(model), path, MOST_ELEMENTS + _COPIES * stored)
    survey.graph(model.graph, {}, 1, _input)


class _Survey:
    """Goes through every node once for each place it is called from.

    Args:
        functions: Of the model.
        most_elements: Of what is computed from constants.
    """

    def __init__(self, functions: Mapping[Any, FunctionProto], path: Path, most_elements: int) -> None:
        self._functions, self._path, self._most_elements = functions, path, most_elements
        self._steps, self._grown = 0, 0

    def graph(self, graph: GraphProto, outer: Scope, times: int, known: Callable[[Any], Static]) -> None:
        """Go through a graph that is executed so many times, with what is known of each of its inputs."""
        scope: Scope = ChainMap({}, outer)
        for entry in graph.input:
            scope[entry.name] = known(entry)
        for tensor in graph.initializer:
            scope[tensor.name] = self._stored(tensor)
        for sparse in graph.sparse_initializer:
            scope[sparse.values.name] = self._grow(Static(tuple(sparse.dims), fixed=True), "SparseTensor")
        self._nodes(graph.node, scope, times, {})

    def _nodes(self, nodes: Iterable[NodeProto], scope: Scope, times: int, given: Attributes) -> None:
        for node in nodes:
            self._count(times, node)
            outputs = self._node(node, scope, times, given)
            for name, static in zip(node.output, outputs, strict=False):
                if name:
                    scope[name] = static

    def _node(self, node: NodeProto, scope: Scope, times: int, given: Attributes) -> list[Static]:
        attributes = _resolved(node.attribute, given)
        inputs = [scope.get(name, UNKNOWN) if name else None for name in node.input]
        function = self._functions.get(key_of(node))
        if function is not None:
            return self._call(function, inputs, attributes, times)
        empty = [static for static in inputs if static and static.shape and 0 in static.shape]
        if any(node.op_type in _INTEGER_PRODUCTS or (static.fixed and node.op_type in _PRODUCTS) for static in empty):
            raise Refused(
                f"'{shown(self._path)}' multiplies nothing in '{_name(node)}': its answer is what lay in memory.",
                hint=HINT,
            )
        if node.domain not in ("", "ai.onnx"):
            return []
        if node.op_type in ("Loop", "Scan", "If"):
            return self._control(node, inputs, attributes, scope, times)
        call = NodeView(node.op_type, inputs, attributes)
        if node.op_type in _RECURRENT:
            self._count(times * (attempt(lambda: call.shape(0)[call.attribute("layout", 0)]) or 1), node)
        found = self._constant(attributes) if node.op_type == "Constant" else inferred(call)
        return [self._grow(found, node.op_type), *[Static(fixed=found.fixed)] * (len(node.output) - 1)]

    def _call(
        self, function: FunctionProto, inputs: Sequence[Static | None], attributes: Attributes, times: int
    ) -> list[Static]:
        scope: Scope = {name: static or UNKNOWN for name, static in zip(function.input, inputs, strict=False)}
        defaults = {entry.name: entry for entry in function.attribute_proto}
        self._nodes(function.node, scope, times, {**defaults, **attributes})
        return [scope.get(name, UNKNOWN) for name in function.output]

    def _control(
        self, node: NodeProto, inputs: Sequence[Static | None], attributes: Attributes, scope: Scope, times: int
    ) -> list[Static]:
        """Go through what a Loop, Scan or If executes; what comes out of it is not followed."""
        if node.op_type == "Loop":
            times *= self._trips(node, inputs)
        elif node.op_type == "Scan":
            times *= attempt(lambda: _scanned(NodeView("Scan", inputs, attributes))) or 1
        for entry in attributes.values():
            if entry.HasField("g"):
                # What goes round in a loop changes: nothing is known of it.
                self.graph(entry.g, scope, times, lambda _: UNKNOWN)
        return [UNKNOWN] * len(node.output)

    def _trips(self, node: NodeProto, inputs: Sequence[Static | None]) -> int:
        """Return how often a Loop runs; once where the data says it."""
        limit, goes_on = (*inputs, None, None)[:2]
        if goes_on is not None and goes_on.value is not None and not goes_on.value.any():
            return 0
        if limit is None:
            raise self._refusal(f"the loop '{_name(node)}' has no largest number of rounds")
        if limit.value is not None and limit.value.size == 1 and limit.value.dtype.kind in "iu":
            trips = max(limit.value.item(), 0)
            if trips > MOST_STEPS:
                raise self._refusal(f"the loop '{_name(node)}' may run {trips} rounds; {MOST_STEPS} are allowed")
            return trips
        if limit.fixed:
            raise self._refusal(f"how often the loop '{_name(node)}' runs is hidden in what it is computed from")
        return 1

    def _count(self, steps: int, node: NodeProto) -> None:
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise self._refusal(f"more than {MOST_STEPS} nodes are executed, with '{_name(node)}' the last of them")

    def _grow(self, static: Static, op: str) -> Static:
        """Add up what is computed from constants, and refuse what is too large."""
        if static.shape is None:
            return static
        elements = math.prod(static.shape)
        self._grown += elements if static.fixed else 0
        if self._grown > self._most_elements or (op in GROWING and elements > self._most_elements):
            raise self._refusal(
                f"a node {shown(op)} makes {elements} elements from constants ({self._grown} with those before); "
                f"{self._most_elements} are allowed"
            )
        return static

    def _constant(self, attributes: Attributes) -> Static:
        for name, entry in attributes.items():
            if name == "value":
                return self._stored(entry.t)
            if name == "sparse_value":
                return Static(tuple(entry.sparse_tensor.dims), fixed=True)
            if name in ("value_int", "value_ints", "value_float", "value_floats"):
                kind = np.int64 if "int" in name else np.float32
                plural = np.array(entry.ints or entry.floats, kind)
                value = plural if name.endswith("s") else np.array(entry.i if "int" in name else entry.f, kind)
                return Static(value.shape, value if value.size <= SMALL else None, fixed=True)
        return Static(fixed=True)

    def _stored(self, tensor: TensorProto) -> Static:
        shape, value = tuple(tensor.dims), None
        if math.prod(shape) <= SMALL and tensor.data_type != TensorProto.STRING:
            try:
                value = numpy_helper.to_array(tensor, str(self._path.parent))
            except Exception:  # a kind that NumPy lacks, or a link that onnx does not follow: its sizes still count
                value = None
        return Static(shape, value, fixed=True)

    def _refusal(self, reason: str) -> Refused:
        return Refused(f"'{shown(self._path)}' asks for too much: {reason}.", hint=HINT)


def _resolved(attributes: Iterable[AttributeProto], given: Attributes) -> dict[str, AttributeProto]:
    """Return attributes by name; those that a function leaves to its caller are the caller's."""
    found = {}
    for entry in attributes:
        own = given.get(entry.ref_attr_name) if entry.ref_attr_name else entry
        if own is not None:
            found[entry.name] = own
    return found


def _input(entry: Any) -> Static:
    kind = entry.type.tensor_type
    sizes = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim]
    return Static(tuple(sizes)) if kind.HasField("shape") and min(sizes, default=0) >= 0 else UNKNOWN


def _scanned(call: NodeView) -> int:
    """Return how often a Scan runs: the size of what it goes along."""
    count = call.attribute("num_scan_inputs")
    axis = call.attribute("scan_input_axes", [0])[0]
    return call.shape(len(call.inputs) - count)[axis]


def _name(node: NodeProto) -> str:
    return shown(node.name or next(iter(node.output), node.op_type))
