"""What layers an engine has and in which types they compute: read from the engine, or from the network it came from."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from optimize.targets.base import Coverage, FloatLayer, LayerTypes, TypedLayer

INSPECTOR = "engine inspector"
NETWORK = "parsed network"

_WEIGHTED = ("CONVOLUTION", "DECONVOLUTION", "MATRIX_MULTIPLY")
#: Layers the parser puts between a DequantizeLinear and its reader to line up ranks.
_RESHAPING = ("SHUFFLE", "SQUEEZE", "UNSQUEEZE")
_TYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT8": "int8", "FP8": "float8"}
#: The inspector's words, in the order they are looked for: older versions say ``FP16``, newer ones ``Half``.
_FORMATS = {
    r"int8": "int8",
    r"bf16|bfloat16": "bfloat16",
    r"fp16|half": "float16",
    r"fp8": "float8",
    r"fp32|float": "float32",
    r"int32": "int32",
    r"int64": "int64",
    r"bool": "bool",
}


def weighted_layers(network: Any) -> tuple[TypedLayer, ...]:
    """Return the convolutions and matrix products of a parsed network, named like their ONNX nodes."""
    return tuple(entry for entry in _typed(network) if entry.op.upper() in _WEIGHTED)


def network_types(network: Any) -> LayerTypes:
    """Return the layers of a parsed network that work on numbers; constants and shapes are left out."""
    known = frozenset(_TYPES.values())
    found = (entry for entry in _typed(network) if entry.op not in ("constant", "shape"))
    return LayerTypes(NETWORK, tuple(entry for entry in found if entry.precision in known and entry.output in known))


def _typed(network: Any) -> Iterator[TypedLayer]:
    """Yield each layer with the type it computes in: int8 when both operands of a product are dequantized int8."""
    found = [network.get_layer(index) for index in range(network.num_layers)]
    layers = [layer for layer in found if layer.num_outputs and layer.get_output(0) is not None]  # loops have others
    producers = {layer.get_output(index).name: layer for layer in layers for index in range(layer.num_outputs)}
    for layer in layers:
        operands = [tensor for index in range(layer.num_inputs) if (tensor := layer.get_input(index)) is not None]
        pair = operands[:2]
        integer = layer.type.name in _WEIGHTED and len(pair) == 2 and all(_is_integer(one, producers) for one in pair)
        first = operands[0] if operands else layer.get_output(0)
        precision = "int8" if integer else _word(first)
        yield TypedLayer(layer.name, layer.type.name.lower(), precision, _word(layer.get_output(0)))


def _word(tensor: Any) -> str:
    return _TYPES.get(tensor.dtype.name, tensor.dtype.name.lower())


def _is_integer(tensor: Any, producers: Mapping[str, Any]) -> bool:
    layer = producers.get(tensor.name)
    while layer is not None and layer.type.name in _RESHAPING:
        layer = producers.get(layer.get_input(0).name)
    return layer is not None and layer.type.name == "DEQUANTIZE" and layer.get_input(0).dtype.name == "INT8"


def inspect(module: Any, engine: Any) -> LayerTypes:
    """Return the layers of an engine that was built with detailed verbosity, as they will run."""
    text = engine.create_engine_inspector().get_engine_information(module.LayerInformationFormat.JSON)
    return read_inspection(text)


def read_inspection(text: str) -> LayerTypes:
    """Return the layers that the engine inspector's JSON lists.

    >>> read_inspection('{"Layers": [{"Name": "a", "LayerType": "CaskConvolution", "TacticName": "sm80_i8i8",'
    ...     ' "Inputs": [{"Format/Datatype": "Int8"}], "Outputs": [{"Format/Datatype": "Half"}]}]}').layers
    (TypedLayer(name='a', op='CaskConvolution', precision='int8', output='float16', kernel='sm80_i8i8'),)
    """
    entries = [entry for entry in json.loads(text)["Layers"] if isinstance(entry, Mapping)]
    return LayerTypes(INSPECTOR, tuple(map(_inspected, entries)))


def _inspected(entry: Mapping[str, Any]) -> TypedLayer:
    inputs, outputs = _formats(entry.get("Inputs", ())), _formats(entry.get("Outputs", ()))
    kernel = str(entry.get("TacticName", ""))
    precision, output = (inputs or outputs or [""])[0], (outputs or inputs or [""])[0]
    return TypedLayer(str(entry["Name"]), str(entry.get("LayerType", "")), precision, output, kernel)


def _formats(tensors: Sequence[Mapping[str, Any]]) -> list[str]:
    return [_format(str(tensor.get("Format/Datatype", ""))) for tensor in tensors]


def _format(text: str) -> str:
    """Return the type that a format names.

    >>> _format("Thirty-two wide channel vectorized row major Int8 format."), _format("Row major linear FP32")
    ('int8', 'float32')
    """
    return next((word for pattern, word in _FORMATS.items() if re.search(pattern, text, re.IGNORECASE)), text.lower())


def read_coverage(placed: Coverage, layers: Sequence[TypedLayer]) -> Coverage:
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


def precision_note(layers: Sequence[TypedLayer]) -> str:
    """Return how many weighted layers the parsed network has in each precision, as one sentence.

    >>> precision_note([TypedLayer("a", "convolution", "int8", "int8")])
    'Parsed network: 1 convolution in int8; which kernels run is decided on the GPU.'
    """
    counted = Counter((layer.op, layer.precision) for layer in layers)
    parts = [f"{number} {op} in {precision}" for (op, precision), number in sorted(counted.items())]
    listed = ", ".join(parts) or "no convolution or matrix product"
    return f"Parsed network: {listed}; which kernels run is decided on the GPU."
