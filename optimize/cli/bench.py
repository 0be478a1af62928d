"""``optimize bench``: files and modules timed against each other in lock-step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optimize import bounds
from optimize.cli import options
from optimize.errors import UsageError
from optimize.report import BENCH
from optimize.wording import plural

if TYPE_CHECKING:
    from optimize.measure.lockstep import Plan
    from optimize.measure.subjects import Subject
    from optimize.report.bench import BenchReport

#: Samples of a run that are tried where advice is asked how to serve.
_SERVED_BATCHES = (1, 2, 4, 8, 16)


@options.command(short_help="Time files and runtimes against each other.")
@click.argument("sources", nargs=-1, required=True, metavar="A [B ...]")
@options.timing(
    "--batch", "batches", type=options.counts(bounds.BATCH), help="Samples in one run; several sweep.  [default: 1]"
)
@options.timing(
    "--streams",
    type=options.counts(bounds.STREAMS),
    help="Callers at the same time; several sweep.  [default: 1]",
)
@options.timing(
    "--threads",
    type=options.counts(bounds.THREADS),
    help="Compute threads of the runtime; several sweep.  [default: 1]",
)
@options.cpus
@options.timing(
    "--rate",
    metavar="N/s",
    type=options.Quantity(bounds.read_rate),
    help="Samples a second that shall be served: with how many callers, threads and machines, and in what batches.",
)
@options.timing(
    "--p99",
    "p99_s",
    metavar="TIME",
    type=options.Quantity(bounds.read_time),
    help="Within which 99 of 100 of them shall be answered, waiting included: 20ms.",
)
@options.timing("--runs", type=options.count(bounds.RUNS), help="Timed runs of each file and scenario; 662 give a p99.")
@options.timing(
    "--seconds",
    type=options.Quantity(partial(bounds.read_number, above=0), "S"),
    help="Of running, warm-up included; loading comes on top.",
)
@options.timing(
    "--restarts",
    type=options.count(bounds.RESTARTS),
    default=3,
    show_default=True,
    help="Fresh processes of each file.",
)
@options.on
@options.targets(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Of torch modules."
)
@options.timing(
    "--seed", type=options.count(bounds.SEED), default=0, show_default=True, help="Of inputs, order and intervals."
)
@options.samples("--data", "Samples that are run and compared, given like --calib.  [default: noise]")
@options.pictures
@options.named_model
@options.out(BENCH, "Folder for bench.json (every sample), bench.md and bench.html.", "bench")
def bench(sources: tuple[str, ...], **given: Any) -> None:
    """Time A, B, ... against each other: .onnx, OpenVINO .xml, TensorRT .engine, TorchScript, .pt2, a torch module's
    file or package.module:factory.

    Each runs in fresh processes, in turn with the others: short blocks in random order. Ratios are quoted against A.
    Without --runs and --seconds, 130 runs of each are wanted and the time is bounded; one of them alone is the only
    bound. Ends with 1 when one failed, 4 when one cannot run on this machine.
    """
    from optimize.report.bench import tell_bench

    with options.phases() as phases:
        report = _measured(sources, given, phases.update)
    options.tell(tell_bench(report), lambda: report, "Benchmark")
    sys.exit(exit_code(report))


def exit_code(report: BenchReport) -> int:
    """Return 1 when a file failed, 4 when one could not run here, else 0."""
    states = {row.status for row in report.rows}
    return 1 if "failed" in states else 4 if "not_run" in states else 0


def _measured(sources: tuple[str, ...], given: dict[str, Any], progress: Any) -> BenchReport:
    """Open, time and judge everything."""
    import tempfile

    from optimize.bench.doubts import doubts
    from optimize.bench.figures import figures
    from optimize.bench.rounds import put_through, run
    from optimize.bench.serving import Traffic
    from optimize.measure.energy import find_meter
    from optimize.measure.feed import NOISE
    from optimize.measure.openers import Opening
    from optimize.measure.remote import connected
    from optimize.measure.subjects import agreed_inputs
    from optimize.report.bench import BenchReport

    device, trust = given["device"], given["trust"]
    if given["on"] and device != "cpu":
        raise UsageError("--device cuda is of this machine, and --on names another.")
    with (
        tempfile.TemporaryDirectory(prefix="optimize-") as folder,
        connected(given["on"], trust=trust) as remote,
    ):
        opening = Opening(Path(folder), given["factory"], trust, device, remote)
        machine = opening.machine
        _check_cpus(given["cpus"], machine.affinity)
        said = options.preprocessing(given)
        subjects = agreed_inputs(opening.open_all(sources), given["input_shape"], said)
        processors = len(given["cpus"]) or len(machine.affinity) or machine.cores
        traffic = Traffic(given["rate"], given["p99_s"]) if given["rate"] or given["p99_s"] else None
        threads = given["threads"] or (_doubled(processors) if traffic else (1,))
        subjects = _each_with(subjects, threads)
        plan = _plan({**given, "threads": max(threads)}, subjects, processors if traffic else None)
        asked = put_through(subjects, given["data"], said, given["seed"])
        meter, energy = (None, "not offered: of another machine") if remote else find_meter(device)
        most = processors if traffic else None
        outcome = run(subjects, plan, asked, meter=meter, processors=most, progress=progress)
    judged = figures(outcome, plan)
    found = doubts(outcome, judged, plan, machine, device, asked.notes)
    command = options.command_line()
    data = given["data"] or NOISE
    return BenchReport.of(
        outcome, judged, found, plan, machine, command, data=data, device=device, energy=energy, traffic=traffic
    )


def _doubled(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4 and on, and the most.

    >>> _doubled(6), _doubled(1)
    ((1, 2, 4, 6), (1,))
    """
    return (*(1 << place for place in range(most.bit_length()) if 1 << place < most), most)


def _each_with(subjects: Sequence[Subject], threads: Sequence[int]) -> list[Subject]:
    """Return every subject with each number of threads, named by it where there are several."""
    if len(threads) < 2:
        return list(subjects)
    return [
        replace(subject, name=f"{subject.name}, {plural(count, 'thread')}", threads=count)
        for subject in subjects
        for count in threads
    ]


def _plan(given: dict[str, Any], subjects: list[Subject], served_by: int | None) -> Plan:
    """Return what is asked; without --batch, a batch that is fixed in every file is taken.

    Args:
        given: The options.
        subjects: What is run.
        served_by: Processors that serve, where advice is asked how; None where it is not.
    """
    from optimize.bench.rounds import limits, sweep
    from optimize.measure.lockstep import Plan

    fixed = {subject.fixed_batch for subject in subjects if not subject.missing}
    only = fixed.pop() if len(fixed) == 1 else None
    batches = (only,) if only else _SERVED_BATCHES if served_by else (1,)
    streams = given["streams"] or (_doubled(served_by) if served_by else (1,))
    scenarios = sweep(given["batches"] or batches, streams, whole=served_by is not None)
    runs, budget_s = limits(given["runs"], given["seconds"], len(subjects) * len(scenarios))
    return Plan(scenarios, given["threads"], given["cpus"], given["restarts"], runs, budget_s, given["seed"])


def _check_cpus(wanted: tuple[int, ...], there: tuple[int, ...]) -> None:
    if not wanted:
        return
    if not there:
        raise UsageError("This system cannot keep a process to some processors.", hint="Leave out --cpus.")
    if missing := set(wanted) - set(there):
        choice = ",".join(map(str, there))
        raise UsageError(f"There is no processor {min(missing)} here.", hint=f"Choose from --cpus {choice}.")
