"""The OpenVINO target: files that agree, what is refused, and the two files that are one."""

import dataclasses
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import optimize
from models import REFERENCES
from optimize import workflow
from optimize.errors import Refused, TargetUnavailable, UsageError
from optimize.job import Export
from optimize.passes.quantize_dynamic import QuantizeDynamic
from optimize.passes.quantize_static import QuantizeStatic
from optimize.plan import Quantization
from optimize.registry import find_target
from optimize.targets.openvino import OpenVINO
from optimize.targets.openvino.runner import OpenVINORunner
from tests import references
from tests.targets.programs import captured, draw, installed, quantized, worst_db

RUNNER_IN_A_FRESH_PROCESS = """
import json, sys
import numpy, optimize.targets.openvino
from optimize.measure.worker import artifact_from
artifact = artifact_from(json.load(sys.stdin))
numpy.save(sys.argv[2], artifact.load(threads=1).run([numpy.load(sys.argv[1])])[0])
assert not {"torch", "onnx"} & set(sys.modules)
"""

LAST_FILE_ENDS_IN_A_THREAD = """
import gc, pathlib, signal, sys, threading
from optimize.targets.openvino.runner import compile_file
compiled = [compile_file(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[1]).with_suffix(".bin"), threads=1)]
def end():
    compiled.clear()
    gc.collect()
thread = threading.Thread(target=end)
thread.start()
thread.join()
signal.signal(signal.SIGUSR1, lambda number, frame: print("arrived"))
signal.raise_signal(signal.SIGUSR1)
"""


@installed
@pytest.mark.parametrize("name", ["mobilenetv3", "vit", "lstm"])  # the others agree by tests/contract/test_targets.py
def test_a_float_file_agrees_at_two_batch_sizes_in_float32(name: str, tmp_path: Path) -> None:
    program = references.folded(name)
    artifact = OpenVINO().export(program, tmp_path / "net.xml")
    assert worst_db(artifact, program, REFERENCES[name].input_shape) > 100
    assert (artifact.precision, artifact.coverage) == ("float32", None)
    assert "in f32" in artifact.notes[0] and "bf16" not in artifact.notes[0]
    assert artifact.inputs[0].shape[0] == "batch"


def test_a_file_has_the_ending_that_openvino_writes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"end with \.xml, not .*net\.onnx") as caught:
        optimize.export(references.folded("resnet"), "openvino", tmp_path / "net.onnx")
    assert "net.xml" in caught.value.hint


@installed
def test_a_signal_arrives_after_the_last_file_ended_in_another_thread(tmp_path: Path) -> None:
    artifact = OpenVINO().export(references.folded("resnet"), tmp_path / "net.xml")
    command = [sys.executable, "-c", LAST_FILE_ENDS_IN_A_THREAD, str(artifact.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "arrived\n")  # without the one Core: SIGSEGV


@installed
def test_the_runner_takes_threads_and_the_precision_of_the_file(tmp_path: Path) -> None:
    artifact = OpenVINO().export(references.folded("resnet"), tmp_path / "net.xml")
    runner = artifact.load(threads=1)
    assert isinstance(runner, OpenVINORunner)
    assert runner.compiled.get_property("INFERENCE_NUM_THREADS") == 1
    assert runner.compiled.get_property("INFERENCE_PRECISION_HINT").to_dtype() == np.float32
    assert runner.compiled.get_property("NUM_STREAMS") == 1
    assert not runner.compiled.get_property("ENABLE_CPU_PINNING")


@installed
def test_the_runner_loads_in_a_fresh_process_without_torch(tmp_path: Path) -> None:
    artifact = OpenVINO().export(references.int8("unet"), tmp_path / "net.xml")
    x = REFERENCES["unet"].inputs(3, seed=9)
    np.save(tmp_path / "x.npy", x.numpy())
    fields = {**dataclasses.asdict(artifact), "path": str(artifact.path)}
    script = [sys.executable, "-c", RUNNER_IN_A_FRESH_PROCESS, str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]
    subprocess.run(script, input=json.dumps(fields), text=True, check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), artifact.load(threads=1)(x).numpy())


