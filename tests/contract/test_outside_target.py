"""A target is one folder and one decorator: what is registered is listed, exported to, benchmarked and refused."""

import importlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from optimize import registry

Typed = Callable[..., subprocess.CompletedProcess[str]]


class Line(torch.nn.Linear):
    """What the target is for."""

    def __init__(self) -> None:
        super().__init__(5, 2)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the target for one test."""
    monkeypatch.setattr(registry, "_targets", dict(registry.targets()))
    importlib.reload(importlib.import_module("tests.contract.linear_target"))


MODEL = (f"{__name__}:Line", "--input-shape", "5", "-q")


def test_it_is_listed(typed: Typed) -> None:
    done = typed("targets")
    assert done.returncode == 0
    shown = done.stdout
    assert "One linear layer, in NumPy" in shown and "free: batch" in shown


def test_models_are_exported_to_it_and_its_files_benchmarked(typed: Typed, tmp_path: Path) -> None:
    done = typed(*MODEL, "--to", "linear", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out/report.json").read_text())["rows"]
    (row,) = [row for row in rows if row["target"] == "linear"]
    assert row["latency"]["median_s"] > 0 and row["agreement"]["sqnr_db"] > 100
    file, report = tmp_path / "out" / row["path"], tmp_path / "bench"
    words = (file, "--seconds", 2, "--restarts", 1, "--streams", 2, "--out", report, "-q")
    done = typed("bench", *words)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((report / "bench.json").read_text())["rows"]
    assert (row["kind"], row["status"]) == ("linear layer", "measured")


def test_without_a_probe_a_profile_is_refused(typed: Typed, tmp_path: Path) -> None:
    done = typed("profile", *MODEL, "--to", "linear")
    assert done.returncode == 2 and "cannot be taken on the target 'linear'" in done.stderr
    (tmp_path / "net.linear").write_bytes(b"")
    done = typed("profile", tmp_path / "net.linear")
    assert done.returncode == 2 and "cannot be taken on the target 'linear'" in done.stderr
