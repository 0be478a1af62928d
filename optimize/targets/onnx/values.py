"""The float values an ONNX file computes, by their names before it was quantized, and which ones two files share.

A value that is stored as integers stands for what its readers see: the output of its ``DequantizeLinear``. That goes
by the name of the value that was quantized: of the input of the ``QuantizeLinear`` where both have one scale (NNCF
makes up other names), else by its own name without the ending its writer added (``relu_dq`` of this package,
``relu_DequantizeLinear_Output`` of ONNX Runtime's ``quantize_static``). A writer that leaves a Relu to saturation
gives the value in front of the rounding the Relu's name; the one behind it is the Relu's output in fact.

Two files share a value

1. that has one name in both;
2. else, that ends a weighted node of one name in both: its output, or that of the Relu or Clip behind it;
3. else, where nothing is shared that way, that ends the k-th weighted node of both.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from optimize.errors import Refused
from optimize.targets.base import NUMBERS, Basis, FileValues, Shared, TensorSpec
from optimize.targets.onnx.reading import read_checked
from optimize.targets.onnx.runner import open_unfused, run_of
from optimize.targets.onnx.untrusted.calls import graphs_of
from optimize.targets.onnx_graph.nodes import constant, maker, name_of, operator_of, readers
from optimize.targets.packaging import of_chance

_ENDINGS = ("_DequantizeLinear_Output", "_dq", "_before", "_QuantizeLinear_Input")
_QUANTIZERS = frozenset({"QuantizeLinear", "DynamicQuantizeLinear"})
#: Operators that quantize or compute in integers, of the standard and of ONNX Runtime; types of weights in half.
_INTEGER = re.compile("Quantize|^QLinear|Integer$|NBits|^QMoE|^QAttention|^QGemm")
_HALVES = {onnx.TensorProto.BFLOAT16: "bfloat16", onnx.TensorProto.FLOAT16: "float16"}
_OF_CHANCE = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
_FAMILIES = {"Conv": "convolution", "ConvTranspose": "transposed convolution", "Gemm": "linear", "MatMul": "linear"}
_BEHIND = frozenset({"Relu", "Clip", "QuantizeLinear", "DequantizeLinear"})
_REALS = frozenset({"float16", "float32", "float64", "bfloat16"})
_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE, ir.DataType.BFLOAT16})


@dataclass(frozen=True)
class Values(FileValues):
    """What a file computes.

    Attributes:
        model: The file; weights outside it stay there.
        folder: Where such weights lie.
        named: The value to read for each name, inputs first, then in execution order.
    """

    model: ir.Model
    folder: Path
    named: dict[str, ir.Value]
    _proto: onnx.ModelProto = field(repr=False)

    def shared(self, other: FileValues) -> list[Shared]:
        """Return the values that another ONNX file with as many outputs shares, in its order of execution.

        Raises:
            Refused: The files share nothing between inputs and outputs.
        """
        assert isinstance(other, Values)
        taken: set[ir.Value] = set()
        ends = _untaken(_by_output(self, other), taken)
        inner = _untaken(_by_name(self, other), taken) + _untaken(_by_node(self, other), taken)
        if all(pair.first.producer() is None for pair in inner):
            inner += _untaken(_by_position(self, other), taken)
        if all(pair.first.producer() is None for pair in inner):
            raise Refused(
                "The files share no value between inputs and outputs: no name is the same, and their weighted layers "
                "do not correspond one to one.",
                hint="Leave --layers out, or compare with the float file that the other one was made from.",
            )
        order = other.order()
        return sorted([*inner, *ends], key=lambda pair: order.get(pair.second, -1))

    def sources(self, values: Sequence[ir.Value]) -> list[list[int]]:
        """Return for each of some values the places of the nearest ones that it is computed from."""
        places = {value: index for index, value in enumerate(values)}
        return [[places[source] for source in _sources(value, places)] for value in values]

    def reader(self, values: Sequence[ir.Value]) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
        """Return a function from flat inputs to these values, computed operator by operator, none fused.

        Raises:
            Refused: ONNX Runtime cannot run the file that way.
        """
        del self._proto.graph.output[:]
        self._proto.graph.output.extend(onnx.ValueInfoProto(name=name_of(value)) for value in values)
        session = open_unfused(self._proto.SerializeToString(), self.folder)
        names, run = [entry.name for entry in session.get_inputs()], run_of(session)
        return lambda arrays: run(dict(zip(names, arrays, strict=True)))

    def order(self) -> dict[ir.Value, int]:
        """Return the place of every computed value in the order of execution."""
        outputs = itertools.chain.from_iterable(node.outputs for node in self.model.graph)
        return {value: index for index, value in enumerate(outputs)}


def read_values(path: Path, *, trust: bool = False) -> Values:
    """Read a file without running it.

    Args:
        trust: As ``read_checked`` takes it.

    Raises:
        Refused: It is missing, unreadable or no ONNX model, or ``read_checked`` refuses it.
    """
    return _values_of(read_checked(path, trust=trust), path)


def _values_of(checked: onnx.ModelProto, path: Path) -> Values:
    try:
        model = ir.from_proto(checked)
        ir.external_data.set_base_dir(model.graph, path.parent)
        proto = ir.to_proto(model)
    except Exception as error:  # protobuf's and onnx-ir's errors have no common class
        raise Refused(f"'{path}' is not a readable ONNX model: {error}.", hint="Write the file again.") from error
    if not len(model.graph) or not model.graph.outputs:
        raise Refused(f"'{path}' is not an ONNX model with a graph in it.", hint="Write the file again.")
    return Values(model, path.parent, _named(model.graph), proto)


def inputs_of(model: onnx.ModelProto, path: Path) -> tuple[TensorSpec, ...]:
    """Return what a checked file takes, and how many tokens its integers may name.

    Raises:
        Refused: An input is no tensor of numbers, or has a negative size.
    """
    held = {tensor.name for tensor in model.graph.initializer}
    specs = tuple(_spec(entry) for entry in model.graph.input if entry.name not in held)
    for spec in specs:
        if spec.dtype not in NUMBERS:
            raise Refused(f"'{path}' takes '{spec.name}'; only tensors of numbers can be given here.")
        if any(isinstance(size, int) and size < 0 for size in spec.shape):
            raise Refused(f"'{path}' takes '{spec}': a size is negative.", hint="Write a free size as a name.")
    if all(spec.dtype in _REALS for spec in specs):
        return specs
    values = _values_of(model, path)
    return tuple(
        spec if spec.dtype in _REALS else replace(spec, tokens=_rows_of_table(values, spec.name)) for spec in specs
    )


def outputs_of(model: onnx.ModelProto) -> tuple[TensorSpec, ...]:
    """Return what a file gives; the type of what is no tensor of numbers is empty."""
    return tuple(_spec(entry) for entry in model.graph.output)


def notes_of(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return what is to be told of a file's operators, those of its functions and inner graphs included."""
    found, waiting = set[str](), [model.graph, *model.functions]
    while waiting:
        part = waiting.pop()
        inert = {"", *_falses(part)}
        for node in part.node:
            is_on = node.op_type == "Dropout" and any(name not in inert for name in node.input[2:])  # in training
            found |= {node.op_type} if is_on or node.op_type in _OF_CHANCE else set()
            waiting += graphs_of(node)
    return of_chance(found)


