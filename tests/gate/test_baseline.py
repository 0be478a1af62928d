"""Baseline files: the file counts, numbers of this machine warn, numbers of another one are refused."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimize.errors import OptimizeError, Refused, UsageError
from optimize.gate import baseline, suite
from optimize.gate import case as cases
from optimize.gate.limits import Case, Growth, Settings
from optimize.gate.record import CaseRecord, Record
from optimize.gate.verdict import Verdict
from optimize.measure import environment
from optimize.measure.openers import Opening
from optimize.processor import host
from optimize.targets.arrays import digest
from tests.gate.conftest import name
from tests.gate.records import RECORD
from tests.gate.streams import draw
from tests.measure.conftest import making

Models = Callable[..., None]
Gone = Callable[..., Path]
#: Samples of a run: a process is asked for the answers to so many at once.
BATCH = 48
#: An accuracy as it is stored.
TOP1 = {
    "metric": "top1",
    "value": 0.9,
    "base": 0.9,
    "samples": 480,
    "drop": 0.0,
    "difference_low": -0.01,
    "difference_high": 0.01,
}


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """A check that passed, of two files that do the same."""
    with making(tmp_path_factory.mktemp("passed")) as make, pytest.MonkeyPatch.context() as patch:
        name(make, patch, base={}, candidate={})
        patch.setattr(cases, "measure", lambda *args: draw(1.0))
        return suite.check(Settings(cases=(Case(base="base", candidate="candidate", batch=BATCH),)))


@pytest.fixture
def judged(passed: Record, models: Models, monkeypatch: pytest.MonkeyPatch) -> Record:
    """A check that passed, and its candidate again."""
    models(base={}, candidate={})
    monkeypatch.setattr(cases, "measure", lambda *args: draw(1.0))
    return passed


def against(path: Path, **asked: Any) -> CaseRecord:
    case = Case(base=str(path), candidate="candidate", **{"batch": BATCH} | asked)
    return cases.check(case, Settings(cases=(case,)), Opening(path.parent))


@dataclass(frozen=True)
class Labelled:
    """Samples that a factor of one answers with themselves."""

    path: str
    x: np.ndarray
    digest: str


def labelled(folder: Path, count: int = 480, wrong: int | None = None) -> Labelled:
    """Write samples of which a factor of one gets so many wrong, a tenth where nobody says, the last ones."""
    x = np.random.default_rng(0).standard_normal((count, 3)).astype(np.float32)
    y, wrong = x.argmax(1), count // 10 if wrong is None else wrong
    y[count - wrong :] = x[count - wrong :].argmin(1)
    path = folder / f"{count}_{wrong}.npz"
    np.savez(path, x=x, y=y)
    return Labelled(str(path), x, digest([x[:BATCH]]))


def edited(stored: Path, **changes: object) -> Path:
    content = {**json.loads(stored.read_text()), **changes}
    other = stored.with_name("edited.json")
    other.write_text(json.dumps(content))
    return other


@pytest.mark.parametrize("is_link", [False, True])
def test_what_is_stored(judged: Record, is_link: bool, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "base.json"
    if is_link:
        (tmp_path / "far" / "away").mkdir(parents=True)
        path.parent.symlink_to(tmp_path / "far" / "away")
    stored = baseline.save(judged, path)
    assert baseline.read(path) == stored
    assert judged.cases[0].candidate is not None
    assert (path.parent / stored.path).resolve() == Path(judged.cases[0].candidate.source).resolve()
    assert stored.sha256 == judged.cases[0].candidate.sha256 and stored.input_digest == judged.cases[0].input_digest
    assert len(stored.raw["restarts"]) == 3 and stored.verdict is Verdict.PASS
    assert stored.fingerprint == baseline.fingerprint(environment.current())


@pytest.fixture
def gone(judged: Record, tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that makes a baseline whose file is gone, of a network that was right on 90 % of 480."""
    path, labels = tmp_path / "base.json", labelled(tmp_path)
    baseline.save(judged, path)
    content = {"path": "gone.onnx", "accuracy": TOP1, "input_digest": labels.digest, "seed": 0}
    return lambda **changes: edited(path, **(content | changes))


