"""Objects named on the command line, ``package.module:name``: naming one is the user's consent to import it.

And a name for what is made beside others.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from optimize.errors import Refused, UsageError, blaming, nearest, raised, spell

_SPEC = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")

#: What this package, and torch as it exports, import late.
_OURS = frozenset({
    "PIL", "accelerate", "executorch", "jinja2", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "openvino", "profile",
    "ray", "safetensors", "scipy", "sympy", "tensorrt", "tokenizers", "yaml",
})  # fmt: skip
_ALONE = "It is called without arguments; wrap it in a function that fills them in."


def is_named(text: str) -> bool:
    """Tell whether a text has the form ``package.module:name``."""
    return bool(_SPEC.fullmatch(text))


def meant(text: str) -> str:
    """Return the ``package.module:name`` that a text may be meant as, a path of a file or one with dots alone.

    >>> meant("nets/small.py:Net"), meant("nets.small.Net"), meant("?")
    ('nets.small:Net', 'nets.small:Net', 'package.module:factory')
    """
    home, colon, name = text.partition(":") if ":" in text else text.rpartition(".")
    found = f"{home.removesuffix('.py').removeprefix('./').replace('/', '.')}:{name}"
    return found if colon and is_named(found) else "package.module:factory"


def advice(text: str) -> str:
    """Return what to write in place of a text that names no factory.

    >>> advice("nets:Net(6)"), advice("nets:Net()"), advice("nets.Net")
    ('It is called without arguments; wrap it in a function that fills them in.', 'Write nets:Net.', 'Write nets:Net.')
    """
    name = text.removesuffix("()")
    return _ALONE if is_named(name.partition("(")[0]) and "(" in name else f"Write {meant(name)}."


def named_in(content: Any, but: Callable[[str], bool] = lambda text: False) -> Iterator[str]:
    """Yield every ``package.module:name`` in what a file of settings holds, though a file may be called so.

    Texts may hold several words, as ``transform=package.module:name``; those ``but`` says yes to are left out whole.
    """
    if isinstance(content, str) and not but(content):
        yield from filter(is_named, re.split(r"[\s=,;]+", content))
    is_many = isinstance(content, list | tuple | set | frozenset)
    parts = (*content, *content.values()) if isinstance(content, Mapping) else content if is_many else ()
    for part in parts:
        yield from named_in(part, but)


def free_name(wanted: str, taken: Container[str | None]) -> str:
    """Return a name that nothing has yet: the wanted one, or that with the first number behind it that makes it so."""
    numbered = (f"{wanted}_{count}" for count in itertools.count(1))
    return next(name for name in itertools.chain([wanted], numbered) if name not in taken)


def find(spec: str) -> Any:
    """Import ``package.module`` and return the object called ``name`` in it; the current directory is searched first.

    Raises:
        UsageError: The text is not of that form.
        Refused: The module or the name does not exist, or importing it raised.
    """
    if not is_named(spec):
        raise UsageError(f"'{spec}' is not of the form package.module:name.", hint="For example nets.small:Net.")
    home, _, path = spec.partition(":")
    found = _import(home)
    for name in path.split("."):
        found = _attribute(found, name, spec)
    return found


def spelled(value: Any) -> Any:
    """Return a value as a file of settings holds it: a function by its name, several values as a list.

    >>> spelled(is_named), spelled((1, 2)), spelled("text")
    ('optimize.named:is_named', [1, 2], 'text')
    """
    if isinstance(value, list | tuple):
        return [spelled(part) for part in value]
    return f"{value.__module__}:{value.__qualname__}" if hasattr(value, "__qualname__") else value


def call(found: Any, spec: str) -> Any:
    """Call what `find` found, without arguments.

    Raises:
        Refused: It is not callable, or raised.
    """
    if not callable(found):
        raise Refused(f"'{spec}' is of type {type(found).__name__} and cannot be called.")
    with blaming(f"'{spec}'", _ALONE, of=TypeError):
        return found()


def import_from_here() -> None:
    """Let modules of the current directory be imported, as ``python -m`` does and an installed command does not.

    Raises:
        Refused: One of them would be imported in the place of a package that this one imports later.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in _OURS - sys.modules.keys():
        if hides := next((file for file in (Path(f"{name}.py"), Path(name, "__init__.py")) if file.is_file()), None):
            raise Refused(
                f"'./{hides}' hides the package '{name}', which is needed.", hint="Rename it, or run elsewhere."
            )


def _import(home: str) -> Any:
    import_from_here()
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name and (home == error.name or home.startswith(f"{error.name}.")):
            raise Refused(
                f"There is no module '{error.name}' to import (searched in the current directory and the installed "
                f"packages, for '{home}').",
                hint="Run from the directory that holds it, or install it.",
            ) from error
        raise raised(f"Importing '{home}'", error) from error
    except (Exception, SystemExit) as error:
        hint = f"python -c 'import {home}', run here, shows the line."
        if isinstance(error, ImportError) and "relative import" in str(error):
            hint = f"Name the module with its package, package.{home}:name, in the folder that holds the package."
            raise Refused(f"Importing '{home}' raised {spell(error)}.", hint=hint) from error
        raise raised(f"Importing '{home}'", error, hint) from error


def _attribute(owner: Any, name: str, spec: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        known = [entry for entry in dir(owner) if not entry.startswith("_")]
        close = difflib.get_close_matches(name, known, n=5) or known[:20]
        raise Refused(f"'{spec}': there is no '{name}'.", hint=_elsewhere(owner, name, close)) from error


def _elsewhere(owner: Any, name: str, known: list[str]) -> str:
    """Return which modules of a package define a name, by their text, for none is imported; else what there is."""
    folders = map(Path, owner.__path__ if inspect.ismodule(owner) and hasattr(owner, "__path__") else ())
    found = {file.stem: file for folder in folders for file in sorted(folder.glob("[!_]*.py"))}
    defined = re.compile(rf"^((class|def) {name}\b|{name} *[:=])", re.MULTILINE)
    homes = [home for home, file in found.items() if defined.search(file.read_text(encoding="utf-8", errors="replace"))]
    if homes:
        return f"Name the module that defines it: {' or '.join(f'{owner.__name__}.{home}:{name}' for home in homes)}."
    modules = f"'{owner.__name__}' has the modules {', '.join(found)}." if found else ""
    others = [entry for entry in known if entry not in found]
    return f"{modules} {nearest(name, others) if others else ''}".strip()