def _falses(part: onnx.GraphProto | onnx.FunctionProto) -> Iterator[str]:
    """Yield the names of the constants of a graph or function that are False."""
    stored = [(tensor.name, tensor) for tensor in part.initializer] if isinstance(part, onnx.GraphProto) else []
    for node in part.node:
        if node.op_type == "Constant":
            stored += [(name, entry.t) for name in node.output for entry in node.attribute if entry.name == "value"]
    for name, tensor in stored:
        is_zero = tensor.raw_data == b"\0" if tensor.HasField("raw_data") else [*tensor.int32_data] == [0]
        if tensor.data_type == onnx.TensorProto.BOOL and is_zero and not tensor.external_data:
            yield name


def precision_of(model: onnx.ModelProto) -> str:
    """Return ``int8`` of a file that quantizes, the half type that weights or inputs of another are in; else empty."""
    if any(_INTEGER.search(node.op_type) for node in model.graph.node):
        return "int8"
    types = {tensor.data_type for tensor in model.graph.initializer}
    types |= {entry.type.tensor_type.elem_type for entry in model.graph.input}
    return next((name for kind, name in _HALVES.items() if kind in types), "")


def _spec(entry: onnx.ValueInfoProto) -> TensorSpec:
    """Return an input or output; a free size without a name is ``?``."""
    kind = entry.type.tensor_type
    sizes = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in kind.shape.dim]
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name
    except (KeyError, ValueError):
        dtype = ""
    return TensorSpec(entry.name, tuple(sizes), dtype)


def _producer(value: ir.Value) -> ir.Node | None:
    """Return the node that computed a value, looking through its rounding to integers; None for an input."""
    node = value.producer()
    while node is not None and node.op_type in ("DequantizeLinear", "QuantizeLinear") and node.inputs[0] is not None:
        node = _quantizer(node) or node.inputs[0].producer()
    return node


def _sources(value: ir.Value, known: Collection[ir.Value]) -> list[ir.Value]:
    """Return the nearest known values that a value is computed from."""
    found, seen, open_ = [], {value}, _inputs(value)
    while open_:
        entry = open_.pop()
        if entry in seen:
            continue
        seen.add(entry)
        if entry in known:
            found.append(entry)
        else:
            open_ += _inputs(entry)
    return found


def _rows_of_table(values: Values, name: str) -> int | None:
    """Return the rows of the smallest constant table that an input of this name indexes; None where there is none."""
    found = []
    for node in values.model.graph:
        if node.op_type == "Gather" and not node.domain and node.inputs[1] is not None:
            cast, sizes = maker(node.inputs[1], "Cast"), _sizes(node.inputs[0])
            index = node.inputs[1] if cast is None else cast.inputs[0]
            if sizes and index is not None and index.name == name:
                found.append(sizes[0])
    return min(found, default=None)


