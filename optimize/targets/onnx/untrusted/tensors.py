"""Stored tensors: as many bytes as shape and type say, in the file itself or in files of its own folder."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

from google.protobuf.message import Message
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

from optimize.errors import Refused
from optimize.regular import require_beside, shown

#: Bits of an element, by ONNX's name of its type; text has no size of its own.
_BITS = {
    **dict.fromkeys(("BOOL", "INT8", "UINT8"), 8),
    **dict.fromkeys(("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "FLOAT8E8M0"), 8),
    **dict.fromkeys(("INT16", "UINT16", "FLOAT16", "BFLOAT16"), 16),
    **dict.fromkeys(("INT32", "UINT32", "FLOAT"), 32),
    **dict.fromkeys(("INT64", "UINT64", "DOUBLE", "COMPLEX64"), 64),
    **dict.fromkeys(("FLOAT6E2M3", "FLOAT6E3M2"), 6),
    **dict.fromkeys(("INT4", "UINT4", "FLOAT4E2M1"), 4),
    **dict.fromkeys(("INT2", "UINT2"), 2),
    "COMPLEX128": 128,
}
#: Where elements lie that are not raw bytes; every other type lies in ``int32_data``.
_FIELDS = {
    "FLOAT": "float_data",
    "COMPLEX64": "float_data",
    "DOUBLE": "double_data",
    "COMPLEX128": "double_data",
    "INT64": "int64_data",
    "UINT32": "uint64_data",
    "UINT64": "uint64_data",
    "STRING": "string_data",
}
#: Where ONNX Runtime keeps tensors of its own memory: an offset there is an address.
_MEMORY = "_ORT_MEM_ADDR_"
_HINT = "Write the file again with its weights, or download all of its files."


def check_tensors(model: ModelProto, path: Path) -> tuple[Path, ...]:
    """Check every stored tensor of a model; return the files beside it that hold some.

    Args:
        model: What the file holds.

    Raises:
        Refused: One has another size than its shape and type say, or lies where it must not or is not.
    """
    folder = _Folder(path)
    for tensor in stored_tensors(model):
        try:
            _check(tensor, folder)
        except Refused as error:
            raise Refused(
                f"'{shown(path)}' is refused for its tensor '{shown(tensor.name)}': {error.what}",
                hint=error.hint or _HINT,
            ) from error
    return tuple(sorted({folder.path / location for location in folder.sizes}))


def stored_tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Yield every tensor at every depth: of graphs, of attributes, of functions, of training; sparse ones in parts."""
    open_: list[Message] = [model.graph, *model.functions]
    open_ += [graph for entry in model.training_info for graph in (entry.initialization, entry.algorithm)]
    while open_:
        found = open_.pop()
        if isinstance(found, TensorProto):
            yield found
        else:
            open_ += _parts(found)


def elements_of(tensor: TensorProto) -> int:
    """Return how many elements the shape of a tensor says."""
    return math.prod(tensor.dims)


def _parts(found: Message) -> list[Message]:
    """Return what directly inside a part of a model may hold tensors."""
    if isinstance(found, NodeProto):
        return list(found.attribute)
    if isinstance(found, FunctionProto):
        return [*found.node, *found.attribute_proto]
    if isinstance(found, GraphProto):
        return [*found.node, *found.initializer, *found.sparse_initializer]
    if isinstance(found, AttributeProto):
        single = [getattr(found, name) for name in ("t", "g", "sparse_tensor") if found.HasField(name)]
        return [*single, *found.tensors, *found.graphs, *found.sparse_tensors]
    return [found.values, found.indices]


