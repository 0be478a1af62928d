"""What pruning without training leaves of the answers, and how many public networks it can cut.

    python -m benchmarks.pruning                        # accuracy of the README's network, cut in several ways
    pip install --no-deps torchvision==0.28.0 timm==1.0.31
    python -m benchmarks.pruning --architectures        # 60 architectures of timm, random weights, params 0.3

    python -m benchmarks.pruning --latency              # four networks, two runtimes, half and a third of the time

    python -m benchmarks.pruning --criteria DIR [--network vit]   # 30 % of a network's work gone, by every criterion
    pip install --no-deps --target TP torch-pruning==1.6.1        # with PYTHONPATH=.:TP it stands beside them

    python -m benchmarks.pruning --zeros                # what runtimes make of zeros

Accuracy is taken from the ONNX file on 2,500 labelled pictures; calibration has 512 others, without labels. Time is the
file's against that of the uncut network, both in float32 and in lock-step on one thread.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import importlib.util
import sys
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

import optimize
from benchmarks.conditions import conditions
from benchmarks.distillation import BATCH, CALIBRATION, SEED, resnet20
from benchmarks.efficientnet_lite0 import declare_torchvision_operators
from models.data import DEFAULT_ROOT
from models.train import PRECISION, Pictures, load_split
from models.unet import UNet
from models.vit import ViT
from optimize.errors import Refused
from optimize.measure.fleet import Fleet
from optimize.measure.latency import measure
from optimize.pace import Pace
from optimize.pruning.criteria import CRITERIA
from optimize.registry import find_target
from optimize.search import one_sample
from optimize.targets.base import Artifact
from optimize.training import Labels, Training

ROOT = Path(__file__).parents[1]
RATIO = 0.3
#: Test pictures of ``--criteria``, and what it trains on: two of another tool's among them.
TESTED, TRAINED = 2_500, ("error of the outputs", "l1", "magnitude", "taylor, with labels", "random")
WAYS: tuple[dict[str, object], ...] = (
    {"ratio": 0.2},
    {"ratio": 0.3},
    {"ratio": 0.5},
    {"ratio": 0.5, "of": "macs"},
    {"ratio": 0.5, "of": "macs", "round_to": 1},
    {"ratio": 0.5, "of": "macs", "round_to": 16},
    {"ratio": 0.75, "of": "macs"},
    {"ratio": 0.5, "of": "params"},
)
ARCHITECTURES = """
    resnet18 resnet50 resnext50_32x4d resnetv2_50 seresnet50 res2net50_26w_4s densenet121 vgg16_bn mobilenetv2_100
    mobilenetv3_large_100 mobilenetv3_small_050 efficientnet_b0 efficientnetv2_rw_t efficientnet_lite0 mixnet_s
    ghostnet_100 regnety_004 regnetx_004 repvgg_a0 mobileone_s0 hardcorenas_a mnasnet_100 fbnetc_100 lcnet_100 dla34
    inception_v3 xception41 selecsls42 cspresnet50 darknet53 ese_vovnet19b_dw convnext_atto convnextv2_atto nfnet_l0
    vit_tiny_patch16_224 deit_tiny_patch16_224 deit3_small_patch16_224 beit_base_patch16_224 mixer_s32_224
    resmlp_12_224 gmlp_ti16_224 poolformer_s12 cait_xxs24_224 swin_tiny_patch4_window7_224 xcit_nano_12_p16_224
    levit_128s mobilevit_xxs edgenext_xx_small coat_lite_tiny pit_ti_224 crossvit_tiny_240 efficientformer_l1
    fastvit_t8 repvit_m1 visformer_tiny twins_svt_small eva02_tiny_patch14_224 hgnet_tiny starnet_s1 hrnet_w18_small
