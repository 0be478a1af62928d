"""Texts from outside (YAML, JSON, TOML) as plain values: bounded in size and depth, each mistake one clear refusal."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import yaml

from optimize.bounds import MOST_DIGITS, read_finite, read_whole
from optimize.errors import OptimizeError, Refused, UsageError, in_one_line
from optimize.regular import read_bytes, shown

#: What people write, and what reports of long benchmarks with every sample take: two million samples.
MOST_YAML_BYTES, MOST_JSON_BYTES = 2**20, 2**26
#: Lists and mappings inside one another, and values with every alias written out.
MOST_DEPTH, MOST_VALUES = 64, 100_000
#: Of JSON, which holds every sample of long benchmarks; a key takes a hundred times its colon.
_BOUNDS = (("lists and mappings", "[{", 1_000_000), ("values", ",", 4_000_000), ("keys", ":", 500_000))
#: Of TOML, whose reader keeps each beginning of a dotted key: the squares of the dots in a line, all lines together.
_MOST_BEGINNINGS = 16_000_000
#: How JSON writes half of a character that UTF-16 has in two parts.
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
#: What to raise; without a class of the caller's, ``Refused`` of a file and ``UsageError`` of what it says.
Failure = type[OptimizeError] | None


def _read(form: str, path: Path, *, failure: Failure = None) -> Any:
    """Return what a file of a form says.

    Raises:
        OptimizeError: It is no regular file, too large, or nothing of that form within the limits; of class
            ``failure``, if given.
    """
    try:
        text = read_bytes(path, most_bytes=_FORMS[form][1], failure=failure or Refused).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise (failure or UsageError)(
            f"'{shown(path)}' is not {form}: it is not UTF-8 at byte {error.start}."
        ) from error
    return _parse(form, text, source=f"'{shown(path)}'", failure=failure)


def _parse(form: str, text: str, *, source: str, failure: Failure = None) -> Any:
    """Return what a text of a form says; whatever its parser raises is one refusal.

    Args:
        form: YAML, which is one document and has no key twice; TOML; or JSON as its standard has it, no NaN, no key
            twice, nested no deeper than Python follows.
        text: What is parsed.
        source: What to call it in a message.
        failure: What to raise.

    Raises:
        OptimizeError: It is nothing of that form, or is beyond the limits; of class ``failure``, if given.

    >>> parse_yaml("passes: [FuseConvBN]", source="recipe")
    {'passes': ['FuseConvBN']}
    >>> parse_yaml("a: 1\\na: 2", source="recipe")
    Traceback (most recent call last):
    optimize.errors.UsageError: recipe is not YAML: the key 'a' stands there twice.
    """
    try:
        return _FORMS[form][0](text)
    except RecursionError as error:
        raise (failure or UsageError)(f"{source} is not {form} that can be read: it is nested too deep.") from error
    except (yaml.YAMLError, ValueError, OverflowError, TypeError, AttributeError) as error:
        long = "integer string conversion" in str(error)
        reason = "a number has thousands of digits" if long else shown(in_one_line(error))
        raise (failure or UsageError)(f"{source} is not {form}: {reason}.") from error


def _load_toml(text: str) -> dict[str, Any]:
    """Load a document whose keys have as many parts as people write: what is kept of one grows with their square."""
    if sum(line.count(".") ** 2 for line in text.split("\n")) > _MOST_BEGINNINGS:
        raise ValueError("a line has thousands of dots")
    found: dict[str, Any] = _usable(tomllib.loads(text))
    return found


def _usable(found: Any) -> Any:
    """Return what was read, if it can be written again and counted with: an escape for half a character cannot.

    Raises:
        ValueError: It holds one, or a whole number of more digits than anybody means.
    """
    waiting = [found]
    while waiting:  # each text on its own: one wide letter makes the whole four times as long
        part = waiting.pop()
        if isinstance(part, str):
            part.encode()
        elif isinstance(part, int) and abs(part) >= 10**MOST_DIGITS:
            raise ValueError(f"a number has more than {MOST_DIGITS} digits")
        waiting += [*part, *part.values()] if isinstance(part, dict) else part if isinstance(part, list) else ()
    return found


def _load_json(text: str) -> Any:
    """Load a document of no more lists, mappings and values than a report has, each of which takes its memory."""
    for noun, marks, most in _BOUNDS:
        if sum(map(text.count, marks)) > most:
            raise ValueError(f"it holds more than {most} {noun}")
    found = json.loads(
        text, parse_constant=_no_constant, parse_float=read_finite, parse_int=read_whole, object_pairs_hook=_no_repeats
    )
    return _usable(found) if _HALF.search(text) else found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"it says {name}, which is no number of JSON")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        _refuse_repeats(name for name, _ in pairs)
    return found


def _refuse_repeats(names: Iterable[str]) -> None:
    for name, count in Counter(names).most_common(1):
        if count > 1:
            raise ValueError(f"the key '{name}' stands there twice")


def _load_yaml(text: str) -> Any:
    """Load a document whose depth is known: PyYAML itself calls a function inside another for every level."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=_Loader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH:
            raise ValueError(f"it is nested deeper than {MOST_DEPTH} levels")
        if count > 2 * MOST_VALUES:
            raise ValueError(f"it holds more than {MOST_VALUES} values")
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {})
        return _usable(loader.construct_document(node))
    finally:
        loader.dispose()


