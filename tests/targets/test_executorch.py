"""The ExecuTorch target: float32 files where it is installed, and what it says where it is not."""

import importlib.util
from pathlib import Path

import pytest
import torch

import optimize
from models import REFERENCES
from optimize.errors import Refused, TargetUnavailable
from optimize.targets import executorch
from optimize.targets.executorch import INSTALL, ExecuTorch
from tests import references

installed = pytest.mark.skipif(importlib.util.find_spec("executorch") is None, reason=INSTALL)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(executorch.importlib.util, "find_spec", lambda name: None)
    found = ExecuTorch().available()
    assert (found.export, found.run, found.install) == (False, False, INSTALL)
    with pytest.raises(TargetUnavailable, match="ExecuTorch is not installed") as caught:
        ExecuTorch().export(references.folded("resnet"), tmp_path / "net.pte")
    assert caught.value.hint == INSTALL and not list(tmp_path.iterdir())


def test_the_portable_kernels_are_read_from_the_graph() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (x, 2)))
    assert executorch._placed(graph) == "0 parts of the program run on XNNPACK; on portable kernels: mul."


@installed
@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_files_answer_like_the_program_at_two_batch_sizes(name: str, tmp_path: Path) -> None:
    program = references.folded(name)
    artifact = ExecuTorch().export(program, tmp_path / "net.pte")
    assert "on XNNPACK" in artifact.notes[0] and artifact.size_bytes == (tmp_path / "net.pte").stat().st_size
    runner = artifact.load(threads=1)
    for batch in (1, 5):
        x = REFERENCES[name].inputs(batch, seed=batch)
        torch.testing.assert_close(runner(x), program(x), rtol=1e-4, atol=1e-5)


@installed
def test_quantized_programs_are_refused(tmp_path: Path) -> None:
    step = optimize.QuantizeStatic(calibration=[REFERENCES["resnet"].inputs(4)], calibrator="minmax")
    program, _ = step.apply(references.folded("resnet"))
    with pytest.raises(Refused, match="this one is int8"):
        ExecuTorch().export(program, tmp_path / "net.pte")