def test_numbers_of_this_machine_warn_and_never_fail(gone: Gone, tmp_path: Path) -> None:
    labels = labelled(tmp_path).path
    for median_s in (0.0004, 0.004):
        found = against(gone(median_s=median_s), eval=labels, min_accuracy=85)
        assert found.verdict is Verdict.WARN and "no verdict" in found.reason
        assert any("is gone" in warning for warning in found.warnings)
        assert found.base is None and found.candidate is not None and found.time is None
    assert suite.of(Settings(), (found,), environment.current(), command="").exit_code == 0


def test_the_accuracy_that_is_stored_fails_a_worse_candidate(gone: Gone, tmp_path: Path) -> None:
    worse, same = (labelled(tmp_path, wrong=wrong).path for wrong in (80, 48))
    found = against(gone(), eval=worse, max_drop=0.5)
    assert found.verdict is Verdict.FAIL and found.time is None and found.candidate is not None
    assert found.reason.startswith("top1 −6.67 points [−1") and found.reason.endswith("asked: at most 0.5 points lost")
    assert found.accuracy is not None and (found.accuracy.base, found.sqnr_db) == (0.9, None)
    assert any("as of other samples" in warning for warning in found.warnings)
    found = against(gone(), eval=same, max_drop=0.5)
    assert found.verdict is Verdict.INCONCLUSIVE and "cannot be told with 480 labels" in found.reason
    found = against(gone(), eval=same, max_drop=3)
    assert found.verdict is Verdict.WARN and [entry.metric for entry in found.findings] == ["accuracy", "time"]


def test_accuracy_that_is_not_stored_is_not_judged(gone: Gone, tmp_path: Path) -> None:
    labels = labelled(tmp_path).path
    for accuracy, why in (
        (None, "the baseline stores no accuracy"),
        (TOP1 | {"samples": 479}, "the baseline stores top1 of 479 samples, asked is top1 of 480"),
        (TOP1 | {"metric": "top5"}, "the baseline stores top5 of 480 samples, asked is top1 of 480"),
    ):
        base = gone(accuracy=accuracy)
        found = against(base, eval=labels)
        assert found.verdict is Verdict.INCONCLUSIVE and found.accuracy is None
        assert found.reason == f"not judged without the base's file: accuracy, asked: at most 1 point lost; {why}"
    found = against(base, eval=labels, max_drop=0.5, min_accuracy=95)
    assert found.verdict is Verdict.FAIL and found.reason == "top1 90.00 %, asked: top1 at least 95.00 %"
    assert against(base, eval=labels, min_accuracy=85).verdict is Verdict.WARN  # nothing else was asked


def test_a_metric_without_an_interval_of_its_own_is_not_judged(gone: Gone, tmp_path: Path) -> None:
    path, x = tmp_path / "pairs.npz", labelled(tmp_path).x
    np.savez(path, x=x, y=x)
    base = gone(accuracy=TOP1 | {"metric": "mae", "value": 0.0, "unit": ""})
    found = against(base, eval=str(path), metric="mae", max_drop=0.1)
    assert found.verdict is Verdict.INCONCLUSIVE and "the stored figure of mae has no interval" in found.reason
    found = against(base, data=str(path), metric="cosine")
    assert found.verdict is Verdict.INCONCLUSIVE and "cosine is told beside the base's outputs" in found.reason