def _inputs(value: ir.Value) -> list[ir.Value]:
    node = value.producer()
    return [] if node is None else [entry for entry in node.inputs if entry is not None]


def _named(graph: ir.Graph) -> dict[str, ir.Value]:
    ends = set(graph.outputs)
    named = {name_of(value): value for value in graph.inputs if value.name not in graph.initializers}
    for node in graph:
        if node.op_type == "DequantizeLinear":
            source = node.inputs[0]
            if source is not None and source.producer() is not None and constant(source) is None:
                value = node.outputs[0]
                named[name_of(value) if value in ends else _stored_name(value)] = value
        elif node.op_type not in _QUANTIZERS and node.op_type != "Constant":
            for value in node.outputs:
                if value.name and (value.dtype is None or value.dtype in _FLOATS):
                    named.setdefault(value.name, value)
    return named


def _stored_name(value: ir.Value) -> str:
    """Return the name that a dequantized value had before it was quantized."""
    node = operator_of(value)
    quantizer = _quantizer(node)
    if quantizer is not None and quantizer.inputs[0] is not None:
        scales = quantizer.inputs[1], node.inputs[1]
        if scales[0] is scales[1] or _equal(constant(scales[0]), constant(scales[1])):
            return name_of(quantizer.inputs[0])
    return _without_ending(name_of(value))


def _quantizer(node: ir.Node) -> ir.Node | None:
    """Return the QuantizeLinear whose integers a DequantizeLinear reads, with channels appended in between or not."""
    padding = maker(node.inputs[0], "Pad")
    before = maker(node.inputs[0] if padding is None else padding.inputs[0], "QuantizeLinear")
    return before if node.op_type == "DequantizeLinear" else None


def _equal(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is not None and other is not None and np.array_equal(one, other)


def _without_ending(name: str) -> str:
    return next((name.removesuffix(ending) for ending in _ENDINGS if name.endswith(ending)), name)


def _untaken(pairs: Iterable[Shared], taken: set[ir.Value]) -> list[Shared]:
    """Return the pairs of which neither value is taken, and take them."""
    found = []
    for pair in pairs:
        if pair.first not in taken and pair.second not in taken:
            taken.update((pair.first, pair.second))
            found.append(pair)
    return found


def _pair(name: str, first: ir.Value, second: ir.Value, basis: Basis) -> Shared:
    """Return a shared value with the node that computes it."""
    named, node = _producer(first), _producer(second)
    layer = (named and named.name) or (node and node.name) or name
    stored = maker(second, "DequantizeLinear") is not None
    return Shared(name, first, second, basis, layer, node.op_type if node else "Input", stored)


def _by_output(first: Values, second: Values) -> Iterator[Shared]:
    for one, other in zip(first.model.graph.outputs, second.model.graph.outputs, strict=True):
        yield _pair(name_of(one), one, other, "output")


def _by_name(first: Values, second: Values) -> Iterator[Shared]:
    """Yield values of one name; inputs only where a file stores them as integers, for else there is nothing to see."""
    for name, value in first.named.items():
        other = second.named.get(name)
        if other is not None and not (value.producer() is None and other.producer() is None):
            yield _pair(name, value, other, "name")


def _by_node(first: Values, second: Values) -> Iterator[Shared]:
    others = {node.name: node for node in _weighted(second) if node.name}
    for node in _weighted(first):
        other = others.get(node.name or "")
        if other is not None and _FAMILIES[other.op_type] == _FAMILIES[node.op_type]:
            value = _end(node)
            yield _pair(name_of(value), value, _end(other), "layer")


def _by_position(first: Values, second: Values) -> Iterator[Shared]:
    one, other = list(_weighted(first)), list(_weighted(second))
    if [_FAMILIES[node.op_type] for node in one] == [_FAMILIES[node.op_type] for node in other]:
        for left, right in zip(one, other, strict=True):
            value = _end(left)
            yield _pair(_without_ending(name_of(value)), value, _end(right), "position")


def _weighted(values: Values) -> Iterator[ir.Node]:
    for node in values.model.graph:
        if node.op_type in _FAMILIES and _sizes(node.inputs[1]) is not None:
            yield node


def _sizes(value: ir.Value | None) -> tuple[int, ...] | None:
    """Return the sizes of a constant, stored as floats or integers; None for a value that is computed."""
    origin = maker(value, "DequantizeLinear")
    value = value if origin is None else origin.inputs[0]
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tuple(tensor.shape.numpy())


def _end(node: ir.Node) -> ir.Value:
    """Return the value behind a weighted node, its rounding and the Relu or Clip that follow as the only reader."""
    value = node.outputs[0]
    behind = _next(value)
    while behind is not None:
        value = behind.outputs[0]
        behind = _next(value)
    return value


def _next(value: ir.Value) -> ir.Node | None:
    users, node = readers(value), value.producer()
    if node is not None and node.op_type == "QuantizeLinear":
        return users[0]
    alone = len(users) == 1 and not value.is_graph_output()
    return users[0] if alone and users[0].op_type in _BEHIND else None
