"""JSON with one of its parts replaced, moved, doubled or dropped."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from tests.fuzzing import hostile

Place = tuple[Any, Any]
Change = Callable[[Place, list[Place], random.Random], None]


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return a JSON text with one to three changes; one in twenty is no longer JSON that others write."""
    try:
        return _mutated(data, chance).encode("utf-8", "surrogatepass")
    except RecursionError:  # deeper than Python itself writes it
        return b'{"a":' * 50_000


def _mutated(data: bytes, chance: random.Random) -> str:
    found = json.loads(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places = list(_places(found))
        if places:
            chance.choice(_CHANGES)(chance.choice(places), places, chance)
    if chance.random() < 0.05:
        return _raw(json.dumps(found), chance)
    return json.dumps(found)


def renamed(data: bytes, chance: random.Random, names: list[str], chosen: str) -> bytes:
    """Return a JSON text in which one name is another wherever it stands."""
    old = chance.choice(names)
    return data.replace(json.dumps(old).encode(), json.dumps(chosen).encode())


def texts(value: Any) -> Iterator[str]:
    """Yield every text in a value."""
    for holder, key in _places(value):
        if isinstance(holder[key], str):
            yield holder[key]


def _places(value: Any) -> Iterator[Place]:
    waiting = [value]
    while waiting:
        holder = waiting.pop()
        keys: Any = range(len(holder)) if isinstance(holder, list) else list(holder)
        for key in keys:
            yield holder, key
            if isinstance(holder[key], list | dict):
                waiting.append(holder[key])


def _known(places: list[Place], chance: random.Random) -> list[str]:
    some = chance.sample(places, min(len(places), 40))
    return [holder[key] for holder, key in some if isinstance(holder[key], str)]


def _value(places: list[Place], chance: random.Random) -> Any:
    return hostile.value(chance, _known(places, chance))


def _replace(place: Place, places: list[Place], chance: random.Random) -> None:
    holder, key = place
    holder[key] = _value(places, chance)


def _replaced(is_wanted: Callable[[Any], bool], make: Callable[[list[Place], random.Random], Any]) -> Change:
    """Return a change of one of the values that are wanted."""

    def change(place: Place, places: list[Place], chance: random.Random) -> None:
        wanted = [(holder, key) for holder, key in places if is_wanted(holder[key])]
        if wanted:
            holder, key = chance.choice(wanted)
            holder[key] = make(places, chance)

    return change


def _alike(place: Place, places: list[Place], chance: random.Random) -> None:
    """Put there another value of the same type: the file stays one that a reader goes through."""
    holder, key = place
    same = [h[k] for h, k in places if type(h[k]) is type(holder[key]) and h[k] != holder[key]]
    if same:
        holder[key] = json.loads(json.dumps(chance.choice(same)))


def _drop(place: Place, places: list[Place], chance: random.Random) -> None:
    holder, key = place
    del holder[key]


def _double(place: Place, places: list[Place], chance: random.Random) -> None:
    holder, key = place
    if isinstance(holder, list):
        holder.insert(chance.randrange(len(holder) + 1), json.loads(json.dumps(holder[key])))
    else:
        holder[hostile.text(chance)] = holder[key]


def _rename(place: Place, places: list[Place], chance: random.Random) -> None:
    dicts = [(holder, key) for holder, key in places if isinstance(holder, dict)]
    if dicts:
        holder, key = chance.choice(dicts)
        name = hostile.text(chance, _known(places, chance))
        holder[name] = holder.pop(key)


def _wrap(place: Place, places: list[Place], chance: random.Random) -> None:
    """Put the whole inside itself a few times."""
    holder, key = place
    for _ in range(chance.choice((1, 5, 80))):
        holder[key] = chance.choice(([holder[key]], {"type": "builtins.tuple", "children_spec": [holder[key]]}))


_LEAF = _replaced(lambda held: not isinstance(held, list | dict), _value)
_TEXT = _replaced(
    lambda held: isinstance(held, str), lambda places, chance: hostile.text(chance, _known(places, chance))
)
_NUMBER = _replaced(
    lambda held: type(held) in (int, float), lambda places, chance: chance.choice((*hostile.NUMBERS, 0.5, 1e308))
)
_CHANGES: tuple[Change, ...] = (
    _replace, _LEAF, _LEAF, _alike, _alike, _TEXT, _TEXT, _NUMBER, _drop, _double, _rename, _wrap,
)  # fmt: skip


def _raw(text: str, chance: random.Random) -> str:
    return chance.choice((
        lambda: "[" * 100_000 + text,
        lambda: text.replace("0", "9" * 5000, 1),
        lambda: text.replace("{", '{"name": 1, "name": 2, ', 1),
        lambda: text[: chance.randrange(len(text))],
        lambda: text.replace("1", "NaN", 1).replace("2", "1e999", 1),
        lambda: f"\ufeff{text}",
        lambda: text.replace('"', "'"),
    ))()  # fmt: skip
