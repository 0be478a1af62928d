"""Thin networks of three tools, trained on alike: which is right more often in the same time? Fashion-MNIST.

    apt-get install dataset-fashion-mnist
    pip install --no-deps --target PEERS torch-pruning==1.6.1 nvidia-modelopt==0.47.0 'torchprofile<0.1' pulp \\
        omegaconf antlr4-python3-runtime==4.9.3 regex
    PYTHONPATH=.:PEERS python -m benchmarks.thin_networks --make DIR [--nets resnet20 vgg] [--seeds 0 1]
    python -m benchmarks.thin_networks --time DIR

``--make`` trains a network of ``benchmarks.distillation`` for ``--epochs``, cuts it to shares of its multiplications by
512 training pictures with labels, and trains each ``--again`` as many epochs by labels and the whole network's answers,
with one loop, order of pictures and seed, on a GPU where there is one. Torch-Pruning cuts by its groups' Taylor
importance, all layers ranked together, its ratio sought until as much work is gone; ModelOpt's FastNAS searches widths
of multiples of 8 for the share, by how many of 2,000 training pictures are right (its own defaults otherwise). ONNX
files are kept in DIR. ``--time`` times them in lock-step in ONNX Runtime, on one thread at batch 1, and judges them on
the 10,000 test pictures, which decided nothing. The exit code is 1 where a peer's file is more often right on average
than ours that takes no longer than it, by more than the standard error of 0.25 points.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import optimize
from benchmarks.conditions import conditions
from benchmarks.distillation import BATCH, CALIBRATION, NETS, accuracy, progress
from benchmarks.flags import fused
from models.data import DEFAULT_ROOT
from models.train import Pictures, load_split
from models.train import accuracy as accuracy_of_module
from optimize.measure.fleet import Fleet
from optimize.measure.latency import measure
from optimize.registry import find_target
from optimize.training import Labels, Logits, Training

ERROR, PLACE = 0.25, torch.accelerator.current_accelerator() or "cpu"
#: Returns None where a tool does not get there.
Cut = Callable[[nn.Module, Tensor, Tensor, float], nn.Module | None]


def ours(whole: nn.Module, x: Tensor, y: Tensor, left: float, round_to: int = 8) -> nn.Module:
    """Cut by the error of the outputs."""
    step = optimize.PruneChannels(1 - left, of="macs", round_to=round_to, calibration=[x[:CALIBRATION]])
    return optimize.narrow(whole, step.apply(optimize.capture(whole.eval(), (x[:2],)))[0])


def torch_pruning(whole: nn.Module, x: Tensor, y: Tensor, left: float) -> nn.Module | None:
    """Cut with Torch-Pruning, widths of multiples of 8."""
    import torch_pruning as tp

    total, low, high, fitting = tp.utils.count_ops_and_params(whole, x[:2])[0], 0.0, 0.95, None
    for _ in range(8):
        ratio, net = (low + high) / 2, copy.deepcopy(whole)
        pruner = tp.pruner.BasePruner(
            net, x[:2], tp.importance.GroupTaylorImportance(), global_pruning=True, pruning_ratio=ratio, round_to=8,
            max_pruning_ratio=0.9, ignored_layers=[layer for layer in net.modules() if isinstance(layer, nn.Linear)],
        )  # fmt: skip
        net.zero_grad()
        nn.functional.cross_entropy(net(x[:CALIBRATION]), y[:CALIBRATION]).backward()
        pruner.step()
        fits = tp.utils.count_ops_and_params(net, x[:2])[0] <= left * total
        low, high = (low, ratio) if fits else (ratio, high)
        fitting = net if fits else fitting
    return fitting


def fastnas(whole: nn.Module, x: Tensor, y: Tensor, left: float) -> nn.Module:
    """Cut with the search of ModelOpt."""
    from modelopt.torch import prune

    place = "cuda" if torch.cuda.is_available() else "cpu"
    batches = [(part.to(place), labels.to(place)) for part, labels in zip(x.split(128), y.split(128), strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        thin, _ = prune.prune(
            copy.deepcopy(whole).to(place),
            mode=[("fastnas", {"nn.Conv2d": {"*": {"channel_divisor": 8}}, "nn.BatchNorm2d": {"*": {}}})],
            constraints={"flops": f"{100 * left:g}%"},
            dummy_input=x[:1].to(place),
            config={
                "data_loader": batches,
                "collect_func": lambda batch: batch[0],
                "score_func": lambda net: accuracy_of_module(net, x[:2000], y[:2000]),
                "checkpoint": f"{folder}/search.pt",
            },
        )
    return thin.cpu()


WAYS: dict[str, tuple[Cut, float]] = {
    "ours, 0.5": (ours, 0.5),
    "ours, 0.4": (ours, 0.4),
    "ours, 0.3": (ours, 0.3),
    "ours, 0.2": (ours, 0.2),
    "ours, 0.5 by 16": (partial(ours, round_to=16), 0.5),
    "ours, 0.25 by 16": (partial(ours, round_to=16), 0.25),
    "Torch-Pruning, 0.5": (torch_pruning, 0.5),
    "Torch-Pruning, 0.25": (torch_pruning, 0.25),
    "FastNAS, 0.5": (fastnas, 0.5),
    "FastNAS, 0.25": (fastnas, 0.25),
}


def file_of(folder: Path, name: str, seed: int | str, way: str) -> Path:
    """Return where the file of a network, seed and way is."""
    return folder / f"{name}-{seed}-{way.replace(', ', '_').replace(' ', '_')}.onnx"


def make(asked: argparse.Namespace) -> None:
    """Write a file for each network, seed and way."""
    images, labels = (part[: asked.images] for part in load_split("train", DEFAULT_ROOT))
    tested = load_split("test", DEFAULT_ROOT)
    for name in asked.nets:
        for seed in asked.seeds:
            start = asked.make / f"{name}-{seed}.pt"
            torch.manual_seed(seed)
            whole = NETS[name]()
            if start.exists():
                whole.load_state_dict(torch.load(start, weights_only=True))
            else:
                data = Pictures(images, labels, BATCH, seed)
                Training(data, (Labels(smoothing=0.1),), epochs=asked.epochs, rate=0.1, progress=progress)(whole)
                torch.save(whole.state_dict(), start)
            nets = {"whole": whole.eval()}
            for way in asked.ways:
                cut, left = WAYS[way]
                torch.manual_seed(seed)
                thin = cut(whole, images[:4096], labels[:4096], left)
                if thin is None:
                    print(f"{name} {seed} {way}: not reached", flush=True)
                    continue
                before, data = 100 * accuracy_of_module(thin.to(PLACE), *tested), Pictures(images, labels, BATCH, seed)
                losses = (Labels(0.3), Logits(0.7, 4.0))
                Training(data, losses, whole, asked.again, progress=progress)(thin.train())
                nets[way] = thin.eval()
                after = 100 * accuracy_of_module(thin.to(PLACE), *tested)
                print(f"{name} {seed} {way}: {before:.2f} %, trained on {after:.2f} %", flush=True)
            for way, net in nets.items():
                program = fused(optimize.capture(net.cpu(), (images[:2],)))
                optimize.export(program, "onnx", file_of(asked.make, name, seed, way))


def compare(folder: Path, seconds: float) -> bool:
    """Print a row for each network and way; return whether ours are right no less often in no more time."""
    images, labels = (part.numpy() for part in load_split("test", DEFAULT_ROOT))
    holds = True
    print("| network | by | right, %, each seed | mean | share of the whole network's time, each seed |")
    print("|---|---|---|---:|---|")
    for name in NETS:
        found: dict[str, list[tuple[float, float]]] = {}
        seeds = sorted({path.name.split("-")[1] for path in folder.glob(f"{name}-*-whole.onnx")})
        for seed in seeds:
            ways = [way for way in ("whole", *WAYS) if file_of(folder, name, seed, way).exists()]
            files = [find_target("onnx").open(file_of(folder, name, seed, way)) for way in ways]
            with Fleet(files, threads=1) as fleet:
                timings = measure(fleet, [images[:1]], budget_s=seconds * len(files)).timings
            for way, file, timing in zip(ways, files, timings, strict=True):
                share = 1 / timing.speedup.ratio if timing.speedup else 1.0
                found.setdefault(way, []).append((accuracy(file, images, labels), share))
        means = {way: tuple(map(statistics.fmean, zip(*pairs, strict=True))) for way, pairs in found.items()}
        for way, pairs in found.items():
            right, shares = (", ".join(f"{value:.{3 if at else 2}f}" for value in each) for at, each in
                             enumerate(zip(*pairs, strict=True)))  # fmt: skip
            print(f"| {name} | {way} | {right} | {means[way][0]:.2f} | {shares} |", flush=True)
        for way, (right, share) in means.items():
            if not way.startswith(("ours", "whole")):
                best = max(
                    (mean for own, (mean, time) in means.items() if "ours" in own and time <= share), default=0.0
                )
                print(f"  {name}: {way} {right:.2f}, ours in no more time {best:.2f}", flush=True)
                holds &= best >= right - ERROR
    return holds


def main() -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", type=Path, metavar="DIR")
    parser.add_argument("--time", type=Path, metavar="DIR")
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--again", type=int, default=6)
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--budget-s", type=float, default=6.0, help="of timing a file")
    asked = parser.parse_args()
    print(conditions("onnxruntime", "torch-pruning", "nvidia-modelopt"), end="\n\n", flush=True)
    torch.set_num_threads(1)
    if asked.make:
        asked.make.mkdir(parents=True, exist_ok=True)
        make(asked)
    return int(asked.time is not None and not compare(asked.time, asked.budget_s))


if __name__ == "__main__":
    raise SystemExit(main())
