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
Ended = subprocess.CompletedProcess
_TYPIST = """
import contextlib, io, json, sys
from optimize.cli import keeper, main
ended, keeper.can_confine = [], lambda: False  # it goes on after a command
for words in json.loads(sys.argv[1]):
    sys.argv, code = ["optimize", *words], 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    ended.append((code, out.getvalue(), errors.getvalue()))
print(json.dumps(ended))
"""
_NET = """
import torch


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
    (block,) = re.findall(r"^       from dataclasses import dataclass\n(?:       .*\n|\n)+", text, re.MULTILINE)
    (entries,) = re.findall(r"^       \[project.entry-points.*\n(?:       .*\n|\n)+", text, re.MULTILINE)
    (folder / "neighbour").mkdir()
    (folder / "neighbour" / "__init__.py").touch()
    (folder / "neighbour" / "drop_identity_scale.py").write_text(dedent(block) + _NET)
    (folder / "neighbour" / "linear.py").write_text((ROOT / "tests/contract/linear_target.py").read_text())
    info = folder / "neighbour-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: neighbour\nVersion: 1.0\n")
    groups = re.findall(r'\[project\.entry-points\."(.+)"\]\n(\w+) = "(.+)"', dedent(entries))
    assert [group for group, _, _ in groups] == ["optimize.passes", "optimize.targets"]
    points = "".join(f"[{group}]\n{name} = {module}\n" for group, name, module in groups)
    (info / "entry_points.txt").write_text(f"{points}broken = neighbour.nowhere\n")
    return folder


def type_all(outside: Path, cwd: Path, *lines: tuple[object, ...]) -> list[Ended]:
    """Type commands one after another, in one process where the package is installed: torch is imported once."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(outside), str(ROOT)])}
    script = [sys.executable, "-c", _TYPIST, json.dumps([[str(word) for word in words] for words in lines])]
    done = subprocess.run(script, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [Ended(words, *found) for words, found in zip(lines, json.loads(done.stdout), strict=True)]


def test_they_are_listed_and_run_as_those_of_this_package(outside: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("passes: [DropIdentityScale]\ntargets: [linear]\n")
    model = "neighbour.drop_identity_scale:Net"
    asked = ("--input-shape", "5", "--recipe", "recipe.yaml", "--out", "out", "-q")
    passes, targets, done, broken = type_all(
        outside, tmp_path, ("passes",), ("targets",), (model, *asked), (model, "--to", "broken")
    )
    assert "DropIdentityScale" in passes.stdout
    assert "One linear layer, in NumPy" in targets.stdout
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out/report.json").read_text())
    (step,), (row,) = report["trace"], report["rows"]
    assert step["rewrites"] == [{"where": "mul", "what": "multiplication by one removed"}]
    assert row["status"] == "measured" and row["agreement"]["sqnr_db"] > 100
    # One that cannot be imported stops nothing, and is named where it misses.
    assert broken.returncode == 2
    assert "There is no target 'broken'." in broken.stderr
    assert "'broken' of neighbour cannot be imported: ModuleNotFoundError" in " ".join(broken.stderr.split())
    bench = ("bench", row["path"], "--seconds", 1, "--restarts", 1, "--out", "bench", "-q")
    check = ("check", row["path"], row["path"], "--max-regression", "500%", "--max-seconds", 5, "-q")
    timed, judged = type_all(outside, tmp_path, bench, check)
    assert timed.returncode == 0, timed.stderr
    assert judged.returncode in (0, 3), judged.stderr  # 3 where a busy machine leaves the speed open
