"""Packages of other people: what CONTRIBUTING says, done outside this package, shows in every command."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parents[2]
_HEAD = """
from dataclasses import dataclass
from typing import ClassVar

import torch

from optimize import graph
from optimize.graph import aten
from optimize.passes.base import Exactness, Outcome, Pass, Rewrite, Stage
from optimize.program import Program
from optimize.registry import register_pass


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(5, 3)

    def forward(self, x):
        return super().forward(x * 1)


"""


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed package of CONTRIBUTING's pass and target, and one that cannot be imported."""
    folder = tmp_path_factory.mktemp("site")
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (block,) = re.findall(r"^       @register_pass\n(?:       .*\n|\n)+", text, re.MULTILINE)
    (entries,) = re.findall(r"^       \[project.entry-points.*\n(?:       .*\n|\n)+", text, re.MULTILINE)
    (folder / "neighbour").mkdir()
    (folder / "neighbour" / "__init__.py").touch()
    (folder / "neighbour" / "drop_identity_scale.py").write_text(_HEAD + dedent(block))
    (folder / "neighbour" / "linear.py").write_text((ROOT / "tests/contract/linear_target.py").read_text())
    info = folder / "neighbour-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: neighbour\nVersion: 1.0\n")
    groups = re.findall(r'\[project\.entry-points\."(.+)"\]\n(\w+) = "(.+)"', dedent(entries))
    assert [group for group, _, _ in groups] == ["optimize.passes", "optimize.targets"]
    points = "".join(f"[{group}]\n{name} = {module}\n" for group, name, module in groups)
    (info / "entry_points.txt").write_text(f"{points}broken = neighbour.nowhere\n")
    return folder


def command(outside: Path, *words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(outside), str(ROOT)])}
    line = [sys.executable, "-m", "optimize", *map(str, words)]
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_they_are_listed_and_run_as_those_of_this_package(outside: Path, tmp_path: Path) -> None:
    assert "DropIdentityScale" in command(outside, "passes", cwd=tmp_path).stdout
    assert "One linear layer, in NumPy" in command(outside, "targets", cwd=tmp_path).stdout
    (tmp_path / "recipe.yaml").write_text("passes: [DropIdentityScale]\ntargets: [linear]\n")
    model = ("neighbour.drop_identity_scale:Net", "--input-shape", "5")
    done = command(outside, *model, "--recipe", "recipe.yaml", "--out", "out", "-q", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out/report.json").read_text())
    (step,), (row,) = report["trace"], report["rows"]
    assert step["rewrites"] == [{"where": "mul", "what": "multiplication by one removed"}]
    assert row["status"] == "measured" and row["agreement"]["sqnr_db"] > 100
    words = ("bench", row["path"], "--seconds", 1, "--restarts", 1, "--out", "bench", "-q")
    assert command(outside, *words, cwd=tmp_path).returncode == 0
    words = ("check", row["path"], row["path"], "--max-regression", "500%", "--max-seconds", 5, "-q")
    judged = command(outside, *words, cwd=tmp_path)
    assert judged.returncode in (0, 3), judged.stderr  # 3 where a busy machine leaves the speed open


def test_one_that_cannot_be_imported_stops_nothing_and_is_named_where_it_misses(outside: Path, tmp_path: Path) -> None:
    done = command(outside, "neighbour.drop_identity_scale:Net", "--to", "broken", cwd=tmp_path)
    assert done.returncode == 2
    assert "There is no target 'broken'." in done.stderr
    assert "'broken' of neighbour cannot be imported: ModuleNotFoundError" in " ".join(done.stderr.split())
