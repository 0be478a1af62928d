"""Rows of attention that see nothing: zeros, as the module answers, in every file that goes through ONNX."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import optimize
from optimize.targets.onnx_graph.export import to_onnx
from tests.slow import but_slowly
from tests.targets.programs import coverage_of, installed
from tests.targets.test_onnx_attention import LENGTH, Attention, Masked, answer, captured, inputs


class ByKey(Attention):
    """The mask has one row for all queries, and for all heads."""

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:  # type: ignore[override]
        mixed = self.mixed(x, (seen > 0)[:, None, None])
        return self.output(mixed.transpose(1, 2).flatten(2))


class Causal(Attention):
    """Each query sees what came before it, and the first nothing."""

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:  # type: ignore[override]
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1) & (seen > 0)[:, None, None]
        return self.output(self.mixed(x, mask).transpose(1, 2).flatten(2))


class Fixed(Attention):
    """The mask is a constant of two axes, for all samples and heads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:  # type: ignore[override]
        return self.output(self.mixed(x + seen[..., None], self.mask).transpose(1, 2).flatten(2))


class Lowest(Attention):
    """The mask is the lowest number in place of -inf: who sees nothing but such sees all of them alike."""

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:  # type: ignore[override]
        mask = (1 - seen)[:, None, None].expand(-1, 1, LENGTH, LENGTH) * torch.finfo(torch.float32).min
        return self.output(self.mixed(x, mask).transpose(1, 2).flatten(2))


class Bare(Attention):
    """Nothing comes behind the attention: the file answers what it gives."""

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:  # type: ignore[override]
        return self.mixed(x, (seen > 0)[:, None, None])


class Headless(Attention):
    """There are no heads, which the exporter has not."""

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:  # type: ignore[override]
        mask = (seen > 0)[:, None].expand(-1, LENGTH, LENGTH)
        found = functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), mask, scale=0.3)
        return functional.scaled_dot_product_attention(found, self.key(x), self.value(x), is_causal=True)


NETS = [Masked, ByKey, Causal, Fixed, Lowest, Bare, Headless]


@pytest.mark.parametrize(("net", "count"), [*zip(NETS, (1, 1, 1, 1, 0, 1, 1), strict=True), (Attention, 0)])
def test_no_pass_looks_for_nan_and_the_answers_are_the_same(net: type[Attention], count: int) -> None:
    torch.manual_seed(0)
    module, masked = net().eval(), net is not Attention
    model = to_onnx(captured(net, masked))[0]
    kinds = [node.op_type for node in model.graph]
    assert "IsNaN" not in kinds and kinds.count("ReduceMax") == count
    for batch in (2, 1, 4):  # the first sample of each is nothing but padding
        with torch.no_grad():
            want = module(*inputs(batch, masked)).numpy()
        np.testing.assert_allclose(answer(model, inputs(batch, masked)), want, atol=2e-6)


@pytest.mark.parametrize("net", but_slowly(NETS, {Causal, Lowest, Headless}))
def test_files_of_half_precision_answer_so(net: type[Attention], tmp_path: Path) -> None:
    program = captured(net, True)
    half = optimize.CastFP16(calibration=[inputs(4, True)]).apply(program)[0]
    loaded = optimize.export(half, "onnx", tmp_path / "net.onnx").load()
    want, found = program(*inputs(4, True)), loaded(*inputs(4, True)).float()
    assert float((want - found).norm() / want.norm()) < 0.01


@pytest.mark.parametrize("target", ["onnx", "openvino"])
def test_a_constant_mask_of_infinities_stands_beside_layers_in_integers(target: str, tmp_path: Path) -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
            self.register_buffer("mask", torch.full((6, 6), -torch.inf).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.last((y @ y.transpose(1, 2) + self.mask).softmax(-1) @ y)

    torch.manual_seed(1)
    x = torch.randn(32, 6, 8)
    program = optimize.capture(Added().eval(), (x[:2],))
    integers = optimize.QuantizeStatic(calibration=[x]).apply(program)[0]
    found = optimize.export(integers, target, tmp_path / f"net.{'xml' if target == 'openvino' else 'onnx'}").load()
    assert float((found(x) - program(x)).norm() / program(x).norm()) < 0.05


def test_weights_over_another_axis_are_left() -> None:
    class Across(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            weights = torch.softmax(x @ x.transpose(1, 2) + mask, 1)
            return torch.where(torch.isnan(weights), 0.0, weights) @ x

    given = (torch.randn(2, 4, 8), torch.zeros(2, 4, 4).index_fill(1, torch.tensor([1]), -torch.inf))
    model = to_onnx(optimize.capture(Across().eval(), given))[0]
    assert "IsNaN" in [node.op_type for node in model.graph]


@pytest.mark.parametrize("low", [-1e9, -torch.inf])
def test_a_module_that_looks_for_nan_itself_is_left(low: float) -> None:
    class Guarded(nn.Module):
        def forward(self, x: Tensor, seen: Tensor) -> Tensor:
            weights = torch.softmax(x @ x.transpose(1, 2) + torch.where(seen[:, None] > 0, 0.0, low), -1)
            return torch.where(torch.isnan(weights), 0.0, weights) @ x

    net, given = Guarded().eval(), inputs(2, True)
    model = to_onnx(optimize.capture(net, given))[0]
    np.testing.assert_allclose(answer(model, given), net(*given).numpy(), atol=2e-6)


@installed
@pytest.mark.parametrize("int8", but_slowly([False, True], {False}))
@pytest.mark.parametrize("net", NETS)
def test_openvino_answers_so(net: type[Attention], int8: bool, tmp_path: Path) -> None:
    program = captured(net, True)
    if int8:
        data = [inputs(batch, True) for batch in (2, 3, 4)]
        program = optimize.QuantizeStatic(calibration=data).apply(program)[0]
    loaded = optimize.export(program, "openvino", tmp_path / "net.xml").load(threads=1)
    for batch in (4, 1):
        want, found = program(*inputs(batch, True)), loaded(*inputs(batch, True))
        assert float((want - found).norm()) <= (0.05 if int8 else 1e-5) * float(want.norm())


@installed
def test_openvino_stores_tables_in_integers_beside_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(2000, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    words = torch.randint(2000, (32, 6), generator=torch.Generator().manual_seed(1))
    step = optimize.QuantizeStatic(calibration=[words], spare=0.0)
    program = step.apply(optimize.capture(net, (words[:2],)))[0]
    artifact = optimize.export(program, "openvino", tmp_path / "net.xml")
    placed = coverage_of(artifact)
    assert set(placed.quantized) == {"0", "1", "3"} and not placed.left_float
    assert (tmp_path / "net.bin").stat().st_size < 1.1 * 2000 * 64
    want, found = program(words), artifact.load(threads=1)(words)
    assert float((want - found).norm() / want.norm()) < 0.05
