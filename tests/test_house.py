"""The house: which room may import which, one name a class, types that fit, and how large it has become."""

import ast
import functools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "optimize"

#: What belongs to a room, by the first word behind ``optimize.`` (by the whole name where a module is listed).
ROOMS = {
    "ground": ("errors", "escaping", "bounds", "dimensions", "texts", "regular", "files", "named",
        "sealing", "processor", "progress", "distances", "records", "wording", "keeping"),
    "sandbox": ("sandbox",),
    "transaction": ("transaction",),
    "workers": ("transport", "workers"),
    "graph": (
        "graph", "program", "invariants", "normal_form", "counting", "products", "attention", "frontend", "preparation",
        "capture_checks", "costs", "ops", "plan", "scripting", "tracing", "bindings", "merged",
        "frontend_graphs", "from_export",
    ),
    "reading": (
        "load.exported", "load.archive", "load.graph_json", "load.description", "load.operators", "load.names",
        "load.pickles", "load.identify",
    ),
    "load": ("load",),
    "data": ("data",),
    "mathematics": ("algebra", "pruning", "branches", "quantization", "precision"),
    "training": ("training",),
    "passes": ("passes", "pipeline"),
    "registry": ("registry",),
    "base": (
        "targets.base", "targets.arrays", "targets.packaging", "targets.probe", "targets.snippets",
        "targets.torch_runner",
    ),
    "runtimes": ("targets",),
    "measure": ("measure",),
    "bench": ("bench",),
    "gate": ("gate",),
    "explain": ("profile", "advise", "ranking"),
    "report": ("report",),
    "line": (
        "presets", "recipe", "replay", "job", "pace", "datasets", "search", "sensitivity", "workflow",
        "auto",
    ),
    "door": ("cli", "__main__", "__init__"),
}  # fmt: skip

_SAFE = ("ground", "sandbox")
_PROGRAM = (*_SAFE, "graph")
_THEORY = (*_PROGRAM, "mathematics", "base", "registry")
_MEASURED = (*_THEORY, "data", "reading", "load", "measure")
#: The rooms that each may import beside itself: data flows one way. The mathematics know no runtime and no wording,
#: passes no runtime, runtimes no pass, those who measure no runtime by name, and nothing that decides knows a report.
ARROWS = {
    "ground": (),
    "sandbox": ("ground",),
    "transaction": ("ground",),
    "graph": ("ground",),
    "workers": _PROGRAM,  # they compute what the graph is, and are processes
    "reading": _PROGRAM,
    "load": (*_PROGRAM, "reading", "registry"),  # a target reads its own files
    "data": _SAFE,  # texts are encoded by somebody else's rules
    "mathematics": ("ground", "graph", "data", "workers"),
    "training": ("ground",),
    "passes": ("ground", "graph", "data", "mathematics", "registry"),
    "registry": ("ground", "passes", "base"),  # the types of what it holds; it imports none before it is asked
    "base": ("ground", "graph", "mathematics", "registry"),
    "runtimes": (*_THEORY, "reading"),
    "measure": (*_THEORY, "data", "reading", "load"),
    "bench": _MEASURED,
    "gate": _MEASURED,
    "explain": (*_MEASURED, "passes"),
    "report": (*_MEASURED, "bench", "gate", "explain", "transaction", "passes", "line"),
    "line": (*_MEASURED, "explain", "report", "transaction", "passes"),
    "door": tuple(ROOMS),
}

#: Python lines and files of the package: they may fall, and grow only where somebody writes it down here. Last for
#: ``SelectEarly`` (165 lines) and what it asks the graph (250), a rule a kind of call; for attention that is written
#: out, or torch's own kernel (225), copies with branches that are proved (45), however a projection is cut (65), runs
#: into a folder of another's (130), stable sorts (35), pieces of pictures (20), rows that are read and not mapped (40),
#: what ONNX has no operator for (370), what halves have no kernel of (50), divisors of pools (30), means in sums (25),
#: rows that are no samples (25), the same samples in several batches (60),
#: graphs of torch's that somebody holds, and batches of which no other runs (55), errors of
#: a training (40), what inductor does not fuse (55), rows of halves (40),
#: biases as sums (20), names that hide packages (25), what training clipped (55), folders that cannot go back (20).
MOST_LINES, MOST_FILES, MOST_CLASSES = 73_290, 349, 486


