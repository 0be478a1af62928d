"""Small ONNX graphs that keep or break TensorRT's rules."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT
ZERO = np.int8(0)


@dataclass(frozen=True)
class Case:
    """A graph, for which GPU generations it is built, and where it breaks a rule (empty where it keeps them all)."""

    model: onnx.ModelProto
    where: str = ""
    capabilities: tuple[str, ...] = ()


def graph(
    nodes: list, constants: dict, inputs: list, outputs: list, opset: int = 20, valid: bool = True
) -> onnx.ModelProto:
    built = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(*entry) for entry in inputs],
        [helper.make_tensor_value_info(*entry) for entry in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    domains = sorted({"", *(node.domain for node in nodes)})
    opsets = [helper.make_opsetid(domain, 1 if domain else opset) for domain in domains]
    model = helper.make_model(built, opset_imports=opsets, ir_version=10)
    if valid:
        onnx.checker.check_model(model, full_check=True)
    return model


def quantized_conv(
    zero_point: np.generic = ZERO,
    weight_zero_point: np.generic = ZERO,
    scale: float | np.ndarray = 0.02,
    bias: str = "float",
    explicit: bool = True,
    dequantized: bool = True,
    weight_axis: int = 0,
    weight_scales: int = 4,
    groups: int = 1,
    real: type = np.float32,
) -> onnx.ModelProto:
    """A convolution between Q/DQ; most arguments break one rule when changed."""
    make, channels = helper.make_node, 4
    scales = np.asarray(scale, real)
    along = {"axis": 1} if scales.ndim else {}
    constants = {
        "scale": scales,
        "zero": np.full(scales.shape, zero_point),
        "weight": np.ones((channels, channels // groups, 3, 3), weight_zero_point.dtype),
        "weight_scale": np.full(weight_scales, 0.01, real),
        "weight_zero": np.full(weight_scales, weight_zero_point),
        "bias": np.zeros(channels, np.int32 if bias == "int32" else real),
    }
    parameters = ["scale", "zero"] if explicit else ["scale"]
    weights = ["weight", "weight_scale", "weight_zero"]
    nodes = [
        make("QuantizeLinear", ["x", *parameters], ["q"], name="quant", **along),
        make("DequantizeLinear", ["q", *parameters], ["d"], name="dequant", **along),
        make("DequantizeLinear", weights, ["wd"], name="weight_dequant", axis=weight_axis),
    ]
    operand = "bias"
    if bias == "int32":
        nodes.append(make("DequantizeLinear", ["bias", "weight_scale"], ["bd"], name="bias_dequant", axis=0))
        operand = "bd"
    nodes.append(make("Conv", ["d" if dequantized else "q", "wd", operand], ["y"], name="layer.conv", group=groups))
    kind = FLOAT if real is np.float32 else TensorProto.FLOAT16
    inputs, outputs = [("x", kind, ["batch", channels, 8, 8])], [("y", kind, ["batch", channels, 6, 6])]
    return graph(nodes, constants, inputs, outputs, valid=dequantized and weight_scales == channels)


def product(dtype: type = np.float32, integers: bool = False, axis: int = 1) -> onnx.ModelProto:
    """A matrix product named `layer.fc`, in a float type or between Q/DQ."""
    make, kind = helper.make_node, helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    inputs, outputs = [("x", kind, ["batch", 64])], [("y", kind, ["batch", 64])]
    if not integers:
        node = make("MatMul", ["x", "weight"], ["y"], name="layer.fc")
        return graph([node], {"weight": np.ones((64, 64), dtype)}, inputs, outputs, opset=22)
    constants = {
        "scale": np.float32(0.1), "zero": ZERO, "weight": np.ones((64, 64), np.int8),
        "weight_scale": np.full(64, 0.1, np.float32), "weight_zero": np.zeros(64, np.int8),
    }  # fmt: skip
    nodes = [
        make("QuantizeLinear", ["x", "scale", "zero"], ["q"], name="quant"),
        make("DequantizeLinear", ["q", "scale", "zero"], ["d"], name="dequant"),
        make("DequantizeLinear", ["weight", "weight_scale", "weight_zero"], ["wd"], name="weight_dequant", axis=axis),
        make("MatMul", ["d", "wd"], ["y"], name="layer.fc"),
    ]
    return graph(nodes, constants, inputs, outputs)


def computed_scale() -> onnx.ModelProto:
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["scale"], name="largest", keepdims=0),
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], name="quant"),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], name="dequant"),
    ]
    return graph(nodes, {"zero": ZERO}, [("x", FLOAT, ["batch", 4])], [("y", FLOAT, ["batch", 4])])


def computed_zero_point() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Cast", ["z"], ["zero"], name="cast", to=TensorProto.INT8),
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], name="quant"),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], name="dequant"),
    ]
    inputs = [("x", FLOAT, ["batch", 4]), ("z", FLOAT, [])]
    return graph(nodes, {"scale": np.float32(0.1)}, inputs, [("y", FLOAT, ["batch", 4])])


def one(
    op: str, dtype: int = FLOAT, shape: tuple = ("batch", 3, 3), out: tuple | None = None, domain: str = ""
) -> onnx.ModelProto:
    """A graph of one operator named `layer.op`."""
    node = helper.make_node(op, ["x"], ["y"], name="layer.op", domain=domain)
    return graph([node], {}, [("x", dtype, shape)], [("y", dtype, shape if out is None else out)], valid=not domain)


BFLOAT16 = ml_dtypes.bfloat16
GOOD = {
    "float bias": Case(quantized_conv()),
    "relu": Case(one("Relu")),
    "depthwise": Case(quantized_conv(groups=4)),
    "half scales": Case(quantized_conv(real=np.float16)),
    "int8 product": Case(product(integers=True)),
    "float32 convolution on 7.5": Case(quantized_conv(), capabilities=("7.5",)),
    "half product on 7.5": Case(product(np.float16), capabilities=("7.5", "8.6")),
    "float32 product on 8.0 to 12.0": Case(product(), capabilities=("8.0", "8.6", "8.9", "12.0")),
    "bfloat16 product on 8.9": Case(product(BFLOAT16), capabilities=("8.9",)),
}
BROKEN = {
    "zero point 5": Case(quantized_conv(zero_point=np.int8(5)), "QuantizeLinear 'quant'"),
    "weight zero point 3": Case(quantized_conv(weight_zero_point=np.int8(3)), "DequantizeLinear 'weight_dequant'"),
    "asymmetric uint8": Case(quantized_conv(zero_point=np.uint8(128)), "QuantizeLinear 'quant'"),
    "uint8 weight": Case(quantized_conv(weight_zero_point=np.uint8(128)), "DequantizeLinear 'weight_dequant'"),
    "int32 bias": Case(quantized_conv(bias="int32"), "DequantizeLinear 'bias_dequant'"),
    "scale 0": Case(quantized_conv(scale=0.0), "QuantizeLinear 'quant'"),
    "negative scale": Case(quantized_conv(scale=-0.02), "QuantizeLinear 'quant'"),
    "scale that is no number": Case(quantized_conv(scale=float("nan")), "QuantizeLinear 'quant'"),
    "computed zero point": Case(computed_zero_point(), "quant"),
    "missing dequantize": Case(quantized_conv(dequantized=False), "Conv 'layer.conv'"),
    "as many scales as no channels": Case(quantized_conv(weight_scales=3), "DequantizeLinear 'weight_dequant'"),
    "no such operator": Case(one("Det", out=("batch",)), "Det 'layer.op'"),
    "operator of another domain": Case(one("Fancy", domain="of.ours"), "Fancy 'layer.op'"),
    "no such type": Case(one("Identity", TensorProto.UINT32)),
    "float32 product on 7.5": Case(product(), "'layer.fc'", ("7.5",)),
    "int8 product with float32 around on 7.5": Case(product(integers=True), "'layer.fc'", ("7.5", "8.6")),
    "bfloat16 on 7.5": Case(product(BFLOAT16), "", ("7.5",)),
}
#: What TensorRT takes and computes in another type than the graph says, or in float.
SILENT = {
    "float64": Case(one("Relu", TensorProto.DOUBLE), "'x'"),
    "absent zero point": Case(quantized_conv(explicit=False), "QuantizeLinear 'quant'"),
    "scales a channel of an activation": Case(quantized_conv(scale=np.full(4, 0.02)), "QuantizeLinear 'quant'"),
    "weight scales along the input channels": Case(quantized_conv(weight_axis=1), "DequantizeLinear 'weight_dequant'"),
    "weight scales along what is summed": Case(product(integers=True, axis=0), "DequantizeLinear 'weight_dequant'"),
    "computed scale": Case(computed_scale(), "QuantizeLinear 'quant'"),
}
