"""Public re-parameterizable networks: what their own conversion leaves, what these passes leave, and the error.

    pip install --no-deps torchvision==0.28.0 timm==1.0.31
    python -m benchmarks.reparameterize_timm [MODEL ...]

Every network gets random BatchNorm statistics and layer scales first: fresh ones are nearly the identity and hide a
wrong merge. Three rows a network: as trained, after timm's own conversion, after Reparameterize and FuseConvBN. The
exit code is 1 when ours leaves more layers than theirs, differs by 1e-5 of the largest output, or takes 5 s.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass

import torch

import optimize
from benchmarks.efficientnet_lite0 import declare_torchvision_operators
from optimize.distances import output_error

MODELS = (
    "repvgg_a0",
    "repvgg_b1g4",
    "mobileone_s0",
    "mobileone_s1",
    "fastvit_t8",
    "repvit_m0_9",
    "repghostnet_050",
)
PASSES = (optimize.Reparameterize(), optimize.FuseConvBN())
SIZE = 224
WEIGHTED = ("conv1d", "conv2d", "conv3d", "linear")
MAX_ERROR, MAX_SECONDS = 1e-5, 5.0


@dataclass(frozen=True)
class Row:
    """One form of one network.

    Attributes:
        weighted: Convolutions and linear layers.
        norms: BatchNorms.
        macs: Multiply-accumulates of one image.
        error: Largest absolute difference from the trained form.
        scale: Largest output of the trained form.
        seconds: Run time of the passes alone.
    """

    weighted: int
    norms: int
    macs: int
    error: float = 0.0
    scale: float = 1.0
    seconds: float = 0.0

    @property
    def relative(self) -> float:
        """The error relative to the largest output."""
        return self.error / self.scale


def network(name: str) -> torch.nn.Module:
    """Return timm's network with random weights, BatchNorm statistics and layer scales, in evaluation mode."""
    declare_torchvision_operators()
    import timm

    torch.manual_seed(0)
    net = timm.create_model(name)
    _randomize(net)
    return net.eval()


@torch.no_grad()
def _randomize(net: torch.nn.Module) -> None:
    """Draw scales of both signs and biases; take BatchNorm statistics from noise and disturb them.

    Statistics drawn blindly would let the activations of a deep network explode.
    """
    for name, parameter in net.named_parameters():
        if parameter.dim() == 1 or "gamma" in name or "layer_scale" in name:
            signs = torch.where(torch.rand_like(parameter) < 0.25, -1.0, 1.0)
            drawn = (
                torch.randn_like(parameter) * 0.2 + 0.5 if name.endswith("bias") else torch.rand_like(parameter) + 0.5
            )
            parameter.copy_(drawn if name.endswith("bias") else drawn * signs)
    norms = [layer for layer in net.modules() if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
    net.train()(torch.randn(8, 3, SIZE, SIZE))
    for norm in norms:
        mean, variance = norm.get_buffer("running_mean"), norm.get_buffer("running_var")
        mean.add_(torch.randn_like(mean) * variance.sqrt() * 0.2)
        variance.mul_(torch.rand_like(variance) + 0.6)


def describe(program: optimize.Program, **figures: float) -> Row:
    """Count what a program holds."""
    stats = program.stats()
    ops = Counter(stats.ops)
    return Row(sum(ops[op] for op in WEIGHTED), ops["batch_norm"], stats.macs, **figures)


def compare(name: str) -> tuple[Row, Row, Row]:
    """Return the rows of one network: trained, theirs, ours.

    Raises:
        RuntimeError: The random network does not answer with finite numbers that depend on the image.
    """
    net, x = network(name), torch.randn(2, 3, SIZE, SIZE)
    trained = optimize.capture(net, (x,))
    want = trained.run((x,))[0]
    if not want.isfinite().all() or float((want[0] - want[1]).abs().max()) < 1e-3:
        raise RuntimeError(f"{name}: the random network is of no use here: {want.flatten()[:4]}")
    from timm.utils import reparameterize_model

    theirs = optimize.capture(reparameterize_model(net), (x,))
    merged, seconds = trained, 0.0
    for entry in PASSES:
        start = time.perf_counter()
        merged = entry.apply(merged)[0]
        seconds += time.perf_counter() - start
    rows = [describe(trained)]
    for program, spent in ((theirs, 0.0), (merged, seconds)):
        error, scale = output_error(want, program.run((x,))[0])
        rows.append(describe(program, error=error, scale=scale, seconds=spent))
    return rows[0], rows[1], rows[2]


def shortfalls(theirs: Row, ours: Row) -> list[str]:
    """Name the bars that a network misses."""
    bars = {
        "layers": ours.weighted <= theirs.weighted,
        "BatchNorms": ours.norms <= theirs.norms,
        "error": ours.relative < MAX_ERROR,
        "seconds": ours.seconds < MAX_SECONDS,
    }
    return [name for name, held in bars.items() if not held]


def main() -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    missed = 0
    print(f"{'model':16} {'form':8} {'conv+linear':>11} {'BN':>4} {'GMACs':>7} {'max abs':>9} {'relative':>9} {'s':>5}")
    for name in parser.parse_args().models:
        trained, theirs, ours = compare(name)
        for form, row in (("trained", trained), ("theirs", theirs), ("ours", ours)):
            print(
                f"{name:16} {form:8} {row.weighted:11} {row.norms:4} {row.macs / 1e9:7.3f} {row.error:9.1e} "
                f"{row.relative:9.1e} {row.seconds:5.1f}"
            )
        found = shortfalls(theirs, ours)
        missed += bool(found)
        print(f"{name:16} {'MISSED: ' + ', '.join(found) if found else 'holds'}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
