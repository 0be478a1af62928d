"""Engines in a whole run: options from the command and the recipe, the report, and what happens beside a failure."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import optimize
from optimize.cli.run import exit_code, run
from optimize.errors import UsageError
from optimize.measure.worker import artifact_from
from optimize.recipe import parse
from optimize.registry import find_target
from optimize.targets.base import Artifact
from optimize.targets.tensorrt import packages
from tests.targets.tensorrt_orders import rtx
from tests.targets.test_tensorrt import Determinant


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every machine behaves like one without a GPU, so that TensorRT-RTX builds."""
    monkeypatch.setattr(packages, "has_gpu", lambda: False)


@rtx
def test_an_operator_tensorrt_lacks_does_not_stop_the_other_target(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0))
    report = optimize.optimize(Determinant().eval(), (x,), targets=("tensorrt", "onnx"), out=tmp_path)
    engine, onnx = report.rows
    assert (engine.status, onnx.status) == ("failed", "measured")
    assert "Det '" in engine.reason and "TensorRT has no Det" in engine.reason
    assert "What to do: write the layer with other operators" in engine.reason
    assert exit_code(report) == 1
    assert {path.suffix for path in tmp_path.iterdir()} == {".onnx", ".json", ".md", ".html", ".yaml"}


def test_a_missing_package_does_not_stop_the_other_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.Package, "installed", False)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    report = optimize.optimize(net, (torch.zeros(1, 3, 8, 8),), targets=("tensorrt", "onnx"), out=tmp_path)
    engine, onnx = report.rows
    assert (engine.status, onnx.status) == ("not_run", "measured")
    assert "neither TensorRT nor TensorRT-RTX is installed" in engine.reason
    assert "trtexec --onnx=sequential.float32.tensorrt.onnx" in engine.reason
    assert exit_code(report) == 4
    assert (tmp_path / "sequential.float32.tensorrt.onnx").exists()


@rtx
def test_options_reach_the_engine_and_its_layers_the_report(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    chosen = {"tensorrt": {"max_batch": 16, "compute_capabilities": "8.6,8.9"}}
    inputs = (torch.zeros(1, 3, 8, 8),)
    report = optimize.optimize(net, inputs, targets="tensorrt", target_options=chosen, out=tmp_path)
    (row,) = report.rows
    commands = "\n".join(row.notes)
    assert "--maxShapes=input:16x3x8x8 --computeCapabilities=86,89" in commands.replace("input_1", "input")
    (found,) = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert found["layer_types"]["source"] == "parsed network"
    assert [(layer["op"], layer["precision"]) for layer in found["layer_types"]["layers"]] == [
        ("convolution", "float32"),
        ("activation", "float32"),
    ]
    markdown, page = ((tmp_path / f"report.{kind}").read_text() for kind in ("md", "html"))
    assert "| tensorrt float32, parsed network | float32 |" in markdown
    assert "| convolution | 1 |" in markdown
    assert "Layer types" in page and "(convolution): float32" in page


def test_a_recipe_and_the_command_name_options_alike(tmp_path: Path) -> None:
    content = {"targets": ["tensorrt"], "target_options": {"tensorrt": {"compute_capabilities": [8.6, "12.0"]}}}
    target = parse(content).target("tensorrt")
    assert target.compute_capabilities == ("8.6", "12.0")
    assert dataclasses.replace(target, compute_capabilities=()) == find_target("tensorrt")
    assert parse(content).target("onnx") is find_target("onnx")
    words = ["x:y", "--to", "tensorrt", "--out", str(tmp_path)]
    for text, reason in (
        ("tensorrt.max_bach=3", "Did you mean 'max_batch'?"),
        ("tensorrt.max_batch=many", "max_batch = 'many'"),
        ("tensorrt.max_batch=0", "1 <= min_batch <= opt_batch <= max_batch does not hold for [1, 0]"),
        ("eager.threads=3", "the target eager has no options"),
        ("max_batch=3", "not of the form TARGET.OPTION=VALUE"),
    ):
        error = CliRunner().invoke(run, [*words, "--target-option", text]).exception
        assert isinstance(error, UsageError)
        assert reason in str(error)


def test_a_worker_is_told_what_its_runner_is_asked(tmp_path: Path) -> None:
    (tmp_path / "net.engine").write_bytes(b"")
    asked = Artifact("tensorrt", tmp_path / "net.engine", (), (), "float32", "", 0, "", settings={"cuda_graph": True})
    told = json.loads(json.dumps(dataclasses.asdict(asked), default=str))
    assert artifact_from(told).settings == {"cuda_graph": True}
