"""One pass over the data judges every artifact of a fleet."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from optimize.errors import Refused
from optimize.measure import feed, quality
from optimize.measure.feed import Arrays
from optimize.measure.fleet import Fleet, Session, WorkerFailed
from optimize.measure.quality import Question, judge, judge_elsewhere, require_steady
from optimize.measure.subjects import Subject, other_outputs
from optimize.measure.worker import UNSTEADY
from optimize.targets.base import Artifact, TensorSpec
from tests.cpus import NEEDS_QEMU

X = np.eye(3, dtype=np.float32)
LABELS = np.arange(3)
Make = Callable[..., Artifact]


def test_every_artifact_is_judged_against_the_first(make: Make) -> None:
    with Fleet([make(), make(factor=0.9), make(factor=-1.0), make(refuses=True)]) as fleet:
        original, close, negated, refused = judge(fleet, [([X], LABELS), ([X[:2]], LABELS[:2])])
    assert original.agreement is None and original.accuracy is not None and original.accuracy.value == 1.0
    assert close.agreement is not None and round(close.agreement.sqnr_db, 2) == 20.0 and close.agreement.top1 == 1.0
    assert negated.accuracy is not None and negated.accuracy.value == 0.0 and negated.accuracy.samples == 5
    assert refused.failure == "load: The file is not of this version." and refused.agreement is None


@pytest.mark.parametrize(
    ("names", "answers", "error"),
    [("ba", (2 * X, X), 0), ("ba", (X, 2 * X), 1), ("cd", (X, 2 * X), 0), ("aa", (X, 2 * X), 0), ("", (X, 2 * X), 0)],
)
def test_outputs_go_by_their_names_where_both_files_have_the_same(
    names: str, answers: Sequence[np.ndarray], error: float
) -> None:
    first, other = subjects = [
        Subject(
            each, "", Artifact("t", Path("f"), (), tuple(TensorSpec(n, (3, 3), "float32") for n in each), "", "", 0, "")
        )
        for each in ("ab", names)
    ]
    sessions: list[Any] = [
        SimpleNamespace(
            artifact=subject.artifact, failure=None, outputs_of=lambda _, numbers, found=found: [list(found)]
        )
        for subject, found in zip(subjects, ((X, 2 * X), answers), strict=True)
    ]
    _, quality = judge(sessions, [([X], None)])
    assert quality.agreement is not None and quality.agreement.max_abs_error == error
    assert ("by their places" in other_outputs(first, other)) is (names in ("cd", "aa"))


def test_batches_are_asked_for_together_and_judged_one_by_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small file asking takes longer than running; the first batch is alone, for its outputs have a digest."""
    sizes, draws = [1, 3, 2, 1, 1, 5, 1, 2, 1], np.random.default_rng(0)
    batches = [draws.standard_normal((size, 3)).astype(np.float32) for size in sizes]
    found, groups, ask = [], list[int](), Session.outputs_of

    def outputs_of(session: Session, asked: Sequence[Any], **said: Any) -> list[list[np.ndarray]]:
        groups.append(len(asked))
        return ask(session, asked, **said)

    monkeypatch.setattr(Session, "outputs_of", outputs_of)
    monkeypatch.setattr(quality, "_SHORT_S", 1e9)
    for most in (4, 1):
        monkeypatch.setattr(quality, "_MOST_TOGETHER", most)
        with Fleet([make(), make(factor=1.01)]) as fleet:
            found.append(judge(fleet, [([batch], batch.argmax(1)) for batch in batches]))
    assert groups[::2] == [1, 2, 4, 2] + [1] * len(sizes) == groups[1::2]
    for together, apart in zip(*found, strict=True):
        assert replace(together, seconds=0.0) == replace(apart, seconds=0.0) and together.samples == sum(sizes)


def test_without_labels_there_is_no_accuracy(make: Make) -> None:
    with Fleet([make(), make(factor=2.0)]) as fleet:
        original, other = judge(fleet, [([X], None)])
    assert original.accuracy is None and other.accuracy is None
    assert other.agreement is not None and other.agreement.max_abs_error == 1.0


def test_noise_does_not_count_for_a_file_that_rounds(make: Make) -> None:
    rounded = replace(make(factor=0.9), precision="int8")
    with Fleet([make(), rounded, make(factor=0.9), replace(make(), precision="int8")]) as fleet:
        _, noisy, plain, equal = judge(fleet, [([X], None)], noise=True)
        assert noisy.agreement is not None and not noisy.agreement.judged
        assert all(found.agreement is not None and found.agreement.judged for found in (plain, equal))
    with Fleet([make(), rounded, make(factor=0.9)]) as fleet:
        _, once, both = judge(fleet, [([X], LABELS)], more_noise=[([100 * X], None)])
    assert once.agreement is not None and once.agreement.judged and round(once.agreement.max_abs_error, 2) == 0.1
    assert both.agreement is not None and round(both.agreement.max_abs_error, 2) == 10.0


