"""The targets, one backend a file or folder. Importing this package registers them all, without importing a runtime."""

from optimize.targets.eager import Eager
from optimize.targets.onnx import Onnx
from optimize.targets.openvino import OpenVINO
from optimize.targets.pt2 import PT2
from optimize.targets.tensorrt import TensorRT
from optimize.targets.torchscript import TorchScript

__all__ = ["PT2", "Eager", "Onnx", "OpenVINO", "TensorRT", "TorchScript"]
