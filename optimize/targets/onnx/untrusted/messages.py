"""How many messages a protobuf file holds: a parser makes an object of each, of two bytes in the file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import Message

from optimize.errors import Refused
from optimize.regular import shown
from optimize.targets.onnx.untrusted.inference import MOST_AXES

#: Of honest files: a network of ten thousand nodes has a hundred thousand messages, and three times the fields.
MOST_MESSAGES, MOST_FIELDS = 1_000_000, 10_000_000
#: Bytes of whole numbers that stand one by one, each in a byte or more: a parser makes eight bytes or more of each.
#: Weights of any size stand as they lie in memory.
MOST_NUMBERS_BYTES = 64_000_000
_NUMBERS = {"TensorProto": ("dims", "int32_data", "int64_data", "uint64_data"), "AttributeProto": ("ints",)}
_VARINT, _SIZED, _FIXED = 0, 2, {1: 8, 5: 4}
#: Fields are counted from one, the form stands in three bits before that.
_FIRST_TAG = 1 << 3


def check_messages(content: bytes, path: Path) -> None:
    """Refuse a file of more messages, or fields, than an honest one has; one that is no protobuf is the parser's.

    Raises:
        Refused: It has.

    Source: protobuf.dev, "Encoding".
    """
    messages, fields, numbers = 0, 0, 0
    waiting: list[tuple[Any, int, int]] = [(onnx.ModelProto.DESCRIPTOR, 0, len(content))]
    while waiting:
        kind, place, end = waiting.pop()
        inner, packed = _messages_in(kind), _numbers_in(kind)
        while place < end:
            tag, place = _varint(content, place)
            fields += 1
            form = tag & 7
            if form == _SIZED:
                size, place = _varint(content, place)
                if tag >> 3 in inner:
                    messages += 1
                    waiting.append((inner[tag >> 3], place, min(place + size, end)))
                numbers += size if tag >> 3 in packed else 0
                place += size
            elif form == _VARINT:
                _, place = _varint(content, place)
            elif form in _FIXED:
                place += _FIXED[form]
            if tag < _FIRST_TAG:  # no parser goes on here, but with what stands before it
                break
            if messages > MOST_MESSAGES or fields > MOST_FIELDS:
                raise Refused(
                    f"'{shown(path)}' has more than a million parts, or ten million fields.",
                    hint="Add --trust if you trust this file.",
                )
            if numbers > MOST_NUMBERS_BYTES:
                raise Refused(
                    f"'{shown(path)}' holds more than {MOST_NUMBERS_BYTES:,} bytes of whole numbers one by one.",
                    hint="Store them as raw data (onnx.numpy_helper), or add --trust if you trust this file.",
                )


@cache
def _messages_in(kind: Any) -> dict[int, Any]:
    """Return the messages that a message may hold, by their fields' numbers."""
    return {field.number: field.message_type for field in kind.fields if field.message_type is not None}


@cache
def _numbers_in(kind: Any) -> frozenset[int]:
    """Return the fields of a message that hold many whole numbers."""
    return frozenset(kind.fields_by_name[name].number for name in _NUMBERS.get(kind.name, ()))


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """Return a number and where the next thing begins; zero behind the end."""
    found = shift = 0
    for byte in content[place : place + 10]:
        place += 1
        found |= (byte & 0x7F) << shift
        if byte < 0x80:
            return found, place
        shift += 7
    return found, place + 1


def check_texts(model: Message, path: Path) -> None:
    """Check that every name and text of a model is UTF-8, and that no shape has more dimensions than runtimes take.

    Raises:
        Refused: One is not, or has.
    """
    waiting = [model]
    while waiting:
        for held, value in waiting.pop().ListFields():
            if held.name in ("dim", "dims") and len(value) > MOST_AXES:
                raise Refused(f"'{shown(path)}' is refused: what has {len(value)} dimensions is no shape.")
            if held.message_type is not None:
                waiting += [value] if isinstance(value, Message) else value
            elif held.type == held.TYPE_STRING and any(isinstance(text, bytes) for text in _texts(value)):
                raise Refused(
                    f"'{shown(path)}' is not an ONNX file: a {held.name} in it is not UTF-8.",
                    hint="Write or download it again.",
                )


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str | bytes) else value
