"""Names to passes and targets: one decorator each, filled when their modules are imported.

Other packages add theirs by entry points of the groups ``optimize.passes`` and ``optimize.targets``, which name the
modules that register them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import pkgutil
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from optimize import named
from optimize.errors import Refused, UsageError, is_foreign, nearest, spell

if TYPE_CHECKING:
    from pathlib import Path

    from optimize.passes.base import Pass
    from optimize.targets.base import Target

#: Groups of entry points, called like the packages of our own.
_PASSES, _TARGETS = "optimize.passes", "optimize.targets"
_passes: dict[str, type[Pass]] = {}
_targets: dict[str, Target] = {}
_P = TypeVar("_P", bound="type[Pass]")
_T = TypeVar("_T", bound="type[Target]")


def register_pass(cls: _P) -> _P:
    """Register a pass under its class name, for recipes and ``--pass``; an option that it lacks is a usage error.

    A class decorator, above ``@dataclass(frozen=True)``; ``docs/howto/own-pass.md`` says who imports its module.
    """
    _passes[cls.__name__] = cls
    make, signature = cls.__init__, inspect.signature(cls.__init__)

    @functools.wraps(make)
    def checked(self: Pass, *given: Any, **options: Any) -> None:
        try:
            signature.bind(self, *given, **options)
        except TypeError as error:
            _, *known = signature.parameters
            wrong = next((option for option in options if option not in known), "")
            what = f"has no option '{wrong}'" if wrong else f"is not made so: {error}"
            raise UsageError(f"{cls.__name__} {what}.", hint=nearest(wrong, known)) from error
        make(self, *given, **options)

    cls.__init__ = checked  # type: ignore[method-assign, assignment]
    return cls


def register_target(cls: _T) -> _T:
    """Register one instance of a target under its ``name`` (a class decorator)."""
    _targets[cls.name] = cls()
    return cls


def passes() -> Mapping[str, type[Pass]]:
    """Return every registered pass by class name."""
    importlib.import_module(_PASSES)
    _import_others(_PASSES)
    return MappingProxyType(_passes)


def targets() -> Mapping[str, Target]:
    """Return every registered target by name."""
    for module in pkgutil.iter_modules(importlib.import_module(_TARGETS).__path__):
        if module.ispkg:
            importlib.import_module(f"optimize.targets.{module.name}")
    _import_others(_TARGETS)
    return MappingProxyType(_targets)


def broken(what: str) -> tuple[str, ...]:
    """Return which ``passes`` or ``targets`` of other packages cannot be imported and why, a sentence each."""
    return _import_others(f"optimize.{what}")


@functools.cache
def _import_others(group: str) -> tuple[str, ...]:
    """Import what other packages register, once; return what cannot be imported and why, a sentence each."""
    failures = []
    for entry in importlib.metadata.entry_points(group=group):
        try:
            entry.load()
        except Exception as error:  # another package's defect is no reason to do nothing at all
            owner = entry.dist.name if entry.dist else "another package"
            failures.append(f"'{entry.name}' of {owner} cannot be imported: {spell(error)}.")
    return tuple(failures)


def _unknown(what: str, name: str, known: Iterable[str], group: str) -> UsageError:
    own = ["Name one of your own as package.module:Pass."] if group == _PASSES else []
    hint = " ".join((nearest(name, known), *own, *_import_others(group)))
    return UsageError(f"There is no {what} '{name}'.", hint=hint)


def target_of(path: Path) -> Target | None:
    """Return the target whose runtime takes a file as it is; None of everything else, torch files among it."""
    return next((target for target in targets().values() if target.owns(path)), None)


def origin_of(cls: type) -> str:
    """Return the distribution, with its version, that a pass of another package is of; where none is known, its module.

    Empty of those of this package.
    """
    if not is_foreign(cls):
        return ""
    package = cls.__module__.partition(".")[0]
    entries = importlib.metadata.entry_points(group=_PASSES)
    told = [entry.dist for entry in entries if entry.dist and entry.module.partition(".")[0] == package]
    known = importlib.metadata.packages_distributions().get(package, ())
    found = [*told, *map(importlib.metadata.distribution, known)]
    return f"{found[0].name} {found[0].version}" if found else f"the module {cls.__module__}"


def find_pass(name: str) -> type[Pass]:
    """Return the pass called ``name``; of the form ``package.module:Pass``, the one that is called so there.

    Raises:
        UsageError: There is none; the message names the nearest.
        Refused: There is nothing of that name there, or it is no pass.
    """
    if named.is_named(name):
        from optimize.passes.base import Pass  # imports torch

        found = named.find(name)
        if not (isinstance(found, type) and issubclass(found, Pass) and dataclasses.is_dataclass(found)):
            raise Refused(f"'{name}' is no pass.", hint="Name a dataclass that derives from optimize.passes.base.Pass.")
        return found
    if name not in passes():
        raise _unknown("pass", name, passes(), _PASSES)
    return passes()[name]


def find_target(name: str) -> Target:
    """Return the target called ``name``.

    Raises:
        UsageError: There is none; the message names the nearest.
    """
    if name not in _targets and name not in targets():
        raise _unknown("target", name, targets(), _TARGETS)
    return _targets[name]
