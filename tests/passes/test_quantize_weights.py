"""Weights alone in integers: which layers, what the program answers then, and what is left with which reason."""

import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimize
from optimize import graph, invariants
from optimize.errors import UsageError
from optimize.passes import QuantizeWeights
from optimize.passes.base import Outcome
from optimize.pipeline import transform
from optimize.program import Program
from optimize.quantization.blocks import read_blocks
from optimize.registry import find_target
from optimize.targets.packaging import _stored
from tests import references
from tests.nets import sqnr_db


class Language(nn.Module):
    """An embedding, an attention layer and a head, which may share the embedding's weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 96)
        self.encoder = nn.TransformerEncoderLayer(96, 4, 128, batch_first=True)
        self.head = nn.Linear(96, 300, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)))


def capture(net: nn.Module, *inputs: Tensor) -> Program:
    return optimize.capture(net.eval(), inputs)


def language(*, tied: bool = False) -> Program:
    """Return the language model captured, nothing of it shared."""
    return _language(tied).clone()


@functools.cache
def _language(tied: bool) -> Program:
    torch.manual_seed(0)
    return capture(Language(tied=tied), torch.randint(0, 300, (2, 7)))


def rounded(program: Program, **options: Any) -> tuple[Program, Outcome]:
    return optimize.QuantizeWeights(**{"smallest": 1, **options}).apply(program)


def reasons(outcome: Outcome) -> dict[str, str]:
    return {skip.where: skip.reason for skip in outcome.skips}


@pytest.mark.parametrize(
    ("bits", "group", "least"), [(8, None, 38), (8, 32, 39), (4, None, 15), (4, 0, 14), (4, 128, 14)]
)
def test_the_program_answers_as_the_integers_do(bits: int, group: int | None, least: float) -> None:
    program = language()
    quantized, outcome = rounded(program, bits=bits, group=group)
    paths = [rewrite.where for rewrite in outcome.rewrites]
    assert paths == ["embed", "encoder.self_attn", "encoder.self_attn", "encoder.linear1", "encoder.linear2", "head"]
    plan = quantized.quantization
    assert plan is not None and (plan.mode, plan.bits) == ("weights", bits)
    assert plan.group == (group if group is not None else {8: 0, 4: 32}[bits])
    assert quantized.precision == f"int{bits}-weights"
    weight = quantized.graph_module.get_parameter("head.weight").detach()
    assert torch.equal(read_blocks(weight, bits, plan.group).weight, weight)
    judged = tokens(4, 0)
    assert least < sqnr_db(program(judged), quantized(judged)) < 80
    invariants.check(quantized)
    quantized.export()


def tokens(samples: int, seed: int) -> Tensor:
    return torch.randint(0, 300, (samples, 7), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [8, 4, 2.5])
def test_data_gives_bits_to_the_weights_that_need_them(bits: float) -> None:
    """On average no more than asked, and answers nearer than those of the same bits for all."""
    program, judged = language(), tokens(64, 9)
    shared, outcome = rounded(program, bits=bits, calibration=[tokens(128, 1)])
    plan = shared.plan
    given = {node.name: plan.bits_of(node.name) for node in shared.graph.nodes if node.name in plan.layers}
    sizes = {node.name: weight_of(shared, node).numel() for node in shared.graph.nodes if node.name in plan.layers}
    spent = sum(given[name] * sizes[name] for name in sizes) / sum(sizes.values())
    assert bits - 0.5 < spent <= bits and (bits == 8) == (len(set(given.values())) == 1)
    for node in shared.graph.nodes:
        if node.name in plan.layers:
            weight = weight_of(shared, node)
            assert torch.equal(read_blocks(weight, given[node.name], plan.group).weight, weight)
    whats = [rewrite.what.split(" to ")[1] for rewrite in outcome.rewrites]
    assert whats == [f"int{of} weights" for of in given.values()]
    assert shared.precision == f"int{bits:g}-weights" and plan.calibration is not None
    assert plan.calibration.samples == 128
    even, _ = rounded(program, bits=int(bits), group=plan.group)
    want = program(judged)
    assert sqnr_db(want, shared(judged)) > sqnr_db(want, even(judged)) + (1.5 if bits < 8 else 0.2)
    invariants.check(shared)
    shared.export()


def test_targets_that_store_no_other_bits_get_those_of_kernels() -> None:
    data = [tokens(64, 1)]
    for bits, whole, shared in ((3, 4, 4), (4, 4, 4), (6, 8, 6), (8, 8, 8)):
        alone, asked = (QuantizeWeights(bits=bits, smallest=0, calibration=given) for given in (None, data))
        assert alone.suited_to("onnx") is alone and asked.suited_to("onnx") is asked
        for target in ("openvino", "torchscript"):
            assert (alone.suited_to(target).bits, asked.suited_to(target).bits) == (whole, shared)
            assert alone.suited_to(target).suited_to(target) == alone.suited_to(target)
    asked = QuantizeWeights(bits=6, smallest=0, calibration=data).suited_to("openvino")
    shared, outcome = asked.apply(language())
    assert {shared.plan.bits_of(name) for name in shared.plan.layers} == {4, 8}
    told = r"Bits by what each weight does to the answers: 4 for \d layers?, 8 for \d layers?\."
    assert re.fullmatch(told, _stored(find_target("openvino"), shared)) and not outcome.notes  # which are warnings


def test_a_run_rounds_once_for_all_targets_that_store_alike() -> None:
    passes = [QuantizeWeights(bits=3, smallest=0)]
    _, packed, whole = transform(language(), passes, ("openvino", "onnx", "torchscript"))
    assert (packed.targets, packed.precision) == (("openvino", "torchscript"), "int4-weights")
    assert (whole.targets, whole.precision) == (("onnx",), "int3-weights")
    (_, alike) = transform(language(), [QuantizeWeights(smallest=0)], ("openvino", "onnx", "torchscript"))
    assert alike.precision == "int8-weights"
    (_, common) = transform(language(), [optimize.QuantizeDynamic()], ("openvino", "onnx"))
    assert common.targets == ()


def weight_of(program: Program, node: Any) -> Tensor:
    weight = graph.constant(program.graph_module, graph.argument(node, "weight"))
    assert weight is not None
    return weight


def test_with_data_a_shared_weight_has_one_number_of_bits() -> None:
    shared, _ = rounded(language(tied=True), bits=4, calibration=[tokens(64, 1)])
    tables = {name for name, tensor in shared.graph_module.named_parameters() if tuple(tensor.shape) == (300, 96)}
    assert len(tables) == 1
    readers = [name for name in shared.plan.layers if name.startswith("embedding")]
    head = [node.name for node in graph.calls(shared.graph, graph.aten.linear.default)][-1]
    assert shared.plan.bits_of(readers[0]) == shared.plan.bits_of(head)


def test_a_shared_weight_stays_shared() -> None:
    quantized, _ = rounded(language(tied=True), bits=4)
    tables = {name for name, tensor in quantized.graph_module.named_parameters() if tuple(tensor.shape) == (300, 96)}
    assert len(tables) == 1


def test_small_weights_are_left_by_default_and_large_ones_taken() -> None:
    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 255))
    _, outcome = optimize.QuantizeWeights().apply(capture(net, torch.rand(2, 256)))
    assert [rewrite.where for rewrite in outcome.rewrites] == ["0"]
    assert reasons(outcome) == {"2": "its weight has 65280 elements, fewer than 65536: little to save"}


class Others(nn.Module):
    """Large weights that no linear layer or embedding reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rnn = nn.Conv1d(8, 8, 3), nn.GRU(8, 8, batch_first=True)
        self.position = nn.Parameter(torch.randn(18, 8))
        self.table = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(self.conv(x).transpose(1, 2))
        return self.head((states + self.position) @ self.table.weight.T @ self.table.weight)


