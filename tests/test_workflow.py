import functools
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import optimize
from models import REFERENCES
from optimize import workflow
from optimize.cli.run import exit_code
from optimize.errors import Refused, UsageError, VerificationFailed
from optimize.job import Job, open_program
from optimize.measure import quality
from optimize.measure.agreement import Agreement
from optimize.pipeline import transform
from optimize.program import Program
from optimize.recipe import Recipe, parse, read
from optimize.workflow import run_job
from tests.slow import but_slowly

pytestmark = pytest.mark.usefixtures("files_run_here")
ROOT = Path(__file__).parents[1]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()


def captured() -> Program:
    """Return ``net`` captured, nothing of it shared."""
    return _captured().clone()


@functools.cache
def _captured() -> Program:
    return optimize.capture(net(), (torch.rand(2, 3, 8, 8),))


def test_the_python_call_does_the_whole_line(tmp_path: Path) -> None:
    module, x = net(), torch.rand(64, 3, 8, 8)
    labels = module(x).argmax(1)
    report = optimize.optimize(
        module,
        (x[:2],),
        passes=[optimize.FuseConvBN(), optimize.QuantizeStatic(calibration=[x])],
        targets=["onnx"],
        evaluate=[(x, labels)],
        out=tmp_path / "out",
        layer_timing=False,  # which layers are faster in float is the machine's affair
    )
    assert [(row.target, row.precision, row.status) for row in report.rows] == [
        ("onnx", "float32", "measured"),
        ("onnx", "int8", "measured"),
    ]
    assert report.baseline.accuracy is not None and report.baseline.accuracy.value == 1.0
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert written == json.loads(report.model_dump_json())
    assert written["rows"][1]["coverage"]["kernels"]["QLinearConv"] == 1
    assert written["calibration"] == {"source": "list", "samples": 64, "synthetic": False}


def test_one_target_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    """ONNX Runtime has no bfloat16 convolution on CPU; TorchScript has."""
    report = optimize.optimize(
        net(),
        (torch.rand(2, 3, 8, 8),),
        passes=[optimize.FuseConvBN(), optimize.CastBF16()],
        targets=["onnx", "torchscript"],
        out=tmp_path / "out",
    )
    status = {(row.target, row.precision): row for row in report.rows}
    failed = status["onnx", "bfloat16"]
    assert failed.status == "failed" and failed.reason
    assert failed.path is None and not list((tmp_path / "out").glob("*bfloat16*.onnx"))
    assert any("few bfloat16 kernels for CPUs; take --to openvino" in warning for warning in report.warnings)
    assert status["torchscript", "bfloat16"].status == "measured"
    assert status["onnx", "float32"].status == "measured"


def test_models_of_another_run_in_the_same_folder_are_named(tmp_path: Path) -> None:
    """They stay: whoever asks for one runtime after the other wants both files."""
    net, inputs = torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), (torch.randn(2, 4),)
    first = optimize.optimize(net, inputs, targets=["torchscript"], out=tmp_path)
    (name,) = (Path(row.path).name for row in first.rows if row.path)
    second = optimize.optimize(net, inputs, targets=["onnx"], out=tmp_path)
    (told,) = (line for line in second.warnings if line.startswith("Not of this run"))
    assert f"'{name}'," in told and (tmp_path / name).is_file()
    assert not [line for line in first.warnings if line.startswith("Not of this run")]
    again = optimize.optimize(net, inputs, targets=["torchscript", "onnx"], out=tmp_path)
    assert not [line for line in again.warnings if line.startswith("Not of this run")]


def test_precision_passes_make_variants_beside_float() -> None:
    program = captured()
    passes = [
        optimize.FuseConvBN(),
        optimize.QuantizeStatic(calibration=[torch.rand(4, 3, 8, 8)]),
        optimize.CastFP16(),
        optimize.Script(),
    ]
    variants = transform(program, passes)
    assert [variant.precision for variant in variants] == ["float32", "int8", "float16"]
    assert [step.pass_name for step in variants[0].steps] == ["FuseConvBN", "Script"]
    assert variants[0].program.compiled is not None and variants[1].program.compiled is None


def test_two_passes_of_one_precision_make_files_of_their_own(tmp_path: Path) -> None:
    data = [torch.rand(16, 3, 8, 8)]
    passes = [optimize.QuantizeStatic(calibration=data), optimize.QuantizeStatic(calibration=data, keep=("4",))]
    report = workflow.optimize(
        net(), (data[0][:2],), passes=passes, targets=["onnx", "onnx"], out=tmp_path / "out", budget_s=0.2,
        layer_timing=False,
    )  # fmt: skip
    assert [row.precision for row in report.rows] == ["float32", "int8", "int8_1"]
    for row in report.rows:
        assert row.path is not None and row.size_bytes == Path(row.path).stat().st_size
    first, second = (row.coverage for row in report.rows[1:])
    assert first is not None and second is not None and len(first.quantized) > len(second.quantized)
    again = read(tmp_path / "out" / "recipe.yaml")
    assert again.targets == ("onnx",) and {"onnx int8", "onnx int8_1"} >= set(again.decided)