@functools.cache
def _modules() -> dict[str, ast.Module]:
    """Return every module of the package by its name without ``optimize.``; a package is named like its folder."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of the package that a module imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("optimize."))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "optimize":
            inside = node.module.partition(".")[2]
            names = (f"{inside}.{alias.name}".lstrip(".") for alias in node.names)
            yield from (name if name in _modules() else inside or "__init__" for name in names)


def _room(module: str) -> str:
    """Return the room of a module: that which names the most of it."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        for room, names in ROOMS.items():
            if ".".join(parts[:length]) in names:
                return room
    raise AssertionError(f"'{module}' belongs to no room: add it to ROOMS")


def _forbidden() -> set[str]:
    found = set()
    for module, tree in _modules().items():
        room = _room(module)
        for other in set(_imported(tree)):
            neighbours = _room(other) == room == "runtimes" and _folder(module) != _folder(other)
            if (_room(other) not in (room, *ARROWS[room])) or (neighbours and not _is_shared(other)):
                found.add(f"{module}: {other}")
    return found


def _folder(module: str) -> str:
    """Return the folder of a runtime."""
    return module.split(".")[1] if "." in module else ""


def _is_shared(module: str) -> bool:
    """Say whether a module of ``targets`` is no runtime's own: it stands beside their folders."""
    return _folder(module) == "onnx_graph" or not (ROOT / "targets" / _folder(module)).is_dir()


def test_types() -> None:
    """Here, beside other tests, for it uses one processor."""
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_module_has_a_room() -> None:
    assert {_room(name) for name in _modules()} == set(ROOMS)


def test_imports_follow_the_arrows() -> None:
    assert not _forbidden(), "imports against the arrows:\n" + "\n".join(sorted(_forbidden()))


def _shared() -> dict[str, list[str]]:
    """Return the names that several classes have, with their modules."""
    found = defaultdict(list)
    for module, tree in _modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(module)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_no_two_classes_have_one_name() -> None:
    assert not _shared(), f"one name, several classes: {_shared()}"


def test_the_size_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in ROOT.rglob("*.py"))
    classes = sum(isinstance(node, ast.ClassDef) for tree in _modules().values() for node in ast.walk(tree))
    files, reached = len(_modules()), len(_reached("cli.run", "passes", "targets.onnx"))
    with capsys.disabled():
        print(f"\noptimize/: {lines} lines, {files} files, {classes} classes; --to onnx reaches {reached} modules")
    assert lines <= MOST_LINES and files <= MOST_FILES and classes <= MOST_CLASSES


def _reached(*starts: str) -> set[str]:
    """Return the modules that some can import, through any number of others."""
    found: set[str] = set()
    open_ends = list(starts)
    while open_ends:
        name = open_ends.pop()
        if name in _modules() and name not in found:
            found.add(name)
            package = name.rpartition(".")[0]
            above = [package] if package != "cli" else []  # its commands are lazy
            open_ends += [*_imported(_modules()[name]), *above]
    return found


HEAVY = "torch onnx onnxruntime tensorrt tensorrt_rtx openvino torchao numpy rich pydantic"
HELP = "sys.argv = ['optimize', '--help']\nfrom optimize.cli import main\nwith contextlib.suppress(SystemExit): main()"
#: What is done from the lightest on, and the modules that nothing of it may have imported by then.
LIGHT = (
    ("import optimize", HEAVY),
    (HELP, HEAVY),
    ("from optimize.measure.environment import current; current()", "torch"),
    ("from optimize.targets.tensorrt import TensorRT; TensorRT().available()", "torch onnx tensorrt tensorrt_rtx"),
    ("import optimize.targets.onnx.runner", "torch onnx"),
    ("import optimize.measure.worker", "torch onnx"),
    ("import optimize.report.model, optimize.report.console", "torch"),
    ("optimize.capture", "onnxruntime tensorrt_rtx openvino torchao"),
)


def test_what_is_light_imports_nothing_heavy() -> None:
    """In one process for all: what a step has imported is there in the next."""
    step = "{code}\nfound = set({names!r}.split()) & set(sys.modules)\nassert not found, ({code!r}, found)\n"
    program = "import contextlib, sys\n" + "".join(step.format(code=code, names=names) for code, names in LIGHT)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
