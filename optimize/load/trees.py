"""How a model's inputs and outputs are arranged, as plain data: tuples, lists and dicts with plain keys.

``["tuple", ...]``, ``["list", ...]``, ``["dict", [key, ...], ...]``, ``["ordered", [key, ...], ...]``, None, and
``"*"`` where a value stands.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch.utils import _pytree as pytree

from optimize.load.description import Malformed

_KINDS: dict[type, str] = {tuple: "tuple", list: "list", dict: "dict", OrderedDict: "ordered"}
_CLASSES: dict[str, Any] = {name: kind for kind, name in _KINDS.items()}


def write_tree(spec: pytree.TreeSpec) -> Any:
    """Return an arrangement as plain data; a class of the model's own becomes a flat tuple of its values."""
    try:
        return _written(pytree.tree_unflatten([0] * spec.num_leaves, spec))
    except Malformed:
        return ["tuple", *["*"] * spec.num_leaves]


def read_tree(entry: Any) -> pytree.TreeSpec:
    """Return the arrangement that plain data says.

    Raises:
        Malformed: It says none.
    """
    return pytree.tree_structure(_arranged(entry))


def _written(value: Any) -> Any:
    if value is None:
        return None
    if type(value) is int:
        return "*"
    if type(value) not in _KINDS:
        raise Malformed(f"a {type(value).__name__} arranges the values")
    if isinstance(value, dict):
        return [_KINDS[type(value)], _keys(list(value)), *map(_written, value.values())]
    return [_KINDS[type(value)], *map(_written, value)]


def _arranged(entry: Any) -> Any:
    if entry is None:
        return None
    if entry == "*":
        return 0
    name, *parts = entry
    kind = _CLASSES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise Malformed(f"a {str(name)[:80]} arranges inputs or outputs")
    if issubclass(kind, dict):
        keys, *values = parts
        return kind(zip(_keys(keys), map(_arranged, values), strict=True))
    return kind(map(_arranged, parts))


def _keys(keys: Any) -> list[str | int]:
    if not isinstance(keys, list) or not all(isinstance(key, str | int) for key in keys):
        raise Malformed("a key is neither a text nor a number")
    return keys
