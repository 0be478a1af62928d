"""Shapes of a network of free lengths are constants of its file, where they can be."""

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

import optimize
from optimize.targets.onnx_graph.export import to_onnx
from optimize.targets.onnx_graph.shapes import settle_reshapes


class Heads(nn.Module):
    """Splits tokens into heads and joins them again, as attention does."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.reshape(x.shape[0], x.shape[1], 4, -1).transpose(1, 2).relu()
        return heads.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)


def test_heads_of_free_lengths_are_split_and_joined_by_constants() -> None:
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    model, _ = to_onnx(optimize.capture(Heads(), (x,), dynamic={"x": {1: "tokens"}}))
    shapes = [node.inputs[1] for node in model.graph if node.op_type == "Reshape"]
    found = [ir.convenience.get_const_tensor(shape).numpy().tolist() for shape in shapes]  # type: ignore[union-attr,arg-type]
    assert found == [[0, 0, 4, 2], [0, 0, 8]]
    assert {node.op_type for node in model.graph} == {"Reshape", "Transpose", "Relu"}
    longer = torch.randn(3, 11, 8, generator=torch.Generator().manual_seed(1))
    (got,) = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": longer.numpy()})
    np.testing.assert_array_equal(got, Heads()(longer).numpy())


def reshaping(source: list[int | str], result: list[int | str], allowzero: int = 0) -> ir.Model:
    """Returns a model that takes its shape at run time, with what is known of its sizes."""
    taken, given = (", ".join(map(str, sizes)) for sizes in (source, result))
    return ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["" : 20]>
        agraph (float[{taken}] x, int64[{len(result)}] shape) => (float[{given}] y)
        {{ y = Reshape <allowzero = {allowzero}> (x, shape) }}"""
    )


@pytest.mark.parametrize(
    ("source", "result"),
    [
        (["n", "t", 8], ["m", "u", 8]),  # neither is the input's
        (["n", "t", 8], ["t", "n", 8]),  # they are those of other axes
        (["n", 0], ["n", 0]),
    ],
)
def test_a_shape_that_is_not_known_is_taken_at_run_time(source: list[int | str], result: list[int | str]) -> None:
    model = reshaping(source, result)
    settle_reshapes(model)
    assert next(iter(model.graph)).inputs[1] is model.graph.inputs[1]


def test_a_zero_that_is_no_copy_is_left() -> None:
    model = reshaping(["n", "t", 8], ["n", "t", 8], allowzero=1)
    settle_reshapes(model)
    assert next(iter(model.graph)).inputs[1] is model.graph.inputs[1]


@given(st.lists(st.sampled_from(["n", "t", 2, 3]), min_size=1, max_size=4), st.data())
def test_a_settled_shape_is_the_one_that_was_asked(result: list[int | str], data: st.DataObject) -> None:
    """The input has the sizes of the result, in any order and joined with neighbours."""
    source = data.draw(st.permutations(result))
    sizes = {"n": 5, "t": 7}
    model = reshaping(source, result)
    settle_reshapes(model)
    wanted = np.array([sizes.get(size, size) for size in result])
    x = np.arange(wanted.prod(), dtype=np.float32).reshape([sizes.get(size, size) for size in source])
    (got,) = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x, "shape": wanted})
    np.testing.assert_array_equal(got, x.reshape(wanted))
