"""Attention for OpenVINO: three projections of the same numbers, queries and keys in integers, the rest left alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import optimize
from models import REFERENCES
from optimize import graph, ops, processor
from optimize.passes.quantize_static import QuantizeStatic
from optimize.plan import Range
from optimize.processor import Processor
from optimize.program import Program
from optimize.targets.onnx_graph import policy
from optimize.targets.onnx_graph.export import to_onnx
from optimize.targets.onnx_graph.quantize import quantize_onnx
from optimize.targets.openvino import OpenVINO, attention
from optimize.targets.openvino.attention import multiply_integers, separate_projections
from optimize.targets.openvino.rewrites import reduce_integers, scale_products
from tests import references
from tests.cpus import NEEDS_VNNI
from tests.targets.programs import answers, captured, coverage_of, draw, installed, operators, quantized, worst_db

SHAPE = (6, 32)


class SelfAttention(nn.Module):
    """Attention of four heads of eight over a packed projection; ``size`` multiplies queries and keys."""

    def __init__(self, *, bias: bool = True, size: float = 1.0) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(32, 96, bias=bias), nn.Linear(32, 32)
        with torch.no_grad():
            self.project.weight[:64] *= size

    def thirds(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.project(x).unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.out(self.mix(*self.thirds(x)).transpose(1, 2).flatten(2))


class Divided(SelfAttention):
    """Divides the scores by the root of the heads' width, as many transformers write it."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.softmax(query @ key.transpose(-1, -2) / 8**0.5, -1) @ value


class KeysAlone(SelfAttention):
    """Has queries that are the keys, as Reformer has."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.softmax(key @ key.transpose(-1, -2) * 0.35, -1) @ value + query


class Chunks(SelfAttention):
    """Takes the parts first and their heads then, as GPT-2 does."""

    def thirds(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.unflatten(2, (4, 8)).transpose(1, 2) for part in self.project(x).chunk(3, dim=-1))


class Slices(SelfAttention):
    """Cuts the parts out of the columns; the last one goes to the end, wherever that is."""

    def thirds(self, x: Tensor) -> tuple[Tensor, ...]:
        packed = self.project(x)
        parts = packed[..., :32], packed[..., 32:64], packed[..., 64:]
        return tuple(part.unflatten(2, (4, 8)).transpose(1, 2) for part in parts)


class Causal(Chunks):
    """Hides what comes later, for which the exporter asks how long queries and keys are."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class ReadTwice(Chunks):
    """Reads its parts, and quarters of the same columns."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        packed = self.project(x)
        parts = packed[..., :32], packed[..., 32:64], packed[..., 64:]
        thirds = (part.unflatten(2, (4, 8)).transpose(1, 2) for part in parts)
        return self.mix(*thirds), packed.chunk(4, dim=-1)[1].relu()


class Torchs(nn.Module):
    """Torch's own attention, which computes on ``[T, N, C]``."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        with torch.no_grad():
            self.attention.in_proj_weight *= 0.7

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class Gated(SelfAttention):
    """Multiplies thirds that are no attention's, place by place."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.project(x).chunk(3, dim=-1)
        return self.out(first.sigmoid() * second + third)  # type: ignore[no-any-return]


class Unequal(Chunks):
    """Has parts of the columns that are no thirds: one head of keys and values serves all, as in many decoders."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 48)

    def thirds(self, x: Tensor) -> tuple[Tensor, ...]:
        query, key, value = self.project(x).split((32, 8, 8), dim=-1)
        return query.unflatten(2, (4, 8)).transpose(1, 2), key.unsqueeze(1), value.unsqueeze(1)


class Overlapping(SelfAttention):
    """Takes thirds of which two begin at one place."""

    def thirds(self, x: Tensor) -> tuple[Tensor, ...]:
        packed = self.project(x)
        parts = packed[..., :32], packed[..., 32:72], packed[..., 64:]
        return tuple(part[..., :32].unflatten(2, (4, 8)).transpose(1, 2) for part in parts)


