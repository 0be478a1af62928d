"""What a TensorRT engine takes is read from the engine."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from optimize.errors import Refused, TargetUnavailable
from optimize.sandbox import Answer
from optimize.targets.base import Availability, TensorSpec
from optimize.targets.tensorrt import TensorRT, packages, reading
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


def test_an_engine_of_others_is_read_in_a_confined_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader believes native code; what a process that was taken over says of it may be anything."""
    (engine := tmp_path / "a.engine").write_bytes(b"vtrt")
    told: list[Any] = ["tensorrt-rtx", "1.7", [["x", ["?", 3], "float16"]], [["y", [2], "bool"]]]
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        reading.sandbox, "call", lambda *given, **rest: calls.append((*given, rest)) or Answer(told, ())
    )
    monkeypatch.setattr(reading, "read_specs", lambda path: pytest.fail("read in this process"))
    monkeypatch.setattr(packages, "availability", lambda: Availability(export=True, run=True))
    found = TensorRT().open(engine)
    assert found.versions == {"tensorrt-rtx": "1.7"} and found.missing == ""
    assert found.inputs == (TensorSpec("x", ("?", 3), "float16"),) and found.outputs == (TensorSpec("y", (2,), "bool"),)
    assert calls[0][0] == "optimize.targets.tensorrt.reading:tell_specs" and calls[0][-1].get("confined", True)
    for place, wrong in ((0, "os"), (2, None), (2, [["x", [-1], "float16"]]), (3, [["y", [2], "object"]]), (3, [1])):
        told[place], kept = wrong, told[place]
        with pytest.raises(Refused, match="gave no answer"):
            reading.specs_of(engine)
        told[place] = kept


def test_a_process_tells_of_an_engine_what_the_engine_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = (TensorSpec("x", ("?", 3), "float16"),)
    monkeypatch.setattr(reading, "read_specs", lambda path: ({"tensorrt": "11"}, specs, ()))
    said = json.loads(json.dumps(reading.tell_specs(tmp_path, None, "a.engine")))
    assert said == ["tensorrt", "11", [["x", ["?", 3], "float16"]], []]


def test_an_engine_that_is_opened_runs_as_its_target_is_asked(tmp_path: Path) -> None:
    (tmp_path / "a.engine").write_bytes(b"vtrt")
    assert TensorRT(cuda_graph=True).open(tmp_path / "a.engine").settings == {"cuda_graph": True}
    assert TensorRT().open(tmp_path / "a.engine").settings == {}
