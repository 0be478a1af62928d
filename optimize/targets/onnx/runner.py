"""Run an ONNX file with ONNX Runtime on CPU (this file does not need torch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optimize.errors import TargetUnavailable
from optimize.targets.base import Artifact, Runner

PROVIDER = "CPUExecutionProvider"
INSTALL = "pip install onnxruntime"


class OnnxRunner(Runner):
    """An ONNX Runtime session on CPU.

    Attributes:
        providers: The execution providers the session really uses.
    """

    def __init__(self, artifact: Artifact, *, threads: int | None = None) -> None:
        """Open a session.

        Args:
            artifact: An artifact of the target ``onnx``.
            threads: Threads inside one operator; None leaves it to ONNX Runtime. Operators run one after another.

        Raises:
            TargetUnavailable: ONNX Runtime is not installed, or has no kernel for an operator of the file.
        """
        super().__init__(artifact)
        runtime = import_runtime()
        options = session_options(runtime, threads=threads)
        self.session = open_session(runtime, str(artifact.path), options)
        self.providers: tuple[str, ...] = tuple(self.session.get_providers())
        self._names = [entry.name for entry in self.session.get_inputs()]

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run on flat arrays; return flat arrays."""
        outputs: list[np.ndarray] = self.session.run(None, dict(zip(self._names, inputs, strict=True)))
        return outputs


def import_runtime() -> Any:
    """Return the onnxruntime module.

    Raises:
        TargetUnavailable: It is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise TargetUnavailable("ONNX Runtime is not installed.", hint=INSTALL) from error
    return onnxruntime


def session_options(runtime: Any, *, threads: int | None) -> Any:
    """Return options for one operator at a time, bounded threads, and errors only on stderr."""
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return options


def open_session(runtime: Any, model: str | bytes, options: Any) -> Any:
    """Return a CPU session of a model file or its bytes.

    Raises:
        TargetUnavailable: An operator has no CPU kernel for its types; the message is ONNX Runtime's.
    """
    try:
        return runtime.InferenceSession(model, options, providers=[PROVIDER])
    except Exception as error:
        text = str(error)
        if "NOT_IMPLEMENTED" not in text and type(error).__name__ != "NotImplemented":
            raise
        reason = text.split("NOT_IMPLEMENTED : ")[-1].strip()
        raise TargetUnavailable(
            f"ONNX Runtime {runtime.__version__} on CPU cannot run the file: {reason}",
            hint="bfloat16 has few CPU kernels there: export float32 or --int8, or use another target.",
        ) from error
