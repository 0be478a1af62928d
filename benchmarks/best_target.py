"""Our best file of each network against the best peer of any runtime, and each runtime against itself driven by hand.

    python -m venv peers && echo "$PWD/.venv/lib/python3.11/site-packages" > peers/lib/python3.11/site-packages/base.pth
    peers/bin/pip install nncf==3.4.0 torchao==0.18.0
    python -m benchmarks.best_target --peers peers/bin/python [--models NAME ...] [--results rows.json]

(the path in ``base.pth`` is that of this environment's packages: both use one torch and one OpenVINO). Peers are given
what ``benchmarks.int8_onnx`` gives them: the network as trained, 16 calibration samples, their own defaults, ONNX
Runtime its tuned settings. All files of a network, theirs and ours, run in lock-step: fresh processes, one thread,
batch 1, a block of each a round, in changing order. Seconds are processor time, which neighbours disturb least and
which for one thread is what the wall shows on a quiet machine. A ratio is the median over rounds with its 95 %
interval. SQNR is that of the logits against the float network on samples that calibrated nothing.

Where INT8 answers worse than 31 dB there is a row with layers given back to bfloat16 until it does (``--min-sqnr``).

"best" is the fastest of our files that answers no worse than the fastest peer (0.3 dB are equal). The exit code is 1
where ours is surely slower (the whole interval below 1) than the same runtime driven by hand or than the best peer, or
the geometric mean over networks is below 1.1. With ``--results`` rows are kept and a network measured before is not
measured again.

``--level AVX512_CORE_VNNI`` holds oneDNN's instructions down, of torch and OpenVINO, theirs and ours, when files are
made and when they run: what a processor without bfloat16 shows, without the rows of bfloat16. ONNX Runtime has no such
switch. The mean over networks is asked for at this machine's own level alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

import optimize
from benchmarks import int8_onnx
from benchmarks.conditions import conditions
from benchmarks.flags import quantizing
from benchmarks.int8_onnx import Case, case, merged, quantized
from optimize import processor
from optimize.errors import OptimizeError
from optimize.measure.agreement import AgreementMeter
from optimize.measure.fleet import Fleet, Session, WorkerFailed
from optimize.measure.lockstep import SINGLE
from optimize.measure.statistics import order_interval
from optimize.targets.base import Artifact, file_digest

MODELS = ("mobilenetv3_large_100", "tf_efficientnet_lite0", "vit_tiny_patch16_224", "repvgg_a0", "resnet50")
#: Our file and the peer's of the same runtime, and its file name.
PAIRS = {
    "onnx int8": "ort-int8.onnx",
    "openvino bf16": "ov-bf16.xml",
    "openvino int8": "nncf-f32.xml",
    "openvino int8-bf16": "nncf-bf16.xml",
    "pt2 int8": "inductor-int8.pt2",
}
TARGETS = {".onnx": "onnx", ".xml": "openvino", ".pt2": "pt2"}
GEOMETRIC_MEAN = 1.1
#: Answers this much nearer are not nearer, dB: a handful of samples says no more.
EQUAL_DB = 0.3
#: What layers are given back to bfloat16 for where INT8 keeps less, dB on the calibration samples.
NEAR_DB = 31.0
#: A block lasts about so long.
BLOCK_S = 0.05


@dataclasses.dataclass(frozen=True)
class Measured:
    """One file: seconds of its block in each round, and how near its answers are."""

    seconds: np.ndarray
    sqnr_db: float

    @property
    def ms(self) -> float:
        """Median milliseconds of a run."""
        return float(np.median(self.seconds)) * 1e3


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times faster ours is, with its 95 % interval."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio(peer: Measured, ours: Measured) -> Ratio:
    """Return a peer's time over ours, round by round."""
    ratios = peer.seconds / ours.seconds
    low, high = order_interval(ratios) or (float("nan"), float("nan"))
    return Ratio(float(np.median(ratios)), low, high)


def ours(entry: Case, folder: Path) -> dict[str, Artifact]:
    """Write our files, by row; a target that refuses is said and left out."""
    plain, data = merged(entry), list(entry.calibration.split(4))
    int8 = quantized(entry, plain)
    half = optimize.CastBF16(calibration=data).apply(plain)[0]
    programs = {"bf16": half, "int8": int8, "int8-bf16": _mixed(int8, data)}
    if int8.quantization is not None and int8.quantization.left_float:
        programs["int8-bf16, none spared"] = _mixed(quantized(entry, plain, spare=0), data)
    rows = [(target, kind) for kind in programs for target in ("onnx", "openvino", "pt2") if _is_asked(target, kind)]
    found = {}
    for target, kind in rows:
        path = folder / f"{target}.{kind.replace(', ', '-').replace(' ', '-')}{Path(_suffix(target))}"
        try:
            found[f"{target} {kind}"] = optimize.export(programs[kind], target, path)
        except OptimizeError as error:
            print(f"  {target} {kind}: {error.what}", flush=True)
    if (near := _near(entry, folder / "near")) is not None:
        found[f"openvino int8-bf16, {NEAR_DB:g} dB"] = _foreign(next(iter(found.values())), near)
    return found


