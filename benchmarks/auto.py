"""A search for the best files of a network beside what single commands make of it.

    python -m benchmarks.auto [--models NAME ...] [--budget-s 1200] [--folder DIR]

Each network of ``benchmarks.int8_onnx``, and the sentence encoder of ``benchmarks.encoders`` with 64 tokens and free
lengths, is given to ``optimize auto`` with 16 calibration samples, every target that runs here and so many seconds. The
first choices of a search are what single commands make, so its journal says what each of them came to; every one must
be beaten or equalled by a file of the front. Then the front's fastest file that answers no worse than ``--int8 --to
onnx`` is timed beside that file, made again from its recipe, in lock-step, and so is the smallest. The curve is how
fast the fastest file was at the end of each minute. With ``--folder`` searches are kept, and gone on with.

The exit code is 1 where a single command beats the front, where a minute behind the first has no file, or where fewer
than two networks of three gain a tenth of the time, or of the bytes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks import encoders, int8_onnx
from benchmarks.conditions import conditions
from optimize import presets
from optimize.auto.choices import FileChoice, every_target, first_choices
from optimize.auto.searching import Goal, find_front
from optimize.auto.trials import FileTrial
from optimize.job import Job
from optimize.measure.fleet import Fleet
from optimize.measure.latency import measure
from optimize.measure.runs import Speedup
from optimize.recipe import parse, read
from optimize.registry import find_target
from optimize.report import JOURNAL
from optimize.report.model import Report, Row
from optimize.targets.base import Artifact
from optimize.workflow import run_job

MODELS = (
    "resnet50", "mobilenetv3_large_100", "tf_efficientnet_lite0", "repvgg_a0", "vit_tiny_patch16_224", "MiniLM"
)  # fmt: skip
TOKENS = 64
#: Times over ``--int8 --to onnx`` in speed or bytes, at no fewer decibels, that two networks in three are to gain; what
#: is equal.
GAIN, EQUAL_DB = 1.1, 0.3


@dataclass(frozen=True)
class Subject:
    """A network, its calibration samples by their arguments' names, and which of their dimensions are free."""

    net: torch.nn.Module
    calibration: dict[str, torch.Tensor]
    dynamic: str = ""


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
        report: Of its front.
        trials: All that was tried.
        best: The fastest file at no fewer decibels than ``--int8 --to onnx``, and how fast it is beside that.
        small: The same of the smallest.
        saving: Bytes of that command's file over those of the smallest.
    """

    report: Report
    trials: list[FileTrial]
    best: tuple[Row, Speedup]
    small: tuple[Row, Speedup]
    saving: float

    @property
    def gains(self) -> bool:
        """Whether the front holds what was asked for."""
        return max(self.best[1].ratio, self.saving) >= GAIN


def subject(name: str) -> Subject:
    """Return a network by its name."""
    if name != "MiniLM":
        entry = int8_onnx.case(name)
        return Subject(entry.net, {"x": entry.calibration})
    words = encoders.texts(encoders.TEXT)
    encoder = encoders.case(encoders.model_folder(), words, TOKENS, int8_onnx.CALIBRATION, 1)
    tokens, masks = map(torch.cat, zip(*encoder.calibration, strict=True))
    return Subject(encoder.net, {"input_ids": tokens, "attention_mask": masks}, "sequence")


def search(entry: Subject, out: Path, budget_s: float) -> Found:
    """Search, and time the best beside what a single command makes."""
    data = out.with_suffix(".npz")
    data.parent.mkdir(parents=True, exist_ok=True)
    np.savez(data, **{name: samples.numpy() for name, samples in entry.calibration.items()})
    fusing = presets.fusing(fuse=True, reparameterize=True)
    asked = {"passes": fusing, "targets": every_target(), "calib": str(data), "dynamic": entry.dynamic}
    recipe = parse(asked, source="benchmark")
    job = Job(entry.net, recipe, [samples[:2] for samples in entry.calibration.values()], out)
    report = find_front(job, Goal(budget_s))
    lines = (out / JOURNAL).read_text(encoding="utf-8").splitlines()[1:]
    trials = [FileTrial.model_validate_json(line) for line in lines]
    usual = next(trial for trial in trials if trial.choice == FileChoice("onnx", "int8"))
    least = _level(usual.row) - EQUAL_DB
    good = [row for row in report.rows if _level(row) >= least]
    small = min(good, key=lambda row: row.size_bytes or 0)
    fastest, smallest = compare(job, usual, (good[0], small))
    assert usual.row is not None and usual.row.size_bytes and small.size_bytes
    saving = usual.row.size_bytes / small.size_bytes
    return Found(report, trials, (good[0], fastest), (small, smallest), saving)


def compare(job: Job, usual: FileTrial, rows: Sequence[Row]) -> list[Speedup]:
    """Make a single command's file again, and time others beside it."""
    with tempfile.TemporaryDirectory() as name:
        text = Path(name) / "usual.yaml"
        text.write_text(usual.recipe, encoding="utf-8")
        again = run_job(Job(job.source, read(text), job.inputs, Path(name) / "usual"))
        row = next(row for row in again.rows if row.precision == "int8")
        assert usual.row is not None and row.sha256 == usual.row.sha256
        with Fleet([_opened(row), *map(_opened, rows)]) as fleet:
            timings = measure(fleet, _inputs(job), budget_s=20.0).timings[1:]
    return [timing.speedup for timing in timings if timing.speedup is not None]


