"""Half in ONNX files: bfloat16 in and out of ONNX Runtime, the opset, and what a CPU makes of float16."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

import optimize
from models import REFERENCES
from optimize.bench.rounds import put_through
from optimize.measure.fleet import Fleet
from optimize.measure.openers import Opening, open_side
from optimize.measure.subjects import agreed_inputs
from optimize.registry import find_target
from optimize.targets.arrays import element_type
from optimize.targets.base import Artifact, TensorSpec
from optimize.targets.onnx import Onnx
from optimize.targets.onnx.runner import OnnxRunner
from tests import references
from tests.nets import Called


@pytest.fixture
def negation(tmp_path: Path) -> Artifact:
    """A file that takes and gives bfloat16 and computes in float32, which every ONNX Runtime can run."""
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Neg", ["wide"], ["negative"]),
        helper.make_node("Cast", ["negative"], ["y"], to=TensorProto.BFLOAT16),
        helper.make_node("Identity", ["wide"], ["z"]),
    ]
    shape = ["batch", 3]
    graph = helper.make_graph(
        nodes,
        "negation",
        [helper.make_tensor_value_info("x", TensorProto.BFLOAT16, shape)],
        [
            helper.make_tensor_value_info("y", TensorProto.BFLOAT16, shape),
            helper.make_tensor_value_info("z", TensorProto.FLOAT, shape),
        ],
    )
    path = tmp_path / "negation.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    specs = [TensorSpec(name, ("batch", 3), dtype) for name, dtype in (("y", "bfloat16"), ("z", "float32"))]
    return Artifact(
        target="onnx",
        path=path,
        inputs=(TensorSpec("x", ("batch", 3), "bfloat16"),),
        outputs=tuple(specs),
        precision="bfloat16",
        sha256="",
        size_bytes=path.stat().st_size,
        out_spec="",
    )


def test_floats_of_eight_bits_are_numbers_and_not_their_bytes(tmp_path: Path) -> None:
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT8E4M3FN)
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])
    answer = helper.make_tensor_value_info("y", TensorProto.FLOAT8E4M3FN, ["batch", 3])
    graph = helper.make_graph([node], "cast", [given], [answer])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "cast.onnx")
    (y,) = Onnx().open(tmp_path / "cast.onnx").load(threads=1).run([np.array([[1.0, 2.05, -448.0]], np.float32)])
    assert y.dtype == np.float32 and y.tolist() == [[1.0, 2.0, -448.0]]


def test_bfloat16_goes_in_and_out_of_onnx_runtime(negation: Artifact) -> None:
    x = np.array([[1.5, -2.25, 3e38], [0.0, -0.0, 4.0]], element_type("bfloat16"))
    y, z = OnnxRunner(negation, threads=1).run([x])
    assert y.dtype == x.dtype and z.dtype == np.float32
    np.testing.assert_array_equal(y.astype(np.float32), -x.astype(np.float32))
    np.testing.assert_array_equal(z, x.astype(np.float32))
    empty, _ = OnnxRunner(negation, threads=1).run([x[:0]])
    assert empty.shape == (0, 3)


def test_a_worker_is_given_float32_and_casts_it(negation: Artifact) -> None:
    x = np.array([[1.0, 1.00390625, -7.0]], np.float32)  # the second lies between two numbers of bfloat16
    with Fleet([negation]) as fleet:
        (session,) = fleet
        y, z = session.outputs([x])
    rounded = torch.from_numpy(x).bfloat16().float().numpy()
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, -rounded)
    np.testing.assert_array_equal(z, rounded)


def test_compare_and_bench_feed_bfloat16(negation: Artifact, tmp_path: Path) -> None:
    side = open_side(str(negation.path))
    y, _ = side.run([np.ones((2, 3), np.float32)])
    np.testing.assert_array_equal(y.astype(np.float32), -np.ones((2, 3)))
    (subject,) = agreed_inputs([Opening(tmp_path).open(str(negation.path))], None)
    assert subject.artifact.precision == "bfloat16" and subject.artifact.is_rounded
    (array,) = subject.arranged(put_through([subject], None, {}).timed(2))
    assert array.dtype == element_type("bfloat16") and array.shape == (2, 3)


@pytest.mark.parametrize("cast, opset", [(optimize.CastFP16, 20), (optimize.CastBF16, 22)])
def test_the_opset_is_the_oldest_that_has_the_types(cast: type, opset: int, tmp_path: Path) -> None:
    x = REFERENCES["resnet"].inputs(2)
    program = references.captured("resnet", None)
    half = optimize.Pipeline([optimize.FuseConvBN(), cast(calibration=[x])]).run(program).program
    artifact = optimize.export(half, "onnx", tmp_path / "net.onnx")
    model = onnx.load(artifact.path)
    assert [entry.version for entry in model.opset_import if not entry.domain] == [opset]
    wanted = TensorProto.FLOAT16 if opset == 20 else TensorProto.BFLOAT16
    weights = {tensor.data_type for tensor in model.graph.initializer if len(tensor.dims) == 4}
    casts = [node for node in model.graph.node if node.op_type == "Cast"]
    assert weights == {wanted} and len(casts) == 2


def test_what_the_cpu_computes_in_float32_is_said(tmp_path: Path) -> None:
    x = REFERENCES["vit"].inputs(2)
    program = references.captured("vit", None)
    half, _ = optimize.CastFP16(calibration=[x]).apply(program)
    (note,) = optimize.export(half, "onnx", tmp_path / "half.onnx").notes
    assert "operators in float32" in note and "--bf16 --to openvino" in note
    assert optimize.export(program, "onnx", tmp_path / "float.onnx").notes == ()


def test_half_inputs_and_outputs(tmp_path: Path) -> None:
    x = REFERENCES["resnet"].inputs(2)
    net = REFERENCES["resnet"].build()
    passes = [optimize.FuseConvBN(), optimize.CastFP16(calibration=[x], io="half")]
    half = optimize.Pipeline(passes).run(references.captured("resnet", None)).program
    artifact = optimize.export(half, "onnx", tmp_path / "net.onnx")
    assert [spec.dtype for spec in (*artifact.inputs, *artifact.outputs)] == ["float16", "float16"]
    assert not any(node.op_type == "Cast" for node in onnx.load(artifact.path).graph.node)
    found = artifact.load(threads=1)(x.half())
    with torch.inference_mode():
        want = net(x)
    assert found.dtype is torch.float16 and float((found - want).abs().max() / want.abs().max()) < 2e-3
    assert find_target("onnx").files(artifact.path) == (artifact.path,)


@pytest.mark.parametrize(
    ("compute", "shape", "layers"),
    [
        (lambda m, x: m.last(x.transpose(0, 1)), (7, 6), {"last": nn.Linear(6, 4)}),
        (lambda m, x: m.last(x.permute(1, 2, 0, 3)), (7, 3, 6), {"last": nn.Linear(6, 4)}),
        (
            lambda m, x: x.transpose(1, 2) @ torch.stack([m.last.weight.t()] * 3),
            (7, 3, 6),
            {"last": nn.Linear(6, 4)},
        ),
        (
            lambda m, x: m.last(m.steps(x.transpose(0, 1))[0].transpose(0, 1)),
            (7, 6),
            {"steps": nn.LSTM(6, 5), "last": nn.Linear(5, 4)},
        ),
        (
            lambda m, x: m.last(m.steps(x)[0].transpose(1, 2)),
            (7, 6),
            {"steps": nn.GRU(6, 5, batch_first=True), "last": nn.Linear(7, 4)},
        ),
    ],
)
@pytest.mark.parametrize("is_free", [False, True])
def test_rows_in_another_order_are_multiplied(
    compute: Callable[..., Tensor],
    shape: tuple[int, ...],
    layers: dict[str, nn.Module],
    *,
    is_free: bool,
    tmp_path: Path,
) -> None:
    """ONNX Runtime ended the process that opened such a file."""
    torch.manual_seed(0)
    net, x = Called(compute, **layers).eval(), torch.randn(3, *shape)
    length = {"x": {1: "length"}} if is_free and layers["last"].in_features != shape[0] else None
    half, _ = optimize.CastFP16().apply(optimize.capture(net, (x,), dynamic=length))
    run = optimize.export(half, "onnx", tmp_path / "net.onnx").load(threads=1)
    for inputs in (x, x[:1], x[:, :4] if length else x):
        torch.testing.assert_close(run(inputs), net(inputs), rtol=2e-2, atol=2e-3)
