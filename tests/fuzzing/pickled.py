"""Pickles with opcodes removed, doubled, moved, put in, or with other arguments."""

from __future__ import annotations

import functools
import pickletools
import random
import struct
from collections.abc import Callable

from optimize.load.pickles import opcodes
from tests.fuzzing import hostile

#: Opcodes without an argument, each one byte.
_BARE = b"(.0129Nabde)loRstu]}\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94Q"
_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE", "UNICODE", "BINUNICODE8")
_NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1", "INT")
_MEMOS = ("BINGET", "BINPUT", "LONG_BINGET", "LONG_BINPUT")
Ops = list[bytes]
Change = Callable[[Ops, random.Random], None]


def mutated(data: bytes, chance: random.Random, pickles: int = 1) -> bytes:
    """Return the first pickles of some bytes with one to four opcodes changed, and the rest as it is."""
    honest, end = _split(data, pickles)
    ops = list(honest)
    for _ in range(chance.choice((1, 1, 2, 4))):
        if ops:
            chance.choice(_CHANGES)(ops, chance)
    return b"".join(ops) + data[end:]


@functools.lru_cache(64)
def _split(data: bytes, pickles: int) -> tuple[tuple[bytes, ...], int]:
    """Return the opcodes of some bytes, and where they end."""
    starts = [at for _, (_, _, at) in opcodes(data, pickles)]
    end = starts[-1] + 1
    return tuple(data[at:until] for at, until in zip(starts, [*starts[1:], end], strict=True)), end


def _name(op: bytes) -> str:
    info = pickletools.code2op.get(op[:1].decode("latin-1"))
    return info.name if info else ""


def _places(ops: Ops, names: tuple[str, ...]) -> list[int]:
    return [place for place, op in enumerate(ops) if _name(op) in names]


def _drop(ops: Ops, chance: random.Random) -> None:
    del ops[chance.randrange(len(ops))]


def _double(ops: Ops, chance: random.Random) -> None:
    start, at = chance.randrange(len(ops)), chance.randrange(len(ops))
    ops[at:at] = ops[start : start + chance.choice((1, 2, 8, 30))]


def _swap(ops: Ops, chance: random.Random) -> None:
    one, other = chance.randrange(len(ops)), chance.randrange(len(ops))
    ops[one], ops[other] = ops[other], ops[one]


def _bare(ops: Ops, chance: random.Random) -> None:
    at = chance.randrange(len(ops))
    ops[at : at + chance.randrange(2)] = [bytes([chance.choice(_BARE)])]


def _put(ops: Ops, chance: random.Random) -> None:
    at = chance.randrange(len(ops))
    ops.insert(at, chance.choice((_some_text, _some_number, _some_memo, _some_name, _called))(chance))


def _other(names: tuple[str, ...], make: Callable[[random.Random], bytes]) -> Change:
    """Return a change of one of some opcodes to another."""

    def change(ops: Ops, chance: random.Random) -> None:
        places = _places(ops, names)
        if places:
            ops[chance.choice(places)] = make(chance)

    return change


def _alike(ops: Ops, chance: random.Random) -> None:
    """Put an opcode of the same kind there: the stack stays in order."""
    places = _places(ops, chance.choice((_TEXTS, _NUMBERS, _MEMOS, ("GLOBAL",), ("NEWTRUE", "NEWFALSE", "NONE"))))
    if places:
        ops[chance.choice(places)] = ops[chance.choice(places)]


def _some_text(chance: random.Random) -> bytes:
    data = hostile.text(chance).encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", chance.choice((len(data), len(data), len(data), 2**31))) + data


def _some_number(chance: random.Random) -> bytes:
    number = chance.choice(hostile.NUMBERS)
    if -(2**31) <= number < 2**31:
        return b"J" + struct.pack("<i", number)
    data = number.to_bytes(16, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _some_memo(chance: random.Random) -> bytes:
    number = chance.randrange(40)
    if chance.random() < 0.9:
        return chance.choice((b"h", b"q")) + bytes([number])
    return b"r" + struct.pack("<I", 2**32 - 1)


def _some_name(chance: random.Random) -> bytes:
    module, name = chance.choice(chance.choice((hostile.DANGEROUS, hostile.ODD)))
    module, name = module.replace("\n", " "), name.replace("\n", " ")
    if chance.random() < 0.7:
        return b"c" + module.encode() + b"\n" + name.encode() + b"\n"
    texts = b"".join(b"X" + struct.pack("<I", len(part)) + part.encode() for part in (module, name))
    return texts + b"\x93"


def _called(chance: random.Random) -> bytes:
    """Return a whole call: a name, a tuple of one argument, and the opcode that calls."""
    argument = chance.choice((_some_text, _some_number))(chance)
    return _some_name(chance) + argument + b"\x85" + chance.choice((b"R", b"\x81"))


_CHANGES = (
    _drop, _double, _swap, _bare, _bare, _put, _put, _other(("GLOBAL",), _some_name), *[_other(_TEXTS, _some_text)] * 2,
    _other(_NUMBERS, _some_number), _alike, _alike, _other(_MEMOS, _some_memo),
)  # fmt: skip
