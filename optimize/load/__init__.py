"""Loading: a file or a factory becomes a module or a program, without running code that a file brings along.

Which code may run in the user's process: a factory named by the user, and anything at all in a file with ``trust``.
Every other file is opened in a confined process and comes back as data: `taking` says how, `untrusted` by which rules.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from optimize import named, registry, sandbox
from optimize.errors import Refused, UsageError, first_line
from optimize.frontend_graphs import ForeignGraph
from optimize.load import exported, pickles, script, untrusted, weights
from optimize.load.identify import Kind, identify
from optimize.regular import require_model

if TYPE_CHECKING:
    from optimize.program import Program

ModelKind = Literal["module", "state_dict", "exported_program", "torchscript", "onnx", "factory"]

#: Of a safetensors file.
_MOST_TENSORS = 1 << 16


@dataclass(frozen=True)
class ModelSource:
    """What the user named, looked at and not opened.

    Attributes:
        text: As the user wrote it.
        path: The file; None of a factory.
        kind: What the file is by its bytes; None of a factory.
        sha256: Of the file; None of a factory.
        model: ``package.module:factory`` of the module that a state dict belongs to.
    """

    text: str
    path: Path | None
    kind: Kind | None
    sha256: str | None
    model: str | None

    @classmethod
    def of(cls, source: str | Path, *, model: str | None = None) -> ModelSource:
        """Look at a file or the name of a factory.

        Raises:
            Refused: It is missing, unreadable, or no PyTorch model.
            UsageError: ``model`` is malformed, or given with a factory.
        """
        if model is not None and not named.is_named(model):
            raise UsageError(f"--model '{model}' does not name a factory.", hint=named.advice(model))
        path = Path(source)
        if not _is_there(path):
            _check_factory(str(source), model)
            return cls(str(source), None, None, None, model)
        kind = identify(path)
        with path.open("rb") as file:
            return cls(str(source), path, kind, hashlib.file_digest(file, "sha256").hexdigest(), model)

    @property
    def is_plain(self) -> bool:
        """Whether it is a file format that holds no code and no size beyond its own."""
        return self.kind is Kind.SAFETENSORS

    @property
    def unused_model(self) -> tuple[str, ...]:
        """What to say of a factory that a file with a whole model did not need."""
        return (f"--model {self.model} was not needed: '{self.path}' holds the whole model.",) if self.model else ()


@dataclass(frozen=True)
class Loaded:
    """A model and where it came from.

    Attributes:
        module: What to call: the eager module, the module of an exported program, or a ScriptModule. Its training flag
            is as the file has it, except that a module made by a factory is in evaluation mode.
        kind: What the source was.
        exported: The program of a ``.pt2``, else None.
        source: What to say in a report.
        sha256: Of the file; None for a factory alone.
        warnings: What the user should know.
    """

    module: torch.nn.Module
    kind: ModelKind
    exported: torch.export.ExportedProgram | exported.Exported | None
    source: str
    sha256: str | None
    warnings: tuple[str, ...] = ()

    def captured(self) -> Program | None:
        """Return the program of a ``.pt2``, its batch free where its graph allows that; None of anything else.

        Raises:
            Refused: It holds no example inputs.
        """
        from optimize.load.capturing import capture_program

        return None if self.exported is None else capture_program(self.exported)


def load_trusted(source: ModelSource) -> Loaded:
    """Load what the user vouches for in this process: a factory, safetensors, or a file whose code may run.

    Raises:
        Refused: It cannot be read, or does not fit the factory.
    """
    if source.path is None or source.kind is None:
        return Loaded(weights.build(source.text), "factory", None, source.text, None)
    return _loaded(_open_trusted(source.path, source.kind), source)


def load_state(source: ModelSource, state: weights.StateDict, notes: tuple[str, ...] = ()) -> Loaded:
    """Return the module of the user's factory with the tensors of a state dict.

    Raises:
        Refused: There is no factory, or they do not fit it.
    """
    name = str(source.path)
    if source.model is None:
        raise weights.needs_model(state, name)
    module, narrowed = weights.narrowed(weights.build(source.model), state)
    said = (*notes, *narrowed, *weights.fit(module, state, name))
    return Loaded(module, "state_dict", None, f"{name} (state dict) in {source.model}", source.sha256, said)


def load_confined(source: ModelSource) -> Loaded:
    """Load an untrusted file as a module in this process, which has confined itself.

    Raises:
        Refused: It needs trust, is damaged, or does not fit the factory.
        RuntimeError: This process is not confined: nothing untrusted becomes a module in the user's.
    """
    if source.path is None or source.kind is None or source.is_plain:
        return load_trusted(source)
    if not sandbox.is_confined():
        raise RuntimeError("an untrusted file is loaded in a confined process alone")
    held, notes = untrusted.open_untrusted(source.path, source.kind, str(source.path))
    found = _loaded(held, source)
    return Loaded(found.module, found.kind, found.exported, found.source, found.sha256, (*notes, *found.warnings))


def _is_there(path: Path) -> bool:
    try:
        return path.exists() or path.is_symlink()
    except (OSError, ValueError):  # no name of a file: too long, or with a NUL
        return False


def _check_factory(source: str, model: str | None) -> None:
    require_model(source)
    if model is not None:
        raise UsageError(f"'{source}' is a factory already; --model is for the state dict in a file.")


def _open_trusted(path: Path, kind: Kind) -> Any:
    if kind is Kind.SAFETENSORS:
        return _read_safetensors(path)
    if kind is Kind.ONNX:
        with untrusted.readable(kind, str(path)):
            return registry.find_target("onnx").module(path, trust=True)
    with path.open("rb") as file, untrusted.readable(kind, str(path)):
        if kind is Kind.EXPORTED:
            return exported.read_trusted(file)
        return script.read_trusted(file) if kind is Kind.TORCHSCRIPT else pickles.read_trusted(file, str(path))


def _read_safetensors(path: Path) -> weights.StateDict:
    """Read named tensors: the format holds no code and no size beyond the file's own, so no child is needed."""
    import safetensors
    import safetensors.torch

    try:
        with safetensors.safe_open(path, "pt") as file:
            count = len(file.keys())
        if count > _MOST_TENSORS:  # each takes time and memory of its own, with or without values
            raise Refused(f"'{path}' holds {count} tensors, more than any network has ({_MOST_TENSORS}).")
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, ValueError, TypeError, OSError) as error:
        what = f"'{path}' is a damaged safetensors file: {first_line(error)}."
        raise Refused(what, hint="Download the file again.") from error


def _loaded(held: Any, source: ModelSource) -> Loaded:
    """Return the module in what a file held."""
    path, digest, unused = source.path, source.sha256, source.unused_model
    if isinstance(held, torch.export.ExportedProgram):
        with untrusted.readable(Kind.EXPORTED, str(path)):
            module = held.module()
        return Loaded(module, "exported_program", held, f"{path} (exported program)", digest, unused)
    if isinstance(held, exported.Exported):
        return Loaded(held.module, "exported_program", held, f"{path} (exported program)", digest, unused)
    if isinstance(held, torch.jit.ScriptModule):
        return Loaded(held, "torchscript", None, f"{path} (TorchScript)", digest, unused)
    if isinstance(held, ForeignGraph):
        return Loaded(held, "onnx", None, f"{path} (ONNX)", digest, unused)
    found, notes = weights.unwrap(held, str(path))
    if isinstance(found, torch.nn.Module):
        return Loaded(found, "module", None, f"{path} (whole module)", digest, (*notes, *unused))
    return load_state(source, found, tuple(notes))
