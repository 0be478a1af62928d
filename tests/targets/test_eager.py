"""The eager target: the captured graph, operator by operator, at any batch."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from models import REFERENCES, randomize_batch_norm
from optimize.errors import Refused
from optimize.frontend import capture
from optimize.passes.quantize_dynamic import QuantizeDynamic
from optimize.program import Program
from optimize.targets.eager import Eager

TARGET = Eager()
READER = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
for path in sys.argv[1:]:
    module = torch.export.load(path).module()
    for x, want in torch.load(path + ".cases", weights_only=True):
        with torch.inference_mode():
            (got,) = module(x)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
assert "optimize" not in sys.modules
"""


def reference(name: str) -> Program:
    network = REFERENCES[name].build()
    randomize_batch_norm(network, seed=1)
    return capture(network, (REFERENCES[name].inputs(2),))


def test_every_reference_answers_exactly_here_and_in_a_fresh_process(tmp_path: Path) -> None:
    paths = []
    for name, entry in REFERENCES.items():
        program = reference(name)
        artifact = TARGET.export(program, tmp_path / f"{name}{TARGET.suffix}")
        assert artifact.precision == "float32"
        runner = artifact.load(threads=1)
        cases = [(entry.inputs(batch, seed=batch), program(entry.inputs(batch, seed=batch))) for batch in (1, 5)]
        for x, want in cases:
            torch.testing.assert_close(runner(x), want, rtol=0, atol=0)
        torch.save(cases, f"{artifact.path}.cases")
        paths.append(str(artifact.path))
    subprocess.run([sys.executable, "-c", READER, *paths], cwd=tmp_path, check=True, capture_output=True, timeout=300)


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
    artifact = TARGET.export(reference("resnet"), tmp_path / "net.eager.pt2")
    module = artifact.load().module  # type: ignore[attr-defined]
    assert not module._forward_pre_hooks and not hasattr(module, "_guards_fn")
    assert {node.op for node in module.graph.nodes} <= {"placeholder", "get_attr", "call_function", "output"}


def test_a_quantized_program_is_refused(tmp_path: Path) -> None:
    program, _ = QuantizeDynamic().apply(reference("lstm"))
    with pytest.raises(Refused, match="quantization plan"):
        TARGET.export(program, tmp_path / "net.eager.pt2")
    assert not list(tmp_path.iterdir())


def test_available_and_described_as_a_baseline() -> None:
    availability = TARGET.available()
    assert availability.export and availability.run and availability.version["torch"]
    assert "measuring" in TARGET.summary
