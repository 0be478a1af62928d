"""An engine straight from the program's operators, built by Torch-TensorRT instead of from an ONNX model.

Written against the documented interface of Torch-TensorRT 2.8 to 2.12 (``torch_tensorrt.dynamo``); it needs a GPU.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from optimize.errors import Refused, TargetUnavailable, first_line
from optimize.targets.tensorrt import log, packages
from optimize.targets.tensorrt.builder import Built, Order, import_library
from optimize.targets.tensorrt.layers import inspect
from optimize.targets.tensorrt.log import build_failure, plain
from optimize.targets.tensorrt.reading import names_of


def build(order: Order) -> Built:
    """Build an engine from the exported program in ``order.source``, the whole of it or nothing.

    Raises:
        TargetUnavailable: Torch-TensorRT or TensorRT cannot be imported, or there is no GPU.
        Refused: It has no converter for an operator (named in the message), or the build fails.
    """
    import torch

    library = import_library(order)
    if not packages.has_gpu():
        raise TargetUnavailable(f"{order.title} builds on a GPU and there is none.", hint="Leave library out.")
    exported = torch.export.load(order.source)
    try:
        engine = library.dynamo.convert_exported_program_to_serialized_trt_engine(
            exported, arg_inputs=_inputs(library, exported, order), **_settings(order)
        )
    except Exception as error:  # whatever the library raises is the reason
        raise _failure(f"{order.title} {library.__version__}", error) from error
    Path(order.engine).write_bytes(engine)
    tensorrt = importlib.import_module("tensorrt")
    loaded = tensorrt.Runtime(log.listen(tensorrt)).deserialize_cuda_engine(engine)
    warnings = tuple(map(plain, log.warnings()))
    inputs, outputs = (names_of(tensorrt, loaded, mode) for mode in ("INPUT", "OUTPUT"))
    return Built(str(library.__version__), (), inspect(tensorrt, loaded), warnings, inputs, outputs)


def _inputs(library: Any, exported: Any, order: Order) -> list[Any]:
    """Return the shapes and type of each input, as the library's ``Input``; re-exporting has renamed them."""
    ranges, found = iter(order.profile.values()), []
    for value in _values(exported):
        if all(isinstance(size, int) for size in value.shape):
            shapes: dict[str, Any] = {"shape": tuple(value.shape)}
        else:
            smallest, typical, largest = (tuple(shape) for shape in next(ranges))
            shapes = {"min_shape": smallest, "opt_shape": typical, "max_shape": largest}
        found.append(library.Input(**shapes, dtype=value.dtype))
    return found


def _values(exported: Any) -> list[Any]:
    """Return the tensors a program takes, with symbols for free sizes."""
    names = exported.graph_signature.user_inputs
    return [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder" and node.name in names]


def _settings(order: Order) -> dict[str, Any]:
    """Return its compilation settings: types of the graph are obeyed, as in a strongly typed network."""
    options = order.options
    settings: dict[str, Any] = {
        "use_explicit_typing": True,
        "immutable_weights": not options.refit,
        "version_compatible": options.version_compatible,
        "hardware_compatible": options.hardware_compatible != "none",
    }
    if options.workspace_bytes is not None:
        settings["workspace_size"] = options.workspace_bytes
    if options.sparse_weights:
        settings["sparse_weights"] = True
    if options.timing_cache:
        settings["timing_cache_path"] = options.timing_cache
    return settings


def _failure(library: str, error: Exception) -> Refused | TargetUnavailable:
    text = str(error) or type(error).__name__
    if type(error).__name__ == "UnsupportedOperatorException":
        hint = "Leave library out: the road through ONNX has more operators."
        return Refused(f"{library} has no converter: {first_line(error)}.", hint=hint)
    failure = build_failure(library, [text])
    return failure if isinstance(failure, TargetUnavailable) else Refused(failure.what, hint=failure.hint)
