"""Engines on a GPU: built with TensorRT, run, compared with the program; skipped where there is none."""

import importlib.util
from pathlib import Path

import pytest
import torch

import optimize
from models import REFERENCES, randomize_batch_norm
from optimize.passes.cast_half import CastFP16
from optimize.passes.quantize_static import QuantizeStatic
from optimize.program import Program
from optimize.targets.tensorrt import TensorRT, packages
from tests.nets import sqnr_db

pytestmark = [
    pytest.mark.skipif(not packages.has_gpu(), reason="no NVIDIA GPU and driver on this machine"),
    pytest.mark.skipif(importlib.util.find_spec("tensorrt") is None, reason="pip install tensorrt"),
]


def program(name: str, precision: str) -> Program:
    net = REFERENCES[name].build()
    randomize_batch_norm(net, seed=1)
    data = [REFERENCES[name].inputs(8, seed=seed) for seed in (1, 2)]
    passes = {
        "float32": [],
        "float16": [CastFP16(calibration=data)],
        "int8": [QuantizeStatic(calibration=data, target="tensorrt")],
    }[precision]
    captured = optimize.capture(net, (REFERENCES[name].inputs(2),))
    return optimize.Pipeline([optimize.Reparameterize(), optimize.FuseConvBN(), *passes]).run(captured).program


@pytest.mark.parametrize("cuda_graph", [False, True], ids=["kernels", "cuda graph"])
@pytest.mark.parametrize("precision, least_db", [("float32", 45.0), ("float16", 40.0), ("int8", 25.0)])
@pytest.mark.parametrize("name", ["resnet", "mobilenetv3", "vit", "unet"])
def test_an_engine_agrees_with_the_program(
    name: str, precision: str, least_db: float, cuda_graph: bool, tmp_path: Path
) -> None:
    artifact = TensorRT(library="tensorrt", cuda_graph=cuda_graph).export(
        program(name, precision), tmp_path / "e.engine"
    )
    runner, plain = artifact.load(), program(name, "float32")
    for batch in (2, 5, 5, 5, 1):
        x = REFERENCES[name].inputs(batch, seed=batch)
        assert sqnr_db(plain(x).numpy(), runner(x).numpy()) > least_db


def test_the_inspector_lists_int8_layers(tmp_path: Path) -> None:
    artifact = TensorRT(library="tensorrt").export(program("resnet", "int8"), tmp_path / "e.engine")
    assert artifact.layer_types is not None
    assert artifact.layer_types.source == "engine inspector"
    assert sum(layer.precision == "int8" for layer in artifact.layer_types.layers) >= 9
    assert all(layer.name and layer.op for layer in artifact.layer_types.layers)


def test_a_timing_cache_is_filled(tmp_path: Path) -> None:
    cache = tmp_path / "timing.cache"
    TensorRT(library="tensorrt", timing_cache=str(cache)).export(program("resnet", "float32"), tmp_path / "e.engine")
    assert cache.stat().st_size > 0


def test_a_batch_beyond_the_range_is_refused(tmp_path: Path) -> None:
    artifact = TensorRT(library="tensorrt", max_batch=4).export(program("resnet", "float32"), tmp_path / "e.engine")
    with pytest.raises(optimize.OptimizeError, match="the engine takes"):
        artifact.load()(torch.zeros(5, 3, 32, 32))
