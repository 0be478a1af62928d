"""The two files of a comparison, each opened in its own runtime."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optimize.errors import OptimizeError, Refused
from optimize.regular import require_file
from optimize.targets.arrays import element_type, to_array, to_tensor
from optimize.targets.base import TensorSpec, file_digest
from optimize.targets.onnx.runner import run_of

if TYPE_CHECKING:
    import onnx_ir as ir

    from optimize.targets.onnx.values import Values

_ONNX_TYPES = {"float": "float32", "double": "float64"}
FLOATS = ("float16", "float32", "float64", "bfloat16")
_NUMBERS = frozenset({*FLOATS, "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))})
Run = Callable[[Sequence[np.ndarray]], list[np.ndarray]]


@dataclass(frozen=True)
class Side(ABC):
    """An opened file.

    Attributes:
        path: The file.
        inputs: What it takes, in the order ``run`` takes it; empty where the file does not say.
        output_names: Of its outputs, in order; empty where the file does not say.
    """

    path: Path
    inputs: tuple[TensorSpec, ...]
    output_names: tuple[str, ...]

    @property
    @abstractmethod
    def kind(self) -> str:
        """What the file is, in words."""

    @functools.cached_property
    def sha256(self) -> str | None:
        """Hash of the file, hexadecimal; None for a factory."""
        return file_digest(self.path) if self.path.is_file() else None

    @abstractmethod
    def _run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]: ...

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the flat outputs for flat inputs; floats are cast to what the file takes.

        Raises:
            Refused: The runtime reports an error.
        """
        return self._guarded(self._run, arrays)

    def _guarded(self, run: Run, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        dtypes = [element_type(spec.dtype) for spec in self.inputs] or [array.dtype for array in arrays]
        try:
            return run([array.astype(dtype, copy=False) for array, dtype in zip(arrays, dtypes, strict=True)])
        except Exception as error:  # every runtime has its own
            raise Refused(f"'{self.path}' cannot be run: {_first_line(error)}") from error


@dataclass(frozen=True)
class OnnxSide(Side):
    """An ONNX file in ONNX Runtime on CPU, as deployed: with its graph optimizations."""

    session: Any
    trust: bool = False

    @property
    def kind(self) -> str:
        """What the file is, in words."""
        return "ONNX"

    @functools.cached_property
    def values(self) -> Values:
        """The values the file computes."""
        from optimize.targets.onnx.values import read_values

        return read_values(self.path, trust=self.trust)

    def _run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return self._feed(self.session, arrays)

    def reader(self, values: Sequence[ir.Value]) -> Run:
        """Return a function like ``run`` that returns these values, computed operator by operator, none fused.

        Raises:
            Refused: ONNX Runtime cannot run the file that way.
        """
        runtime, options = _runtime()
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
        folder = str(self.values.folder.resolve())
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        session = _session(runtime, self.values.returning(values), options, self.path)
        return functools.partial(self._guarded, functools.partial(self._feed, session))

    def _feed(self, session: Any, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        names = (spec.name for spec in self.inputs)
        return run_of(session)(dict(zip(names, arrays, strict=True)))


@dataclass(frozen=True)
class TorchSide(Side):
    """A file that torch runs; ``call`` takes flat tensors and returns flat tensors."""

    call: Callable[..., Sequence[Any]]
    noun: str

    @property
    def kind(self) -> str:
        """What the file is, in words."""
        return self.noun

    def _run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        import torch

        with torch.inference_mode():
            outputs = self.call(*map(to_tensor, arrays))
        return [to_array(output) for output in outputs]


def open_side(source: str, *, trust: bool = False) -> Side:
    """Open a file: ``.onnx`` by its ending, everything else by its bytes and by the rules of ``optimize.load``.

    Without trust, this is done in a confined process: what is opened here is run here.

    Raises:
        Refused: It is missing, unreadable, no model, or wants code without trust.
        TargetUnavailable: ONNX Runtime is not installed, or has no kernel for an operator.
    """
    path = Path(source)
    if path.suffix.lower() == ".onnx":
        return _open_onnx(path, trust)
    return _open_torch(path, trust)


def aligned(first: Side, second: Side) -> tuple[Side, Side]:
    """Return both sides so that their inputs correspond: by name where the names are the same, else by position.

    Raises:
        Refused: They do not take the same inputs.
    """
    names = [spec.name for spec in first.inputs]
    by_name = {spec.name: spec for spec in second.inputs}
    if isinstance(second, OnnxSide) and set(names) == set(by_name):
        second = dataclasses.replace(second, inputs=tuple(by_name[name] for name in names))
    if first.inputs and second.inputs:
        fits = len(first.inputs) == len(second.inputs)
        if not fits or not all(map(alike, first.inputs, second.inputs)):
            raise Refused(
                f"The files do not take the same inputs: '{first.path}' takes {listed(first.inputs)}, "
                f"'{second.path}' takes {listed(second.inputs)}.",
                hint="Compare two files of one model.",
            )
    return first, second


def _open_onnx(path: Path, trust: bool) -> OnnxSide:
    from optimize.targets.onnx.reading import read_checked

    require_file(path)
    runtime, options = _runtime()
    read_checked(path, trust=trust)
    session = _session(runtime, str(path), options, path)
    names = tuple(entry.name for entry in session.get_outputs())
    inputs = tuple(_spec(entry, path) for entry in session.get_inputs())
    return OnnxSide(path, inputs, names, session, trust)


def _runtime() -> tuple[Any, Any]:
    from optimize.targets.onnx.runner import import_runtime, session_options

    runtime = import_runtime()
    return runtime, session_options(runtime, threads=None)


def _session(runtime: Any, model: str | bytes, options: Any, path: Path) -> Any:
    from optimize.targets.onnx.runner import open_session

    try:
        return open_session(runtime, model, options)
    except OptimizeError:
        raise
    except Exception as error:
        raise Refused(f"ONNX Runtime cannot open '{path}': {_first_line(error)}") from error


def _spec(entry: Any, path: Path) -> TensorSpec:
    """Return one input of a session; a free dimension without a name is called ``?``."""
    kind = entry.type.removeprefix("tensor(").removesuffix(")")
    if kind not in _ONNX_TYPES and kind not in _NUMBERS:
        raise Refused(f"'{path}' takes '{entry.name}', a {entry.type}; only tensors of numbers can be given here.")
    shape = tuple(size if isinstance(size, int) else size or "?" for size in entry.shape)
    return TensorSpec(entry.name, shape, _ONNX_TYPES.get(kind, kind))


def _open_torch(path: Path, trust: bool) -> TorchSide:
    from torch.utils import _pytree as pytree

    from optimize.load import ModelSource, load_confined, load_trusted
    from optimize.targets.packaging import input_specs

    source = ModelSource.of(path)
    loaded = load_trusted(source) if trust else load_confined(source)
    module, noun = loaded.module, loaded.kind.replace("_", " ").replace("torchscript", "TorchScript")
    if (program := loaded.captured()) is not None:
        return TorchSide(path, input_specs(program), (), lambda *tensors: program.run(tensors), noun)
    module.eval()
    return TorchSide(path, (), (), lambda *tensors: pytree.tree_leaves(module(*tensors)), noun)


def alike(one: TensorSpec, other: TensorSpec) -> bool:
    """Say whether one array can be given for both inputs, cast where both are floats."""
    floats = one.dtype in FLOATS and other.dtype in FLOATS
    if (one.dtype != other.dtype and not floats) or len(one.shape) != len(other.shape):
        return False
    return all(isinstance(a, str) or isinstance(b, str) or a == b for a, b in zip(one.shape, other.shape, strict=True))


def listed(specs: Sequence[TensorSpec]) -> str:
    """Return the inputs as a reader sees them."""
    return ", ".join(f"{spec.name} {spec.dtype}{list(spec.shape)}" for spec in specs).replace("'", "")


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