def test_limits_of_the_candidate_alone_are_judged(gone: Gone, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"eval": labelled(tmp_path).path, "min_accuracy": 85}
    limits: list[dict[str, tuple[dict[str, Any], str]]] = [
        {
            "latency": ({"max_latency": 0.003}, "3.00 ms are allowed"),
            "size": ({"max_size": Growth(size_bytes=1)}, "1 B are allowed"),
        },
        {
            "throughput": ({"min_throughput": 20_000}, "20000 are asked for"),
            "memory": ({"max_memory": Growth(size_bytes=60e6)}, "60.0 MB are allowed"),
        },
    ]
    for two in limits:
        given = {key: value for limit, _ in two.values() for key, value in limit.items()}
        found = against(gone(), **asked, **given)
        verdicts = {entry.metric: entry.verdict.value for entry in found.findings}
        failed = {metric for metric, verdict in verdicts.items() if verdict == "fail"}
        assert found.verdict is Verdict.FAIL and failed == set(two) and verdicts["time"] == "warn"
        reasons = {entry.metric: entry.reason for entry in found.findings}
        for metric, (_, reason) in two.items():
            assert reasons[metric].endswith(reason) and reasons[metric] in found.reason, found.reason
    kept = {"max_latency": 0.005, "max_size": Growth(size_bytes=9), "max_memory": Growth(size_bytes=80e6)}
    found = against(gone(), **asked, **kept)
    assert found.verdict is Verdict.WARN and found.reason.endswith("which is no verdict")
    assert suite.of(Settings(), (found,), environment.current(), command="").exit_code == 0


def test_size_is_held_against_the_one_that_is_stored(gone: Gone, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"eval": labelled(tmp_path).path, "min_accuracy": 85, "max_size": Growth(share=0.1)}
    assert against(gone(), **asked).verdict is Verdict.WARN
    assert against(gone(size_bytes=1), **asked).reason == "the file takes 2 B; 1 B are allowed"


def test_where_there_are_neither_samples_nor_the_file_outputs_are_a_warning(gone: Gone, judged: Record) -> None:
    """The candidate is timed on the noise that the base was."""
    found = against(gone(input_digest=judged.cases[0].input_digest, seed=judged.cases[0].seed))
    assert found.verdict is Verdict.WARN and found.seed == judged.cases[0].seed
    assert "Outputs are not judged: there are neither samples nor the base's file." in found.warnings


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({}, "outputs, asked: at least 20 dB"),
        ({"min_sqnr": 30}, "outputs, asked: at least 30 dB"),
        ({"max_memory": Growth(share=0.1)}, "memory, asked: at most 10 % more"),
        ({"verify_on": ("avx2",)}, "outputs on avx2, asked: the base's outputs"),
    ],
)
def test_what_needs_the_file_is_named_and_inconclusive(
    asked: dict[str, Any], what: str, gone: Gone, tmp_path: Path
) -> None:
    labels = labelled(tmp_path)
    answers = {"eval": labels.path, "min_accuracy": 85} if asked else {"data": labels.path}
    found = against(gone(), **answers, **asked)
    assert found.verdict is Verdict.INCONCLUSIVE and found.reason == f"not judged without the base's file: {what}"
    assert [entry.found for entry in found.findings if entry.verdict is Verdict.INCONCLUSIVE] == ["–"]
    for choice, code in (("keep", 3), ("pass", 0), ("fail", 1)):
        settings = Settings(on_inconclusive=choice)  # type: ignore[arg-type]
        assert suite.of(settings, (found,), environment.current(), command="").exit_code == code


def test_a_candidate_that_crashes_alone_fails(gone: Gone, tmp_path: Path, models: Models) -> None:
    models(candidate={"dies_at": 1})
    found = against(gone(), eval=labelled(tmp_path).path)
    assert found.verdict is Verdict.FAIL and found.reason.startswith("the candidate does not run: ")