def _inputs(job: Job) -> list[np.ndarray]:
    assert job.inputs is not None
    return [tensor[:1].numpy() for tensor in job.inputs]


def _opened(row: Row) -> Artifact:
    assert row.path is not None
    return replace(find_target(row.target).open(Path(row.path), trust=True), inputs=row.inputs, outputs=row.outputs)


def _level(row: Row | None) -> float:
    assert row is not None and row.agreement is not None
    return row.agreement.sqnr_db


def beaten(found: Found) -> list[str]:
    """Return the single commands' files that beat the front: each must be no better than a file of it."""
    digests = {row.sha256 for row in found.report.rows}
    kept = [trial for trial in found.trials if trial.row is not None and trial.row.sha256 in digests]
    standings = [standing for trial in kept if (standing := trial.standing) is not None]
    usual = set(first_choices(every_target()))
    single = [(trial.choice, trial.standing) for trial in found.trials if trial.choice in usual]
    return [
        f"{choice.target} {choice.precision}"
        for choice, standing in single
        if standing is not None and not any(one.is_no_worse(standing) for one in standings)
    ]


def curve(trials: Sequence[FileTrial]) -> list[float]:
    """Return how many times as fast as eager the fastest file was at the end of each minute; 0 without one."""
    known = [(trial.at_s, 1 / trial.standing.took) for trial in trials if trial.standing is not None]
    minutes = int(max(at for at, _ in known) // 60) + 1
    return [max((ratio for at, ratio in known if at <= 60 * minute), default=0.0) for minute in range(1, minutes + 1)]


def show(name: str, found: Found) -> None:
    """Print one network."""
    print(f"\n## {name}\n\n| file | vs eager | ms | SQNR, dB | MB |\n|---|---:|---:|---:|---:|")
    for row in found.report.rows:
        assert row.speedup is not None and row.latency is not None and row.size_bytes is not None
        ratio, ms, megabytes = row.speedup.ratio, 1e3 * row.latency.median_s, row.size_bytes / 1e6
        print(f"| {row.name} | {ratio:.2f} | {ms:.2f} | {_level(row):.1f} | {megabytes:.2f} |")
    search = found.report.search
    assert search is not None
    (best, fast), (small, slow) = found.best, found.small
    print(f"\n{best.name} is {_over(fast)} times as fast as `--int8 --to onnx` at no fewer decibels.")
    print(f"{small.name} takes {1 / found.saving:.2f} of its bytes, and is {_over(slow)} times as fast.")
    told = ", ".join(f"{ratio:.2f}" for ratio in curve(found.trials))
    print(
        f"{len(found.trials)} trials in {search.spent_s:.0f} s; the fastest at the end of each minute: {told}.",
        flush=True,
    )


def _over(gain: Speedup) -> str:
    return f"{gain.ratio:.2f} ({gain.ci_low:.2f} to {gain.ci_high:.2f})"


def main() -> int:
    """Search for each network, print tables, and say what is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--budget-s", type=float, default=1200.0)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    print(conditions("onnxruntime", "openvino", "optuna"), end="\n\n", flush=True)
    missed, gains = [], []
    with tempfile.TemporaryDirectory() as name:
        for model in asked.models:
            found = search(subject(model), (asked.folder or Path(name)) / model, asked.budget_s)
            show(model, found)
            gains.append(found.gains)
            missed += [f"{model}: {file} beats the front" for file in beaten(found)]
            missed += [
                f"{model}: no file in minute {at}" for at, ratio in enumerate(curve(found.trials), 1) if not ratio
            ]
    if sum(gains) < 2 * len(gains) / 3:
        missed.append(f"fewer than two networks in three gain {GAIN} times over a single command's file")
    for line in missed:
        print(f"missed: {line}")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
