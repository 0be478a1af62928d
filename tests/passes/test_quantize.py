import pytest
import torch
from torch import nn

import optimize
from models import REFERENCES
from optimize.errors import UsageError
from tests import references


def conv_net() -> optimize.Program:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
    return optimize.capture(net, (torch.rand(2, 1, 8, 8),))


def test_static_learns_a_range_for_every_value() -> None:
    program = conv_net()
    step = optimize.QuantizeStatic(calibration=[torch.rand(8, 1, 8, 8)], rounding="nearest")
    quantized, outcome = step.apply(program)
    plan = quantized.quantization
    assert plan.mode == "static" and plan.layers == {"conv2d", "linear"}
    assert plan.calibration.samples == 8
    assert plan.ranges["relu"].low == 0.0
    assert torch.equal(quantized(program.inputs[0]), program(program.inputs[0])), "the program itself stays in float"
    assert [rewrite.what for rewrite in outcome.rewrites] == ["conv2d to int8", "linear to int8"]


def test_ranges_do_not_depend_on_order_or_batching() -> None:
    data = torch.randn(12, 1, 8, 8)
    program = conv_net()
    plans = [
        optimize.QuantizeStatic(calibration=batches).apply(program)[0].quantization.ranges
        for batches in ([data], list(data.flip(0).split(5)), list(data.split(1)))
    ]
    for name, interval in plans[0].items():
        for other in plans[1:]:
            assert other[name].low == pytest.approx(interval.low, rel=1e-5, abs=1e-6)
            assert other[name].high == pytest.approx(interval.high, rel=1e-5, abs=1e-6)


def test_recurrent_layers_are_reported_by_static_and_convolutions_by_dynamic() -> None:
    lstm = references.captured("lstm", None)
    _, outcome = optimize.QuantizeStatic(calibration=[REFERENCES["lstm"].inputs(4)]).apply(lstm)
    assert any(skip.op == "lstm" and "QuantizeDynamic" in skip.reason for skip in outcome.skips)
    _, outcome = optimize.QuantizeDynamic().apply(lstm)
    assert {rewrite.what for rewrite in outcome.rewrites} == {"lstm to dynamic int8", "linear to dynamic int8"}
    _, outcome = optimize.QuantizeDynamic().apply(conv_net())
    assert [(skip.op, skip.where) for skip in outcome.skips] == [("conv2d", "0")]


def test_the_name_of_a_file_is_no_data() -> None:
    with pytest.raises(UsageError, match="got the text 'x") as caught:
        optimize.QuantizeStatic(calibration="x.npz")
    assert "open_data('x.npz')" in caught.value.hint
