"""Comparing two files: spoilt ones are pinpointed, disguised and foreign ones are matched, other ones are refused."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

import optimize
from optimize.errors import Refused, UsageError
from optimize.measure import layers
from optimize.measure.feed import draw
from optimize.measure.layers import states
from optimize.measure.openers import Side, open_side
from optimize.measure.subjects import MODULE, Subject
from optimize.registry import find_target
from optimize.targets.base import Artifact, Runner, TensorSpec
from tests import references
from tests.measure.comparisons import compared, compared_sides, edited, renamed, save_onnx, scaled, write_pair

Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair("resnet", tmp_path_factory.mktemp("resnet"))


@pytest.fixture(scope="module")
def mobilenet(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair("mobilenetv3", tmp_path_factory.mktemp("mobilenet"))


def test_a_good_int8_file_goes_wrong_nowhere(resnet: Pair) -> None:
    found = compared(*resnet)
    assert found.first_wrong is None and not found.is_below and len(found.tensors) == 22
    assert [tensor.name for tensor in found.tensors[:3]] == ["x", "conv2d", "relu"]
    assert [tensor.stored for tensor in found.tensors[:3]] == [True, False, True]
    assert found.tensors[1].layer == "stem.conv" and found.tensors[1].input_db == found.tensors[0].distance.sqnr_db
    assert found.tensors[0].input_db is None and found.tensors[-1].basis == "output"
    assert found.top1 is not None and found.top1 > 0.9 and found.outputs[0].distance.sqnr_db > 30


def test_equal_files_are_equal_everywhere(resnet: Pair) -> None:
    found = compared(resnet[1], resnet[1])
    assert {tensor.distance.sqnr_db for tensor in found.tensors} == {200.0}
    assert found.outputs[0].distance.sqnr_db == 200.0 and found.top1 == 1.0 and found.drops(5) == []


def test_a_spoilt_weight_scale_is_pinpointed(resnet: Pair, tmp_path: Path) -> None:
    spoilt = edited(resnet[1], tmp_path / "spoilt.onnx", scaled("blocks.1.first.conv.weight_scale", 4))
    found = compared(resnet[0], spoilt)
    assert found.first_wrong is not None and found.is_below
    assert (found.first_wrong.layer, found.first_wrong.name) == ("blocks.1.first.conv", "conv2d_3")
    assert found.drops(1) == [found.first_wrong] and len(found.wrong) == 1
    follows = [tensor.layer for tensor in found.tensors if tensor.state == "follows"]
    assert follows[0] == "blocks.1/Relu" and "blocks.1.shortcut.conv" not in follows


def test_a_spoilt_activation_scale_is_pinpointed(resnet: Pair, tmp_path: Path) -> None:
    """Rounding four times coarser loses no answer yet, but no other value loses half as much."""
    spoilt = edited(resnet[1], tmp_path / "spoilt.onnx", scaled("relu_3_scale", 4))
    found = compared(resnet[0], spoilt)
    worst, second = found.drops(2)
    assert (worst.layer, worst.name) == ("blocks.1/Relu", "relu_3")
    assert worst.drop_db is not None and second.drop_db is not None and worst.drop_db > 2 * second.drop_db
    assert found.first_wrong is None
    wrong = compared(resnet[0], spoilt, threshold_db=33.5).first_wrong
    assert wrong is not None and wrong.name == "relu_3"


def test_a_dequantizer_of_another_scale_is_pinpointed(resnet: Pair, tmp_path: Path) -> None:
    def spoil(model: onnx.ModelProto) -> None:
        (node,) = [node for node in model.graph.node if node.output[0] == "relu_3_dq"]
        (scale,) = [entry for entry in model.graph.initializer if entry.name == node.input[1]]
        model.graph.initializer.add().CopyFrom(scale)
        model.graph.initializer[-1].name = node.input[1] = "another_scale"
        scaled("another_scale", 4)(model)

    found = compared(resnet[0], edited(resnet[1], tmp_path / "spoilt.onnx", spoil))
    assert found.first_wrong is not None and found.first_wrong.name == "relu_3"
    assert found.first_wrong.distance.sqnr_db == pytest.approx(-20 * math.log10(3), abs=1)


def test_what_the_file_expresses_differently_recovers(mobilenet: Pair) -> None:
    """HardSigmoid's line is folded into the convolution before it, which keeps the name of its value."""
    found = compared(*mobilenet)
    recovering = {tensor.layer: tensor for tensor in found.tensors if tensor.state == "recovers"}
    assert {f"blocks.{block}.gate.excite" for block in (0, 3, 4)} <= set(recovering)
    assert found.first_wrong is None and not found.is_below
    gates = [tensor for tensor in found.tensors if tensor.layer == "blocks.0.gate/HardSigmoid"]
    assert gates[0].input_db == recovering["blocks.0.gate.excite"].input_db
    assert not set(found.drops(100)) & set(recovering.values())
    assert all(tensor.drop_db is not None and tensor.drop_db < 10 for tensor in found.drops(100))


