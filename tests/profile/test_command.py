"""``optimize profile`` and ``optimize advise`` as a user types them, in this process."""

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from optimize.advise import advising
from optimize.cli import main
from optimize.profile import artifacts, profiling
from optimize.profile.artifacts import runtime_of
from optimize.profile.machine import measure_limits
from tests.profile.nets import Block

BLOCK = ("tests.profile.nets:Block", "--input-shape", "3,8,8", "-q")


@pytest.fixture(autouse=True, scope="module")
def _machine_is_measured_once() -> Iterator[None]:
    """Lets all commands have the limits of this machine that the first has measured, for two seconds."""
    once = functools.cache(measure_limits)
    with pytest.MonkeyPatch.context() as patch:
        for module in (artifacts, profiling, advising):
            patch.setattr(module, "measure_limits", once)
        yield


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Return the exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["optimize", *map(str, words)])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_a_profile_is_shown_and_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace, out = tmp_path / "trace.json", tmp_path / "out"
    assert run(monkeypatch, "profile", *BLOCK, "--to", "onnx", "--batch", 2, "--trace", trace, "--out", out) == 0
    text = capsys.readouterr().out
    assert "stem.0 + stem.1 + stem.2" in text and "Outside layers" in text and "batch 2" in text
    found = json.loads((out / "profile.json").read_text())["found"]
    assert found["target"] == "onnx" and found["fresh"]["peak_memory_bytes"] > 10**7
    assert json.loads(trace.read_text())["traceEvents"] and (out / "roofline.svg").exists()


def test_a_file_runs_in_its_own_runtime(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import optimize

    program = optimize.capture(Block().eval(), (torch.randn(2, 3, 8, 8),))
    path = optimize.export(program, "onnx", tmp_path / "net.onnx").path
    assert run(monkeypatch, "profile", path, "-q") == 0
    assert "head" in capsys.readouterr().out
    assert run(monkeypatch, "profile", path, "--to", "eager") == 2
    assert "Leave --to" in capsys.readouterr().err
    assert run(monkeypatch, "advise", path) == 2
    assert "the model it was made from" in capsys.readouterr().err


def test_torchscript_that_was_made_here_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its integers are no graph to capture; what somebody scripted himself is one."""
    import optimize

    program = optimize.capture(Block().eval(), (torch.randn(2, 3, 8, 8),))
    quantized = optimize.Pipeline([optimize.QuantizeStatic(calibration=[program.inputs])]).run(program).program
    path = optimize.export(quantized, "torchscript", tmp_path / "net.int8.torchscript.pt").path
    assert run(monkeypatch, "profile", path, "--input-shape", "3,8,8", "-q", "--trust") == 0
    text = capsys.readouterr().out
    assert "torchscript, batch 1" in text and "quantize_per_tensor" in text
    assert run(monkeypatch, "profile", path) == 2
    assert "Give --input-shape" in capsys.readouterr().err
    torch.jit.script(Block()).save(tmp_path / "own.pt")
    assert runtime_of(str(tmp_path / "own.pt")) is None


def test_advice_is_shown_and_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "advise", *BLOCK, "--no-try", "--out", tmp_path / "out") == 0
    text = capsys.readouterr().out
    assert "BatchNorm not folded" in text and "optimize MODEL --fuse" in text and "not tried" in text
    assert (tmp_path / "out" / "advice.html").exists() and (tmp_path / "out" / "advice.json").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("profile", *BLOCK, "--to", "tensorrt"), 2, "cannot be taken on the target 'tensorrt'"),
        (("profile", *BLOCK, "--to", "onx"), 2, "Did you mean 'onnx'?"),
        (("profile", "absent.pt"), 1, "no file 'absent.pt'"),
        (("profile", "absent.onnx"), 1, "no file 'absent.onnx'"),
        (("profile", "tests.nets:Transposed", "-q"), 2, "--input-shape"),
        (("profile", *BLOCK, "--batch", 0), 2, "--batch"),
        (("advise", "absent.pt"), 1, "no file 'absent.pt'"),
    ],
)
def test_bad_input_is_one_paragraph(
    words: tuple[object, ...], code: int, message: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert run(monkeypatch, *words) == code
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize(("target", "package"), [("onnx", "onnxruntime"), ("openvino", "openvino")])
def test_a_missing_runtime_ends_with_code_4(
    target: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert run(monkeypatch, "profile", *BLOCK, "--to", target) == 4
    assert f"pip install {package}" in capsys.readouterr().err