""".split()  # noqa: SIM905


def fashion() -> tuple[optimize.Program, torch.Tensor, np.ndarray, np.ndarray]:
    """Return the README's network, merged; its calibration pictures; labelled ones and their labels."""
    from models.repvgg import fashion_repvgg

    net = fashion_repvgg()
    net.load_state_dict(torch.load(ROOT / "models/fashion_repvgg.pt", weights_only=True))
    with np.load(ROOT / "models/fashion_calib.npz") as held:
        calibration = torch.from_numpy(held[held.files[0]]).float() / 255
    with np.load(ROOT / "models/fashion_eval.npz") as held:
        images, labels = held["x"].astype(np.float32) / 255, held["y"]
    merged = optimize.Pipeline([optimize.Reparameterize(), optimize.FuseConvBN()])
    return merged.run(optimize.capture(net.eval(), (calibration[:2],))).program, calibration, images, labels


def accuracy(artifact: Artifact, images: np.ndarray, labels: np.ndarray) -> float:
    """Return the percentage of pictures that a file is right on."""
    runner = artifact.load()
    right = [np.asarray(runner(batch)).argmax(1) for batch in np.array_split(images, 10)]
    return 100 * float((np.concatenate(right) == labels).mean())


def untrained(seconds: float) -> None:
    """Print a row for each way to cut, by weights alone and with data."""
    program, calibration, images, labels = fashion()
    rows = [["nothing", "1", "1", "", ""]]
    with tempfile.TemporaryDirectory() as name:
        files = [optimize.export(program, "onnx", Path(name) / "whole.onnx")]
        rows[0].append(f"{accuracy(files[0], images, labels):.2f}")
        for number, way in enumerate(WAYS):
            weights, _ = optimize.PruneChannels(**way).apply(program)  # type: ignore[arg-type]
            plain = optimize.export(weights, "onnx", Path(name) / f"{number}w.onnx")
            start = time.perf_counter()
            thin, _ = optimize.PruneChannels(**way, calibration=[calibration]).apply(program)  # type: ignore[arg-type]
            took = time.perf_counter() - start
            files.append(optimize.export(thin, "onnx", Path(name) / f"{number}.onnx"))
            macs, parameters = (
                getattr(thin.stats(), key) / getattr(program.stats(), key) for key in ("macs", "parameters")
            )
            rows.append(
                [
                    ", ".join(f"{key} {value}" for key, value in way.items()), f"{macs:.3f}", f"{parameters:.3f}",
                    f"{took:.1f}", *(f"{accuracy(file, images, labels):.2f}" for file in (plain, files[-1])),
                ]
            )  # fmt: skip
        with Fleet(files, threads=1) as fleet:
            timings = measure(fleet, [images[:1]], budget_s=seconds * len(files)).timings
    print("| cut | MACs | parameters | seconds to cut | right by weights, % | right with data, % | as fast as uncut |")
    print("|---|---:|---:|---:|---:|---:|---|")
    for row, timing in zip(rows, timings, strict=True):
        found = timing.speedup
        fast = f"{found.ratio:.2f}x [{found.ci_low:.2f}, {found.ci_high:.2f}]" if found else ""
        print(f"| {' | '.join(row)} | {fast} |")


def architectures(names: list[str]) -> int:
    """Print what 0.3 of the parameters takes off each network; return how many could not be cut at all."""
    declare_torchvision_operators()
    import timm

    failed, thinner = 0, 0
    print("| network | parameters less, % | MACs less, % | groups | seconds | most frequent reason of what stays |")
    print("|---|---:|---:|---:|---:|---|")
    for name in names:
        torch.manual_seed(0)
        try:
            net = timm.create_model(name, num_classes=100).eval()
            program = optimize.capture(net, (torch.randn(2, *net.default_cfg["input_size"]),))
            start = time.perf_counter()
            thin, outcome = optimize.PruneChannels(RATIO, of="params").apply(program)
            thin.check()
            assert all(bool(value.isfinite().all()) for value in thin.run(thin.inputs))
        except Exception as error:
            failed += 1
            print(f"| {name} | {type(error).__name__}: {str(error).splitlines()[0][:120]} | | | | |", flush=True)
            continue
        before, after = program.stats(), thin.stats()
        less = 100 * (1 - after.parameters / before.parameters)
        thinner += less >= 25
        why = Counter(skip.reason.split("'")[0].strip() for skip in outcome.skips).most_common(1)
        print(
            f"| {name} | {less:.1f} | {100 * (1 - after.macs / before.macs):.1f} | {len(outcome.rewrites)} "
            f"| {time.perf_counter() - start:.1f} | {why[0][0] if why else ''} |",
            flush=True,
        )
        gc.collect()
    print(f"\n{len(names) - failed} of {len(names)} run with what is left; {thinner} lost 25 % of their parameters.")
    return failed


