"""Half precision on timm models: calls kept in float32 against AutoCast's rules, and what the outputs lose.

    pip install --no-deps torchvision==0.28.0 timm==1.0.31
    python -m benchmarks.half_precision [MODEL ...]

The peer is ModelOpt AutoCast with its defaults, as a rule on the same graph: a call stays in float32 where one of its
inputs or outputs exceeds 512 in magnitude (``data_max``) or a weight exceeds 65504 (``init_max``); the same calibration
samples decide. Random weights and BatchNorm statistics, noise for images, BatchNorm folded and branches merged before.
Errors are those of the cast graph run in eager PyTorch, on samples that decided nothing. The exit code is 1 where more
calls are kept than by the rules, max|d| / max|y| is not below 2e-3 (float16) or 2e-2 (bfloat16), or top-1 agreement is
below 99.5 %.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch

from benchmarks.int8_onnx import SIZE, case, merged
from optimize import graph
from optimize.distances import output_error
from optimize.passes.cast_half import CastBF16, CastFP16
from optimize.precision.casting import is_concerned
from optimize.precision.emulation import Emulation
from optimize.program import Program, tensor_value

MODELS = ("resnet50", "mobilenetv3_large_100", "vit_tiny_patch16_224", "repvgg_a0")
HELD_OUT, DATA_MAX, INIT_MAX = 32, 512.0, 65504.0
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
TOP1 = 0.995


@dataclass(frozen=True)
class Row:
    """What one cast of one network keeps and loses.

    Attributes:
        calls: Calls of the graph on float values.
        kept: Those left in float32.
        by_rules: Those that AutoCast's rules leave there.
        casts: Cast operators in the graph.
        error: max|d| / max|y| of the logits.
        top1: Share of samples with the same largest logit.
        seconds: Time that deciding and casting took.
    """

    calls: int
    kept: int
    by_rules: int
    casts: int
    error: float
    top1: float
    seconds: float


def kept_by_rules(program: Program, calibration: torch.Tensor) -> int:
    """Return how many calls AutoCast's default rules keep in float32."""
    emulation, kept = Emulation(program, torch.float16), set()
    for sample in calibration.split(1):
        values = emulation.start([sample])
        for call in emulation.calls:
            values[call] = emulation.value(call, values, half=False)
            if not is_concerned(call):
                continue
            for node in (call, *call.all_input_nodes):
                value, limit = values[node], INIT_MAX if node.op == "get_attr" else DATA_MAX
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.abs().max() > limit:
                    kept.add(call)
    return len(kept)


def compare(program: Program, calibration: torch.Tensor, held_out: torch.Tensor, entry: CastFP16 | CastBF16) -> Row:
    """Cast one program and judge it."""
    start = time.perf_counter()
    half, _ = entry.apply(program)
    seconds = time.perf_counter() - start
    calls = [node for node in program.graph.nodes if node.op == "call_function" and is_concerned(node)]
    kept = {node.name for node in calls} & {node.name for node in half.graph.nodes if _in_float32(node)}
    casts = [node for node in half.graph.nodes if graph.op_name(node) == "_to_copy"]
    wanted = torch.cat([program.run([sample])[0] for sample in held_out.split(1)])
    got = torch.cat([half.run([sample])[0] for sample in held_out.split(1)])
    error, scale = output_error(wanted, got)
    top1 = float((wanted.argmax(1) == got.argmax(1)).float().mean())
    by_rules = kept_by_rules(program, calibration) if entry.dtype is torch.float16 else 0
    return Row(len(calls), len(kept), by_rules, len(casts), error / scale, top1, seconds)


def _in_float32(node: torch.fx.Node) -> bool:
    value = tensor_value(node)
    return value is not None and value.dtype is torch.float32


def main() -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'':24} {'type':9} {'calls':>5} {'kept':>5} {'rules':>5} {'casts':>5} {'max|d|/max|y|':>14}"
        f" {'top-1':>7} {'s':>6}"
    )
    missed = []
    for name in asked.models:
        entry = case(name)
        program = merged(entry)
        held_out = torch.randn(HELD_OUT, 3, SIZE, SIZE)
        for cast in (CastFP16(calibration=[entry.calibration]), CastBF16(calibration=[entry.calibration])):
            row, short = compare(program, entry.calibration, held_out, cast), str(cast.dtype).removeprefix("torch.")
            print(
                f"{name:24} {short:9} {row.calls:5} {row.kept:5} {row.by_rules:5} {row.casts:5} {row.error:14.1e}"
                f" {row.top1:7.1%} {row.seconds:6.1f}",
                flush=True,
            )
            if row.kept > row.by_rules or row.error >= LIMITS[cast.dtype] or row.top1 < TOP1:
                missed.append(f"{name} in {short}")
    print("MISSED: " + "; ".join(missed) if missed else "holds")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
