"""Networks trained with 4 and 2 bits from their float network's answers on Fashion-MNIST, beside Brevitas.

    apt-get install dataset-fashion-mnist
    python -m benchmarks.fashion_bits [--nets repvgg mobilenet] [--bits 4 2] [--seeds 0 1] [--epochs 6] [--whole FILE]
        [--through 4] [--keep FOLDER]
    pip install --no-deps --target BREVITAS brevitas==0.13.4 dependencies==2.0.1 unfoldNd
    PYTHONPATH=.:BREVITAS python -m benchmarks.fashion_bits --tools brevitas

The networks are the README's, its branches merged and each convolution with a BatchNorm that changes nothing yet, and
the MobileNetV2 of ``benchmarks.depth`` with the weights of ``--whole``, by default those in ``models``; where there is
no such file, it is trained in float for ``--float-epochs`` and kept there. Weights and what layers read have
``--bits``, the first and the last layer 8; with ``--through`` our networks are trained with those bits first, for as
many epochs. Training that was cut off goes on from ``--keep``. Ours and that tool's are trained by the same loop with
the same pictures, labels, answers of the float network and seeds, on a GPU where there is one. Accuracy is that of the
deployed ONNX file on the 10,000 test pictures, which decided nothing, and Brevitas' that of its module. The exit code
is 1 where one of ours loses more than 0.5 points on average with 4 bits, or 3 with 2.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import optimize
from benchmarks.conditions import conditions
from benchmarks.depth import TRAINED, mobilenet
from benchmarks.distillation import accuracy, progress
from benchmarks.quantization_aware import merged
from models.data import DEFAULT_ROOT
from models.train import Pictures, load_split
from models.train import accuracy as accuracy_of_module
from optimize.targets.base import Artifact
from optimize.training import Labels, Logits, Training

BATCH, CALIBRATION, RATE = 256, 4096, 2e-3
MOST_LOST = {4: 0.5, 2: 3.0}


def adam(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer of all rows."""
    return torch.optim.Adam(weights, RATE)


@torch.no_grad()
def repvgg(x: Tensor) -> nn.Module:
    """Return the README's network as a chain of one convolution a block, each with a BatchNorm that changes nothing."""
    state, layers = merged().graph_module.state_dict(), list[nn.Module]()
    weights = {int(name.split(".")[1]): name[:-7] for name in state if name.endswith(".weight") and "blocks" in name}
    for place, name in sorted(weights.items()):
        outputs, inputs = state[f"{name}.weight"].shape[:2]
        convolution = nn.Conv2d(inputs, outputs, 3, 2 if place in (2, 5) else 1, 1, bias=False)
        convolution.weight.copy_(state[f"{name}.weight"])
        x = convolution(x)
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        norm = nn.BatchNorm2d(outputs)
        norm.running_mean, norm.running_var = mean, variance
        norm.weight.copy_((variance + norm.eps).sqrt())
        norm.bias.copy_(mean + state[f"{name}.bias"])
        x = (x + state[f"{name}.bias"][:, None, None]).relu()
        layers += [convolution, norm, nn.ReLU()]
    head = nn.Linear(128, 10)
    head.load_state_dict({"weight": state["head.weight"], "bias": state["head.bias"]})
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


def float_network(name: str, asked: argparse.Namespace, data: Pictures) -> nn.Module:
    """Return a network trained in float."""
    if name == "repvgg":
        return repvgg(data.images[:CALIBRATION]).eval()
    torch.manual_seed(0)
    net = mobilenet()
    if asked.whole.exists():
        net.load_state_dict(torch.load(asked.whole, weights_only=True))
    else:
        folder = asked.keep and asked.keep / "float"
        labels = (Labels(smoothing=0.1),)
        train = Training(data, labels, epochs=asked.float_epochs, rate=0.1, folder=folder, progress=progress)
        train(net.to(memory_format=torch.channels_last))  # a step takes two thirds of the time
        torch.save(net.state_dict(), asked.whole.with_suffix(".part"))
        asked.whole.with_suffix(".part").rename(asked.whole)  # others may wait for it
    return net.eval()


def ours(
    net: nn.Module, bits: int, through: list[int], train: Training, x: Tensor, folder: Path
) -> tuple[Artifact, int]:
    """Train with learned steps; return the deployed ONNX file and its bytes."""
    program = optimize.capture(net, (x[:2],))

    def trained(module: nn.Module) -> None:
        train(module.to(memory_format=torch.channels_last))

    more = [each for each in through if each > bits]
    step = optimize.QuantizeAware(trained, list(x.split(64)), bits=bits, activation_bits=bits, through=more)
    artifact = optimize.export(step.apply(program)[0], "onnx", folder / "net.onnx")
    return artifact, (folder / "net.onnx").stat().st_size


