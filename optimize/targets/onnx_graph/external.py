"""Weights beside the model: one protobuf message holds 2 GB, so larger ones lie in a second file."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

#: Weights of more bytes than this go into a file of their own; the rest of the model needs some of the 2 GB.
LARGEST_BYTES = 2**31 - 2**24
#: Smaller weights stay in the model: runtimes read shapes and axes from them before they load the rest.
_SMALL_BYTES = 1024


def weights_path(path: Path) -> Path:
    """Return where the weights of an ONNX file lie, if not in it.

    >>> weights_path(Path("net.onnx")).name
    'net.onnx.data'
    """
    return path.with_name(f"{path.name}.data")


def weight_bytes(model: ir.Model) -> int:
    """Return the bytes of all stored weights."""
    return sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)


def write_split(model: ir.Model, path: Path) -> onnx.ModelProto:
    """Write the weights of a model to ``weights_path(path)``, checked together with it; return the model without them.

    Raises:
        onnx.checker.ValidationError: The model is not valid.
    """
    import onnx
    import onnx_ir as ir

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".onnx-", dir=path.parent) as name:
        folder = Path(name)
        weights = weights_path(folder / path.name)
        light = ir.external_data.unload_from_model(model, folder, weights.name, size_threshold_bytes=_SMALL_BYTES)
        proto = ir.to_proto(light)
        onnx.save_model(proto, folder / path.name)
        onnx.checker.check_model(str(folder / path.name), full_check=True)
        weights.replace(weights_path(path))
    return proto
