"""Honest files open without trust: timm networks as ``.pt2``, TorchScript and state dict, and how long that takes.

    pip install --no-deps torchvision==0.28.0 timm==1.0.31
    python -m benchmarks.open_files [--networks NAME,...] [--kinds pt2,torchscript,state_dict]

Random weights. Each file is opened as every command opens it, and the captured program is compared with the network on
a batch it was not captured with. Seconds are those that opening alone takes of processors, children included, in a
process that has imported torch. The exit code is 1 where a file is refused or answers otherwise. To compare with
another version of the package, run the same script in its checkout: it uses nothing but ``opening.open_program``.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.conditions import conditions
from benchmarks.efficientnet_lite0 import declare_torchvision_operators
from optimize.errors import OptimizeError
from optimize.job import Job, open_program
from optimize.recipe import parse

NETWORKS = (
    "resnet18", "resnet50", "resnext50_32x4d", "seresnet50", "wide_resnet50_2", "res2net50_26w_4s", "resnetv2_50",
    "repvgg_a0", "mobileone_s0", "mobilenetv2_100", "mobilenetv3_large_100", "mobilenetv4_conv_small",
    "efficientnet_b0", "tf_efficientnet_lite0", "efficientnetv2_rw_t", "mnasnet_100", "ghostnet_100", "fbnetc_100",
    "regnetx_002", "regnety_002", "densenet121", "dla34", "vgg11_bn", "vovnet39a", "hrnet_w18_small", "inception_v3",
    "xception41", "darknet53", "cspresnet50", "convnext_atto", "convnextv2_atto", "vit_tiny_patch16_224",
    "deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "mixer_s32_224", "levit_128s", "mobilevit_s",
    "fastvit_t8", "repvit_m0_9", "edgenext_xx_small", "tf_mixnet_s", "skresnet18",
)  # fmt: skip
SIZES = {"inception_v3": 299, "xception41": 299, "mobilevit_s": 256, "fastvit_t8": 256, "edgenext_xx_small": 256}
TOLERANCE = 1e-4
_built: dict[str, torch.nn.Module] = {}


def rebuilt() -> torch.nn.Module:
    """Make the network that is being opened again: the factory of its state dict."""
    import timm

    return timm.create_model(next(iter(_built)), pretrained=False)


def save_exported(network: torch.nn.Module, x: torch.Tensor, path: Path) -> None:
    """Write a ``.pt2`` with a free batch."""
    batch = torch.export.Dim("batch", min=1, max=64)
    torch.export.save(torch.export.export(network, (x,), dynamic_shapes=({0: batch},)), path)


def save_script(network: torch.nn.Module, x: torch.Tensor, path: Path) -> None:
    """Write TorchScript: scripted, or traced where torch cannot script it."""
    try:
        torch.jit.script(network).save(path)
    except Exception:  # torch has many ways to say so
        torch.jit.trace(network, x).save(path)


def save_state(network: torch.nn.Module, x: torch.Tensor, path: Path) -> None:
    """Write a state dict."""
    torch.save(network.state_dict(), path)


KINDS: dict[str, Callable[[torch.nn.Module, torch.Tensor, Path], None]] = {
    "pt2": save_exported,
    "torchscript": save_script,
    "state_dict": save_state,
}


def opened(path: Path, kind: str, size: int, network: torch.nn.Module) -> tuple[float, str]:
    """Open a file and return the seconds, and what is wrong with it, empty where nothing is."""
    recipe = parse({"input_shape": f"3,{size},{size}"}, source="open_files")
    factory = "benchmarks.open_files:rebuilt" if kind == "state_dict" else None
    start = _spent_s()
    try:
        program = open_program(Job(str(path), recipe, factory=factory)).program
    except OptimizeError as error:
        return _spent_s() - start, str(error).splitlines()[0]
    seconds = _spent_s() - start
    x = torch.randn(3 if program.batch else len(program.inputs[0]), 3, size, size)
    with torch.inference_mode():
        want, (got, *_) = network(x), program.run((x,))
    error = _distance(want, got)
    if error >= TOLERANCE:  # a deep network with random weights may round by more: no farther than it from the truth
        with torch.inference_mode():
            exact = copy.deepcopy(network).double()(x.double())
        error = 0.0 if _distance(exact, got) < 2 * _distance(exact, want) else error
    return seconds, "" if error < TOLERANCE else f"differs by {error:.1e}"


def _spent_s() -> float:
    """Return the processor time of this process and of its children that have ended, in seconds."""
    return sum(os.times()[:4])


def _distance(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """Return the largest difference over the largest number."""
    return float((wanted - got).abs().max() / wanted.abs().max().clamp_min(1e-30))


def main() -> int:
    """Print a line a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(NETWORKS), help="timm's names")
    parser.add_argument("--kinds", default=",".join(KINDS))
    given = parser.parse_args()
    print(conditions("onnx", "openvino", "timm"), end="\n\n", flush=True)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    _kept = declare_torchvision_operators()
    import timm

    sys.modules["benchmarks.open_files"] = sys.modules["__main__"]
    failures, total_s = 0, 0.0
    for name in given.networks.split(","):
        size = SIZES.get(name, 224)
        network = timm.create_model(name, pretrained=False).eval()
        _built.clear()
        _built[name] = network
        for kind in given.kinds.split(","):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"{name}.{kind}"
                try:
                    KINDS[kind](network, torch.randn(2, 3, size, size), path)
                except Exception as error:  # torch could not write it: no file to open
                    print(f"{name:30s} {kind:12s} not written: {str(error).splitlines()[0][:80]}", flush=True)
                    continue
                seconds, problem = opened(path, kind, size, network)
            failures += bool(problem)
            total_s += seconds
            print(f"{name:30s} {kind:12s} {seconds:6.2f} s  {problem or 'same answers'}", flush=True)
    print(f"{failures} refused or different; {total_s:.1f} s in all")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
