"""From two files to a verdict: answers come first, and whatever goes wrong has a verdict of its own."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimize import processor
from optimize.errors import Refused
from optimize.gate import case as cases
from optimize.gate import findings, suite, wording
from optimize.gate.limits import Case, Growth, Settings
from optimize.gate.record import CaseRecord
from optimize.gate.verdict import Verdict
from optimize.measure import environment
from optimize.measure.accuracy import Accuracy, AccuracyMeter
from optimize.measure.agreement import Agreement
from optimize.measure.feed import JUDGED_NOISE
from optimize.measure.fleet import Fleet, WorkerFailed
from optimize.measure.openers import Opening
from optimize.measure.quality import Batch, Quality
from optimize.measure.subjects import Subject
from optimize.measure.worker import UNSTEADY
from optimize.processor import described
from optimize.targets.base import TensorSpec
from tests.cpus import NEEDS_QEMU
from tests.gate.streams import draw

Models = Callable[..., None]


@pytest.fixture
def saying(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that lets the files of ``models`` say something else of themselves."""

    def say(**files: dict[str, Any]) -> None:
        opened = cases.open_model

        def labelled(source: str, opening: Opening, input_shape: str | None) -> Subject:
            subject = opened(source, opening, input_shape)
            return replace(subject, artifact=replace(subject.artifact, **files.get(source, {})))

        monkeypatch.setattr(cases, "open_model", labelled)

    return say


@pytest.fixture
def made_for(saying: Models) -> Callable[..., None]:
    """Returns a function that lets the files of ``models`` say what their integers were made for."""
    return lambda **cpus: saying(**{name: {"cpu": cpu, "precision": "int8"} for name, cpu in cpus.items()})


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that puts a drawn trace in the place of measuring."""
    return lambda *given, **stream: monkeypatch.setattr(cases, "measure", lambda *args: draw(*given, **stream))


def check(tmp_path: Path, candidate: str = "candidate", **asked: object) -> CaseRecord:
    case = Case(base="base", candidate=candidate, **asked)  # type: ignore[arg-type]
    return cases.check(case, Settings(cases=(case,)), Opening(tmp_path))


def test_a_file_that_is_refused_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, opening: Opening, input_shape: str | None) -> Subject:
        raise Refused(f"'{source}' does not fit {opening.factory}.", hint="Add --trust.")

    monkeypatch.setattr(cases, "open_model", refuse)
    found = check(tmp_path, model="nets:Net")
    assert found.verdict is Verdict.NOT_COMPARABLE and found.reason == "'base' does not fit nets:Net. Add --trust"


def test_equal_answers_in_equal_time_pass(tmp_path: Path, models: Models, measured: Models) -> None:
    models(base={}, candidate={})
    measured(1.0)
    found = check(tmp_path)
    assert found.verdict is Verdict.PASS and "beyond doubt" in found.reason
    assert found.sqnr_db == 200.0 and found.base and found.candidate
    assert found.base.output_digest == found.candidate.output_digest
    assert [finding.metric for finding in found.findings] == ["outputs", "time"]
    assert found.time and found.time.rounds == 30 and len(found.trace().rounds) == 30
    assert any("noise" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("asked", "level", "is_told"), [({}, 19.9, True), ({}, 20.0, False), ({"min_sqnr": 9}, 9, False)]
)
def test_outputs_that_no_label_may_speak_of_are_named(asked: dict[str, Any], level: float, is_told: bool) -> None:
    """A file whose second output was the base's negated passed without a word of it: top-1 reads the first."""
    agreement = Agreement(3.0, 1.0, None, outputs={"logits": 3.0, "embedding": level, "mask": 60.0})
    found = Quality(agreement, Accuracy("top1", 0.9, 0.9, 1000))
    told = "Labels may say nothing of outputs that are others than the base's: 'embedding' 19.9 dB."
    assert findings.beside_labels(Case(base="a", candidate="b", eval="x.npz", **asked), found) == told * is_told
    assert not findings.beside_labels(Case(base="a", candidate="b", **asked), replace(found, accuracy=None))


