"""The execution providers of ONNX Runtime that a file can be asked to run on, one frozen row each.

What the session really uses is read from it, recorded, and warned of when it is another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from optimize.targets.onnx_graph.policy import ONNX_RUNTIME, OPENVINO, TENSORRT, Placement


@dataclass(frozen=True)
class Provider:
    """One execution provider.

    Attributes:
        name: ONNX Runtime's word.
        title: What the reader calls it.
        packages: Distributions of ONNX Runtime that hold it; the first is the one to install.
        placement: Where its INT8 goes; None where it has no integer kernels for weighted layers.
        integers: The float type at the borders of its integer kernels where the rest is in half.
        behind: Providers that take what it leaves, in order; the CPU is always last.
        options: What the session is told of it.
        device: Where its kernels run.
    """

    name: str
    title: str
    packages: tuple[str, ...]
    placement: Placement | None
    integers: Literal["half", "float32"] = "float32"
    behind: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install {self.packages[0]}"

    @property
    def chain(self) -> list[tuple[str, dict[str, str]]]:
        """What a session is asked for, in order of preference."""
        names = dict.fromkeys((self.name, *self.behind, "CPUExecutionProvider"))
        return [(name, dict(self.options) if name == self.name else {}) for name in names]


CPU = Provider(
    "CPUExecutionProvider",
    "CPU",
    ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino"),
    ONNX_RUNTIME,
)
#: It multiplies 8-bit integers in no convolution and in no product with scales a channel.
CUDA = Provider("CUDAExecutionProvider", "CUDA", ("onnxruntime-gpu",), None, device="cuda")
TENSORRT_PROVIDER = Provider(
    "TensorrtExecutionProvider",
    "TensorRT",
    ("onnxruntime-gpu",),
    TENSORRT,
    integers="half",
    behind=("CUDAExecutionProvider",),
    device="cuda",
)
OPENVINO_PROVIDER = Provider(
    "OpenVINOExecutionProvider", "OpenVINO", ("onnxruntime-openvino",), OPENVINO, options={"device_type": "CPU"}
)
