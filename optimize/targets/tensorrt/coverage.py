"""What TensorRT's parser made of the precisions that were asked for; which kernels run is decided on the GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from optimize.targets.base import Coverage, FloatLayer
from optimize.targets.tensorrt.layers import Layer


def read_coverage(placed: Coverage, layers: Sequence[Layer]) -> Coverage:
    """Return the layers whose operands the parsed network takes from int8; no kernel has run, so none is counted.

    Args:
        placed: The layers that were written in INT8, and those left in float.
        layers: The weighted layers of the parsed network.
    """
    integer = {layer.name for layer in layers if layer.precision == "int8"}
    known = {layer.name for layer in placed.left_float}
    others = [
        FloatLayer(layer.name, layer.op, f"TensorRT reads its operands as {layer.precision}")
        for layer in layers
        if layer.precision != "int8" and layer.name not in known
    ]
    return Coverage(
        quantized=tuple(name for name in placed.quantized if name in integer),
        left_float=(*placed.left_float, *others),
        source="parsed network",
    )


def precision_note(layers: Sequence[Layer]) -> str:
    """Return how many weighted layers the parsed network has in each precision, as one sentence.

    >>> precision_note([Layer("a", "convolution", "int8"), Layer("b", "matrix_multiply", "float32")])
    'Parsed network: 1 convolution in int8, 1 matrix_multiply in float32; which kernels run is decided on the GPU.'
    """
    counted = Counter((layer.op, layer.precision) for layer in layers)
    parts = [f"{number} {op} in {precision}" for (op, precision), number in sorted(counted.items())]
    listed = ", ".join(parts) or "no convolution or matrix product"
    return f"Parsed network: {listed}; which kernels run is decided on the GPU."
