"""Opening an untrusted file: check, then load. The rehearsal and the user's own process both run this, nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from optimize.errors import OptimizeError, Refused
from optimize.load import exported, pickles, script
from optimize.load.identify import Kind

#: A broadcast buffer may stand for a little more than is stored.
_VIEW_SLACK_BYTES = 64 * 2**20
_NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc")


def open_untrusted(path: Path, kind: Kind, name: str) -> Any:
    """Open a file without running code it brings along, on the CPU.

    Args:
        path: The file.
        kind: What `identify` said it is.
        name: What to call it in an error.

    Returns:
        What it holds: a module, a mapping, an ExportedProgram, a ScriptModule.

    Raises:
        Refused: It needs trust or is damaged.
        MemoryError: It asks for more memory than there is.
    """
    with readable(kind, name), path.open("rb") as file:
        held = _open(file, kind, name)
    if isinstance(held, torch.nn.Module):
        _refuse_swollen(held, name)
    return held


def _refuse_swollen(module: torch.nn.Module, name: str) -> None:
    """Refuse weights that claim far more elements than are stored: any copy of such a view would fill the memory.

    Raises:
        Refused: A view is larger than what it is a view of, by more than the slack.
    """
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.layout is torch.strided and tensor.nbytes > tensor.untyped_storage().nbytes() + _VIEW_SLACK_BYTES:
            raise Refused(
                f"'{name}' holds a weight '{path}' of {tensor.nbytes} bytes made from "
                f"{tensor.untyped_storage().nbytes()} stored ones.",
                hint="Save the module with contiguous weights, if you made it.",
            )


@contextmanager
def readable(kind: Kind, name: str) -> Iterator[None]:
    """Turn whatever torch raises over a damaged file into a refusal."""
    try:
        yield
    except (OptimizeError, MemoryError):
        raise
    except Exception as error:
        if any(text in str(error).lower() for text in _NO_MEMORY):
            raise MemoryError(str(error)) from error
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise Refused(
            f"'{name}' is a {kind.value} that torch cannot read: {line.split('. ')[0][:200]}.",
            hint="Save or download the file again.",
        ) from error


def _open(file: IO[bytes], kind: Kind, name: str) -> Any:
    if kind is Kind.EXPORTED:
        exported.check(file, name)
        file.seek(0)
        return exported.read(file)
    if kind is Kind.TORCHSCRIPT:
        script.check(file, name)
        file.seek(0)
        return script.read(file)
    return pickles.read_untrusted(file, kind, name)
