"""Whether a release is whole: built, checked, installed where nothing else is, and a model put through it.

From the tracked files alone, ``python -m build`` makes the source distribution and of that the wheel; both must hold
what git tracks, and ``twine check --strict`` must find nothing. The wheel goes into an empty environment, with an empty
home and no checkout in sight. There a small network is saved, optimized from its pickle and from its weights, every
file is opened again by its own runtime alone, and ``optimize check`` compares two of them.

    python -m benchmarks.release [--extras cpu] [--python python3.13] [--lowest] [--torch 2.13.0] [--action]

``--lowest`` installs the lowest versions that pyproject.toml promises in place of those of constraints.txt; ``--torch``
takes another torch, for where the lowest has no wheel that is wanted. ``--action`` runs the scripts of action.yml in an
environment of their own, with ``--torch-index`` for the package index that torch is taken from. ``--keep`` leaves
everything in that folder.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.actions import run_step

ROOT = Path(__file__).parents[1]
#: What a job finds of its author: a module that holds the class, beside the file.
NETS = '''
import torch
from torch import nn


class Net(nn.Module):
    """Two convolutions with BatchNorm and a shortcut."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.stem(x)
        x = torch.relu(x + self.block(x))
        return self.head(x.mean((2, 3)))


def main():
    torch.manual_seed(0)
    net = Net().train()
    for _ in range(8):  # statistics that are not those of a new layer
        net(torch.randn(16, 3, 32, 32))
    net.eval()
    torch.save(net, "net.pt")
    torch.save(net.state_dict(), "weights.pt")
    import numpy as np

    x = torch.randn(64, 3, 32, 32)
    np.savez("data.npz", x=x.numpy(), y=net(x).argmax(1).numpy())
