"""Orders to build small ONNX graphs, for tests."""

import importlib.util
from pathlib import Path

import onnx
import pytest

from optimize.targets.tensorrt import builder
from optimize.targets.tensorrt.options import EngineOptions

rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="pip install tensorrt-rtx to build engines"
)


def order(
    folder: Path, model: onnx.ModelProto, options: EngineOptions | None = None, module: str = ""
) -> builder.Order:
    """An order for TensorRT-RTX, or another module, to build a graph whose free dimension is the first one."""
    onnx.save(model, folder / "net.onnx")
    profile = {
        value.name: tuple((size, *(dim.dim_value for dim in dims[1:])) for size in (1, 2, 64))
        for value in model.graph.input
        if (dims := list(value.type.tensor_type.shape.dim))
    }
    title = "TensorRT" if module == "tensorrt" else "TensorRT-RTX"
    files = str(folder / "net.onnx"), str(folder / "net.engine")
    return builder.Order(module or "tensorrt_rtx", title, *files, profile, options or EngineOptions())
