"""The targets, one backend a file or folder: a worker imports the one it runs, ``registry.targets`` all of them."""

#: Modules that register a target each, in the order they are listed.
BACKENDS = ("eager", "executorch", "onnx", "openvino", "pt2", "tensorrt", "torchscript", "ways")