def latency(wanted: list[str], seconds: float) -> int:
    """Print what files take that were cut to a time, beside the uncut ones again; return how many miss it by 5 %."""
    declare_torchvision_operators()
    import timm

    nets = {"README's": fashion()[0]}
    for name, build, side in (
        ("resnet18", lambda: timm.create_model("resnet18"), 224),
        ("mobilenetv2_100", lambda: timm.create_model("mobilenetv2_100"), 224),
        ("unet", lambda: UNet(3, 4, (32, 64, 128)), 128),
    ):
        torch.manual_seed(0)
        captured = optimize.capture(build().eval(), (torch.rand(2, 3, side, side),))
        nets[name] = optimize.Pipeline([optimize.FuseConvBN()]).run(captured).program
    missed = 0
    print("| network | runtime | asked | found when cut | beside the uncut file again | trials, s |")
    print("|---|---|---:|---|---|---:|")
    for name, program in [(name, nets[name]) for name in wanted or nets]:
        for target in ("onnx", "openvino"):
            backend = find_target(target)
            for asked in ("0.5x", "0.33x"):
                with tempfile.TemporaryDirectory() as folder:
                    start = time.perf_counter()
                    cut = optimize.PruneChannels(0.97, of="time", calibration=[program.sample(16)])
                    try:
                        found, told = Pace(asked, program, backend).keep(cut)
                    except Refused as refused:
                        missed += 1
                        print(f"| {name} | {target} | {asked} | {str(refused).splitlines()[0]} | | |", flush=True)
                        continue
                    took = time.perf_counter() - start
                    thin = found.apply(program)[0]
                    files = [
                        optimize.export(each, target, Path(folder) / f"{place}{backend.suffix}")
                        for place, each in enumerate((program, thin))
                    ]
                    with Fleet(files, threads=1) as fleet:
                        again = measure(fleet, one_sample(program), budget_s=seconds).timings[1].speedup
                assert again is not None
                share, aim = 1 / again.ratio, float(asked[:-1])
                missed += not 0.95 * aim <= share <= 1.05 * aim
                between = f"{share:.3f}x [{1 / again.ci_high:.3f}, {1 / again.ci_low:.3f}]"
                print(
                    f"| {name} | {target} | {asked} | {told.partition(': ')[2]} | {between} | {took:.0f} |", flush=True
                )
    return missed


