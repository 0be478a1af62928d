"""Nets, calibration and the process that knows nothing but torch: what the tests of the TorchScript target share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optimize.frontend import capture
from optimize.passes.quantize_static import QuantizeStatic
from optimize.program import Program
from optimize.targets.torchscript import TorchScript
from tests.nets import Called

TARGET = TorchScript()
BATCHES = (1, 5)


def draw(batch: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed))


def captured(function: Callable[..., Any], shape: tuple[int, ...], **layers: nn.Module) -> Program:
    return capture(Called(function, **layers).eval(), (draw(3, *shape),))


def seeded(factory: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return factory(*args, **kwargs)


def quantized(program: Program, batches: list[Tensor], **options: Any) -> Program:
    return QuantizeStatic(calibration=batches, **options).apply(program)[0]


def int8(program: Program, path: Path, shape: tuple[int, ...]) -> tuple[Any, Tensor, Tensor]:
    """Exports in static INT8; returns the artifact, and what the program and the file say at batch 5."""
    artifact = TARGET.export(quantized(program, [draw(16, *shape, seed=seed) for seed in (1, 2)]), path / "net.pt")
    x, runner = draw(5, *shape, seed=3), artifact.load()
    assert runner.notes == ()
    return artifact, program(x), runner(x)
