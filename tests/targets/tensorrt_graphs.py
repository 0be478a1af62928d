"""Small ONNX graphs that keep or break TensorRT's rules."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT
ZERO = np.int8(0)


def graph(nodes: list, constants: dict, inputs: list, outputs: list, opset: int = 20) -> onnx.ModelProto:
    built = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(*entry) for entry in inputs],
        [helper.make_tensor_value_info(*entry) for entry in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(built, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model


def quantized_conv(
    zero_point: np.generic = ZERO,
    weight_zero_point: np.generic = ZERO,
    scale: float = 0.02,
    bias: str = "float",
    explicit: bool = True,
) -> onnx.ModelProto:
    """A convolution between Q/DQ; each argument but `bias="float"` breaks one rule when changed."""
    make = helper.make_node
    constants = {
        "scale": np.float32(scale),
        "zero": zero_point,
        "weight": np.ones((4, 4, 3, 3), weight_zero_point.dtype),
        "weight_scale": np.full(4, 0.01, np.float32),
        "weight_zero": np.full(4, weight_zero_point),
        "bias": np.zeros(4, np.int32 if bias == "int32" else np.float32),
    }
    parameters = ["scale", "zero"] if explicit else ["scale"]
    nodes = [
        make("QuantizeLinear", ["x", *parameters], ["q"], name="quant"),
        make("DequantizeLinear", ["q", *parameters], ["d"], name="dequant"),
        make("DequantizeLinear", ["weight", "weight_scale", "weight_zero"], ["wd"], name="weight_dequant", axis=0),
    ]
    operand = "bias"
    if bias == "int32":
        nodes.append(make("DequantizeLinear", ["bias", "weight_scale"], ["bd"], name="bias_dequant", axis=0))
        operand = "bd"
    nodes.append(make("Conv", ["d", "wd", operand], ["y"], name="layer.conv"))
    return graph(nodes, constants, [("x", FLOAT, ["batch", 4, 8, 8])], [("y", FLOAT, ["batch", 4, 6, 6])])


def computed_zero_point() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Cast", ["z"], ["zero"], name="cast", to=TensorProto.INT8),
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], name="quant"),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], name="dequant"),
    ]
    inputs = [("x", FLOAT, ["batch", 4]), ("z", FLOAT, [])]
    return graph(nodes, {"scale": np.float32(0.1)}, inputs, [("y", FLOAT, ["batch", 4])])


def one(op: str, dtype: int = FLOAT, shape: tuple = ("batch", 3, 3), out: tuple | None = None) -> onnx.ModelProto:
    """A graph of one operator named `layer.op`."""
    node = helper.make_node(op, ["x"], ["y"], name="layer.op")
    return graph([node], {}, [("x", dtype, shape)], [("y", dtype, shape if out is None else out)])


GOOD = {"float bias": quantized_conv(), "relu": one("Relu")}
BROKEN = {
    "zero point 5": (quantized_conv(zero_point=np.int8(5)), "QuantizeLinear 'quant'"),
    "weight zero point 3": (quantized_conv(weight_zero_point=np.int8(3)), "DequantizeLinear 'weight_dequant'"),
    "uint8 128": (quantized_conv(zero_point=np.uint8(128)), "QuantizeLinear 'quant'"),
    "uint8 weight": (quantized_conv(weight_zero_point=np.uint8(128)), "DequantizeLinear 'weight_dequant'"),
    "int32 bias": (quantized_conv(bias="int32"), "DequantizeLinear 'bias_dequant'"),
    "scale 0": (quantized_conv(scale=0.0), "QuantizeLinear 'quant'"),
    "computed zero point": (computed_zero_point(), "quant"),
    "no such operator": (one("Det", out=("batch",)), "Det 'layer.op'"),
    "no such type": (one("Identity", TensorProto.UINT32), ""),
}
#: What TensorRT takes and computes in another type than the graph says.
SILENT = {"float64": one("Relu", TensorProto.DOUBLE), "absent zero point": quantized_conv(explicit=False)}
