"""RepVGG-A0 merged by these passes against the same network merged by timm's own conversion, as ONNX files.

    pip install --no-deps torchvision==0.28.0 timm==1.0.31
    python -m benchmarks.merged_repvgg [--budget-s 120]

Both are exported by the same target, in float32 and in int8 with the same calibration batches, and timed in one
interleaved run at one thread, batch 1, 224x224; the unmerged network stands beside them. The networks are the same
function, so their ratio should be 1. SQNR is against the trained float network, on images that calibrated nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import optimize
from benchmarks.reparameterize_timm import network
from optimize.measure.agreement import AgreementMeter
from optimize.measure.fleet import Fleet
from optimize.measure.latency import MeasureResult, measure
from optimize.measure.statistics import nested_interval
from optimize.targets.base import Artifact

SIZE, NAME = 224, "repvgg_a0"
FORMS = ("ours", "hand", "unmerged")


def images(batches: int, batch: int, seed: int) -> list[torch.Tensor]:
    """Draw smooth noise ``[batch, 3, 224, 224]``: like photographs, most of its power is in low frequencies."""
    generator = torch.Generator().manual_seed(seed)
    coarse = [torch.randn(batch, 3, 28, 28, generator=generator) for _ in range(batches)]
    return [torch.nn.functional.interpolate(value, size=(SIZE, SIZE), mode="bilinear") for value in coarse]


def programs() -> dict[str, optimize.Program]:
    """Return the trained network merged by us, merged by timm, and with BatchNorm folded only."""
    net, x = network(NAME), images(1, 2, seed=0)[0]
    from timm.utils import reparameterize_model  # after network(), which makes timm importable

    trained = optimize.capture(net, (x,))
    hand = optimize.capture(reparameterize_model(net), (x,))
    fold, merge = optimize.FuseConvBN(), optimize.Reparameterize()
    return {
        "ours": optimize.Pipeline([merge, fold]).run(trained).program,
        "hand": optimize.Pipeline([fold]).run(hand).program,
        "unmerged": optimize.Pipeline([fold]).run(trained).program,
    }


def export(folder: Path) -> dict[tuple[str, str], Artifact]:
    """Write every form in float32 and int8; return the artifacts by (form, precision)."""
    calibration = images(8, 4, seed=1)
    artifacts = {}
    for form, program in programs().items():
        quantized = optimize.QuantizeStatic(calibration=calibration).apply(program)[0]
        for precision, entry in (("float32", program), ("int8", quantized)):
            artifacts[form, precision] = optimize.export(entry, "onnx", folder / f"{form}.{precision}.onnx")
    return artifacts


def ratio(result: MeasureResult, slow: int, fast: int) -> str:
    """Return how many times longer one took than another, round by round, with its 95 % interval."""
    latencies = [result.timings[index].latency for index in (slow, fast)]
    if None in latencies:
        return "not timed"
    numerator, denominator = (_rounds(latency.samples_s, result.rounds) for latency in latencies if latency)
    ratios = [np.array([np.median(a) / np.median(b)]) for a, b in zip(numerator, denominator, strict=True)]
    low, high = nested_interval([ratios], seed=0)
    return f"{np.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def _rounds(samples_s: Sequence[float], rounds: int) -> list[np.ndarray]:
    return list(np.array(samples_s).reshape(rounds, -1))


def agreement_db(fleet: Fleet, wanted: optimize.Program) -> list[float]:
    """Return the SQNR of every session against a program, dB."""
    found = []
    batches = images(4, 1, seed=2)
    for session in fleet:
        meter = AgreementMeter()
        for x in batches:
            meter.update([wanted.run((x,))[0].numpy()], session.outputs([x.numpy()]))
        result = meter.result()
        found.append(float("nan") if result is None else result.sqnr_db)
    return found


def main() -> None:
    """Print latencies, SQNR and the two ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=120.0)
    budget_s = parser.parse_args().budget_s
    with tempfile.TemporaryDirectory() as folder:
        artifacts = export(Path(folder))
        names = list(artifacts)
        with Fleet(list(artifacts.values()), threads=1) as fleet:
            result = measure(fleet, [images(1, 1, seed=3)[0].numpy()], budget_s=budget_s)
            decibels = agreement_db(fleet, optimize.capture(network(NAME), (images(1, 2, seed=0)[0],)))
    for name, timing, sqnr_db in zip(names, result.timings, decibels, strict=True):
        median = f"{timing.latency.median_s * 1e3:8.2f} ms" if timing.latency else str(timing.failure)
        print(f"{name[0]:9} {name[1]:8} {median}   SQNR {sqnr_db:6.1f} dB")
    for precision in ("float32", "int8"):
        places = [names.index((form, precision)) for form in FORMS]
        print(f"{precision:8} ours / hand     {ratio(result, places[0], places[1])}")
        print(f"{precision:8} unmerged / ours {ratio(result, places[2], places[0])}")
    print(*result.warnings, sep="\n")


if __name__ == "__main__":
    main()
