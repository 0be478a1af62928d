"""The process that builds one engine: ``python -m optimize.targets.tensorrt.builder ORDER.json REPLY.json``.

It runs apart from the user's process because a native abort in TensorRT's parser or builder cannot be caught. It does
not import torch.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimize.errors import OptimizeError, Refused, TargetUnavailable
from optimize.files import write_text
from optimize.targets.tensorrt import log

_WEIGHTED = ("CONVOLUTION", "DECONVOLUTION", "MATRIX_MULTIPLY")
#: Layers the parser puts between a DequantizeLinear and its reader to line up ranks.
_RESHAPING = ("SHUFFLE", "SQUEEZE", "UNSQUEEZE")
_TYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT8": "int8"}


@dataclass(frozen=True)
class Order:
    """What to build.

    Attributes:
        module: ``tensorrt`` or ``tensorrt_rtx``.
        title: The library's name, for messages.
        onnx: The model.
        engine: Where the engine goes.
        profile: Smallest, typical and largest shape of each input with a free dimension.
    """

    module: str
    title: str
    onnx: str
    engine: str
    profile: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class Layer:
    """A convolution or matrix product as TensorRT's parser typed it.

    Attributes:
        name: Name of the ONNX node.
        op: TensorRT's word in lower case, such as ``convolution``.
        precision: ``int8`` where both operands come from integers, else the operands' float type.
    """

    name: str
    op: str
    precision: str


@dataclass(frozen=True)
class Built:
    """What came of an order.

    Attributes:
        version: Version of the library that built.
        layers: The weighted layers of the parsed network.
        warnings: What the parser and builder warned of.
        build_s: Seconds to parse and build.
    """

    version: str
    layers: tuple[Layer, ...]
    warnings: tuple[str, ...]
    build_s: float


def build(order: Order) -> Built:
    """Build an engine in this process.

    Raises:
        TargetUnavailable: The library cannot be imported.
        Refused: It does not accept the model; the message names the operator and the layer.
    """
    module = _import(order)
    start = time.perf_counter()
    logger = log.listen(module)
    builder = module.Builder(logger)
    network = builder.create_network(network_flags(module))
    _parse(module.OnnxParser(network, logger), order, module.__version__)
    engine = builder.build_serialized_network(network, _config(builder, order))
    if engine is None:
        reasons = [_plain(text) for text in log.errors()] or ["it gave no reason"]
        raise Refused(f"{order.title} {module.__version__} cannot build the engine: {reasons[0]}.")
    Path(order.engine).write_bytes(engine)
    build_s = time.perf_counter() - start
    return Built(str(module.__version__), tuple(_layers(network)), tuple(map(_plain, log.warnings())), build_s)


def network_flags(module: Any) -> int:
    """Return the flags that make a network strongly typed: TensorRT 10 asks for one, later versions always are."""
    flag = getattr(module.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _import(order: Order) -> Any:
    try:
        return importlib.import_module(order.module)
    except (ImportError, OSError) as error:
        raise TargetUnavailable(f"{order.title} is installed but cannot be imported: {error}.") from error


def _parse(parser: Any, order: Order, version: str) -> None:
    if parser.parse(Path(order.onnx).read_bytes()):
        return
    found = [parser.get_error(index) for index in range(parser.num_errors)]
    reasons = [_parser_reason(error) for error in found] or log.errors()[:1]
    raise Refused(f"{order.title} {version} refuses {'; '.join(reasons)}.")


def _parser_reason(error: Any) -> str:
    operator, name = error.node_operator(), error.node_name()
    reason = "it does not have this operator" if error.desc() == "false" else _plain(error.desc())
    return f"the {operator} '{name}': {reason}" if operator else f"the model: {reason}"


def _plain(text: str) -> str:
    """Return the readable part of TensorRT's message.

    >>> _plain("Assertion failed: status.is_success(): Found unsupported input type of UINT8")
    'Found unsupported input type of UINT8'
    >>> _plain("ModelImporter.cpp:1071: Make sure input x has Int64 binding.")
    'Make sure input x has Int64 binding'
    >>> _plain("Invalid Node - b\\nITensor::f: Error Code 4: API Usage Error (b: has Int32. In checkType at /n.cpp:4)")
    'b: has Int32'
    """
    usage = re.search(r"Error Code \d+: [\w ]+\((.*?)(?:\. In \w+ at .*)?\)", text)
    line = usage[1] if usage else text.splitlines()[0]
    return re.sub(r"^(?:\w+\.cpp:\d+: |Assertion failed: \S*(?: \|\| \S*)*: )", "", line).rstrip(".")


def _config(builder: Any, order: Order) -> Any:
    config = builder.create_builder_config()
    if order.profile:
        profile = builder.create_optimization_profile()
        for name, shapes in order.profile.items():
            profile.set_shape(name, *(tuple(shape) for shape in shapes))
        config.add_optimization_profile(profile)
    return config


def _layers(network: Any) -> Iterator[Layer]:
    """Yield the weighted layers; a layer is INT8 when both its operands are dequantized int8."""
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    producers = {layer.get_output(index).name: layer for layer in layers for index in range(layer.num_outputs)}
    for layer in layers:
        if layer.type.name in _WEIGHTED:
            operands = [layer.get_input(index) for index in range(min(layer.num_inputs, 2))]
            integer = len(operands) == 2 and all(_is_integer(operand, producers) for operand in operands)
            precision = "int8" if integer else _TYPES.get(operands[0].dtype.name, operands[0].dtype.name.lower())
            yield Layer(layer.name, layer.type.name.lower(), precision)


def _is_integer(tensor: Any, producers: Mapping[str, Any]) -> bool:
    layer = producers.get(tensor.name)
    while layer is not None and layer.type.name in _RESHAPING:
        layer = producers.get(layer.get_input(0).name)
    return layer is not None and layer.type.name == "DEQUANTIZE" and layer.get_input(0).dtype.name == "INT8"


def main(order_path: str, reply_path: str) -> None:
    """Carry out one order and write the reply, an error of ours included; anything else ends the process."""
    order = Order(**json.loads(Path(order_path).read_text(encoding="utf-8")))
    try:
        reply: dict[str, Any] = {"built": dataclasses.asdict(build(order))}
    except OptimizeError as error:
        reply = {"error": type(error).__name__, "what": error.what}
    write_text(Path(reply_path), json.dumps(reply))


if __name__ == "__main__":
    main(*sys.argv[1:])
