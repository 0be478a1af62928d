"""Reading this project's docstrings: Google style, with sections of names and meanings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence

_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example|Yields):\s*$")
_ENTRY = re.compile(r"^    (\w+)(?: \([^)]*\))?: (.*)$")


def summary(owner: object) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(owner) or "").partition("\n\n")[0].split())


def body(owner: object) -> str:
    """Return a docstring up to its first section."""
    lines = (inspect.getdoc(owner) or "").splitlines()
    end = next((place for place, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    return "\n".join(lines[:end]).strip()


def entries(owner: type, *titles: str) -> dict[str, str]:
    """Return what the sections of a class and its bases say, by name: ``Attributes`` and ``Args`` if none are given."""
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__[:-1]):
        found |= dict(_entries(base.__doc__ or "", titles or ("Attributes", "Args")))
    return found


def without(title: str, lines: Sequence[str]) -> list[str]:
    """Return the lines of a docstring without one of its sections."""
    kept, inside = list[str](), False
    for line in lines:
        section = _SECTION.match(line)
        inside = section.group(1) == title if section else inside and (not line.strip() or line.startswith(" "))
        if not inside:
            kept.append(line)
    return kept


def _entries(text: str, titles: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    inside, name, words = False, "", list[str]()
    for line in inspect.cleandoc(text).splitlines():
        if section := _SECTION.match(line):
            inside = section.group(1) in titles
            continue
        if not inside:
            continue
        if entry := _ENTRY.match(line):
            if name:
                yield name, " ".join(words)
            name, words = entry.group(1), [entry.group(2).strip()]
        elif line.strip():
            words.append(line.strip())
    if name:
        yield name, " ".join(words)