def test_a_file_of_quantize_static_is_matched(resnet: Pair, tmp_path: Path) -> None:
    foreign = _quantize_static(resnet[0], tmp_path / "foreign.onnx")
    found = compared(resnet[0], foreign)
    assert found.first_wrong is None and all(tensor.distance.sqnr_db > 25 for tensor in found.tensors)
    assert all(tensor.stored for tensor in found.tensors) and len(found.tensors) == 15
    spoilt = edited(foreign, tmp_path / "spoilt.onnx", scaled("blocks.2.first.conv.weight_scale", 4))
    wrong = compared(resnet[0], spoilt).first_wrong
    # The Relu is left to saturation: the convolution's rounding is its output.
    assert wrong is not None and (wrong.name, wrong.layer, wrong.op) == ("relu_5", "blocks.2/Relu", "Conv")


def test_quantizers_of_other_names_are_looked_through(resnet: Pair, tmp_path: Path) -> None:
    """As NNCF names them."""

    def foreign(name: str) -> str:
        kinds = {"_q": "q_output_QuantizeLinear_", "_dq": "dq_output_DequantizeLinear_"}
        return next((kind + name[::-1] for ending, kind in kinds.items() if name.endswith(ending)), name)

    other = edited(resnet[1], tmp_path / "nncf.onnx", renamed(foreign, nodes=False))
    assert compared(resnet[0], other).tensors == compared(*resnet).tensors


def test_layers_are_matched_by_their_names_then_by_their_places(resnet: Pair, tmp_path: Path) -> None:
    path = edited(resnet[1], tmp_path / "names.onnx", renamed(lambda name: f"v_{name}", nodes=False))
    found = compared(resnet[0], path)
    assert [tensor.basis for tensor in found.tensors] == ["name"] + ["layer"] * 9 + ["output"]
    path = edited(resnet[1], tmp_path / "places.onnx", renamed(lambda name: f"v_{name}", nodes=True))
    found = compared(resnet[0], path)
    assert [tensor.basis for tensor in found.tensors] == ["name"] + ["position"] * 9 + ["output"]
    assert found.tensors[1].layer == "relu/Relu" and found.first_wrong is None
    assert "by their place" in found.notes[-1]


def test_weights_outside_the_file_are_found(resnet: Pair, tmp_path: Path) -> None:
    path = tmp_path / "outside.onnx"
    onnx.save(onnx.load(resnet[1]), path, save_as_external_data=True, location="weights.bin", size_threshold=256)
    assert compared(resnet[0], path).tensors == compared(*resnet).tensors


