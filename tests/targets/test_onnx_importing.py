"""A run that starts from an ONNX file: what is read answers as ONNX Runtime does, and what is not read is named."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

import optimize
from models import REFERENCES
from optimize import graph
from optimize.errors import Refused, VerificationFailed
from optimize.load import ModelSource
from optimize.load.capturing import AS_USUAL, capture_model
from optimize.load.opening import capture_source
from optimize.passes import FuseConvBN, QuantizeStatic
from optimize.pipeline import Pipeline
from optimize.program import Program
from optimize.targets.onnx import torch_operators
from optimize.targets.onnx.importing import OnnxGraph
from optimize.targets.onnx.probe import onnx_costs
from optimize.targets.onnx.runner import open_session, session_options
from optimize.targets.onnx.torch_operators import _UNASKED, OPERATORS, OnnxCall, Unknown, apply
from tests import references
from tests.nets import sqnr_db
from tests.test_cli import Typed

#: Slow where the operators are those of diverse_branch, or an exporter of torch takes seconds: vit has both each time.
WAYS = [
    pytest.param(name, how, marks=[pytest.mark.slow] * (name in references.SAME or (how != "own" and name != "vit")))
    for name in sorted(REFERENCES)
    for how in ("own", "dynamo", "legacy")
]


def exported(name: str, how: str, path: Path) -> Path:
    """Writes a reference network by this package, or by one of torch's exporters; its batch is free."""
    for file, content in _exported(name, how, path.name).items():
        (path.parent / file).write_bytes(content)
    return path


@functools.cache
def _exported(name: str, how: str, file: str) -> dict[str, bytes]:
    """Return the files of a network by their names: one of torch's exporters keeps weights apart."""
    with tempfile.TemporaryDirectory() as folder:
        _write(name, how, Path(folder) / file)
        return {written.name: written.read_bytes() for written in Path(folder).iterdir()}


def _write(name: str, how: str, path: Path) -> None:
    net, x = references.network(name, 0), (REFERENCES[name].inputs(2),)
    with contextlib.redirect_stdout(io.StringIO()):
        if how == "own":
            optimize.export(references.captured(name, 0), "onnx", path)
        elif how == "dynamo":
            free = ({0: torch.export.Dim("batch")},)
            torch.onnx.export(net, x, path, dynamo=True, opset_version=18, dynamic_shapes=free, verbose=False)
        else:
            axes = {"x": {0: "batch"}}
            torch.onnx.export(net, x, path, dynamo=False, opset_version=17, input_names=["x"], dynamic_axes=axes)


def opened(path: Path) -> Program:
    return capture_source(
        ModelSource.of(path), lambda _: pytest.fail("the file says what it takes"), trust=True
    ).program


def answered(path: Path, x: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "how"), WAYS)
def test_what_is_read_answers_as_the_file_does_at_any_batch(name: str, how: str, tmp_path: Path) -> None:
    path = exported(name, how, tmp_path / "net.onnx")
    program = opened(path)
    assert program.batch, "the batch was not kept free"
    program.check()
    for batch in (1, 5):
        x = REFERENCES[name].inputs(batch)
        assert sqnr_db(answered(path, x), program.run((x,))[0]) > 100


@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_int8_of_what_is_read_is_that_of_the_original(name: str, tmp_path: Path) -> None:
    x = REFERENCES[name].inputs(32)
    levels, layers = [], []
    for program in (references.captured(name, 0), opened(exported(name, "own", tmp_path / "net.onnx"))):
        want = program.run((x,))[0]
        made = Pipeline([FuseConvBN(), QuantizeStatic(calibration=[(x,)])]).run(program).program
        artifact = optimize.export(made, "onnx", tmp_path / "int8.onnx")
        assert artifact.coverage is not None
        layers.append(len(artifact.coverage.quantized))
        levels.append(sqnr_db(want, answered(tmp_path / "int8.onnx", x)))
    assert layers[0] == layers[1]
    assert levels[1] > levels[0] - 1.5


