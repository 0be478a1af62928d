"""Packages of other people: what CONTRIBUTING says, done outside this package, shows in every command."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
Ended = subprocess.CompletedProcess
_TYPIST = """
import contextlib, io, json, sys
import pytest
from optimize.cli import keeper, main
from tests.preloaded import fork_children
fork_children(pytest.MonkeyPatch())
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
        torch.manual_seed(0)
        super().__init__(5, 3)

    def forward(self, x):
        return super().forward(x * 1)


"""


_PLAIN = """
import torch


class Plain(torch.nn.Linear):
    def __init__(self):
        super().__init__(5, 3)
"""
#: A target that runs float32 alone, with a method that fails where its name says so; one that opens nothing.
_TOYS = """
from neighbour.linear import Linear, LinearRunner
from optimize.registry import register_target
from optimize.targets.base import Target


class FailingRunner(LinearRunner):
    def run(self, inputs):
        return inputs[0].nothing


@register_target
class Toy(Linear):
    name, suffix, endings = "toy", ".toy", ()


@register_target
class BadExport(Toy):
    name, suffix = "bad-export", ".bad-export"

    def export(self, program, path):
        return program.nothing


@register_target
class Forgetful(Toy):
    name, suffix = "forgetful", ".forgetful"

    def export(self, program, path):
        super().export(program, path)


@register_target
class BadLoad(Toy):
    name, suffix = "bad-load", ".bad-load"

    def load(self, artifact, *, threads=None):
        return artifact.nothing


@register_target
class BadRun(Toy):
    name, suffix = "bad-run", ".bad-run"

    def load(self, artifact, *, threads=None):
        return FailingRunner(artifact)


@register_target
class BadOpen(Toy):
    name, suffix, endings = "bad-open", ".bad-open", (".bad-open",)

    def open(self, path, *, trust=False):
        return path.nothing


@register_target
class Closed(Toy):
    name, suffix, endings = "closed", ".closed", (".closed",)
    open = Target.open
