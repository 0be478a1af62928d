"""The pass: one plan for any batching, all calibrators, what it says, and the answers of the file."""

import functools
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

import optimize
from models import REFERENCES
from optimize.data.conform import Batch
from optimize.data.samples import Samples
from optimize.errors import Refused, UsageError
from optimize.progress import heard_by
from optimize.quantization.calibrators import Calibrator
from optimize.quantization.simulation import simulated_db
from optimize.quantization.weights import WeightRounding
from tests import references
from tests.nets import sqnr_db

DATA = torch.randn(100, 3, 32, 32, generator=torch.Generator().manual_seed(2))


class SequenceFirst(nn.Module):
    """Attention as ``nn.MultiheadAttention`` computes it: inside, the batch is axis 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 8, 8)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.embed(x).flatten(2).permute(2, 0, 1)
        return self.head(self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(0))


def captured(name: str = "resnet") -> optimize.Program:
    """Return a network with its BatchNorms folded, nothing of it shared."""
    return _captured(name).clone()


@functools.cache
def _captured(name: str) -> optimize.Program:
    if name == "attention":
        return optimize.capture(SequenceFirst().eval(), (DATA[:2],))
    return optimize.Pipeline([optimize.FuseConvBN()]).run(references.captured(name, None)).program


@pytest.mark.parametrize("name", ["resnet", "attention"])
def test_plan_and_weights_are_the_same_bits_for_any_batching(name: str) -> None:
    program = captured(name)
    found = [optimize.QuantizeStatic(calibration=list(DATA.split(size))).apply(program)[0] for size in (100, 1, 7, 32)]
    weights = [list(each.graph_module.state_dict().values()) for each in found]
    for each, rounded in zip(found[1:], weights[1:], strict=True):
        assert each.quantization.ranges == found[0].quantization.ranges
        assert all(map(torch.equal, rounded, weights[0]))


@pytest.mark.parametrize("calibrator", get_args(Calibrator))
def test_every_calibrator_makes_a_plan_that_answers_well(calibrator: str) -> None:
    program = captured()
    step = optimize.QuantizeStatic(calibration=[DATA], calibrator=calibrator)
    quantized, _ = step.apply(program)
    assert quantized.quantization.calibration.calibrator == calibrator
    assert simulated_db(quantized, [(DATA[:32],)], reference=program) > (15 if calibrator == "average" else 25)


def test_rewrites_say_what_rounding_spared() -> None:
    program = captured()
    _, outcome = optimize.QuantizeStatic(calibration=[DATA], bits=4, alike=True).apply(program)
    assert all(rewrite.what.endswith("% of its rounding error spared") for rewrite in outcome.rewrites)
    assert all("to int4" in rewrite.what for rewrite in outcome.rewrites)


def test_layers_whose_covariances_have_no_room_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    little = functools.partial(WeightRounding, numbers=27**2)
    monkeypatch.setattr("optimize.passes.quantize_static.WeightRounding", little)
    _, outcome = optimize.QuantizeStatic(calibration=[DATA]).apply(captured())
    (note,) = outcome.notes
    assert note.startswith("9 layers have weights rounded to the nearest") and "blocks.0.first.conv" in note
    assert sum("spared" in rewrite.what for rewrite in outcome.rewrites) == 1


def test_the_program_that_was_given_keeps_its_weights() -> None:
    program = captured()
    before = {name: tensor.clone() for name, tensor in program.graph_module.state_dict().items()}
    optimize.QuantizeStatic(calibration=[DATA]).apply(program)
    assert all(torch.equal(before[name], tensor) for name, tensor in program.graph_module.state_dict().items())


def test_progress_is_told_of_every_phase() -> None:
    told: dict[str, list[float]] = {}

    photographs = Samples("photographs", lambda: iter([Batch((DATA,))]))
    with heard_by(lambda phase, share: told.setdefault(phase, []).append(share)):
        quantized, _ = optimize.QuantizeStatic(calibration=photographs).apply(captured())
    assert quantized.quantization.calibration.source == "photographs"
    assert told["choose ranges"][-1] == told["round weights"][-1] == 1.0
    assert all(shares == sorted(shares) for shares in told.values())


def test_settled_ranges_end_the_reading_and_are_as_good() -> None:
    program, repeated = captured(), [DATA[:16]] * 40
    quantized, _ = optimize.QuantizeStatic(calibration=repeated, until_settled=True).apply(program)
    assert quantized.quantization.calibration.samples < 640
    full, _ = optimize.QuantizeStatic(calibration=repeated).apply(program)
    assert quantized.quantization.ranges.keys() == full.quantization.ranges.keys()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"calibrator": "magic"}, "no calibrator 'magic'"),
        ({"rounding": "up"}, "rounding='up'"),
        ({"bits": 1}, "2 to 8 bits"),
        ({"bits": 16}, "2 to 8 bits"),
        ({"calibration": None}, "got NoneType"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        optimize.QuantizeStatic(**{"calibration": [DATA], **options})


def test_a_cache_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(Refused, match="cannot be written"):
        optimize.QuantizeStatic(calibration=[DATA], cache=str(tmp_path / "file")).apply(captured())


def test_ranges_serve_every_target_and_one_alone() -> None:
    program = captured()
    for target in ("onnx", "torchscript", "tensorrt"):
        quantized, _ = optimize.QuantizeStatic(calibration=[DATA], target=target).apply(program)
        assert simulated_db(quantized, [(DATA[:16],)], reference=program) > 25


def test_a_layer_in_another_type_is_left_with_a_reason() -> None:
    net = nn.Sequential(nn.Linear(4, 4)).double().eval()
    program = optimize.capture(net, (torch.randn(2, 4, dtype=torch.float64),))
    quantized, outcome = optimize.QuantizeStatic(calibration=[torch.randn(2, 4, dtype=torch.float64)]).apply(program)
    assert quantized.quantization is None
    assert [skip.reason for skip in outcome.skips] == ["its weight is torch.float64, not float32"]


class Joined(nn.Module):
    """Its biases are computed of weights, as WavLM's are: one is stored in their place when it takes rounding back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = torch.cat([self.first.bias, self.second.bias]).split(32)
        parts = nn.functional.linear(x, self.first.weight, one), nn.functional.linear(x, self.second.weight, other)
        return parts[0] * parts[1]


def test_what_computed_a_bias_leaves_the_plan_with_the_graph() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    (step,) = optimize.Pipeline([optimize.QuantizeStatic(calibration=[x])]).run(optimize.capture(Joined(), (x,))).steps
    assert [entry.where for entry in step.outcome.rewrites] and step.outcome.rewrites[0].what.startswith(
        "linear to int8"
    )


def test_the_deployed_file_is_near_the_float_one(tmp_path: Path) -> None:
    program = captured()
    quantized, _ = optimize.QuantizeStatic(calibration=[DATA]).apply(program)
    fresh = REFERENCES["resnet"].inputs(32, seed=4)
    got = optimize.export(quantized, "onnx", tmp_path / "m.onnx").load(threads=1)(fresh)
    assert sqnr_db(program(fresh), got) > 25
