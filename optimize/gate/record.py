"""What a check says, as data: the JSON output, from which every other output is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import AliasChoices, ConfigDict, Field

from optimize.gate import rounds
from optimize.gate.limits import OnInconclusive
from optimize.gate.rounds import GateTrace, SideName
from optimize.gate.verdict import Decision, Demand, Ratio, Verdict
from optimize.measure.metrics import Unit
from optimize.measure.runs import Clock
from optimize.measure.statistics import median, percentile
from optimize.measure.subjects import Subject
from optimize.records import FrozenRecord, gather

SCHEMA_VERSION = 1
#: Exit codes; what an inconclusive check ends as can be chosen.
EXIT_CODES = {
    Verdict.PASS: 0,
    Verdict.WARN: 0,
    Verdict.FAIL: 1,
    Verdict.INCONCLUSIVE: 3,
    Verdict.NOT_COMPARABLE: 4,
}
#: What several verdicts amount to: the first of these that is among them.
_PRECEDENCE = (Verdict.FAIL, Verdict.NOT_COMPARABLE, Verdict.INCONCLUSIVE, Verdict.WARN)


class SideRecord(FrozenRecord):
    """One side.

    Attributes:
        source: The file.
        kind: What it is, in words.
        target: The target that runs it.
        sha256: Hash of its files, hexadecimal; empty where it is no file.
        size_bytes: Of its files.
        output_digest: Hash of its outputs on the first samples; None where it was not run.
        runs: Timed runs.
        median_s: Median run on the wall; None where it was not timed.
        cpu_median_s: Median run in processor time.
        p90_s: 90th percentile on the wall; None with fewer than 64 runs.
        p95_s: 95th; None with fewer than 130.
        p99_s: 99th; None with fewer than 662.
        load_s: Median over the restarts of importing the runtime and loading the file.
        first_call_s: The same of the first run.
        peak_memory_bytes: The same of the largest resident memory; None where nobody says.
        preempted: How often the system took the processor away during timed runs.
        waited: How often the process gave it up by itself.
    """

    source: str
    kind: str
    target: str
    sha256: str
    size_bytes: int
    output_digest: str | None = None
    runs: int = 0
    median_s: float | None = None
    cpu_median_s: float | None = None
    p90_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None
    load_s: float | None = None
    first_call_s: float | None = None
    peak_memory_bytes: int | None = None
    preempted: int = 0
    waited: int = 0


class TimeRecord(FrozenRecord):
    """The verdict on time and what it rests on; see ``verdict.Decision`` and ``verdict.Demand``."""

    max_regression: float
    clock: Clock
    clock_reason: str
    ratio: Ratio
    wall: Ratio | None
    cpu: Ratio | None
    e_fail: float
    e_pass: float
    fail_at: float
    pass_at: float
    rounds: int
    restarts: int
    restart_ratios: tuple[float, ...]
    bimodal: bool
    seconds: float


class AccuracyRecord(FrozenRecord):
    """A metric: the candidate's ``value`` and the base's, and the 95 % interval of the difference; see ``Accuracy``."""

    model_config = ConfigDict(from_attributes=True, allow_inf_nan=False)

    metric: str
    value: float
    base: float = Field(validation_alias=AliasChoices("base", "baseline"))
    samples: int
    drop: float
    difference_low: float | None
    difference_high: float | None
    lost: int | None = None
    gained: int | None = None
    unit: Unit = "%"
    higher_is_better: bool = True


class FindingRecord(FrozenRecord):
    """One thing that was asked.

    Attributes:
        metric: Outputs, accuracy, size, time, latency, throughput or memory.
        verdict: What follows from it alone.
        limit: What was asked, in words.
        found: What was measured, in words.
        reason: A sentence without a full stop.
    """

    metric: str
    verdict: Verdict
    limit: str
    found: str
    reason: str


class CaseRecord(FrozenRecord):
    """One pair of models.

    Attributes:
        name: What it is called.
        verdict: Over everything that was asked.
        reason: Why, as a sentence without a full stop.
        base: None where it could not be opened.
        candidate: Likewise.
        time: None where nothing was timed.
        sqnr_db: Of the candidate's outputs against the base's; None where they were not compared.
        max_abs_error: Largest difference of an output.
        samples: Samples that outputs were compared on; None where they were not.
        given: Samples that there are; None where nobody says.
        accuracy: None without labelled data.
        findings: One for everything that was asked and measured.
        warnings: What makes the figures doubtful.
        input_digest: Hash of the inputs of a timed run.
        inputs: What both take, as text.
        threads: Compute threads.
        cpus: Processors both were bound to; empty where to none.
        batch: Samples of a timed run.
        seed: Of noise and of which batch was timed; None where neither was drawn.
        seconds: Of everything.
        raw: Every sample of every block, see ``rounds``.
    """

    name: str
    verdict: Verdict
    reason: str
    base: SideRecord | None = None
    candidate: SideRecord | None = None
    time: TimeRecord | None = None
    sqnr_db: float | None = None
    max_abs_error: float | None = None
    samples: int | None = None
    given: int | None = None
    accuracy: AccuracyRecord | None = None
    findings: tuple[FindingRecord, ...] = ()
    warnings: tuple[str, ...] = ()
    input_digest: str | None = None
    inputs: tuple[str, ...] = ()
    threads: int = 1
    cpus: tuple[int, ...] = ()
    batch: int = 1
    seed: int | None = None
    seconds: float = 0.0
    raw: Any = None

    def trace(self) -> GateTrace:
        """Return what was measured; empty where nothing was."""
        return rounds.from_json(self.raw) if self.raw else GateTrace()


class SelfTestRecord(FrozenRecord):
    """What comparing one model with itself says of a runner.

    Attributes:
        decisions: How many comparisons.
        false_alarms: How many failed.
        inconclusive: How many were not decided.
        median_s: Median seconds of one.
        spread: Standard deviation of a round's log-ratio, from its quartiles.
        smallest_regression: The smallest slowdown that the time allows to gate, as a share; None where not even 50 %.
        fit: No false alarm, and one in five inconclusive at most.
    """

    decisions: int
    false_alarms: int
    inconclusive: int
    median_s: float
    spread: float
    smallest_regression: float | None
    fit: bool


class Record(FrozenRecord):
    """A check.

    Attributes:
        schema_version: Of this record.
        verdict: Over all cases.
        exit_code: What the command ends with.
        alpha: The largest probability of a false alarm, over all cases.
        beta: The largest probability that the slowdown asked for passes, in each case.
        on_inconclusive: What an inconclusive check ends as.
        cases: In order.
        self_test: Of the runner; None where it was not asked for.
        environment: The machine.
        command: How to do it again.
        files: The models, as the command or the configuration names them.
        created: When, in UTC.
    """

    schema_version: int = SCHEMA_VERSION
    verdict: Verdict
    exit_code: int
    alpha: float
    beta: float
    on_inconclusive: OnInconclusive
    cases: tuple[CaseRecord, ...]
    self_test: SelfTestRecord | None = None
    environment: Mapping[str, Any]
    command: str
    files: tuple[str, ...] = ()
    created: str


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """Return what several verdicts amount to.

    >>> overall([Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.FAIL]).value, overall([]).value
    ('fail', 'pass')
    """
    found = set(verdicts)
    return next((entry for entry in _PRECEDENCE if entry in found), Verdict.PASS)


def exit_code(verdict: Verdict, on_inconclusive: OnInconclusive) -> int:
    """Return what the command ends with.

    >>> [exit_code(Verdict.INCONCLUSIVE, choice) for choice in ("keep", "pass", "fail")]
    [3, 0, 1]
    """
    if verdict is Verdict.INCONCLUSIVE and on_inconclusive != "keep":
        return 0 if on_inconclusive == "pass" else 1
    return EXIT_CODES[verdict]


def side_record(model: Subject, trace: GateTrace, side: SideName, output_digest: str | None) -> SideRecord:
    """Return what is known of one side."""
    artifact = model.artifact
    digested = {"source": str(artifact.path), "output_digest": output_digest}
    return gather(SideRecord, artifact, model, **digested, **_figures(trace, side))


def _figures(trace: GateTrace, side: SideName) -> dict[str, Any]:
    """Return what the rounds say of one side; nothing where there are none."""
    if not trace.rounds:
        return {}
    samples, blocks, starts = trace.samples(side), list(trace.blocks(side)), trace.starts[side]
    peak = median(start.peak_memory_bytes for start in starts)
    return {
        "runs": samples.size,
        "median_s": median(samples),
        "cpu_median_s": median(sample for block in blocks for sample in block.cpu_s),
        "p90_s": percentile(samples, 90),
        "p95_s": percentile(samples, 95),
        "p99_s": percentile(samples, 99),
        "load_s": median(start.load_s for start in starts),
        "first_call_s": median(start.first_call_s for start in starts),
        "peak_memory_bytes": None if peak is None else int(peak),
        "preempted": sum(block.preempted for block in blocks),
        "waited": sum(block.waited for block in blocks),
    }


def time_record(trace: GateTrace, decision: Decision, demand: Demand) -> TimeRecord:
    """Return the verdict on time and what it rests on."""
    return gather(
        TimeRecord,
        demand,
        decision,
        trace,
        clock=decision.clock.clock,
        clock_reason=decision.clock.reason,
        ratio=decision.ratios[decision.clock.clock],
        wall=decision.ratios.get(Clock.WALL),
        cpu=decision.ratios.get(Clock.CPU),
        fail_at=demand.fail_at,
        pass_at=demand.pass_at,
        rounds=len(trace.rounds),
        restarts=len(decision.restart_ratios),
    )
