"""ONNX files of the lowest and the highest opset that are written: ONNX Runtime loads them, and they answer."""

from __future__ import annotations

import functools
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import optimize
from models import REFERENCES
from optimize import bounds
from optimize.errors import Refused, UsageError
from optimize.passes import CastBF16, QuantizeDynamic, QuantizeStatic, QuantizeWeights
from optimize.program import Program
from optimize.recipe import parse
from tests import references
from tests.nets import sqnr_db
from tests.slow import but_slowly
from tests.test_cli import NET, Typed

ENDS = (bounds.OPSET.least, bounds.OPSET.most)


@functools.cache
def made(name: str, precision: str) -> Program:
    """Return a network in a precision, once for both opsets."""
    static = QuantizeStatic(calibration=[(REFERENCES[name].inputs(3),)])
    entry = {"int8": static, "int8-dynamic": QuantizeDynamic(), "int4": QuantizeWeights(bits=4)}.get(precision)
    return entry.apply(references.captured(name, 0))[0] if entry else references.captured(name, 0)


def opset_of(path: Path) -> int:
    return next(entry.version for entry in onnx.load(path).opset_import if not entry.domain)


@pytest.mark.parametrize("precision", ["float32", "int8", "int8-dynamic", "int4"])
@pytest.mark.parametrize("opset", ENDS)
@pytest.mark.parametrize("name", but_slowly(["resnet", "vit", "lstm"], {"lstm"}))
def test_the_ends_of_the_range_run(name: str, opset: int, precision: str, tmp_path: Path) -> None:
    program, path = references.captured(name, 0), tmp_path / "net.onnx"
    x = REFERENCES[name].inputs(3)
    optimize.export(made(name, precision), "onnx", path, opset=opset)
    assert opset_of(path) == opset
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    want = program(x)
    found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    assert sqnr_db(want, found) > (110 if precision == "float32" else 25)


def test_without_a_word_it_is_what_most_runtimes_read(tmp_path: Path) -> None:
    assert optimize.export(references.captured("resnet", 0), "onnx", tmp_path / "net.onnx").path.exists()
    assert opset_of(tmp_path / "net.onnx") == 20


@pytest.mark.parametrize("opset", [ENDS[0] - 1, ENDS[1] + 1, 0, -3])
def test_another_is_refused_with_the_range(opset: int, tmp_path: Path) -> None:
    message = rf"{opset} is out of range: the opset may be {ENDS[0]} to {ENDS[1]}"
    with pytest.raises(UsageError, match=message):
        optimize.export(references.captured("resnet", 0), "onnx", tmp_path / "net.onnx", opset=opset)
    with pytest.raises(UsageError, match=message):
        parse({"targets": ["onnx"], "target_options": {"onnx": {"opset": opset}}})


def test_bfloat16_needs_an_opset_that_has_it(tmp_path: Path) -> None:
    program = optimize.capture(nn.Conv2d(3, 4, 3).eval(), (torch.randn(2, 3, 8, 8),))
    half, _ = CastBF16().apply(program)
    with pytest.raises(Refused, match="Opset 18 of ONNX has no convolutions and poolings in bfloat16"):
        optimize.export(half, "onnx", tmp_path / "net.onnx", opset=18)


def test_a_target_without_the_option_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pt2 has no option"):
        optimize.export(references.captured("resnet", 0), "pt2", tmp_path / "net.pt2", opset=18)


def test_the_command_writes_it_and_the_recipe_keeps_it(typed: Typed, tmp_path: Path) -> None:
    done = typed(*NET, "--to", "onnx", "--opset", 18, "--out", tmp_path / "out", "-q")
    assert done.returncode == 0, done.stderr
    assert opset_of(tmp_path / "out" / "net.float32.onnx") == 18
    assert "opset: 18" in (tmp_path / "out" / "recipe.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--to", "openvino", "--opset", 18], "Add --to onnx"), (["--to", "onnx", "--opset", 26], "may be 18 to 25")],
)
def test_what_cannot_be_is_a_sentence(words: list[object], message: str, typed: Typed) -> None:
    done = typed(*NET, *words)
    assert done.returncode == 2 and message in done.stderr