#: What YAML has beside what JSON has, by its tag.
_BEYOND_JSON = {
    f"tag:yaml.org,2002:{tag}": kind
    for tag, kind in {"binary": "bytes", "set": "set", "timestamp": "date", "omap": "omap", "pairs": "pairs"}.items()
}


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without what JSON lacks, keys that stand twice and numbers that nobody means."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """Name the type of a value; ``2:4``, which YAML takes for a number to base sixty, is a text."""
        tag = super().resolve(kind, value, implicit)
        sixty = kind is yaml.ScalarNode and ":" in value and tag.endswith((":int", ":float"))
        return "tag:yaml.org,2002:str" if sixty else tag

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a mapping; a key such as ``on``, which YAML takes for true, is the word that stands there."""
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:bool":
                key.tag = "tag:yaml.org,2002:str"
        _refuse_repeats(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<")
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Build a number of no more digits than anybody means."""
        if len(node.value) > MOST_DIGITS:
            raise ValueError(f"a number has {len(node.value)} digits")
        return super().construct_yaml_int(node)

    def refuse(self, node: yaml.Node) -> NoReturn:
        """Build nothing: bytes would become a text further on, behind what looks for names of Python code."""
        raise ValueError(f"a value of type {_BEYOND_JSON[node.tag]} is no text, number, list or mapping")


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
for _tag in _BEYOND_JSON:
    _Loader.add_constructor(_tag, _Loader.refuse)


def _count(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Return how many values a node stands for with every alias written out, each node counted once.

    Raises:
        ValueError: They are too many, or a node holds itself.
    """
    if id(node) in known:
        count = known[id(node)]
        if count is None:
            raise ValueError("an alias stands for what holds it")
        return count
    known[id(node)] = None
    count = 1 + sum(_count(child, known) for child in _children(node))
    if count > MOST_VALUES:
        raise ValueError(f"it holds more than {MOST_VALUES} values, with every alias written out")
    known[id(node)] = count
    return count


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value


#: How each form is loaded, and the bytes of a file of it.
_FORMS: dict[str, tuple[Callable[[str], Any], int]] = {
    "YAML": (_load_yaml, MOST_YAML_BYTES),
    "TOML": (_load_toml, MOST_YAML_BYTES),
    "JSON": (_load_json, MOST_JSON_BYTES),
}
read_yaml, read_toml, read_json = (partial(_read, form) for form in _FORMS)
parse_yaml, parse_json = partial(_parse, "YAML"), partial(_parse, "JSON")
