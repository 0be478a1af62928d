"""INT8 lowering: the ATen graph rewritten on torch's integer kernels, ready to be scripted.

Activations are uint8 with a zero point, weights int8 symmetric per output channel, biases float: the kernels
round them.
A clip at zero costs nothing: the range of its producer starts at zero, and an unsigned integer cannot go below.

Dynamic INT8 is of linear and recurrent layers with integer weights, their inputs quantized at run time. The recurrent
kernels pay from about 200 hidden units on: an LSTM of 64 units ran at half the speed of float, one of 512 at four
times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from optimize import graph, ops, processor
from optimize.errors import Refused
from optimize.graph import aten
from optimize.plan import Quantization
from optimize.precision.host import half_layers, write_halves
from optimize.program import Program
from optimize.quantization.numerics import USUAL, scale_and_zero_point
from optimize.quantization.weights import read_parameter, read_parameters
from optimize.targets.base import Coverage, FloatLayer
from optimize.targets.packaging import convert_layers, float_layer
from optimize.targets.torchscript.kernels import KERNELS, quantized
from optimize.targets.torchscript.packing import make_quantized, weight_format
from optimize.targets.torchscript.placement import TorchScriptPlacement, is_float, place
from optimize.targets.torchscript.weight_only import pack_weights

#: Products of two activations, as in attention.
_PRODUCTS = (
    aten.scaled_dot_product_attention.default,
    aten.matmul.default,
    aten.bmm.default,
    aten.baddbmm.default,
)


@dataclass(frozen=True)
class Lowered:
    """An INT8 graph.

    Attributes:
        module: The graph on ATen and quantized operators; packed weights are its attributes.
        quantized: Paths of the layers that run in integers.
        left_float: What runs in float, with the reason.
        packed_at_load: Submodules that pack their weights when the file is loaded.
    """

    module: fx.GraphModule
    quantized: tuple[str, ...]
    left_float: tuple[FloatLayer, ...]
    packed_at_load: tuple[str, ...] = ()


def lower(program: Program) -> Lowered:
    """Lower a quantized program by its plan.

    Raises:
        Refused: There is no plan, or no layer of it can run in integers on this host.
    """
    plan = program.quantization
    if plan is None:
        raise Refused("The program is not quantized.", hint="Run QuantizeStatic or QuantizeDynamic first (--int8).")
    lowered = {"static": _static, "dynamic": _dynamic, "weights": _weights}[plan.mode](program, plan)
    if not lowered.quantized:
        reasons = "; ".join(sorted({layer.reason for layer in lowered.left_float}))
        wrong_here = processor.misfit(plan.cpu, processor.host())
        raise Refused(
            f"No layer of the program can run in INT8 with TorchScript: {reasons or 'it has none'}.",
            hint=f"Make the file on the processor it is for, or give --cpu any: {wrong_here}." if wrong_here else "",
        )
    return lowered


def coverage(lowered: Lowered, scripted: torch.jit.ScriptModule) -> Coverage:
    """Return what runs in integers, with the kernels counted in the compiled code."""
    kinds = (node.kind() for node in scripted.inlined_graph.nodes())
    kernels = Counter(kind for kind in kinds if not kind.startswith("prim::"))
    return Coverage(lowered.quantized, lowered.left_float, dict(sorted(kernels.items())))


class _Copy:
    """A graph under construction, with the attributes its nodes name.

    Args:
        program: What is written.
        layers: The calls that ``emit`` writes; everything else stays in float.
        emit: Writes one and returns its value.
    """

    def __init__(
        self,
        program: Program,
        layers: Container[fx.Node] = (),
        emit: Callable[[Any, fx.Node], fx.Node] | None = None,
    ) -> None:
        self.program, self._layers, self._emit = program, layers, emit
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}
        self.floats: dict[fx.Node, fx.Node] = {}

    def attribute(self, path: str, value: Any) -> fx.Node:
        """Own ``value`` under a path and return the node that reads it."""
        self.attributes[path] = value
        return self.graph.create_node("get_attr", path)

    def value(self, node: fx.Node) -> fx.Node:
        """Return the float (or index, or size) value of a node."""
        if node not in self.floats:
            path = str(node.target)
            self.floats[node] = self.attribute(path, graph.attribute(self.program.graph_module, path))
        return self.floats[node]

    def call(self, node: fx.Node) -> None:
        """Write one call of the program."""
        if self._emit is not None and node in self._layers:
            self.floats[node] = self._emit(self, node)
        else:
            self.floats[node] = self.graph.node_copy(node, self.value)

    def write(self) -> fx.GraphModule:
        """Write the whole program; return the graph without what nobody reads."""
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self.floats[node] = self.graph.node_copy(node)
            elif node.op == "call_function":
                self.call(node)
        self.graph.output(tuple(self.value(value) for value in self.program.outputs))
        self.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        return fx.GraphModule(self.attributes, self.graph, class_name="Program")


class Integers(_Copy):
    """A graph under construction whose values are float, integers, or both, converted where they meet."""

    def __init__(self, program: Program, placement: TorchScriptPlacement) -> None:
        super().__init__(program)
        self.placement = placement
        self.integers: dict[fx.Node, fx.Node] = {}

    def value(self, node: fx.Node) -> fx.Node:
        """Return the float value of a node, dequantizing it where it is integers."""
        if node in self.integers and node not in self.floats:
            self.floats[node] = self.graph.call_function(aten.dequantize.self, (self.integers[node],))
        return super().value(node)

    def integer(self, node: Any) -> fx.Node:
        """Return the integer value of a node, quantizing it where it is float."""
        if node not in self.integers:
            arguments = (self.value(node), *self.scale(node), torch.quint8)
            self.integers[node] = self.graph.call_function(aten.quantize_per_tensor.default, arguments)
        return self.integers[node]

    def mapped(self, value: Any) -> Any:
        """Return arguments with float tensors replaced by integer ones and sizes by their copies."""
        return fx.node.map_arg(value, lambda node: self.integer(node) if is_float(node) else self.value(node))

    def scale(self, node: fx.Node) -> tuple[float, int]:
        """Return the scale and zero point of a node's result; that of the clip folded into it, if there is one."""
        interval = self.placement.ranges[self.placement.clips.get(node, node)]
        scale, zero_point = scale_and_zero_point(interval, USUAL.activation)
        return float(scale), zero_point

    def call(self, node: fx.Node) -> None:
        """Write one call of the program."""
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and source in self.integers and self.placement.clips.get(source) is node:
            self.integers[node] = self.integers[source]
        elif node in self.placement.packed:
            self._layer(node)
        elif node in self.placement.integers:
            self.integers[node] = KERNELS[node.target].emit(self, node)
        elif node.target is aten.sym_size.int and node.args[0] in self.integers:
            self.floats[node] = self.graph.node_copy(node, lambda source: self.integers[source])
        else:
            super().call(node)

    def _layer(self, node: fx.Node) -> None:
        packed = self.placement.packed[node]
        weights = [self.attribute(f"{node.name}_packed_{i}", value) for i, value in enumerate(packed.weights)]
        source = packed.source
        if node in self.placement.integers:
            arguments = (self.integer(source), weights, *self.scale(node))
            self.integers[node] = packed.apply(self.graph.call_function, *arguments)
        else:
            kernel = quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
            self.floats[node] = self.graph.call_function(kernel, (self.value(source), *self.scale(source), weights[0]))