def test_chunks_do_not_change_the_result(resnet: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compared(*resnet)
    monkeypatch.setattr(layers, "_CHUNK", 3)
    assert compared(*resnet) == whole


def test_a_value_that_is_not_finite_is_wrong(resnet: Pair, tmp_path: Path) -> None:
    spoilt = edited(resnet[0], tmp_path / "inf.onnx", scaled("blocks.1.second.conv.bias", math.nan))
    found = compared(resnet[0], spoilt)
    assert found.first_wrong is not None and found.first_wrong.name == "conv2d_4"
    assert found.first_wrong.distance.sqnr_db == -200 and found.first_wrong.distance.not_finite > 0
    assert found.outputs[0].distance.not_finite == 320 and found.outputs[0].distance.second_range is None
    assert compared(spoilt, spoilt).outputs[0].distance.sqnr_db == 200


class TwoByTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        mixed = torch.relu(self.mix(self.table(tokens).mean(1) + features))
        return mixed, self.head(mixed)


@pytest.fixture
def two_by_two() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return TwoByTwo().eval(), (torch.randint(0, 50, (2, 5)), torch.randn(2, 8))


def test_several_inputs_and_outputs(two_by_two: tuple[nn.Module, tuple[Tensor, Tensor]], tmp_path: Path) -> None:
    net, inputs = two_by_two
    first = save_onnx(net, inputs, tmp_path / "a.onnx")
    with torch.no_grad():
        net.get_submodule("head").weight.mul_(1.001)
    second = save_onnx(net, inputs, tmp_path / "b.onnx")
    found = compared(first, second)
    assert [output.distance.sqnr_db for output in found.outputs] == [200.0, pytest.approx(62, abs=3)]
    assert found.top1 is not None and found.first_wrong is None
    assert [tensor.basis for tensor in found.tensors].count("output") == 2
    np.savez(tmp_path / "data.npz", tokens=np.full((7, 5), 49), features=np.zeros((7, 8), np.float32))
    assert compared(first, second, data=str(tmp_path / "data.npz")).samples == 7


def test_half_precision_takes_the_same_samples(resnet: Pair, tmp_path: Path) -> None:

    program = references.captured("resnet", None)
    first = find_target("onnx").export(program, tmp_path / "a.onnx").path
    half, _ = optimize.CastFP16().apply(program)
    second = find_target("onnx").export(half, tmp_path / "b.onnx").path
    found = compared(first, second)
    assert found.first_wrong is None and 40 < found.outputs[0].distance.sqnr_db < 100


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def test_other_runtimes_compare_their_outputs(
    two_by_two: tuple[nn.Module, tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    net, inputs = two_by_two
    program = optimize.capture(net, inputs)
    onnx_file = save_onnx(net, inputs, tmp_path / "a.onnx")
    script_file = find_target("torchscript").export(program, tmp_path / "a.torchscript.pt").path
    eager_file = find_target("eager").export(program, tmp_path / "a.eager.pt2").path
    first, script, eager = (open_side(str(path), trust=True) for path in (onnx_file, script_file, eager_file))
    torch.save(nn.Linear(4, 3).state_dict(), tmp_path / "weights.pt")
    weights = open_side(str(tmp_path / "weights.pt"), trust=True, factory="tests.measure.test_layers:linear")
    assert weights.subject.kind == "state dict"
    for pair in ((first, script), (script, eager), (eager, first)):
        found = compared_sides(*pair)
        assert len(found.outputs) == 2 and found.outputs[1].distance.sqnr_db > 100
    with pytest.raises(Refused, match=r"between two ONNX files; '.*torchscript.pt' is .*TorchScript"):
        compared_sides(first, script, layers=True)
    with pytest.raises(UsageError, match="No file says"):
        compared_sides(script, script)
    assert compared_sides(script, script, input_shape="5:int64;8").outputs[0].distance.sqnr_db == 200


def test_a_file_that_does_not_say_what_it_takes_is_not_given_half(tmp_path: Path) -> None:
    """A module in float32 beside an ONNX file in float16, whose inputs are all that is known."""
    program = optimize.capture(nn.Linear(4, 3).eval(), (torch.randn(2, 4),))
    script = find_target("torchscript").export(program, tmp_path / "a.torchscript.pt").path
    half, _ = optimize.CastFP16([torch.randn(2, 4)]).apply(program)
    narrow = find_target("onnx").export(half, tmp_path / "a.onnx").path
    found = compared_sides(*(open_side(str(path), trust=True) for path in (script, narrow)))
    assert 40 < found.outputs[0].distance.sqnr_db < 100


def test_other_nets_are_refused(resnet: Pair, mobilenet: Pair, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="are not files of one network"):
        compared(resnet[0], mobilenet[0])
    linear = save_onnx(
        nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)), (torch.randn(2, 3, 32, 32),), tmp_path / "a.onnx"
    )
    with pytest.raises(Refused, match="share no value"):
        compared(resnet[0], edited(linear, linear, renamed(lambda name: f"v_{name}", nodes=True)))
    other = save_onnx(
        nn.Sequential(nn.Flatten(), nn.Linear(3072, 9)), (torch.randn(2, 3, 32, 32),), tmp_path / "b.onnx"
    )
    with pytest.raises(Refused, match="do not return the same outputs"):
        compared(resnet[0], other)
    smaller = save_onnx(nn.Linear(4, 2), (torch.randn(2, 4),), tmp_path / "c.onnx")
    with pytest.raises(Refused, match=r"takes x float32\[batch, 3, 32, 32\], '.*c.onnx' takes"):
        compared(resnet[0], smaller)


@pytest.mark.parametrize("content", [b"", b"junk", b"\x08\x08\x12"])
def test_a_file_that_is_no_model_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(Refused, match=r"bad\.onnx' is not an ONNX file"):
        open_side(str(path))


class Answering(Runner):
    """A file that answers what it is told."""

    def __init__(self, artifact: Artifact, answer: Any) -> None:
        super().__init__(artifact)
        self.answer = answer

    def run(self, inputs: Sequence[np.ndarray]) -> list[Any]:
        return [self.answer]


def answered(want: Any, got: Any) -> layers.Distances:
    """Compares two outputs."""
    artifact = Artifact(MODULE, Path("a"), (), (), "", "", 0, "")
    one, other = (Side(Subject("a", "test", artifact), Answering(artifact, answer)) for answer in (want, got))
    return compared_sides(one, other, input_shape="2")


def test_complex_outputs_are_compared_whole() -> None:
    value = np.array([[1 + 1j, 2 - 2j]])
    found = answered(value, value.conj())
    assert found.is_below and found.outputs[0].distance.sqnr_db < 0 and found.top1 is None
    assert answered(value, value).outputs[0].distance.sqnr_db == 200


@pytest.mark.parametrize(
    ("want", "got"),
    [(np.ones((1, 2)), np.ones((1, 2)) + 0j), ([np.ones(2)], [np.zeros(2)]), (np.array([["a"]]), np.array([["b"]]))],
)
def test_outputs_that_cannot_be_compared_are_not_equal(want: Any, got: Any) -> None:
    with pytest.raises(Refused, match="return what cannot be compared"):
        answered(want, got)


@pytest.mark.parametrize(
    ("value", "doubt"),
    [
        (np.full((1, 2), np.nan), "'output_0' held no number"),
        (np.ones((1, 0)), "'output_0' held no number"),
        (np.ones((1, 2)), "'output_0' was the same for all samples"),
    ],
)
def test_equal_outputs_that_prove_nothing(value: Any, doubt: str) -> None:
    found = answered(value, value)
    assert found.doubt == doubt and not found.is_proof and not found.is_below


def test_what_decibels_hide_is_said(tmp_path: Path) -> None:
    files = []
    for weight in (torch.eye(2), -torch.eye(2)):
        net = nn.Linear(2, 2)
        net.load_state_dict({"weight": weight, "bias": torch.full((2,), 1e4)})
        files.append(save_onnx(net, (torch.ones(2, 2),), tmp_path / f"net{len(files)}.onnx"))
    found = compared(*files, layers=False)
    assert found.is_proof and found.notes[0].startswith("'net1.onnx' has the same largest number in ")


def test_paths_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="There is no file"):
        open_side(str(tmp_path / "none.onnx"))
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(Refused, match="is a JSON file"):
        open_side(str(tmp_path / "report.json"))


