"""Protobuf messages of ONNX with fields changed, dropped, doubled or moved."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import onnx

from tests.fuzzing import hostile

Place = tuple[Any, Any]
_OPERATORS = tuple(sorted({schema.name for schema in onnx.defs.get_all_schemas()}))
_PATHS = (
    "../x", "/etc/passwd", "/dev/zero", "weights.bin\0", "a/../../x", str(hostile.MARKER), "", ".", "model.onnx",
    "sub/x",
)  # fmt: skip


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return a model with one to four changes."""
    model = onnx.ModelProto.FromString(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        places = list(_places(model, 0))
        chance.choice(_CHANGES)(places, chance)
    return model.SerializeToString()


def _places(message: Any, depth: int) -> Iterator[Place]:
    for held, value in message.ListFields():
        yield message, held
        if held.message_type is not None and depth < 12:
            for inner in value if held.is_repeated else [value]:
                yield from _places(inner, depth + 1)


def _scalar(held: Any, chance: random.Random) -> Any:
    """Return a hostile value of a field's type."""
    if held.type in (held.TYPE_STRING, held.TYPE_BYTES):
        texts = hostile.text(chance), chance.choice(_PATHS), chance.choice(_OPERATORS), chance.choice(hostile.NUMBERS)
        text = str(chance.choice(texts))
        text = text.encode("utf-8", "replace").decode()
        return text if held.type == held.TYPE_STRING else text.encode()
    if held.type in (held.TYPE_FLOAT, held.TYPE_DOUBLE):
        return chance.choice((0.0, -1.0, 1e30, float("nan"), float("inf")))
    if held.type == held.TYPE_ENUM:
        return chance.choice([value.number for value in held.enum_type.values])
    bits = 31 if held.type == held.TYPE_INT32 else 63
    return chance.choice([number for number in hostile.NUMBERS if -(2**bits) <= number < 2**bits])


def _change(places: list[Place], chance: random.Random) -> None:
    plain = [(message, held) for message, held in places if held.message_type is None]
    if not plain:
        return
    message, held = chance.choice(plain)
    try:
        if held.is_repeated:
            values = getattr(message, held.name)
            values[chance.randrange(len(values))] = _scalar(held, chance)
        else:
            setattr(message, held.name, _scalar(held, chance))
    except (ValueError, TypeError, OverflowError):  # a number that the field has no room for
        return


def _drop(places: list[Place], chance: random.Random) -> None:
    if places:
        message, held = chance.choice(places)
        if held.is_repeated:
            values = getattr(message, held.name)
            del values[chance.randrange(len(values))]
        else:
            message.ClearField(held.name)


def _double(places: list[Place], chance: random.Random) -> None:
    many = [(message, held) for message, held in places if held.is_repeated]
    if many:
        message, held = chance.choice(many)
        values = getattr(message, held.name)
        values.extend([chance.choice(list(values))] * chance.choice((1, 1, 3, 40)))


def _alike(places: list[Place], chance: random.Random) -> None:
    """Put a message of the same type in a message's place: a graph in itself, a tensor in another's."""
    many = [(message, held) for message, held in places if held.message_type is not None]
    message, held = chance.choice(many)
    same = [(m, h) for m, h in many if h.message_type.full_name == held.message_type.full_name]
    chosen = _one(*chance.choice(same), chance)
    copy = type(chosen).FromString(chosen.SerializeToString())
    _one(message, held, chance).CopyFrom(copy)


def _one(message: Any, held: Any, chance: random.Random) -> Any:
    value = getattr(message, held.name)
    return chance.choice(list(value)) if held.is_repeated else value


def _of_node(places: list[Place], chance: random.Random) -> None:
    """Let a node be another operator."""
    nodes = [message for message, held in places if held.name == "op_type"]
    if nodes:
        node = chance.choice(nodes)
        node.op_type, node.domain = chance.choice(_OPERATORS), chance.choice(("", "", "", "com.microsoft", "own"))


def _of_tensor(places: list[Place], chance: random.Random) -> None:
    """Let a tensor lie outside the file, or say another size or type."""
    tensors = [message for message, held in places if held.name == "dims"]
    if not tensors:
        return
    tensor = chance.choice(tensors)
    if chance.random() < 0.5:
        numbers = [number for number in hostile.NUMBERS if abs(number) < 2**63]
        tensor.dims[:] = [chance.choice(numbers) for _ in range(chance.randrange(4))]
        return
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key in ("location", "offset", "length", "checksum"):
        if chance.random() < 0.6:
            text = chance.choice(_PATHS) if key == "location" else str(chance.choice(hostile.NUMBERS))
            tensor.external_data.add(key=key, value=text)


_CHANGES = (_change, _change, _change, _drop, _double, _alike, _of_node, _of_tensor)