def test_weights_and_calls_keep_their_names(tmp_path: Path) -> None:
    program = opened(exported("resnet", "own", tmp_path / "net.onnx"))
    paths = {path for path, _ in program.graph_module.named_parameters()}
    convs = [node for node in program.graph.nodes if graph.op_name(node) == "conv2d"]
    assert all(graph.origin(node) + ".weight" in paths for node in convs)


def graph_file(path: Path, *nodes: onnx.NodeProto, batch: Any = "batch", **stored: np.ndarray) -> Path:
    sizes = [batch, 3, 8, 8]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", sizes), ("y", None))
    )
    kept = [onnx.numpy_helper.from_array(value, name) for name, value in stored.items()]
    made = helper.make_graph(nodes, "g", [x], [y], kept)
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


CASES = {
    "steps": helper.make_node("Slice", ["x", "zeros", "ends", "", "steps"], ["y"]),
    "asymmetric": helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[3, 3], strides=[2, 2], pads=[0, 0, 1, 1]),
    "same": helper.make_node("AveragePool", ["x"], ["y"], kernel_shape=[2, 2], auto_pad="VALID"),
    "valid": helper.make_node("AveragePool", ["x"], ["y"], kernel_shape=[3, 3], auto_pad="VALID", pads=[1] * 4),
    "kept": helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[3, 3], auto_pad="SAME_LOWER", pads=[1] * 4),
    "wide": helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[3, 3], pads=[2] * 4),
    "places": helper.make_node("MaxPool", ["x"], ["y", "unread"], kernel_shape=[3, 3]),
    "unbounded": helper.make_node("Clip", ["x"], ["y"]),
    "space": helper.make_node("SpaceToDepth", ["x"], ["y"], blocksize=2),
    "slope": helper.make_node("LeakyRelu", ["x"], ["y"], alpha=0.3),
    "hard": helper.make_node("HardSigmoid", ["x"], ["y"]),
    "flat": helper.make_node("Flatten", ["x"], ["y"], axis=2),
    "l2": helper.make_node("ReduceL2", ["x"], ["y"], axes=[1], keepdims=0),
    "product": helper.make_node("ReduceProd", ["x"], ["y"], axes=[-1, 1], keepdims=0),
    "top": helper.make_node("GlobalMaxPool", ["x"], ["y"]),
}


@pytest.mark.parametrize("case", CASES)
def test_single_operators(case: str, tmp_path: Path) -> None:
    bounds = {
        name: np.array(values) for name, values in (("zeros", [0, 0]), ("ends", [2**31 - 1, 3]), ("steps", [1, 2]))
    }
    path = graph_file(tmp_path / "net.onnx", CASES[case], **(bounds if case == "steps" else {}))
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(opened(path).run((x,))[0], answered(path, x), rtol=1e-5, atol=1e-6)


def test_weights_by_names_that_a_module_has_itself(tmp_path: Path) -> None:
    node, weight = helper.make_node("Conv", ["x", "forward.type"], ["y"]), np.ones((2, 3, 1, 1), np.float32)
    program = opened(graph_file(tmp_path / "net.onnx", node, **{"forward.type": weight}))
    assert [path for path, _ in program.graph_module.named_parameters()] == ["forward_.type_"]


