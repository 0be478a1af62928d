"""MACs and bytes, of calls and of whole programs, against figures computed by hand and against what torch counts."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import models
import optimize
from optimize.costs import program_costs
from optimize.program import Program
from tests import nets, references
from tests.profile.nets import attention, block, recurrent


def captured(net: nn.Module, *shape: int) -> Program:
    return optimize.capture(net.eval(), (torch.randn(2, *shape),))


def test_a_residual_block_by_hand() -> None:
    costs = program_costs(block(), 1)
    by_layer = {call.layer: call for call in costs.calls.values()}
    stem, head = by_layer["stem.0"], by_layer["head"]
    assert stem.macs == 16 * 8 * 8 * 3 * 9
    assert stem.parameters == 16 * 3 * 9
    assert stem.read_bytes == 4 * (3 * 8 * 8 + 16 * 3 * 9)
    assert stem.written_bytes == 4 * 16 * 8 * 8
    assert stem.intensity == stem.macs / (stem.read_bytes + stem.written_bytes)
    assert by_layer["body"].macs == 16 * 8 * 8 * 16 * 9
    assert (head.macs, head.parameters) == (16 * 10, 16 * 10 + 10)
    assert costs.macs == 16 * 8 * 8 * 9 * (3 + 16) + 160
    assert by_layer["add"].macs == 0 and by_layer["add"].moved_bytes == 3 * 4 * 16 * 8 * 8


@pytest.mark.parametrize(
    ("net", "shape", "macs"),
    [
        (nn.Conv2d(8, 12, (3, 5), stride=2, groups=4, padding=(1, 2)), (8, 10, 10), 12 * 5 * 5 * 2 * 15),
        (nn.Conv2d(8, 8, 3, groups=8, padding=1), (8, 6, 6), 8 * 6 * 6 * 9),
        (nn.Conv1d(4, 6, 3), (4, 10), 6 * 8 * 4 * 3),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (4, 5, 5), 4 * 5 * 5 * 3 * 9),
        (nn.Linear(7, 3), (4, 7), 4 * 7 * 3),
    ],
    ids=["grouped", "depthwise", "1d", "transposed", "linear"],
)
def test_layers_by_hand(net: nn.Module, shape: tuple[int, ...], macs: int) -> None:
    program = captured(net, *shape)
    assert program_costs(program, 1).macs == macs
    assert program_costs(program, 3).macs == 3 * macs


def test_attention_by_hand() -> None:
    costs = program_costs(attention(), 2)
    found = {call.op: call.macs for call in costs.calls.values() if call.macs}
    assert found == {"linear": 2 * 5 * 16 * 48, "scaled_dot_product_attention": 2 * 2 * 5 * 5 * (8 + 8)}


def test_an_lstm_by_hand() -> None:
    assert program_costs(recurrent(), 1).macs == 7 * 4 * (4 * 6 + 4 * 4)


class Einsum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bij,bkj->bik", x, x)


class Product(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x.transpose(1, 2)


@pytest.mark.parametrize("net", [Einsum(), Product()])
def test_products_of_activations(net: nn.Module) -> None:
    assert program_costs(captured(net, 5, 7), 1).macs == 5 * 5 * 7


@pytest.mark.parametrize("name", ["resnet", "repvgg", "acnet", "diverse_branch", "mobilenetv3", "unet"])
def test_convolutions_as_torch_counts_them(name: str) -> None:
    reference = models.REFERENCES[name]
    net = reference.build()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(reference.inputs(1))
    program = references.captured(name, None)
    assert program_costs(program, 1).macs == counter.get_total_flops() // 2


def test_a_fused_kernel_moves_only_what_crosses_its_border() -> None:
    program = block()
    costs = program_costs(program, 1)
    names = list(costs.calls)
    conv, norm, relu = names[:3]
    maps = 4 * 16 * 8 * 8
    weights = 4 * 16 * 3 * 9
    assert costs.fused_bytes([conv, norm, relu]) == 4 * 3 * 8 * 8 + weights + 4 * 4 * 16 + maps
    assert costs.fused_bytes([conv]) == costs.calls[conv].moved_bytes
    assert costs.fused_bytes(names) < costs.moved_bytes
    assert costs.fused_bytes([names[-1]]) == costs.calls[names[-1]].moved_bytes  # an output leaves


def test_the_program_is_left_as_it_was() -> None:
    program = block()
    before = program.text()
    program_costs(program, 5)
    assert program.text() == before
    program.check()


def test_a_layer_moves_its_input_output_and_weights() -> None:
    stats = captured(nn.Conv2d(3, 8, 3, padding=1), 3, 16, 16).stats()
    assert stats.moved_bytes == 4 * (3 * 16 * 16 + 8 * 16 * 16 + 8 * 3 * 9 + 8)
    assert stats.macs == 8 * 3 * 9 * 16 * 16
    assert (stats.parameters, stats.weight_bytes) == (8 * 3 * 9 + 8, 4 * (8 * 3 * 9 + 8))


def test_what_batch_norm_measures_is_no_parameter() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8, affine=False))
    stats = captured(net, 3, 16, 16).stats()
    assert stats.parameters == sum(weight.numel() for weight in net.parameters()) == 8 * 3 * 9 + 8 + 16
    assert stats.weight_bytes >= 4 * (stats.parameters + 4 * 8)


def test_views_are_free_and_adds_read_twice() -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.transpose(1, 2).reshape(x.shape[0], -1)[:, :6].unsqueeze(1)
            return y + y.relu()

    stats = captured(Doubled(), 3, 4).stats()
    assert stats.moved_bytes == 4 * (2 * 6 + 3 * 6)  # relu reads and writes 6, add reads 6 twice and writes 6


def test_a_value_that_one_call_reads_twice_counts_once() -> None:
    class Squared(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x

    assert captured(Squared(), 5).stats().moved_bytes == 4 * (5 + 5)


def test_a_cast_moves_bytes_of_both_types() -> None:
    class Cast(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.float16)

    assert captured(Cast(), 10).stats().moved_bytes == 4 * 10 + 2 * 10


def test_several_results_count_all() -> None:
    stats = captured(nn.LSTM(4, 8, batch_first=True), 5, 4).stats()
    weights = 4 * 8 * (4 + 8) + 2 * 4 * 8
    states = 2 * 8
    assert stats.macs == 5 * 4 * 8 * (4 + 8)
    zeros = states  # written once, read once
    assert stats.moved_bytes == 4 * (weights + zeros + states + 5 * 4 + 5 * 8 + states)


@pytest.mark.parametrize("name", nets.CASES)
def test_counts_do_not_depend_on_the_batch(name: str) -> None:
    net = nets.build(name)
    two, five = (optimize.capture(net, (torch.zeros(batch, 4, 9, 11),)).stats() for batch in (2, 5))
    assert two == five


def test_a_fixed_batch_counts_one_sample_and_the_weights_once() -> None:
    x = torch.zeros(4, 3, 8, 8)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 5)).eval()
    fixed, free = (optimize.capture(net, (x,), dynamic_batch=dynamic).stats() for dynamic in (False, True))
    assert fixed == dataclasses.replace(free, ops=fixed.ops), "only the arithmetic on sizes differs"


WEIGHT = torch.zeros(6, 6)


@pytest.mark.parametrize(
    ("net", "macs"),
    [
        (nn.RNN(6, 5, batch_first=True), 4 * 5 * (6 + 5)),
        (nn.TransformerEncoderLayer(6, 2, 12, batch_first=True), 4 * (3 * 36 + 36 + 2 * 72) + 2 * 4 * 4 * (3 + 3)),
        (nets.Called(lambda _, x: torch.einsum("...j,jk->...k", x, WEIGHT)), 4 * 36),
        (nets.Called(lambda _, x: torch.einsum("bij,jk,kl->bil", x, WEIGHT, WEIGHT)), 2 * 4 * 36),
        (nets.Called(lambda _, x: torch.tensordot(x, WEIGHT, 1)), 4 * 36),
        (nets.Called(lambda _, x: x @ WEIGHT[0]), 4 * 6),
    ],
    ids=["rnn", "attention", "ellipsis", "three factors", "tensordot", "vector"],
)
def test_statistics_and_costs_count_every_product(net: nn.Module, macs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.opt_einsum, "enabled", False)  # where it is installed, it orders factors anew
    program = captured(net, 4, 6)
    assert program.stats().macs == program_costs(program).macs == macs


@pytest.mark.parametrize(("cell", "gates"), [(nn.RNNCell, 1), (nn.LSTMCell, 4), (nn.GRUCell, 3)])
def test_cells_by_hand(cell: type[nn.Module], gates: int) -> None:
    assert captured(cell(6, 5), 6).stats().macs == gates * 5 * (6 + 5)
