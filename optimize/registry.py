"""Names to passes and targets: one decorator each, filled when their modules are imported."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from optimize.errors import UsageError, nearest

if TYPE_CHECKING:
    from pathlib import Path

    from optimize.passes.base import Pass
    from optimize.targets.base import Target

_passes: dict[str, type[Pass]] = {}
_targets: dict[str, Target] = {}
_P = TypeVar("_P", bound="type[Pass]")
_T = TypeVar("_T", bound="type[Target]")


def register_pass(cls: _P) -> _P:
    """Register a pass under its class name (a class decorator)."""
    _passes[cls.__name__] = cls
    return cls


def register_target(cls: _T) -> _T:
    """Register one instance of a target under its ``name`` (a class decorator)."""
    _targets[cls.name] = cls()
    return cls


def passes() -> Mapping[str, type[Pass]]:
    """Return every registered pass by class name."""
    importlib.import_module("optimize.passes")
    return MappingProxyType(_passes)


def targets() -> Mapping[str, Target]:
    """Return every registered target by name."""
    for module in pkgutil.iter_modules(importlib.import_module("optimize.targets").__path__):
        if module.ispkg:
            importlib.import_module(f"optimize.targets.{module.name}")
    return MappingProxyType(_targets)


def target_of(path: Path) -> Target | None:
    """Return the target whose runtime takes a file as it is; None of everything else, torch files among it."""
    return next((target for target in targets().values() if target.owns(path)), None)


def find_pass(name: str) -> type[Pass]:
    """Return the pass called ``name``.

    Raises:
        UsageError: There is none; the message names the nearest.
    """
    if name not in passes():
        raise UsageError(f"There is no pass '{name}'.", hint=nearest(name, passes()))
    return passes()[name]


def find_target(name: str) -> Target:
    """Return the target called ``name``.

    Raises:
        UsageError: There is none; the message names the nearest.
    """
    if name not in _targets and name not in targets():
        raise UsageError(f"There is no target '{name}'.", hint=nearest(name, targets()))
    return _targets[name]