def count_right(net: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the percentage of pictures that a module is right on."""
    with torch.no_grad():
        right = [net.eval()(batch).argmax(1) for batch in images.split(500)]
    return 100 * float((torch.cat(right) == labels).float().mean())


def whole_network(name: str, folder: Path, data: Pictures) -> torch.nn.Module:
    """Return a network of ``--criteria``, trained; a training that is kept in the folder goes on."""
    torch.manual_seed(SEED)
    if name == "vit":
        net: torch.nn.Module = ViT(channels=1, classes=10, image=28, patch=4, width=96, heads=4, depth=4)
        training = Training(data, epochs=20, warm_up=0.1, optimizer=lambda weights: torch.optim.AdamW(weights, 1e-3))
    else:
        net = resnet20().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        training = Training(data, (Labels(smoothing=0.1),), epochs=5, rate=0.1)
    dataclasses.replace(training, precision=PRECISION, seed=SEED, folder=folder / f"{name}-whole")(net)
    return net


def criteria(name: str, folder: Path, again: int, less: float = 0.3) -> None:
    """Print what a network without a share of its work is right on, by each criterion; some are trained on."""
    images, labels = load_split("train", DEFAULT_ROOT)
    test_images, test_labels = load_split("test", DEFAULT_ROOT)
    test, batch = (test_images[:TESTED], test_labels[:TESTED]), images[:2]
    whole = whole_network(name, folder, Pictures(images, labels, BATCH))
    seen = [(images[:CALIBRATION], labels[:CALIBRATION])]
    few = Pictures(images[:20_000], labels[:20_000], BATCH)
    moved = copy.deepcopy(whole)
    movement = Training(few, rate=0.01, precision=PRECISION, seed=SEED, movement=True)(moved).movement
    program = optimize.capture(whole.eval(), (batch,))
    loss = torch.nn.functional.cross_entropy
    ways: list[dict[str, Any]] = [{"criterion": name} for name in (None, *CRITERIA)]
    ways += [{"criterion": name, "loss": loss} for name in ("taylor", "hessian", "snip")]
    print(f"the whole network: {count_right(whole, *test):.2f} %, {program.stats().macs / 1e6:.1f} M MACs", flush=True)
    print("| by | MACs | parameters | seconds | right, % | made up for, % | after an epoch, % |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for way in ways:
        scores = movement if way["criterion"] == "movement" else None
        subject = optimize.capture(moved.eval(), (batch,)) if scores else program
        module, nets, took = moved if scores else whole, [], 0.0
        for compensated in (False, True):
            start = time.perf_counter()
            cut = optimize.PruneChannels(
                less, of="macs", round_to=1, calibration=seen, compensated=compensated, scores=scores, **way
            )
            thin, _ = cut.apply(subject)
            took, stats = took or time.perf_counter() - start, thin.stats()
            nets.append(optimize.narrow(module, thin))
        right = [count_right(net, *test) for net in nets]
        title = f"{way['criterion'] or 'error of the outputs'}{', with labels' if 'loss' in way else ''}"
        after = train_on(nets[way["criterion"] is None], few, again, test) if title in TRAINED else ""
        shares = f"{stats.macs / program.stats().macs:.3f} | {stats.parameters / program.stats().parameters:.3f}"
        print(f"| {title} | {shares} | {took:.1f} | {right[0]:.2f} | {right[1]:.2f} | {after} |", flush=True)
    if name == "resnet20" and importlib.util.find_spec("torch_pruning"):
        peers(whole, seen[0], few, again, test, less)


def train_on(net: torch.nn.Module, few: Pictures, again: int, test: tuple[torch.Tensor, torch.Tensor]) -> str:
    """Train a cut network for some epochs and return what it is right on, as a cell of a table."""
    if not again:
        return ""
    few.generator.manual_seed(SEED)
    Training(few, epochs=again, rate=0.02, precision=PRECISION, seed=SEED)(net)
    return f"{count_right(net, *test):.2f}"


def peers(
    whole: torch.nn.Module, seen: tuple[torch.Tensor, torch.Tensor], few: Pictures, again: int,
    test: tuple[torch.Tensor, torch.Tensor], less: float,
) -> None:  # fmt: skip
    """Print the same for Torch-Pruning, its global ratio sought until as much work is gone."""
    import torch_pruning as tp

    kinds = {
        "magnitude": tp.importance.GroupMagnitudeImportance(p=2),
        "fpgm": tp.importance.FPGMImportance(p=2),
        "bn": tp.importance.BNScaleImportance(),
        "taylor, with labels": tp.importance.GroupTaylorImportance(),
    }
    batch = seen[0][:2]
    total = tp.utils.count_ops_and_params(whole, batch)
    for name, kind in kinds.items():
        low, high, start = 0.0, 0.9, time.perf_counter()
        for _ in range(8):
            ratio, net = (low + high) / 2, copy.deepcopy(whole)
            pruner = tp.pruner.BasePruner(
                net, batch, kind, global_pruning=True, pruning_ratio=ratio, max_pruning_ratio=0.9,
                ignored_layers=[layer for layer in net.modules() if isinstance(layer, torch.nn.Linear)],
            )  # fmt: skip
            net.zero_grad()
            torch.nn.functional.cross_entropy(net(seen[0]), seen[1]).backward()
            pruner.step()
            macs, parameters = tp.utils.count_ops_and_params(net, batch)
            low, high = (ratio, high) if macs > (1 - less) * total[0] else (low, ratio)
        took = (time.perf_counter() - start) / 8
        right = count_right(net, *test)
        cells = f"{macs / total[0]:.3f} | {parameters / total[1]:.3f} | {took:.1f} | {right:.2f}"
        after = train_on(net, few, again, test) if name in TRAINED else ""
        print(f"| Torch-Pruning, {name} | {cells} |  | {after} |", flush=True)


def zeros(seconds: float) -> None:
    """Print what files with zeros take beside those without."""
    torch.manual_seed(0)
    stack = torch.nn.Sequential(*(torch.nn.Conv2d(128, 128, 3, padding=1) for _ in range(4)))
    lines = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
    print("| network | runtime | 2:4 | 90 % zero | file, zipped, of the dense one |")
    print("|---|---|---|---|---|")
    for name, net, shape in (
        ("4 convolutions of 128", stack, (1, 128, 28, 28)),
        ("4 layers of 1024", lines, (16, 1024)),
    ):
        program = optimize.capture(net.eval(), (torch.randn(*shape),), dynamic_batch=False)
        sparse = [optimize.PruneWeights(**way).apply(program)[0] for way in ({"pattern": "2:4"}, {"ratio": 0.9})]  # type: ignore[arg-type]
        for target in ("onnx", "openvino"):
            with tempfile.TemporaryDirectory() as folder:
                files = [
                    optimize.export(each, target, Path(folder) / f"{place}{find_target(target).suffix}")
                    for place, each in enumerate((program, *sparse))
                ]
                sizes = [sum(len(zlib.compress(part.read_bytes(), 6)) for part in file.path.parent.glob(
                    f"{file.path.stem}.*")) for file in files]  # fmt: skip
                with Fleet(files, threads=1) as fleet:
                    timings = measure(fleet, [program.inputs[0].numpy()], budget_s=seconds * 3).timings
                gains = [timing.speedup for timing in timings[1:]]
                cells = [f"{gain.ratio:.2f}x [{gain.ci_low:.2f}, {gain.ci_high:.2f}]" for gain in gains if gain]
                packed = ", ".join(f"{size / sizes[0]:.2f}" for size in sizes[1:])
                print(f"| {name} | {target} | {' | '.join(cells)} | {packed} |", flush=True)


def main() -> int:
    """Run the benchmark; return 1 when a network could not be cut, or a file misses its time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument(
        "--architectures", nargs="*", metavar="NAME", help="timm's networks; all of the list by default"
    )
    parser.add_argument(
        "--latency", nargs="*", metavar="NAME", help="cut networks, all by default, to a time that the file is to take"
    )
    parser.add_argument(
        "--criteria", type=Path, metavar="DIR", help="every criterion; the trained network is kept there"
    )
    parser.add_argument("--network", choices=("resnet20", "vit"), default="resnet20", help="of --criteria")
    parser.add_argument("--again", type=int, default=0, help="epochs on 20,000 pictures that --criteria trains on")
    parser.add_argument("--zeros", action="store_true", help="time files with zeros")
    parser.add_argument("--budget-s", type=float, default=20.0, help="seconds of timing a file")
    given = parser.parse_args()
    print(conditions("onnxruntime", "openvino", "torch-pruning"), end="\n\n", flush=True)
    torch.set_num_threads(1)
    if given.criteria:
        criteria(given.network, given.criteria, given.again)
        return 0
    if given.zeros:
        zeros(given.budget_s)
        return 0
    if given.latency is not None:
        return int(latency(given.latency, given.budget_s) > 0)
    if given.architectures is None:
        untrained(given.budget_s)
        return 0
    return int(architectures(given.architectures or list(ARCHITECTURES)) > 0)


if __name__ == "__main__":
    sys.exit(main())
