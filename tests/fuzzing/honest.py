"""Honest files of every kind, small ones: what mutations start from."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from optimize.load import stored
from tests.fuzzing import networks

#: A file and those beside it, the one that is opened first.
Files = dict[str, bytes]
INPUTS = (2, 3, 8)
_ONNX = """
<ir_version: 10, opset_import: ["" : 18, "own" : 1]>
small (float[N,3] x) => (float[N,3] y, int64[2] place)
<float[3,3] w = {1,0,0,0,1,0,0,0,1}, float[3] b = {1,2,3}, int64 turns = {3}, bool go = {1}, int64[2] shape = {2,3}> {
    a = MatMul(x, w)
    c = own.add(a, b)
    last, kept = Loop (turns, go, c) <body = inner (int64 i, bool on, float[N,3] v)
            => (bool off, float[N,3] w2, float[N,3] w3) {
        off = Identity(on)
        w2 = Relu(v)
        w3 = Identity(w2)
    }>
    grown = Expand(last, shape)
    y = If (go) <then_branch = yes () => (float[N,3] t) { t = Relu(last) },
        else_branch = no () => (float[N,3] e) { e = Neg(last) }>
    size = Constant <value = int64[1] {2}>()
    place = ConstantOfShape <value = int64[1] {1}>(size)
}
<domain: "own", opset_import: ["" : 18]>
add (p, q) => (r) { r = Add(p, q) }
"""


def make(kind: str, folder: Path) -> list[Files]:
    """Return the honest files of a kind; ``folder`` is for files on the way."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _MAKERS[kind](folder)


def build(folder: Path, tell: Any, kinds: list[str]) -> None:
    """Write the honest files of some kinds: a folder a kind, in it a folder a file."""
    for kind in kinds:
        for number, files in enumerate(make(kind, folder)):
            home = folder / kind / str(number)
            home.mkdir(parents=True)
            for name, data in files.items():
                (home / name).write_bytes(data)


def read(folder: Path, kind: str) -> list[Files]:
    """Return the honest files of a kind as `build` wrote them."""
    homes = sorted((folder / kind).iterdir(), key=lambda home: int(home.name))
    return [{path.name: path.read_bytes() for path in sorted(home.iterdir(), key=_rank)} for home in homes]


def _rank(path: Path) -> tuple[bool, str]:
    return path.suffix in (".bin", ".safetensors") and path.name != "model.safetensors", path.name


def _held(name: str, write: Callable[[io.BytesIO], Any]) -> Files:
    buffer = io.BytesIO()
    write(buffer)
    return {name: buffer.getvalue()}


def _saved(value: Any, *, zipped: bool = True) -> Files:
    return _held("model.pt", lambda file: torch.save(value, file, _use_new_zipfile_serialization=zipped))


def _modules(folder: Path) -> list[Files]:
    return [_saved(module) for module in networks.plain()]


def _legacy(folder: Path) -> list[Files]:
    return [_saved(module, zipped=False) for module in networks.plain()[:2]] + [_saved(_state(), zipped=False)]


def _state() -> dict[str, Any]:
    return {"state_dict": networks.plain()[0].state_dict(), "epoch": 3, "args": {"name": "x", "rates": [0.1, 0.2]}}


def _states(folder: Path) -> list[Files]:
    return [_saved(networks.plain()[0].state_dict()), _saved(_state())]


def _exported(folder: Path) -> list[Files]:
    exported = [torch.export.export(*given, dynamic_shapes=shapes) for *given, shapes in networks.exportable()]
    return [_held("model.pt2", partial(torch.export.save, program)) for program in exported]


def _scripted(folder: Path) -> list[Files]:
    dense, layers, _ = networks.plain()
    modules = torch.jit.script(dense), torch.jit.script(networks.Looped()), torch.jit.trace(layers, torch.zeros(INPUTS))
    return [_held("model.pt", partial(torch.jit.save, module)) for module in modules]


def _safetensors(folder: Path) -> list[Files]:
    tensors = {key: value.contiguous() for key, value in networks.plain()[0].state_dict().items()}
    return [{"model.safetensors": save(tensors)}]


def _onnx(folder: Path) -> list[Files]:
    import onnx

    inside = onnx.parser.parse_model(_ONNX)
    onnx.checker.check_model(inside, full_check=True)
    outside, stored = onnx.ModelProto.FromString(inside.SerializeToString()), b""
    for tensor in outside.graph.initializer:
        data = onnx.numpy_helper.to_array(tensor).tobytes()
        tensor.CopyFrom(onnx.TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type))
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", "weights.bin"), ("offset", len(stored)), ("length", len(data))):
            tensor.external_data.add(key=key, value=str(value))
        stored += data
    held = outside.SerializeToString()
    return [{"model.onnx": inside.SerializeToString()}, {"model.onnx": held, "weights.bin": stored}]


def _openvino(folder: Path) -> list[Files]:
    import onnx
    import openvino

    source, path = folder / "source.onnx", folder / "ir.xml"
    source.write_bytes(onnx.parser.parse_model(_ONNX.replace("own.add", "Add")).SerializeToString())
    openvino.save_model(openvino.convert_model(source), path, compress_to_fp16=False)
    return [{"model.xml": path.read_bytes(), "model.bin": path.with_suffix(".bin").read_bytes()}]


def _npy(folder: Path) -> list[Files]:
    return [_held("data.npy", lambda file: np.save(file, np.arange(24, dtype=np.float32).reshape(4, 6)))]


def _npz(folder: Path) -> list[Files]:
    arrays = {"x": np.zeros((4, 6), np.float32), "y": np.arange(4)}
    return [_held("data.npz", partial(write, **arrays)) for write in (np.savez, np.savez_compressed)]


def _taken(folder: Path) -> list[Files]:
    """Return what a confined process leaves in its folder for the user's."""
    from optimize.frontend import capture

    found = []
    for number, module in enumerate(networks.plain()[:2]):
        home = folder / f"taken{number}"
        home.mkdir()
        stored.store(capture(module, (torch.zeros(INPUTS),), dynamic_batch=True), home)
        found.append({name: (home / name).read_bytes() for name in ("program.json", "program.safetensors")})
    return found


_MAKERS: dict[str, Callable[[Path], list[Files]]] = {
    "module": _modules, "legacy": _legacy, "state": _states, "pt2": _exported, "torchscript": _scripted,
    "safetensors": _safetensors, "onnx": _onnx, "openvino": _openvino, "npy": _npy, "npz": _npz, "taken": _taken,
}  # fmt: skip
