"""Small ONNX files, written unchecked, and what is said of them."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from optimize.errors import Refused
from optimize.targets.onnx.reading import read_checked

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
X, Y = (helper.make_tensor_value_info(name, FLOAT, [2]) for name in "xy")
OPSETS = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]


def saved(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    constants: Sequence[TensorProto] = (),
    functions: Sequence[onnx.FunctionProto] = (),
) -> Path:
    """Writes a model of these nodes, unchecked."""
    graph = helper.make_graph(nodes, "g", [X], [Y], list(constants))
    model = helper.make_model(graph, opset_imports=OPSETS, functions=list(functions), ir_version=9)
    path.write_bytes(model.SerializeToString())
    return path


def outside(shape: Sequence[int] = (2,), dtype: int = FLOAT, **entries: str) -> TensorProto:
    """Returns a tensor whose data lies outside the file."""
    tensor = TensorProto(name="w", dims=shape, data_type=dtype, data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key.rstrip("_"), value=value)
    return tensor


def added(tensor: TensorProto, path: Path) -> Path:
    """Writes ``y = x + w``."""
    return saved(path, [helper.make_node("Add", ["x", "w"], ["y"])], [tensor])


def constant(name: str, values: Any, dtype: Any = np.int64) -> TensorProto:
    return numpy_helper.from_array(np.array(values, dtype), name)


def refused(path: Path, message: str, *, trust: bool = False) -> None:
    """Checks that a file is refused, soon."""
    start = time.process_time()
    with pytest.raises(Refused, match=message) as caught:
        read_checked(path, trust=trust)
    assert time.process_time() - start < 20 and len(str(caught.value)) < 1500
