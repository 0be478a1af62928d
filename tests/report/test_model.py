"""The record is loss-free, strict and finite."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from torch import nn

import optimize
from optimize.cli import auto
from optimize.cli.run import exit_code
from optimize.errors import Refused
from optimize.job import Export, Job
from optimize.measure.agreement import Agreement
from optimize.measure.bound import BoundCheck
from optimize.measure.latency import Latency, Speedup, Timing
from optimize.measure.quality import Quality
from optimize.recipe import Recipe
from optimize.records import now
from optimize.report import artifacts
from optimize.report.assemble import _about_floats, _about_rows, _row, _size_bytes
from optimize.report.document import FORMS, Text
from optimize.report.model import Report, Row, TraceStep
from optimize.report.run import tell_run
from optimize.targets.base import Artifact, Coverage, FloatLayer, TensorSpec


def artifact(tmp_path: Path) -> Artifact:
    spec = (TensorSpec("x", ("N", 3), "float32"),)
    coverage = Coverage(("conv",), (FloatLayer("fc", "Gemm", "too small"),), {"QLinearConv": 1})
    return Artifact("onnx", tmp_path / "m.onnx", spec, spec, "int8", "ab", 12, "", {"onnx": "1"}, coverage, ("a note",))


def test_json_is_loss_free(report: Report) -> None:
    assert Report.model_validate_json(report.model_dump_json()) == report


@pytest.mark.parametrize(
    ("precision", "sqnr_db", "is_told"),
    [("float32", 38.0, False), ("int8", 12.0, False), ("int8", 9.0, True)],
)
def test_a_file_far_from_the_original_is_warned_of(precision: str, sqnr_db: float, is_told: bool) -> None:
    row = Row(target="onnx", precision=precision, agreement=Agreement(sqnr_db, 0.1, None))
    assert any("answers differently" in line for line in _about_rows([row])) is is_told


def test_a_float32_file_that_answers_differently_has_failed(report: Report) -> None:
    """The fastest of all, and wrong: no time is measured against it, the rest goes on, the exit code is 3."""
    right, *_ = report.rows
    spec = (TensorSpec("y", ("N",), "float32"),)
    made = Artifact("onnx", Path("m.onnx"), (), spec, "float32", "ab", 12, "")
    timing = Timing(replace(right.latency, median_s=1e-6), Speedup(10_000.0, 9_999.0, 10_001.0), 1_000)  # type: ignore[type-var]
    near, wrong = (Row.measured(made, timing, Quality(Agreement(level, 0.1, None))) for level in (31.0, 28.0))
    assert near.status == "measured" and near.speedup is not None
    assert wrong.status == "failed" and wrong.differs and wrong.reason.startswith("answers differently: 28.0 dB.")
    found = report.model_copy(update={"rows": (right, wrong)})
    assert artifacts.fastest(found) is artifacts.best_float32(found) is right and exit_code(found) == 3
    assert "answers differently" not in "".join(_about_rows(found.rows))
    shown = artifacts.figures(found, wrong)
    assert (shown["Median latency"].text, shown["vs eager"].text, shown["SQNR"].text) == ("failed", "–", "28.0 dB")
    places = replace(made, out_spec=(*spec, TensorSpec("places", ("N",), "int64")))
    for levels, status in (({"y": 90.0, "places": 28.0}, "measured"), ({"y": 28.0, "places": 90.0}, "failed")):
        assert Row.measured(places, timing, Quality(Agreement(28.0, 1.0, None, outputs=levels))).status == status
    assert Row.measured(replace(made, precision="float16"), timing, Quality(Agreement(28.0, 0.1, None))).latency
    (told,) = _about_floats([near, wrong, Row.measured(made, timing, Quality(Agreement(60.0, 0.1, None)))])
    assert told.startswith("onnx float32 answers differently: 31.0 dB. float32 in another order stays above 60, unless")


def test_where_the_original_guesses_that_is_said_first_and_nothing_is_the_fastest(report: Report) -> None:
    unjudged = BoundCheck("at most 1 point lost", "±0.00 points", None, "not judged: it guesses")
    rows = tuple(row.model_copy(update={"bound": unjudged if row.precision == "int8" else None}) for row in report.rows)
    found = report.model_copy(update={"doubt": "The original guesses: edit --preprocess.", "rows": rows[:3]})
    for form in FORMS:
        first = tell_run(found).shown(form)[0]
        assert isinstance(first, Text) and first.text == found.doubt
    assert not artifacts.cards(found) and not list(artifacts.winner(found)) and exit_code(found) == 3
    assert repr(found).splitlines()[1] == found.doubt
    ends = {met: auto.exit_code(found.model_copy(update={"search": SimpleNamespace(met=met)})) for met in (True, False)}
    assert ends == {True: 3, False: 1}
    assert any("at most 1 point lost: not judged: it guesses" in line for line in _about_rows(rows))


def test_why_a_file_could_not_be_made_is_one_line(report: Report) -> None:
    program = optimize.capture(nn.ReLU(), (torch.rand(2, 3),))
    error = Refused("OpenVINO has no dynamic INT8.", hint="Use --int8=static.")
    row = _row(Export("openvino", "int8-dynamic", program, error=error), iter(()), Job(nn.ReLU(), Recipe()), "")
    assert row.reason == "OpenVINO has no dynamic INT8. Use --int8=static."


def test_the_users_file_has_the_bytes_of_all_that_belongs_to_it(tmp_path: Path) -> None:
    for name, length in (("net.pt", 7), ("net.onnx", 3), ("net.onnx.data", 40)):
        (tmp_path / name).write_bytes(bytes(length))
    found = [_size_bytes(tmp_path / name) for name in ("net.pt", "net.onnx")]
    assert found == [7, 43] and _size_bytes("nets:make") is _size_bytes(nn.Identity()) is None


def test_contract(report: Report) -> None:
    found = json.loads(report.model_dump_json())
    assert {"environment", "baseline", "rows", "trace", "warnings"} <= set(found)
    row = found["rows"][1]
    assert set(row) == {
        "target", "path", "precision", "status", "reason", "size_bytes", "sha256", "inputs", "outputs",
        "latency", "speedup", "agreement",
        "accuracy", "peak_memory_bytes", "coverage", "notes", "versions", "bound", "layer_types", "providers",
        "cpu", "elsewhere", "how",
    }  # fmt: skip
    assert set(row["latency"]) == {
        "median_s", "p95_s", "ci_low_s", "ci_high_s", "samples_s", "first_call_s", "load_s", "threads", "batch",
        "cpu_s", "clock",
    }  # fmt: skip
    assert set(row["speedup"]) == {"ratio", "ci_low", "ci_high"}
    assert set(row["agreement"]) == {
        "sqnr_db", "max_abs_error", "top1", "judged", "outputs", "lost", "unproved", "beside", "batches"
    }  # fmt: skip
    assert {"metric", "value", "baseline", "samples"} <= set(row["accuracy"])
    assert set(row["coverage"]) == {"quantized", "left_float", "kernels", "source"}
    assert set(row["coverage"]["left_float"][0]) == {"name", "op", "reason"}
    assert found["rows"][3]["latency"] is None and found["rows"][3]["status"] == "not_run"
    assert found["trace"][0]["pass"] == "FuseConvBN" and found["trace"][0]["skips"][0]["op"] == "batch_norm"


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(wrong: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        Row(target="onnx", speedup=Speedup(wrong, 1.0, 2.0))
    with pytest.raises(ValidationError, match="finite"):
        Row(target="onnx", agreement=Agreement(20.0, wrong, None))
    with pytest.raises(ValidationError, match="finite"):
        Row(target="onnx", latency=Latency(1.0, None, 1.0, 1.0, (1.0, wrong), 1.0, 1.0, 1, 1))


@pytest.mark.parametrize(
    "where", [(), ("baseline",), ("baseline", "latency"), ("environment",), ("trace", 0, "before")]
)
def test_unknown_keys_are_refused_at_every_depth(report: Report, where: tuple[str | int, ...]) -> None:
    found = json.loads(report.model_dump_json())
    inner = found
    for key in where:
        inner = inner[key]
    inner["surprise"] = 1
    with pytest.raises(ValidationError, match="surprise"):
        Report.model_validate(found)


def test_row_of_a_measured_artifact(tmp_path: Path) -> None:
    timing = Timing(Latency(1.0, None, 0.9, 1.1, (1.0,), 2.0, 3.0, 1, 4), Speedup(2.0, 1.9, 2.1), 99)
    row = Row.measured(artifact(tmp_path), timing, Quality(Agreement(30.0, 0.1, 0.5)))
    assert row.status == "measured" and row.latency == timing.latency and row.peak_memory_bytes == 99
    assert row.coverage == artifact(tmp_path).coverage and row.notes == ("a note",) and row.name == "onnx int8"


def test_row_that_was_not_run_or_failed_says_why(tmp_path: Path) -> None:
    not_run = Row.not_run(artifact(tmp_path), "no GPU")
    assert (not_run.status, not_run.reason, not_run.latency, not_run.size_bytes) == ("not_run", "no GPU", None, 12)
    assert Row.measured(artifact(tmp_path), Timing(failure="load: broken")).reason == "load: broken"
    assert Row.measured(artifact(tmp_path), Timing(), Quality(failure="not finite")).status == "failed"


def test_step_of_a_pipeline() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    trace = optimize.Pipeline([optimize.FuseConvBN()]).run(optimize.capture(net, (torch.ones(2, 3, 8, 8),)))
    step = TraceStep.of(trace.steps[0])
    assert (step.pass_name, step.exactness, len(step.rewrites)) == ("FuseConvBN", "exact", 1)
    assert step.before.ops["batch_norm"] == 1 and "batch_norm" not in step.after.ops
    assert TraceStep.model_validate_json(step.model_dump_json()) == step


def test_now_is_utc_to_the_second() -> None:
    assert now().endswith("+00:00") and len(now()) == 25