def test_every_other_weight_is_reported_with_a_reason() -> None:
    quantized, outcome = rounded(capture(Others(), torch.randn(2, 8, 20)), bits=4)
    products = ["matmul", "matmul_1"]  # of the table, which stays as it is for nobody else
    assert [rewrite.where for rewrite in outcome.rewrites] == [*products, "head"]
    found = {skip.op: skip.reason for skip in outcome.skips}
    assert "static INT8" in found["conv1d"] and "dynamic INT8" in found["gru"]
    assert found["add"] == "only linear layers and embeddings have kernels for it"
    assert quantized.quantization is not None
    assert len(quantized.quantization.left_float) == len(outcome.skips) == 3


class Awkward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.good, self.broken = nn.Linear(8, 8), nn.Linear(8, 8)
        self.broken.weight.data[0, 0] = float("nan")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        computed = nn.functional.linear(x, x[:8].expand(8, 8) * 2)
        return self.good(x) + computed, self.broken(x)


def test_weights_that_are_not_finite_or_not_there_are_left() -> None:
    program = optimize.capture(Awkward().eval(), (torch.randn(8, 8),), dynamic_batch=False)
    _, outcome = rounded(program, bits=4)
    assert [rewrite.where for rewrite in outcome.rewrites] == ["good"]
    assert {skip.reason for skip in outcome.skips} == {"its weight is not finite", "its weight is computed at run time"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 1}, "bits must be 2 to 8; got 1"),
        ({"bits": 9}, "bits must be 2 to 8; got 9"),
        ({"bits": 2.5}, "2.5 bits are an average, which data shares out"),
        ({"calibration": iter([])}, "re-iterable"),
        ({"group": 48}, "group must be 32, 64, 128 or 0"),
        ({"smallest": -1}, "smallest must not be negative"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        optimize.QuantizeWeights(**options)


def test_a_quantized_program_is_left_alone() -> None:
    program, _ = optimize.QuantizeDynamic().apply(language())
    again, outcome = rounded(program)
    assert again is program and outcome.notes == ("The program is quantized already.",)


@pytest.mark.parametrize(("name", "bits"), [("vit", 8), ("vit", 4), ("lstm", 4)])
def test_references_without_a_threshold(name: str, bits: int) -> None:
    program = references.captured(name, None)
    quantized, outcome = rounded(program, bits=bits)
    assert outcome.rewrites
    invariants.check(quantized)
    quantized.export()
    for batch in (1, 3):
        inputs = program.sample(batch)
        assert sqnr_db(program.run(inputs)[0], quantized.run(inputs)[0]) > (30 if bits == 8 else 10)
    again, second = rounded(quantized, bits=bits)
    assert again is quantized and not second.rewrites


def test_short_rows_that_would_be_filled_up_to_blocks_are_left() -> None:
    """A weight [70000, 1] became 33 times its bytes in blocks of 128, and took as much memory on the way."""
    net = nn.Sequential(nn.Linear(40, 5), nn.Linear(5, 40))
    _, outcome = rounded(capture(net, torch.rand(2, 40)), bits=4)
    assert [rewrite.where for rewrite in outcome.rewrites] == ["0"]
    assert reasons(outcome) == {"1": "its rows have 5 weights each, which blocks take no fewer bytes for"}
