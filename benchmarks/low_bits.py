"""A merged RepVGG at 8, 6 and 4 bits: naive post-training quantization against this package's default.

    python -m benchmarks.low_bits

The network is models/fashion_repvgg.pt with its branches merged, whose weights are spread so widely that naive
quantization is known to collapse on such nets (X. Chu et al., "Make RepVGG Greater Again", 2022, arXiv 2212.01593).
Naive is min-max ranges and weights rounded to nearest; the default chooses ranges by the error they cause and rounds
with the data in view. Calibration: the 512 images beside the checkpoint. Accuracy: the 10,000 test images where
Fashion-MNIST is installed, else the 2,500 beside the checkpoint. W8A8 and W4A8 are taken from the deployed ONNX file;
no runtime has 6-bit activations, so W6A6 is simulated in float. The exit code is 1 when W8A8 loses more than 0.3
points.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import optimize
from benchmarks.flags import fused
from models.data import DEFAULT_ROOT, fashion_mnist
from models.repvgg import fashion_repvgg
from optimize.plan import Quantization
from optimize.quantization.auto import choose_ranges
from optimize.quantization.batches import FlatBatches
from optimize.quantization.calibrate import watch
from optimize.quantization.numerics import USUAL, Numerics
from optimize.quantization.simulation import Simulation

MODELS = Path(__file__).parents[1] / "models"
BATCH, LARGEST_DROP = 250, 0.3
NAIVE = {"calibrator": "minmax", "rounding": "nearest", "spare": 0}
SIX_BITS = Numerics(
    activation=dataclasses.replace(USUAL.activation, bits=6),
    weight=dataclasses.replace(USUAL.weight, bits=6),
    bias="float",
)
Answer = Callable[[torch.Tensor], torch.Tensor]


def images(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sample beside the checkpoint: images in [0, 1] ``[N, 1, 28, 28]`` and labels ``[N]``."""
    stored = np.load(MODELS / f"fashion_{name}.npz")
    return torch.from_numpy(stored["x"]).float() / 255, torch.from_numpy(stored["y"])


def judged() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 10,000 test images where they are installed, else those beside the checkpoint."""
    if not DEFAULT_ROOT.exists():
        return images("eval")
    pixels, labels = fashion_mnist("test")
    return torch.from_numpy(pixels.copy()).float() / 255, torch.from_numpy(labels)


def merged() -> optimize.Program:
    """Return the trained network with its branches merged."""
    net = fashion_repvgg()
    net.load_state_dict(torch.load(MODELS / "fashion_repvgg.pt", weights_only=True))
    return fused(optimize.capture(net.eval(), (torch.rand(2, 1, 28, 28),)))


def accuracy(answer: Answer, x: torch.Tensor, labels: torch.Tensor) -> float:
    """Return top-1 accuracy in percent."""
    right = sum(
        int((answer(part).argmax(1) == wanted).sum())
        for part, wanted in zip(x.split(BATCH), labels.split(BATCH), strict=True)
    )
    return 100 * right / len(labels)


def deployed(program: optimize.Program, bits: int, folder: Path, options: dict[str, object]) -> Answer:
    """Return what the exported ONNX file answers, with weights of so many bits and 8-bit activations."""
    data = [images("calib")[0]]
    quantized, _ = optimize.QuantizeStatic(calibration=data, bits=bits, **options).apply(program)  # type: ignore[arg-type]
    runner = optimize.export(quantized, "onnx", folder / f"w{bits}.onnx").load(threads=1)
    return lambda x: torch.as_tensor(runner(x))


def simulated(program: optimize.Program, options: dict[str, object]) -> Answer:
    """Return what a runtime with 6-bit weights and activations would answer."""
    data = [images("calib")[0]]
    quantized, _ = optimize.QuantizeStatic(calibration=data, bits=6, **options).apply(program)  # type: ignore[arg-type]
    plan = quantized.quantization
    assert plan is not None
    plan = plan if options else _for_six_bits(program, plan, data)
    simulation = Simulation(quantized, plan, SIX_BITS)

    def answer(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return simulation.outputs((x,))[0]

    return answer


def _for_six_bits(program: optimize.Program, plan: Quantization, data: list[torch.Tensor]) -> Quantization:
    """Return the plan with ranges chosen for 6-bit activations: fewer levels are worth more clipping."""
    batches = FlatBatches(program, data)
    observed = watch(program, batches)
    ranges = choose_ranges(program, plan.layers, observed, batches, SIX_BITS.activation)
    return dataclasses.replace(plan, ranges=ranges)


def main() -> int:
    """Print the table; return 1 when W8A8 loses too much."""
    torch.set_num_threads(1)
    program, (x, labels) = merged(), judged()
    float_accuracy = accuracy(lambda part: program(part), x, labels)
    print(f"merged RepVGG, {len(labels):,} images, float32 {float_accuracy:.2f} %\n")
    print(f"{'':6}{'judged on':12}{'naive':>16}{'default':>16}")
    drops = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, bits in (("W8A8", 8), ("W6A6", 6), ("W4A8", 4)):
            cells = []
            for options in (NAIVE, {}):
                is_simulated = name == "W6A6"
                answer = simulated(program, options) if is_simulated else deployed(program, bits, Path(folder), options)
                found = accuracy(answer, x, labels)
                drops[name] = float_accuracy - found
                cells.append(f"{found:8.2f} ({found - float_accuracy:+.2f})")
            print(f"{name:6}{'simulation' if is_simulated else 'ONNX file':12}{cells[0]:>16}{cells[1]:>16}", flush=True)
    return int(drops["W8A8"] > LARGEST_DROP)


if __name__ == "__main__":
    sys.exit(main())
