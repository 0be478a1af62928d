"""Weights in 1, 2 and 4 bits: the bytes, the file's size, and what ONNX Runtime runs of it."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, strategies
from onnx import numpy_helper
from torch import nn

import optimize
from optimize import graph, ops
from optimize.program import Program
from optimize.quantization.grid import quantize_weight
from optimize.quantization.numerics import USUAL, planned
from optimize.quantization.simulation import simulated_db
from optimize.targets.onnx import packing
from optimize.targets.onnx.packing import pack_places, planes_of
from optimize.targets.onnx.runner import import_runtime, keep_optimized, open_session, session_options

#: Of ONNX's operators, those that unpack.
UNPACKING = {"BitShift", "BitwiseAnd", "Cast", "Gather", "Slice"}


@functools.cache
def captured() -> tuple[Program, torch.Tensor]:
    """Return a network of a million weights; its channels are such that none is added for the kernels."""
    torch.manual_seed(0)
    widths = [(4, 16), (16, 160), (160, 256), (256, 256)]
    layers = [(nn.Conv2d(*pair, 3, padding=1), nn.BatchNorm2d(pair[1]), nn.ReLU()) for pair in widths]
    flat = [layer for block in layers for layer in block]
    net = nn.Sequential(*flat, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
    x = torch.randn(4, 4, 6, 6)
    net(x)
    return optimize.capture(net.eval(), (x,)), x


def trained(**options: object) -> tuple[Program, torch.Tensor]:
    program, x = captured()
    return optimize.QuantizeAware(lambda module: module(x), [x], **options).apply(program)[0], x  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_bytes_hold_every_place(bits: int) -> None:
    places = np.random.default_rng(0).integers(0, 2**bits, 1003)
    packed = pack_places(places, bits)
    found = (packed >> (bits * np.arange(8 // bits, dtype=np.uint8))) & (2**bits - 1)
    assert packed.dtype == np.uint8 and len(packed) == -(-1003 * bits // 8)
    assert np.array_equal(found.reshape(-1)[:1003], places)


@given(bits=strategies.integers(1, 7))
def test_planes_are_of_whole_bytes_and_have_as_many_bits_together(bits: int) -> None:
    assert sum(planes_of(bits)) == bits and set(planes_of(bits)) <= {1, 2, 4}


OPTIONS = [
    ({"quantizer": "bwn"}, 1),
    ({"quantizer": "twn"}, 2),
    ({"quantizer": "dorefa", "bits": 2}, 2),
    ({"quantizer": "lsq", "bits": 3, "activation_bits": 4}, 3),
    ({"quantizer": "lsq", "bits": 4, "activation_bits": 4}, 4),
    ({"quantizer": "pact", "bits": 4, "activation_bits": 4}, 4),
]


@pytest.mark.parametrize(
    "options, bits",
    [pytest.param(*each, id=str(each[0]), marks=[pytest.mark.slow] * (each in OPTIONS[1::2])) for each in OPTIONS],
)
def test_the_file_is_small_and_runs_in_integers_as_if_it_were_not(
    options: dict[str, object], bits: int, tmp_path: Path
) -> None:
    program, _ = trained(**options)
    path = tmp_path / "net.onnx"
    artifact = optimize.export(program, "onnx", path)
    assert artifact.precision == f"int{bits}" and artifact.coverage is not None
    assert f"Weights of {bits} bits are stored in {bits} and become INT8" in " ".join(artifact.notes)
    assert not artifact.coverage.left_float and len(artifact.coverage.quantized) == 5

    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    inner = [array for name, array in stored.items() if name.endswith("bits") and array.size > 100]
    counts = [weight.numel() for weight in _weights(program).values()]
    assert sum(array.size for array in inner) == sum(-(-count * bits // 8) for count in counts[1:-1])
    rest = counts[0] + counts[-1] + sum(8 * layer.shape[0] for layer in _weights(program).values())
    assert path.stat().st_size <= 1.1 * (bits / 8 * sum(counts[1:-1]) + rest)

    options_ = session_options(import_runtime(), threads=1)
    keep_optimized(options_, tmp_path / "run.onnx")
    open_session(import_runtime(), str(path), options_)
    run = onnx.load(tmp_path / "run.onnx").graph
    kernels = Counter(node.op_type for node in run.node)
    assert not kernels.keys() & UNPACKING
    assert kernels["QLinearConv"] == 4 and kernels["QGemm"] == 1 and kernels["DequantizeLinear"] == 0


def _weights(program: Program) -> dict[str, torch.Tensor]:
    found = {}
    for node in graph.calls(program.graph, *ops.WEIGHTED):
        weight = graph.constant(program.graph_module, graph.argument(node, "weight"))
        assert weight is not None
        found[node.name] = weight
    return found


def test_what_is_opened_holds_the_weights_that_were_trained(tmp_path: Path) -> None:
    program, _ = trained(quantizer="dorefa", bits=4)
    path = tmp_path / "net.onnx"
    optimize.export(program, "onnx", path)
    options = session_options(import_runtime(), threads=1)
    options.graph_optimization_level = import_runtime().GraphOptimizationLevel.ORT_ENABLE_BASIC
    keep_optimized(options, tmp_path / "run.onnx")
    open_session(import_runtime(), str(path), options)
    arrays = [numpy_helper.to_array(tensor) for tensor in onnx.load(tmp_path / "run.onnx").graph.initializer]
    for name, weight in list(_weights(program).items())[1:-1]:
        integers, _ = quantize_weight(weight, planned(USUAL.weight, program.plan, name))
        held = [array for array in arrays if array.dtype == np.int8 and array.size == integers.numel()]
        assert any(np.array_equal(array.reshape(integers.shape), 4 * integers.numpy()) for array in held), name


@pytest.mark.parametrize("bits, share", [(4, 0.66), (5.5, 0.78)])
def test_calibrated_weights_share_few_bits_by_what_they_do_to_the_answers(
    bits: float, share: float, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(8, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3, groups=8), nn.ReLU(), nn.Conv2d(64, 128, 3))
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 128)).eval()
    x = torch.randn(80, 8, 9, 9)
    with torch.no_grad():
        net[2].weight[:, 0] *= 12  # most of its integers are small ones
    program, seen, others = optimize.capture(net, (x[:2],)), [x[:72]], (x[72:],)
    made = {
        name: optimize.QuantizeStatic(seen, bits=of, alike=alike).apply(program)[0]
        for name, of, alike in (("int8", 8, False), ("shared", bits, False), ("alike", int(bits), True))
    }
    answers = {name: simulated_db(each, [others], reference=program) for name, each in made.items()}
    assert answers["alike"] + 1 < answers["shared"] < answers["int8"] + 0.5
    plan = made["shared"].plan
    sizes = {name: weight.numel() for name, weight in _weights(program).items()}
    assert sum(plan.bits_of(name) * size for name, size in sizes.items()) <= bits * sum(sizes.values())
    files = {name: optimize.export(each, "onnx", tmp_path / f"{name}.onnx") for name, each in made.items()}
    assert files["shared"].precision == f"int{bits:g}"
    assert f"{bits:g} bits on average (" in " ".join(files["shared"].notes)
    assert files["shared"].path.stat().st_size < share * files["int8"].path.stat().st_size
    assert files["shared"].coverage == files["int8"].coverage


def test_small_weights_are_stored_as_one_and_nothing_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(32, 32, 3), nn.BatchNorm2d(32), nn.ReLU())]
    net, x = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, 33)), torch.randn(8, 32, 10, 10)
    net(x)
    program = optimize.capture(net.eval(), (x,))
    program, _ = optimize.QuantizeAware(lambda module: module(x), [x], bits=4, ends=0).apply(program)
    small = optimize.export(program, "onnx", tmp_path / "small.onnx")
    monkeypatch.setattr(packing, "_TOGETHER", 0)
    monkeypatch.setattr(packing, "_leave_out_known", lambda model: None)
    plain = optimize.export(program, "onnx", tmp_path / "plain.onnx")
    nodes = [Counter(node.op_type for node in onnx.load(made.path).graph.node) for made in (small, plain)]
    assert [found["BitShift"] for found in nodes] == [1, 4] and nodes[0]["Split"] == 1 and nodes[0]["Mul"] == 4
    assert small.path.stat().st_size < 0.95 * plain.path.stat().st_size
    assert small.coverage == plain.coverage
    want, got = (made.load(threads=1).run([x.numpy()])[0] for made in (plain, small))
    assert np.array_equal(want, got)


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_a_channel_of_hardly_any_weight_keeps_its_bias(bits: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3)).eval()
    with torch.no_grad():
        net[0].weight[:2] *= 1e-7
        net[0].bias[:2] = torch.tensor([3.0, 1.5])
    x = torch.randn(80, 8, 9, 9)
    program = optimize.QuantizeStatic([x], bits=bits, alike=True).apply(optimize.capture(net, (x[:2],)))[0]
    artifact = optimize.export(program, "onnx", tmp_path / "net.onnx")
    want, got = program(x).numpy(), artifact.load(threads=1).run([x.numpy()])[0]
    assert np.square(want - got).sum() < 0.01 * np.square(want).sum()


def test_targets_that_would_store_eight_bits_are_given_them() -> None:
    step = optimize.QuantizeStatic([torch.randn(4, 3)], bits=5)
    assert step.suited_to("onnx") is step and step.suited_to("openvino").bits == 8


def test_an_odd_number_of_weights_is_cut_to_what_it_was(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(16, 35), nn.ReLU(), nn.Linear(35, 39), nn.ReLU(), nn.Linear(39, 4))
    x, answers = torch.randn(64, 16), list[torch.Tensor]()
    program = optimize.capture(net.eval(), (x,))
    step = optimize.QuantizeAware(lambda module: answers.append(module(x).detach()), [x], quantizer="twn")
    artifact = optimize.export(step.apply(program)[0], "onnx", tmp_path / "net.onnx")
    assert "Slice" in {node.op_type for node in onnx.load(artifact.path).graph.node}
    found = torch.from_numpy(artifact.load(threads=1).run([x.numpy()])[0])
    assert float((found - answers[0]).abs().max()) < 0.02 * float(answers[0].abs().max())


def test_other_runtimes_say_that_they_store_eight_bits(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(16, 16)).eval()
    x = torch.randn(4, 16)
    program = optimize.QuantizeStatic([x], bits=4, alike=True).apply(optimize.capture(net, (x,)))[0]
    artifact = optimize.export(program, "torchscript", tmp_path / "net.pt")
    assert "Its weights have 4 bits and are stored in 8, which it computes with." in artifact.notes
