"""Every runtime's kernels join to all layers of a small net, with times above zero."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import optimize
from optimize.errors import Refused, UsageError
from optimize.profile.artifacts import profile_file
from optimize.profile.kernels import summarize
from optimize.profile.profiling import profile_program
from optimize.profile.result import Profile
from optimize.program import Program
from optimize.registry import find_target, targets
from optimize.targets.base import Probing
from optimize.targets.openvino.probe import undisturbed
from optimize.targets.probe import Run, TimedKernel, calls_of
from optimize.targets.pt2.coverage import claims_of
from tests.profile.nets import LIMITS, attention, block, recurrent

LAYERS = {"stem.0", "stem.1", "stem.2", "body", "add", "relu_1", "mean", "head"}


def profiled(program: Program, target: str, **given: object) -> Profile:
    return profile_program(program, target, limits=LIMITS, fresh=False, **given)  # type: ignore[arg-type]


PROFILED = [name for name, target in targets().items() if target.profiled]


@pytest.fixture(scope="module", params=[name for name in PROFILED if name != "pt2"])
def found(request: pytest.FixtureRequest) -> Profile:
    return profiled(block(), request.param)


def check_whole(found: Profile, program: Program) -> None:
    """Every call of the graph belongs to one kernel, every kernel took time."""
    calls = calls_of(program).reads
    owned = [name for kernel in found.kernels for name in kernel.nodes]
    assert sorted(owned) == sorted(calls)
    assert all(kernel.seconds > 0 for kernel in found.kernels)
    assert all(kernel.layers or kernel.serves for kernel in found.kernels)


def test_every_layer_is_in_one_kernel(found: Profile) -> None:
    check_whole(found, block())
    assert {layer for kernel in found.kernels for layer in kernel.layers} == LAYERS


def test_the_sum_and_what_lies_outside_make_the_run(found: Profile) -> None:
    assert found.total_s > 0
    assert found.layers_s + found.outside_s == pytest.approx(found.total_s)
    assert found.macs == 16 * 8 * 8 * 9 * (3 + 16) + 160
    assert found.runs >= 10 and found.clock in ("wall", "processor")


def test_a_fused_layer_lists_all_its_modules(found: Profile) -> None:
    stem = next(kernel for kernel in found.kernels if "stem.0" in kernel.layers)
    fuses = found.target in ("onnx", "openvino")
    assert stem.layers == (("stem.0", "stem.1", "stem.2") if fuses else ("stem.0",))
    assert stem.moved_bytes is not None and stem.intensity == stem.macs / stem.moved_bytes  # type: ignore[operator]


@pytest.mark.parametrize("target", ["eager", "torchscript", "onnx", "openvino"])
@pytest.mark.parametrize("make", [attention, recurrent])
def test_attention_and_recurrence_are_joined_whole(make: object, target: str) -> None:
    program = make()  # type: ignore[operator]
    check_whole(profiled(program, target), program)


@pytest.mark.slow
def test_pt2_kernels_are_joined_whole() -> None:
    found = profiled(block(), "pt2")
    check_whole(found, block())
    stem = next(kernel for kernel in found.kernels if "stem.0" in kernel.layers)
    assert stem.layers == ("stem.0", "stem.1", "stem.2")


def test_pt2_loops_are_known_by_their_operators() -> None:
    names = ["cpp_fused_relu_0", "mkldnn__convolution_pointwise", "cpp_fused_mean_1", "linear_pointwise"]
    claims = claims_of(names, [(), ("relu",), (), ("mean", "linear")], block())
    assert claims == [("relu_1",), ("relu",), ("mean",), ("linear",)]


def test_eager_says_where_python_takes_time_and_the_graph_what_is_alive() -> None:
    found = profiled(block(), "eager", batch=2)
    assert found.batch == 2 and found.live is not None and found.live.peak_layer == "add"
    assert found.python is not None and 0 < found.python.own_share < 1
    assert any(entry.is_python and "forward" in entry.name for entry in found.python.functions)
    assert any(not entry.is_python for entry in found.python.functions)


def test_a_fresh_process_tells_memory_and_the_first_call() -> None:
    found = profile_program(block(), "onnx", limits=LIMITS)
    assert found.fresh is not None
    assert found.fresh.first_call_s > 0 and (found.fresh.peak_memory_bytes or 0) > 10**7


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    return {
        name: optimize.export(block(), name, folder / f"net{end}").path
        for name, end in (("onnx", ".onnx"), ("openvino", ".xml"))
    }


def test_an_onnx_file_is_joined_to_its_own_nodes(files: dict[str, Path]) -> None:
    found = profile_file(files["onnx"], batch=2, limits=LIMITS, fresh=False)
    modules = {node.name.partition("/")[0] for node in onnx.load(files["onnx"]).graph.node}
    assert {layer for kernel in found.kernels for layer in kernel.layers} == modules
    assert found.macs == 2 * (16 * 8 * 8 * 9 * (3 + 16) + 160)
    assert found.batch == 2 and all(kernel.seconds > 0 for kernel in found.kernels)


def test_what_runs_inside_a_branch_is_part_of_it(tmp_path: Path) -> None:
    def branch(op: str) -> onnx.GraphProto:
        made = onnx.helper.make_tensor_value_info("made", onnx.TensorProto.FLOAT, ["batch", 4])
        return onnx.helper.make_graph([onnx.helper.make_node(op, ["x"], ["made"])], op, [], [made])

    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 4]) for name in "xy")
    nodes = [
        onnx.helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        onnx.helper.make_node("Greater", ["sum", "zero"], ["is_more"]),
        onnx.helper.make_node("If", ["is_more"], ["y"], then_branch=branch("Relu"), else_branch=branch("Neg")),
    ]
    zero = onnx.numpy_helper.from_array(np.float32(0), "zero")
    graph, opsets = onnx.helper.make_graph(nodes, "net", [x], [y], [zero]), [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
    onnx.save(model, tmp_path / "net.onnx")
    found = profile_file(tmp_path / "net.onnx", limits=LIMITS, fresh=False)
    assert [kernel.op for kernel in found.kernels][-1] == "If" and len(found.kernels) == 3


def test_an_openvino_file_is_joined_to_its_own_nodes(files: dict[str, Path]) -> None:
    found = profile_file(files["openvino"], limits=LIMITS, fresh=False)
    layers = {layer for kernel in found.kernels for layer in kernel.layers}
    assert {"stem.0", "stem.2", "body", "add", "relu_1"} <= layers


@pytest.mark.parametrize(("target", "ending"), [("onnx", ".onnx"), ("openvino", ".xml")])
def test_a_quantized_file_names_the_modules_of_the_model(target: str, ending: str, tmp_path: Path) -> None:
    """Whatever a target adds (quantizing, casts, padding) goes by a module, and no kernel by a number alone."""
    calibration = [block().inputs]
    program = optimize.Pipeline([optimize.QuantizeStatic(calibration=calibration)]).run(block()).program
    artifact = optimize.export(program, target, tmp_path / f"net{ending}")
    found = profile_file(artifact.path, limits=LIMITS, fresh=False)
    assert {layer for kernel in found.kernels for layer in kernel.layers} - {"x", "output_0"} <= LAYERS
    if target == "onnx":
        assert {kernel.dtype for kernel in found.kernels if kernel.macs} == {"int8"}  # whose roof they are held against
        names = [node.name for node in onnx.load(artifact.path).graph.node]
        assert len(names) == len(set(names)) and {name.partition("/")[0] for name in names} <= LAYERS


def test_a_signal_after_openvino_ends_nothing() -> None:
    """Compiled models that go in the wrong order leave a stack for signals that is gone."""
    code = """