def test_a_wrong_model_fails_before_anybody_looks_at_a_clock(
    tmp_path: Path, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("timed")

    monkeypatch.setattr(cases, "measure", never)
    models(base={}, candidate={"factor": 1.5})
    found = check(tmp_path)
    assert found.verdict is Verdict.FAIL and found.time is None
    assert found.reason == "the outputs agree to 6.0 dB, asked: at least 20 dB"
    assert check(tmp_path, min_sqnr=30).findings[0].limit == "at least 30 dB"


@pytest.mark.parametrize(("side", "verdict"), [("candidate", Verdict.FAIL), ("base", Verdict.NOT_COMPARABLE)])
def test_a_file_that_keeps_a_state_is_seen_once_it_was_timed(
    side: str, verdict: Verdict, tmp_path: Path, models: Models
) -> None:
    models(**{"base": {}, "candidate": {}, side: {"forgets_at": JUDGED_NOISE + 20}})
    found = check(tmp_path, max_seconds=5.0)
    assert found.verdict is verdict
    assert found.reason == f"the {side} {UNSTEADY}"


@pytest.mark.parametrize("slower, verdict", [(0.0, Verdict.INCONCLUSIVE), (float("inf"), Verdict.PASS)])
def test_samples_that_there_was_no_time_for_are_told(
    slower: float, verdict: Verdict, tmp_path: Path, models: Models, measured: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slow sample kept the others from being judged, and the wrong answers to them passed."""
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((300, 3)).astype(np.float32))
    monkeypatch.setattr(cases, "MOST_SLOWER", slower)
    monkeypatch.setattr(cases, "JUDGED_SHARE", 1e3)  # however busy the machine is
    measured(1.0)
    models(base={}, candidate={})
    whole = check(tmp_path, data=str(tmp_path / "x.npy"), batch=32)
    assert whole.verdict is Verdict.PASS and (whole.samples, whole.given) == (256, 300)
    assert "Outputs were compared on 256 of 300 samples." in whole.warnings
    monkeypatch.setattr(cases, "JUDGED_SHARE", -1.0)
    found = check(tmp_path, data=str(tmp_path / "x.npy"), batch=32)
    assert found.verdict is verdict and (found.samples, found.given) == (32, 300)
    assert "Outputs were compared on 32 of 300 samples: the time for more was over." in found.warnings
    assert ("which the candidate took" in found.reason) == (verdict is Verdict.INCONCLUSIVE)


@pytest.mark.parametrize(
    ("data", "said", "verdict"), [("", None, "inconclusive"), ("x.npy", None, "pass"), ("", "3", "pass")]
)
def test_a_candidate_does_not_choose_what_both_are_judged_at(
    data: str, said: str | None, verdict: str, tmp_path: Path, models: Models, measured: Models, saying: Models
) -> None:
    """Of one pixel a network is easily right."""
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32))
    measured(1.0)
    models(base={}, candidate={})
    saying(base={"inputs": (TensorSpec("x", ("batch", "n"), "float32"),)})
    found = check(tmp_path, data=str(tmp_path / data) if data else None, input_shape=said)
    assert found.verdict == verdict and ("x float32[batch, 3]" in "".join(found.warnings)) is (said is None)
    assert ("at sizes that only the candidate says: give --input-shape" in found.reason) is (verdict != "pass")


def test_answers_that_are_the_same_to_everything_pass_nothing(tmp_path: Path, models: Models, measured: Models) -> None:
    """A file that lost its weights answers zeros where the base happens to answer them, too."""
    models(base={"factor": 0.0}, candidate={"factor": 0.0})
    measured(1.0)
    found = check(tmp_path)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.reason.endswith("equal, asked: at least 20 dB; compared where 'x' was the same for all samples")


def test_outputs_that_are_not_finite_are_wrong(tmp_path: Path, models: Models) -> None:
    models(base={}, candidate={"factor": float("inf")})
    found = check(tmp_path)
    assert found.verdict is Verdict.FAIL and "wrong outputs" in found.reason and "not finite" in found.reason


def test_accuracy_decides_where_there_are_labels(tmp_path: Path, models: Models, measured: Models) -> None:
    x = np.random.default_rng(0).standard_normal((200, 3)).astype(np.float32)
    np.savez(tmp_path / "eval.npz", x=x, y=x.argmax(1))
    measured(0.5)
    models(base={}, candidate={"factor": 3.0}, wrong={"factor": -1.0})
    found = check(tmp_path, eval=str(tmp_path / "eval.npz"))
    assert found.verdict is Verdict.PASS and found.accuracy and found.accuracy.drop == 0.0  # far apart, equally right
    found = check(tmp_path, "wrong", eval=str(tmp_path / "eval.npz"), max_drop=2.0)
    assert found.verdict is Verdict.FAIL and found.reason.startswith("top1 −100.00 points [−100.00, ")
    assert found.reason.endswith("], asked: at most 2 points lost")
    assert found.time is None


@pytest.mark.parametrize("given", ["eval", "data", "data eval"])
def test_outputs_are_compared_on_the_samples_that_are_given_for_them(
    given: str, tmp_path: Path, models: Models, measured: Models
) -> None:
    """Labelled pictures may be tame where the others are not."""
    x = np.random.default_rng(0).uniform(-1, 1, (100, 3)).astype(np.float32)
    np.savez(tmp_path / "eval.npz", x=x, y=x.argmax(1))
    np.savez(tmp_path / "data.npz", x=40 * x)
    measured(1.0)
    models(base={}, candidate={"clips": 3.0})
    found = check(tmp_path, min_sqnr=30, **{name: str(tmp_path / f"{name}.npz") for name in given.split()})
    assert found.verdict is (Verdict.FAIL if "data" in given else Verdict.PASS)
    assert (found.accuracy.samples if found.accuracy else 0) == (100 if "eval" in given else 0)


@pytest.mark.parametrize(("wrong", "verdict"), [(2, "inconclusive"), (30, "fail"), (0, "pass")])
def test_points_that_few_labels_cannot_tell_are_inconclusive(
    wrong: int, verdict: str, tmp_path: Path, models: Models, measured: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 180 pictures is half a point: two of them fail no build, and pass none."""
    real = cases.judge

    def judge(*given: Any, **asked: Any) -> object:
        base, found = real(*given, **asked)
        meter, labels = AccuracyMeter(), np.arange(180) % 2
        answers = np.eye(2)[labels ^ (np.arange(180) < wrong)]
        meter.update({"y": np.eye(2)[labels]}, {"y": answers}, labels)
        return base, replace(found, accuracy=meter.result())

    monkeypatch.setattr(cases, "judge", judge)
    np.savez(tmp_path / "eval.npz", x=np.eye(3, dtype=np.float32), y=np.arange(3))
    measured(1.0)
    models(base={}, candidate={})
    found = check(tmp_path, eval=str(tmp_path / "eval.npz"))
    (accuracy,) = [entry for entry in found.findings if entry.metric == "accuracy"]
    assert found.verdict is accuracy.verdict is Verdict(verdict) and "points [" in accuracy.found
    if verdict == "inconclusive":
        assert "cannot be told with 180 labels: give about" in found.reason
        assert suite.of(Settings(), (found,), environment.current(), command="").exit_code == 3


@pytest.mark.parametrize("data", [False, True])
def test_no_file_knows_what_it_is_timed_on(data: bool, tmp_path: Path, models: Models, measured: Models) -> None:
    """The noise was the same for everybody, and so was the first batch of data: a file could hold the answers."""
    measured(1.0)
    models(base={}, candidate={})
    np.save(tmp_path / "x.npy", np.arange(120, dtype=np.float32).reshape(40, 3))
    asked: dict[str, Any] = {"data": str(tmp_path / "x.npy"), "batch": 2} if data else {}
    drawn = [check(tmp_path, **asked) for _ in range(4)]
    assert len({found.seed for found in drawn}) == 4 and len({found.input_digest for found in drawn}) > 1
    again = check(tmp_path, **asked, seed=drawn[0].seed)
    assert (again.seed, again.input_digest) == (drawn[0].seed, drawn[0].input_digest)
    assert any(f"the seed {again.seed}, which --seed gives again" in line for line in wording.details(again))


def test_noise_judges_no_file_that_rounds(tmp_path: Path, models: Models, measured: Models, made_for: Models) -> None:
    measured(1.0)
    models(base={}, candidate={"factor": 2.0})
    made_for(candidate="any")
    found = check(tmp_path)
    assert found.verdict is Verdict.WARN and "not judged" in found.reason and found.time is not None
    assert check(tmp_path, min_sqnr=10).verdict is Verdict.INCONCLUSIVE
    np.save(tmp_path / "x.npy", np.ones((9, 3), np.float32))
    assert check(tmp_path, data=str(tmp_path / "x.npy")).verdict is Verdict.FAIL


def test_slower_fails_and_says_by_how_much(tmp_path: Path, models: Models, measured: Models) -> None:
    models(base={}, candidate={})
    measured(1.1)
    found = check(tmp_path)
    assert found.verdict is Verdict.FAIL and found.reason.startswith("+1") and ", beyond doubt more" in found.reason


def test_size_and_memory(tmp_path: Path, models: Models, measured: Models) -> None:
    models(base={}, candidate={"factor": 1.0})
    measured(1.0)
    found = check(tmp_path, max_size=Growth(share=0.1), max_memory=Growth(size_bytes=80e6))
    assert [(entry.metric, entry.verdict.value) for entry in found.findings] == [
        ("outputs", "pass"),
        ("size", "fail"),
        ("time", "pass"),
        ("memory", "pass"),
    ]
    assert found.verdict is Verdict.FAIL and found.reason == "the file takes 15 B; 2 B are allowed"
    found = check(tmp_path, max_memory=Growth(size_bytes=60e6))
    assert found.verdict is Verdict.FAIL and found.reason == "its process takes 70.0 MB; 60.0 MB are allowed"


def test_latency_and_throughput(tmp_path: Path, models: Models, measured: Models) -> None:
    models(base={}, candidate={})
    measured(1.0, run_s=0.004)
    assert check(tmp_path, max_latency=0.005).verdict is Verdict.PASS
    found = check(tmp_path, max_latency=0.003)
    assert found.verdict is Verdict.FAIL and "3.00 ms are allowed" in found.reason
    found = check(tmp_path, min_throughput=1000, batch=2)
    assert found.verdict is Verdict.FAIL and "1000 are asked for" in found.reason
    assert found.time and found.time.fail_at == 200  # time and throughput share alpha


def test_a_candidate_that_crashes_fails(tmp_path: Path, models: Models) -> None:
    models(base={}, candidate={"dies_at": JUDGED_NOISE + 1})
    found = check(tmp_path)
    assert found.verdict is Verdict.FAIL
    assert found.reason.startswith("the candidate does not run: ") and found.reason.endswith("killed by SIGABRT")
    assert found.sqnr_db == 200.0  # what was known before is kept


def test_a_base_that_crashes_says_nothing_of_the_candidate(tmp_path: Path, models: Models) -> None:
    models(base={"dies_at": 1}, candidate={})
    found = check(tmp_path)
    assert found.verdict is Verdict.NOT_COMPARABLE and found.reason.startswith("the base does not run: run:")


def test_files_that_cannot_be_opened_are_not_comparable(tmp_path: Path) -> None:
    found = check(tmp_path, str(tmp_path / "lost.onnx"))
    assert found.verdict is Verdict.NOT_COMPARABLE and "There is no file" in found.reason
    assert found.base is None and found.raw is None


def test_other_batches_and_inputs_are_not_comparable(tmp_path: Path, models: Models) -> None:
    models(base={}, candidate={})
    np.save(tmp_path / "x.npy", np.zeros((1, 3), np.float32))
    found = check(tmp_path, batch=4, data=str(tmp_path / "x.npy"))
    assert found.verdict is Verdict.NOT_COMPARABLE and "fewer samples" in found.reason


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("batch", [1, 4])
def test_files_are_judged_on_the_batch_that_is_timed(
    batch: int, labelled: bool, tmp_path: Path, models: Models, measured: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may answer one sample rightly, and of several all but the first wrongly."""
    models(base={}, candidate={})
    measured(1.0)
    path, real, seen = tmp_path / "x.npz", cases.judge, []

    def judge(fleet: Fleet, batches: Iterable[Batch], **asked: Any) -> object:
        seen.extend(batches)
        return real(fleet, seen, **asked)

    monkeypatch.setattr(cases, "judge", judge)
    np.savez(path, x=np.ones((8, 3), np.float32), y=np.zeros(8, np.int64))
    found = check(tmp_path, batch=batch, **{"eval" if labelled else "data": str(path)})
    assert found.batch == batch and {len(inputs[0]) for inputs, *_ in seen} == {batch}


def test_the_other_cases_of_a_suite_are_judged(
    models: Models, measured: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    models(base={}, good={}, bad={})
    measured(1.0)
    real = cases.judge

    def judge(fleet: Fleet, batches: Iterable[Batch], *, subjects: Sequence[Subject], **asked: Any) -> object:
        if subjects[1].kind == "arithmetic" and "1.json" in str(subjects[1].artifact.path):
            raise WorkerFailed("block: the worker was killed by SIGSEGV", place=1)
        return real(fleet, batches, subjects=subjects, **asked)

    monkeypatch.setattr(cases, "judge", judge)
    pairs = tuple(Case(base="base", candidate=name) for name in ("good", "bad"))
    record = suite.check(Settings(cases=pairs))
    assert [entry.verdict for entry in record.cases] == [Verdict.FAIL, Verdict.PASS]
    assert record.verdict is Verdict.FAIL and record.exit_code == 1
    times = [entry.time for entry in record.cases if entry.time]
    assert [entry.fail_at for entry in times] == [200.0]  # two cases share alpha


@pytest.mark.parametrize("side", ["base", "candidate"])
def test_what_answers_otherwise_on_this_processor_gets_no_verdict(
    tmp_path: Path, models: Models, made_for: Models, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models(base={}, candidate={})
    made_for(**{side: "vnni"})
    monkeypatch.setattr(processor, "host", lambda: described("flags : fpu avx2"))
    found = check(tmp_path)
    assert found.verdict is Verdict.NOT_COMPARABLE and found.sqnr_db is None and found.time is None
    assert found.reason.startswith(f"The {side}'s INT8 was made for vnni, and this processor lacks those")
    settings = Settings(on_inconclusive="pass")
    assert suite.of(settings, (found,), environment.current(), command="").exit_code == 4


def test_files_for_other_processors_are_warned_of(
    tmp_path: Path, models: Models, measured: Models, made_for: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    models(base={}, candidate={})
    measured(1.0)
    monkeypatch.setattr(processor, "host", lambda: described("flags : fpu avx2 avx_vnni"))
    for made, warned in ({"base": "vnni", "candidate": "any"}, True), ({"base": "any", "candidate": "any"}, False):
        made_for(**made)
        found = check(tmp_path)
        assert found.verdict is Verdict.PASS
        assert any("made for the processors 'vnni'" in warning for warning in found.warnings) is warned


@NEEDS_QEMU
def test_the_candidate_answers_on_other_processors_too(tmp_path: Path, models: Models, measured: Models) -> None:
    models(base={}, candidate={"factor": 0.9})
    measured(1.0)
    found = check(tmp_path, verify_on=("avx2",), min_sqnr=19)
    assert found.verdict is Verdict.PASS
    assert [entry.metric for entry in found.findings] == ["outputs", "outputs on avx2", "time"]
    found = check(tmp_path, verify_on=("avx2",), min_sqnr=21)
    x = np.random.default_rng(0).standard_normal((16, 3)).astype(np.float32)
    np.savez(tmp_path / "eval.npz", x=x, y=x.argmax(1))
    models(base={}, candidate={"factor": 3.0})
    labelled = check(tmp_path, verify_on=("avx2",), eval=str(tmp_path / "eval.npz"))
    assert labelled.verdict is Verdict.PASS and labelled.findings[1].limit == "at least -7 dB"
    assert found.verdict is Verdict.FAIL and found.reason.endswith(
        "on avx2 the outputs agree to 20.0 dB, asked: at least 21 dB"
    )


def test_labels_that_say_nothing_judge_nothing(tmp_path: Path, models: Models, measured: Models) -> None:
    measured(1.0)
    models(base={}, candidate={})
    void = np.full(9, -100)
    np.savez(tmp_path / "void.npz", x=np.ones((9, 3), np.float32), y=void)
    found = check(tmp_path, eval=str(tmp_path / "void.npz"))
    assert found.verdict in (Verdict.INCONCLUSIVE, Verdict.NOT_COMPARABLE), found.reason
