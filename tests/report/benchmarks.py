"""One fixed benchmark, built by hand: a sweep, a file that crashed, one for another machine, percentiles refused."""

from pathlib import Path

import numpy as np

from optimize.bench.doubts import doubts
from optimize.bench.figures import figures
from optimize.bench.rounds import sweep
from optimize.measure.agreement import AgreementMeter
from optimize.measure.environment import Environment
from optimize.measure.lockstep import Plan
from optimize.measure.quality import Quality
from optimize.measure.runs import Block, Runs, Scenario, Start, Track, WarmUp
from optimize.measure.subjects import Subject
from optimize.report.bench import BenchReport
from optimize.targets.base import Artifact, TensorSpec

HOSTILE = "</script><script>alert('name')</script>.onnx"
MACHINE = Environment(
    cpu="Example 9000",
    cores=8,
    memory_bytes=16_000_000_000,
    system="Linux 6.1",
    python="3.11.9",
    load_average=(0.2, 0.2, 0.1),
    versions={"optimize": "0.1.0", "onnxruntime": "1.31.1"},
)


def rounds(median_s: float, count: int, seed: int) -> list[Block]:
    draws = np.random.default_rng(seed)
    blocks = []
    for index in range(count):
        samples = tuple(np.round(median_s * (1 + 0.01 * draws.standard_normal(5)), 9).tolist())
        blocks.append(Block(index % 2, index // 2, samples, samples, sum(samples), samples[0] * 1.03))
    return blocks


def subject(name: str, kind: str, target: str = "onnx", missing: str = "") -> Subject:
    spec = (TensorSpec("x", ("N", 3, 32, 32), "float32"),)
    artifact = Artifact(target, Path("/models") / name, spec, (), "", "ab" * 32, 1_234_567, "", missing=missing)
    return Subject(name, kind, artifact, places=() if missing else (0,))


def track(made: Subject, found: dict[Scenario, list[Block]], output: float, failure: str | None = None) -> Track:
    warm_ups = {scenario.name: WarmUp(40, (0.0081, 0.0033, 0.0022)) for scenario in found}
    starts = [Start(restart, 0.0512 + 0.01 * restart, warm_ups, 5e-8, 61_000_000) for restart in (0, 1)]
    outputs, meter = np.linspace(0, 1, 10, dtype=np.float32).reshape(1, 10), AgreementMeter()
    meter.update([outputs], [outputs + np.float32(output)])
    return Track(made, found, starts, {}, ("CPUExecutionProvider",), failure, Quality(meter.result()))


def benchmark(load: float = 0.2, scale: float = 1.0) -> BenchReport:
    """Return the fixed benchmark; ``scale`` multiplies the seconds of its second file."""
    import dataclasses

    scenarios = sweep([1, 4], [1, 2])
    plan = Plan(scenarios, restarts=2, runs=140, budget_s=30.0)
    plain = {scenario: rounds(0.002 * scenario.batch, 28, index) for index, scenario in enumerate(scenarios)}
    quick = {s: rounds(0.00071 * scale * s.batch, 28, 9 + index) for index, s in enumerate(scenarios)}
    outcome = Runs(
        [
            track(subject("net.onnx", "ONNX"), plain, 0.0),
            track(subject(HOSTILE, "ONNX"), quick, 0.003),
            track(
                subject("bad.onnx", "ONNX"), {scenarios[0]: rounds(0.001, 3, 5)}, 0.0, "block: the worker was killed"
            ),
            Track(subject("net.engine", "TensorRT", "tensorrt", "no GPU"), failure="not run: no GPU"),
        ],
        restarts=2,
        seconds=21.4,
    )
    machine = dataclasses.replace(MACHINE, load_average=(load, 0.2, 0.1))
    judged = figures(outcome, plan)
    report = BenchReport.of(
        outcome,
        judged,
        doubts(outcome, judged, plan, machine),
        plan,
        machine,
        "optimize bench net.onnx other.onnx bad.onnx net.engine --batch 1,4 --streams 1,2",
        device="cpu",
        energy="not offered: no RAPL counter under /sys/class/powercap",
    )
    return report.model_copy(update={"created": "2026-01-02T03:04:05+00:00"})
