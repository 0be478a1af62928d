"""``action.yml``: its scripts run with bash on small models, and no input can become part of a script."""

import os
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from optimize.gate.record import Record
from tests.actions import ROOT, action, run_step, scripts
from tests.test_check import write_models

PYTHON = f'#!/bin/sh\nexec "{sys.executable}" {{}} "$@"\n'
LIMITS = {"max-regression": "1000%", "arguments": "--max-seconds=3600\n"}  # which no machine is too slow for


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models: a base, its copy, and what answers otherwise."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder, "a copy.onnx")
    return folder


@pytest.fixture
def job(files: Path, tmp_path: Path) -> Path:
    """The folder of a job, with the models in it."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def runner(tmp_path: Path) -> dict[str, str]:
    """Variables of a GitHub runner, whose ``optimize`` is this checkout's."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "optimize").write_text(PYTHON.format("-m optimize"))
    (tools / "optimize").chmod(0o755)
    for name in ("output.txt", "summary.md"):
        (tmp_path / name).touch()
    return {
        **os.environ,
        "GITHUB_ACTIONS": "true",
        "GITHUB_OUTPUT": str(tmp_path / "output.txt"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }


def outputs(runner: dict[str, str]) -> dict[str, str]:
    return dict(line.split("=", 1) for line in Path(runner["GITHUB_OUTPUT"]).read_text().splitlines())


def test_no_script_holds_an_expression() -> None:
    assert set(scripts()) == {"install", "check"}
    for step in scripts().values():
        assert step["shell"] == "bash" and "${{" not in step["run"]
    reached = "".join(value for step in scripts().values() for value in step["env"].values())
    others = {"working-directory"}  # of the step itself
    assert all(f"inputs.{name} " in reached for name in set(action()["inputs"]) - others)


@pytest.mark.slow
def test_equal_files_pass(job: Path, runner: dict[str, str]) -> None:
    done = run_step("check", {"base": "base.onnx", "candidate": "a copy.onnx", **LIMITS}, job, runner)
    assert done.returncode == 0, done.stderr
    told = outputs(runner)
    assert told["exit-code"] == "0"
    assert Record.model_validate_json(Path(told["json"]).read_text()).exit_code == 0
    assert ElementTree.parse(told["junit"]).getroot().get("failures") == "0"
    assert "## optimize check" in (job / "summary.md").read_text()


def test_a_wrong_candidate_fails_and_the_step_with_it(job: Path, runner: dict[str, str]) -> None:
    given = {"base": "base.onnx", "candidate": "wrong.onnx", "results": "of this/job", "on-inconclusive": "pass"}
    done = run_step("check", given, job, runner)
    assert done.returncode == 1 and outputs(runner)["exit-code"] == "1", done.stderr
    assert "::error title=optimize check" in done.stdout
    assert outputs(runner)["junit"] == str(job / "of this/job/check.xml")
    assert ElementTree.parse(outputs(runner)["junit"]).getroot().get("failures") == "1"


@pytest.mark.parametrize(
    "given, code",
    [
        ({"base": "base.onnx", "candidate": "lost.onnx"}, 4),
        ({"base": "base.onnx", "candidate": "wrong.onnx", "max-regression": "much"}, 2),
        pytest.param({}, 2, marks=pytest.mark.slow),  # no models, and no configuration
    ],
)
def test_other_ends_are_the_commands_own(given: dict[str, str], code: int, job: Path, runner: dict[str, str]) -> None:
    done = run_step("check", given, job, runner)
    assert done.returncode == code and outputs(runner)["exit-code"] == str(code), done.stderr


HOSTILE = '$(touch "$HOME/taken"); `touch "$HOME/taken"`" ; touch "$HOME/taken" #'


@pytest.mark.parametrize("name", sorted({*action()["inputs"]} - {"working-directory"}))
def test_an_input_is_never_run(name: str, tmp_path: Path, runner: dict[str, str]) -> None:
    """Whatever an input holds, it reaches the command as one word, or pip."""
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "tools/optimize").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "tools/python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "tools/python").chmod(0o755)
    inputs = {"base": "base.onnx", "candidate": "a copy.onnx", name: HOSTILE}
    said = "".join(run_step(step, inputs, tmp_path, {**runner, "HOME": str(home)}).stdout for step in scripts())
    assert not list(home.iterdir())
    assert HOSTILE in said or name == "python-version"  # whether one is given is all that a script asks


def test_a_python_of_its_own_is_given_the_tested_versions_and_another_keeps_its_own(
    tmp_path: Path, runner: dict[str, str]
) -> None:
    (tmp_path / "tools/python").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "tools/python").chmod(0o755)
    fresh = run_step("install", {}, tmp_path, runner).stdout.splitlines()
    constraint = f"--constraint {ROOT}/constraints.txt"
    assert fresh == [
        f"-m pip install --quiet {constraint} --index-url https://download.pytorch.org/whl/cpu torch",
        f"-m pip install --quiet {constraint} {ROOT}[cpu]",
    ]
    kept = run_step("install", {"python-version": "", "extras": "cpu,openvino"}, tmp_path, runner).stdout
    assert kept == f"-m pip install --quiet {ROOT}[cpu,openvino]\n"
