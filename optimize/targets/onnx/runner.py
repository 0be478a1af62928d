"""Run an ONNX file with ONNX Runtime (this file does not need torch)."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from optimize.errors import Refused, TargetUnavailable, first_line
from optimize.regular import shown
from optimize.targets.arrays import element_type, fitted
from optimize.targets.base import Artifact, Runner
from optimize.targets.onnx.providers import CPU, Provider
from optimize.targets.onnx_graph.external import weights_path

INSTALL = "pip install onnxruntime"
#: ONNX Runtime's number of what it must log.
_FATAL = 4
#: ONNX's number of bfloat16.
_BFLOAT16 = 16
#: ONNX Runtime's name of a tensor of texts.
_TEXT = "tensor(string)"
#: The one type of floats of eight bits that ONNX Runtime gives at all.
_EIGHT_BITS = "tensor(float8e4m3fn)"
#: Runs a session on arrays by input name.
Run = Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]


class OnnxRunner(Runner):
    """An ONNX Runtime session.

    Attributes:
        providers: The execution providers the session really uses, the preferred one first.
        refusal: Why the provider that was asked for runs nothing; empty where it runs, or where nobody said why.
    """

    shared = True

    def __init__(self, artifact: Artifact, *, threads: int | None = None, provider: Provider = CPU) -> None:
        """Open a session.

        Args:
            artifact: An artifact of a target that ONNX Runtime runs.
            threads: Threads inside one operator; None leaves it to ONNX Runtime. Operators run one after another.
            provider: What executes it; what it does not take, or all where it cannot be opened, runs on CPU.

        Raises:
            TargetUnavailable: ONNX Runtime is not installed, or has no kernel for an operator of the file.
        """
        super().__init__(artifact)
        runtime = import_runtime()
        options = session_options(runtime, threads=threads)
        self.session, self.refusal = _open_on(runtime, str(artifact.path), options, provider)
        self.providers: tuple[str, ...] = tuple(self.session.get_providers())
        self._names = [entry.name for entry in self.session.get_inputs()]
        self._run = run_of(self.session)

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run on flat arrays; return flat arrays."""
        return self._run(dict(zip(self._names, inputs, strict=True)))