def test_free_sizes_must_be_given(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["r"], "relu"), helper.make_node("Neg", ["r"], ["y"], "neg")],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "h", "w"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    path = tmp_path / "free.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    with pytest.raises(UsageError, match="leaves a size free"):
        compared(path, path)
    found = compared(path, path, input_shape="3,5,6")
    assert found.outputs[0].name == "y" and [tensor.name for tensor in found.tensors] == ["r", "y"]
    with pytest.raises(UsageError, match="does not fit"):
        compared(path, path, input_shape="4,5,6")


def test_inputs_larger_than_memory_are_refused() -> None:
    with pytest.raises(Refused, match="Input 'x' is too large: 1 x 3 x 1099511627776 is more than"):
        draw([TensorSpec("x", ("n", 3, 2**40), "float32")], 1, np.random.default_rng(0))


def test_a_spoilt_branch_is_no_recovery() -> None:
    """A wrong branch beside a large shortcut: the sum is above the threshold and yet far worse than before."""
    branch = [[], [0], [1], [0, 2], [3]]
    assert states([45, 8, 9, 22, 22], branch, {4}, 20)[0] == ["ok", "wrong", "follows", "ok", "ok"]
    assert states([45, 8, 9, 41, 22], branch, {4}, 20)[0] == ["ok", "recovers", "recovers", "ok", "ok"]
    assert states([24, 8, 9, 21, 22], branch, {4}, 20)[0] == ["ok", "recovers", "recovers", "ok", "ok"]


def test_recovering_is_more_than_averaging_out() -> None:
    chain = [[], [0], [1]]
    assert states([28, 19, 32], chain, {2}, 20)[0] == ["ok", "wrong", "ok"]
    assert states([40, 21, 38], chain, {2}, 20) == (["ok", "recovers", "ok"], [200, 40, 40])
    assert states([40, 19, 12], chain, {2}, 20)[0] == ["ok", "wrong", "follows"]


def _quantize_static(source: Path, path: Path) -> Path:
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    class Noise(CalibrationDataReader):
        def __init__(self) -> None:
            generator = np.random.default_rng(1)
            self.batches: Iterator[dict] = iter(
                [{"x": generator.standard_normal((8, 3, 32, 32), np.float32)} for _ in range(2)]
            )

        def get_next(self) -> dict | None:
            return next(self.batches, None)

    quantize_static(source, path, Noise(), per_channel=True)
    return path
