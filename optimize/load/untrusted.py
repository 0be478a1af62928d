"""Opening an untrusted file, in a confined process: read by rules, then checked. Nothing else opens one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from optimize import registry
from optimize.errors import OptimizeError, Refused, first_line, lacks_memory
from optimize.load import exported, names, pickles, script
from optimize.load.archive import Archive
from optimize.load.identify import Kind

#: Weights are as many bytes as a file has; in a state dict, as many times as layers share them (12 in ALBERT), since
#: each name gets its own. A broadcast buffer may stand for a little more.
_TIMES_FILE, _SLACK_BYTES = 16, 64 << 20
#: Modules in modules, deeper than any network, so that no walk through them overflows.
_MOST_DEPTH = 60
_MOST_MODULES = 100_000


def open_untrusted(path: Path, kind: Kind, name: str) -> tuple[Any, list[str]]:
    """Open a file without running code it brings along, on the CPU.

    Args:
        kind: What `identify` said it is.
        name: What to call it in an error.

    Returns:
        What it holds (a module, a mapping, an `exported.Exported`, a ScriptModule), and what the user should know.

    Raises:
        Refused: It needs trust or is damaged.
        MemoryError: It asks for more memory than there is.
    """
    with readable(kind, name):
        if kind is Kind.ONNX:
            return registry.find_target("onnx").module(path), []
        if kind is Kind.LEGACY:
            with path.open("rb") as file:
                return _checked(pickles.read_untrusted(file, kind, name), path, name)
        with Archive(path, name) as archive:
            if kind is Kind.EXPORTED:
                found = exported.read(archive, name)
                return found, list(found.notes)
        if kind is Kind.TORCHSCRIPT:
            return script.read(path, name), []
        with path.open("rb") as file:
            return _checked(pickles.read_untrusted(file, kind, name), path, name)


def most_bytes(path: Path) -> int:
    """Return how many bytes the weights in a file may stand for."""
    return _TIMES_FILE * path.stat().st_size + _SLACK_BYTES


def _checked(held: Any, path: Path, name: str) -> tuple[Any, list[str]]:
    """Check the modules and weights in what a checkpoint holds, and give modules names that are identifiers."""
    notes: list[str] = []
    modules = _modules_in(held)
    for module in modules:
        _refuse_tangled(module, name)
        notes += names.rename(module)
    _refuse_swollen(held, modules, path, name)
    return held, notes


def _modules_in(held: Any) -> list[torch.nn.Module]:
    values = held.values() if isinstance(held, dict) else [held]
    return [value for value in values if isinstance(value, torch.nn.Module)]


def _refuse_tangled(module: torch.nn.Module, name: str) -> None:
    """Refuse modules that hold themselves, or are nested or shared so often that walking through them never ends.

    Raises:
        Refused: They do.
    """
    waiting, calls = [(module, 0, frozenset[int]())], 0
    while waiting:
        here, depth, above = waiting.pop()
        calls += 1
        if id(here) in above or depth > _MOST_DEPTH or calls > _MOST_MODULES:
            raise Refused(
                f"'{name}' holds modules that contain each other more than {_MOST_DEPTH} deep or {_MOST_MODULES} times."
            )
        children = [child for child in here._modules.values() if child is not None]
        if not all(isinstance(child, torch.nn.Module) for child in children):
            raise Refused(f"'{name}' holds a {type(here).__name__} with a part that is no module.")
        waiting += [(child, depth + 1, above | {id(here)}) for child in children]


def _refuse_swollen(held: Any, modules: Iterable[torch.nn.Module], path: Path, name: str) -> None:
    """Refuse weights that claim far more elements than are stored: copies of such views would fill the memory.

    Raises:
        Refused: They do, one or all together.
    """
    total = 0
    for key, tensor in _weights_in(held, modules):
        total += tensor.nbytes
        if total > most_bytes(path):
            raise Refused(
                f"'{name}' holds a weight '{key}' of {tensor.nbytes} bytes, with which the weights are {total} bytes "
                f"in a file of {path.stat().st_size}.",
                hint="Save the weights as contiguous tensors, if you made the file.",
            )


def _weights_in(held: Any, modules: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of modules, and those of a state dict or of one in a checkpoint."""
    tables = [{**dict(module.named_parameters()), **dict(module.named_buffers())} for module in modules]
    if isinstance(held, dict):
        tables += [held, *(value for value in held.values() if isinstance(value, dict))]
    for key, value in (entry for table in tables for entry in table.items()):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            yield str(key), value


@contextmanager
def readable(kind: Kind, name: str) -> Iterator[None]:
    """Turn whatever torch raises over a damaged file into a refusal."""
    try:
        yield
    except (OptimizeError, MemoryError):
        raise
    except Exception as error:
        if lacks_memory(error):
            raise MemoryError(str(error)) from error
        raise Refused(
            f"'{name}' is a {kind.value} that torch cannot read: {first_line(error).split('. ')[0][:200]}.",
            hint="Save or download the file again.",
        ) from error