class OtherOrder(SelfAttention):
    """Keeps heads before parts: ``[N, T, H, 3 D]`` is no order that thirds of the columns are."""

    def thirds(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.project(x).unflatten(2, (4, 3, 8)).permute(3, 0, 2, 1, 4).unbind(0)


class Windows(SelfAttention):
    """Cuts the tokens into windows behind the projection, which makes another batch of them."""

    def thirds(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.project(x).reshape(-1, 3, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(*self.thirds(x))


class Threes(SelfAttention):
    """Takes every third token for queries: the columns of the projection are not parted."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 32)

    def thirds(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.project(x).reshape(-1, 2, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)


class TwoThirds(SelfAttention):
    """Reads no queries."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(key, key, value)


class Apart(nn.Module):
    """Has a projection each for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        layers = self.query, self.key, self.value
        thirds = [layer(x).unflatten(2, (4, 8)).transpose(1, 2) for layer in layers]
        return self.out(functional.scaled_dot_product_attention(*thirds).transpose(1, 2).flatten(2))


class SumReadToo(SelfAttention):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        packed = self.project(x)
        query, key, value = packed.unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.mix(query, key, value), packed.relu()


class SumReturned(SelfAttention):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        packed = self.project(x)
        query, key, value = packed.unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.mix(query, key, value), packed


class ThirdsReturned(SelfAttention):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        thirds = self.project(x).unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        query, key, value = thirds.unbind(0)
        return self.mix(query, key, value), thirds


class Grid(SelfAttention):
    """Projects an image ``[N, 2, 3, C]`` and only then counts its places as tokens, as SAM does."""

    def thirds(self, x: Tensor) -> tuple[Tensor, ...]:
        packed = self.project(x.unflatten(1, (2, 3)))
        return packed.reshape(-1, 6, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)


def program_of(build: Callable[[], nn.Module]) -> Program:
    torch.manual_seed(0)
    return captured(build(), SHAPE)


def layers_of(program: Program) -> set[str]:
    return {node.name for node in graph.calls(program.graph, *ops.WEIGHTED)}


def products(model: ir.Model) -> list[str]:
    return [str(node.name) for node in model.graph if node.op_type == "MatMul" and node.inputs[1].is_initializer()]  # type: ignore[union-attr]


@pytest.mark.parametrize("build", [SelfAttention, Divided, KeysAlone, Grid, Chunks, Slices, Causal, Torchs])
def test_a_packed_projection_becomes_three_of_the_same_numbers(build: Callable[[], nn.Module]) -> None:
    program = program_of(build)
    model, _ = to_onnx(program)
    batches = [draw(SHAPE, batch, 4) for batch in (2, 1, 7)]
    want = [answers(model, x) for x in batches]
    name, *_ = before = products(model)
    parts = separate_projections(model, layers_of(program))
    assert parts == {f"{name}/keys", f"{name}/values"}
    assert sorted(products(model)) == sorted([*before, *parts]) and len(before) == 2
    assert operators(model)["Split"] == 0
    assert build is Causal or operators(model)["Slice"] == operators(model)["Squeeze"] == 0  # a mask is made of lengths
    for x, wanted in zip(batches, want, strict=True):
        assert all(map(np.array_equal, answers(model, x), wanted))
    ir.passes.common.CheckerPass(full_check=True)(model)


def test_the_names_of_the_thirds_are_kept_so_that_their_ranges_are_found() -> None:
    program = program_of(SelfAttention)
    model, names = to_onnx(program)
    before = set(ir.convenience.create_value_mapping(model.graph))
    thirds = [names[node] for node in ("getitem", "getitem_1", "getitem_2")]
    separate_projections(model, layers_of(program))
    assert set(thirds) <= before & set(ir.convenience.create_value_mapping(model.graph))


@pytest.mark.parametrize(
    "build",
    [
        OtherOrder,
        Windows,
        Threes,
        TwoThirds,
        SumReadToo,
        SumReturned,
        ThirdsReturned,
        Gated,
        Unequal,
        Overlapping,
        ReadTwice,
        lambda: SelfAttention(bias=False),
    ],
)
def test_what_is_no_projection_to_three_alone_is_left_as_it_is(build: Callable[[], nn.Module]) -> None:
    program = program_of(build)
    model, _ = to_onnx(program)
    before, x = operators(model), draw(SHAPE, 3, 4)
    want = answers(model, x)
    assert separate_projections(model, layers_of(program)) == frozenset()
    assert operators(model) == before
    assert all(map(np.array_equal, answers(model, x), want))


def test_thirds_without_an_axis_for_samples_are_left_as_they_are() -> None:
    class OneSample(SelfAttention):
        def thirds(self, x: Tensor) -> tuple[Tensor, ...]:
            packed = self.project(x).unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            return tuple(packed[part : part + 1].squeeze()[None] for part in range(3))

    program = optimize.capture(OneSample().eval(), (draw(SHAPE, 1, 4),), dynamic_batch=False)
    assert separate_projections(to_onnx(program)[0], layers_of(program)) == frozenset()


def test_a_projection_that_stays_in_float_is_left_as_it_is() -> None:
    program = program_of(SelfAttention)
    model, _ = to_onnx(program)
    before = operators(model)
    assert separate_projections(model, layers_of(program) - {"linear"}) == frozenset()
    assert operators(model) == before


def in_integers(program: Program) -> tuple[ir.Model, dict[str, Range]]:
    """Return the graph with its layers in integers and the ranges by value, before attention is looked at."""
    plan = quantized(program, SHAPE).quantization
    assert plan is not None
    model, names = to_onnx(program)
    scale_products(model)
    separate_projections(model, plan.layers)
    quantize_onnx(model, names, plan, policy.OPENVINO)
    return model, {names[node]: known for node, known in plan.ranges.items() if node in names}


def signed(model: ir.Model) -> list[str]:
    """Return the values that are stored as signed integers."""
    stored = [node for node in model.graph if node.op_type == "QuantizeLinear"]
    return sorted(str(node.inputs[0].name) for node in stored if node.outputs[0].dtype == ir.DataType.INT8)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("build", "count"), [(SelfAttention, 2), (Divided, 2), (KeysAlone, 1), (Chunks, 2), (Slices, 2), (Torchs, 2)]
)
def test_queries_and_keys_are_stored_once_as_signed_integers(build: Callable[[], nn.Module], count: int) -> None:
    program = program_of(build)
    model, calibrated = in_integers(program)
    x = draw(SHAPE, 5, 9)
    (float_scores,) = answers(model, x)
    assert multiply_integers(model, calibrated) == 1
    assert len(signed(model)) == count
    (got,) = answers(model, x)
    noise = np.square(got - float_scores).sum() / np.square(float_scores).sum()
    assert 0 < noise < 1e-4
    for node in model.graph:
        if node.op_type == "QuantizeLinear" and node.outputs[0].dtype == ir.DataType.INT8:
            assert not ir.convenience.get_const_tensor(node.inputs[2]).numpy().any()  # type: ignore[union-attr,arg-type]


def test_scores_that_integers_would_move_stay_in_float() -> None:
    """Eight times the queries and keys are 64 times the scores, and their errors."""
    model, calibrated = in_integers(program_of(lambda: SelfAttention(size=8.0)))
    before = operators(model)
    assert multiply_integers(model, calibrated) == 0
    assert operators(model) == before and not signed(model)


def test_the_error_of_a_score_is_about_what_it_is_estimated_to_be() -> None:
    """The rule's figure is a standard deviation: of values a quarter of their range, within 10 %."""
    generator = np.random.default_rng(0)
    width, most = 64, 3.0
    query, key = (generator.normal(0, most / 4, (2000, width)).clip(-most, most) for _ in range(2))
    step = most / 127
    error = (np.rint(query / step) * step * (np.rint(key / step) * step) - query * key).sum(1) * 0.125
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
        agraph (float[n,{width}] q, float[{width},m] k) => (float[n,m] y) <float factor = {{0.125}}>
        {{ s = MatMul(q, k)  t = Mul(s, factor)  y = Softmax(t) }}"""
    product = next(iter(ir.from_onnx_text(text).graph))
    known = [Range(-most, most)] * 2
    assert attention._score_error(product, known) == pytest.approx(error.std(), rel=0.1)
    divided = next(iter(ir.from_onnx_text(text.replace("Mul(s", "Div(s").replace("0.125", "8.0")).graph))
    assert attention._score_error(divided, known) == pytest.approx(attention._score_error(product, known))


def test_products_that_no_softmax_reads_stay_in_float() -> None:
    class Products(SelfAttention):
        def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return torch.relu(query @ key.transpose(-1, -2)) @ value

    model, calibrated = in_integers(program_of(Products))
    assert multiply_integers(model, calibrated) == 0 and not signed(model)


def test_a_query_from_elsewhere_leaves_the_keys_in_float() -> None:
    class Learned(SelfAttention):
        def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(query.relu(), key, value)

    model, calibrated = in_integers(program_of(Learned))
    assert multiply_integers(model, calibrated) == 0 and not signed(model)


def test_keys_of_a_free_length_are_stored_behind_their_heads() -> None:
    """With a scale a head, or OpenVINO would bring the quantization back above the transposition."""
    torch.manual_seed(0)
    program = optimize.capture(Apart().eval(), (draw(SHAPE, 2, 0),), dynamic={"x": {1: "tokens"}})
    model, calibrated = in_integers(program)
    x = draw((11, 32), 3, 9)
    (want,) = answers(model, x)
    assert multiply_integers(model, calibrated) == 1
    stored = [
        node for node in model.graph if node.op_type == "QuantizeLinear" and node.attributes.get_int("axis", 9) == 1
    ]
    assert [node.inputs[0].producer().op_type for node in stored] == ["Transpose"]
    scales = ir.convenience.get_const_tensor(stored[0].inputs[1]).numpy()
    assert scales.shape == (4,) and scales.min() < scales.max() <= 1.001 * scales.min()
    (got,) = answers(model, x)
    assert 0 < np.square(got - want).sum() < 1e-4 * np.square(want).sum()


def order(model: ir.Model) -> list[str]:
    kinds = ("MatMul", "Softmax", "Transpose", "Reshape", "QuantizeLinear")
    return [node.op_type for node in model.graph if node.op_type in kinds]


def test_answers_of_attention_are_stored_before_they_are_reordered() -> None:
    model, _ = in_integers(program_of(SelfAttention))
    x = draw(SHAPE, 5, 9)
    want, before = answers(model, x), order(model)
    assert before[-5:] == ["MatMul", "Transpose", "Reshape", "QuantizeLinear", "MatMul"]
    reduce_integers(model)
    assert order(model)[-5:] == ["MatMul", "QuantizeLinear", "Transpose", "Reshape", "MatMul"]
    assert all(map(np.array_equal, answers(model, x), want))


def test_a_layer_without_bias_is_no_attention() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.columns, self.rows = nn.Linear(32, 32, bias=False), nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.rows(self.columns(x).transpose(1, 2))

    program = QuantizeStatic(calibration=[draw(SHAPE, 8, 1)], rounding="nearest", spare=0).apply(program_of(Mixer))[0]
    model, names = to_onnx(program)
    assert program.quantization is not None
    quantize_onnx(model, names, program.quantization, policy.OPENVINO)
    before = order(model)
    reduce_integers(model)
    assert order(model) == before == ["QuantizeLinear", "MatMul", "Transpose", "QuantizeLinear", "MatMul"]


@NEEDS_VNNI
@installed
@pytest.mark.parametrize("build", [SelfAttention, Divided])
def test_openvino_multiplies_queries_and_keys_as_integers(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    artifact = OpenVINO().export(quantized(program_of(build), SHAPE), tmp_path / "net.xml")
    coverage = coverage_of(artifact)
    assert coverage.quantized == ("project", "out")
    assert coverage.kernels["FullyConnected@u8"] == 4 and coverage.kernels["Subgraph@i8"] == 1
    assert not {"Subgraph@f32", "MatMul@f32", "Transpose@f32", "Split@f32"} & coverage.kernels.keys()
    assert not {layer.name for layer in coverage.left_float} & {"project/keys", "project/values"}


@installed
def test_openvino_multiplies_large_scores_in_float(tmp_path: Path) -> None:
    artifact = OpenVINO().export(quantized(program_of(lambda: SelfAttention(size=8.0)), SHAPE), tmp_path / "net.xml")
    kernels = coverage_of(artifact).kernels
    assert kernels["Subgraph@f32"] == 1 and "Subgraph@i8" not in kernels and kernels["FullyConnected@u8"] == 4


@installed
@pytest.mark.parametrize("name", ["attention", "vit"])
def test_the_file_is_as_near_to_the_program_as_without_the_rewrites(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "attention":
        program, shape = program_of(SelfAttention), SHAPE
        plan = quantized(program, shape)
    else:
        program, shape, plan = references.folded("vit"), REFERENCES["vit"].input_shape, references.int8("vit")
    many = (64,)  # of a few samples the noise that rounding makes differs by 1.5 dB by chance
    found = worst_db(OpenVINO().export(plan, tmp_path / "net.xml"), program, shape, many)
    monkeypatch.setattr(attention, "separate_projections", lambda model, layers: frozenset())
    monkeypatch.setattr(attention, "multiply_integers", lambda model, ranges: 0)
    artifact = OpenVINO().export(plan, tmp_path / "plain.xml")
    assert "Subgraph@i8" not in coverage_of(artifact).kernels
    assert found > worst_db(artifact, program, shape, many) - 1


def spared_program() -> Program:
    """Return attention whose two layers are spared INT8, before a layer that is not."""
    torch.manual_seed(0)
    net = nn.Sequential(SelfAttention(), nn.ReLU(), nn.Linear(32, 32)).eval()
    program = optimize.capture(net, (draw((20, 32), 2, 0),))
    step = QuantizeStatic(calibration=[draw((20, 32), 8, 1)], spare=0)
    return step.apply(program)[0]


@installed
@pytest.mark.parametrize(
    ("spared", "able", "asked"), [(True, True, "bf16"), (True, False, "f32"), (False, True, "f32")]
)
def test_spared_layers_bring_bfloat16_where_the_host_multiplies_it_and_are_integers_elsewhere(
    spared: bool, able: bool, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from openvino import Core

    monkeypatch.setattr(processor, "host", lambda: Processor(flags=frozenset({"avx512_bf16"} if able else ())))
    program = spared_program()
    assert program.quantization is not None
    given = {"linear": "its error is large", "linear_1": "its error is large"}
    plan = program.quantization.without(given)
    program.quantization = replace(plan, spared=frozenset(given) if spared else frozenset())
    artifact = OpenVINO().export(program, tmp_path / "net.xml")
    said = any("Layers spared INT8 run in bfloat16" in note for note in artifact.notes)
    assert said == (asked == "bf16")
    carried = Core().read_model(tmp_path / "net.xml").get_rt_info(["optimize", "inference_precision"])
    assert carried.astype(str) == asked
    assert len(coverage_of(artifact).quantized) == (3 if spared and not able else 1)
    assert worst_db(artifact, program, (20, 32)) > 30