class Mixed(nn.Module):
    """Outputs of several types, one of them twice; an input that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 3)

    def forward(self, x: Tensor, unused: Tensor, index: Tensor) -> dict[str, Tensor]:
        y = self.line(x)
        return {"y": y, "best": y.argmax(1), "again": y, "positive": y > 0, "next": index + 1, "x": x}


@installed
def test_mixed_types_unused_inputs_and_outputs_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = (torch.randn(2, 4), torch.randn(2, 5), torch.arange(2))
    program = optimize.capture(Mixed().eval(), inputs)
    artifact = OpenVINO().export(program, tmp_path / "net.xml")
    runner, want = artifact.load(threads=1), program(*inputs)
    got = runner(*inputs)
    runner(inputs[0] * 7, *inputs[1:])
    assert want.keys() == got.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype
        assert torch.allclose(got[name].double(), value.double(), atol=1e-5), name
    assert "64-bit" in artifact.notes[-1]


@installed
def test_bad_inputs_are_refused(tmp_path: Path) -> None:
    runner = OpenVINO().export(captured(nn.Conv2d(3, 4, 3), (3, 8, 8)), tmp_path / "net.xml").load(threads=1)
    for bad, word in ((torch.zeros(2, 3, 9, 8), "must have shape"), (torch.zeros(2, 3, 8, 8).double(), "must be")):
        with pytest.raises(Refused, match=word):
            runner(bad)
    with pytest.raises(Refused, match=r"takes 1 input\(s\)"):
        runner(torch.zeros(2, 3, 8, 8), torch.zeros(1))
    assert runner(np.zeros((2, 3, 8, 8), np.float32).transpose(0, 1, 3, 2)).shape == (2, 4, 6, 6)


@installed
def test_both_files_are_counted_hashed_and_reproducible(tmp_path: Path) -> None:
    program = captured(nn.Conv2d(3, 4, 3), (3, 8, 8))
    first, second = (OpenVINO().export(program, tmp_path / f"{name}.int8.xml") for name in ("a", "b"))
    names = ["a.int8.bin", "a.int8.xml", "b.int8.bin", "b.int8.xml"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    weights = tmp_path / "a.int8.bin"
    assert first.size_bytes == first.path.stat().st_size + weights.stat().st_size
    assert first.sha256 == second.sha256
    assert str(tmp_path) not in first.path.read_text()
    other = OpenVINO().export(captured(nn.Conv2d(3, 4, 3), (3, 8, 8)), tmp_path / "a.int8.xml")
    assert other.sha256 != first.sha256


@installed
def test_a_file_without_its_weights_or_broken_is_refused(tmp_path: Path) -> None:
    artifact = OpenVINO().export(captured(nn.Conv2d(3, 4, 3), (3, 8, 8)), tmp_path / "net.xml")
    weights = tmp_path / "net.bin"
    weights.write_bytes(b"short")
    with pytest.raises(Refused, match=r"cannot compile 'net.xml': Incorrect weights"):
        artifact.load()
    weights.unlink()
    with pytest.raises(Refused, match=r"net.bin' is missing"):
        artifact.load()


@installed
def test_a_failed_row_leaves_neither_file(tmp_path: Path) -> None:
    program = captured(nn.Conv2d(3, 4, 3), (3, 8, 8))
    artifact = OpenVINO().export(program, tmp_path / "net.xml")
    report = SimpleNamespace(rows=[SimpleNamespace(status="failed", path=None)])
    workflow._drop_failed([Export("openvino", "float32", program, artifact)], report)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@installed
def test_a_run_moves_both_files_and_measures_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3)).eval()
    static = QuantizeStatic(calibration=[draw((3, 12, 12), 8, seed) for seed in (1, 2)], calibrator="minmax")
    report = optimize.optimize(
        net, (draw((3, 12, 12), 2, 0),), passes=[optimize.FuseConvBN(), static], targets="openvino", out=tmp_path
    )
    assert [(row.precision, row.status) for row in report.rows] == [("float32", "measured"), ("int8", "measured")]
    names = {path.name for path in tmp_path.iterdir() if path.suffix in (".xml", ".bin")}
    assert names == {f"sequential.{precision}{end}" for precision in ("float32", "int8") for end in (".xml", ".bin")}
    coverage = report.rows[1].coverage
    assert coverage is not None and dict(coverage.kernels)["Pooling@u8"] == 1


class Determinant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.det(x)


@installed
def test_an_operator_that_openvino_lacks_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"No conversion rule found for operations: Det"):
        OpenVINO().export(captured(Determinant(), (3, 3)), tmp_path / "net.xml")
    assert list(tmp_path.iterdir()) == []


@installed
def test_a_plan_without_a_form_here_is_refused(tmp_path: Path) -> None:
    program = captured(nn.Linear(4, 4), (4,))
    program.quantization = Quantization(mode="dynamic", layers=frozenset({"linear"}))
    with pytest.raises(Refused) as caught:
        OpenVINO().export(program, tmp_path / "net.xml")
    assert "--int8=static" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


@installed
def test_a_dynamic_lstm_is_refused_and_runs_in_float(tmp_path: Path) -> None:
    program = references.folded("lstm")
    with pytest.raises(Refused, match="dynamic"):
        OpenVINO().export(QuantizeDynamic().apply(program)[0], tmp_path / "net.xml")
    assert "2 RNNSeq in f32" in OpenVINO().export(program, tmp_path / "net.xml").notes[0]


@installed
def test_a_plan_without_ranges_is_refused(tmp_path: Path) -> None:
    program = quantized(captured(nn.Conv2d(3, 4, 3), (3, 8, 8)), (3, 8, 8))
    assert program.quantization is not None
    program.quantization = dataclasses.replace(program.quantization, ranges={})
    with pytest.raises(Refused, match="No layer can run in INT8 on OpenVINO"):
        OpenVINO().export(program, tmp_path / "net.xml")


def test_without_openvino_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "openvino", None)
    found = find_target("openvino").available()
    assert (found.export, found.run, found.install) == (False, False, "pip install openvino")
    with pytest.raises(TargetUnavailable, match="pip install openvino"):
        OpenVINO().export(captured(nn.Linear(4, 4), (4,)), tmp_path / "net.xml")
    assert list(tmp_path.iterdir()) == []
