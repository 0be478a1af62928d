"""The fixture, in a pytest of its own."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Checks are answered by the name of the candidate; what was asked is written beside.
CONFTEST = """
from optimize.gate import suite
from optimize.gate.verdict import Verdict
from optimize.gate import record as records
from tests.gate.records import RECORD, CASES

VERDICTS = {"pass": CASES[0], "fail": CASES[1], "open": CASES[2], "lost": CASES[3],
            "warn": CASES[0].model_copy(update={"verdict": Verdict.WARN, "reason": "+9 %, which is no verdict"})}

def check(settings, *, trust, command):
    case = settings.cases[0]
    found = VERDICTS[case.candidate]
    code = records.exit_code(found.verdict, settings.on_inconclusive)
    update = {"cases": (found,), "exit_code": code, "on_inconclusive": settings.on_inconclusive}
    print("asked", case.base, case.max_regression, trust, command)
    return RECORD.model_copy(update=update)

suite.check = check
"""
TESTS = """
import pytest

def test_pass(optimize_check):
    assert optimize_check("base.onnx", "pass", max_regression="3%", trust=True).name == "resnet"

@pytest.mark.parametrize("candidate", ["fail", "open", "lost", "warn"])
def test_others(optimize_check, candidate):
    optimize_check("base.onnx", candidate)

def test_open_may_pass(optimize_check):
    optimize_check("base.onnx", "open", on_inconclusive="pass")

def test_open_may_fail(optimize_check):
    optimize_check("base.onnx", "open", on_inconclusive="fail")

def test_wrong_key(optimize_check):
    with pytest.raises(Exception, match="optimize_check, with .*pyproject.toml: unknown key 'max_regresion'"):
        optimize_check("base.onnx", "pass", max_regresion="3%")
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What pytest printed, and its JUnit XML."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_models.py").write_text(TESTS)
    (folder / "base.onnx").touch()
    (folder / "pyproject.toml").write_text('[tool.pytest.ini_options]\n[tool.optimize.check]\nmax_regression = "7%"\n')
    installed = any(entry.value == "optimize.gate.plugin" for entry in entry_points(group="pytest11"))
    words = [sys.executable, "-m", "pytest", "-rA", "--junit-xml=out.xml", "-p", "no:cacheprovider"]
    done = subprocess.run(
        words if installed else [*words, "-p", "optimize.gate.plugin"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.stdout + done.stderr, (folder / "out.xml").read_text()


def test_verdicts_end_tests(output: tuple[str, str]) -> None:
    text = output[0]
    for line in (
        "PASSED test_models.py::test_pass",
        "FAILED test_models.py::test_others[fail]",
        "FAILED test_models.py::test_others[lost]",
        "PASSED test_models.py::test_others[warn]",
        "PASSED test_models.py::test_open_may_pass",
        "FAILED test_models.py::test_open_may_fail",
        "3 failed, 4 passed, 1 skipped, 1 warning",
        "repvgg | int8: FAIL: +6.8 % [5.8, 7.8] vs limit 5 %",
        "evidence: slower 1.58e+04 of 400",
        "UserWarning: resnet: WARN: +9 %, which is no verdict",
    ):
        assert line in text, text


def test_project_is_asked_and_keywords_win(output: tuple[str, str]) -> None:
    text = output[0]
    assert "base.onnx 0.03 True test_models.py::test_pass" in text and "base.onnx 0.07 False" in text


def test_properties_reach_junit(output: tuple[str, str]) -> None:
    xml = output[1]
    assert (
        '<property name="verdict" value="fail"' in xml and '<property name="ratio" value="1.068 [1.058, 1.078]"' in xml
    )
