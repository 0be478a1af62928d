"""Layers go back to float until the deployed file keeps what was asked."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import optimize
from optimize import search, workflow
from optimize.cli import cli
from optimize.cli.run import exit_code
from optimize.errors import UsageError
from optimize.job import Job
from optimize.measure import quality
from optimize.measure.quality import Quality
from optimize.quantization.simulation import simulated_db
from optimize.recipe import Recipe, parse
from optimize.report.model import Report, Row
from tests.measure.test_bound import judged
from tests.quantization.test_sensitivity import fragile, images

pytestmark = pytest.mark.usefixtures("files_run_here")


def run(out: Path, targets: Sequence[str] = ("onnx",), **asked: Any) -> Report:
    """Judge on images like those it is calibrated on, labelled with the float model's answers."""
    module, data = fragile(), images(64)
    with torch.no_grad():
        labels = module(data).argmax(1)
    passes = [optimize.QuantizeStatic(calibration=[data])]
    asked = {"evaluate": [(data, labels)], "layer_timing": False, **asked}
    return optimize.optimize(module, (data[:2],), passes=passes, targets=targets, out=out, **asked)


def int8(report: Report) -> list[Row]:
    return [row for row in report.rows if row.precision == "int8"]


def given_back(row: Row) -> list[str]:
    assert row.coverage is not None
    return [layer.name for layer in row.coverage.left_float if "given back" in layer.reason]


def test_the_fragile_layer_alone_goes_back_on_every_target(tmp_path: Path) -> None:
    plain = optimize.capture(fragile(), (images(2),))
    program, _ = optimize.QuantizeStatic(calibration=[images(64)]).apply(plain)
    wanted = round(simulated_db(program, [(images(64),)], reference=plain)) + 8.0
    report = run(tmp_path, ["onnx", "torchscript"], min_sqnr=wanted)
    for row in int8(report):
        assert row.bound is not None and row.bound.met and row.agreement is not None
        assert row.agreement.sqnr_db >= wanted
        assert given_back(row) == ["fragile"]
        assert f"Given back to float to meet --min-sqnr {wanted:g}: 1 of 4 layers in INT8." in row.notes
        assert row.coverage is not None and "fragile" not in row.coverage.quantized and len(row.coverage.quantized) == 3
        assert row.path is not None and Path(row.path).stat().st_size == row.size_bytes
    assert exit_code(report) == 0
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {Path(row.path).name for row in report.rows if row.path} | {
        "report.json",
        "report.md",
        "report.html",
        "recipe.yaml",
    }


def test_nothing_is_given_back_where_the_file_keeps_the_bound_already(tmp_path: Path) -> None:
    (row,) = int8(run(tmp_path, max_drop="1dB"))
    assert row.bound is not None and row.bound.met and row.bound.wanted == "at least 1 dB"
    assert given_back(row) == [] and not any("given back" in note for note in row.notes)


def test_a_bound_no_choice_meets_is_said_first_and_ends_with_code_1(tmp_path: Path) -> None:
    report = run(tmp_path, min_sqnr=190)
    (row,) = int8(report)
    assert row.bound is not None and not row.bound.met and given_back(row) == []
    assert report.warnings[0].startswith("onnx int8 does not keep what was asked: at least 190 dB; found")
    assert any("none was given back" in note for note in row.notes)
    assert exit_code(report) == 1
    assert "MISSED" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(("asked", "met"), [({"min_accuracy": 90}, False), ({"max_drop": 0.5, "min_sqnr": 190}, None)])
def test_what_must_be_reached_is_asked_of_a_float_file_too(
    asked: dict[str, float], met: bool | None, tmp_path: Path
) -> None:
    """What may be lost is not: it loses nothing."""
    module, data = fragile(), images(32)
    labels = (module(data).argmax(1) + 1) % 2
    report = optimize.optimize(
        module, (data[:2],), passes=[], targets=["onnx"], out=tmp_path, evaluate=[(data, labels)], **asked
    )
    (row,) = report.rows
    assert row.accuracy is not None and row.accuracy.value < 0.5
    assert (row.bound.met if row.bound else None) is met and exit_code(report) == (1 if met is False else 0)


