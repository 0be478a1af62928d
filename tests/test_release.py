"""What is told of the package outside its code: metadata, pages, the image and the action say the same."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from optimize.targets.onnx.providers import CPU, CUDA
from optimize.targets.openvino import runner
from optimize.targets.tensorrt import packages
from tests.actions import action

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
ASKED = [Requirement(line) for line in (*PROJECT["dependencies"], *(x for extra in EXTRAS.values() for x in extra))]
RESULTS = sorted(ROOT.glob("benchmarks/results/*.md"))
DAY = re.compile(r"\b20\d\d-\d\d-\d\d\b")


OF_DEVELOPERS = {
    *["hypothesis", "lmdb", "pytest", "pytest-xdist", "ruff", "mypy", "types-PyYAML", "sphinx", "myst-parser", "furo"],
    *["myst-nb", "nbclient", "ipykernel"],
}


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_what_a_target_says_to_install_is_what_an_extra_brings() -> None:
    """An extra is no answer: no index has this package. What it would bring can be installed by its own name."""
    brought = {Requirement(line).name for extra in EXTRAS.values() for line in extra}
    libraries = (packages.TENSORRT, packages.TENSORRT_RTX, packages.TORCH_TENSORRT)
    for command in (CPU.install, CUDA.install, runner.INSTALL, *(library.install for library in libraries)):
        assert command.removeprefix("pip install ") in brought


def test_no_page_and_no_message_names_a_package_that_no_index_has() -> None:
    asked = re.compile(r"pip install[^\n`]*\boptimize\[")
    files = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("benchmarks/*.py"),
        *ROOT.glob("optimize/**/*.py"),
    ]
    assert not [file.name for file in files if asked.search(file.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_the_table_of_versions_names_what_is_asked_for(asked: Requirement) -> None:
    (lowest,) = (bound.version for bound in asked.specifier if bound.operator == ">=") if asked.specifier else ("",)
    assert asked.name in OF_DEVELOPERS or re.search(
        rf"^\| {re.escape(asked.name)} \| {re.escape(lowest)}[ |]", text("docs/support.md"), re.M
    )


def test_constraints_satisfy_what_is_asked() -> None:
    held = dict(line.split("==") for line in text("constraints.txt").splitlines() if line and not line.startswith("#"))
    for asked in ASKED:
        assert asked.name not in held or asked.specifier.contains(held[asked.name], prereleases=True)
        if asked.name in held and asked.name not in OF_DEVELOPERS:
            row = re.search(rf"^\| {re.escape(asked.name)} \|[^|]*\| ([^ ]*) \|", text("docs/support.md"), re.M)
            assert row is not None and row[1] == held[asked.name]


def test_the_image_and_the_action_install_extras_that_exist() -> None:
    (image,) = re.findall(r"^ARG EXTRAS=(.*)$", text("Dockerfile"), re.M)
    for extras in (image, action()["inputs"]["extras"]["default"]):
        assert set(extras.split(",")) <= set(EXTRAS)


def test_the_image_is_built_from_what_the_build_needs() -> None:
    let_in = {line[1:] for line in text(".dockerignore").splitlines() if line.startswith("!")}
    needed = {"optimize", "pyproject.toml", "constraints.txt", PROJECT["readme"], *PROJECT["license-files"]}
    assert let_in == needed


def test_the_change_log_knows_the_version() -> None:
    assert re.search(rf"^## {re.escape(PROJECT['version'])}\b", text("CHANGELOG.md"), re.M)


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    lost = [
        f"{page.name}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", re.sub("`[^`]*`", "", page.read_text(encoding="utf-8")))
        if not (page.parent / link).exists()
    ]
    assert not lost


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.stem)
def test_figures_say_when_on_what_and_with_what_they_were_measured(page: Path) -> None:
    whole = page.read_text(encoding="utf-8")
    head = re.split(r"^(?:\||## )", whole, maxsplit=1, flags=re.M)[0]
    assert DAY.search(head) and re.search(r"\b(AMD|Intel|NVIDIA)\s+\w", head)
    assert re.search(r"\b(torch|ONNX\s+Runtime|onnxruntime)\s+\d+\.\d", head)
    for script in set(re.findall(r"python -m benchmarks\.(\w+)", whole)):
        source = text(f"benchmarks/{script}.py")
        lent = re.search(r"from benchmarks\.(\w+) import (?:\w+, )*run\b", source)  # another script's loop prints
        printer = text(f"benchmarks/{lent[1]}.py") if lent else source
        assert "conditions(" in printer, f"{script} prints a table without its conditions"


def test_pages_that_show_figures_say_the_day_of_their_source() -> None:
    found = DAY.search(text("benchmarks/results/best_target.md"))
    assert (
        found is not None and found[0] in text("docs/decide/which-file.md") and found[0] in text("docs/decide/peers.md")
    )


def test_the_readme_is_short_and_begins_with_what_is_run() -> None:
    blocks = re.findall(r"^```\n(.*?)^```$", text("README.md"), re.M | re.S)
    assert len(text("README.md").splitlines()) <= 120
    assert [block.count("\n") for block in blocks] == [1, 1] and ".[dev]" in blocks[1]


def test_everything_that_is_tracked_is_packed() -> None:
    """The source distribution is the checkout; ``python -m benchmarks.release`` builds it and looks."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no checkout")
    manifest = text("MANIFEST.in")
    grafted = {*re.findall(r"^graft (.*)$", manifest, re.M), "optimize"}
    by_itself = {"pyproject.toml", "LICENSE", "MANIFEST.in"}
    for name in listed.stdout.splitlines():
        top = name.partition("/")[0]
        assert top in grafted | by_itself or top.endswith(".md") or f" {top}" in manifest, name
