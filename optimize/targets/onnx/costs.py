"""What each node of an ONNX file costs, from the shapes that ONNX infers: for files whose program is not at hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from optimize.costs import Costs, Formula, NodeCost, convolution_macs, product_macs, transposed_macs
from optimize.targets.onnx.reading import read_checked

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
    onnx.load_external_data_for_model(model, str(path.parent))
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