class Masked(torch.nn.Module):
    """The mean of tokens that a mask lets through."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(500, 4)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        weight = mask.float()[..., None]
        return (self.table(tokens) * weight).sum(1) / weight.sum(1)


def test_an_example_of_whole_numbers_hides_nothing(tmp_path: Path) -> None:
    """One token in every place would hide all others, and a mask of nothing all of them."""
    program = optimize.capture(Masked().eval(), (torch.randint(0, 500, (2, 8)), torch.ones(2, 8, dtype=torch.int64)))
    again = opened(optimize.export(program, "onnx", tmp_path / "net.onnx").path)
    tokens, mask = again.inputs
    assert len(tokens.unique()) > 8 and mask.unique().tolist() == [1]
    assert not any("training mode" in note for note in again.notes)


@pytest.mark.parametrize(
    ("mode", "where"), [("nearest", "asymmetric"), ("linear", "half_pixel"), ("linear", "align_corners")]
)
def test_resizing(mode: str, where: str, tmp_path: Path) -> None:
    node = helper.make_node(
        "Resize", ["x", "", "scales"], ["y"], mode=mode, coordinate_transformation_mode=where, nearest_mode="floor"
    )
    path = graph_file(tmp_path / "net.onnx", node, scales=np.array([1, 1, 2, 2], np.float32))
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(opened(path).run((x,))[0], answered(path, x), rtol=1e-4, atol=1e-5)


def test_a_file_is_read_as_what_was_looked_at_whatever_its_name_ends_with(tmp_path: Path) -> None:
    """ONNX Runtime takes what is called .ort for a format of its own, which may lie in the same bytes."""
    path = graph_file(tmp_path / "net.ort", helper.make_node("Neg", ["x"], ["y"]))
    session = open_session(onnxruntime, str(path), session_options(onnxruntime, threads=1))
    assert session.run(None, {"x": np.ones((1, 3, 8, 8), np.float32)})[0].mean() == -1


def test_a_fixed_batch_stays_and_is_said(tmp_path: Path) -> None:
    program = opened(graph_file(tmp_path / "net.onnx", helper.make_node("Relu", ["x"], ["y"]), batch=4))
    assert program.batch is None and program.inputs[0].shape[0] == 4
    assert "The file fixes its batch of 4; it stays fixed." in program.notes


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (helper.make_node("LRN", ["x"], ["y"], size=3), "operators of ONNX that are not read: LRN"),
        (helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft"), "operators of ONNX that are not read: Gelu"),
        (helper.make_node("Linear", ["x"], ["y"]), "operators of ONNX that are not read: Linear"),
        (
            helper.make_node("Pad", ["x", "p"], ["y"], mode="reflect"),
            "Pad 'y' cannot be read: it pads by reflect beside",
        ),
        (
            helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[3, 3], dilations=[2, 2], auto_pad="SAME_UPPER"),
            "it is dilated and padded to keep its size",
        ),
        (
            helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[2, 2], ceil_mode=1, pads=[0, 0, 1, 1]),
            "its size is rounded up behind uneven padding",
        ),
        (helper.make_node("MaxPool", ["x"], ["p", "y"], kernel_shape=[2, 2]), "its output 'y' is not read"),
        (helper.make_node("Dropout", ["x"], ["d", "y"]), "its output 'y' is not read"),
    ],
)
def test_what_is_not_read_is_named(node: onnx.NodeProto, message: str, tmp_path: Path) -> None:
    stored = {"p": np.array([0, 1, 0, 0, 0, 0, 0, 0], np.int64)} if node.op_type == "Pad" else {}
    with pytest.raises(Refused, match=message) as refusal:
        opened(graph_file(tmp_path / "net.onnx", node, **stored))
    assert "--input-shape" not in str(refusal.value), "the inputs are not at fault"


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes"),
    [
        ("Selu", ["x"], {"alpha": 5.0}),
        ("Selu", ["x"], {"gamma": 7.0}),
        ("Resize", ["x", "", "scales"], {"mode": "cubic", "exclude_outside": 1}),
        ("Resize", ["x", "", "", "sizes"], {"mode": "cubic", "keep_aspect_ratio_policy": "not_larger"}),
        ("Resize", ["x", "", "scales"], {"mode": "cubic", "extrapolation_value": 3.0}),
        ("LSTM", ["s", *[""] * 7, "w", "r"], {"hidden_size": 2, "clip": 6.0}),
        ("LSTM", ["s", *[""] * 7, "w", "r"], {"hidden_size": 2, "input_forget": 1}),
        (
            "GRU",
            ["s", *[""] * 7, "w", "r"],
            {"hidden_size": 2, "linear_before_reset": 1, "activation_alpha": [2.0, 1.0]},
        ),
    ],
)
def test_an_attribute_that_changes_an_answer_is_named(operator: str, inputs: list[str], attributes: Any) -> None:
    """Where an example does not reach what it changes, comparing answers does not find it."""
    gates = 2 * (4 if operator == "LSTM" else 3)
    known = {"scales": np.array([1, 1, 2, 2], np.float32), "sizes": np.array([1, 1, 8, 8])}
    weights = {"w": torch.randn(gates, 5), "r": torch.randn(gates, 2)}
    values = {"x": torch.randn(1, 1, 4, 4), "s": torch.randn(3, 1, 5), **weights, **known}
    node = helper.make_node(operator, inputs, ["y"], **attributes)
    with pytest.raises(Unknown, match=f"its '{list(attributes)[-1]}' is not read, and is not ONNX's default"):
        apply(OnnxCall.of(node, values, known, 18))


@pytest.mark.parametrize("operator", sorted(OPERATORS.keys() - {"Linear"}))
def test_what_a_rule_does_not_ask_for_is_named(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every operator that is read, in every opset that is: each attribute, and each input."""
    monkeypatch.setitem(OPERATORS, operator, lambda call: call.values[0])
    monkeypatch.setattr(torch_operators, "_UNREAD", {})
    others = {"FLOAT": 77.0, "INT": 77, "STRING": "other", "TENSOR": onnx.numpy_helper.from_array(np.ones(1))}
    for opset in range(9, onnx.defs.onnx_opset_version() + 1):
        if not onnx.defs.has(operator, opset):
            continue
        schema = onnx.defs.get_schema(operator, opset)
        for place, name in enumerate(entry.name for entry in schema.inputs):
            call = OnnxCall.of(helper.make_node(operator, [""] * place + ["v"], ["y"]), {"v": torch.ones(2)}, {}, opset)
            with (
                pytest.raises(Unknown, match=f"its input '{name}'")
                if name not in _UNASKED
                else contextlib.nullcontext()
            ):
                apply(call)
        for name, entry in schema.attributes.items():
            kind = entry.type.name
            value = others[kind] if kind in others else [others[kind.removesuffix("S")]]
            call = OnnxCall.of(helper.make_node(operator, [""], ["y"], **{name: value}), {}, {}, opset)
            with pytest.raises(Unknown, match=f"its '{name}'") if name not in _UNASKED else contextlib.nullcontext():
                apply(call)