class _Folder:
    """The folder of a file, and what in it its tensors lie in.

    Attributes:
        sizes: Bytes of each file that was named, by its name.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._owner = path.parent, path
        self.sizes: dict[str, int] = {}

    def size(self, location: str) -> int:
        """Return the bytes of a file in the folder.

        Raises:
            Refused: It is not in the folder, or no regular file.
        """
        if location not in self.sizes:
            _check_name(location)
            self.sizes[location] = require_beside(self.path / location, self._owner)
        return self.sizes[location]


def _check_name(location: str) -> None:
    """Refuse a name that leads out of a folder on any system, or to memory."""
    kinds = (PurePosixPath(location), PureWindowsPath(location))
    outside = any(kind.anchor or ".." in kind.parts for kind in kinds)
    if outside or not location or _MEMORY in location:
        raise Refused(f"its data '{shown(location)}' is not in the folder of the file.")


def _check(tensor: TensorProto, folder: _Folder) -> None:
    kind = _kind(tensor)
    if any(size < 0 for size in tensor.dims):
        raise Refused(f"{shown(str(list(tensor.dims[:8])))} is no shape.")
    if tensor.data_location == TensorProto.EXTERNAL or tensor.external_data:
        _check_outside(tensor, kind, folder)
    elif tensor.HasField("raw_data"):
        _require(len(tensor.raw_data), _bytes_of(tensor, kind), "bytes", tensor)
    else:
        _check_listed(tensor, kind)


def _kind(tensor: TensorProto) -> str:
    try:
        kind = TensorProto.DataType.Name(tensor.data_type)
    except ValueError:
        kind = ""
    if kind not in _BITS and kind != "STRING":
        raise Refused(f"there is no element type {tensor.data_type} that is known here.")
    return kind


def _check_listed(tensor: TensorProto, kind: str) -> None:
    """Check numbers that are listed one by one; small types may be packed, complex ones take two."""
    count, found = elements_of(tensor), len(getattr(tensor, _FIELDS.get(kind, "int32_data")))
    if kind.startswith("COMPLEX"):
        count *= 2
    packed = -(-count * _BITS.get(kind, 8) // 8) if _BITS.get(kind, 8) < 8 else count
    _require(found, packed if found == packed else count, "elements", tensor)


def _check_outside(tensor: TensorProto, kind: str, folder: _Folder) -> None:
    """Check where data outside the file lies, and that all of it is there."""
    if kind == "STRING":
        raise Refused("text cannot lie outside the file.")
    entries = _entries(tensor)
    size, offset = folder.size(entries.get("location", "")), _number(entries, "offset", 0)
    need = _bytes_of(tensor, kind)
    length = _number(entries, "length", need)
    _require(length, need, "bytes", tensor)
    if offset + need > size:
        raise Refused(f"its data ends at byte {offset + need} of '{shown(entries['location'])}', which has {size}.")


def load_outside(tensors: Iterable[TensorProto], folder: Path) -> None:
    """Read into checked tensors what lies in files beside theirs; links are followed, as onnx's own reader does not."""
    for tensor in tensors:
        if tensor.data_location == TensorProto.EXTERNAL:
            entries, need = _entries(tensor), _bytes_of(tensor, _kind(tensor))
            with (folder / entries["location"]).open("rb") as file:
                file.seek(_number(entries, "offset", 0))
                tensor.raw_data = file.read(need)
            tensor.ClearField("external_data")
            tensor.data_location = TensorProto.DEFAULT


def _entries(tensor: TensorProto) -> Mapping[str, str]:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if len(entries) < len(tensor.external_data):
        key, _ = Counter(entry.key for entry in tensor.external_data).most_common(1)[0]
        raise Refused(f"it says twice what its {shown(key)} is.")
    return entries


def _number(entries: Mapping[str, str], key: str, default: int) -> int:
    """Return a number of bytes; a longer one than 64 bits hold is not even read."""
    text = entries.get(key, str(default))
    if not re.fullmatch(r"[0-9]{1,19}", text, re.ASCII):
        raise Refused(f"'{shown(text)}' is no {key}.")
    return int(text)


def _bytes_of(tensor: TensorProto, kind: str) -> int:
    if kind == "STRING":
        raise Refused("text is not stored as raw bytes.")
    return -(-elements_of(tensor) * _BITS[kind] // 8)


def _require(found: int, need: int, noun: str, tensor: TensorProto) -> None:
    if found != need:
        raise Refused(f"{found} {noun} are stored, its shape {shown(str(list(tensor.dims)))} needs {need}.")
