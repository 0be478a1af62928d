"""The pt2 target: which layers become integer kernels of a compiled package, and what is said of the rest."""

import dataclasses
import importlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

import optimize
from optimize import graph, processor
from optimize.errors import Refused, TargetUnavailable
from optimize.graph import aten
from optimize.measure.openers import Opening
from optimize.processor import Processor
from optimize.program import Program
from optimize.targets.base import Artifact
from optimize.targets.pt2 import PT2, compiler
from optimize.targets.pt2.compiler import kept_headers
from optimize.targets.pt2.coverage import Call, read_calls
from optimize.targets.pt2.lowering import lower
from optimize.targets.pt2.placement import InductorPlacement, place
from tests.cpus import NEEDS_VNNI
from tests.nets import Called, sqnr_db
from tests.targets.scripted import captured, draw, quantized, seeded

TARGET = PT2()
SHAPE = (6, 12, 12)
READER = """
import sys, numpy as np, torch
package = torch._inductor.aoti_load_package(sys.argv[1])
for x in sys.argv[2:]:
    np.save(x + ".answer.npy", package(torch.from_numpy(np.load(x)))[0].numpy())
assert "optimize" not in sys.modules and not hasattr(torch.ops.quantized_decomposed, "quantize_per_tensor")
"""


def _convolution(*args: Any, **kwargs: Any) -> nn.Module:
    return seeded(lambda: nn.Conv2d(*args, **kwargs))


def _everything(net: Any, x: Tensor) -> Tensor:
    """A pooled stem, a block with a shortcut, one layer called twice, a transposed layer, rows for a linear layer."""
    x = nn.functional.max_pool2d(net.stem(x).relu(), 2)
    x = (net.second(net.first(x).relu()) + net.shortcut(x)).relu()
    x = net.twice(net.twice(nn.functional.pad(x, (0, 1, 0, 1))).relu())
    return net.rows(net.up(x).sigmoid().flatten(2))


@pytest.fixture(scope="module")
def floats() -> Program:
    layers = {
        "stem": _convolution(6, 8, 3, padding=1),
        "first": _convolution(8, 8, 3, padding=1, groups=2),
        "second": _convolution(8, 12, 3, 2, 1),
        "shortcut": _convolution(8, 12, 1, 2),
        "twice": _convolution(12, 12, 3, padding=2, dilation=2),
        "up": seeded(lambda: nn.ConvTranspose2d(12, 4, 2, 2)),
        "rows": seeded(lambda: nn.Linear(64, 10)),
    }
    return captured(_everything, SHAPE, **layers)


@pytest.fixture(scope="module")
def integers(floats: Program) -> Program:
    """The same in integers for every processor, which a compiled file is not."""
    return quantized(floats, [draw(16, *SHAPE, seed=seed) for seed in (1, 2)], cpu="any")


