"""Zip archives written field by field, so that any of them can lie."""

from __future__ import annotations

import dataclasses
import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fuzzing import hostile

_LOCAL, _CENTRAL, _END = b"PK\3\4", b"PK\1\2", b"PK\5\6"
_LINK = 0o120777 << 16
Members = list["Member"]


@dataclass
class Member:
    """One member, and what its two headers say otherwise than it is.

    Attributes:
        name: Its name.
        data: Its content, not compressed.
        method: How it is stored: 0 as it is, 8 deflated.
        local: Fields of the header before the content, by name.
        central: Fields of the directory at the end, by name.
    """

    name: bytes
    data: bytes
    method: int = 0
    local: dict[str, int | bytes] = field(default_factory=dict)
    central: dict[str, int | bytes] = field(default_factory=dict)


def read(data: bytes) -> Members:
    """Return the members of an honest archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [Member(info.filename.encode(), archive.read(info), info.compress_type) for info in archive.infolist()]


def write(members: Members, end: dict[str, int | bytes] | None = None) -> bytes:
    """Return an archive; ``end`` are fields of its last record that lie."""
    body, directory = bytearray(), bytearray()
    for member in members:
        content = _deflated(member.data) if member.method == 8 else member.data
        plain: dict[str, int | bytes] = {
            "version": 20, "flags": 0, "method": member.method, "time": 0, "crc": zlib.crc32(member.data),
            "packed": len(content), "size": len(member.data), "name": member.name, "extra": b"", "comment": b"",
            "disk": 0, "internal": 0, "external": 0, "offset": len(body),
        }  # fmt: skip
        body += _header(_LOCAL, plain | member.local, central=False) + content
        directory += _header(_CENTRAL, plain | member.central, central=True)
    last = {"count": len(members), "size": len(directory), "offset": len(body), "comment": b"", **(end or {})}
    numbers = (_low(last["count"], 2), _low(last["count"], 2), _low(last["size"], 4), _low(last["offset"], 4))
    comment = bytes(last["comment"])  # type: ignore[arg-type]
    return bytes(body + directory) + _END + struct.pack("<HHHHIIH", 0, 0, *numbers, len(comment)) + comment


def _header(sign: bytes, fields: dict[str, int | bytes], *, central: bool) -> bytes:
    name, extra, comment = (bytes(fields[key]) for key in ("name", "extra", "comment"))  # type: ignore[arg-type]
    two = [_low(fields[key], 2) for key in ("version", "flags", "method")]
    four = [_low(fields[key], 4) for key in ("time", "crc", "packed", "size")]
    common = struct.pack("<HHHIIIIHH", *two, *four, len(name) & 0xFFFF, len(extra) & 0xFFFF)
    if not central:
        return sign + common + name + extra
    places = struct.pack(
        "<HHHII", len(comment), _low(fields["disk"], 2), _low(fields["internal"], 2),
        _low(fields["external"], 4), _low(fields["offset"], 4),
    )  # fmt: skip
    return sign + struct.pack("<H", 20) + common + places + name + extra + comment


def _low(value: int | bytes, width: int) -> int:
    return int(value) % 256**width


def _deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return the archive with one to three things about its members changed."""
    members, end = read(data), {}
    for _ in range(chance.randrange(1, 4)):
        if members:
            chance.choice(_CHANGES)(members, end, chance)
    return write(members, end)


def edited(
    data: bytes, chance: random.Random, wanted: Callable[[str], bool], change: Callable[[bytes], bytes]
) -> bytes:
    """Return the archive with one member of those that are wanted passed through ``change``."""
    members = read(data)
    chosen = chance.choice([member for member in members if wanted(member.name.decode())])
    chosen.data = change(chosen.data)
    return write(members)


def _duplicate(members: Members, end: dict, chance: random.Random) -> None:
    again = dataclasses.replace(chance.choice(members))
    again.data = chance.choice((again.data, b"", again.data[: len(again.data) // 2], chance.choice(members).data))
    members.insert(chance.randrange(len(members) + 1), again)


def _rename(members: Members, end: dict, chance: random.Random) -> None:
    member = chance.choice(members)
    root, _, rest = member.name.partition(b"/")
    word = hostile.text(chance)[:60_000].encode("utf-8", "surrogatepass")
    member.name = chance.choice((
        member.name.upper(), member.name.swapcase(), word, root + b"/" + word, rest, b"/" + member.name,
        b"../" + member.name, member.name.replace(b"/", b"\\"), member.name + b"/", member.name + b"\0.txt",
        chance.choice(members).name, root + b"//" + rest, root + b"/./" + rest, member.name + b" ",
    ))  # fmt: skip


def _swap(members: Members, end: dict, chance: random.Random) -> None:
    one, other = chance.choice(members), chance.choice(members)
    one.name, other.name = other.name, one.name


def _shuffle(members: Members, end: dict, chance: random.Random) -> None:
    chance.shuffle(members)


def _drop(members: Members, end: dict, chance: random.Random) -> None:
    members.remove(chance.choice(members))


def _content(members: Members, end: dict, chance: random.Random) -> None:
    member = chance.choice(members)
    member.data = chance.choice((b"", member.data[:-1], member.data * 2, chance.randbytes(64), bytes(1 << 16)))


def _lie(members: Members, end: dict, chance: random.Random) -> None:
    """Let a number in one or both headers of a member be another."""
    member = chance.choice(members)
    key = chance.choice(("version", "flags", "method", "crc", "packed", "size", "disk", "external", "offset", "time"))
    number = chance.choice((*hostile.NUMBERS, chance.getrandbits(32)))
    for header in chance.choice(((member.local,), (member.central,), (member.local, member.central))):
        header[key] = number


def _link(members: Members, end: dict, chance: random.Random) -> None:
    member = chance.choice(members)
    member.central["external"] = _LINK
    member.data = chance.choice((member.data, b"/etc/passwd", str(hostile.MARKER).encode()))


def _two_names(members: Members, end: dict, chance: random.Random) -> None:
    member = chance.choice(members)
    member.local["name"] = chance.choice(
        (chance.choice(members).name, hostile.text(chance)[:500].encode("utf-8", "replace"))
    )


def _extra(members: Members, end: dict, chance: random.Random) -> None:
    """Add an extra field: sizes of 64 bits, another name in Unicode, or bytes that are none."""
    member = chance.choice(members)
    kind, length = chance.choice((1, 0x7075, 0x5455, chance.getrandbits(16))), chance.choice((0, 8, 16, 24, 28))
    said = chance.choice((length, 0xFFFF, length + 1))
    header = chance.choice((member.local, member.central))
    header["extra"] = struct.pack("<HH", kind, said) + chance.randbytes(length)
    if kind == 1:
        header["size"] = header["packed"] = 2**32 - 1


def _compress(members: Members, end: dict, chance: random.Random) -> None:
    """Compress a member, some to a thousandth."""
    member = chance.choice(members)
    member.method = chance.choice((8, 8, 12, 14, 93, 99))
    if chance.random() < 0.1:
        member.data = bytes(1 << 22)


def _last_record(members: Members, end: dict, chance: random.Random) -> None:
    end[chance.choice(("count", "size", "offset"))] = chance.choice(hostile.NUMBERS)
    end["comment"] = chance.choice((b"", b"PK\5\6" + bytes(18), b"PK\6\7" + bytes(16), write([])))


_CHANGES = (
    _duplicate, _rename, _rename, _swap, _shuffle, _drop, _content, _lie, _lie, _link, _two_names, _extra, _compress,
    _last_record,
)  # fmt: skip
