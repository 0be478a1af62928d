"""One pair of models from its files to its verdict: what they answer first, then what they cost."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from optimize import processor
from optimize.errors import OptimizeError, TargetUnavailable, UsageError
from optimize.gate import baseline, findings, record
from optimize.gate.baseline import Stored
from optimize.gate.limits import Case, Settings
from optimize.gate.record import CaseRecord, FindingRecord
from optimize.gate.rounds import PAIR, SIDES, GateTrace, SideName, measure, start_fleet, to_json
from optimize.gate.verdict import Decision, Demand, Verdict, decide, is_decided
from optimize.measure.environment import Environment, busy
from optimize.measure.feed import Asked
from optimize.measure.fleet import Session, WorkerFailed
from optimize.measure.lockstep import Plan
from optimize.measure.openers import Opening
from optimize.measure.quality import APART_DB, HERE, Quality, Question, judge, judge_elsewhere, require_steady
from optimize.measure.runs import Clock, Track
from optimize.measure.subjects import (
    MODULE,
    AgreedPair,
    Subject,
    agreed_pair,
    other_outputs,
    other_processors,
    preparation,
)
from optimize.measure.worker import UNSTEADY
from optimize.progress import Progress
from optimize.records import gather
from optimize.regular import find
from optimize.targets.arrays import digest
from optimize.targets.base import Artifact

#: The share of the time after which no further unlabelled sample is compared: long runs, few samples.
JUDGED_SHARE = 0.1
#: A candidate whose answers take so many times the base's has itself to blame where that time was over too soon.
MOST_SLOWER = 2.0


@dataclass
class _State:
    """What is known of a case so far; whatever stops it, this much is reported."""

    case: Case
    began: float = field(default_factory=time.monotonic)
    pair: AgreedPair | None = None
    qualities: tuple[Quality, ...] = ()
    trace: GateTrace = field(default_factory=GateTrace)
    decision: Decision | None = None
    demand: Demand = field(default_factory=Demand)
    findings: list[FindingRecord] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    input_digest: str | None = None
    seed: int | None = None
    samples: int | None = None
    given: int | None = None
    is_cut: bool = False
    sides: tuple[SideName, ...] = SIDES

    @property
    def models(self) -> dict[SideName, Subject]:
        """The sides that were opened; a candidate alone stands for both in ``pair``."""
        both = zip(SIDES, self.pair.models, strict=True) if self.pair else ()
        return {side: model for side, model in both if side in self.sides}

    def noted(self, batches: Generator[Question, None, tuple[int | None, bool]]) -> Iterator[Question]:
        """Yield batches; note how many samples there are, and whether the time was over before all of them."""
        self.given, self.is_cut = yield from batches


def check(case: Case, settings: Settings, opening: Opening, *, progress: Progress | None = None) -> CaseRecord:
    """Return the verdict on one pair; whatever goes wrong with a file or a worker becomes part of it.

    Args:
        case: The pair and what is asked of it.
        settings: The error rates and how many cases share them.
        opening: How files are opened.
        progress: Told how far it is.

    Raises:
        UsageError: What was asked cannot be meant.
    """
    state = _State(case)
    case.require_judged()
    try:
        _check(state, settings, opening, progress)
    except UsageError:
        raise
    except WorkerFailed as error:
        side = SIDES[error.place] if state.sides == SIDES else "candidate"
        # A candidate that does not run must not be merged; a base that does not run says nothing of the candidate.
        verdict = Verdict.FAIL if side == "candidate" else Verdict.NOT_COMPARABLE
        told = UNSTEADY if str(error).endswith(UNSTEADY) else f"does not run: {error}"
        return _record(state, verdict, f"the {side} {told}".rstrip("."))
    except OptimizeError as error:
        return _record(state, Verdict.NOT_COMPARABLE, str(error).replace("\n", " ").rstrip("."))
    verdict = record.overall(entry.verdict for entry in state.findings)
    return _record(state, verdict, "; ".join(_reasons(state.findings, verdict)))


def _check(state: _State, settings: Settings, opening: Opening, progress: Progress | None) -> None:
    case = state.case
    stored, machine = baseline.stored_by(case), opening.machine
    gone = stored if stored is not None and find(stored.file) is None else None
    if gone is not None:
        gone.require_same_machine(machine)
        state.sides, case = ("candidate",), case.model_copy(update={"seed": gone.baseline.seed})
    state.pair = open_case(_alone(case) if gone else case, opening)
    _require_instructions(state, machine)
    samples = asked_of(case, state.pair)
    turns = samples.timed(case.batch, 2)
    inputs = turns[: len(state.pair.specs)]
    state.input_digest, state.seed = digest(inputs), samples.seed
    if gone is not None:
        gone.require_same_run(case, state.input_digest)
    state.warnings += _warnings_before(case, gone, machine)
    state.warnings += [*_warnings_of_pair(state.pair, stored, machine), *samples.notes]
    state.warnings += [f"'{model.name}': {note}" for model in state.models.values() for note in model.artifact.notes]
    plan = plan_for(case)
    if progress:
        progress(f"{case.title}: compare outputs", 0.0)
    with start_fleet(state.pair.models, plan) as fleet:
        missing = {entry for session in fleet for entry in session.missing}
        state.warnings += [f"The files were run with {entry}." for entry in sorted(missing)]
        both = zip(state.pair.models, fleet, strict=True)
        state.warnings += dict.fromkeys(f"'{model.name}': {note}" for model, found in both for note in found.notes)
        batches = samples.judged(seconds=JUDGED_SHARE * case.max_seconds, batch=case.batch)
        metric, noise, subjects = case.judged_by, samples.noise, state.pair.models
        read = state.noted(batches)
        state.qualities = judge(fleet, read, subjects=subjects, metric=metric, compare_only=True, noise=noise)
        if ended := next((session for session in fleet if session.failure), None):
            raise WorkerFailed(str(ended.failure), ended.place)
        _judge_answers(state, samples, gone)
        base_bytes, candidate_bytes = (model.artifact.size_bytes for model in state.pair.models)
        state.findings += findings.of_size(case, gone.baseline.size_bytes if gone else base_bytes, candidate_bytes)
        if any(entry.verdict is Verdict.FAIL and entry.metric != "size" for entry in state.findings):
            return  # the time of a wrong answer says nothing
        state.demand = demand_of(case, settings, [model.artifact for model in state.pair.models])
        tell = (lambda _, done: progress(f"{case.title}: measure", done)) if progress else None
        decided = functools.partial(is_decided, demand=state.demand, alone=gone is not None)
        answers = [session.outputs(model.arranged(inputs)) for session, model in zip(fleet, subjects, strict=True)]

        def judge_again(pairs: Sequence[tuple[Track[Subject], Session]], _: int) -> None:
            for (track, session), before in zip(pairs, answers, strict=True):
                require_steady(session, track.subject.arranged(inputs), before)

        state.trace = measure(state.pair, turns, plan, decided, tell, fleet, judge_again)
    _judge_costs(state, gone, batch=len(inputs[0]))


def _judge_answers(state: _State, samples: Asked, gone: Stored | None) -> None:
    """Add what follows from the answers; without a base, what is known of them is less, too."""
    assert state.pair is not None
    case, (base, found) = state.case, state.qualities
    if gone is None:
        if found.agreement is not None and found.agreement.caution:
            state.warnings.append(f"The candidate {found.agreement.caution}")
        if told := findings.beside_labels(case, found):
            state.warnings.append(told)
        state.samples = found.samples or None
        if told := findings.left_out(found.samples, state.given, is_cut=state.is_cut):
            state.warnings.append(f"Outputs were compared on {told}.")
        entries = findings.of_outputs(case, found)
        if state.is_cut and found.seconds > MOST_SLOWER * base.seconds:
            why = f"on {told}, which the candidate took: give more --max-seconds"
            entries = [findings.withheld(entry, why) for entry in entries]
        has_sizes = (case.eval or case.data or "").endswith((".npy", ".npz"))  # all else is made to fit
        if state.pair.chosen and not has_sizes:
            why = "at sizes that only the candidate says: give --input-shape"
            entries = [findings.withheld(entry, why) for entry in entries]
        if state.pair.is_told:
            why = "on pictures prepared for the base by numbers that only the candidate says: give --mean and --std"
            entries = [findings.withheld(entry, why) for entry in entries]
        state.findings += entries
        state.findings += _findings_elsewhere(case, state.pair, samples)
        return
    known, entries = findings.of_outputs_alone(case, found, gone.baseline)
    state.qualities = (base, known)
    state.findings += [*entries, *findings.of_elsewhere_alone(case)]
    if known.accuracy is not None and case.bound.max_drop is not None:
        state.warnings.append(
            "What was lost is judged by the accuracy that is stored, as of other samples: beside the base's file fewer "
            "labels would tell it."
        )


def _judge_costs(state: _State, gone: Stored | None, *, batch: int) -> None:
    """Add what follows from time and memory; beside a stored median no ratio is decided."""
    case, trace, demand = state.case, state.trace, state.demand
    decision = decide(trace, demand)
    if gone is not None:
        state.findings.append(findings.of_time_alone(case, trace, gone.baseline))
        state.findings += findings.of_latency(case, decision, trace, demand, batch=batch)
        state.findings += findings.of_memory_alone(case, trace)
        return
    state.decision = decision
    state.findings += findings.of_time(case, decision, trace, demand, batch=batch)
    state.findings += findings.of_memory(case, trace)
    state.warnings += _warnings_after(decision, case.max_regression)


def _findings_elsewhere(case: Case, pair: AgreedPair, samples: Asked) -> Iterator[FindingRecord]:
    """Yield what follows from the candidate's outputs on emulated processors, beside the base's on this one."""
    if not case.verify_on:
        return
    files = [model.artifact for model in pair.models]
    samples = replace(samples, labelled=None) if samples.data else samples
    batches = samples.judged(seconds=JUDGED_SHARE * case.max_seconds)
    (found,) = judge_elsewhere(case.verify_on, files, batches, subjects=pair.models)
    here = found[HERE].agreement
    unjudged = samples.noise and any(file.is_rounded for file in files)
    # Accuracy allowed it what it answers here; and of noise nothing is asked but the same answers.
    if here is not None and (unjudged or ((case.eval or case.metric) and case.min_sqnr is None)):
        case = case.model_copy(update={"min_sqnr": min(findings.MIN_SQNR_DB, round(here.sqnr_db - APART_DB, 1))})
    unlabelled = case.model_copy(update={"eval": None, "metric": None})  # a few samples there, without their labels
    for cpu in case.verify_on:
        for entry in findings.of_outputs(unlabelled, found[cpu]):
            yield entry.model_copy(update={"metric": f"outputs on {cpu}", "reason": f"on {cpu} {entry.reason}"})


def open_case(case: Case, opening: Opening) -> AgreedPair:
    """Open both sides of a case.

    Raises:
        OptimizeError: One cannot be opened or run here, or they do not take the same inputs.
    """
    stored, opening = baseline.stored_by(case), dataclasses.replace(opening, factory=case.model)
    source = str(stored.file) if stored else case.base
    base = open_model(source, _apart(opening), case.input_shape)
    if stored is not None:
        stored.require(base.artifact.sha256)
    same = source == case.candidate
    candidate: Subject = base if same else open_model(case.candidate, _apart(opening), case.input_shape)
    sides = []
    for subject, name in ((base, case.base_python), (candidate, case.candidate_python)):
        interpreter = Path(name) if name else None
        placed = opening.placed(subject, interpreter)
        if reason := _barred(placed, interpreter):
            raise TargetUnavailable(f"'{placed.name}' cannot run {reason}.")
        sides.append(replace(placed, interpreter=interpreter))
    return agreed_pair(sides[0], sides[1], case.input_shape, case.preprocess)


def _require_instructions(state: _State, machine: Environment) -> None:
    """Check that the sides answer where they run as they do on the processors they were made for.

    Raises:
        TargetUnavailable: The integers of one are wrong on that machine: nothing that is measured there tells of it.
    """
    for side, model in state.models.items():
        if reason := processor.misfit(model.artifact.cpu, machine.host):
            raise TargetUnavailable(f"The {side}'s {reason}.")


def _apart(opening: Opening) -> Opening:
    """Return the opening with a folder of its own: both sides may have one file name."""
    return dataclasses.replace(opening, folder=Path(tempfile.mkdtemp(dir=opening.folder)))


def _alone(case: Case) -> Case:
    """Return the case with its candidate in the place of a base that is gone: runs of one file, to be judged alone."""
    return case.model_copy(update={"base": case.candidate, "base_python": case.candidate_python})


def plan_for(case: Case) -> Plan:
    """Return how a case is measured."""
    return replace(PAIR, threads=case.threads, affinity=case.cpus, budget_s=case.max_seconds)


def demand_of(case: Case, settings: Settings, artifacts: Sequence[Artifact]) -> Demand:
    """Return what is asked of the time, alpha shared by everything in the suite that can fail for its time."""
    asked = sum(1 + (latency_limit(entry) is not None) for entry in settings.cases)
    return Demand(
        max_regression=case.max_regression,
        alpha=settings.alpha,
        beta=settings.beta,
        cases=max(asked, 1),
        max_latency_s=latency_limit(case),
        threads=case.threads,
        targets=tuple(artifact.target for artifact in artifacts),
    )


def latency_limit(case: Case) -> float | None:
    """Return the longest median run that latency and throughput allow, in seconds; None where neither is asked."""
    return case.batch / case.min_throughput if case.min_throughput else case.max_latency


def _reasons(found: Sequence[FindingRecord], verdict: Verdict) -> list[str]:
    """Return why: the reasons of everything that has the verdict, of the time alone where all is well."""
    deciding = [entry for entry in found if entry.verdict is verdict]
    if verdict is Verdict.PASS:
        deciding = [entry for entry in deciding if entry.metric == "time"]
    return [entry.reason for entry in deciding]


def _warnings_before(case: Case, gone: Stored | None, machine: Environment) -> list[str]:
    found = []
    if gone is not None:
        found.append(
            f"'{gone.file}' is gone: only its numbers are left, and the machine has moved on since. Equal files failed "
            "6 to 91 % of such comparisons of time when that was measured, so time fails nothing here."
        )
    if told := busy(machine.load_average[0] if machine.load_average else 0.0, machine.cores):
        found.append(f"{told} Ratios hold.")
    if case.data is None and case.eval is None and gone is not None:
        found.append("Outputs are not judged: there are neither samples nor the base's file.")
    elif case.data is None and case.eval is None:
        found.append(
            "Outputs were compared on noise, which a file can tell from data and which judges none that rounds: give "
            "samples (--data) or labelled ones (--eval)."
        )
    return found


def _warnings_of_pair(pair: AgreedPair, stored: Stored | None, machine: Environment) -> list[str]:
    """Say what of inputs, outputs and processors makes the figures doubtful."""
    here, found = machine.host.level, [*filter(None, (other_outputs(*pair.models), other_processors(*pair.models)))]
    if named := ", ".join(map(str, pair.chosen)):
        found.append(f"Only the candidate says how large {named} is, the base leaves it free: give --input-shape.")
    if stored is not None and stored.level != here:
        found.append(
            f"The baseline was stored on a processor of the kind '{stored.level}', this one is '{here}': time may "
            "compare otherwise there, and answers where a file was not made for both."
        )
    return found


def _warnings_after(decision: Decision, max_regression: float) -> list[str]:
    found = []
    if decision.bimodal:
        spread = ", ".join(f"{ratio:.3f}" for ratio in decision.restart_ratios)
        found.append(f"Restarts disagree beyond their own noise (ratios {spread}): memory layout decides the time.")
    wall, cpu = (decision.ratios.get(clock) for clock in (Clock.WALL, Clock.CPU))
    if wall and cpu and abs(wall.value - cpu.value) > max_regression:
        found.append(f"The clocks disagree: {wall.value:.3f} on the wall, {cpu.value:.3f} in processor time.")
    return found


def _record(state: _State, verdict: Verdict, reason: str) -> CaseRecord:
    pair, case, (base, found) = state.pair, state.case, state.qualities or (Quality(), Quality())
    agreement, digests = found.agreement, {"base": base.digest, "candidate": found.digest}
    sides = dict.fromkeys(SIDES) | {
        side: record.side_record(model, state.trace, side, digests[side]) for side, model in state.models.items()
    }
    return gather(
        CaseRecord,
        *filter(None, (agreement, case, state)),
        name=case.title,
        verdict=verdict,
        reason=reason,
        **sides,
        time=record.time_record(state.trace, state.decision, state.demand) if state.decision else None,
        accuracy=record.AccuracyRecord.model_validate(found.accuracy) if found.accuracy else None,
        inputs=tuple(map(str, pair.specs)) if pair else (),
        seconds=time.monotonic() - state.began,
        raw=to_json(state.trace) if state.trace.rounds else None,
    )


def open_model(source: str, opening: Opening, input_shape: str | None) -> Subject:
    """Open one file; an eager module is captured and run operator by operator, as every baseline is.

    Raises:
        OptimizeError: It is missing, unreadable, no model, or wants code without trust.
    """
    subject = opening.open(source)
    return _captured(subject, source, opening, input_shape) if subject.artifact.target == MODULE else subject


def _captured(subject: Subject, source: str, opening: Opening, input_shape: str | None) -> Subject:
    from optimize.data.samples import draw_inputs
    from optimize.load import ModelSource
    from optimize.load.opening import capture_source

    named = ModelSource.of(source, model=opening.factory)
    model = capture_source(named, lambda _: draw_inputs(input_shape), trust=opening.trust)
    stem = hashlib.sha256(source.encode()).hexdigest()[:12]
    artifact = opening.write_program(model.program, stem, subject.artifact.path)
    return replace(subject, artifact=artifact, loading={})


def _barred(subject: Subject, interpreter: Path | None) -> str:
    """Return where and why a subject cannot run; empty where it can, or where that is seen when it is loaded."""
    if subject.remote is not None:
        return subject.missing
    reason = "" if interpreter else subject.lacking
    return reason and f"on this machine: {reason}"


def asked_of(case: Case, pair: AgreedPair) -> Asked:
    """Return what a case puts through both sides, drawn anew where it says no seed: else a file may know its noise."""
    metric = case.judged_by
    optional = metric is not None and metric.beside_original
    told = (case.data, case.eval, case.preprocess, *preparation(pair.models))
    seed = int.from_bytes(os.urandom(4)) if case.seed is None else case.seed
    return Asked(pair.specs, *told, seed=seed, classes=metric is None, optional=optional)