"""


#: Those of them that a run meets, whose methods fail.
FAILING = ("bad-export", "forgetful", "bad-load", "bad-run")


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
    (target,) = re.findall(r"^       from __future__ import annotations\n(?:       .*\n|\n)+", text, re.MULTILINE)
    (folder / "neighbour" / "linear.py").write_text(dedent(target))
    (folder / "neighbour" / "toys.py").write_text(_TOYS)
    (folder / "neighbour" / "linear_net.py").write_text(_PLAIN)
    info = folder / "neighbour-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: neighbour\nVersion: 1.0\n")
    groups = re.findall(r'\[project\.entry-points\."(.+)"\]\n(\w+) = "(.+)"', dedent(entries))
    assert [group for group, _, _ in groups] == ["optimize.passes", "optimize.targets"]
    passes, targets = (f"[{group}]\n{name} = {module}\n" for group, name, module in groups)
    broken = "broken = neighbour.nowhere\n"
    (info / "entry_points.txt").write_text(f"{passes}{broken}{targets}{broken}toys = neighbour.toys\n")
    return folder


@pytest.fixture(scope="module")
def typed_all(outside: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Ended]]:
    """The folder where commands were typed one after another, in one process where the package is installed."""
    folder, model, plain = (
        tmp_path_factory.mktemp("typed"),
        "neighbour.drop_identity_scale:Net",
        "neighbour.linear_net:Plain",
    )
    for name in ("closed", "bad-open"):
        (folder / f"net.{name}").write_bytes(b"PK")
    asked, file = ("--input-shape", 5, "--no-layer-timing", "-q"), "out/Net.float32.linear"
    lines: dict[str, tuple[object, ...]] = {
        "passes": ("passes",),
        "targets": ("targets",),
        "run": (model, *asked, "--pass", "DropIdentityScale", "--to", "linear", "--out", "out"),
        "again": (model, "--recipe", "out/recipe.yaml", "--out", "again", "-q"),
        "broken": (model, "--to", "broken"),
        "bench": ("bench", file, "--runs", 6, "--restarts", 1, "--out", "bench", "-q"),
        "check": ("check", file, file, "--max-regression", "500%", "--max-seconds", 1, "-q"),
        "int8": (plain, *asked, "--int8=dynamic", "--to", "toy,onnx", "--out", "int8"),
        "failing": (plain, *asked, "--to", ",".join((*FAILING, "onnx")), "--out", "failing"),
        "closed": ("check", "net.closed", "net.closed", "-q"),
        "bad": ("check", "net.bad-open", "net.bad-open", "-q"),
        "missing": ("check", "none.bad-open", "none.bad-open", "-q"),
    }
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(outside), str(ROOT)])}
    words = json.dumps([[str(word) for word in line] for line in lines.values()])
    script = [sys.executable, "-c", _TYPIST, words]
    done = subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ended = zip(lines.items(), json.loads(done.stdout), strict=True)
    return folder, {name: Ended(line, *found) for (name, line), found in ended}


def test_they_are_listed_and_run_as_those_of_this_package(typed_all: tuple[Path, dict[str, Ended]]) -> None:
    folder, ended = typed_all
    passes, targets = ended["passes"], ended["targets"]
    assert "DropIdentityScale" in passes.stdout and "Of neighbour 1.0." in passes.stdout
    # One that cannot be imported stops nothing, and is named with the reason below both lists.
    reason = "'broken' of neighbour cannot be imported: ModuleNotFoundError: No module named 'neighbour.nowhere'."
    assert passes.stdout.splitlines()[-1] == targets.stdout.splitlines()[-1] == reason
    assert "One linear layer, in NumPy" in targets.stdout
    assert ended["run"].returncode == 0, ended["run"].stderr
    report = json.loads((folder / "out/report.json").read_text())
    assert ended["again"].returncode == 0, ended["again"].stderr
    recipe = (folder / "out/recipe.yaml").read_text()
    assert "# DropIdentityScale is of neighbour 1.0.\npasses:\n- DropIdentityScale\n" in recipe
    (first, second) = ((folder / name / "Net.float32.linear").read_bytes() for name in ("out", "again"))
    assert first == second
    (step,), (row,) = report["trace"], report["rows"]
    assert step["origin"] == "neighbour 1.0"
    assert step["rewrites"] == [{"where": "mul", "what": "multiplication by one removed"}]
    assert row["status"] == "measured" and row["agreement"]["sqnr_db"] > 100
    # ... and where it misses.
    broken = ended["broken"]
    assert broken.returncode == 2
    assert "There is no target 'broken'." in broken.stderr
    assert "'broken' of neighbour cannot be imported: ModuleNotFoundError" in " ".join(broken.stderr.split())
    assert Path(row["path"]).name == "Net.float32.linear"
    assert ended["bench"].returncode == 0, ended["bench"].stderr
    # 3 where a busy machine leaves the speed open
    assert ended["check"].returncode in (0, 3), ended["check"].stderr


def test_a_precision_that_support_does_not_name_is_a_failed_row(typed_all: tuple[Path, dict[str, Ended]]) -> None:
    folder, ended = typed_all
    rows = _rows(folder / "int8")
    assert ended["int8"].returncode == 1, ended["int8"].stderr
    row = rows["toy", "int8-dynamic"]
    assert row["status"] == "failed"
    assert row["reason"].startswith("toy files are written in float32; this one is int8-dynamic. ")
    others = ("toy", "float32"), ("onnx", "float32"), ("onnx", "int8-dynamic")
    assert all(rows[key]["status"] == "measured" for key in others)
    assert not (folder / "int8/Plain.int8-dynamic.toy").exists()


def test_an_error_in_a_target_is_its_own_row_with_its_package_and_line(
    typed_all: tuple[Path, dict[str, Ended]],
) -> None:
    folder, ended = typed_all
    assert ended["failing"].returncode == 1, ended["failing"].stderr
    rows = _rows(folder / "failing")
    assert rows["onnx", "float32"]["status"] == "measured" and (folder / "failing/Plain.float32.onnx").is_file()
    for name in FAILING:
        row, owner = rows[name, "float32"], f"The target {name} of the package 'neighbour' failed"
        assert row["status"] == "failed" and owner in row["reason"], row
        if name != "forgetful":
            assert " in neighbour.toys, line " in row["reason"] and "has no attribute 'nothing'" in row["reason"]
    assert "export returned a NoneType, not an Artifact" in rows["forgetful", "float32"]["reason"]
    judged = [ended[name] for name in ("closed", "bad", "missing")]
    assert all(each.returncode == 4 for each in judged)
    closed, bad, missing = (" ".join(each.stdout.split()) for each in judged)
    assert "The target closed of the package 'neighbour' cannot open 'net.closed'" in closed
    assert "has no method `open`" in closed
    assert "The target bad-open of the package 'neighbour' failed in neighbour.toys, line" in bad
    assert "There is no file 'none.bad-open'" in missing


def _rows(out: Path) -> dict[tuple[str, str], dict[str, Any]]:
    rows = json.loads((out / "report.json").read_text())["rows"]
    return {(row["target"], row["precision"]): row for row in rows}
