"""Weights alone in integers: ``MatMulNBits`` and ``GatherBlockQuantized`` of ONNX Runtime's own operator set.

OpenVINO reads both, and keeps the integers. ONNX Runtime's ``MatMulNBits`` is asked for integer products
(``accuracy_level=4``): it quantizes its input to 8 bits, a scale a block, at run time, which adds noise of about
-45 dB. Its other levels multiply in float32 and do not pay: at 1024 x 1024 and 8 bits they took 20 times as long as
float, at 4 bits 1.3 times, integers a third to a half. OpenVINO does likewise by itself, a scale each 32 numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from optimize import graph as aten_graph
from optimize.plan import Quantization
from optimize.program import Program
from optimize.quantization.blocks import Blocks, read_blocks, read_columns
from optimize.targets.base import Coverage, FloatLayer
from optimize.targets.onnx_graph.export import ORIGIN
from optimize.targets.onnx_graph.nodes import CONTRIB, add, constant, is_float, replace, store, take_name, tidy

#: The operators that can be written, and which input of them is the weight.
_WEIGHTS = {"MatMul": 1, "Gemm": 1, "Gather": 0}
_INTEGER_PRODUCTS = 4
#: Of the block sizes that kernels take, powers of two; the last block of a row may be short.
_LEAST_SIZE = 16


def quantize_weights(
    model: ir.Model, program: Program, *, tables: bool = False, whole_rows: bool = False
) -> tuple[Coverage, list[ir.Value]]:
    """Write the weights of the plan's layers as integers into a float model, in place.

    Layers that share a weight in the program share its integers in the file.

    Args:
        model: What ``to_onnx`` returned for the program.
        program: A program with a plan for weights alone, or with ``tables`` any other.
        tables: Write the plan's tables, in place of its layers.
        whole_rows: Store one scale a row where it has one: ONNX Runtime takes blocks longer than a row, OpenVINO none.

    Returns:
        The layers written so and those of the plan left in float, by module path; and the constants with the integers.
    """
    plan = program.plan
    if tables:
        plan = dataclasses.replace(plan, mode="weights", layers=plan.tables, bits=8, group=0)
    done, left, stored = [], [], []
    names = _weight_names(program)
    for node in list(model.graph):
        origin = node.metadata_props.get(ORIGIN)
        if origin not in plan.layers or node.op_type not in _WEIGHTS:
            continue
        name = str(node.name).replace(f"/{node.op_type}", "")
        reason = _reason_for_float(node)
        if reason:
            left.append(FloatLayer(name, node.op_type, reason))
            continue
        done.append(name)
        node.name = name
        if tables and (columns := read_columns(_weight(node))) is not None:
            _by_columns(model.graph, node, names[str(origin)], columns)
            continue
        write = _embedding if node.op_type == "Gather" else _linear
        blocks = _blocks(node, plan)
        weight = StoredBlocks(model.graph, names[str(origin)], blocks if whole_rows else blocks.resized())
        write(model.graph, node, weight)
        stored.append(weight.integers)
    tidy(model)
    return Coverage(quantized=tuple(done), left_float=tuple(left)), stored


class StoredBlocks:
    """The blocks of one weight as constants of the graph."""

    def __init__(self, graph: ir.Graph, name: str, blocks: Blocks) -> None:
        self.rows, self.count, self.size = blocks.integers.shape
        self.columns, self.bits = blocks.columns, blocks.kernel_bits
        self.integers = store(graph, f"{name}_q", blocks.stored().numpy())
        self.scales = _store_scales(graph, f"{name}_scale", blocks)

    @property
    def attributes(self) -> Mapping[str, int]:
        """What both operators are told of the blocks."""
        return {"bits": self.bits, "block_size": max(1 << (self.size - 1).bit_length(), _LEAST_SIZE)}

    def product(
        self, graph: ir.Graph, x: ir.Value | None, name: str, bias: ir.Value | None = None, like: ir.Value | None = None
    ) -> ir.Value:
        """Write ``x W' + b``, the input quantized at run time."""
        attributes = {**self.attributes, "K": self.columns, "N": self.rows, "accuracy_level": _INTEGER_PRODUCTS}
        inputs = [x, self.integers, self.scales, *([] if bias is None else [None, None, bias])]
        return add(graph, "MatMulNBits", inputs, attributes, name=name, like=like, domain=CONTRIB)


