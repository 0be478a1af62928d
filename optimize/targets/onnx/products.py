"""Matrix products of integers that add their bias in float, as ONNX Runtime's own operator.

ONNX Runtime fuses a product of two DequantizeLinear into ``MatMulIntegerToFloat``, which can add a bias while its sums
are in registers, and then leaves the bias to an Add of its own: another pass over the output, and a Gelu behind it that
runs as the slower of two kernels.
"""

from __future__ import annotations

import onnx_ir as ir

from optimize.targets.onnx_graph.nodes import CONTRIB, add, constant, maker, name_of, readers, replace, take_name, tidy


def add_bias_in_products(model: ir.Model) -> None:
    """Write each quantized MatMul with a bias ``[N]`` behind it as one ``MatMulIntegerToFloat``, in place."""
    for node in list(model.graph):
        if node.op_type == "MatMul":
            _fuse(model.graph, node)
    tidy(model)


def _fuse(graph: ir.Graph, product: ir.Node) -> None:
    old = product.outputs[0]
    users = readers(old)
    sources = [maker(value, "DequantizeLinear") for value in product.inputs]
    if None in sources or len(users) != 1 or users[0].op_type != "Add" or old.is_graph_output():
        return
    x, weight = sources
    stored = constant(weight.inputs[0])  # type: ignore[union-attr]
    bias = next((value for value in users[0].inputs if value is not old), None)
    array = constant(bias)
    if stored is None or stored.ndim != 2 or array is None or array.shape != stored.shape[1:]:
        return
    steps = [source.inputs[index] for index in (0, 1, 2) for source in (x, weight)]  # type: ignore[union-attr]
    result = users[0].outputs[0]
    fused = add(
        graph, "MatMulIntegerToFloat", [*steps, bias], name=f"{name_of(result)}_sum", like=result, domain=CONTRIB
    )
    take_name(fused, product)
    replace(result, fused)