def test_int8_mixed_with_half_is_a_variant_that_goes_on_from_int8() -> None:
    program = captured()
    data = [torch.rand(4, 3, 8, 8)]
    passes = [optimize.FuseConvBN(), optimize.QuantizeStatic(calibration=data), optimize.CastFP16()]
    assert [entry.precision for entry in transform(program, passes)] == ["float32", "int8", "float16"]
    variants = transform(program, [*passes[:2], optimize.CastBF16(mixed=True), optimize.CastFP16(mixed=True)])
    assert [entry.precision for entry in variants] == ["float32", "int8", "int8-bfloat16", "int8-float16"]
    int8, mixed = (entry.program.quantization for entry in variants[1:3])
    assert int8 is not None and mixed is not None and mixed.layers == int8.layers and int8.half is None
    assert [step.pass_name for step in variants[2].steps] == ["CastBF16"]
    with pytest.raises(UsageError, match=r"CastFP16\(mixed=True\) goes on from static INT8"):
        transform(program, [optimize.FuseConvBN(), optimize.CastFP16(mixed=True)])


def test_targets_of_another_integer_format_have_a_program_of_their_own() -> None:
    program, data = captured(), [torch.randn(32, 3, 8, 8)]
    passes = [optimize.QuantizeStatic(calibration=data), optimize.CastFP16(mixed=True), optimize.CastFP16()]
    plain, usual, own, mixed, mixed_own, half = transform(program, passes, ("onnx", "tensorrt", "openvino"))
    assert plain.targets == half.targets == () and half.precision == "float16"
    assert usual.targets == mixed.targets == ("onnx", "openvino") and usual.precision == own.precision == "int8"
    assert own.targets == mixed_own.targets == ("tensorrt",) and mixed_own.precision == "int8-float16"
    assert [variant.is_for("tensorrt") for variant in (plain, usual, own)] == [True, False, True]
    ranges = [variant.program.quantization.ranges for variant in (usual, own, mixed_own)]  # type: ignore[union-attr]
    assert ranges[0] != ranges[1] == ranges[2]
    (_, alone) = transform(program, passes[:1], ("tensorrt",))
    assert alone.targets == () and alone.program.quantization.ranges == ranges[1]  # type: ignore[union-attr]
    (_, common) = transform(program, passes[:1], ("onnx", "openvino"))
    assert common.targets == () and common.program.quantization.ranges == ranges[0]  # type: ignore[union-attr]


@pytest.mark.parametrize("cast", [optimize.CastFP16, optimize.CastBF16])
def test_files_that_take_half_are_fed_and_judged_like_the_others(cast: type, tmp_path: Path) -> None:
    module, x = net(), torch.rand(8, 3, 8, 8)
    report = optimize.optimize(
        module,
        (x[:2],),
        passes=[optimize.FuseConvBN(), cast(io="half")],
        targets=["torchscript"],
        evaluate=[(x, module(x).argmax(1))],
        out=tmp_path / "out",
    )
    row = report.rows[1]
    assert row.status == "measured" and row.agreement is not None and row.agreement.sqnr_db > 40
    assert row.accuracy is not None and row.accuracy.samples == 8


def test_a_module_of_bfloat16_goes_through_the_line(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).bfloat16().eval()
    report = optimize.optimize(module, (torch.rand(2, 6).bfloat16(),), targets=["torchscript"], out=tmp_path / "out")
    assert report.rows[0].status == "measured" and report.rows[0].precision == "bfloat16"
    assert report.rows[0].agreement is not None and report.rows[0].agreement.sqnr_db > 100


