"""Programs for OpenVINO, and how far its files are from them: what the tests of that target share."""

import importlib.util

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import optimize
from optimize.passes.quantize_static import QuantizeStatic
from optimize.program import Program
from optimize.targets.base import Artifact, Coverage

installed = pytest.mark.skipif(
    importlib.util.find_spec("openvino") is None, reason="pip install openvino to write and run its files"
)


def draw(shape: tuple[int, ...], batch: int, seed: int) -> Tensor:
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed))


def quantized(program: Program, shape: tuple[int, ...], spare: float = 0.06) -> Program:
    calibration = [draw(shape, 8, seed) for seed in (1, 2)]
    return QuantizeStatic(calibration=calibration, calibrator="minmax", spare=spare).apply(program)[0]


def captured(net: nn.Module, shape: tuple[int, ...]) -> Program:
    return optimize.capture(net.eval(), (draw(shape, 2, 0),))


def worst_db(artifact: Artifact, program: Program, shape: tuple[int, ...], batches: tuple[int, ...] = (1, 5)) -> float:
    """Return the smallest SQNR over the outputs, over every batch."""
    loaded, worst = artifact.load(threads=1), []
    for batch in batches:
        x = draw(shape, batch, 99)
        for want, got in zip(pytree.tree_leaves(program(x)), pytree.tree_leaves(loaded(x)), strict=True):
            noise = (want.double() - got.double()).square().sum().clamp_min(1e-300)
            worst.append(float(10 * torch.log10(want.double().square().sum() / noise)))
    return min(worst)


def coverage_of(artifact: Artifact) -> Coverage:
    assert artifact.coverage is not None
    return artifact.coverage