def brevitas(net: nn.Module, bits: int, train: Training, x: Tensor) -> nn.Module:
    """Train with that tool's layers in place of ours: learned steps of weights, by channel, and of what layers read."""
    from brevitas import nn as layers
    from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloatMSE, Uint8ActPerTensorFloat

    class Learned(Int8WeightPerChannelFloatMSE):  # type: ignore[misc]
        scaling_impl_type = "parameter_from_stats"

    net = copy.deepcopy(net)
    names = [name for name, module in net.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    lows: dict[str, float] = {}
    for name in names:
        net.get_submodule(name).register_forward_hook(
            lambda _, args, __, name=name: lows.__setitem__(name, float(args[0].min()))  # type: ignore[misc]
        )
    with torch.no_grad():
        net(x[:256])
    for name in names:
        module, width = net.get_submodule(name), 8 if name in (names[0], names[-1]) else bits
        read = Int8ActPerTensorFloat if lows[name] < 0 else Uint8ActPerTensorFloat
        options = {"weight_quant": Learned, "weight_bit_width": width, "input_quant": read, "input_bit_width": width}
        options["bias"] = module.bias is not None
        if isinstance(module, nn.Linear):
            found = layers.QuantLinear(module.in_features, module.out_features, **options)
        else:
            places = {name: getattr(module, name) for name in ("kernel_size", "stride", "padding", "groups")}
            found = layers.QuantConv2d(module.in_channels, module.out_channels, **places, **options)
        found.load_state_dict(module.state_dict(), strict=False)
        net.set_submodule(name, found)
        found.quant_weight()  # its steps, which are a part of what training begins with, are made when first asked for
    if train.folder and any(Path(train.folder).glob("*.safetensors")):
        for module in net.modules():  # a training that goes on has seen what its steps begin with
            if hasattr(module, "collect_stats_steps"):
                module.counter = module.collect_stats_steps + 1
    train(net.to(memory_format=torch.channels_last))
    return net.eval().to(torch.accelerator.current_accelerator() or "cpu")


def main() -> int:
    """Print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=("repvgg", "mobilenet"), default=["repvgg", "mobilenet"])
    parser.add_argument("--tools", nargs="+", choices=("ours", "brevitas"), default=["ours"])
    parser.add_argument("--bits", nargs="+", type=int, choices=MOST_LOST, default=[*MOST_LOST])
    parser.add_argument("--through", nargs="+", type=int, default=[], help="bits that are trained with before")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--float-epochs", type=int, default=12)
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--whole", type=Path, default=TRAINED, help="State dict of the MobileNetV2")
    parser.add_argument("--keep", type=Path, help="Folder of checkpoints")
    asked = parser.parse_args()
    print(conditions("onnxruntime"), end="\n\n", flush=True)
    torch.set_num_threads(1)
    images, labels = load_split("train", DEFAULT_ROOT)
    tested = load_split("test", DEFAULT_ROOT)
    x, holds = images[:CALIBRATION], True
    print("| network | bits | by | right, % | mean lost, points | file, bytes | seconds |")
    print("|---|---|---|---|---:|---:|---:|")
    for name in asked.nets:
        data = Pictures(images[: asked.images], labels[: asked.images], BATCH)
        net = float_network(name, asked, data)
        whole = 100 * accuracy_of_module(net, *tested)
        print(f"| {name} | 32 |  | {whole:.2f} |  |  |  |", flush=True)
        for bits in asked.bits:
            for tool in asked.tools:
                right, size, begun = [], 0, time.perf_counter()
                for seed in asked.seeds:
                    torch.manual_seed(seed)
                    data = Pictures(images[: asked.images], labels[: asked.images], BATCH, seed)
                    losses = (Labels(0.3), Logits(0.7, 4.0))
                    kept = asked.keep and asked.keep / f"{name}-{bits}-{tool}-{seed}"
                    train = Training(
                        data, losses, net, asked.epochs, optimizer=adam, folder=kept, seed=seed, progress=progress
                    )
                    if tool == "ours":
                        with tempfile.TemporaryDirectory() as folder:
                            file, size = ours(net, bits, asked.through, train, x, Path(folder))
                            right.append(accuracy(file, *(part.numpy() for part in tested)))
                    else:
                        right.append(100 * accuracy_of_module(brevitas(net, bits, train, x), *tested))
                lost, spent = whole - float(np.mean(right)), (time.perf_counter() - begun) / len(right)
                holds &= tool != "ours" or lost <= MOST_LOST[bits]
                said = f"{', '.join(f'{share:.2f}' for share in right)} | {lost:.2f} | {size:,} | {spent:.0f}"
                print(f"| {name} | {bits} | {tool} | {said} |", flush=True)
    print("holds" if holds else "MISSED")
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
