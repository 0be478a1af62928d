"""The eager target: the captured graph, operator by operator, at any batch."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from optimize.errors import Refused
from optimize.frontend import capture
from optimize.passes.quantize_dynamic import QuantizeDynamic
from optimize.targets.eager import Eager
from tests import references

TARGET = Eager()


@torch.library.custom_op("tests_eager::doubled", mutates_args=())
def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


_doubled.register_fake(torch.empty_like)


def test_structured_outputs_come_back_as_the_module_returned_them(tmp_path: Path) -> None:
    class Heads(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"sum": x + y, "product": x * y}

    program = capture(Heads().eval(), (torch.rand(2, 3), torch.rand(2, 3)))
    artifact = TARGET.export(program, tmp_path / "heads.eager.pt2")
    x, y = np.ones((5, 3), np.float32), np.full((5, 3), 2, np.float32)
    answer = artifact.load()(x, y)
    np.testing.assert_array_equal(answer["sum"], x + y)
    np.testing.assert_array_equal(answer["product"], x * y)


def test_the_loaded_graph_has_no_guards(tmp_path: Path) -> None:
    artifact = TARGET.export(references.captured("resnet"), tmp_path / "net.eager.pt2")
    module = artifact.load().module  # type: ignore[attr-defined]
    assert not module._forward_pre_hooks and not hasattr(module, "_guards_fn")
    assert {node.op for node in module.graph.nodes} <= {"placeholder", "get_attr", "call_function", "output"}


def test_it_is_read_without_torchs_compiler(tmp_path: Path) -> None:
    """Importing that takes a worker longer than all it runs."""
    artifact = TARGET.export(references.captured("resnet"), tmp_path / "net.eager.pt2")
    script = "import json, sys; from optimize.measure.worker import artifact_from; "
    script += "artifact_from(json.loads(sys.argv[1])).load(); print('torch._dynamo' in sys.modules)"
    command = [sys.executable, "-c", script, json.dumps(dataclasses.asdict(artifact), default=str)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["False"], done.stderr


def test_operators_of_others_are_read_by_torch(tmp_path: Path) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _doubled(x) + 1

    artifact = TARGET.export(capture(Net().eval(), (torch.rand(2, 3),)), tmp_path / "net.eager.pt2")
    np.testing.assert_array_equal(artifact.load()(np.ones((5, 3), np.float32)), np.full((5, 3), 3, np.float32))


def test_a_quantized_program_is_refused(tmp_path: Path) -> None:
    program, _ = QuantizeDynamic().apply(references.captured("lstm"))
    with pytest.raises(Refused, match="quantization plan"):
        TARGET.export(program, tmp_path / "net.eager.pt2")
    assert not list(tmp_path.iterdir())


def test_available_and_described_as_a_baseline() -> None:
    availability = TARGET.available()
    assert availability.export and availability.run and availability.version["torch"]
    assert "measuring" in TARGET.summary
