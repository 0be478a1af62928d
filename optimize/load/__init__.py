"""Loading: a file or a factory becomes a module, without running code that a file brings along.

Which code may run: a factory named by the user; TorchScript, in torch's interpreter (`script`); anything at all with
``trust``. Everything else is checked (`pickles`, `exported`) and opened first in a limited child process (`guarded`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from optimize.errors import Refused, UsageError
from optimize.load import exported, guarded, named, pickles, script, untrusted, weights
from optimize.load.identify import Kind, identify


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
    kind: Literal["module", "state_dict", "exported_program", "torchscript", "factory"]
    exported: torch.export.ExportedProgram | None
    source: str
    sha256: str | None
    warnings: tuple[str, ...] = ()


def load(source: str | Path, *, model: str | None = None, trust: bool = False) -> Loaded:
    """Load a model from a file or a factory; what a file is, is told by its bytes.

    Args:
        source: A file (whole module or state dict of torch.save, ``.pt2``, TorchScript, safetensors), or
            ``package.module:factory`` where there is no file of that name.
        model: ``package.module:factory`` of the module that a state dict belongs to.
        trust: Run whatever code the file holds.

    Raises:
        Refused: It is missing, unreadable, no PyTorch model, wants code without trust, or does not fit ``model``.
        UsageError: ``model`` is malformed, or given with a factory.
    """
    if model is not None and not named.is_named(model):
        raise UsageError(f"--model '{model}' does not name a factory.", hint="Write package.module:factory.")
    path = Path(source)
    if not path.exists() and not path.is_symlink():
        return _load_factory(str(source), model)
    kind = identify(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if kind is Kind.SAFETENSORS:
        held: Any = _read_safetensors(path)
    else:
        held = _open(path, kind, trust)
    return _loaded(held, path, digest, model)


def _load_factory(source: str, model: str | None) -> Loaded:
    if not named.is_named(source):
        raise Refused(
            f"There is no file '{source}' (searched in '{Path.cwd()}').",
            hint="Check the path, or name a factory as package.module:factory.",
        )
    if model is not None:
        raise UsageError(f"'{source}' is a factory already; --model is for the state dict in a file.")
    return Loaded(weights.build(source), "factory", None, source, None)


def _open(path: Path, kind: Kind, trust: bool) -> Any:
    if not trust:
        guarded.rehearse(path, kind)
        return untrusted.open_untrusted(path, kind, str(path))
    with path.open("rb") as file, untrusted.readable(kind, str(path)):
        if kind is Kind.EXPORTED:
            return exported.read(file)
        return script.read(file) if kind is Kind.TORCHSCRIPT else pickles.read_trusted(file, str(path))


def _read_safetensors(path: Path) -> weights.StateDict:
    """Read named tensors: the format holds no code and no size beyond the file's own, so no child is needed."""
    import safetensors
    import safetensors.torch

    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, ValueError, OSError) as error:
        raise Refused(f"'{path}' is a damaged safetensors file: {error}.", hint="Download the file again.") from error


def _loaded(held: Any, path: Path, digest: str, model: str | None) -> Loaded:
    unused = (f"--model {model} was not needed: '{path}' holds the whole model.",) if model else ()
    if isinstance(held, torch.export.ExportedProgram):
        with untrusted.readable(Kind.EXPORTED, str(path)):
            callable_module = held.module()
        return Loaded(callable_module, "exported_program", held, f"{path} (exported program)", digest, unused)
    if isinstance(held, torch.jit.ScriptModule):
        return Loaded(held, "torchscript", None, f"{path} (TorchScript)", digest, unused)
    found, notes = weights.unwrap(held, str(path))
    if isinstance(found, torch.nn.Module):
        return Loaded(found, "module", None, f"{path} (whole module)", digest, (*notes, *unused))
    if model is None:
        raise weights.needs_model(found, str(path))
    module = weights.build(model)
    notes += weights.fit(module, found, str(path))
    return Loaded(module, "state_dict", None, f"{path} (state dict) in {model}", digest, tuple(notes))