def test_numbers_of_another_machine_are_refused(judged: Record, tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    stored = baseline.save(judged, path)
    other = {**stored.fingerprint, "processor": "another"}
    found = against(edited(path, path="gone.onnx", fingerprint=other, median_s=1e-9))
    assert found.verdict is Verdict.NOT_COMPARABLE and "another machine (another processor)" in found.reason


def test_numbers_taken_otherwise_are_refused(judged: Record, tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    baseline.save(judged, path)
    gone = edited(path, path="gone.onnx")
    found = against(gone, batch=2)
    assert found.verdict is Verdict.NOT_COMPARABLE and "other batch, inputs" in found.reason


@pytest.mark.parametrize("odd", [{"median_s": 0.0}, {"seed": -1}, {"seed": 2**32}, {"schema_version": 2}], ids=str)
def test_numbers_that_nobody_stores_are_no_baseline(odd: dict[str, float], judged: Record, tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    baseline.save(judged, path)
    found = against(edited(path, path="gone.onnx", **odd))
    assert found.verdict is Verdict.NOT_COMPARABLE and "not a baseline" in found.reason


@pytest.mark.parametrize("value", ["NaN", "Infinity", -0.5, 7])
def test_a_share_that_is_none_is_compared_with_nothing(value: object, gone: Gone, tmp_path: Path) -> None:
    found = against(gone(accuracy={**TOP1, "value": value}), eval=labelled(tmp_path).path, max_drop=3)
    verdict, reason = Verdict.NOT_COMPARABLE, "is not a baseline"
    if not isinstance(value, str):
        verdict, reason = Verdict.INCONCLUSIVE, f"the baseline stores {value} as a share of samples"
    assert found.verdict is verdict and reason in found.reason


def test_a_name_that_no_file_has_keeps_no_other_case_from_being_judged(judged: Record, tmp_path: Path) -> None:
    baseline.save(judged, path := tmp_path / "base.json")
    found = against(edited(path, path="x" * 5000))
    assert found.verdict is Verdict.NOT_COMPARABLE and "File name too long" in found.reason


def test_a_changed_file_is_refused(judged: Record, tmp_path: Path, models: Models) -> None:
    path = tmp_path / "base.json"
    stored = baseline.save(judged, path)
    file = str(tmp_path / stored.path)
    models(**{file: {}, "candidate": {}})
    assert against(path).verdict is Verdict.PASS  # the file is at hand: measured beside the candidate
    models(**{file: {"factor": 2.0}, "candidate": {}})
    found = against(path)
    assert found.verdict is Verdict.NOT_COMPARABLE and "is not the file" in found.reason


def test_a_baseline_of_another_kind_of_processor_is_warned_of(judged: Record, tmp_path: Path, models: Models) -> None:
    path = tmp_path / "base.json"
    stored = baseline.save(judged, path)
    models(**{str(tmp_path / stored.path): {}, "candidate": {}})
    assert not any("of the kind" in warning for warning in against(path).warnings)
    other, sets = ("avx2", "avx2") if host().level == "amx" else ("amx", "amx_int8")
    found = against(edited(path, fingerprint={**stored.fingerprint, "instruction sets": sets}))
    assert found.verdict is Verdict.PASS and any(f"of the kind '{other}'" in warning for warning in found.warnings)


def test_what_is_not_stored(judged: Record, tmp_path: Path) -> None:
    failed = judged.cases[0].model_copy(update={"verdict": Verdict.FAIL, "reason": "too slow"})
    bad: list[tuple[Record, type[OptimizeError], str]] = [
        (judged.model_copy(update={"cases": (failed,)}), Refused, "too slow"),
        (RECORD, UsageError, "had 4 cases"),
    ]
    for record, kind, message in bad:
        with pytest.raises(kind, match=message):
            baseline.save(record, tmp_path / "base.json")
    assert list(tmp_path.glob("*base*")) == []


def test_files_that_are_no_baselines(tmp_path: Path) -> None:
    found = against(tmp_path / "none.json")
    assert found.verdict is Verdict.NOT_COMPARABLE and "cannot be read" in found.reason
    (tmp_path / "other.json").write_text("{}")
    found = against(tmp_path / "other.json")
    assert found.verdict is Verdict.NOT_COMPARABLE and "not a baseline of version 1" in found.reason
