"""What TensorRT says while it works; when it fails, an error of that, which names the layer and the next step.

It honours only a process's first logger, so there is one, and it is shared.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from optimize.errors import OptimizeError, Refused, TargetUnavailable

_heard: dict[str, list[str]] = {"INTERNAL_ERROR": [], "ERROR": [], "WARNING": []}


def listen(module: Any) -> Any:
    """Forget what was said before; return the process's ``ILogger`` of ``tensorrt`` or ``tensorrt_rtx``."""
    for texts in _heard.values():
        texts.clear()
    return _logger(module)


def errors() -> list[str]:
    """Return the errors heard, the gravest first."""
    return [*_heard["INTERNAL_ERROR"], *_heard["ERROR"]]


def warnings() -> list[str]:
    """Return the distinct warnings heard, in order."""
    return list(dict.fromkeys(_heard["WARNING"]))


@cache
def _logger(module: Any) -> Any:
    class _Logger(module.ILogger):
        def log(self, severity: Any, text: str) -> None:
            if severity.name in _heard:
                _heard[severity.name].append(text)

    return _Logger()


#: What a message contains, the error that follows, and what to do.
_CAUSES: tuple[tuple[str, type[OptimizeError], str], ...] = (
    (
        r"workspace",
        Refused,
        "A layer needs more GPU memory while it runs: raise workspace_bytes (or leave it out), or lower max_batch.",
    ),
    (
        r"OutOfMemory|out of memory|OUT_OF_MEMORY|bad_alloc",
        Refused,
        "Free GPU memory (nvidia-smi shows who holds it), set workspace_bytes, or lower max_batch.",
    ),
    (
        r"Turing|sm75|FP32 GEMM",
        Refused,
        "Compute capability 7.5 has no float32 products and no bfloat16: use --fp16, or leave 7.5 out.",
    ),
    (r"libnvinfer_lean|lean runtime", Refused, "Leave version_compatible out; its runtime is not installed."),
    (
        r"InsufficientDriver|driver version is insufficient|CUDA initialization failure|CUDA_ERROR_NO_DEVICE|"
        r"no CUDA-capable device|unsupported display driver",
        TargetUnavailable,
        "Update the NVIDIA driver ('nvidia-smi' shows its version), or let TensorRT-RTX build, which needs none.",
    ),
    (
        r"CUDA_SUCCESS|cudaSuccess",
        TargetUnavailable,
        "This build needs a working GPU: leave refit out, or build on a machine with one.",
    ),
)


def build_failure(library: str, errors: Sequence[str]) -> OptimizeError:
    """Return why an engine was not built: the gravest message, the layer it names, and what to do about its cause.

    Args:
        library: Title and version.
        errors: What the library said, the gravest first.
    """
    reasons = [plain(text) for text in errors] or ["it gave no reason"]
    for pattern, error, hint in _CAUSES:
        for text, reason in zip(errors, reasons, strict=False):
            if re.search(pattern, text, re.IGNORECASE):
                return error(f"{library} cannot build the engine: {reason}.", hint=hint)
    return Refused(f"{library} cannot build the engine: {reasons[0]}.", hint="Try another precision or target.")


def parse_failure(library: str, found: Sequence[Any], errors: Sequence[str]) -> Refused:
    """Return why a model was not accepted: each operator with its layer.

    Args:
        library: Title and version.
        found: The parser's errors.
        errors: What the library said besides.
    """
    reasons = [_parser_reason(error) for error in found] or [plain(text) for text in errors[:1]]
    hint = "Write the layer with other operators, or choose another target."
    return Refused(f"{library} refuses {'; '.join(reasons) or 'the model'}.", hint=hint)


def _parser_reason(error: Any) -> str:
    operator, name = error.node_operator(), error.node_name()
    reason = "it does not have this operator" if error.desc() == "false" else plain(error.desc())
    return f"the {operator} '{name}': {reason}" if operator else f"the model: {reason}"


def plain(text: str) -> str:
    """Return the readable part of TensorRT's message.

    >>> plain("Assertion failed: status.is_success(): Found unsupported input type of UINT8")
    'Found unsupported input type of UINT8'
    >>> plain("ModelImporter.cpp:1071: Make sure input x has Int64 binding.")
    'Make sure input x has Int64 binding'
    >>> plain("Invalid Node - b\\nITensor::f: Error Code 4: API Usage Error (b: has Int32. In checkType at /n.cpp:4)")
    'b: has Int32'
    >>> plain("f: Error Code 1: Myelin ([pass.cpp:337: check] 'fc' (SM75) has no FP32. In compileGraph at /c:2)")
    "'fc' (SM75) has no FP32"
    """
    usage = re.search(r"Error Code \d+: [\w ]+\((.*?)(?:\.\s+In \w+ at .*)?\)$", text, re.MULTILINE)
    line = usage[1] if usage else text.splitlines()[0]
    line = re.sub(r"^(?:\w+\.cpp:\d+: |Assertion failed: \S*(?: \|\| \S*)*: )", "", line)
    return re.sub(r"\[\w+\.(?:cpp|h):\d+: [^\]]*\] ?", "", line).rstrip(". ")
