"""A target is one folder and one decorator: what is registered is listed, exported to, benchmarked and refused."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from optimize import registry
from optimize.cli import main


class Line(torch.nn.Linear):
    """What the target is for."""

    def __init__(self) -> None:
        super().__init__(5, 2)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the target for one test."""
    monkeypatch.setattr(registry, "_targets", dict(registry.targets()))
    importlib.reload(importlib.import_module("tests.contract.linear_target"))


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["optimize", *map(str, words)])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


MODEL = (f"{__name__}:Line", "--input-shape", "5", "-q")


def test_it_is_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(monkeypatch, "targets") == 0
    shown = capsys.readouterr().out
    assert "One linear layer, in NumPy" in shown and "free: batch" in shown


def test_models_are_exported_to_it_and_its_files_benchmarked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command(monkeypatch, *MODEL, "--to", "linear", "--out", tmp_path / "out") == 0, capsys.readouterr().err
    rows = json.loads((tmp_path / "out/report.json").read_text())["rows"]
    (row,) = [row for row in rows if row["target"] == "linear"]
    assert row["latency"]["median_s"] > 0 and row["agreement"]["sqnr_db"] > 100
    file, report = tmp_path / "out" / row["path"], tmp_path / "bench"
    words = (file, "--seconds", 2, "--restarts", 1, "--streams", 2, "--out", report, "-q")
    assert command(monkeypatch, "bench", *words) == 0, capsys.readouterr().err
    (row,) = json.loads((report / "bench.json").read_text())["rows"]
    assert (row["kind"], row["status"]) == ("linear layer", "measured")


def test_without_a_probe_a_profile_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command(monkeypatch, "profile", *MODEL, "--to", "linear") == 2
    assert "cannot be taken on the target 'linear'" in capsys.readouterr().err
    (tmp_path / "net.linear").write_bytes(b"")
    assert command(monkeypatch, "profile", tmp_path / "net.linear") == 2
    assert "cannot be taken on the target 'linear'" in capsys.readouterr().err