def _static(program: Program, plan: Quantization) -> Lowered:
    if half_layers(program, plan):
        program = program.clone()
        write_halves(program, plan)
        program.refresh()
    placement = place(program, plan)
    names = tuple(graph.origin(node) for node in placement.packed)
    return Lowered(Integers(program, placement).write(), names, placement.left_float)


def _dynamic(program: Program, plan: Quantization) -> Lowered:
    packed, left = pack_dynamic(program, plan)
    copy = _Copy(program, packed, lambda copy, node: _emit_dynamic(copy, node, packed[node]))
    return Lowered(copy.write(), tuple(map(graph.origin, packed)), left)


def _weights(program: Program, plan: Quantization) -> Lowered:
    modules, left = pack_weights(program)
    names = {node: f"{node.name}_integers" for node in modules}

    def emit(copy: _Copy, node: fx.Node) -> fx.Node:
        copy.attributes[names[node]] = modules[node]
        source = graph.argument(node, "input" if node.target is aten.linear.default else "indices")
        return copy.graph.call_module(names[node], (copy.value(source),))

    return Lowered(
        _Copy(program, modules, emit).write(), tuple(map(graph.origin, modules)), left, tuple(names.values())
    )


def pack_dynamic(program: Program, plan: Quantization) -> tuple[dict[fx.Node, list[Any]], tuple[FloatLayer, ...]]:
    """Pack the weights of every layer of the plan: one object a linear layer, one a cell of a recurrent layer."""
    packed, left = convert_layers(graph.calls(program.graph, *ops.LAYERS), lambda node: _pack(program, plan, node))
    products = graph.calls(program.graph, *_PRODUCTS)
    return packed, (*left, *(float_layer(node, "both its inputs are computed at run time") for node in products))