@pytest.fixture(scope="module")
def artifact(integers: Program, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    if not TARGET.available().export:
        pytest.skip("there is no C++ compiler: apt install g++")
    return TARGET.export(integers, tmp_path_factory.mktemp("pt2") / "net.pt2")


# The package


def test_every_layer_that_can_is_an_integer_kernel_of_the_file(artifact: Artifact) -> None:
    assert artifact.coverage is not None
    assert artifact.coverage.quantized == ("stem", "first", "second", "shortcut", "twice", "twice", "rows")
    kernels = artifact.coverage.kernels
    assert (kernels["qconv_pointwise_tensor"], kernels["qconv2d_pointwise_binary_tensor"]) == (5, 1)
    assert (kernels["qlinear_pointwise_tensor"], kernels["quantized::max_pool2d"]) == (1, 1)
    left = {layer.name: layer.reason for layer in artifact.coverage.left_float}
    assert left.pop("up") == "inductor has no integer kernel for conv_transpose2d"
    assert [layer.op for layer in artifact.coverage.left_float if layer.name in left] == ["sigmoid"]


def test_the_file_answers_in_a_process_that_knows_only_torch(
    artifact: Artifact, floats: Program, integers: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    paths = [tmp_path / f"{batch}.npy" for batch in (1, 5)]
    for batch, path in zip((1, 5), paths, strict=True):
        np.save(path, draw(batch, *SHAPE, seed=batch).numpy())
    command = [sys.executable, "-P", "-W", "ignore", "-c", READER, str(artifact.path), *map(str, paths)]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=300)
    runner, simulated = artifact.load(threads=1), lower(integers)[0]
    for path in paths:
        x, answer = torch.from_numpy(np.load(path)), torch.from_numpy(np.load(f"{path}.answer.npy"))
        assert torch.equal(runner(x), answer)
        assert sqnr_db(floats(x), answer) > 30
        assert sqnr_db(simulated(x), answer) > 35


def test_loading_leaves_nothing_in_the_temporary_folder(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    runner = artifact.load()
    assert not list(tmp_path.iterdir())
    assert runner(draw(2, *SHAPE)).shape == (2, 4, 10)


@pytest.mark.parametrize("before", ["nothing", "others may write", "a link", "a file"])
def test_headers_are_kept_where_nobody_else_can_have_put_some(
    before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were looked for under a name of torch's that everybody knows, and code in them is compiled into the file."""
    codecache = importlib.import_module("torch._inductor.codecache")
    for name in ("_HEADER_DIR", "_HEADER_LOCK_DIR"):
        monkeypatch.setattr(codecache, name, getattr(codecache, name))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place, own = tmp_path / f"optimize-headers-{os.geteuid()}", tmp_path / "own"
    (tmp_path / "others").mkdir(0o700)
    if before == "others may write":
        place.mkdir()
        place.chmod(0o777)
    elif before != "nothing":
        place.symlink_to(tmp_path / "others") if before == "a link" else place.touch()
    with kept_headers(own):
        assert Path(codecache._HEADER_DIR) == own / "headers"
        assert Path(codecache._HEADER_LOCK_DIR).parent == Path(codecache._HEADER_DIR)
        (own / "headers/a.h.gch").touch()
    assert before != "nothing" or place.stat().st_mode & 0o777 == 0o700
    with kept_headers(tmp_path / "next"):
        assert (tmp_path / "next/headers/a.h.gch").exists() == (before == "nothing")


def test_a_header_that_is_not_whole_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("_HEADER_DIR", "_HEADER_LOCK_DIR"):
        monkeypatch.setattr(f"torch._inductor.codecache.{name}", "")
    with pytest.raises(RuntimeError), kept_headers(tmp_path / "own"):
        (tmp_path / "own/headers/a.h.gch").touch()
        raise RuntimeError
    with kept_headers(tmp_path / "next"):
        assert not [*(tmp_path / "next/headers").iterdir()]


def test_loops_take_the_threads_of_the_process_that_runs_them(artifact: Artifact) -> None:
    with zipfile.ZipFile(artifact.path) as archive:
        source = next(name for name in archive.namelist() if name.endswith(".kernel.cpp"))
        code = archive.read(source).decode()
    assert "#pragma omp parallel\n" in code and "num_threads(" not in code


@NEEDS_VNNI
def test_a_compiled_file_is_for_this_processor_whatever_was_asked(artifact: Artifact, tmp_path: Path) -> None:
    found = Opening(tmp_path, trust=True).open(str(artifact.path)).artifact
    assert artifact.cpu == found.cpu == processor.host().level
    assert not any("every x86" in note for note in artifact.notes)
    assert TARGET.load(found).run([np.ones((1, *SHAPE), np.float32)])[0].shape == (1, 4, 10)


def test_the_artifact_says_what_it_is_tied_to(artifact: Artifact) -> None:
    assert artifact.precision == "int8" and artifact.inputs[0].shape == ("batch", *SHAPE)
    assert "same kind of CPU" in artifact.notes[0] and torch.__version__.split("+")[0] in artifact.notes[0]


@pytest.mark.slow
def test_bfloat16_is_compiled_too(floats: Program, tmp_path: Path) -> None:
    halves = optimize.Pipeline([optimize.CastBF16()]).run(floats).program
    artifact = TARGET.export(halves, tmp_path / "net.pt2")
    x = draw(3, *SHAPE)
    assert (artifact.precision, artifact.coverage) == ("bfloat16", None)
    assert sqnr_db(floats(x), artifact.load(threads=1)(x)) > 40


# InductorPlacement


def _placed(function: Any, shape: tuple[int, ...], **layers: nn.Module) -> tuple[Program, InductorPlacement]:
    program = quantized(captured(function, shape, **layers), [draw(16, *shape)])
    assert program.quantization is not None
    return program, place(program, program.quantization)


def _ops(nodes: Any) -> set[str]:
    return {node.op if node.op == "placeholder" else graph.op_name(node) for node in nodes}


def test_a_residual_block_never_leaves_the_integers() -> None:
    def block(net: Any, x: Tensor) -> Tensor:
        x = net.stem(x).relu()
        x = (net.inner(x) + x).relu()
        return net.head(x)

    convolutions = {name: _convolution(6, 6, 3, padding=1) for name in ("stem", "inner", "head")}
    program, placement = _placed(block, SHAPE, **convolutions)
    assert _ops(placement.replaced) == {"relu"} and len(placement.replaced) == 2
    lowered, _ = lower(program)
    total = next(graph.calls(lowered.graph, aten.add.Tensor))
    assert _ops(total.all_input_nodes) == {"conv2d", "dequantize_per_tensor"}


def test_what_others_need_in_float_stays_beside_the_integers() -> None:
    def norms(net: Any, x: Tensor) -> Tensor:
        x = net.before(x)
        return x + net.behind(x)

    linear = {name: seeded(lambda: nn.Linear(8, 8)) for name in ("before", "behind")}
    program, placement = _placed(norms, (5, 8), **linear)
    assert len(placement.ranges) == 2 and not placement.replaced
    lowered, _ = lower(program)
    total = next(graph.calls(lowered.graph, aten.add.Tensor))
    assert _ops(total.all_input_nodes) == {"linear"}


def test_an_output_of_the_program_stays_float() -> None:
    first, second = _convolution(6, 6, 1), _convolution(6, 6, 1)

    def both(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = net.first(x)
        return y, net.second(y)

    _, placement = _placed(both, SHAPE, first=first, second=second)
    assert not placement.replaced


@pytest.mark.parametrize(
    "move",
    [lambda x: nn.functional.max_pool2d(x, 2), lambda x: nn.functional.pad(x, (1, 0, 1, 0))],
    ids=["max pool", "zero padding"],
)
def test_both_sides_of_a_move_have_one_scale(move: Any) -> None:
    def pooled(net: Any, x: Tensor) -> Tensor:
        return net.behind(move(net.before(x).relu()))

    _, placement = _placed(pooled, SHAPE, before=_convolution(6, 8, 3), behind=_convolution(8, 4, 3))
    moved, source = (node for node in placement.ranges if node.op != "placeholder")
    assert moved.all_input_nodes == [source] and placement.ranges[moved] == placement.ranges[source]


def test_padding_with_another_value_keeps_a_scale_of_its_own() -> None:
    def padded(net: Any, x: Tensor) -> Tensor:
        return net.behind(nn.functional.pad(net.before(x), (1, 1, 1, 1), value=9.0))

    _, placement = _placed(padded, SHAPE, before=_convolution(6, 8, 3), behind=_convolution(8, 4, 3))
    assert max(interval.high for interval in placement.ranges.values()) == pytest.approx(9.0, rel=0.01)
    assert not placement.replaced


@pytest.mark.parametrize(
    "layer, shape, reason",
    [
        (lambda: nn.Conv3d(2, 2, 3), (2, 5, 5, 5), "inductor has no integer kernel for conv3d"),
        (lambda: nn.ConvTranspose2d(2, 2, 3), (2, 5, 5), "inductor has no integer kernel for conv_transpose2d"),
    ],
)
def test_a_program_without_integer_layers_is_refused_with_the_reason(
    layer: Any, shape: tuple[int, ...], reason: str
) -> None:
    program = quantized(captured(lambda net, x: net.layer(x), shape, layer=seeded(layer)), [draw(4, *shape)])
    with pytest.raises(Refused, match=reason):
        lower(program)


def test_layers_given_back_to_float_keep_their_reason() -> None:
    program, _ = _placed(lambda net, x: net.b(net.a(x)), SHAPE, a=_convolution(6, 6, 1), b=_convolution(6, 6, 1))
    assert program.quantization is not None
    first = next(graph.calls(program.graph, aten.conv2d.default))
    plan = program.quantization.without({first.name: "it costs too much accuracy"})
    placement = place(program, plan)
    assert [(layer.name, layer.reason) for layer in placement.left_float] == [("a", "it costs too much accuracy")]
    assert len(placement.weights) == 1


def test_weights_computed_at_run_time_stay_float() -> None:
    def modulated(net: Any, x: Tensor) -> Tensor:
        return net.fixed(nn.functional.linear(x, net.matrix.weight * x.mean()))

    layers = {"matrix": nn.Linear(8, 8, bias=False), "fixed": nn.Linear(8, 4)}
    _, placement = _placed(modulated, (8,), **layers)
    assert [layer.reason for layer in placement.left_float] in (
        ["its weight is computed at run time"],
        ["the quantization plan leaves it in float"],
    )


def test_the_callers_program_is_untouched(integers: Program) -> None:
    text = integers.text()
    lower(integers)
    assert integers.text() == text


# What can go wrong


def test_other_kinds_of_int8_are_refused() -> None:
    program = captured(lambda net, x: net.layer(x), (8,), layer=nn.Linear(8, 8))
    dynamic = optimize.QuantizeDynamic().apply(program)[0]
    with pytest.raises(Refused, match="static INT8; this program is int8-dynamic"):
        TARGET.export(dynamic, Path("never.pt2"))


def test_without_a_compiler_it_says_what_to_install(floats: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = TARGET.available()
    assert (found.export, found.run, found.install) == (False, True, "apt install g++")
    with pytest.raises(TargetUnavailable, match=r"no C\+\+ compiler"):
        TARGET.export(floats, Path("never.pt2"))


def test_a_compiler_that_fails_is_a_refusal_and_leaves_no_file(
    floats: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_COMPILE", "tests.sandbox.tasks:abort")
    with pytest.raises(Refused, match=r"Inductor cannot compile the program \(signal SIGABRT"):
        compiler.compile_package(floats.export(), tmp_path / "net.pt2")
    assert not list(tmp_path.iterdir())


def test_a_full_temporary_folder_is_told(floats: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_COMPILE", "tests.sandbox.tasks:abort")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    with pytest.raises(Refused, match="is full"):
        compiler.compile_package(floats.export(), tmp_path / "net.pt2")


def test_a_compiler_that_hangs_is_stopped(floats: Program, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="still compiling after 0 s"):
        compiler.compile_package(floats.export(), tmp_path / "net.pt2", limit_s=0.05)
    assert not list(tmp_path.iterdir())


def test_calls_are_read_in_order(artifact: Artifact) -> None:
    calls = read_calls(artifact.path)
    assert isinstance(calls[0], Call) and not calls[0].is_integer and calls[0].computes == ""
    assert [call.is_integer for call in calls].count(True) == 8


def test_the_graph_handed_over_has_integer_weights(integers: Program) -> None:
    lowered, placement = lower(integers)
    for node in placement.weights:
        twin = next(other for other in lowered.graph.nodes if other.name == node.name)
        weight = graph.argument(twin, "weight").args[0]
        assert isinstance(weight, fx.Node)
        assert graph.attribute(lowered.graph_module, str(weight.target)).dtype is torch.int8


class Tokens(nn.Module):
    """Two linear layers over 32 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def test_layers_spared_for_their_error_multiply_in_bfloat16_where_the_cpu_is_fast_else_in_integers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processor, "host", lambda: Processor(flags=frozenset({"avx512_bf16"})))
    torch.manual_seed(0)
    x = torch.randn(4, 32, 8)
    program = optimize.capture(Tokens().eval(), (x,))
    program, _ = optimize.QuantizeStatic(calibration=[x], calibrator="minmax", rounding="nearest").apply(program)
    assert program.quantization is not None
    names = [node.name for node in program.graph.nodes if "linear" in node.name]
    plan = dataclasses.replace(program.quantization.without({names[0]: "it errs most"}), spared=frozenset(names[:1]))
    lowered, placement = lower(dataclasses.replace(program, quantization=plan))
    kinds = {node.name: node.meta["val"].dtype for node in lowered.graph.nodes if node.name in names}
    assert kinds == {names[0]: torch.bfloat16, names[1]: torch.float32}
    assert [node.name for node in placement.weights] == names[1:]
    torch.testing.assert_close(lowered(x), program(x), rtol=0, atol=0.05)
    monkeypatch.setattr(processor, "host", Processor)
    lowered, placement = lower(dataclasses.replace(program, quantization=plan))
    assert torch.bfloat16 not in {node.meta["val"].dtype for node in lowered.graph.nodes if node.name in names}
    assert [node.name for node in placement.weights] == names and not placement.left_float


def test_int8_mixed_with_bfloat16_is_refused(tmp_path: Path) -> None:
    x = torch.randn(4, 32, 8)
    program = optimize.capture(Tokens().eval(), (x,))
    program, _ = optimize.QuantizeStatic(calibration=[x], calibrator="minmax", rounding="nearest").apply(program)
    mixed, _ = optimize.CastBF16(mixed=True).apply(program)
    with pytest.raises(Refused, match="Inductor has no INT8 mixed with bfloat16"):
        PT2().export(mixed, tmp_path / "net.pt2")


def test_weights_of_integer_convolutions_are_packed_for_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import freezing

    from optimize.targets.pt2.compiler import pack_for_one_sample

    monkeypatch.setattr(freezing, "freezing_passes", lambda module, inputs: None)
    pack_for_one_sample()
    made = fx.Graph()
    source = made.placeholder("x")
    source.meta["val"] = torch.empty(1, 3, 8, 8)
    known, free = (
        made.call_function(torch.ops.onednn.qconv_prepack, ("weight", shape)) for shape in ([2, 3, 8, 8], None)
    )
    for packed in (known, free):
        made.call_function(torch.ops.onednn.qconv_pointwise.default, (source, 1.0, 0, packed))
    made.output(source)
    freezing.freezing_passes(fx.GraphModule(nn.Module(), made), ())
    assert (known.args[-1], free.args[-1]) == ([2, 3, 8, 8], [1, 3, 8, 8])


def _small_maps(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Loops behind convolutions of one channel and of one pixel; one layer called twice."""
    x = net.twice(net.twice(nn.functional.max_pool2d(net.stem(x), 2).relu()).relu())
    return x.relu(), net.pixel(x.mean((2, 3), keepdim=True)).sin()


def _small_layers() -> dict[str, nn.Module]:
    stem, twice = _convolution(1, 8, 3, padding=1), _convolution(8, 8, 3, padding=1, groups=2)
    return {"stem": stem, "twice": twice, "pixel": _convolution(8, 8, 3, padding=2)}


@pytest.fixture
def small_maps() -> nn.Module:
    if not TARGET.available().export:
        pytest.skip("there is no C++ compiler: apt install g++")
    return Called(_small_maps, **_small_layers()).eval()


@pytest.mark.slow
def test_one_sample_finds_float_weights_packed_and_other_shapes_fit(small_maps: nn.Module, tmp_path: Path) -> None:
    program = optimize.capture(small_maps, (draw(3, 1, 24, 20),), dynamic_size=True)
    artifact = TARGET.export(program, tmp_path / "net.pt2")
    np.save(tmp_path / "x.npy", draw(1, 1, 24, 20).numpy())
    command = [sys.executable, "-P", "-W", "ignore", "-c", READER, str(artifact.path), str(tmp_path / "x.npy")]
    environment = {**os.environ, "ONEDNN_VERBOSE": "1"}
    said = subprocess.run(command, check=True, cwd=tmp_path, timeout=300, env=environment, capture_output=True)
    primitives = [line.split(",")[5] for line in said.stdout.decode().splitlines() if ",exec," in line]
    assert primitives == ["convolution"] * 4
    runner = artifact.load(threads=1)
    for shape in [(1, 1, 24, 20), (5, 1, 24, 20), (32, 1, 24, 20), (1, 1, 11, 40), (4, 1, 30, 9)]:
        torch.testing.assert_close(runner(draw(*shape)), program(draw(*shape)))


def _maps_and_rows(net: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same, and sums of rows behind a layer that stays in float."""
    maps, pixel = _small_maps(net, x)
    rows = maps.flatten(2)
    rows = rows + net.floats(rows)
    for layer in (net.first, net.second):
        rows = rows + layer(nn.functional.layer_norm(rows, (36,)))
    return maps, pixel, rows.sin()


@pytest.fixture(scope="module")
def maps_and_rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Program, Artifact]:
    """The program in integers, and its file."""
    if not TARGET.available().export:
        pytest.skip("there is no C++ compiler: apt install g++")
    layers = {name: seeded(nn.Linear, 36, 36) for name in ("floats", "first", "second")}
    program = captured(_maps_and_rows, (1, 12, 12), **_small_layers(), **layers)
    program = quantized(program, [draw(16, 1, 12, 12)])
    assert program.quantization is not None
    floats = next(iter(graph.calls(program.graph, aten.linear.default))).name
    program = dataclasses.replace(program, quantization=program.quantization.without({floats: "it errs most"}))
    return program, TARGET.export(program, tmp_path_factory.mktemp("pt2") / "net.pt2")


@pytest.mark.slow
def test_what_loops_read_behind_one_channel_or_one_pixel_is_in_order(maps_and_rows: tuple[Program, Artifact]) -> None:
    program, artifact = maps_and_rows
    runner = artifact.load(threads=1)
    for x in (draw(1, 1, 12, 12, seed=1), draw(5, 1, 12, 12, seed=2)):
        assert all(sqnr_db(want, got) > 25 for want, got in zip(program(x), runner(x), strict=True))


@pytest.mark.slow
def test_sums_behind_a_float_layer_are_added_in_place(maps_and_rows: tuple[Program, Artifact]) -> None:
    with zipfile.ZipFile(maps_and_rows[1].path) as archive:
        text = "".join(archive.read(name).decode() for name in archive.namelist() if name.endswith(".wrapper.cpp"))
    calls = [line for line in text.splitlines() if "CHECK(aoti_torch_cpu__qlinear_pointwise_binary" in line]
    assert len(calls) == 2 and all('"sum"' in line for line in calls)


def _lines(net: Any, x: Tensor) -> Tensor:
    """Convolutions of one dimension, the activation of one read twice; rows that lie in another order."""
    y = net.first(x).relu()
    z = net.second(nn.functional.pad(y, (2, 0))).relu() + y
    steps, _ = net.steps(net.third(z).transpose(1, 2) + z.transpose(1, 2))
    return net.rows(steps)


def test_lines_with_shortcuts_and_steps_in_time_are_compiled(tmp_path: Path) -> None:
    if not TARGET.available().export:
        pytest.skip("there is no C++ compiler: apt install g++")
    layers = {
        "first": seeded(nn.Conv1d, 6, 8, 3, padding=1), "second": seeded(nn.Conv1d, 8, 8, 3),
        "third": seeded(nn.Conv1d, 8, 8, 3, padding=1), "steps": seeded(nn.GRU, 8, 7, batch_first=True),
        "rows": seeded(nn.Linear, 7, 5),
    }  # fmt: skip
    program = quantized(captured(_lines, (6, 20), **layers), [draw(32, 6, 20)])
    artifact = TARGET.export(program, tmp_path / "net.pt2")
    assert artifact.coverage is not None and len(artifact.coverage.quantized) == 4
    runner = artifact.load(threads=1)
    for x in (draw(1, 6, 20, seed=1), draw(5, 6, 20, seed=2)):
        assert sqnr_db(program(x), runner(x)) > 25


def test_one_sample_of_a_volume_is_enlarged(tmp_path: Path) -> None:
    """Inductor put weights in an order for which one sample was answered wrongly."""
    if not TARGET.available().export:
        pytest.skip("there is no C++ compiler: apt install g++")
    layers = {"down": seeded(nn.Conv3d, 4, 8, 3, padding=1), "up": seeded(nn.ConvTranspose3d, 8, 4, 2, 2)}
    program = captured(lambda m, x: m.up(m.down(x)), (4, 4, 4, 4), **layers)
    runner = TARGET.export(program, tmp_path / "net.pt2").load(threads=1)
    for x in (draw(1, 4, 4, 4, 4, seed=1), draw(3, 4, 4, 4, 4, seed=2)):
        torch.testing.assert_close(runner(x), program(x))


@pytest.mark.parametrize("is_turned", [False, True])
def test_values_that_lie_in_order_are_rounded_as_they_are(*, is_turned: bool) -> None:
    """A copy between a layer and the rounding behind it would keep its kernel from returning integers."""

    def compute(net: Any, x: Tensor) -> Tensor:
        y = net.first(x).relu() + x
        return net.second(y.transpose(1, 2) if is_turned else y)

    layers = {"first": seeded(nn.Linear, 6, 6), "second": seeded(nn.Linear, 6, 3)}
    program = quantized(captured(compute, (6, 6), **layers), [draw(32, 6, 6)])
    copies = graph.calls(lower(program)[0].graph, aten.clone.default)
    assert [graph.is_call(copy.args[0], aten.transpose.int) for copy in copies] == [True] * is_turned
