"""A file says which processors its integers were made for, and answers on others as it says."""

import math
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import optimize
from optimize import processor
from optimize.errors import Refused
from optimize.measure.openers import Opening
from optimize.measure.quality import judge_elsewhere
from optimize.processor import described
from optimize.program import Program
from optimize.registry import find_target
from optimize.report.assemble import _about_processors
from optimize.report.model import Row
from optimize.targets.base import Artifact
from tests.cpus import HAS_VNNI, NEEDS_QEMU, NEEDS_VNNI
from tests.slow import but_slowly

FILES = {"onnx": "net.onnx", "openvino": "net.xml", "torchscript": "net.pt"}


@pytest.fixture(scope="module")
def plain() -> Program:
    """Weights of one sign, all as large, and inputs near the largest: every pair saturates where nothing is done."""
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.1)
    return optimize.capture(net.eval(), (torch.rand(2, 4, 8, 8),))


def made(plain: Program, target: str, cpu: str, path: Path) -> Artifact:
    data = [0.8 + 0.2 * torch.rand(8, 4, 8, 8, generator=torch.Generator().manual_seed(0))]
    program, _ = optimize.QuantizeStatic(calibration=data, cpu=cpu).apply(plain)
    return optimize.export(program, target, path)


@pytest.mark.parametrize(
    ("target", "cpu"),
    [
        pytest.param(target, cpu, marks=[NEEDS_VNNI] * ((target, cpu) == ("torchscript", "vnni")))
        for cpu in ("any", "vnni")
        for target in FILES
    ],
)
def test_a_file_says_it_to_whoever_opens_it(target: str, cpu: str, plain: Program, tmp_path: Path) -> None:
    written = made(plain, target, cpu, tmp_path / FILES[target])
    found = Opening(tmp_path).open(str(written.path))
    assert written.cpu == found.artifact.cpu == cpu and found.kind.endswith(f"INT8 (--cpu {cpu})")
    if target == "torchscript":  # torch reads it as an extra file
        extra = {"optimize.cpu": ""}
        torch.jit.load(written.path, _extra_files=extra)
        assert extra == {"optimize.cpu": cpu.encode()}
    # All weights are as large: 127 alone, 64 each of two that may add up to 128.
    promise = processor.promise(cpu, find_target(target).integers_on, room_bits=math.log2(127 / 64))
    assert found.artifact.sha256 == written.sha256 and promise in written.notes
    floats = optimize.export(plain, target, written.path)
    opened = Opening(tmp_path).open(str(written.path)).artifact
    assert floats.cpu == opened.cpu == "" and found.artifact.is_rounded and not opened.is_rounded
    assert found.artifact.precision == "int8"  # the graph tells it, too, whoever wrote it
    find_target(target).label(written.path, {"cpu": cpu})
    lying = Opening(tmp_path).open(str(written.path))
    assert not lying.artifact.cpu and not lying.artifact.is_rounded and "INT8" not in lying.kind


@pytest.mark.skipif(HAS_VNNI, reason="its kernels are right where there is VNNI")
def test_kernels_of_another_processor_cannot_be_tried_here(plain: Program, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="wrong values for this shape") as refused:
        made(plain, "torchscript", "vnni", tmp_path / "net.pt")
    assert "Make the file on the processor it is for, or give --cpu any" in refused.value.hint


def test_what_is_no_processor_is_not_said(plain: Program, tmp_path: Path) -> None:
    path = made(plain, "onnx", "any", tmp_path / "net.onnx").path
    model = onnx.load(path)
    model.metadata_props[0].value = "\x1b[2Jevery"
    onnx.save(model, path)
    assert Opening(tmp_path).open(str(path)).artifact.cpu == ""


@pytest.mark.parametrize("damage", ["locked", "garbled"])
def test_what_cannot_be_unpacked_is_not_said(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("net/data.pkl", b"")
        archive.writestr("net/extra/optimize.cpu", "any" * 9)
    content = bytearray(path.read_bytes())
    if damage == "locked":
        content[content.rindex(b"PK\1\2") + 8] |= 1
    else:
        content[content.index(b"optimize.cpu") + len("optimize.cpu")] ^= 0xFF
    path.write_bytes(content)
    assert find_target("torchscript").open(path).cpu == ""


def test_a_run_warns_of_what_this_processor_lacks(plain: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "host", lambda: described("flags : fpu avx2"))
    for target, precision, cpu, told in (
        ("onnx", "int8", "vnni", "lacks those instructions"),
        ("torchscript", "bfloat16", "", "no instructions for bfloat16"),
        ("openvino", "int8-bfloat16", "any", "float32 elsewhere"),
    ):
        (found,) = find_target(target).warnings(Artifact(target, Path("f"), (), (), precision, "", 0, "", cpu=cpu))
        assert found.startswith(f"{target} {precision}: ") and told in found


@NEEDS_QEMU
@NEEDS_VNNI
@pytest.mark.parametrize("target", but_slowly(["onnx", "openvino", "torchscript"], {"openvino", "torchscript"}))
def test_only_a_file_for_any_processor_answers_on_all_alike(target: str, plain: Program, tmp_path: Path) -> None:
    original = optimize.export(plain, "onnx", tmp_path / "float.onnx")
    files = [made(plain, target, cpu, tmp_path / f"{cpu}.{FILES[target]}") for cpu in ("any", "vnni")]
    x = np.random.default_rng(1).uniform(0.8, 1, (8, 4, 8, 8)).astype(np.float32)
    found = judge_elsewhere(["avx2"], [original, *files], [([x], None)])
    (here, there), (ours, wrong) = ([each.agreement for each in entry.values()] for entry in found)
    assert here and there and ours and wrong
    assert min(here.sqnr_db, there.sqnr_db, ours.sqnr_db) > 30 and wrong.sqnr_db < 10
    right, other = (_about_processors(Row(target=target, precision="int8", elsewhere=entry)) for entry in found)
    assert not list(right) and "answers otherwise on the processor 'avx2'" in next(other)
