"""What a TensorRT engine takes is read from the engine."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from optimize.errors import TargetUnavailable
from optimize.targets.base import TensorSpec
from optimize.targets.tensorrt import packages, reading
from optimize.targets.tensorrt.reading import read_specs


class Engine:
    """Stands for a TensorRT engine of one input and one output."""

    num_io_tensors = 2

    def get_tensor_name(self, index: int) -> str:
        return ("x", "y")[index]

    def get_tensor_mode(self, name: str) -> str:
        return {"x": "in", "y": "out"}[name]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return {"x": (-1, 3, 8, 8), "y": (-1, 10)}[name]

    def get_tensor_dtype(self, name: str) -> type:
        return np.float16


def test_an_engine_says_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(deserialize_cuda_engine=lambda content: Engine() if content[4:] == b"good" else None)
    library = SimpleNamespace(
        Runtime=lambda logger: runtime,
        TensorIOMode=SimpleNamespace(INPUT="in", OUTPUT="out"),
        nptype=lambda kind: kind,
        __version__="1.7",
    )
    asked: list[str] = []
    monkeypatch.setattr(reading, "Device", lambda: None)
    monkeypatch.setattr(reading.log, "listen", lambda module: None)
    monkeypatch.setattr(packages.importlib, "import_module", lambda name: asked.append(name) or library)
    (tmp_path / "a.engine").write_bytes(b"vtrtgood")
    versions, inputs, outputs = read_specs(tmp_path / "a.engine")
    assert asked == ["tensorrt_rtx"] and versions == {"tensorrt-rtx": "1.7"}
    assert inputs == (TensorSpec("x", ("?", 3, 8, 8), "float16"),)
    assert outputs == (TensorSpec("y", ("?", 10), "float16"),)
    (tmp_path / "b.engine").write_bytes(b"ftrtbad")
    with pytest.raises(TargetUnavailable, match=r"cannot read 'b\.engine'"):
        read_specs(tmp_path / "b.engine")
    assert asked[-1] == "tensorrt"