def _store_scales(graph: ir.Graph, name: str, blocks: Blocks) -> ir.Value:
    """Return the scales in float32, which kernels take; the file holds them as short as they are."""
    if blocks.short.dtype is torch.float32:
        return store(graph, name, blocks.scales.numpy())
    short = store(graph, name, blocks.scales.numpy().astype(ml_dtypes.bfloat16))
    wide, to = f"{short.name}_float32", ir.DataType.FLOAT
    made = next((node.outputs[0] for node in graph if node.outputs[0].name == wide), None)
    return made or add(graph, "Cast", [short], {"to": to}, name=wide, like=short, dtype=to)


def _weight_names(program: Program) -> dict[str, str]:
    """Return the path of each layer's weight by node name, or the node's name where the weight is computed."""
    named = {}
    for node in aten_graph.calls(program.graph, aten_graph.aten.linear.default, aten_graph.aten.embedding.default):
        weight = aten_graph.argument(node, "weight")
        named[node.name] = str(weight.target) if weight.op == "get_attr" else node.name
    return named


def _reason_for_float(node: ir.Node) -> str:
    weight = constant(node.inputs[_WEIGHTS[node.op_type]])
    if weight is None:
        return "its weight is computed at run time"
    if not is_float(node.outputs[0]):
        return "it is not float32"
    if node.op_type == "Gather":
        return ""
    if node.op_type == "Gemm" and (node.attributes.get_int("transA", 0) != 0 or _scaled(node)):
        return "its input or its bias is transposed or scaled inside the node"
    return "" if len(node.inputs[0].shape or ()) > 1 else "its input is a vector"  # type: ignore[union-attr]


def _scaled(node: ir.Node) -> bool:
    return any(node.attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta"))


def _blocks(node: ir.Node, plan: Quantization) -> Blocks:
    """Return the weight of a node in the blocks of a plan."""
    return read_blocks(_weight(node), plan.bits_of(str(node.metadata_props[ORIGIN])), plan.group)


def _weight(node: ir.Node) -> torch.Tensor:
    """Return the weight of a node, rows first."""
    weight = constant(node.inputs[_WEIGHTS[node.op_type]])
    assert weight is not None
    turned = node.op_type != "Gather" and node.attributes.get_int("transB", 0) == 0
    return torch.tensor(weight.T if turned else weight)


def _linear(graph: ir.Graph, node: ir.Node, weight: StoredBlocks) -> None:
    """``y = x W' + b`` by ``MatMulNBits``."""
    old, bias = node.outputs[0], node.inputs[2] if len(node.inputs) > 2 else None
    result = weight.product(graph, node.inputs[0], f"{old.name}_product", like=old)
    layer = node.name
    take_name(result, node)
    if bias is not None:
        result = add(graph, "Add", [result, bias], name=f"{old.name}_biased", like=old)
        node.name = f"{layer}/Add"  # what a runtime computes with the product goes by this name
        take_name(result, node)
    replace(old, result)


def _by_columns(graph: ir.Graph, node: ir.Node, name: str, columns: Blocks) -> None:
    """Take rows of integers with a scale a column, and dequantize those: no contributed operator is needed."""
    old = node.outputs[0]
    integers = store(graph, f"{name}_q", columns.integers.flatten(1).T.contiguous().numpy())
    scales = store(graph, f"{name}_scale", columns.scales[:, 0].numpy())
    taken = [integers, node.inputs[1]]
    rows = add(graph, "Gather", taken, {"axis": 0}, name=f"{old.name}_rows", like=old, dtype=ir.DataType.INT8)
    take_name(rows, node)
    replace(old, add(graph, "DequantizeLinear", [rows, scales], {"axis": -1}, name=f"{old.name}_real", like=old))


def _embedding(graph: ir.Graph, node: ir.Node, weight: StoredBlocks) -> None:
    """Take rows of the integers and dequantize those, so that no float table exists; cut what pads the last block."""
    old, width = node.outputs[0], weight.count * weight.size
    assert old.shape is not None
    two_axes = store(graph, "table_shape", np.array([weight.rows, -1]))
    table = add(graph, "Reshape", [weight.integers, two_axes], name=f"{old.name}_table", like=weight.integers)
    table.shape = ir.Shape([weight.rows, width * weight.bits // 8])
    attributes = {**weight.attributes, "gather_axis": 0, "quantize_axis": 1}
    inputs = [table, node.inputs[1], weight.scales]
    result = add(graph, "GatherBlockQuantized", inputs, attributes, name=f"{old.name}_rows", like=old, domain=CONTRIB)
    result.shape = ir.Shape([*old.shape[:-1], width])
    take_name(result, node)
    if width > weight.columns:
        bounds = [store(graph, f"number_{number}", np.array([number])) for number in (0, weight.columns, -1)]
        result = add(graph, "Slice", [result, *bounds], name=f"{old.name}_cut", like=old)
    replace(old, result)