def test_no_layer_is_paid_for_what_the_labels_cannot_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pictures of 180 are more than a point, and no evidence that half a point is lost."""

    def judge(*given: Any, **asked: Any) -> tuple[Quality, ...]:
        original, *found = quality.judge(*given, **asked)
        return original, *(replace(entry, accuracy=judged(2, 0, 180).accuracy) for entry in found)

    monkeypatch.setattr(search, "judge", judge)
    monkeypatch.setattr(workflow, "judge", judge)
    report = run(tmp_path, max_drop=0.5)
    (row,) = int8(report)
    assert given_back(row) == [] and row.bound is not None and row.bound.met is None
    told = "cannot be told with 180 labels: give about 500 or allow 1.9 points"
    assert report.warnings[0] == f"onnx int8, at most 0.5 points lost: {told}; found −1.11 points [−3.71, +1.25]."
    assert exit_code(report) == 3 and told in (tmp_path / "report.md").read_text()


def test_points_of_accuracy_are_judged_on_the_deployed_file(tmp_path: Path) -> None:
    right = lambda outputs, labels: outputs["output_0"].argmax(1) == labels  # noqa: E731 - it answers one class alone
    (row,) = int8(run(tmp_path, max_drop=0.0, metric=right))
    assert row.bound is not None and row.accuracy is not None
    assert row.bound.met is (True if row.accuracy.lost == 0 else None) and row.accuracy.lost is not None
    assert row.bound.wanted == "at most 0 points lost"


def test_layers_left_in_float_for_speed_say_so_and_the_file_says_how_much(tmp_path: Path) -> None:
    """Whether there are such layers is the machine's affair."""
    (row,) = int8(run(tmp_path, layer_timing=True))
    assert row.coverage is not None and row.bound is None
    slow = [layer.name for layer in row.coverage.left_float if "INT8 is slower than float here" in layer.reason]
    assert not set(slow) & set(row.coverage.quantized)
    assert bool(slow) == any("as fast as with" in note for note in row.notes)


def test_points_need_labels_and_the_hint_names_the_other_option() -> None:
    with pytest.raises(UsageError, match="needs labelled data") as caught:
        Job("model.pt", Recipe(max_drop=0.5))
    assert "--min-sqnr" in caught.value.hint
    assert Job("model.pt", Recipe(max_drop=0.5), evaluate=[]).bound is not None


def test_decibels_need_samples() -> None:
    with pytest.raises(UsageError, match="cannot be judged on noise"):
        Job("model.pt", Recipe(min_sqnr=30))
    assert Job("model.pt", Recipe(min_sqnr=30, calib="data.npz")).bound is not None


def test_decibels_may_be_written_either_way() -> None:
    assert parse({"max_drop": "30dB"}).min_sqnr == 30.0 == parse({"min_sqnr": 30}).min_sqnr
    assert parse({"max_drop": "30 dB"}).max_drop is None and parse({"max_drop": "0.5"}).max_drop == 0.5
    assert parse({"max_drop": "0.5%"}).max_drop == 0.5 == parse({"max_drop": "0.5 %"}).max_drop
    assert parse({"max_drop": "0.5%", "metric": "recall@5"}).max_drop == 0.5
    for metric, unit in (("mae", "its own unit"), ("psnr@255", "dB"), ("package.module:own", "its own unit")):
        with pytest.raises(UsageError, match=f"is points of a share; say what {metric} may lose in {unit}"):
            parse({"max_drop": "0.5%", "metric": metric})
    for wrong in ({"max_drop": "much"}, {"max_drop": -1}, {"max_drop": "x dB"}, {"max_drop": "9dB", "min_sqnr": 9}):
        with pytest.raises(UsageError):
            parse(wrong)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["net.pt", "--int8", "--to", "onnx", "--max-drop", "0.5"], "needs labelled data"),
        (["net.pt", "--int8", "--to", "onnx", "--max-drop", "lots"], "--max-drop: Input should be a valid number"),
        (["sensitivity", "net.pt", "--to", "pt2"], "cannot be measured on the target 'pt2'"),
        (["sensitivity", "net.pt", "--to", "nowhere"], "nowhere"),
        (["sensitivity", "net.pt", "--prune"], "asked of data"),
    ],
)
def test_what_cannot_be_asked_is_a_usage_error(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.pt").touch()
    found = CliRunner().invoke(cli, words)
    assert isinstance(found.exception, UsageError) and message in str(found.exception.what)


def test_the_command_writes_a_table_json_and_a_page(tmp_path: Path) -> None:
    module = "tests.quantization.test_sensitivity:fragile"
    found = CliRunner().invoke(
        cli, ["sensitivity", module, "--input-shape", "3,12,12", "--out", str(tmp_path / "s"), "--quiet"]
    )
    assert found.exception is None, found.output
    assert all(word in found.output for word in ("SQNR", "alone", "fragile"))
    page = (tmp_path / "s" / "sensitivity.html").read_text()
    assert page.count('<path class="bar"') == 8 and "http" not in page.replace("http-equiv", "")
    record = (tmp_path / "s" / "sensitivity.json").read_text()
    assert '"layer": "fragile"' in record
    assert (tmp_path / "s" / "sensitivity.csv").read_text().startswith("layer,op,")


def test_the_command_tells_what_channels_are_worth(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(32, 3, 12, 12)).astype(np.float32))
    words = [
        "sensitivity",
        "tests.quantization.test_sensitivity:fragile",
        "--prune",
        "--calib",
        str(tmp_path / "x.npy"),
    ]
    found = CliRunner().invoke(cli, [*words, "--input-shape", "3,12,12", "--out", str(tmp_path / "s"), "--quiet"])
    assert found.exception is None, found.output
    assert "can be cut" in found.output and "−50 %" in found.output and "What stays whole, and why" in found.output
    assert (tmp_path / "s" / "sensitivity.csv").read_text().startswith("group,channels,share,noise,sqnr_db\n")