def _near(entry: Case, folder: Path) -> Path | None:
    """Write what ``--int8 --mixed bfloat16 --min-sqnr`` gives on OpenVINO; None where INT8 keeps that as it is."""
    data = list(entry.calibration.split(4))
    passes = (
        optimize.Reparameterize(),
        optimize.FuseConvBN(),
        *quantizing(data),
        optimize.CastBF16(calibration=data, mixed=True),
    )
    inputs = (entry.calibration[:2],)
    report = optimize.optimize(entry.net, inputs, passes=passes, targets="openvino", min_sqnr=NEAR_DB, out=folder)
    row = next(row for row in report.rows if row.precision == "int8-bfloat16")
    kept = any("Given back" in note for note in row.notes)
    return Path(row.path) if kept and row.path else None


def _mixed(program: optimize.Program, data: Sequence[torch.Tensor]) -> optimize.Program:
    return optimize.CastBF16(calibration=data, mixed=True).apply(program)[0]


def _is_asked(target: str, kind: str) -> bool:
    return target == "openvino" or kind == "int8"


def _suffix(target: str) -> str:
    return next(suffix for suffix, name in TARGETS.items() if name == target)


def peers(entry: Case, name: str, folder: Path, python: Path | None, like: Artifact) -> dict[str, Artifact]:
    """Return the peers' files that could be made, by their name, as artifacts that our runners load."""
    plain, quantized = int8_onnx.peers(entry, folder)
    plain.rename(folder / "plain.onnx")
    quantized.rename(folder / "ort-int8.onnx")
    if python is not None:
        done = subprocess.run(
            [str(python), "-m", "benchmarks.best_target_peers", name, str(folder)],
            capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        for line in done.stderr.splitlines():
            if line.startswith(("RuntimeError", "ValueError", "ImportError", "ModuleNotFoundError", "torch.")):
                print(f"  peers: {line[:160]}", flush=True)
    files = [folder / file for file in PAIRS.values() if (folder / file).exists()]
    return {file.stem: _foreign(like, file) for file in files}


def _foreign(like: Artifact, path: Path) -> Artifact:
    """Return a peer's file as an artifact of the same signature."""
    return dataclasses.replace(
        like, target=TARGETS[path.suffix], path=path, sha256=file_digest(path), size_bytes=path.stat().st_size,
        coverage=None, notes=(), settings={},
    )  # fmt: skip


def interleaved(fleet: Fleet, names: Sequence[str], x: np.ndarray, rounds: int) -> dict[str, np.ndarray]:
    """Return processor seconds of one run in each round, ``[rounds]``; a file that cannot run is said and left out."""
    runs, found = dict[str, int](), {name: list[float]() for name in names}
    sessions = dict(zip(names, fleet, strict=True))
    for name, session in sessions.items():
        try:
            session.prepare(SINGLE, [x])
            run_s = session.warm_up(SINGLE, {"runs": 10, "seconds": 0.3, "cap_s": 5.0})["run_s"]
            runs[name] = max(3, round(BLOCK_S / run_s))
        except WorkerFailed as failure:
            print(f"  {name}: {failure}", flush=True)
    order = np.random.default_rng(0)
    for _ in range(rounds):
        for name in order.permutation(list(runs)):
            found[name].append(float(np.median(sessions[name].block(SINGLE, runs=runs[name])["cpu_s"])))
    return {name: np.array(found[name]) for name in runs}


def sqnr_db(session: Session, entry: Case) -> float:
    """Return how near the answers are to the float network's."""
    meter = AgreementMeter()
    with torch.no_grad():
        for x in entry.held_out.split(1):
            meter.update([entry.net(x).numpy()], session.outputs([x.numpy()]))
    result = meter.result()
    return float("nan") if result is None else result.sqnr_db


def measured(name: str, python: Path | None, rounds: int) -> tuple[dict[str, Measured], dict[str, Measured]]:
    """Write, time and judge all files of one network; return the peers' and ours."""
    entry = case(name)
    with tempfile.TemporaryDirectory(prefix="best-target-") as text:
        folder = Path(text)
        mine = ours(entry, folder)
        theirs = peers(entry, name, folder, python, next(iter(mine.values())))
        if not processor.host().has_avx512_bf16:  # emulated, a run takes a second
            theirs, mine = ({row: file for row, file in side.items() if "bf16" not in row} for side in (theirs, mine))
        names = [*theirs, *mine]
        with Fleet([*theirs.values(), *mine.values()], threads=1) as fleet:
            seconds = interleaved(fleet, names, entry.held_out[:1].numpy(), rounds)
            found = {
                row: Measured(seconds[row], sqnr_db(session, entry))
                for row, session in zip(names, fleet, strict=True)
                if row in seconds
            }
    return {row: found[row] for row in theirs if row in found}, {row: found[row] for row in mine if row in found}


def best(theirs: Mapping[str, Measured], mine: Mapping[str, Measured]) -> tuple[str, str]:
    """Return the fastest peer, and our fastest file that answers no worse (the most exact one where none does)."""
    peer = min(theirs, key=lambda row: theirs[row].ms)
    as_good = [row for row in mine if mine[row].sqnr_db >= theirs[peer].sqnr_db - EQUAL_DB]
    chosen = min(as_good, key=lambda row: mine[row].ms, default=max(mine, key=lambda row: mine[row].sqnr_db))
    return peer, chosen


def report(name: str, theirs: Mapping[str, Measured], mine: Mapping[str, Measured]) -> dict[str, object]:
    """Print the table of one network; return what the verdict needs."""
    print(f"{name}  (load {os.getloadavg()[0]:.1f})", flush=True)
    for row, entry in sorted({**theirs, **mine}.items(), key=lambda item: item[1].ms):
        peer = Path(PAIRS[row]).stem if row in PAIRS else ""
        beside = f"{ratio(theirs[peer], entry)} of {peer}" if row in mine and peer in theirs else ""
        print(f"  {'' if row in mine else 'peer '}{row:28} {entry.ms:8.2f} ms {entry.sqnr_db:6.1f} dB  {beside}")
    peer, chosen = best(theirs, mine)
    gain = ratio(theirs[peer], mine[chosen])
    print(f"  best: {chosen} {gain} of {peer}", flush=True)
    slower = [
        row for row, file in PAIRS.items()
        if row in mine and Path(file).stem in theirs and ratio(theirs[Path(file).stem], mine[row]).high < 1.0
    ]  # fmt: skip
    return {
        "peer": peer, "ours": chosen, "gain": dataclasses.asdict(gain), "slower": slower,
        "less_exact": bool(mine[chosen].sqnr_db < theirs[peer].sqnr_db - EQUAL_DB),
        "rows": {row: {"ms": entry.ms, "sqnr_db": entry.sqnr_db} for row, entry in {**theirs, **mine}.items()},
    }  # fmt: skip


def missed(rows: Mapping[str, dict[str, object]], is_whole: bool) -> list[str]:
    """Name the bars that were missed, that of the mean over networks where ``is_whole``."""
    gains = {name: Ratio(**row["gain"]) for name, row in rows.items()}  # type: ignore[arg-type]
    mean = float(np.exp(np.mean([np.log(gain.ratio) for gain in gains.values()])))
    print(f"geometric mean of the best {mean:.3f}")
    found = [f"{name}: slower than the best peer" for name, gain in gains.items() if gain.high < 1.0]
    found += [f"{name}: less exact than the best peer" for name, row in rows.items() if row["less_exact"]]
    found += [f"{name}: {kind} slower than by hand" for name, row in rows.items() for kind in row["slower"]]  # type: ignore[attr-defined]
    return [*found, *([f"the geometric mean is below {GEOMETRIC_MEAN}"] if is_whole and mean < GEOMETRIC_MEAN else [])]


def main() -> int:
    """Print a table a network; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME")
    parser.add_argument("--peers", type=Path, help="Python with nncf and torchao; without it they are left out")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--results", type=Path, help="JSON of rows, read and written")
    parser.add_argument("--level", default="", help="ONEDNN_MAX_CPU_ISA of everything that runs here")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.level:
        os.environ["ONEDNN_MAX_CPU_ISA"] = asked.level  # oneDNN reads it at its first call, processes at their start
    logging.disable(logging.WARNING)  # the peers' libraries warn a line a layer
    print(conditions("onnxruntime", "openvino"), end="\n\n", flush=True)
    rows = json.loads(asked.results.read_text()) if asked.results and asked.results.exists() else {}
    for name in asked.models:
        if name not in rows:
            rows[name] = report(name, *measured(name, asked.peers, asked.rounds))
            if asked.results:
                asked.results.write_text(json.dumps(rows, indent=1) + "\n")
    found = missed({name: rows[name] for name in asked.models}, is_whole=not asked.level)
    print("MISSED: " + "; ".join(found) if found else "holds")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
