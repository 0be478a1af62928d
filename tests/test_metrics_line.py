"""The whole line with metrics beside top-1, on real runtimes: a segmenter, a regressor, a model of embeddings."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import optimize
from optimize.errors import Refused, UsageError
from optimize.job import Job
from optimize.measure.scores import Outputs
from optimize.recipe import Recipe, parse
from optimize.report import markdown
from optimize.report.model import Report, Row
from optimize.report.run import tell_run
from tests.test_cli import Typed

DRAWS = np.random.default_rng(0)
X = torch.from_numpy(DRAWS.standard_normal((48, 3, 12, 12)).astype(np.float32))
VECTORS = torch.from_numpy(DRAWS.standard_normal((120, 16)).astype(np.float32))


def segmenter() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 1)).eval()


def dense(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, outputs)).eval()


def test_a_segmenter_on_two_runtimes(tmp_path: Path) -> None:
    net = segmenter()
    masks = net(X).argmax(1)
    masks[:, 0] = 255  # void
    report = optimize.optimize(
        net,
        (X[:2],),
        passes=[optimize.QuantizeStatic(calibration=[X])],
        targets=["onnx", "openvino"],
        evaluate=(X, masks),
        metric="miou",
        max_drop=20,
        out=tmp_path / "out",
        layer_timing=False,
    )
    assert report.baseline.accuracy is not None and report.baseline.accuracy.value == 1.0
    for row in report.rows:
        assert row.accuracy is not None and row.accuracy.metric == "miou" and row.accuracy.samples == 48
        assert row.accuracy.difference_low is not None and row.accuracy.lost is None
    assert [bounded.met for bounded in (row.bound for row in report.rows) if bounded] == [True, True]
    assert "metric: miou" in (tmp_path / "out" / "recipe.yaml").read_text()
    assert Report.model_validate_json(report.model_dump_json()) == report


def test_a_regressor_by_a_function_of_the_user(tmp_path: Path) -> None:
    net, seen = dense(1), set()
    wanted = net(VECTORS).detach()[:, 0] + 0.01 * torch.from_numpy(DRAWS.standard_normal(120).astype(np.float32))

    def error(outputs: Outputs, labels: np.ndarray) -> np.ndarray:
        seen.update(outputs)
        (answers,) = outputs.values()
        return np.abs(answers[:, 0] - labels)

    error.higher_is_better = False  # type: ignore[attr-defined]
    report = optimize.optimize(
        net,
        (VECTORS[:2],),
        targets=["onnx"],
        evaluate=(VECTORS, wanted),
        metric=error,
        out=tmp_path / "out",
    )
    (row,) = report.rows
    by_hand = (net(VECTORS).detach()[:, 0] - wanted).abs().mean()
    assert row.accuracy is not None and row.accuracy.value == pytest.approx(float(by_hand), rel=1e-4)
    assert row.accuracy.metric == "error" and not row.accuracy.higher_is_better and len(seen) == 1
    assert "error ↓" in markdown.render(tell_run(report))
    assert "name the same with --metric" in (tmp_path / "out" / "recipe.yaml").read_text()


def test_embeddings_beside_the_original_and_their_neighbours(tmp_path: Path, typed: Typed) -> None:
    torch.save(dense(24), tmp_path / "net.pt")
    groups = np.arange(120) % 12
    np.savez(tmp_path / "data.npz", x=VECTORS.numpy(), y=groups)
    words = ("net.pt", "--trust", "--int8", "--calib", "data.npz", "--to", "onnx", "--no-layer-timing", "-q")
    asked = ("--metric", "cosine", "--min-accuracy", "0.99", "--max-drop", "0.01")
    done = typed(*words, *asked, "--out", "one", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = Report.model_validate_json((tmp_path / "one" / "report.json").read_text())
    row = quantized(report)
    assert row.accuracy is not None and row.accuracy.beside_original and row.accuracy.baseline == 1.0
    assert row.accuracy.worst is not None and "worst sample 0.9" in markdown.render(tell_run(report))
    assert 0.99 < row.accuracy.worst < row.accuracy.value < 1.0 and row.bound is not None and row.bound.met
    assert not any("Accuracy was not measured" in text for text in report.warnings)
    done = typed(*words, "--eval", "data.npz", "--metric", "recall@3", "--out", "two", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = quantized(Report.model_validate_json((tmp_path / "two" / "report.json").read_text())).accuracy
    assert found is not None and found.flips and found.lost is not None and found.gained is not None
    assert found.value - found.baseline == pytest.approx((found.gained - found.lost) / 120)
    assert "Samples that changed sides" in (tmp_path / "two" / "report.md").read_text()
    asked = ("--data", "data.npz", "--metric", "cosine", "--max-drop", "0.0000001", "-q")
    done = typed("check", "one/net.float32.onnx", "one/net.int8.onnx", *asked, cwd=tmp_path)
    assert done.returncode == 1 and "asked: at most 1e-07 lost" in " ".join(done.stdout.split()), done.stdout


def quantized(report: Report) -> Row:
    (row,) = (row for row in report.rows if row.precision == "int8")
    return row


@pytest.mark.parametrize(
    ("net", "x", "labels", "match"),
    [
        (dense(4), VECTORS, np.arange(120), "cannot be scored by miou against outputs"),
        (segmenter(), X, np.full((48, 12, 12), 7), "All labels are void .* They go from 7 to 7"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_is_made(
    net: nn.Module, x: torch.Tensor, labels: np.ndarray, match: str, tmp_path: Path
) -> None:
    with pytest.raises(Refused, match=match):
        optimize.optimize(net, (x[:2],), evaluate=(x, labels), metric="miou", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        ({"metric": "top5"}, "--metric top5 is about the metric top5 and needs labelled data"),
        ({"metric": "cosine"}, "cannot be judged on noise and needs samples"),
        ({"metric": "psnr", "max_drop": 1, "calib": "c.npz"}, "no error beside itself"),
        ({"min_accuracy": 3}, "--min-accuracy 3 is about the metric top1"),
    ],
)
def test_a_metric_needs_data(recipe: dict[str, object], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        Job("model.pt", parse(recipe))


def test_a_recipe_names_a_metric() -> None:
    assert parse({"metric": "recall@5"}).metric == "recall@5"
    with pytest.raises(UsageError, match="'recall@five' lacks a number"):
        parse({"metric": "recall@five"})
    assert Job("model.pt", Recipe(metric="cosine", calib="c.npz")).metric is not None
