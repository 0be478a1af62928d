"""A checkpoint: one file of tensors by name, which holds no code, and fills what is there before it is opened."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree

from optimize import files
from optimize.errors import Refused
from optimize.regular import require_file, shown

#: Types of numbers, and what they are kept as: switches and texts are the training's own.
_NUMBERS = {int: torch.int64, float: torch.float64}
HINT = "Give another folder, or remove it to start anew."


def write(path: Path, settings: str, state: Any) -> None:
    """Write the tensors and numbers of nested dictionaries and lists, whole or not at all.

    Args:
        settings: What training they belong to, in words.
        state: The values.

    Raises:
        Refused: The file cannot be written.
    """
    kept = {name: _tensor(value).detach().cpu().clone().contiguous() for name, value in leaves(state).items()}
    with files.refusing(path):
        for left in files.left_of(path):  # by one that was killed meanwhile
            left.unlink()
    with files.whole(path) as temporary:
        try:
            save_file(kept, temporary, metadata={"settings": settings})
        except SafetensorError as error:
            hint = "Free space, or choose another folder."
            raise Refused(f"The checkpoint '{shown(path)}' cannot be written: {error}.", hint=hint) from error


def read(path: Path, settings: str, wanted: Callable[[Collection[str]], Any]) -> Any:
    """Return what was written; nothing of a file decides what is made of it.

    Args:
        settings: What training it must belong to.
        wanted: Returns values as they must be, by the names that the file holds.

    Raises:
        Refused: It is damaged, or another training's: a name, a shape or a type is not as it must be.
    """
    require_file(path)
    try:
        with safe_open(path, "pt") as file:
            found, names = (file.metadata() or {}).get("settings"), set(file.keys())
            if found != settings:
                said = f"The checkpoint is of {shown(str(found))}, this training of {settings}."
                raise Refused(said, hint=HINT)
            like = wanted(names)
            if other := names ^ set(leaves(like)):
                raise ValueError(f"'{min(other)}' is not in both it and the training")
            return pytree.tree_map_with_path(lambda place, value: _taken(file, _name(place), value), like)
    except (SafetensorError, ValueError, OSError) as error:
        raise Refused(f"The checkpoint '{shown(path)}' is damaged: {shown(str(error))}.", hint=HINT) from error


def leaves(state: Any) -> dict[str, Any]:
    """Return the tensors and numbers by name."""
    return {_name(place): value for place, value in pytree.tree_flatten_with_path(state)[0] if _is_kept(value)}


def _is_kept(value: Any) -> bool:
    return isinstance(value, Tensor) or type(value) in _NUMBERS


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=_NUMBERS[type(value)])


def _name(place: pytree.KeyPath) -> str:
    """Return the keys and places that lead to a value as one name."""
    return ".".join(str(entry.key if isinstance(entry, pytree.MappingKey) else entry) for entry in place)


def _taken(file: Any, name: str, like: Any) -> Any:
    """Return the value of a name, of the kind of another.

    Raises:
        ValueError: It is of another.
    """
    if not _is_kept(like):
        return like
    value, wanted = file.get_tensor(name), _tensor(like)
    if (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
        raise ValueError(f"'{name}' is {value.dtype} {list(value.shape)}, not {wanted.dtype} {list(wanted.shape)}")
    return value.to(like.device, copy=True) if isinstance(like, Tensor) else value.item()  # it lies in the file
