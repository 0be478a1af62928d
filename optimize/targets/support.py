"""What each backend runs, for ``optimize targets``: one row a target, its words those of the files' precisions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Support:
    """What one target writes and its runtime runs.

    Attributes:
        floats: Float types of a whole file: ``float32``, ``float16``, ``bfloat16``.
        int8: Kinds of INT8: ``static`` (calibrated), ``dynamic``, ``weights`` (weights alone).
        mixed: Float types beside static INT8 in one file, float32 apart.
        free: Dimensions that a file leaves free.
        remark: What else decides, as a sentence.
    """

    floats: tuple[str, ...] = ("float32",)
    int8: tuple[str, ...] = ()
    mixed: tuple[str, ...] = ()
    free: str = "batch, height, width"
    remark: str = ""

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions as files carry them in their names."""
        kinds = tuple("int8" if kind == "static" else f"int8-{kind}" for kind in self.int8)
        return (*self.floats, *kinds, *(f"int8-{dtype}" for dtype in self.mixed))


#: What is known of a target that another package registered.
UNKNOWN = Support(floats=(), free="unknown")

_FLOATS = ("float32", "float16", "bfloat16")
_INT8 = ("static", "dynamic", "weights")
_HALVES = ("float16", "bfloat16")

_GPU = Support(_FLOATS, remark="For measuring beside runtimes; absent without a GPU.")

SUPPORT = {
    "eager": Support(_FLOATS),
    "executorch": Support(("float32",), free="batch", remark="INT8 is not written for it."),
    "onnx": Support(
        ("float32", "float16"),
        _INT8,
        ("float16",),
        remark="float16 halves the file and is not faster; bfloat16 is written, and few CPU kernels take it.",
    ),
    "onnx-cuda": Support(_FLOATS),
    "onnx-tensorrt": Support(_FLOATS, ("static",), _HALVES),
    "onnx-openvino": Support(("float32",), ("static",)),
    "openvino": Support(
        ("float32", "bfloat16"),
        ("static",),
        ("bfloat16",),
        remark="bfloat16 needs AVX512-BF16 or AMX and is float32 elsewhere.",
    ),
    "pt2": Support(("float32", "bfloat16"), ("static",), remark="Tied to the CPU and the torch release it is for."),
    "tensorrt": Support(
        _FLOATS, ("static",), _HALVES, remark="The batch is free from min_batch to max_batch; runs on NVIDIA GPUs."
    ),
    "torchscript": Support(_FLOATS, _INT8, remark="INT8 on x86 and ARM, with torch's own kernels."),
    "compile": Support(_FLOATS, remark="Compiled where it is loaded, at the first run of a shape."),
    "channels-last": Support(_FLOATS),
    "cuda": _GPU,
    "cuda-channels-last": _GPU,
    "cuda-autocast": _GPU,
    "cuda-compile": _GPU,
    "cuda-graphs": _GPU,
}
