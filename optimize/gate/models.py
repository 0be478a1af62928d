"""The two sides of a comparison: files opened, and their inputs brought into agreement."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from optimize.errors import TargetUnavailable
from optimize.gate.limits import Case
from optimize.measure.feed import Asked
from optimize.measure.openers import Opening
from optimize.measure.subjects import MODULE, AgreedPair, Subject, agreed_pair, preparation
from optimize.registry import find_target
from optimize.targets.base import Artifact


def open_pair(
    base: Subject, candidate: Subject, interpreters: Sequence[Path | None], input_shape: str | None
) -> AgreedPair:
    """Return two opened files as a pair.

    Args:
        interpreters: Python of each side's environment, None for this one.
        input_shape: Sizes of one sample, such as ``3,224,224``, where the files leave them free.

    Raises:
        TargetUnavailable: One cannot run on this machine.
        Refused: They do not take the same inputs, or other batches.
        UsageError: Nothing says what they take.
    """
    for subject, interpreter in zip((base, candidate), interpreters, strict=True):
        if reason := _barred(subject, interpreter):
            raise TargetUnavailable(f"'{subject.name}' cannot run {reason}.")
    first, second = interpreters
    return agreed_pair(replace(base, interpreter=first), replace(candidate, interpreter=second), input_shape)


def open_model(source: str, opening: Opening, input_shape: str | None) -> Subject:
    """Open one file; an eager module is captured and run operator by operator, as every baseline is.

    Raises:
        OptimizeError: It is missing, unreadable, no model, or wants code without trust.
    """
    subject = opening.open(source)
    return _captured(subject, source, opening, input_shape) if subject.artifact.target == MODULE else subject


def _captured(subject: Subject, source: str, opening: Opening, input_shape: str | None) -> Subject:
    from optimize.data.examples import draw_inputs
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
    reason = "" if interpreter else subject.missing or _unavailable(subject.artifact)
    return reason and f"on this machine: {reason}"


def _unavailable(artifact: Artifact) -> str:
    found = find_target(artifact.target).available()
    return "" if found.run else found.reason


def asked_of(case: Case, pair: AgreedPair) -> Asked:
    """Return what a case puts through both sides, drawn anew where it says no seed: else a file may know its noise."""
    metric = case.judged_by
    optional = metric is not None and metric.beside_original
    told = (case.data, case.eval, case.preprocess, *preparation(pair.models))
    seed = int.from_bytes(os.urandom(4)) if case.seed is None else case.seed
    return Asked(pair.specs, *told, seed=seed, classes=metric is None, optional=optional)
