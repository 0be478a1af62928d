"""Whether ``--out`` is whole whatever ends a run: the README's command killed at random moments, and two runs at once.

Every kill is ``kill -9`` of the whole process group. Moments are random fractions of a full run's measured time, and
random milliseconds from when the last file is written, which is when files move to ``--out``. After each, every file
that report.json names must have the SHA-256 it states, the Markdown and the page must be of the same run, and the
user's own file and folder must be there; then the next run into the folder must leave nothing hidden.

With --confined the model is a .pt2 without --trust, so that the command is two processes, and the one that keeps the
rights is killed alone: it takes the other along.

    python -m benchmarks.kill_out [--confined] [--kills 50] [--at-commit 50] [--races 50] [--seed 0]
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from models.repvgg import fashion_repvgg
from optimize.registry import find_target
from optimize.targets.base import file_digest
from tests.transaction.steps import fail, hidden

ROOT = Path(__file__).parents[1]
MODEL = ["models/fashion_repvgg.pt", "--model", "models.repvgg:fashion_repvgg"]
OPTIONS = ["--input-shape", "1,28,28", "--fuse", "--to", "torchscript,onnx", "--quiet", "--out"]
#: Milliseconds around a commit that are worth a kill.
COMMIT_MS = 40.0
_NOTES = "kept by the user\n"


def export(path: Path) -> str:
    """Write the model of the README as a .pt2, and return its name."""
    model = fashion_repvgg().eval()
    batch = torch.export.Dim("batch", max=512)
    torch.export.save(torch.export.export(model, (torch.zeros(2, 1, 28, 28),), dynamic_shapes=({0: batch},)), path)
    return str(path)


def start(out: Path) -> subprocess.Popen[bytes]:
    """Start the command in a process group of its own."""
    words = [sys.executable, "-m", "optimize", *MODEL, *OPTIONS, str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=nowhere, stderr=nowhere, start_new_session=True)


def kill(process: subprocess.Popen[bytes]) -> bool:
    """Kill a process group at once; return whether it was still running."""
    was_running = process.poll() is None
    if was_running:
        (os.kill if len(MODEL) == 1 else os.killpg)(process.pid, signal.SIGKILL)
    process.wait()
    return was_running


def prepare(out: Path) -> float:
    """Make a first result among things of the user; return the seconds of a second run."""
    assert start(out).wait() == 0
    (out / "mine").mkdir()
    for file in (out / "notes.txt", out / "mine" / "notes.txt"):
        file.write_text(_NOTES)
    begun = time.monotonic()
    assert start(out).wait() == 0
    return time.monotonic() - begun


def generation(out: Path) -> str:
    """Return when the run began whose result is in the folder.

    Raises:
        AssertionError: It is not one run's result whole, or something of the user's is gone.
    """
    report = json.loads((out / "report.json").read_text())
    for row in report["rows"]:
        path = Path(row["path"])
        assert path.parent == out.resolve(), f"{path} is not in {out}"
        assert file_digest(*find_target(row["target"]).files(path)) == row["sha256"], f"{path} is of another run"
    assert report["created"] in (out / "report.html").read_text(), "report.html is of another run"
    assert all((out / path).read_text() == _NOTES for path in ("notes.txt", "mine/notes.txt")), "notes.txt is gone"
    return report["created"]


def kill_after(seconds: float, out: Path) -> bool:
    """Kill a run so many seconds after it was started."""
    process = start(out)
    time.sleep(seconds)
    return kill(process)


def kill_at_commit(milliseconds: float, out: Path) -> bool:
    """Kill a run so many milliseconds after its last file was written."""
    process = start(out)
    while process.poll() is None and not any(out.parent.glob(f".{out.name}.*/*/report.html")):
        time.sleep(0.0002)
    time.sleep(milliseconds / 1e3)
    return kill(process)


def race(seconds: float, out: Path) -> bool:
    """Let two runs go into one folder, the second started so many seconds after the first; none is killed."""
    first = start(out)
    time.sleep(seconds)
    second = start(out)
    assert (first.wait(), second.wait()) == (0, 0), "a run failed"
    return False


def judge(trial: Callable[[Path], bool], out: Path) -> tuple[str, bool]:
    """Run a trial; return what was found, and whether a hidden folder was left for the next run."""
    before = generation(out)
    was_killed = trial(out)
    found = "new" if generation(out) != before else "old"
    left = bool(hidden(out))
    fail(out)
    assert not hidden(out), "the next run did not tidy up"
    generation(out)
    return f"{'killed' if was_killed else 'ended'}, {found}", left


def run_all(name: str, trials: list[Callable[[Path], bool]], out: Path) -> int:
    """Run trials of one kind and print a line; return how many broke a promise."""
    outcomes: Counter[str] = Counter()
    broken: list[str] = []
    for trial in trials:
        try:
            outcome, left = judge(trial, out)
            outcomes[f"{outcome}, left-over" if left else outcome] += 1
        except (AssertionError, OSError, ValueError) as error:
            broken.append(str(error))
    print(f"{name:<16} {len(trials):>6} {len(broken):>7}  {'; '.join(f'{n} {what}' for what, n in outcomes.items())}")
    for error in broken:
        print(f"  {error}")
    return len(broken)


def main() -> int:
    """Print a line for each kind of trial; end with 1 if one broke a promise."""
    parser = argparse.ArgumentParser()
    for option, count in (("--kills", 50), ("--at-commit", 50), ("--races", 50), ("--seed", 0)):
        parser.add_argument(option, type=int, default=count)
    parser.add_argument("--confined", action="store_true")
    given = parser.parse_args()
    moments = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        if given.confined:
            MODEL[:] = [export(Path(folder) / "net.pt2")]
        full_s = prepare(out)
        print(f"A full run takes {full_s:.1f} s.\n\n{'trial':<16} {'trials':>6} {'broken':>7}  outcomes")
        kinds = [
            ("killed anywhere", kill_after, full_s, given.kills),
            ("at the commit", kill_at_commit, COMMIT_MS, given.at_commit),
            ("two at once", race, full_s / 2, given.races),
        ]
        broken = [
            run_all(name, [partial(trial, moments.uniform(0, most)) for _ in range(count)], out)
            for name, trial, most, count in kinds
        ]
    return 1 if any(broken) else 0


if __name__ == "__main__":
    sys.exit(main())
