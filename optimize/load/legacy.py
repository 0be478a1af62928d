"""The format torch.save wrote before 1.6: five pickles, one after the other, then the raw storages.

There, each module class is wrapped in a record ``("module", class, file name, source text)``, which torch's restricted
unpickler refuses. The records only serve a warning about changed source code, so they are cut out of the stream before
it is read, and the class is left in their place: the restricted unpickler then judges the class as it does in a zip.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Iterator
from typing import IO, Any

PICKLES = 5
_MODEL = 3
_Op = tuple[pickletools.OpcodeInfo, Any, int]
_PUTS = ("BINPUT", "LONG_BINPUT")
_TEXTS = ("BINUNICODE", "BINGET", "LONG_BINGET", "NONE")


def opcodes(data: bytes, most: int = PICKLES) -> Iterator[tuple[int, _Op]]:
    """Yield ``(which pickle, opcode)`` for up to ``most`` pickles in a row; stop at what is not a pickle."""
    stream = io.BytesIO(data)
    for which in range(most):
        try:
            for op, argument, at in pickletools.genops(stream):
                yield which, (op, argument, at or 0)
        except (ValueError, UnicodeDecodeError, IndexError):
            return


def without_container_records(file: IO[bytes]) -> IO[bytes]:
    """Return the same legacy file with each module record replaced by the class in it."""
    data = file.read()
    ops = [op for which, op in opcodes(data, _MODEL + 1) if which == _MODEL]
    if not ops or ops[-1][0].name != "STOP":
        return io.BytesIO(data)
    begin, end = ops[0][2], ops[-1][2] + 1
    rewritten = _rewritten(data, ops)
    if rewritten == data[begin:end]:
        file.seek(0)
        return file
    return io.BytesIO(data[:begin] + rewritten + data[end:])


def _rewritten(data: bytes, ops: list[_Op]) -> bytes:
    """Cut the module records out of one pickle.

    A text of a record may be referred to later through the memo, so those texts move to the start of the stream, where
    they stay at the bottom of the stack and disturb nothing.
    """
    kept: list[bytes] = []
    texts: list[bytes] = []
    ends = [at for _, _, at in ops[1:]] + [ops[-1][2] + 1]
    raw = [data[at:end] for (_, _, at), end in zip(ops, ends, strict=True)]
    index = 0
    while index < len(ops):
        length = _record_length(ops, index)
        if not length:
            kept.append(raw[index])
            index += 1
            continue
        names = [op.name for op, _, _ in ops[index : index + length]]
        chosen = names.index("GLOBAL")
        memoized = names[chosen + 1] in _PUTS
        for place, name in enumerate(names):
            if name == "BINUNICODE":
                texts += raw[index + place : index + place + 2]
        kept += raw[index + chosen : index + chosen + 1 + memoized]
        index += length
    return kept[0] + b"".join(texts) + b"".join(kept[1:])


def _record_length(ops: list[_Op], index: int) -> int:
    """Return how many opcodes the module record at ``index`` takes, 0 where there is none."""
    if ops[index][0].name != "MARK":
        return 0
    found: list[str] = []
    cursor = index + 1
    while cursor < len(ops) and len(found) < 6:
        name, argument, _ = ops[cursor]
        if name.name not in _PUTS:
            found.append(name.name)
            if len(found) == 1 and name.name == "BINUNICODE" and argument != "module":
                return 0
        cursor += 1
    first, cls, source_file, source, closing, load = (*found, *[""] * (6 - len(found)))
    fits = first in _TEXTS and cls == "GLOBAL" and source_file in _TEXTS and source in _TEXTS
    return cursor - index if fits and (closing, load) == ("TUPLE", "BINPERSID") else 0
