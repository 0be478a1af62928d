"""Tensors of a ``.pt2``: raw bytes with a dtype, sizes, strides and an offset, none of which is believed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import torch

from optimize.load.archive import Archive
from optimize.load.description import Malformed

#: Tensors may stand for so many times what is stored, and so many bytes more: some are broadcast, or seen in two ways.
_TIMES, _MORE_BYTES = 2, 64 << 20
#: The numbers that torch's schema gives to layouts and types.
LAYOUTS = {7: "strided"}
DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64",
    10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16", 29: "float8_e4m3fn",
    30: "float8_e5m2", 31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz",
}  # fmt: skip


def read_tensors(archive: Archive, folder: str, table: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a table by name; entries of one member that are seen alike are one tensor.

    Raises:
        Malformed: One is not what it says, or all of them stand for far more than is stored.
    """
    if table not in archive:
        return {}
    found: dict[str, torch.Tensor] = {}
    storages: dict[str, torch.Tensor] = {}
    views: dict[tuple[str, str], torch.Tensor] = {}
    room = _MORE_BYTES
    for name, entry in json.loads(archive.read(table))["config"].items():
        member = entry["path_name"]
        if entry.get("use_pickle") is not False:
            raise Malformed(f"'{name[:80]}' is pickled")
        if not re.fullmatch(r"(weight|tensor)_\d+", str(member), re.ASCII):
            raise Malformed(f"'{name[:80]}' lies in '{str(member)[:80]}', which is no tensor")
        key = (member, json.dumps(entry["tensor_meta"], sort_keys=True))
        if member not in storages:
            storages[member] = _bytes_of(archive.read(f"data/{folder}/{member}"))
            room += _TIMES * len(storages[member])
        if key not in views:
            view = _view(storages[member], entry["tensor_meta"], name, room)
            room -= view.nbytes
            is_parameter = bool(entry.get("is_param")) and (view.is_floating_point() or view.is_complex())
            views[key] = torch.nn.Parameter(view, requires_grad=False) if is_parameter else view
        found[name] = views[key]
    return found


def _bytes_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _view(storage: torch.Tensor, meta: Mapping[str, Any], name: str, room: int) -> torch.Tensor:
    """Return the tensor that lies in raw bytes.

    Raises:
        Malformed: It would read outside them, or take more bytes than there is room for.
    """
    dtype = getattr(torch, DTYPES[meta["dtype"]])
    sizes, strides = ([_whole(entry["as_int"]) for entry in meta[key]] for key in ("sizes", "strides"))
    offset, length = _whole(meta["storage_offset"]["as_int"]), len(storage) // dtype.itemsize
    if meta["layout"] not in LAYOUTS or len(sizes) != len(strides):
        raise Malformed(f"'{name[:80]}' has no strided layout")
    count = 1
    for size in sizes:
        count *= size
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if count else offset
    if (count and last >= length) or count * dtype.itemsize > room or offset > length:
        raise Malformed(f"'{name[:80]}' has {count} values and {len(storage)} bytes")
    typed = storage[: length * dtype.itemsize].view(dtype) if length else torch.empty(0, dtype=dtype)
    return torch.as_strided(typed, sizes, strides, offset).clone()


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise Malformed(f"{str(value)[:40]} is no size")
    return value
