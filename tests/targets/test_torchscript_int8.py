"""The TorchScript target in INT8: what runs in integers, how close it stays, and what it says about the rest."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import REFERENCES
from optimize import graph, processor
from optimize.errors import Refused
from optimize.graph import aten
from optimize.passes.quantize_dynamic import QuantizeDynamic
from optimize.processor import Processor
from optimize.targets.torchscript import _of_chance
from optimize.targets.torchscript.kernels import KERNELS
from optimize.targets.torchscript.lowering import lower, pack_dynamic
from tests import references
from tests.nets import sqnr_db
from tests.targets.scripted import (
    TARGET,
    captured,
    draw,
    int8,
    quantized,
    seeded,
)

# Static INT8


LAYERS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module], str]] = {
    "conv1d": ((8, 20), lambda: nn.Conv1d(8, 12, 3, 2, 1, 2), "quantized::conv1d"),
    "strided": ((8, 12, 12), lambda: nn.Conv2d(8, 12, 3, 2, 1), "quantized::conv2d"),
    "dilated": ((8, 12, 12), lambda: nn.Conv2d(8, 12, 3, 1, 2, 2), "quantized::conv2d"),
    "grouped": ((8, 12, 12), lambda: nn.Conv2d(8, 12, 3, groups=4), "quantized::conv2d"),
    "no bias": ((8, 12, 12), lambda: nn.Conv2d(8, 12, 3, bias=False), "quantized::conv2d"),
    "depthwise": ((8, 12, 12), lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8), "quantized::conv2d"),
    "many groups": ((128, 12, 12), lambda: nn.Conv2d(128, 128, 5, padding=2, groups=128), "quantized::conv2d"),
    "conv3d": ((8, 5, 6, 6), lambda: nn.Conv3d(8, 12, 3, 2, 1, groups=2), "quantized::conv3d"),
    "transposed": ((32, 9, 9), lambda: nn.ConvTranspose2d(32, 32, 3, 2, 1), "quantized::conv_transpose2d"),
    "linear": ((8,), lambda: nn.Linear(8, 12), "quantized::linear_with_input_q_dq_qweight_dq_output_fp32"),
    "linear no bias": (
        (5, 8),
        lambda: nn.Linear(8, 12, False),
        "quantized::linear_with_input_q_dq_qweight_dq_output_fp32",
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_one_layer_runs_in_integers(name: str, tmp_path: Path) -> None:
    shape, factory, kernel = LAYERS[name]
    artifact, want, got = int8(captured(lambda net, x: net.f(x), shape, f=seeded(factory)), tmp_path, shape)
    assert artifact.precision == "int8"
    assert artifact.coverage.quantized == ("f",)
    assert artifact.coverage.kernels[kernel] == 1
    assert sqnr_db(want, got) > 30


def test_a_transposed_convolution_whose_kernel_is_wrong_stays_in_float(tmp_path: Path) -> None:
    """oneDNN returns garbage for 8 -> 6 channels; whatever the build does, the answer must be right."""
    layers = {"up": seeded(nn.ConvTranspose2d, 8, 6, 2, 2), "f": seeded(nn.Conv2d, 6, 4, 3)}
    artifact, want, got = int8(captured(lambda net, x: net.f(net.up(x)), (8, 9, 9), **layers), tmp_path, (8, 9, 9))
    paths = {*artifact.coverage.quantized, *(layer.name for layer in artifact.coverage.left_float)}
    assert paths == {"up", "f"}
    assert sqnr_db(want, got) > 25


def test_shared_weights_are_quantized_at_each_use(tmp_path: Path) -> None:
    program = captured(lambda net, x: net.f(F.relu(net.f(x))), (8, 9, 9), f=seeded(nn.Conv2d, 8, 8, 3))
    artifact, want, got = int8(program, tmp_path, (8, 9, 9))
    assert artifact.coverage.kernels["quantized::conv2d"] == 2
    assert sqnr_db(want, got) > 30


# One call of each operator between two convolutions; the second output of a split must be usable as well.
BETWEEN: dict[Any, Callable[[Tensor], Tensor]] = {
    aten.add.Tensor: lambda x: x + F.max_pool2d(x, 3, 1, 1),
    aten.mul.Tensor: lambda x: x * F.hardsigmoid(x),
    aten.cat.default: lambda x: torch.cat([x[:, :4], F.relu(x[:, 4:])], 1),
    aten.hardswish.default: F.hardswish,
    aten.sigmoid.default: torch.sigmoid,
    aten.leaky_relu.default: lambda x: F.leaky_relu(x, 0.1),
    aten.silu.default: F.silu,
    aten.clamp.default: lambda x: x.clamp(-0.5, 0.75),
    aten.relu.default: lambda x: F.relu(F.max_pool2d(x, 2)),
    aten.relu6.default: lambda x: F.relu6(F.max_pool2d(x, 2)),
    aten.hardtanh.default: lambda x: F.hardtanh(x, -0.5, 0.5),
    aten.hardsigmoid.default: F.hardsigmoid,
    aten.tanh.default: torch.tanh,
    aten.max_pool1d.default: lambda x: F.max_pool1d(x.flatten(2), 2)[..., None],
    aten.max_pool2d.default: lambda x: F.max_pool2d(x, 3, 2, 1),
    aten.max_pool3d.default: lambda x: F.max_pool3d(x[:, None], (1, 2, 2)).squeeze(1),
    aten.avg_pool1d.default: lambda x: F.avg_pool1d(x.flatten(2), 2)[..., None],
    aten.avg_pool2d.default: lambda x: F.avg_pool2d(x, 2),
    aten.avg_pool3d.default: lambda x: F.avg_pool3d(x[:, None], (1, 2, 2)).squeeze(1),
    aten.upsample_nearest2d.vec: lambda x: F.interpolate(x, scale_factor=2.0),
    aten.upsample_bilinear2d.vec: lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    aten.constant_pad_nd.default: lambda x: aten.constant_pad_nd.default(x, [1, 2, 0, 1], 0.0),
    aten.pad.default: lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "getitem": lambda x: torch.cat([x.split(4, 1)[1], x.split(4, 1)[0]], 1),
    aten.reshape.default: lambda x: x.reshape(x.shape[0], 8, -1, 2),
    aten.flatten.using_ints: lambda x: x.flatten(2)[..., None],
    aten.permute.default: lambda x: x.permute(0, 1, 3, 2),
    aten.transpose.int: lambda x: x.transpose(2, 3),
    aten.squeeze.dim: lambda x: x[:, None].squeeze(1),
    aten.squeeze.dims: lambda x: x[:, None, :, None].squeeze((1, 3)),
    aten.squeeze.default: lambda x: x.flatten(1)[:, None].squeeze().reshape(x.shape),
    aten.unflatten.int: lambda x: aten.unflatten.int(x, 1, [2, 4]).flatten(1, 2),
    aten.contiguous.default: lambda x: aten.contiguous.default(x.transpose(2, 3)),
    aten.unsqueeze.default: lambda x: x.unsqueeze(1)[:, 0],
    aten.slice.Tensor: lambda x: x[:, :, 1:, ::2],
    aten.select.int: lambda x: x[:, :, 1].unsqueeze(2),
    aten.split.Tensor: lambda x: x.split(8, 1)[0],
    aten.split_with_sizes.default: lambda x: torch.cat(x.split([5, 3], 1), 1),
    aten.chunk.default: lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    aten.unbind.int: lambda x: torch.cat([part[:, None] for part in x.unbind(1)], 1),
    aten.expand.default: lambda x: x[:, :1].expand(-1, 8, -1, -1),
    aten.flip.default: lambda x: x.flip(2),
    aten.pixel_shuffle.default: lambda x: torch.cat([F.pixel_shuffle(x, 2)] * 4, 1),
    aten.channel_shuffle.default: lambda x: aten.channel_shuffle.default(x, 2),
}


def test_every_integer_kernel_has_a_case() -> None:
    import operator

    assert {operator.getitem if key == "getitem" else key for key in BETWEEN} == set(KERNELS)


@pytest.mark.parametrize("operator", BETWEEN, ids=str)
def test_values_stay_integers_through(operator: Any, tmp_path: Path) -> None:
    layers = {"first": seeded(nn.Conv2d, 8, 8, 3, padding=1), "last": seeded(nn.Conv2d, 8, 8, 1)}
    program = captured(lambda net, x: net.last(BETWEEN[operator](net.first(x))), (8, 8, 8), **layers)
    artifact, want, got = int8(program, tmp_path, (8, 8, 8))
    assert artifact.coverage.left_float == ()
    assert artifact.coverage.kernels["aten::quantize_per_tensor"] == 1
    assert artifact.coverage.kernels["aten::dequantize"] == 1
    assert sqnr_db(want, got) > 25


@pytest.mark.parametrize(
    ("clip", "expected"),
    [(F.relu, 0), (F.relu6, 0), (lambda x: x.clamp(min=0), 0), (lambda x: F.hardtanh(x, 0.0, 1.0), 0), (torch.tanh, 1)],
)
def test_a_clip_at_zero_costs_nothing(clip: Callable[[Tensor], Tensor], expected: int, tmp_path: Path) -> None:
    layers = {"first": seeded(nn.Conv2d, 8, 8, 3), "last": seeded(nn.Linear, 8, 8)}
    program = captured(lambda net, x: net.last(clip(net.first(x)).flatten(2).transpose(1, 2)), (8, 8, 8), **layers)
    artifact, want, got = int8(program, tmp_path, (8, 8, 8))
    clips = {"aten::relu", "aten::relu6", "aten::hardtanh", "aten::clamp", "aten::tanh"} & set(
        artifact.coverage.kernels
    )
    assert len(clips) == expected
    assert sqnr_db(want, got) > 30


def test_operators_without_a_kernel_run_in_float_and_say_why(tmp_path: Path) -> None:
    layers = {"first": seeded(nn.Conv2d, 8, 8, 3), "last": seeded(nn.Conv2d, 8, 8, 1)}

    def forward(net: Any, x: Tensor) -> Tensor:
        y = F.gelu(net.first(x))
        return net.last(F.pad(y * 3, (1, 1), value=1.0)).softmax(1)

    artifact, want, got = int8(captured(forward, (8, 8, 8), **layers), tmp_path, (8, 8, 8))
    reasons = {layer.op: layer.reason for layer in artifact.coverage.left_float}
    assert reasons == {
        "gelu": "torch has no integer kernel for it",
        "mul": "an operand is a number, not a tensor",
        "pad": "it pads with a value other than zero",
    }
    assert sqnr_db(want, got) > 30


def test_a_pool_on_a_rank_without_kernel_runs_in_float(tmp_path: Path) -> None:
    layers = {"first": seeded(nn.Conv2d, 8, 8, 3), "last": seeded(nn.Conv2d, 8, 8, 1)}

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.last(F.max_pool2d(net.first(x).flatten(1, 2), 2).unflatten(1, (8, -1)))

    program = captured(forward, (8, 8, 8), **layers)
    artifact, want, got = int8(program, tmp_path, (8, 8, 8))
    assert [layer.reason for layer in artifact.coverage.left_float] == ["the integer kernel takes rank 4 only"]
    assert sqnr_db(want, got) > 30


def test_a_convolution_network_stays_in_integers_from_end_to_end(tmp_path: Path) -> None:
    program = references.folded("resnet")
    inputs = REFERENCES["resnet"].inputs
    coverage = TARGET.export(quantized(program, [inputs(8)]), tmp_path / "net.pt").coverage
    assert coverage is not None
    assert coverage.kernels["aten::quantize_per_tensor"] == coverage.kernels["aten::dequantize"] == 1
    assert "aten::relu" not in coverage.kernels
    assert [layer.op for layer in coverage.left_float] == ["mean"]


def test_only_the_linear_layers_of_a_transformer_read_integers(tmp_path: Path) -> None:
    inputs = REFERENCES["vit"].inputs
    coverage = TARGET.export(quantized(references.captured("vit"), [inputs(8)]), tmp_path / "net.pt").coverage
    assert coverage is not None
    assert "quantized::add" not in coverage.kernels
    left = {(layer.op, layer.reason) for layer in coverage.left_float}
    assert ("layer_norm", "torch has no integer kernel for it") in left
    assert ("add", "only float operators read it") in left


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_spared_linear_layers_of_many_rows_have_bfloat16_where_the_host_is_fast(
    has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processor, "host", lambda: Processor(flags=frozenset({"avx512_bf16"} if has_bfloat16 else ())))
    layers = {"f": seeded(nn.Linear, 8, 8), "g": seeded(nn.Linear, 8, 8), "head": seeded(nn.Linear, 8, 3)}
    program = captured(lambda net, x: net.head(net.g(F.gelu(net.f(x)))[:, 0]), (20, 8), **layers)
    program = quantized(program, [draw(8, 20, 8)])
    assert program.quantization is not None
    names = {graph.origin(node): node.name for node in graph.calls(program.graph, aten.linear.default)}
    plan = program.quantization.without({names["g"]: "it errs", names["head"]: "it errs"})
    program.quantization = dataclasses.replace(plan, spared=frozenset({names["g"], names["head"]}))
    x = draw(4, 20, 8)
    artifact = TARGET.export(program, tmp_path / "net.pt")
    want, got = program.run([x])[0], torch.from_numpy(artifact.load().run([x.numpy()])[0])
    assert artifact.coverage is not None
    reasons = {layer.name: layer.reason for layer in artifact.coverage.left_float if layer.op == "linear"}
    assert reasons == {"g": "it errs; it has bfloat16" if has_bfloat16 else "it errs", "head": "it errs"}
    assert any("bfloat16" in note for note in artifact.notes) == has_bfloat16
    assert got.dtype is torch.float32 and (got - want).abs().max() < 0.05 * want.abs().max()


def test_layers_outside_the_plan_and_recurrent_layers_stay_in_float(tmp_path: Path) -> None:
    layers = {"rnn": seeded(nn.GRU, 6, 8, batch_first=True), "f": seeded(nn.Linear, 8, 8), "g": seeded(nn.Linear, 8, 8)}
    program = captured(lambda net, x: net.g(F.relu(net.f(net.rnn(x)[0]))), (5, 6), **layers)
    plan = quantized(program, [draw(8, 5, 6)])
    assert plan.quantization is not None
    last = max(plan.quantization.layers)
    object.__setattr__(plan.quantization, "layers", plan.quantization.layers - {last})
    coverage = TARGET.export(plan, tmp_path / "net.pt").coverage
    assert coverage is not None and coverage.quantized == ("f",)
    reasons = {layer.name: layer.reason for layer in coverage.left_float}
    assert reasons["g"] == "the quantization plan leaves it in float"
    assert "dynamic INT8 has: --int8=dynamic" in reasons["rnn"]


def test_a_program_without_integer_layers_is_refused(tmp_path: Path) -> None:
    program = captured(lambda net, x: net.f(x), (8,), f=seeded(nn.Linear, 8, 8))
    with pytest.raises(Refused, match="not quantized"):
        lower(program)
    plan = quantized(program, [draw(8, 8)])
    assert plan.quantization is not None
    object.__setattr__(plan.quantization, "layers", frozenset())
    with pytest.raises(Refused, match="leaves it in float"):
        TARGET.export(plan, tmp_path / "net.pt")
    assert not list(tmp_path.iterdir())


def test_int8_notes_say_what_to_pin_and_the_program_is_untouched(tmp_path: Path) -> None:
    program = quantized(captured(lambda net, x: net.f(x), (8,), f=seeded(nn.Linear, 8, 8)), [draw(8, 8)])
    text = program.text()
    artifact = TARGET.export(program, tmp_path / "net.pt")
    assert torch.__version__.split("+")[0] in artifact.notes[0]
    assert "deprecation warning" in artifact.notes[0]
    assert program.text() == text


def test_files_are_made_for_the_engine_of_a_fresh_process(tmp_path: Path) -> None:
    before = torch.backends.quantized.engine
    program = quantized(captured(lambda net, x: net.f(x), (8,), f=seeded(nn.Linear, 8, 8)), [draw(8, 8)])
    try:
        torch.backends.quantized.engine = "qnnpack"
        artifact = TARGET.export(program, tmp_path / "net.pt")
        assert torch.backends.quantized.engine == "qnnpack"
    finally:
        torch.backends.quantized.engine = before
    assert f"engine '{before}'" in artifact.notes[0]


QUANTIZED = torch.ao.nn.quantized
STRAYING: dict[str, tuple[Callable[[], nn.Module], str, bool]] = {
    "a layer": (lambda: QUANTIZED.dynamic.Linear(4, 2), "x", False),
    "no columns": (lambda: QUANTIZED.dynamic.Linear(0, 2), "x", True),
    "bags": (lambda: QUANTIZED.EmbeddingBag(8, 4), "x.long(), x.long()", False),
    "weights": (lambda: QUANTIZED.EmbeddingBag(8, 4), "x.long(), x.long(), x", True),
    "a mapping": (lambda: QUANTIZED.EmbeddingBag(8, 4), "x.long(), x.long(), None, x.int()", True),
}


@pytest.mark.parametrize(("layer", "given", "is_named"), STRAYING.values(), ids=STRAYING)
def test_integer_layers_that_may_give_memory_as_it_was(
    layer: Callable[[], nn.Module], given: str, is_named: bool
) -> None:
    class Network(torch.jit.ScriptModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.jit.script(layer())

    network: Any = Network()
    network.define(f"def forward(self, x):\n    return self.net({given})\n")
    named, *_ = _of_chance(network.eval())
    assert any(name.startswith("quantized::") for name in named) == is_named


# Dynamic INT8


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"bidirectional": True, "num_layers": 2}])
def test_recurrent_layers_run_in_integers(kind: type[nn.Module], options: dict[str, Any], tmp_path: Path) -> None:
    width = 32 if options.get("bidirectional") else 16
    layers = {"rnn": seeded(kind, 12, 16, batch_first=True, **options), "f": seeded(nn.Linear, width, 8)}
    program = captured(lambda net, x: net.f(net.rnn(x)[0]), (7, 12), **layers)
    artifact = TARGET.export(QuantizeDynamic().apply(program)[0], tmp_path / "net.pt")
    assert artifact.precision == "int8-dynamic"
    assert artifact.coverage is not None and set(artifact.coverage.quantized) == {"rnn", "f"}
    runner = artifact.load()
    assert runner.notes == ()
    for batch in (1, 5):
        x = draw(batch, 7, 12, seed=batch)
        assert sqnr_db(program(x), runner(x)) > 30


def test_dynamic_int8_leaves_convolutions_and_projections_in_float(tmp_path: Path) -> None:
    layers = {
        "conv": seeded(nn.Conv1d, 12, 12, 3, padding=1),
        "rnn": seeded(nn.LSTM, 12, 16, batch_first=True, proj_size=8),
        "f": seeded(nn.Linear, 8, 8),
    }
    program = captured(lambda net, x: net.f(net.rnn(net.conv(x).transpose(1, 2))[0]), (12, 7), **layers)
    artifact = TARGET.export(QuantizeDynamic().apply(program)[0], tmp_path / "net.pt")
    assert artifact.coverage is not None and artifact.coverage.quantized == ("f",)
    reasons = {layer.name: layer.reason for layer in artifact.coverage.left_float}
    assert reasons == {
        "conv": "a convolution is slower with ranges taken at run time",
        "rnn": "torch has no integer kernel for a recurrent layer with a projection",
    }


def test_dynamic_packing_refuses_what_is_not_float32() -> None:
    program = captured(lambda net, x: net.f(x.half()).float(), (8,), f=seeded(nn.Linear, 8, 8).half())
    plan, _ = QuantizeDynamic().apply(program)
    assert plan.quantization is not None
    packed, left = pack_dynamic(plan, plan.quantization)
    assert packed == {}
    assert left[0].reason == "its weight is torch.float16, not float32"