def _emit_dynamic(copy: _Copy, node: fx.Node, weights: list[Any]) -> fx.Node:
    """Write the integer call of one layer by its packed weights."""
    packed = [copy.attribute(f"{node.name}_packed_{i}", value) for i, value in enumerate(weights)]
    call = copy.graph.call_function
    if node.target is aten.linear.default:
        return call(quantized.linear_dynamic.default, (copy.value(graph.argument(node, "input")), packed[0]))
    source, state = fx.node.map_arg((graph.argument(node, "input"), graph.argument(node, "hx")), copy.value)
    names = ("num_layers", "dropout", "train", "bidirectional", "batch_first")
    arguments = (source, state, packed, True, *(graph.argument(node, name) for name in names))
    if node.target is aten.gru.input:
        return call(aten.quantized_gru.input, arguments)
    return call(aten.quantized_lstm.input, arguments, {"dtype": torch.qint8, "use_dynamic": True})


def _pack(program: Program, plan: Quantization, node: fx.Node) -> list[Any]:
    if node.target is not aten.linear.default and node.target not in ops.RECURRENT:
        raise Refused("a convolution is slower with ranges taken at run time")
    if node.name not in plan.layers:
        raise Refused(plan.reason_of(node.name))
    if node.target is aten.linear.default:
        return [_pack_matrix(plan, *read_parameters(program.graph_module, node))]
    weights = [read_parameter(program.graph_module, weight) for weight in graph.argument(node, "params")]
    per_cell = 4 if graph.argument(node, "has_biases") else 2
    cells = graph.argument(node, "num_layers") * (2 if graph.argument(node, "bidirectional") else 1)
    if len(weights) != cells * per_cell:
        raise Refused("torch has no integer kernel for a recurrent layer with a projection")
    return [_pack_cell(plan, *weights[start : start + per_cell]) for start in range(0, len(weights), per_cell)]


def _pack_matrix(plan: Quantization, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    return quantized.linear_prepack(make_quantized(weight, weight_format(plan)), bias)


def _pack_cell(
    plan: Quantization,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: torch.Tensor | None = None,
    bias_hh: torch.Tensor | None = None,
) -> Any:
    """Pack one direction of one layer; the kernels want biases, so a layer without gets zeros."""
    zeros = torch.zeros(weight_ih.shape[0])
    bias_ih, bias_hh = zeros if bias_ih is None else bias_ih, zeros if bias_hh is None else bias_hh
    packed = _pack_matrix(plan, weight_ih, bias_ih), _pack_matrix(plan, weight_hh, bias_hh)
    return quantized.make_quantized_cell_params_dynamic(*packed, bias_ih, bias_hh)