'''
#: Opens every file of a report with its own runtime, and without this package; prints how far it is from the original.
AGAIN = """
import json, sys
import numpy as np, torch
import nets

x = torch.from_numpy(np.load("data.npz")["x"])
net = nets.Net().eval()
net.load_state_dict(torch.load("weights.pt", weights_only=True))
wanted = net(x).detach().numpy()
for row in json.load(open(sys.argv[1]))["rows"]:
    if not row["path"] or row["target"] == "eager":
        continue
    if row["target"] == "torchscript":
        found = torch.jit.load(row["path"])(x).detach().numpy()
    elif row["target"] == "onnx":
        import onnxruntime
        session = onnxruntime.InferenceSession(row["path"], providers=["CPUExecutionProvider"])
        found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    elif row["target"] == "openvino":
        import openvino
        exact = {"INFERENCE_PRECISION_HINT": "f32"}  # the plug-in chooses bfloat16 by itself where the CPU has it
        found = openvino.Core().compile_model(row["path"], "CPU", exact)(x.numpy())[0]
    else:
        raise SystemExit("no way to open " + row["target"])
    error = float(10 * np.log10((wanted**2).sum() / ((wanted - found) ** 2).sum()))
    same = float((wanted.argmax(1) == found.argmax(1)).mean())
    print(f"{row['target']:12} {row['path'].rpartition('/')[2]:32} {error:6.1f} dB, {same:.1%} equal top-1")
    assert error > 15
assert "optimize" not in sys.modules
"""
WHERE = "import optimize, sys; print(optimize.__file__); assert optimize.__file__.startswith(sys.prefix)"
#: Targets by the extra that brings their runtime.
TARGETS = {"cpu": "onnx", "openvino": "openvino"}


def run(words: Sequence[str | Path], folder: Path, variables: Mapping[str, str], quiet: bool = False) -> str:
    """Run a program, tell its command, its output and its seconds; return the output.

    Raises:
        SystemExit: It failed.
    """
    print("+", *(Path(word).name if isinstance(word, Path) else word for word in words), flush=True)
    start = time.perf_counter()
    done = subprocess.run(
        list(map(str, words)),
        cwd=folder,
        env=dict(variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode or not quiet:
        print(done.stdout.rstrip(), flush=True)
    if done.returncode:
        raise SystemExit(f"It ended with {done.returncode}.")
    print(f"  ({time.perf_counter() - start:.1f} s)", flush=True)
    return done.stdout


def alone(home: Path) -> dict[str, str]:
    """Return the variables of somebody who has an empty home and no checkout; how pip reaches its index stays."""
    kept = {"PATH": os.defpath, "HOME": str(home), "LANG": "C.UTF-8", "COLUMNS": "132", "NO_COLOR": "1"}
    return kept | {name: value for name, value in os.environ.items() if name.startswith("PIP_")}


def environment(python: str, folder: Path) -> Path:
    """Make an environment; return its interpreter."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    return folder / "bin" / "python"


def tracked() -> list[str]:
    """Return what git tracks of the checkout, as it lies there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def copy_tracked(folder: Path) -> Path:
    """Copy what git tracks, so that nothing else can be packed."""
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def build(python: str, work: Path, variables: Mapping[str, str]) -> Path:
    """Build and check both distributions; return the wheel.

    Raises:
        SystemExit: One cannot be built, or holds more or less than it should.
    """
    tools, source, made = environment(python, work / "tools"), copy_tracked(work / "source"), work / "dist"
    run([tools, "-m", "pip", "install", "--quiet", "build", "twine"], work, variables, quiet=True)
    run([tools, "-m", "build", "--outdir", made, source], work, variables, quiet=True)
    run([tools, "-m", "twine", "check", "--strict", *sorted(made.iterdir())], work, variables)
    (wheel,), (archive,) = made.glob("*.whl"), made.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        held = {name for name in file.namelist() if ".dist-info/" not in name}
    compare(wheel, held, {name for name in tracked() if name.startswith("optimize/")})
    with tarfile.open(archive) as file:
        names = {member.name.partition("/")[2] for member in file if member.isfile()}
    made_by_it = {"PKG-INFO", "setup.cfg"}
    compare(archive, {name for name in names - made_by_it if ".egg-info/" not in name}, set(tracked()))
    return wheel


def compare(file: Path, held: set[str], wanted: set[str]) -> None:
    """Tell how large a distribution is, and refuse one that does not hold what it should."""
    print(f"{file.name}: {file.stat().st_size / 1e3:.0f} kB, {len(held)} files")
    if held != wanted:
        raise SystemExit(f"{file.name} lacks {sorted(wanted - held)} and holds {sorted(held - wanted)} beside.")


def lowest(extras: Iterable[str], torch: str) -> str:
    """Return constraints that hold every dependency at the lowest version that pyproject.toml promises."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    lines = [line.partition(";")[0].strip().replace(">=", "==") for line in asked]
    if torch:
        lines = [f"torch=={torch}" if line.startswith("torch==") else line for line in lines]
    return "\n".join(lines) + "\n"


def try_wheel(python: Path, targets: str, job: Path, variables: Mapping[str, str]) -> None:
    """Put a network through the installed package."""
    optimize = python.with_name("optimize")
    job.mkdir()
    (job / "nets.py").write_text(NETS, encoding="utf-8")
    (job / "again.py").write_text(AGAIN, encoding="utf-8")
    run([python, "-m", "pip", "check"], job, variables)
    run([python, "-c", WHERE], job, variables, quiet=True)
    run([optimize, "--version"], job, variables)
    run([python, "-c", "import nets; nets.main()"], job, variables)
    ask = ["--fuse", "--int8", "--calib", "data.npz", "--eval", "data.npz", "--to", targets, "--quiet"]
    run([optimize, "net.pt", "--trust", *ask, "--out", "pickled"], job, variables)
    run([python, "again.py", "pickled/report.json"], job, variables)
    run([optimize, "weights.pt", "--model", "nets:Net", *ask, "--out", "weights"], job, variables, quiet=True)
    run([python, "again.py", "weights/report.json"], job, variables)
    if "onnx" in targets:
        pair = ["pickled/net.float32.onnx", "weights/weights.float32.onnx"]
        allowed = ["--max-regression", "1000%", "--eval", "data.npz", "--quiet"]
        run([optimize, "check", *pair, *allowed, "--junit", "check.xml"], job, variables)


def try_action(python: str, work: Path, job: Path, torch_index: str, variables: Mapping[str, str]) -> None:
    """Run the scripts of action.yml, in an environment that they fill.

    Raises:
        SystemExit: One of them fails.
    """
    tools = environment(python, work / "action").parent
    (work / "output.txt").touch()
    given = {**variables, "PATH": f"{tools}:{os.defpath}", "GITHUB_OUTPUT": str(work / "output.txt")}
    inputs = {"base": "pickled/net.float32.onnx", "candidate": "weights/weights.float32.onnx", "eval": "data.npz"}
    inputs |= {"torch-index": torch_index, "max-regression": "1000%", "arguments": "--quiet"}
    for step in ("install", "check"):
        print(f"+ action.yml: {step}", flush=True)
        done = run_step(step, inputs, job, given, work / "source")
        print(done.stdout.rstrip(), flush=True)
        if done.returncode:
            raise SystemExit(f"It ended with {done.returncode}: {done.stderr}")
    print((work / "output.txt").read_text(encoding="utf-8").replace(str(work), ""))


def main() -> None:
    """Check a release."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", default="cpu", help="with commas: cpu, openvino")
    parser.add_argument("--python", default=sys.executable, help="interpreter that the wheel is installed for")
    parser.add_argument("--lowest", action="store_true", help="the lowest versions of pyproject.toml")
    parser.add_argument("--torch", default="", help="with --lowest: this torch")
    parser.add_argument("--action", action="store_true", help="run the scripts of action.yml, too")
    parser.add_argument("--torch-index", default="https://download.pytorch.org/whl/cpu")
    parser.add_argument("--keep", type=Path, help="leave everything in this folder")
    given = parser.parse_args()
    work = given.keep or Path(tempfile.mkdtemp())
    (work / "home").mkdir(parents=True)
    variables = alone(work / "home")
    try:
        wheel = build(sys.executable, work, variables)
        python = environment(given.python, work / "empty")
        held = work / "constraints.txt"
        held.write_text(
            lowest(given.extras.split(","), given.torch)
            if given.lowest
            else (ROOT / "constraints.txt").read_text(encoding="utf-8"),
            encoding="utf-8",
        )
        what = f"{wheel}[{given.extras}]"
        run([python, "-m", "pip", "install", "--quiet", "-c", held, what], work, variables, quiet=True)
        run([python, "-m", "pip", "list", "--format=freeze"], work, variables)
        targets = ",".join(["torchscript", *(TARGETS[extra] for extra in given.extras.split(",") if extra in TARGETS)])
        try_wheel(python, targets, work / "job", variables)
        if given.action:
            try_action(given.python, work, work / "job", given.torch_index, variables)
        print("The release is whole.")
    finally:
        if not given.keep:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
