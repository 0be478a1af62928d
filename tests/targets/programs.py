"""Programs for files, and how far these are from them: what the tests of targets share."""

import importlib.util
from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import optimize
from optimize.passes.quantize_static import QuantizeStatic
from optimize.program import Program
from optimize.targets.base import Artifact, Coverage
from tests.nets import sqnr_db

installed = pytest.mark.skipif(
    importlib.util.find_spec("openvino") is None, reason="pip install openvino to write and run its files"
)


def draw(shape: tuple[int, ...], batch: int, seed: int) -> Tensor:
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed))


def quantized(program: Program, shape: tuple[int, ...]) -> Program:
    calibration = [draw(shape, 8, seed) for seed in (1, 2)]
    return QuantizeStatic(calibration=calibration, calibrator="minmax").apply(program)[0]


def captured(net: nn.Module, shape: tuple[int, ...]) -> Program:
    return optimize.capture(net.eval(), (draw(shape, 2, 0),))


def worst_db(artifact: Artifact, program: Program, shape: tuple[int, ...], batches: tuple[int, ...] = (1, 5)) -> float:
    """Return the smallest SQNR over the outputs, over every batch."""
    loaded, worst = artifact.load(threads=1), []
    for batch in batches:
        x = draw(shape, batch, 99)
        outputs = zip(pytree.tree_leaves(program(x)), pytree.tree_leaves(loaded(x)), strict=True)
        worst += [sqnr_db(want, got) for want, got in outputs]
    return min(worst)


def coverage_of(artifact: Artifact) -> Coverage:
    assert artifact.coverage is not None
    return artifact.coverage


def answers(model: ir.Model, *inputs: Tensor) -> list[np.ndarray]:
    """Return the outputs of a model as ONNX's own evaluator computes them."""
    names = [str(value.name) for value in model.graph.inputs]
    feed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
    return list(ReferenceEvaluator(ir.to_proto(model)).run(None, feed))


def operators(model: ir.Model) -> Counter[str]:
    """Return how often each operator stands in a model."""
    return Counter(node.op_type for node in model.graph)
