"""The keys of attention in one transposition: the same numbers at every batch, and other shapes left as they are."""

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import optimize
from optimize.errors import Refused
from optimize.targets.onnx_graph import export
from optimize.targets.onnx_graph.attention import transpose_keys
from tests.targets.programs import answers, operators


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v)


class Causal(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        split = self.project(x).unflatten(2, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(*split.unbind(0))


def draw(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def unwritten(net: nn.Module, inputs: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch) -> ir.Model:
    """Return a network as the exporter writes it, its keys not yet rewritten."""
    torch.manual_seed(0)
    program = optimize.capture(net.eval(), inputs)
    with monkeypatch.context() as patched:
        patched.setattr(export, "transpose_keys", lambda model: None)
        return export.to_onnx(program)[0]


@pytest.mark.parametrize(
    ("net", "shapes"),
    [
        (Attention(), [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)]),
        (Causal(), [(2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8)]),
        (SelfAttention(), [(2, 6, 16)]),
    ],
)
def test_keys_are_transposed_in_one_step_to_the_same_numbers(
    net: nn.Module, shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = unwritten(net, draw(*shapes), monkeypatch)
    before = operators(model)
    batches = [draw(*((batch, *shape[1:]) for shape in shapes)) for batch in (2, 1, 5)]
    want = [answers(model, *inputs) for inputs in batches]
    transpose_keys(model)
    after = operators(model)
    assert before["Reshape"] - after["Reshape"] == 2 and before["Transpose"] == after["Transpose"]
    assert before["Concat"] - after["Concat"] == 2 and after["Slice"] < before["Slice"]
    for inputs, wanted in zip(batches, want, strict=True):
        assert all(map(np.array_equal, answers(model, *inputs), wanted))
    ir.passes.common.CheckerPass(full_check=True)(model)


def test_the_transposition_keeps_name_origin_and_a_known_shape() -> None:
    model, _ = export.to_onnx(optimize.capture(SelfAttention().eval(), draw((2, 6, 16))))
    (keys,) = [node for node in model.graph if list(node.attributes.get_ints("perm", [])) == [0, 1, 3, 2]]
    shape = keys.outputs[0].shape
    assert shape is not None and list(shape)[1:] == [4, 4, 6]
    assert str(keys.name).startswith("scaled_dot_product_attention/")
    assert keys.metadata_props[export.ORIGIN] == "scaled_dot_product_attention"


def test_two_attentions_are_both_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw((2, 6, 16))
    model = unwritten(Two(), inputs, monkeypatch)
    want = answers(model, *inputs)
    transpose_keys(model)
    assert operators(model)["Shape"] == 0
    assert all(map(np.array_equal, answers(model, *inputs), want))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SelfAttention(), SelfAttention()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


#: Keys of a free batch and length, as the exporter writes them; in braces what a test changes.
TEXT = """
<ir_version: 10, opset_import: ["" : 20]>
agraph (float[batch,3,length,4] x) => (float[a,b,c,d] y{outputs})
<int64[1] zero = {{0}}, int64[1] two = {{2}}, int64[1] three = {{3}}, int64[1] four = {{4}}, int64[1] rest = {{-1}}>
{{
    shape = Shape(x)
    outer = Slice(shape, zero, two)
    rows = Slice(shape, {rows})
    columns = Slice(shape, three, four)
    flat = Concat<axis = 0>(rest, {flat})
    whole = Concat<axis = 0>(outer, {back})
    stack = Reshape(x, flat)
    turned = Transpose<perm = {perm}>(stack)
    y = Reshape(turned, whole)
    {also}
}}
"""
PLAIN = {
    "outputs": "",
    "rows": "two, three",
    "flat": "rows, columns",
    "back": "columns, rows",
    "perm": "[0, 2, 1]",
    "also": "",
}


def written(**changes: str) -> ir.Model:
    return ir.from_onnx_text(TEXT.format(**PLAIN | changes))


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("length", [3, 4])
def test_free_lengths_stay_free(batch: int, length: int) -> None:
    inputs = draw((batch, 3, length, 4))
    model = written()
    (want,) = answers(model, *inputs)
    transpose_keys(model)
    assert operators(model) == {"Transpose": 1}
    assert np.array_equal(answers(model, *inputs)[0], want)
    assert np.array_equal(want, inputs[0].transpose(2, 3).numpy())


@pytest.mark.parametrize(
    "changes",
    [
        {"perm": "[1, 0, 2]"},
        {"perm": "[2, 0, 1]"},
        {"back": "rows, columns"},  # the same data in another order: no transposition of the last axes
        {"flat": "columns, rows"},
        {"rows": "three, four", "back": "columns, columns"},  # not the two last axes
        {"rows": "two, three, zero, rest"},  # a slice that runs backwards, or none: with steps
        {"also": "z = Neg(stack)", "outputs": ", float[e,f,g] z"},
        {"also": "z = Neg(turned)", "outputs": ", float[e,f,g] z"},
    ],
)
def test_any_other_form_is_left_alone(changes: dict[str, str]) -> None:
    model = written(**changes)
    before = operators(model)
    transpose_keys(model)
    assert operators(model) == before


def test_the_lengths_of_another_value_are_no_lengths_of_this_one() -> None:
    text = TEXT.format(**PLAIN).replace("float[batch,3,length,4] x", "float[batch,3,length,4] x, float[h,i,j,k] w")
    model = ir.from_onnx_text(text.replace("Shape(x)", "Shape(w)"))
    before = operators(model)
    transpose_keys(model)
    assert operators(model) == before


def test_a_transposition_of_three_axes_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Products(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.transpose(1, 2).reshape(-1, 8, 5).transpose(1, 2).transpose(1, 2)

    model = unwritten(Products(), draw((2, 5, 8)), monkeypatch)
    before = operators(model)
    transpose_keys(model)
    assert operators(model) == before


def test_attention_of_five_axes_is_refused_in_one_plain_line() -> None:
    program = optimize.capture(Attention().eval(), draw(*3 * [(2, 2, 3, 5, 8)]))
    with pytest.raises(Refused) as caught:
        export.to_onnx(program)
    assert str(caught.value) == "The program cannot be exported to ONNX: only 4D query, key, and value are supported"