class Cancelling(nn.Module):
    """Adds what bfloat16 cannot hold beside its input, and takes it away again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + 1000.0 - 1000.0


def test_half_beyond_its_tolerance_is_a_file_a_figure_and_a_warning(tmp_path: Path) -> None:
    torch.manual_seed(0)
    report = optimize.optimize(
        Cancelling().eval(),
        (torch.rand(4, 6),),
        passes=[optimize.CastBF16(policy="O3")],
        targets=["torchscript"],
        out=tmp_path / "out",
    )
    row = report.rows[1]
    assert row.status == "measured" and row.path is not None and Path(row.path).is_file()
    assert row.agreement is not None and row.agreement.sqnr_db < 10 and row.agreement.top1 is not None
    (warning,) = [entry for entry in report.warnings if entry.startswith("CastBF16 moves the outputs by")]
    assert "see the agreement of its files" in warning and "--calib" in warning and "--int8" in warning
    step = report.trace[-1]
    assert step.relative_error is not None and step.relative_error > 0.1


def test_a_module_that_answers_differently_each_time_is_not_accepted() -> None:
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand_like(x)

    with pytest.raises(VerificationFailed, match="differs from the module"):
        open_program(Job(Noisy().eval(), Recipe(), (torch.rand(2, 4),)))


def test_torchscript_input_goes_through_the_line(tmp_path: Path) -> None:
    path = tmp_path / "scripted.pt"
    torch.jit.script(net()).save(path)
    inputs = (torch.rand(2, 3, 8, 8),)
    report = optimize.optimize(path, inputs, passes=[optimize.FuseConvBN()], targets=["onnx"], out=tmp_path / "out")
    assert report.rows[0].agreement is not None and report.rows[0].agreement.sqnr_db > 100
    assert report.trace[0].rewrites


@pytest.mark.parametrize(
    "path",
    but_slowly(sorted((ROOT / "recipes").glob("*.yaml")), {ROOT / "recipes" / "tensorrt.yaml"}),
    ids=lambda path: path.stem,
)
def test_every_shipped_recipe_runs(path: Path, tmp_path: Path) -> None:
    name = "lstm" if path.stem == "recurrent" else "repvgg"
    recipe = read(path)
    job = Job(REFERENCES[name].build().eval(), recipe, (REFERENCES[name].inputs(2),), tmp_path / "out")
    report = run_job(job)
    assert {row.target for row in report.rows} == set(recipe.targets)
    assert {step.pass_name for step in report.trace} == {entry.name for entry in recipe.passes}
    for row in report.rows:
        assert row.status == ("not_run" if row.target == "tensorrt" else "measured"), row.reason
    assert report.recipe is not None
    written = parse(yaml.safe_load(report.recipe))
    assert written.model_copy(update={"decided": {}}) == recipe == read(path)
    assert written == read(tmp_path / "out" / "recipe.yaml")


def test_a_module_needs_example_inputs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs example inputs"):
        optimize.optimize(net(), targets=["onnx"], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_captured_program_goes_through_the_line_for_as_long_as_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, asked = optimize.capture(net(), (torch.rand(2, 3, 8, 8),)), list[float | None]()
    measured = workflow.measure
    monkeypatch.setattr(
        workflow,
        "measure",
        lambda *given, budget_s, **more: asked.append(budget_s) or measured(*given, budget_s=budget_s, **more),
    )
    report = optimize.optimize(program, targets="onnx", out=tmp_path / "out", budget_s=0.5)
    (row,) = report.rows
    assert asked == [0.5] and row.path == str((tmp_path / "out" / "sequential.float32.onnx").resolve())
    assert report.model.source == "Sequential" and report.files == () and report.model.size_bytes is None
    with pytest.raises(UsageError, match=r"has its inputs, sizes and outputs\.\n.*optimize\.capture"):
        optimize.optimize(program, (torch.rand(2, 3, 8, 8),), targets="onnx", out=tmp_path / "out")


def test_the_original_is_not_larger_for_its_example_inputs(tmp_path: Path) -> None:
    """A "smaller file" is beside what would be deployed."""
    net, sizes = nn.Conv2d(1, 2, 3).eval(), []
    for side in (8, 64):
        report = optimize.optimize(net, (torch.rand(2, 1, side, side),), targets="onnx", out=tmp_path / str(side))
        sizes.append(report.baseline.size_bytes)
    assert abs(sizes[1] - sizes[0]) < 1000 < 4 * 2 * 64 * 64


def test_labels_of_calibration_data_are_not_looked_at(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "data.npz", x=np.random.default_rng(0).random((8, 3, 8, 8), np.float32), y=np.zeros(8, np.int64)
    )
    recipe = parse(
        {
            "passes": ["QuantizeStatic"],
            "targets": ["onnx"],
            "calib": str(tmp_path / "data.npz"),
            "layer_timing": False,
        }
    )
    report = run_job(Job(net(), recipe, (torch.rand(2, 3, 8, 8),), tmp_path / "out"))
    assert all(row.accuracy is None for row in (report.baseline, *report.rows))


def test_int8_without_data_is_not_judged_and_float32_is(tmp_path: Path) -> None:
    recipe = parse({"passes": ["QuantizeStatic"], "targets": ["onnx"], "layer_timing": False})
    report = run_job(Job(net(), recipe, inputs=(torch.rand(2, 3, 8, 8),), out=tmp_path))
    plain, integers = report.rows
    assert plain.agreement is not None and plain.agreement.judged and plain.agreement.sqnr_db > 80
    assert integers.agreement is not None and not integers.agreement.judged
    noise = "Files that round were not judged, because there was noise alone: give --calib or --eval, in Python"
    assert any(warning.startswith(noise) for warning in report.warnings)
    assert not any("answers differently" in warning for warning in report.warnings)
    assert "not judged" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("count", [3, 100])
def test_files_that_round_answer_the_same_samples_in_several_batches(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[quality.Question] = []

    def judge(*given: Any, again: Iterable[quality.Question], **said: Any) -> tuple[quality.Quality, ...]:
        asked.extend(again)
        return quality.judge(*given, again=asked, **said)

    monkeypatch.setattr(workflow, "judge", judge)
    data = torch.rand(count, 3, 8, 8)
    passes = [optimize.QuantizeStatic(calibration=[data])]
    report = optimize.optimize(net(), data[:2], passes=passes, targets="onnx", out=tmp_path)
    first = data[torch.arange(7) % count].numpy()
    assert [(len(each.inputs[0]), each.again) for each in asked] == [(1, 1)] * 7 + [(7, 7), (64, 64)]
    assert np.array_equal(np.concatenate([each.inputs[0] for each in asked[:7]]), first)
    assert np.array_equal(asked[-1].inputs[0], first[np.arange(64) % min(7, count)])
    assert all(row.agreement is not None and row.agreement.batches == {} for row in report.rows)
    asked.clear()
    optimize.optimize(net(), data[:2], targets="onnx", out=tmp_path)
    assert not asked


def test_a_float32_file_that_answers_differently_is_kept_to_be_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(*given: Any, **asked: Any) -> tuple[quality.Quality, ...]:
        original, *found = quality.judge(*given, **asked)
        return original, *(replace(entry, agreement=Agreement(12.0, 0.5, None)) for entry in found)

    monkeypatch.setattr(workflow, "judge", judge)
    report = optimize.optimize(net(), torch.rand(2, 3, 8, 8), targets="onnx", out=tmp_path)
    (row,) = report.rows
    assert (row.status, row.latency) == ("failed", None) and row.path is not None and Path(row.path).exists()
    assert exit_code(report) == 3
    assert "answers differently: 12.0 dB" in (tmp_path / "report.md").read_text()


def test_a_pruned_float_file_answers_differently_because_it_was_asked_to(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(576, 4))
    data, labels = torch.rand(64, 3, 8, 8), torch.randint(4, (64,))
    passes = [optimize.PruneChannels(0.75, calibration=[data])]
    report = optimize.optimize(
        net.eval(), (data[:2],), passes=passes, targets=["onnx"], evaluate=[(data, labels)], out=tmp_path
    )
    row = report.rows[0]
    assert row.status == "measured" and row.speedup is not None and row.agreement is not None
    assert row.agreement.sqnr_db < 30
    assert any("make up for" in warning for warning in report.warnings)


def test_a_pass_that_finds_nothing_makes_no_file_and_says_why(tmp_path: Path) -> None:
    entry = optimize.QuantizeStatic(calibration=[torch.rand(4, 8)])
    report = optimize.optimize(nn.ReLU(), torch.rand(2, 8), passes=[entry], targets="onnx", out=tmp_path)
    assert [row.precision for row in report.rows] == ["float32"]
    assert any("QuantizeStatic changed nothing" in warning for warning in report.warnings)


def test_a_pass_that_prepares_and_finds_nothing_is_no_warning(tmp_path: Path) -> None:
    data = [torch.rand(4, 3, 8, 8)]
    entries = [optimize.EqualizeChannels(calibration=data, unless_near=True), optimize.QuantizeStatic(calibration=data)]
    report = optimize.optimize(
        net(), torch.rand(2, 3, 8, 8), passes=entries, targets="onnx", out=tmp_path, layer_timing=False
    )
    assert [row.precision for row in report.rows] == ["float32", "int8"]
    assert "EqualizeChannels" in [step.pass_name for step in report.trace]
    assert not any("EqualizeChannels" in warning for warning in report.warnings)


def test_a_runner_takes_keyword_arguments_as_the_module_did(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, *, y: torch.Tensor) -> torch.Tensor:
            return x + y

    x, y = torch.rand(3, 4), torch.rand(3, 4)
    runner = optimize.export(optimize.capture(Sum(), (x,), {"y": y}), "onnx", tmp_path / "sum.onnx").load()
    assert torch.allclose(runner(x, y=y), x + y)
    with pytest.raises(Refused, match="takes 2 input"):
        runner(x, y)


def test_tokens_are_varied_within_the_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "tokens.pt"
    torch.save(nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(20, 3)).eval(), path)
    recipe = parse({"input_shape": "5:int64"})
    inputs = open_program(Job(path, recipe)).program.inputs[0]
    assert len(inputs.unique()) > 1 and int(inputs.max()) < 7
