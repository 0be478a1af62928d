"""The one door to an ONNX file that the user names: read and checked before a runtime or a parser of graphs sees it.

How many messages it holds is counted first: a parser makes an object of each, of two bytes in the file. No library of
custom operators is ever loaded: a node of an unknown domain ends in the runtime's own error.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import Message

from optimize.errors import Refused
from optimize.regular import read_bytes, require_file, shown
from optimize.targets.onnx.untrusted.calls import check_calls
from optimize.targets.onnx.untrusted.inference import MOST_AXES
from optimize.targets.onnx.untrusted.survey import check_work
from optimize.targets.onnx.untrusted.tensors import check_tensors

#: One protobuf message.
MOST_BYTES = 2**31 - 1


def read_checked(path: Path, *, trust: bool = False) -> onnx.ModelProto:
    """Return what a file holds, as :func:`files_of` does; weights outside it stay there."""
    return files_of(path, trust=trust)[0]


def files_of(path: Path, *, trust: bool = False) -> tuple[onnx.ModelProto, tuple[Path, ...]]:
    """Return what a file holds, and the files it consists of, ``path`` first.

    Args:
        trust: Take whatever time and memory the file asks for; everything else is checked all the same.

    Raises:
        Refused: It is no regular file, no ONNX model, names weights that are not its own or not there, or asks for
            more work or memory than an honest file does.
    """
    model = _parsed(path, trust)
    check_texts(model, path)
    outside = check_tensors(model, path)
    try:
        check_calls(model, path)
        if not trust:
            check_work(model, path)
    except RecursionError as error:
        raise Refused(
            f"'{shown(path)}' has functions and graphs too deep inside one another.", hint="Export the model again."
        ) from error
    return model, (path, *outside)


def _parsed(path: Path, trust: bool) -> onnx.ModelProto:
    require_file(path)
    model, content = onnx.ModelProto(), read_bytes(path, most_bytes=MOST_BYTES)
    if not trust:
        check_messages(content, path)
    try:
        model.ParseFromString(content)
    except Exception as error:  # protobuf's implementations have no common class
        raise Refused(
            f"'{shown(path)}' is not an ONNX file: {shown(str(error))}.", hint="Write or download it again."
        ) from error
    if not model.HasField("graph"):
        raise Refused(
            f"'{shown(path)}' is not an ONNX file: there is no graph in it.", hint="Write or download it again."
        )
    return model


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
    if place < len(content) and content[place] < 0x80:  # nearly all are of one byte
        return content[place], place + 1
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
