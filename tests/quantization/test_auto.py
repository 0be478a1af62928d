"""``auto`` against least squares: as good on ordinary nets, better where clipping does more harm than rounding."""

from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import optimize
from models import REFERENCES
from models.repvgg import fashion_repvgg
from optimize import graph, ops
from optimize.plan import Range
from optimize.progress import heard_by
from optimize.quantization.auto import JUDGED, VALUES, choose_ranges
from optimize.quantization.batches import FlatBatches
from optimize.quantization.calibrate import watch
from optimize.quantization.numerics import USUAL
from optimize.quantization.simulation import simulated_db
from tests import references

MODELS = Path(__file__).parents[2] / "models"
#: What one draw of the rounding does to a decibel figure.
NOISE_DB = 0.7


def quantized(program: optimize.Program, data: torch.Tensor, calibrator: str) -> optimize.Program:
    return optimize.QuantizeStatic(calibration=[data], calibrator=calibrator, rounding="nearest").apply(program)[0]


@pytest.mark.parametrize("name", ["resnet", "mobilenetv3", "vit", "unet"])
def test_auto_is_no_worse_than_least_squares(name: str) -> None:
    reference = REFERENCES[name]
    program = optimize.Pipeline([optimize.FuseConvBN()]).run(references.captured(name, None)).program
    fresh = [(reference.inputs(64, seed=5),)]
    auto, squares = (
        simulated_db(quantized(program, reference.inputs(64, seed=1), rule), fresh, reference=program)
        for rule in ("auto", "mse")
    )
    assert auto >= squares - NOISE_DB


def test_auto_is_no_worse_than_least_squares_on_trained_weights_and_images() -> None:
    net = fashion_repvgg()
    net.load_state_dict(torch.load(MODELS / "fashion_repvgg.pt", weights_only=True))
    calibration, fresh = (
        torch.from_numpy(np.load(MODELS / f"fashion_{part}.npz")["x"][:128]).float() / 255 for part in ("calib", "eval")
    )
    program = optimize.capture(net.eval(), (fresh[:2],))
    program = optimize.Pipeline([optimize.Reparameterize(), optimize.FuseConvBN()]).run(program).program
    figures = {
        rule: simulated_db(quantized(program, calibration, rule), [(fresh,)], reference=program)
        for rule in ("auto", "mse", "minmax")
    }
    assert figures["auto"] >= max(figures["mse"], figures["minmax"]) - NOISE_DB


def test_auto_keeps_everything_where_clipping_is_coherent() -> None:
    """One feature is an outlier that the layer relies on: where it is clipped, the answers are wrong all alike."""
    layer = nn.Linear(4096, 2, bias=False)
    nn.init.constant_(layer.weight, 1.0)
    nn.init.constant_(layer.weight[:, 7], 30.0)
    data = torch.randn(512, 4096)
    data[:16, 7] = 12.0  # one value in 130,000: least squares gives it up
    program = optimize.capture(layer.eval(), (data[:2],))
    batches = FlatBatches(program, [data])
    observations = watch(program, batches, halves=True)
    squares, everything = (observations.ranges(rule, USUAL.activation)["input_1"] for rule in ("mse", "minmax"))
    assert squares.high < 11.9 < everything.high
    chosen = choose_ranges(program, {"linear"}, observations, batches, USUAL.activation)
    assert chosen["input_1"] == everything


def test_auto_is_told_of_and_looks_at_a_few_samples_only() -> None:
    reference, told = REFERENCES["resnet"], []
    program = references.captured("resnet", None)
    batches = FlatBatches(program, [reference.inputs(40)])
    layers = {node.name for node in graph.calls(program.graph, *ops.WEIGHTED)}
    watched = watch(program, batches, halves=True)
    with heard_by(lambda *entry: told.append(entry)):
        chosen = choose_ranges(program, layers, watched, batches, USUAL.activation)
    assert len(told) == sum(map(len, batches.halves(VALUES, *JUDGED))) and told[-1] == ("choose ranges", 1.0)
    rules = [watched.ranges(rule, USUAL.activation) for rule in ("mse", "percentile", "minmax")]
    assert chosen.keys() == watched.values.keys()
    for name, interval in chosen.items():
        least, percentile, everything = (ranges[name] for ranges in rules)
        halfway = Range((least.low + everything.low) / 2, (least.high + everything.high) / 2)
        contenders = (least, percentile, everything, halfway)
        assert any(astuple(interval) == pytest.approx(astuple(each)) for each in contenders)


def test_a_single_sample_leaves_least_squares_in_place() -> None:
    reference = REFERENCES["resnet"]
    program = references.captured("resnet", None)
    batches = FlatBatches(program, [reference.inputs(1)])
    layers = {node.name for node in graph.calls(program.graph, *ops.WEIGHTED)}
    watched = watch(program, batches, halves=True)
    expected: dict[str, Range] = watched.ranges("mse", USUAL.activation)
    assert choose_ranges(program, layers, watched, batches, USUAL.activation) == expected
