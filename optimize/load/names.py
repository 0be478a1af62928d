"""Names that a file brings along, at the door: identifiers stay, everything else is rewritten to one.

Names of modules and weights end up in generated source code (torch.fx) and in file formats. A name that is an
identifier means the same everywhere.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable
from typing import Any

import torch

from optimize.escaping import plain
from optimize.named import free_name

_IDENTIFIER = re.compile(r"[A-Za-z0-9_]{1,200}", re.ASCII)
_SHOWN = 3


def identifiers(names: Iterable[str]) -> dict[str, str]:
    """Return each name with the identifier that takes its place, different ones for different names.

    >>> identifiers(["conv1", "0", "my layer", "my-layer", "class"])
    {'conv1': 'conv1', '0': '0', 'my layer': 'my_layer', 'my-layer': 'my_layer_1', 'class': 'class_'}
    """
    names = list(names)
    chosen = {name: name for name in names if is_identifier(name)}
    for name in names:
        if name in chosen:
            continue
        wanted = re.sub(r"[^A-Za-z0-9_]", "_", name)[:100] or "_"
        wanted = f"{wanted}_" if keyword.iskeyword(wanted) else wanted
        chosen[name] = free_name(wanted, {*chosen.values(), *names})
    return {name: chosen[name] for name in names}


def is_identifier(name: object) -> bool:
    """Say whether a name may stay as it is."""
    return isinstance(name, str) and bool(_IDENTIFIER.fullmatch(name)) and not keyword.iskeyword(name)


def rename(module: torch.nn.Module) -> list[str]:
    """Rewrite the names of submodules, parameters and buffers that are no identifiers, in place; return a warning.

    Raises:
        ValueError: The tree of modules is no tree of modules.
    """
    rewritten: dict[str, str] = {}
    for child in list(module.modules()):
        held: tuple[dict[str, Any], ...] = (child._modules, child._parameters, child._buffers)
        if not all(isinstance(entries, dict) for entries in held):
            raise ValueError(f"a {type(child).__name__} holds its weights in no dict")
        if any(not isinstance(name, str) for entries in held for name in entries):
            raise ValueError(f"a {type(child).__name__} has a name that is no text")
        chosen = identifiers(name for entries in held for name in entries)
        changed = {name: found for name, found in chosen.items() if name != found}
        for entries in held if changed else ():
            items = list(entries.items())
            entries.clear()
            entries.update({chosen[name]: value for name, value in items})
        child._non_persistent_buffers_set = {chosen.get(name, name) for name in child._non_persistent_buffers_set}
        rewritten |= changed
    return [told(rewritten)] if rewritten else []


def told(rewritten: dict[str, str]) -> str:
    """Return the sentence that tells of names that were rewritten."""
    pairs = [f"'{plain(name)[:60]}' is now '{found}'" for name, found in rewritten.items()]
    more = f", and {len(pairs) - _SHOWN} more" if len(pairs) > _SHOWN else ""
    return f"Names that are no identifiers were rewritten: {', '.join(pairs[:_SHOWN])}{more}."


def identifiers_of_paths(paths: Iterable[str]) -> dict[str, str]:
    """Return each dotted path with one of identifiers that takes its place.

    >>> identifiers_of_paths(["conv.weight", "my layer.weight", "my layer.bias"])
    {'conv.weight': 'conv.weight', 'my layer.weight': 'my_layer.weight', 'my layer.bias': 'my_layer.bias'}
    """
    paths = list(paths)
    parts = identifiers(dict.fromkeys(part for path in paths for part in path.split(".")))
    return {path: ".".join(parts[part] for part in path.split(".")) for path in paths}
