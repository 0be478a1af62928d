"""Whether ``optimize bench`` tells the time that a plain loop tells: resnet50 in ONNX Runtime, both beside each other.

The plain loop does what ONNX Runtime's own ``onnxruntime_perf_test -x 1`` does, in a process of its own that knows
nothing of this package. It runs a turn before every block of the benchmark, so that both meet the same machine; the
ratio is the median of the paired medians. Goal: within 3 %.

    pip install --no-deps torchvision==0.28.0 timm==1.0.31
    python -m benchmarks.bench_agreement [SECONDS]
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import optimize
from benchmarks.efficientnet_lite0 import declare_torchvision_operators
from optimize.bench.rounds import put_through, run
from optimize.measure.energy import EnergyMeter
from optimize.measure.lockstep import Plan
from optimize.measure.openers import Opening
from optimize.measure.runs import Scenario
from optimize.measure.subjects import agreed_inputs

TURN, WARM_UP, RESTARTS = 3, 10, 2
GOAL = 0.03
LOOP = """
import json, sys, time
import numpy as np
import onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
feed = {session.get_inputs()[0].name: np.random.default_rng(0).standard_normal((1, 3, 224, 224), np.float32)}
for line in sys.stdin:
    session.run(None, feed)
    walls, processor = [], []
    for _ in range(int(line)):
        cpu, start = time.process_time(), time.perf_counter()
        session.run(None, feed)
        walls.append(time.perf_counter() - start)
        processor.append(time.process_time() - cpu)
    print(json.dumps([walls, processor]), flush=True)
"""


class PlainLoop(EnergyMeter):
    """Runs a turn of the plain loop whenever the benchmark asks for a reading before a block; it counts no energy."""

    source = "none: it stands in to be called beside every block"

    def __init__(self, file: Path) -> None:
        command = [sys.executable, "-c", LOOP, str(file)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.turns: list[np.ndarray] = []
        self._before = True
        self.turn(WARM_UP)

    def joules(self) -> float:
        """Run a turn where a block comes next; return nothing worth counting."""
        if self._before:
            self.turns.append(self.turn(TURN))
        self._before = not self._before
        return 0.0

    def turn(self, runs: int) -> np.ndarray:
        """Return wall and processor seconds ``[2, runs]``."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{runs}\n")
        self.process.stdin.flush()
        return np.array(json.loads(self.process.stdout.readline()))


def write_resnet50(path: Path) -> None:
    """Write timm's resnet50 with random weights."""
    declare_torchvision_operators()
    import timm

    torch.manual_seed(0)
    net = timm.create_model("resnet50", pretrained=False).eval()
    program, _ = optimize.FuseConvBN().apply(optimize.capture(net, (torch.rand(1, 3, 224, 224),)))
    optimize.export(program, "onnx", path)


def main() -> None:
    """Print both medians and their ratio, on the wall clock and in processor time."""
    budget_s = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "resnet50.onnx"
        write_resnet50(file)
        subjects = agreed_inputs(Opening(Path(folder)).open_all([str(file)]), None)
        loop = PlainLoop(file)
        plan = Plan((Scenario(),), restarts=RESTARTS, runs=None, budget_s=budget_s)
        blocks = run(subjects, plan, put_through(subjects, None, {}), meter=loop).tracks[0].blocks[Scenario()]
        loop.process.kill()
    for clock, name in enumerate(("wall clock", "processor time")):
        bench = np.array([np.median((block.samples_s, block.cpu_s)[clock]) for block in blocks])
        plain = np.array([np.median(turn[clock]) for turn in loop.turns])
        ratios = bench / plain
        low, middle, high = np.percentile(ratios, (25, 50, 75))
        verdict = "within" if abs(middle - 1) <= GOAL else "NOT within"
        print(
            f"{name}: bench {1e3 * np.median(bench):.2f} ms, plain loop {1e3 * np.median(plain):.2f} ms, "
            f"ratio {middle:.4f} (middle half {low:.3f} to {high:.3f}, {len(ratios)} pairs): {verdict} {GOAL:.0%}"
        )


if __name__ == "__main__":
    main()
