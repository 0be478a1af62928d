"""Attention as one operator in INT8 files: the module's numbers at every batch and mask; other forms are left."""

import functools
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import optimize
from optimize.program import Program
from optimize.targets.onnx.attention import fuse_attention
from optimize.targets.onnx_graph.export import to_onnx
from tests.nets import Called

LENGTH, WIDTH, HEADS = 6, 32, 4


class Attention(nn.Module):
    """Three projections, heads split off the last axis, the mask as `scaled_dot_product_attention` takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (HEADS, WIDTH // HEADS)).transpose(1, 2)

    def mixed(self, x: Tensor, mask: Tensor | None) -> Tensor:
        parts = [self.split(layer(x)) for layer in (self.query, self.key, self.value)]
        return functional.scaled_dot_product_attention(*parts, attn_mask=mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.mixed(x, None).transpose(1, 2).flatten(2))


class Masked(Attention):
    """Padded places are seen by nobody; a sample may be nothing but padding. Two attentions share the mask."""

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:  # type: ignore[override]
        mask = (seen > 0)[:, None, None].expand(-1, 1, x.shape[1], -1)
        for _ in range(2):
            x = self.output(self.mixed(x, mask).transpose(1, 2).flatten(2))
        return x


class Biased(Attention):
    """A finite bias is added to the scores."""

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:  # type: ignore[override]
        return self.output(self.mixed(x, seen[:, None, :, None] * seen[:, None, None]).transpose(1, 2).flatten(2))


class ByKey(Attention):
    """The bias has one row for all queries: not a form that the operator takes."""

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:  # type: ignore[override]
        return self.output(self.mixed(x, seen[:, None, None]).transpose(1, 2).flatten(2))


class OneSample(Attention):
    """All queries look at the keys of one sample, which the operator does not take."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.split(self.query(x)), self.split(self.key(x[:1])), self.split(self.value(x[:1]))
        return functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class Packed(Attention):
    """One projection gives all three, as in most vision transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.all(x).unflatten(2, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4).unbind(0)
        return functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)


def inputs(batch: int, masked: bool) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, LENGTH, WIDTH, generator=generator)
    seen = (torch.arange(LENGTH) < torch.arange(batch)[:, None] * 2).float()
    return (x, seen) if masked else (x,)


@functools.cache
def captured(net: type[nn.Module], masked: bool) -> Program:
    """Return a network of seed 0 captured, for passes and files, which leave it as it is."""
    torch.manual_seed(0)
    return optimize.capture(net().eval(), inputs(4, masked))


def lowered(net: nn.Module, masked: bool, dynamic: str | None = None) -> ir.Model:
    torch.manual_seed(0)
    return to_onnx(optimize.capture(net.eval(), inputs(2, masked), dynamic=dynamic))[0]


def answer(model: ir.Model, given: tuple[Tensor, ...]) -> np.ndarray:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    return session.run(None, {name: x.numpy() for name, x in zip(names, given, strict=True)})[0]


@pytest.mark.parametrize(
    ("net", "masked", "count"), [(Attention(), False, 1), (Masked(), True, 2), (Biased(), True, 1)]
)
def test_it_is_one_operator_with_the_same_answers(net: nn.Module, masked: bool, count: int) -> None:
    model = lowered(net, masked)
    batches = [inputs(batch, masked) for batch in (2, 1, 4)]  # the first sample of each is nothing but padding
    with torch.no_grad():
        want = [net(*given).numpy() for given in batches]
    assert fuse_attention(model) == count
    kinds = [node.op_type for node in model.graph]
    assert kinds.count("MultiHeadAttention") == count and "Softmax" not in kinds and "IsNaN" not in kinds
    assert kinds.count("ReduceMax") == (net.__class__ is Masked)
    for given, wanted in zip(batches, want, strict=True):
        np.testing.assert_allclose(answer(model, given), wanted, atol=2e-6)


@pytest.mark.parametrize(("net", "masked", "count"), [(Attention(), False, 1), (Masked(), True, 2)])
def test_it_is_one_operator_at_any_length(net: nn.Module, masked: bool, count: int) -> None:
    model = lowered(net, masked, "sequence")
    batches = [tuple(x[:, :length] for x in inputs(3, masked)) for length in (LENGTH, 2, LENGTH - 1)]
    assert fuse_attention(model) == count
    for given in batches:
        with torch.no_grad():
            np.testing.assert_allclose(answer(model, given), net(*given).numpy(), atol=2e-6)


@pytest.mark.parametrize(("net", "masked"), [(ByKey(), True), (Packed(), False), (OneSample(), False)])
def test_another_form_is_left(net: nn.Module, masked: bool) -> None:
    model = lowered(net, masked)
    before = [node.op_type for node in model.graph]
    assert fuse_attention(model) == 0
    assert [node.op_type for node in model.graph] == before


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_int8_files_have_it(mode: str, tmp_path: Path) -> None:
    program = captured(Masked, True)
    batches = [inputs(batch, True) for batch in (2, 3, 4)]
    step = optimize.QuantizeStatic(calibration=batches) if mode == "static" else optimize.QuantizeDynamic()
    artifact = optimize.export(step.apply(program)[0], "onnx", tmp_path / "net.onnx")
    assert artifact.coverage is not None and artifact.coverage.kernels["MultiHeadAttention"] == 2
    want, found = program(*inputs(4, True)), artifact.load()(*inputs(4, True))
    assert float((want - found).norm() / want.norm()) < 0.05


def test_a_module_that_is_called_twice_has_it_twice_in_an_int8_file(tmp_path: Path) -> None:
    """As the layers of ALBERT, which are one."""

    torch.manual_seed(0)
    program = optimize.capture(Called(lambda m, x: m.layer(m.layer(x)), layer=Attention()).eval(), inputs(4, False))
    quantized, _ = optimize.QuantizeStatic(calibration=[inputs(3, False)]).apply(program)
    artifact = optimize.export(quantized, "onnx", tmp_path / "net.onnx")
    assert artifact.coverage is not None and artifact.coverage.kernels["MultiHeadAttention"] == 2