def import_runtime() -> Any:
    """Return the onnxruntime module, which reports nothing to anybody.

    Since 1.31 it sends its maker what it is loaded with and keeps an identifier of the machine, unless this variable
    is set before it is imported (microsoft/onnxruntime, pull request 27379).

    Raises:
        TargetUnavailable: It is not installed.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
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
    options.add_session_config_entry("session.load_model_format", "ONNX")  # whatever a file is called
    return options


def open_session(runtime: Any, model: str | bytes, options: Any, provider: Provider = CPU) -> Any:
    """Return a session of a model file or its bytes.

    Raises:
        TargetUnavailable: An operator has no kernel for its types; the message is ONNX Runtime's.
        Refused: ONNX Runtime cannot open it.
    """
    try:
        # A session that goes on elsewhere when a run fails would be timed, and judged, as what it is not.
        return runtime.InferenceSession(model, options, providers=provider.chain, enable_fallback=0)
    except Exception as error:
        text = str(error)
        if "NOT_IMPLEMENTED" not in text and type(error).__name__ != "NotImplemented":
            file = f"'{model}'" if isinstance(model, str) else "the file operator by operator"
            on = "" if provider is CPU else f" on {provider.title}"
            raise Refused(f"ONNX Runtime cannot open {file}{on}: {_shorten(error)}") from error
        reason = text.split("NOT_IMPLEMENTED : ")[-1].strip()
        raise TargetUnavailable(
            f"ONNX Runtime {runtime.__version__} on {provider.title} cannot run the file: {reason}",
            hint="It has few bfloat16 kernels: take float32, --int8 or --mixed float16 for it, or --to openvino.",
        ) from error


def _shorten(error: Exception) -> str:
    """Return what an error of ONNX Runtime says; of a call of CUDA that failed, without the C++ around it.

    >>> _shorten(RuntimeError("cuda_call.cc:154 bool onnxruntime::CudaCall CUDA failure 304: not supported ; GPU=-1 ;"))
    'CUDA failure 304: not supported'
    """
    call = re.search(r"CUDA failure \d+: [^;]*", str(error))
    return call[0].strip() if call else first_line(error)


def _open_on(runtime: Any, path: str, options: Any, provider: Provider) -> tuple[Any, str]:
    """Return a session, and why it runs on CPU where the provider that was asked for could not be opened."""
    missing = _find_libraries(runtime) if provider.device == "cuda" else ""
    try:
        session = open_session(runtime, path, options, provider)
    except Refused as error:
        if provider is CPU:
            raise
        return open_session(runtime, path, options), error.what
    return session, "" if session.get_providers()[0] == provider.name else missing


def _find_libraries(runtime: Any) -> str:
    """Load CUDA's libraries from where pip puts them too, as those of torch; return what is said of missing ones.

    What ONNX Runtime 1.21 and later print of them (``preload_dlls``), it would log again.
    """
    said = io.StringIO()
    if hasattr(runtime, "preload_dlls"):
        runtime.set_default_logger_severity(_FATAL)
        with contextlib.redirect_stdout(said):
            runtime.preload_dlls()
    return " ".join(said.getvalue().splitlines())


def open_unfused(model: bytes, folder: Path) -> Any:
    """Return a session that runs every operator of a model on its own; weights outside it lie in ``folder``."""
    runtime = import_runtime()
    options = session_options(runtime, threads=None)
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
    return open_session(runtime, model, options)


def keep_optimized(options: Any, path: Path) -> None:
    """Let a session write the graph that it runs to ``path``, and its weights, which may be large, beside it."""
    options.optimized_model_filepath = str(path)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", weights_path(path).name)


def run_of(session: Any) -> Run:
    """Return a function that runs a session on arrays by input name and returns its outputs in order.

    Bfloat16, which a session takes from no array and gives in none, goes through ONNX Runtime's own values.
    """
    types = {entry.type for entry in (*session.get_inputs(), *session.get_outputs())}
    if "tensor(bfloat16)" in types:
        return functools.partial(_run_values, session)
    if _EIGHT_BITS in types:
        return functools.partial(_run_eight_bits, session)
    return functools.partial(_run_texts, session) if _TEXT in types else functools.partial(session.run, None)


def feed_of(session: Any, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return flat arrays by input name, float32 in the 16-bit type that the session takes."""
    kinds = [entry.type.removeprefix("tensor(").removesuffix(")") for entry in session.get_inputs()]
    names = [entry.name for entry in session.get_inputs()]
    return {name: fitted(array, kind) for name, kind, array in zip(names, kinds, arrays, strict=True)}


def _run_texts(session: Any, feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Run on arrays; of texts that are none ONNX Runtime says where the first bad byte is.

    Raises:
        Refused: A text that it gives is not UTF-8.
    """
    try:
        found: list[np.ndarray] = session.run(None, feed)
    except UnicodeDecodeError as error:
        names = ", ".join(f"'{shown(entry.name)}'" for entry in session.get_outputs() if entry.type == _TEXT)
        raise Refused(f"The file gives texts that are not UTF-8 ({names}).", hint="Leave that output out.") from error
    return found


def _run_eight_bits(session: Any, feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Run on arrays; floats of eight bits, of which ONNX Runtime gives the bytes, are returned as float32."""
    from ml_dtypes import float8_e4m3fn

    found = zip(session.get_outputs(), session.run(None, feed), strict=True)
    return [
        array.view(float8_e4m3fn).astype(np.float32) if entry.type == _EIGHT_BITS else array for entry, array in found
    ]


def _run_values(session: Any, feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Run on ONNX Runtime's own values, which hold bfloat16."""
    values = {name: _value(array) for name, array in feed.items()}
    return [_array(value) for value in session.run_with_ort_values(None, values)]


def _value(array: np.ndarray) -> Any:
    create = import_runtime().OrtValue
    if array.dtype.name != "bfloat16":
        return create.ortvalue_from_numpy(array)
    return create.ortvalue_from_numpy_with_onnx_type(np.asarray(array, order="C").view(np.uint16), _BFLOAT16)


def _array(value: Any) -> np.ndarray:
    """Return a value as an array; bfloat16 is copied from its memory, which is on the CPU."""
    if value.data_type() != "tensor(bfloat16)":
        array: np.ndarray = value.numpy()
        return array
    shape = value.shape()
    bits = (ctypes.c_uint16 * int(np.prod(shape))).from_address(value.data_ptr())
    return np.array(bits, np.uint16).reshape(shape).view(element_type("bfloat16"))