@pytest.mark.parametrize("noise", [False, True])
def test_a_file_that_rounds_answers_the_same_samples_alike_in_any_batch(make: Make, *, noise: bool) -> None:
    again = [Question([np.tile(X, (size, 1))], again=3 * size) for size in (1, 2)]
    files = [make(), *(replace(make(factor=0.9, **said), precision="int8") for said in ({}, {"negates_from": 6}))]
    with Fleet([*files, make(negates_from=6)]) as fleet:
        _, alike, apart, plain = judge(fleet, [([X], None)], noise=noise, again=again)
    assert alike.agreement is not None and round(alike.agreement.sqnr_db) == 20 and not alike.agreement.batches
    assert alike.agreement.judged is not noise and not alike.agreement.differing_batches
    assert apart.agreement is not None and apart.agreement.judged and round(apart.agreement.sqnr_db) == -6
    assert apart.agreement.differing_batches == (
        "It answers the same samples otherwise in batches of other sizes: 3 (20.0 dB), 6 (-6.0 dB). "
        "Keep to a batch that it is right at (--static-batch), or take another file."
    )
    assert plain.agreement is not None and plain.agreement.max_abs_error == 0  # is held against more noise


def test_every_file_must_answer_to_more_noise(make: Make) -> None:
    with Fleet([make(), replace(make(dies_at=2), precision="int8")]) as fleet:
        _, other = judge(fleet, [([X], LABELS)], more_noise=[([X], None)])
    assert other.failure is not None and "SIGABRT" in other.failure


def test_outputs_that_are_not_finite_fail_the_artifact_only(make: Make) -> None:
    with Fleet([make(), make(factor=float("nan")), make()]) as fleet:
        _, broken, sound = judge(fleet, [([X], LABELS), ([X], LABELS)])
    assert broken.failure == "Output 0 of the artifact is not finite where the original's is."
    assert sound.failure is None and sound.agreement is not None


def test_a_dead_baseline_fails_everybody_with_its_reason(make: Make) -> None:
    with Fleet([make(dies_at=1), make()]) as fleet:
        original, other = judge(fleet, [([X], LABELS)])
    assert original.failure == "run: the worker was killed by SIGABRT"
    assert other.failure == f"the baseline could not be run: {original.failure}"


@NEEDS_QEMU
@pytest.mark.slow
def test_files_are_judged_on_an_emulated_processor_beside_this_one(make: Make) -> None:
    batches = [([X], LABELS)] * 9
    close, dead = judge_elsewhere(["avx2", "sse4"], [make(), make(factor=0.9), make(dies_at=1)], batches)
    assert list(close) == list(dead) == ["here", "avx2", "sse4"]
    assert {found.agreement and round(found.agreement.sqnr_db, 2) for found in close.values()} == {20.0}
    assert all("SIGABRT" in (found.failure or "") for found in dead.values())
    with pytest.raises(Refused, match="does not run here"):
        judge_elsewhere(["avx2"], [make(dies_at=1), make()], batches)


@pytest.mark.parametrize(
    "again", [[2 * np.ones((2, 3)), np.ones(4)], [np.ones((2, 3)), np.full(4, np.nan)], [np.ones((2, 3)), np.ones(5)]]
)
def test_no_output_answers_otherwise_behind_the_others(again: list[np.ndarray]) -> None:
    """One that had another shape, or was not finite, ended the comparison behind outputs that were the same."""
    before, now = [np.ones((2, 3)), np.ones(4)], list(again)
    session = cast(Session, SimpleNamespace(outputs=lambda inputs, numbers: now, place=1))
    with pytest.raises(WorkerFailed, match=UNSTEADY):
        require_steady(session, [], before)
    now[:] = before
    require_steady(session, [], before)
    now[:] = before[:0]
    require_steady(session, [], [])


def test_the_time_for_judging_begins_when_the_data_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that took long to encode left time for one batch of them."""
    now_s = [0.0]

    def read(*given: object, **more: object) -> Iterator[Arrays]:
        for took_s in (100.0, 1.0, 1.0, 1.0, 1.0):
            now_s[0] += took_s
            yield [np.ones((1, 3))], None

    monkeypatch.setattr(feed, "read", read)
    monkeypatch.setattr(feed, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    asked = feed.Asked((TensorSpec("x", ("batch", 3), "float32"),))
    assert len(list(asked.judged(seconds=2.5))) == 3 and len(list(asked.judged(seconds=0.5))) == 1


def test_few_samples_are_run_on_an_emulated_processor() -> None:
    assert [question.labels for question in quality._few([([X], LABELS)] * 9)] == [None] * 3


def test_a_file_of_somebody_else_is_not_run_where_it_cannot_be_confined(make: Make) -> None:
    with pytest.raises(Refused, match="--trust"):
        judge_elsewhere(["avx2"], [make(), replace(make(), untrusted=True)], [([X], None)])