#: What a number ``q`` is computed by of the batch ``n``, or of what is stored.
WHOLE = {
    "wrapped": [helper.make_node("Cast", ["n"], ["q"], to=TensorProto.UINT8)],
    "towards zero": [helper.make_node("Neg", ["n"], ["m"]), helper.make_node("Div", ["m", "seven"], ["q"])],
    "exact": [helper.make_node("Div", ["big", "one"], ["b"]), helper.make_node("Sub", ["b", "big"], ["q"])],
    "towards zero, stored": [helper.make_node("Div", ["less", "seven"], ["q"])],
    "size": [helper.make_node("Size", ["x"], ["q"])],
    "root": [helper.make_node("Pow", ["seven", "half"], ["q"])],
    "root of the batch": [helper.make_node("Pow", ["n", "half"], ["q"])],
    "square": [helper.make_node("Pow", ["n", "two"], ["q"])],
    "all axes": [helper.make_node("ReduceSum", ["row", "none"], ["q"], keepdims=0)],
    "no axes": [helper.make_node("ReduceSum", ["row", "none"], ["q"], keepdims=0, noop_with_empty_axes=1)],
    "of 32 bits": [
        helper.make_node("Cast", ["row"], ["r"], to=TensorProto.INT32),
        helper.make_node("Max", ["r", "wide"], ["w"]),
        helper.make_node("ReduceSum", ["w"], ["q"]),
    ],
    "of some of 32 bits": [
        helper.make_node("ReduceMax", ["x"], ["t"], keepdims=0),
        helper.make_node("Cast", ["t"], ["i"], to=TensorProto.INT32),
        helper.make_node("Sub", ["i", "i"], ["z"]),
        helper.make_node("Add", ["z", "wide"], ["w"]),
        helper.make_node("Expand", ["w", "seven"], ["e"]),
        helper.make_node("ReduceSum", ["e"], ["q"]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", WHOLE)
def test_whole_numbers_are_what_the_runtime_computes(case: str, tmp_path: Path) -> None:
    """At a batch that no byte holds."""
    stored = {
        "seven": np.array([7]), "big": np.array([2**60 + 1]), "one": np.array([1]), "half": np.array([0.5], np.float32),
        "two": np.array([2]), "row": np.array([1, 2, 4, 8, 1, 2, 4, 8]), "none": np.array([], np.int64),
        "wide": np.array([2**30], np.int32), "less": np.array([-13]),
    }  # fmt: skip
    path = graph_file(
        tmp_path / "net.onnx",
        helper.make_node("Shape", ["x"], ["n"], end=1),
        *WHOLE[case],
        helper.make_node("Cast", ["q"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "f"], ["y"]),
        **stored,
    )
    program = opened(path)
    for batch in (1, 300):
        x = torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(program.run((x,))[0], answered(path, x))


@pytest.mark.parametrize("end", [2**63 - 1, 2**31 - 1, -(2**63), -9])
@pytest.mark.parametrize("start", [-1, 2, -9])
def test_numbers_are_taken_backwards_as_the_runtime_does(start: int, end: int, tmp_path: Path) -> None:
    bounds = {"start": start, "end": end, "axis": 0, "step": -1}
    stored = {"row": np.arange(8), **{name: np.array([value]) for name, value in bounds.items()}}
    path = graph_file(
        tmp_path / "net.onnx",
        helper.make_node("Slice", ["row", "start", "end", "axis", "step"], ["s"]),
        helper.make_node("ReduceSum", ["s"], ["t"], keepdims=0),
        helper.make_node("Cast", ["t"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "f"], ["y"]),
        **stored,
    )
    x = torch.zeros(1, 3, 8, 8)
    torch.testing.assert_close(OnnxGraph(onnx.load(path), path)(x), answered(path, x))


@pytest.mark.parametrize(
    ("known", "attributes", "message"),
    [
        ({"scales": np.array([1, 1, 2, 2], np.float32)}, {"mode": "nearest", "nearest_mode": "floor"}, "nearest, half"),
        ({"sizes": np.array([1, 6, 8, 8])}, {"mode": "linear"}, "resizes batch and channels"),
        (
            {"sizes": np.array([1, 3, 1, 8])},
            {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"},
            "one row or column",
        ),
    ],
)
def test_resizing_that_torch_does_otherwise_is_named(known: Any, attributes: Any, message: str) -> None:
    inputs = ["x", "", "scales"] if "scales" in known else ["x", "", "", "sizes"]
    node = helper.make_node("Resize", inputs, ["y"], **attributes)
    with pytest.raises(Unknown, match=message):
        apply(OnnxCall.of(node, {"x": torch.ones(1, 3, 4, 4), **known}, known, 13))


def test_a_norm_whose_statistics_are_taken_is_in_training() -> None:
    """Before an attribute said so."""
    values = {"x": torch.ones(2, 3), **dict.fromkeys("sbmv", torch.ones(3))}
    node = helper.make_node("BatchNormalization", ["x", *"sbmv"], ["y", "m1", "v1"])
    with pytest.raises(Unknown, match="training mode"):
        apply(OnnxCall.of(node, values, {}, 9))


@pytest.mark.parametrize("operator", ["ReduceL1", "ReduceL2", "ReduceSumSquare"])
def test_a_reduction_over_no_axes_that_still_computes_is_named(operator: str) -> None:
    node = helper.make_node(operator, ["x"], ["y"], noop_with_empty_axes=1)
    with pytest.raises(Unknown, match="it reduces over no axes"):
        apply(OnnxCall.of(node, {"x": torch.ones(2)}, {}, 18))


def test_a_download_cache_of_links_is_read(tmp_path: Path) -> None:
    """Its files are called by their digests, and the links as the file says; onnx's own reader follows none."""
    weight = np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32)
    whole = graph_file(tmp_path / "net.onnx", helper.make_node("Conv", ["x", "w"], ["y"]), w=weight)
    for folder in ("blobs", "snapshot"):
        (tmp_path / folder).mkdir()
    apart = {"save_as_external_data": True, "location": "net.onnx_data", "size_threshold": 0}
    onnx.save(onnx.load(whole), tmp_path / "blobs" / "net.onnx", **apart)
    for name, digest in {"net.onnx": "a", "net.onnx_data": "b"}.items():
        (tmp_path / "blobs" / name).rename(tmp_path / "blobs" / digest)
        (tmp_path / "snapshot" / name).symlink_to(f"../blobs/{digest}")
    link, x = tmp_path / "snapshot" / "net.onnx", torch.randn(2, 3, 8, 8)
    assert sqnr_db(answered(whole, x), opened(link).run((x,))[0]) > 100
    assert onnx_costs(link, [x.numpy()]).macs == onnx_costs(whole, [x.numpy()]).macs > 0


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("axis", [2, -1])
@pytest.mark.parametrize("count", [3, 8])
def test_of_equal_numbers_the_first_comes_first(count: int, axis: int, largest: int, tmp_path: Path) -> None:
    """As ONNX says it; and of the file that is written as one ``TopK``, whose other places nobody sorts."""
    nodes = [
        helper.make_node("Round", ["x"], ["r"]),
        helper.make_node("TopK", ["r", "count"], ["top", "at"], axis=axis, largest=largest),
        helper.make_node("Cast", ["at"], ["places"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["top", "places"], ["y"]),
    ]
    path = graph_file(tmp_path / "net.onnx", *nodes, count=np.array([count]))
    program, x = opened(path), torch.randn(2, 3, 8, 8)
    want = answered(path, x)
    assert torch.equal(want, program.run((x,))[0])
    optimize.export(program, "onnx", tmp_path / "again.onnx")
    assert torch.equal(want, answered(tmp_path / "again.onnx", x))
    kinds = [node.op_type for node in onnx.load(tmp_path / "again.onnx").graph.node]
    assert kinds.count("TopK") == 1 and "Slice" not in kinds


def test_a_row_is_flattened_to_a_column() -> None:
    node = helper.make_node("Flatten", ["x"], ["y"])
    assert apply(OnnxCall.of(node, {"x": torch.ones(3)}, {}, 18))[0].shape == (3, 1)


def test_floats_of_eight_bits_are_named() -> None:
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT8E5M2)
    with pytest.raises(Unknown, match="it makes numbers of a type that is not read"):
        apply(OnnxCall.of(node, {"x": torch.ones(2)}, {}, 19))


def test_what_is_stored_otherwise_than_as_numbers_in_a_row_is_named(tmp_path: Path) -> None:
    values, places = helper.make_tensor("s", TensorProto.FLOAT, [1], [1.0]), helper.make_tensor("", 7, [1], [3])
    sparse = helper.make_sparse_tensor(values, places, [8])
    path = graph_file(tmp_path / "net.onnx", helper.make_node("Add", ["x", "s"], ["y"]))
    for held in ({"sparse_value": sparse}, {"value_strings": [b"a"]}, None):
        model = onnx.load(path)
        if held is None:
            model.graph.sparse_initializer.append(sparse)
        else:
            model.graph.node.insert(0, helper.make_node("Constant", [], ["s"], **held))
        with pytest.raises(Refused, match="stores 's' as text, sparse, or in a type not read"):
            OnnxGraph(model, path)


def test_a_text_that_nothing_reads_is_left_out(tmp_path: Path) -> None:
    path = graph_file(tmp_path / "net.onnx", helper.make_node("Relu", ["x"], ["y"]))
    model = onnx.load(path)
    model.graph.node.append(helper.make_node("Constant", [], ["s"], value_strings=[b"a"]))
    assert OnnxGraph(model, path)(torch.ones(1, 3, 8, 8)).sum() == 3 * 8 * 8


def test_whole_numbers_have_the_attributes_of_their_operator_too() -> None:
    node, numbers = helper.make_node("Mod", ["a", "b"], ["y"], fmod=1), {"a": np.array([5, -3]), "b": np.array([3, 2])}
    assert apply(OnnxCall.of(node, numbers, numbers, 18))[0].tolist() == [2, -1]


def test_an_input_that_changes_an_answer_is_named() -> None:
    values = {"s": torch.ones(3, 1, 5), "p": torch.ones(1, 6), "w": torch.ones(8, 5), "r": torch.ones(8, 2)}
    node = helper.make_node("LSTM", ["s", *[""] * 6, "p", "w", "r"], ["y"], hidden_size=2)
    with pytest.raises(Unknown, match="its input 'P' is not read"):
        apply(OnnxCall.of(node, values, {}, 18))


def test_a_dropout_that_drops_is_named() -> None:
    node = helper.make_node("Dropout", ["x", "", "training"], ["y"])
    for training in (False, True):
        known = {"training": np.array(training)}
        with pytest.raises(Unknown, match="training mode") if training else contextlib.nullcontext():
            assert apply(OnnxCall.of(node, {"x": torch.ones(3), **known}, known, 18))[0].sum() == 3


def test_a_file_without_outputs_is_not_called_old(tmp_path: Path) -> None:
    graph_ = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [], [])
    for opset, message in ((20, "has no outputs"), (8, "is of opset 8; 9 and later are read")):
        model = helper.make_model(graph_, opset_imports=[helper.make_opsetid("", opset)])
        with pytest.raises(Refused, match=message):
            OnnxGraph(model, tmp_path / "m.onnx")


@pytest.mark.parametrize("opsets", [(13, 12), (12, 13)])
def test_a_file_of_two_opsets_is_of_neither(opsets: tuple[int, int], tmp_path: Path) -> None:
    graph_ = onnx.load(graph_file(tmp_path / "net.onnx", helper.make_node("Softmax", ["x"], ["y"]))).graph
    model = helper.make_model(graph_, opset_imports=[helper.make_opsetid("", opset) for opset in opsets], ir_version=9)
    with pytest.raises(Refused, match=r"says that it is of several opsets: \[12, 13\]"):
        OnnxGraph(model, tmp_path / "net.onnx")


def test_a_function_by_the_name_of_an_operator_of_the_runtime_is_named(tmp_path: Path) -> None:
    """ONNX Runtime calls its own."""
    path = graph_file(tmp_path / "net.onnx", helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft"))
    model, opset = onnx.load(path), helper.make_opsetid("com.microsoft", 1)
    model.opset_import.append(opset)
    body = [helper.make_node("Neg", ["a"], ["b"])]
    model.functions.append(helper.make_function("com.microsoft", "Gelu", ["a"], ["b"], body, model.opset_import))
    onnx.save(model, path)
    with pytest.raises(Refused, match="has a function by the name of an operator of a runtime, 'Gelu'"):
        opened(path)


def test_a_value_that_comes_too_late_is_named(tmp_path: Path) -> None:
    nodes = helper.make_node("Relu", ["a"], ["y"]), helper.make_node("Neg", ["x"], ["a"])
    with pytest.raises(Refused, match="Relu 'y' cannot be read: nothing before it computes 'a'"):
        opened(graph_file(tmp_path / "net.onnx", *nodes))


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_weight_that_is_turned_takes_no_name_of_the_file(is_stored: bool, tmp_path: Path) -> None:
    v, doubled = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32), np.float32(2)
    stored = {"v": v, "v_turned": v @ v} if is_stored else {"v": v, "two": np.array(doubled)}
    nodes = [helper.make_node("MatMul", ["x", "v"], ["a"])]
    nodes += [] if is_stored else [helper.make_node("Mul", ["x", "two"], ["v_turned"])]
    nodes += [helper.make_node("MatMul", ["a", "v"], ["b"])]
    nodes += [helper.make_node("MatMul" if is_stored else "Add", ["b", "v_turned"], ["y"])]
    path = graph_file(tmp_path / "net.onnx", *nodes, **stored)
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(opened(path).run((x,))[0], answered(path, x), rtol=1e-4, atol=1e-4)


def test_recurrent_layers_of_one_path_keep_their_own_weights(tmp_path: Path) -> None:
    """Weights that are made have names of their own where the names of nodes differ by a sign alone."""
    generator = np.random.default_rng(0)
    stored = {
        f"{kind}{place}": generator.standard_normal((1, 8, size)).astype(np.float32)
        for place in (0, 1)
        for kind, size in (("w", 8), ("r", 2))
    }
    layers = [
        helper.make_node("LSTM", ["s", f"w{place}", f"r{place}"], [f"y{place}"], name=name, hidden_size=2)
        for place, name in enumerate(("a/b", "a.b"))
    ]
    first, last = (
        helper.make_node("ReduceMean", ["x"], ["s"], axes=[1], keepdims=0),
        helper.make_node("Sub", ["y0", "y1"], ["y"]),
    )
    path = graph_file(tmp_path / "net.onnx", first, *layers, last, **stored)
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(opened(path).run((x,))[0], answered(path, x), rtol=1e-4, atol=1e-4)


def test_what_is_quantized_already_is_refused(tmp_path: Path) -> None:
    x = REFERENCES["resnet"].inputs(4)
    made, _ = QuantizeStatic(calibration=[(x,)]).apply(references.captured("resnet", 0))
    optimize.export(made, "onnx", tmp_path / "int8.onnx")
    with pytest.raises(Refused, match=r"is quantized already \(it calls (DequantizeLinear|QuantizeLinear)\)"):
        opened(tmp_path / "int8.onnx")


def test_a_reader_that_is_wrong_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = graph_file(tmp_path / "net.onnx", helper.make_node("LeakyRelu", ["x"], ["y"], alpha=0.3))
    monkeypatch.setitem(OPERATORS, "LeakyRelu", lambda call: torch.relu(call.x * call.attribute("alpha")))
    held = OnnxGraph(onnx.load(path), path)
    with pytest.raises(VerificationFailed, match="answers otherwise than its runtime"):
        capture_model(held, lambda _: (), AS_USUAL)


def test_the_command_starts_from_a_file_that_nobody_vouches_for(typed: Typed, tmp_path: Path) -> None:
    path = exported("resnet", "own", tmp_path / "net.onnx")
    done = typed(path, "--int8", "--no-layer-timing", "--to", "onnx", "--out", tmp_path / "out", "-q")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["model"]["source"] == f"{path} (ONNX)"
    levels = [row["agreement"]["sqnr_db"] for row in report["rows"]]
    assert levels[0] > 100 and levels[1] > 25


def test_damaged_and_hostile_files_are_sentences(typed: Typed, tmp_path: Path) -> None:
    path = exported("resnet", "own", tmp_path / "net.onnx")
    (tmp_path / "cut.onnx").write_bytes(path.read_bytes()[:2000])
    done = typed(tmp_path / "cut.onnx", "--to", "onnx", "--out", tmp_path / "out", "-q")
    assert done.returncode == 1 and "is not an ONNX file" in done.stderr and "Traceback" not in done.stderr
    big = np.array([1 << 20, 1 << 20], np.int64)
    node = helper.make_node("ConstantOfShape", ["s"], ["y"])
    done = typed(graph_file(tmp_path / "big.onnx", node, s=big), "--to", "onnx", "--out", tmp_path / "out", "-q")
    assert done.returncode == 1 and "asks for too much" in done.stderr