import os, signal
from optimize.profile.profiling import profile_program
from tests.profile.nets import LIMITS, block
profile_program(block(), "openvino", limits=LIMITS, fresh=False)
signal.signal(signal.SIGUSR1, lambda *_: print("handled"))
os.kill(os.getpid(), signal.SIGUSR1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout) == (0, "handled\n")


def test_what_cannot_be_profiled_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no target 'onx'"):
        profile_program(block(), "onx", limits=LIMITS)
    (tmp_path / "bad.onnx").write_bytes(b"not a model")
    with pytest.raises(Refused, match="is not an ONNX file"):
        profile_file(tmp_path / "bad.onnx", limits=LIMITS)


def test_the_profilers_own_cost_is_taken_off_by_notes() -> None:
    kernels = tuple(TimedKernel(name, "op", (name,)) for name in "ab")
    noisy = Run(90e-6, np.array([0.0, 5e-6]), np.array([60e-6, 20e-6]), np.array([3, 1]))
    runs = [Run(15e-6, np.array([0.0, 7e-6]), np.array([7e-6, 5e-6]), np.array([3, 1]))] * 4
    times = summarize(
        kernels, [*runs, noisy], np.array([[11e-6, 11e-6], [11e-6, 11e-6], [40e-6, 11e-6], [11e-6, 11e-6]])
    )
    # 4 µs too long for 4 notes: one a note, of which half a note lies outside the time noted
    assert times.seconds == pytest.approx((4.5e-6, 4.5e-6)) and times.outside_s == pytest.approx(2e-6)
    assert (times.clock, times.runs, times.typical.wall_s) == ("wall", 4, 15e-6)


def test_counters_of_means_give_single_runs_back() -> None:
    taken = np.array([[9.0, 4.0], [3.0, 2.0], [3.0, 2.0], [90.0, 2.0], [3.0, 2.0]])
    means = np.cumsum(taken, axis=0) / np.arange(1, 6)[:, None]
    durations, wall = undisturbed(means, taken.sum(1))
    assert durations == pytest.approx([3.0, 2.0]) and wall == 5.0


def test_a_layer_below_a_microsecond_has_its_time(tmp_path: Path) -> None:
    """OpenVINO's counters, whole microseconds, say of such a kernel that it did not run."""
    program = optimize.capture(torch.nn.Linear(8, 4), torch.zeros(1, 8))
    artifact = optimize.export(program, "openvino", tmp_path / "net.xml")
    probe = find_target("openvino").probe(Probing(artifact, [np.zeros((1, 8), np.float32)], tmp_path, 1, program))
    probe.profile(500)
    kernels, runs = probe.finish()
    assert "linear" in {node for kernel in kernels for node in kernel.nodes} and (runs[0].durations_s > 0).all()
