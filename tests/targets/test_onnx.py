"""The ONNX target: float export, the map of names, dynamic INT8, coverage and the runner."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.utils import _pytree as pytree

import optimize
from models import REFERENCES
from optimize.errors import Refused, TargetUnavailable
from optimize.passes.quantize_dynamic import QuantizeDynamic
from optimize.passes.quantize_static import QuantizeStatic
from optimize.plan import NO_STATIC_KERNEL
from optimize.program import Program
from optimize.registry import find_target
from optimize.targets.onnx import Onnx, runner
from optimize.targets.onnx_graph import export
from optimize.targets.onnx_graph.export import save, to_onnx
from optimize.targets.onnx_graph.policy import ONNX_RUNTIME, OPENVINO, TENSORRT
from optimize.targets.onnx_graph.quantize import quantize_onnx
from optimize.targets.pt2 import placement as pt2
from optimize.targets.torchscript import placement as torchscript
from tests import references
from tests.nets import Called, sqnr_db


@pytest.fixture
def target() -> Onnx:
    found = find_target("onnx")
    assert isinstance(found, Onnx)
    return found


def relative_error(want: Tensor, got: Tensor) -> float:
    return float((want - got).abs().max() / want.abs().max())


class Several(nn.Module):
    """Takes two inputs and returns a dictionary, one entry of it an input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv2d(3, 8, 1), nn.Linear(5, 8)

    def forward(self, x: Tensor, v: Tensor) -> dict[str, Tensor]:
        return {"y": self.conv(x) * torch.sigmoid(self.gate(v))[:, :, None, None], "x": x}


