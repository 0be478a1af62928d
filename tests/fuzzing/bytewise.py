"""Changes of a file's bytes that know nothing of what they mean."""

from __future__ import annotations

import random

from tests.fuzzing.hostile import NUMBERS


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return bytes with one to four places changed."""
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        chance.choice(_CHANGES)(changed, chance)
    return bytes(changed)


def _place(data: bytearray, chance: random.Random) -> int:
    """Return a place, a third of them near the ends, where headers and directories are."""
    if not data:
        return 0
    near = min(len(data), 600)
    edge = chance.choice((chance.randrange(near), len(data) - 1 - chance.randrange(near)))
    return edge if chance.random() < 0.34 else chance.randrange(len(data))


def _flip(data: bytearray, chance: random.Random) -> None:
    if data:
        data[_place(data, chance)] ^= 1 << chance.randrange(8)


def _put(data: bytearray, chance: random.Random) -> None:
    if data:
        data[_place(data, chance)] = chance.choice((0, 1, 10, 34, 39, 46, 47, 92, 127, 128, 255, chance.randrange(256)))


def _number(data: bytearray, chance: random.Random) -> None:
    width, order = chance.choice((1, 2, 4, 8)), chance.choice(("little", "big"))
    at = _place(data, chance)
    data[at : at + width] = (chance.choice(NUMBERS) % 256**width).to_bytes(width, order)


def _remove(data: bytearray, chance: random.Random) -> None:
    at = _place(data, chance)
    del data[at : at + chance.choice((1, 2, 4, 16, 256))]


def _insert(data: bytearray, chance: random.Random) -> None:
    at = _place(data, chance)
    data[at:at] = chance.randbytes(chance.choice((1, 2, 4, 16)))


def _repeat(data: bytearray, chance: random.Random) -> None:
    start, at = _place(data, chance), _place(data, chance)
    data[at:at] = data[start : start + chance.choice((1, 8, 64, 1024))]


def _move(data: bytearray, chance: random.Random) -> None:
    start, at, length = _place(data, chance), _place(data, chance), chance.choice((4, 16, 64))
    data[at : at + length] = data[start : start + length]


def _cut(data: bytearray, chance: random.Random) -> None:
    del data[_place(data, chance) :]


_CHANGES = (_flip, _flip, _put, _put, _number, _number, _remove, _insert, _repeat, _move, _cut)
