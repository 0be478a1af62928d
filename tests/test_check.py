"""``optimize check`` as a user types it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from torch import nn

import optimize
from optimize.gate import suite
from optimize.gate.record import Record
from optimize.gate.verdict import Verdict
from optimize.measure.lockstep import MAX_RUNS_PER_BLOCK
from optimize.registry import find_target
from optimize.sandbox.call import Died
from tests.test_cli import ROOT, Typed, command


def write_models(folder: Path, copy: str) -> tuple[Path, Path, Path]:
    """Writes a small network as ONNX, a copy of the file by that name, and the same with other weights."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()
    target, x = find_target("onnx"), torch.randn(1, 3, 16, 16)
    base, wrong = folder / "base.onnx", folder / "wrong.onnx"
    target.export(optimize.capture(net, (x,)), base)
    with torch.no_grad():
        net[4].weight.neg_()
    target.export(optimize.capture(net, (x,)), wrong)
    return base, Path(shutil.copy(base, folder / copy)), wrong


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return write_models(tmp_path_factory.mktemp("check"), "copy.onnx")


def test_two_equal_files(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Live, in fresh processes, with limits that no machine is too slow or too busy for: eleven times as long."""
    base, copy, _ = files
    summary, out = tmp_path / "summary.md", tmp_path / "out"
    summary.write_text("before\n")  # another step's, which is added to
    limits = ("--max-regression", "1000%", "--max-seconds", 3600)
    words = ("--json", out / "c.json", "--junit", out / "c.xml", "--save-baseline", out / "b.json", *limits)
    done = command("check", base, copy, *words, cwd=tmp_path, GITHUB_STEP_SUMMARY=str(summary))
    assert done.returncode == 0, done.stderr
    record = Record.model_validate_json((out / "c.json").read_text())
    (case,) = record.cases
    assert record.exit_code == 0 and case.verdict is Verdict.PASS
    assert case.sqnr_db == 200.0 and case.time is not None and case.base and case.candidate
    assert case.base.sha256 == case.candidate.sha256 and case.base.output_digest == case.candidate.output_digest
    trace = case.trace()
    assert len(trace.rounds) == case.time.rounds and case.time.restarts == len(trace.starts["base"]) == 3
    for number in range(3):
        blocks = [block for pair in trace.rounds for block in pair if block.restart == number]
        (runs,) = {len(clock) for block in blocks for clock in (block.samples_s, block.cpu_s)}
        assert 1 <= runs <= MAX_RUNS_PER_BLOCK
    assert ElementTree.parse(out / "c.xml").getroot().get("tests") == "1"
    assert summary.read_text().startswith("before\n## optimize check: ") and "Error rates" in done.stdout
    assert json.loads((out / "b.json").read_text())["path"].endswith("copy.onnx")


def test_a_wrong_model_fails_in_words(files: tuple[Path, Path, Path], tmp_path: Path, typed: Typed) -> None:
    words = ("--github", "--name", "net", "--junit", "c.xml")
    done = typed("check", files[0], files[2], *words, cwd=tmp_path)
    assert done.returncode == 1 and "net  The outputs agree to" in done.stdout, done.stderr
    assert "::error title=optimize check%3A net%3A FAIL::" in done.stdout
    assert 'name="net"' in (tmp_path / "c.xml").read_text()


def test_a_suite_from_a_project(files: tuple[Path, Path, Path], tmp_path: Path, typed: Typed) -> None:
    """Wrong outputs and a lost file are told apart, and the exit code is that of the worse."""
    for file in (files[0], files[2]):
        shutil.copy(file, tmp_path)
    table = "[[tool.optimize.check.cases]]\nbase = 'base.onnx'\ncandidate = '{}'\n"
    (tmp_path / "pyproject.toml").write_text("".join(map(table.format, ("wrong.onnx", "lost.onnx"))))
    done = typed("check", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "FAIL: 1 fail, 1 not comparable" in done.stdout and "There is no file" in done.stdout
    done = typed("check", "base.onnx", "lost.onnx", cwd=tmp_path)
    assert done.returncode == 4


def test_mistakes_end_in_one_paragraph(files: tuple[Path, Path, Path], tmp_path: Path, typed: Typed) -> None:
    base = files[0]
    (tmp_path / "bad.yaml").write_text("max_regresion: 5%\n")
    mistakes = [
        ((), "No models were given"),
        ((base,), "One model cannot be compared"),
        ((base, base, base), "2 model(s) are compared here; 3 were given"),
        (("--baseline", tmp_path / "b.json"), "--baseline needs the candidate"),
        ((base, base, "--max-regression", "5"), "is not a share"),
        ((base, base, "--max-drop", "1"), "needs labelled data"),
        ((base, base, "--cpus", "a"), "does not name processors"),
        ((base, base, "--cpus", "0,1-0"), "names a range that holds none"),
        ((base, base, "--config", tmp_path / "bad.yaml"), "Did you mean 'max_regression'"),
        ((base, base, "--on-inconclusive", "shrug"), "--on-inconclusive"),
        ((base, base, "--json", base), "is named twice"),
        ((base, "--baseline", tmp_path / "bad.yaml", "--json", tmp_path / "bad.yaml"), "is named twice"),
        (("--name", "net"), "--name is of a pair on the command line"),
        ((base, base, "--json", tmp_path / "o", "--junit", tmp_path / "o"), "is named twice"),
    ]
    for words, message in mistakes:
        done = typed("check", *words, cwd=tmp_path)
        assert done.returncode == 2 and message in done.stderr, (words, done.stderr)
        assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 6


def test_a_baseline_that_is_none_is_not_comparable(
    files: tuple[Path, Path, Path], tmp_path: Path, typed: Typed
) -> None:
    (tmp_path / "b.json").write_text("{}")
    done = typed("check", files[0], "--baseline", tmp_path / "b.json", cwd=tmp_path)
    assert done.returncode == 4 and "not a baseline" in done.stdout, done.stderr


def test_ctrl_c_leaves_nothing(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "optimize",
        "check",
        *map(str, files[:2]),
        "--max-regression",
        "0.001%",  # that nothing decides: it goes on to its last restart
        "--json",
        str(tmp_path / "out" / "c.json"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list(tmp_path.glob("optimize-*/optimize-*/*/own")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 130 and "Interrupted" in errors
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_verdict_does_not_end_as_one(
    files: tuple[Path, Path, Path], tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 is a candidate that is worse: a link in the place of a result, or a killed process, says nothing of it."""
    (tmp_path / "junit.xml").symlink_to(tmp_path / "elsewhere")
    done = typed("check", *files[:2], "--junit", tmp_path / "junit.xml")
    assert done.returncode == 4 and "is a link to" in done.stderr

    def killed(*_: object, **given: object) -> None:
        raise Died("'base.onnx'", -signal.SIGKILL, b"")

    monkeypatch.setattr(suite, "check", killed)
    done = typed("check", *files[:2])
    assert done.returncode == 4 and "was killed" in done.stderr and "ulimit -t" in done.stderr