def test_a_runner_takes_and_returns_what_the_module_did(target: Onnx, tmp_path: Path) -> None:
    net = Several().eval()
    program = optimize.capture(net, (torch.randn(2, 3, 4, 4), torch.randn(2, 5)))
    artifact = target.export(program, tmp_path / "net.onnx")
    assert [spec.name for spec in artifact.inputs] == ["x", "v"]
    assert artifact.inputs[0].shape == ("batch", 3, 4, 4)
    loaded = artifact.load(threads=1)
    assert isinstance(loaded, runner.OnnxRunner)
    assert loaded.providers == ("CPUExecutionProvider",)
    x, v = torch.randn(3, 3, 4, 4), torch.randn(3, 5)
    answer, want = loaded(x, v), net(x, v)
    assert set(answer) == {"x", "y"}
    torch.testing.assert_close(answer["y"], want["y"], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(answer["x"], x)
    assert isinstance(loaded(x.numpy(), v.numpy())["y"], np.ndarray)
    foreign = replace(loaded.artifact, out_spec="").load(threads=1)  # of somebody else's, which says nothing of a dict
    assert [array.shape for array in foreign(x.numpy(), v.numpy())] == [(3, 8, 4, 4), (3, 3, 4, 4)]


@pytest.mark.parametrize("name", references.each("vit", "lstm", "unet"))
def test_what_the_exporter_would_not_change_is_not_traced_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = optimize.FuseConvBN().apply(references.captured(name))[0]
    kept, names = to_onnx(program)
    monkeypatch.setattr(export, "is_settled", lambda graph: False)
    traced, traced_names = to_onnx(program)
    assert names.keys() == traced_names.keys()
    calls, traced_calls = ([(node.op_type, node.name) for node in model.graph] for model in (kept, traced))
    assert calls == traced_calls and contents(kept) == contents(traced)


def contents(model: ir.Model) -> Counter[bytes]:
    """Return the constants of a model, whatever they are called."""
    return Counter(value.const_value.tobytes() for value in model.graph.initializers.values() if value.const_value)


def test_only_what_is_not_settled_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(exported: torch.export.ExportedProgram, table: object) -> None:
        raise AssertionError("traced anew")

    program = references.captured("resnet")
    turned = optimize.capture(nn.ConvTranspose2d(3, 4, 3, 2, 1, 1).eval(), (torch.randn(2, 3, 5, 5),))
    taken = optimize.capture(nn.BatchNorm2d(3, track_running_stats=False).eval(), (torch.randn(2, 3, 5, 5),))
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", refuse)
    kinds = {node.op_type for node in to_onnx(optimize.FuseConvBN().apply(program)[0])[0].graph}
    assert "ReduceMean" in kinds and "BatchNormalization" not in kinds
    assert [node.op_type for node in to_onnx(turned)[0].graph] == ["ConvTranspose"]
    with pytest.raises(Refused, match="traced anew"):
        to_onnx(taken)


def test_the_table_of_translations_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    program = optimize.capture(nn.Linear(3, 2).eval(), (torch.randn(2, 3),))
    first, _ = to_onnx(program)
    monkeypatch.setattr(ONNXRegistry, "from_torchlib", None)
    again, _ = to_onnx(program)
    assert [node.op_type for node in first.graph] == [node.op_type for node in again.graph] == ["Gemm"]


def test_the_file_holds_names_of_the_model_and_no_paths_of_its_source(target: Onnx, tmp_path: Path) -> None:
    program = references.captured("resnet")
    target.export(program, tmp_path / "net.onnx")
    proto = onnx.load(tmp_path / "net.onnx")
    assert {"stem.conv", "head"} <= {node.name for node in proto.graph.node}
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert b".py" not in (tmp_path / "net.onnx").read_bytes()


class Decomposed(nn.Module):
    """Calls what the exporter takes apart: unfolded BatchNorm, split, recurrent layers, pooling, maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.up, self.line, self.gru = nn.ConvTranspose2d(8, 8, 2, 2), nn.Linear(4, 6), nn.GRU(6, 4, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = functional.silu(self.up(torch.relu(self.norm(self.conv(x)))))
        _, right = y.chunk(2, dim=1)
        states, _ = self.gru(self.line(right.flatten(2).transpose(1, 2)[:, :6]))
        values, _ = states.max(1)
        return functional.adaptive_avg_pool2d(y, 1), values


@pytest.mark.parametrize("name", ["mobilenetv3", "vit", "lstm", "decomposed"])
def test_value_names_lead_to_the_values_of_the_program(name: str, tmp_path: Path) -> None:
    import onnxruntime

    if name == "decomposed":
        program = optimize.capture(Decomposed().eval(), (torch.randn(2, 3, 10, 10),))
    else:
        program = references.captured(name)
    model, names = to_onnx(program)
    save(model, tmp_path / "net.onnx")
    proto = onnx.load(tmp_path / "net.onnx")
    present = {output.name for output in proto.graph.output} | set(program.input_names)
    found = sorted(set(names.values()) - present)
    proto.graph.output.extend(onnx.helper.make_empty_tensor_value_info(value) for value in found)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    inputs = program.sample(3)
    outputs = [output.name for output in session.get_outputs()]
    answers = session.run(outputs, {key: x.numpy() for key, x in zip(program.input_names, inputs, strict=True)})
    computed = dict(zip(outputs, answers, strict=True))
    compared = _compare(program, inputs, {node: computed[value] for node, value in names.items() if value in computed})
    floats = sum(isinstance(node.meta.get("val"), Tensor) for node in program.graph.nodes if node.op == "call_function")
    assert compared >= 0.7 * floats


def _compare(program: Program, inputs: tuple[Tensor, ...], computed: dict[str, np.ndarray]) -> int:
    class Check(fx.Interpreter):
        compared = 0

        def run_node(self, n: fx.Node) -> object:
            result = super().run_node(n)
            if n.name in computed and isinstance(result, Tensor):
                torch.testing.assert_close(torch.from_numpy(computed[n.name]), result, atol=1e-4, rtol=1e-3, msg=n.name)
                self.compared += 1
            return result

    check = Check(program.graph_module)
    with torch.inference_mode():
        check.run(*inputs, enable_io_processing=False)
    return check.compared


def test_a_missing_operator_is_named_with_its_layer(target: Onnx, tmp_path: Path) -> None:
    class Special(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.special.bessel_j0(x)

    net = Called(lambda m, x: m.inner(x) + 1, inner=Special()).eval()
    program = optimize.capture(net, (torch.rand(2, 3),))
    with pytest.raises(Refused, match=r"prims.bessel_j0 \(in 'inner'\)"):
        target.export(program, tmp_path / "net.onnx")
    assert list(tmp_path.iterdir()) == []


def test_an_operator_of_weights_alone_that_is_missing_is_one_to_compute_before(target: Onnx, tmp_path: Path) -> None:
    net = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="matrix_exp").eval()
    with pytest.raises(Refused, match=r"linalg_matrix_exp \(in 'parametrizations.weight.0'\)") as caught:
        target.export(optimize.capture(net, (torch.rand(2, 4),)), tmp_path / "net.onnx")
    assert "--fuse" in caught.value.hint


@pytest.mark.parametrize("name", ["onnx", "openvino"])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(
    "sizes", [{"scale_factor": 2.0}, {"scale_factor": (1.7, 0.55)}, {"size": (5, 9)}, {"size": (14, 5)}], ids=str
)
def test_resizes_that_smooth_are_exact(
    name: str, mode: str, aligned: bool, sizes: dict[str, Any], tmp_path: Path
) -> None:
    class Resized(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.interpolate(x, mode=mode, align_corners=aligned, antialias=True, **sizes)

    program = optimize.capture(Resized(), (torch.rand(2, 3, 10, 12),))
    before = program.graph_module.code
    run = optimize.export(program, name, tmp_path / f"net{find_target(name).suffix}").load()
    x = torch.randn(3, 3, 10, 12)
    torch.testing.assert_close(run(x), Resized()(x), rtol=1e-5, atol=1e-5)
    assert program.graph_module.code == before


@pytest.mark.parametrize("name", ["onnx", "openvino"])
@pytest.mark.parametrize("factors", [(None, None), (0.4, 1.4)])
def test_resizes_that_smooth_to_a_size_are_exact(
    name: str, factors: tuple[float | None, float | None], tmp_path: Path
) -> None:
    resize = torch.ops.aten._upsample_bilinear2d_aa.default
    net = Called(lambda _, x: resize(x, [4, 17], False, *factors)).eval()
    program = optimize.capture(net, (torch.rand(2, 3, 10, 12),))
    run = optimize.export(program, name, tmp_path / f"net{find_target(name).suffix}").load()
    x = torch.randn(3, 3, 10, 12)
    torch.testing.assert_close(run(x), net(x), rtol=1e-5, atol=1e-5)


def test_export_is_silent(target: Onnx, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = optimize.capture(nn.Linear(3, 2).eval(), (torch.rand(2, 3),))
    target.export(program, tmp_path / "net.onnx")
    assert capfd.readouterr() == ("", "")


def test_half_precision_keeps_float32_inputs(target: Onnx, tmp_path: Path) -> None:
    net, program = references.network("resnet"), references.captured("resnet")
    program, _ = optimize.FuseConvBN().apply(program)
    program, _ = optimize.CastFP16().apply(program)
    artifact = target.export(program, tmp_path / "net.onnx")
    assert (artifact.precision, artifact.inputs[0].dtype) == ("float16", "float32")
    x = REFERENCES["resnet"].inputs(3)
    with torch.inference_mode():
        want = net(x)
    assert relative_error(want, artifact.load(threads=1)(x)) < 1e-2


def test_a_file_without_a_kernel_is_target_unavailable(target: Onnx, tmp_path: Path) -> None:
    program = references.captured("resnet")
    program, _ = optimize.FuseConvBN().apply(program)
    program, _ = optimize.CastBF16().apply(program)
    artifact = target.export(program, tmp_path / "net.onnx")
    assert artifact.precision == "bfloat16"
    with pytest.raises(TargetUnavailable, match="Could not find an implementation for Conv"):
        artifact.load()


def test_without_onnxruntime_export_works_and_says_what_was_not_verified(
    monkeypatch: pytest.MonkeyPatch, target: Onnx, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    program = optimize.capture(nn.Linear(16, 4).eval(), (torch.rand(2, 16),))
    program, _ = QuantizeDynamic().apply(program)
    artifact = target.export(program, tmp_path / "net.onnx")
    assert artifact.coverage is not None
    assert artifact.coverage.kernels == {}
    assert any("not verified" in note for note in artifact.notes)
    with pytest.raises(TargetUnavailable, match="not installed"):
        artifact.load()


@pytest.mark.parametrize("name", ["lstm", "vit"])
def test_dynamic_int8_runs_integer_kernels(name: str, target: Onnx, tmp_path: Path) -> None:
    net, program = references.network(name), references.captured(name)
    plain = target.export(program, tmp_path / "float.onnx")
    program, outcome = QuantizeDynamic().apply(program)
    artifact = target.export(program, tmp_path / "int8.onnx")
    x = REFERENCES[name].inputs(5, seed=3)
    with torch.inference_mode():
        assert sqnr_db(net(x), artifact.load(threads=1)(x)) > 30
    assert artifact.precision == "int8-dynamic"
    assert artifact.size_bytes < 0.35 * plain.size_bytes
    coverage = artifact.coverage
    assert coverage is not None
    assert {rewrite.where for rewrite in outcome.rewrites} <= set(coverage.quantized)
    assert set(coverage.kernels) & {"DynamicQuantizeLSTM", "DynamicQuantizeMatMul"}


class Recurrent(nn.Module):
    """Runs a two-way LSTM, then a GRU, for which there is no dynamic kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 32, batch_first=True, bidirectional=True)
        self.gru, self.head = nn.GRU(64, 32, batch_first=True), nn.Linear(32, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(self.lstm(x)[0])
        return self.head(states[:, -1])


def test_dynamic_int8_leaves_a_gru_in_float_and_says_why(target: Onnx, tmp_path: Path) -> None:
    net = Recurrent().eval()
    program = optimize.capture(net, (torch.randn(2, 7, 16),))
    program, _ = QuantizeDynamic().apply(program)
    artifact = target.export(program, tmp_path / "net.onnx")
    assert artifact.coverage is not None
    assert artifact.coverage.quantized == ("lstm", "head")
    reasons = {layer.name: layer.reason for layer in artifact.coverage.left_float}
    assert reasons["gru"] == "ONNX Runtime has no dynamic INT8 GRU, and one written out pays from 256 hidden units on"
    x = torch.randn(5, 7, 16, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert sqnr_db(net(x), artifact.load(threads=1)(x)) > 30


def test_static_int8_counts_recurrent_layers_as_float_whatever_the_runtime() -> None:
    """A run of an LSTM said that no operator was left in float, while the LSTM was."""
    program = optimize.capture(Recurrent().eval(), (torch.randn(2, 7, 16),))
    program, outcome = QuantizeStatic([(torch.randn(8, 7, 16),)]).apply(program)
    policies = (ONNX_RUNTIME, OPENVINO, TENSORRT)
    told = [quantize_onnx(*to_onnx(program), program.plan, policy).left_float for policy in policies]
    told += [place(program, program.plan).left_float for place in (torchscript.place, pt2.place)]
    for found in told:
        assert [layer.name for layer in found if layer.reason == NO_STATIC_KERNEL] == ["lstm", "gru"]
    assert {skip.reason for skip in outcome.skips} == {NO_STATIC_KERNEL} and "--int8=dynamic" in NO_STATIC_KERNEL


def test_a_plan_without_a_layer_that_fits_is_refused(target: Onnx, tmp_path: Path) -> None:
    program = optimize.capture(nn.GRU(4, 4, batch_first=True).eval(), (torch.randn(2, 3, 4),))
    program, _ = QuantizeDynamic().apply(program)
    with pytest.raises(Refused, match="no dynamic INT8 GRU"):
        target.export(program, tmp_path / "net.onnx")


def test_availability_names_the_versions(target: Onnx) -> None:
    available = target.available()
    assert available.export and available.run
    assert {"torch", "onnx", "onnxruntime"} <= set(available.version)


SORTED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "all": lambda values, places: (values, places),
    "a number": lambda values, places: values + torch.sort(values.sum(), dim=-1, stable=True)[0],
    "the places alone": lambda values, places: places,
    "the last": lambda values, places: (values[:, -2:], places[:, -2:]),
    "more of one": lambda values, places: (values[:, :3], places[:, :2]),
    "every other": lambda values, places: (values[:, :3:2], places[:, :3:2]),
    "of another axis": lambda values, places: (values[..., :1], places[..., :1]),
    "more than there are": lambda values, places: (values[:, :9], places[:, :9]),
    "the first": lambda values, places: (values[:, :2], places[:, :2]),
    "that of the first": lambda values, places: values[:, :2],
}


@pytest.mark.parametrize("read", SORTED)
@pytest.mark.parametrize("descending", [False, True])
def test_a_stable_sort_is_that_of_onnx(read: str, descending: bool, tmp_path: Path) -> None:
    class Sorted(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return SORTED[read](*torch.sort(x.round(), stable=True, dim=1, descending=descending))

    x = torch.randn(3, 6, 4)
    artifact = optimize.export(optimize.capture(Sorted(), x), "onnx", tmp_path / "net.onnx")
    found, want = artifact.load().run([x.numpy()]), pytree.tree_leaves(Sorted()(x))
    assert all(np.array_equal(one, other) for one, other in zip(found, want, strict=True))
    kinds = [node.op_type for node in onnx.load(tmp_path / "net.onnx").graph.node]
    assert ("Slice" in kinds) == (read in ("the last", "more of one", "every other", "of another axis"))


class Pair(NamedTuple):
    """A class of a model's own."""

    first: Tensor
    second: Tensor


@pytest.mark.parametrize(
    "arrange",
    [
        lambda x: {"a": x, "b": [x + 1]},
        lambda x: {(0, 1): x, 2: x + 1},
        lambda x: Pair(x, x + 1),
        lambda x: x.topk(2),
    ],
)
def test_answers_come_arranged_as_the_module_does_or_in_a_tuple(
    arrange: Callable[[Tensor], Any], tmp_path: Path
) -> None:
    class Arranged(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return arrange(x)

    x = torch.rand(2, 3)
    want = Arranged()(x)
    found = optimize.export(optimize.capture(Arranged(), x), "onnx", tmp_path / "net.onnx").load()(x)
    assert type(found) is (dict if isinstance(want, dict) and "a" in want else tuple)
    for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(want), strict=True):
        assert torch.equal(one, other)
