"""Headers of ``.npy`` arrays and of safetensors that lie about what follows."""

from __future__ import annotations

import random
import struct

from tests.fuzzing import bytewise, hostile, jsons, zips

_TYPES = (
    "'<f4'", "'>f8'", "'|O'", "'O'", "'<U9'", "'|S0'", "'|V0'", "'<M8[ns]'", "'<i9'", "'f'*99", "[('a', '<f4')]",
    "[('a', '|O')]", "[('a', '<f4', (2**31, 2**31))]", "{'names': ['a'], 'formats': ['<f4']}", "1", "None", "'?'",
    "'<c16'", "'<f2'", "'|b1'", "''", "'<V4294967296'", "'<f4,<f4'",
)  # fmt: skip


def mutated_npy(data: bytes, chance: random.Random) -> bytes:
    """Return an array whose header says something else."""
    if chance.random() < 0.3:
        return bytewise.mutated(data, chance)
    version = data[6:8]
    width = 2 if version[0] == 1 else 4
    end = 8 + width + int.from_bytes(data[8 : 8 + width], "little")
    header, body = data[8 + width : end].decode("latin-1"), data[end:]
    written = chance.choice(_HEADERS)(header, chance).encode("latin-1", "replace")
    length = chance.choice((len(written),) * 9 + (0, 2**16 - 1, len(written) + 1))
    version = chance.choice((version,) * 9 + (b"\2\0", b"\3\0", b"\0\0", b"\xff\xff"))
    width = 2 if version[0] == 1 else 4
    body = chance.choice((body, body, body, body[:-1], b"", body * 2))
    return data[:6] + version + (length % 256**width).to_bytes(width, "little") + written + body


def mutated_npz(data: bytes, chance: random.Random) -> bytes:
    """Return a zip of arrays with an array or the zip changed."""
    if chance.random() < 0.4:
        return zips.edited(data, chance, lambda name: True, lambda held: mutated_npy(held, chance))
    return zips.mutated(data, chance) if chance.random() < 0.7 else bytewise.mutated(data, chance)


def mutated_safetensors(data: bytes, chance: random.Random) -> bytes:
    """Return named tensors with the header or the bytes changed."""
    if chance.random() < 0.3:
        return bytewise.mutated(data, chance)
    length = struct.unpack("<Q", data[:8])[0]
    header = jsons.mutated(data[8 : 8 + length], chance)
    said = chance.choice((len(header),) * 9 + (0, 2**63, len(header) * 2))
    return struct.pack("<Q", said) + header + data[8 + length :]


def _shape(header: str, chance: random.Random) -> str:
    sizes = [chance.choice((*hostile.NUMBERS, True, 0.5, "'x'")) for _ in range(chance.choice((0, 1, 2, 3, 40, 70)))]
    return _with(header, "'shape': ", f"({''.join(f'{size}, ' for size in sizes)})", "}")


def _type(header: str, chance: random.Random) -> str:
    return _with(header, "'descr': ", chance.choice(_TYPES), ", 'fortran")


def _order(header: str, chance: random.Random) -> str:
    return header.replace("False", chance.choice(("True", "None", "2", "'x'", "[]")))


def _code(header: str, chance: random.Random) -> str:
    at = chance.randrange(len(header))
    return header[:at] + hostile.text(chance)[:3000] + header[at + chance.randrange(8) :]


def _deep(header: str, chance: random.Random) -> str:
    depth = chance.choice((50, 900, 4000))
    return _with(header, "'shape': ", chance.choice(("(" * depth + ")" * depth, "[" * depth, "-" * depth + "1")), "}")


def _key(header: str, chance: random.Random) -> str:
    return header.replace(
        chance.choice(("descr", "shape", "fortran_order")), chance.choice(("descr", "x", "", "shape"))
    )


def _with(header: str, before: str, text: str, after: str) -> str:
    start = header.find(before) + len(before)
    return header[:start] + text + header[header.find(after, start) :]


_HEADERS = (_shape, _shape, _type, _type, _order, _code, _deep, _key)
