"""What a builder is asked for, with which library, and what comes of it."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optimize.errors import TargetUnavailable
from optimize.targets.base import LayerTypes, TypedLayer
from optimize.targets.tensorrt.options import EngineOptions

#: Strongly typed networks with explicit Q/DQ are complete from this version on.
OLDEST = 10


@dataclass(frozen=True)
class Order:
    """What to build.

    Attributes:
        module: ``tensorrt``, ``tensorrt_rtx`` or ``torch_tensorrt``.
        title: The library's name, for messages.
        source: The ONNX model; for Torch-TensorRT an exported program.
        engine: Where the engine goes.
        profile: Smallest, typical and largest shape of each input with a free dimension.
        options: What the user asked for.
    """

    module: str
    title: str
    source: str
    engine: str
    profile: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
    options: EngineOptions = dataclasses.field(default_factory=EngineOptions)


@dataclass(frozen=True)
class Built:
    """What came of an order.

    Attributes:
        version: Version of the library that built.
        layers: The weighted layers of the parsed network; none where no network was parsed.
        types: All layers and their types, as the engine has them, or as the network has where no GPU can read it.
        warnings: What the parser and builder warned of.
        inputs: Names of the engine's inputs where they are not the program's.
        outputs: Those of its outputs where they are not the ONNX model's.
    """

    version: str
    layers: tuple[TypedLayer, ...]
    types: LayerTypes
    warnings: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


def import_library(order: Order) -> Any:
    """Return the library's module.

    Raises:
        TargetUnavailable: It cannot be imported, or is TensorRT before version 10.
    """
    try:
        module = importlib.import_module(order.module)
    except (ImportError, OSError) as error:
        raise TargetUnavailable(f"{order.title} is installed but cannot be imported: {error}.") from error
    if order.module == "tensorrt" and int(module.__version__.partition(".")[0]) < OLDEST:
        raise TargetUnavailable(
            f"TensorRT {module.__version__} is too old: networks are strongly typed from version {OLDEST} on.",
            hint=f'pip install "tensorrt>={OLDEST}"',
        )
    return module
