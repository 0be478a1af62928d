"""What is asked: units, files, which wins, and what is said of mistakes."""

import math
from pathlib import Path
from typing import Any

import pytest

from optimize.errors import Refused, UsageError
from optimize.gate import limits
from optimize.gate.limits import Growth, Settings

TOML = """
[tool.optimize.check]
max_regression = "3%"
max_memory = "10%"
alpha = 0.02

[[tool.optimize.check.cases]]
base = "a.onnx"
candidate = "b.onnx"
max_latency = "5 ms"

[[tool.optimize.check.cases]]
name = "small"
base = "a.onnx"
candidate = "c.onnx"
max_regression = 0.1
max_size = "500 kB"
"""


def parsed(content: dict[str, Any], **given: Any) -> Settings:
    return limits.settings(content, given=given, source="here")


def test_a_pyproject(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(TOML)
    path = limits.find(tmp_path)
    assert path is not None
    found = parsed(limits.read(path))
    first, second = found.cases
    assert (first.max_regression, second.max_regression) == (0.03, 0.1)  # the case wins
    assert first.max_memory == second.max_memory == Growth(share=0.1) and second.max_size == Growth(size_bytes=500e3)
    assert first.max_latency == 0.005 and found.alpha == 0.02 and found.on_inconclusive == "keep"
    assert (first.title, second.title) == ("b.onnx", "small")


def test_a_yaml_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "gate.yaml"
    path.write_text("max_regression: 3%\ncases:\n  - {base: a.onnx, candidate: b.onnx, min_sqnr: 30}\n")
    (case,) = parsed(limits.read(path)).cases
    assert case.max_regression == 0.03 and case.min_sqnr == 30


def test_a_baseline_of_a_case_is_called_as_its_option() -> None:
    (case,) = parsed({"cases": [{"baseline": "a.json", "candidate": "b.onnx"}]}).cases
    assert case.base == "a.json" and case.candidate == "b.onnx"
    with pytest.raises(UsageError, match="'base' or 'baseline'"):
        parsed({"cases": [{"base": "a.onnx", "baseline": "a.json"}]})


def test_options_win(tmp_path: Path) -> None:
    content = {"max_regression": "3%", "cases": [{"base": "a", "candidate": "b", "max_regression": "4%"}]}
    assert parsed(content, max_regression="7%", max_seconds=9.0).cases[0].max_regression == 0.07
    (case,) = parsed(content, cases=[{"base": "x", "candidate": "y"}]).cases
    assert (case.base, case.max_regression) == ("x", 0.03)


@pytest.mark.parametrize(
    "content", [{"base_python": "evil"}, {"on": "ssh://evil"}, {"cases": [{"base": "a.onnx", "data": "evil:go"}]}]
)
def test_what_a_configuration_of_another_folder_would_run_needs_trust(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "suite.yaml"
    with pytest.raises(Refused, match=r"names a program, Python code or a machine to run on: (ssh://)?evil"):
        limits.refuse_code(content, path)
    monkeypatch.chdir(tmp_path)
    limits.refuse_code(content, path)


def test_files_are_looked_for_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").touch()
    (case,) = parsed({"cases": [{"base": "a.onnx", "candidate": "package.module:make"}]}).cases
    found = limits.located(case, tmp_path)
    assert found.base == str(tmp_path / "a.onnx") and found.candidate == "package.module:make"


def test_a_project_that_says_nothing(tmp_path: Path) -> None:
    assert limits.find(tmp_path) is None
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert limits.find(tmp_path) is None
    with pytest.raises(UsageError, match=r"has no \[tool\.optimize\.check\]"):
        limits.read(tmp_path / "pyproject.toml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"max_regresion": "5%"}, "Did you mean 'max_regression'"),
        ({"cases": [{"bse": "a"}]}, "Did you mean 'base'"),
        ({"cases": "a"}, "list of tables"),
        ({"max_regression": 5, "cases": [{}]}, r"5 is not a share; write '5%' or 0\.05"),
        ({"max_regression": "5", "cases": [{}]}, "is not a share"),
        ({"max_regression": "0%", "cases": [{}]}, "greater than 0"),
        ({"max_regression": [], "cases": [{}]}, "a share is written"),
        ({"max_size": "nan%", "cases": [{}]}, "bounds nothing"),
        ({"max_memory": "9" * 400 + " MB", "cases": [{}]}, "bounds nothing"),
        ({"min_sqnr": math.nan, "cases": [{}]}, "finite"),
        ({"max_seconds": math.inf, "cases": [{}]}, "finite"),
        ({"max_size": "3 miles", "cases": [{}]}, "needs a unit"),
        ({"max_latency": "5 parsecs", "cases": [{}]}, "needs a unit: s, ms, us"),
        ({"max_drop": 1, "cases": [{}]}, "needs labelled data"),
        ({"max_latency": "1 s", "min_throughput": 1, "cases": [{}]}, "bound one thing"),
        ({"max_latency": 10, "cases": [{}]}, r"10 has no unit; write '10 ms' or '10 s'"),
        ({"on_inconclusive": "shrug"}, "'pass', 'fail' or 'keep'"),
        (
            {"max_drop": "5%", "cases": [{"metric": "psnr", "eval": "e.npz"}]},
            "points of a share; say what psnr may lose in dB",
        ),
        ({"alpha": 0.7}, "less than 0.5"),
        ({"threads": 0, "cases": [{}]}, r"cases\.0\.threads"),
    ],
)
def test_mistakes_are_named(content: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parsed(content)
    import re

    assert re.search(message, str(caught.value)) and str(caught.value).startswith("here: ")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"metric": "top-1", "eval": "e.npz"}, "Did you mean 'top1'"),
        ({"metric": "top5"}, "--max-drop 1 is about the metric top5 and needs labelled data"),
        ({"min_accuracy": 90}, "--min-accuracy 90 is about the metric top1 and needs labelled data"),
        ({"metric": "cosine"}, "cannot be judged on noise"),
        ({"metric": "mae", "eval": "e.npz"}, "Nobody says how much mae may become worse"),
        ({"metric": "psnr", "data": "d.npz", "max_drop": 1}, "no error beside itself"),
    ],
)
def test_a_metric_that_cannot_be_judged_is_told_before_anything_runs(case: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parsed({"cases": [case]})
    assert message in str(caught.value)


def test_what_is_asked_of_a_metric() -> None:
    def bound(**keys: Any) -> str:
        return parsed({"cases": [{"eval": "e.npz", **keys}]}).cases[0].bound.option

    assert bound() == bound(metric="wer") == "--max-drop 1" and bound(metric="cosine") == "--max-drop 0.01"
    assert bound(metric="mae", min_accuracy=0.3) == "--min-accuracy 0.3"
    assert bound(max_drop="0.5%") == bound(metric="psnr", max_drop=0.5) == "--max-drop 0.5"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "[tool", "is not TOML"),
        ("a.yaml", "a: [", "is not YAML"),
        ("a.yaml", "- 1", "is a mapping"),
        ("none.yaml", None, "cannot be read"),
        ("none.toml", None, "cannot be read"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message):
        limits.read(tmp_path / name)
