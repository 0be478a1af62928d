"""Nets, calibration and the process that knows nothing but torch: what the tests of the TorchScript target share."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optimize.frontend import capture
from optimize.passes.quantize_static import QuantizeStatic
from optimize.program import Program
from optimize.targets.torchscript import TorchScript

TARGET = TorchScript()
BATCHES = (1, 5)
READER = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
for job in json.load(open(sys.argv[1])):
    module, cases = torch.jit.load(job["path"]), torch.load(job["cases"], weights_only=True)
    with torch.inference_mode():
        torch.save([module(*case) for case in cases], job["answers"])
assert "optimize" not in sys.modules
"""


class Net(nn.Module):
    """Runs ``function(self, x)``, with the given layers as attributes."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def draw(batch: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed))


def captured(function: Callable[..., Any], shape: tuple[int, ...], **layers: nn.Module) -> Program:
    return capture(Net(function, **layers).eval(), (draw(3, *shape),))


def seeded(factory: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return factory(*args, **kwargs)


def quantized(program: Program, batches: list[Tensor], **options: Any) -> Program:
    return QuantizeStatic(calibration=batches, **options).apply(program)[0]


def run_fresh(folder: Path, jobs: dict[Path, list[tuple[Tensor, ...]]]) -> list[list[Any]]:
    """Runs saved files in a process that imports nothing but torch; returns the answers of each."""
    listed = []
    for index, (path, cases) in enumerate(jobs.items()):
        job = {"path": str(path), "cases": f"{folder}/cases{index}.pt", "answers": f"{folder}/answers{index}.pt"}
        torch.save(cases, job["cases"])
        listed.append(job)
    (folder / "jobs.json").write_text(json.dumps(listed))
    command = [sys.executable, "-c", READER, str(folder / "jobs.json")]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
    return [torch.load(job["answers"], weights_only=True) for job in listed]


def int8(program: Program, path: Path, shape: tuple[int, ...]) -> tuple[Any, Tensor, Tensor]:
    """Exports in static INT8; returns the artifact, and what the program and the file say at batch 5."""
    artifact = TARGET.export(quantized(program, [draw(16, *shape, seed=seed) for seed in (1, 2)]), path / "net.pt")
    x, runner = draw(5, *shape, seed=3), artifact.load()
    assert runner.notes == ()
    return artifact, program(x), runner(x)
