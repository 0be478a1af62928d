"""Baseline files: the file counts, numbers of this machine warn, numbers of another one are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optimize.errors import OptimizeError, Refused, UsageError
from optimize.gate import baseline, suite
from optimize.gate import case as cases
from optimize.gate.limits import Case, Settings
from optimize.gate.record import CaseRecord, Record
from optimize.gate.verdict import Verdict
from optimize.measure import environment
from optimize.measure.openers import Opening
from tests.gate.records import RECORD
from tests.gate.streams import draw

Models = Callable[..., None]


@pytest.fixture
def judged(tmp_path: Path, models: Models, monkeypatch: pytest.MonkeyPatch) -> Record:
    """A check that passed, of two files that do the same."""
    models(base={}, candidate={})
    monkeypatch.setattr(cases, "measure", lambda *args: draw(1.0))
    return suite.check(Settings(cases=(Case(base="base", candidate="candidate"),)))


def against(path: Path, **asked: Any) -> CaseRecord:
    case = Case(base=str(path), candidate="candidate", **asked)
    return cases.check(case, Settings(cases=(case,)), Opening(path.parent))


def edited(stored: Path, **changes: object) -> Path:
    content = {**json.loads(stored.read_text()), **changes}
    other = stored.with_name("edited.json")
    other.write_text(json.dumps(content))
    return other


def test_what_is_stored(judged: Record, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "base.json"
    stored = baseline.save(judged, path)
    assert baseline.read(path) == stored
    assert judged.cases[0].candidate is not None
    assert (path.parent / stored.path).resolve() == Path(judged.cases[0].candidate.source).resolve()
    assert stored.sha256 == judged.cases[0].candidate.sha256 and stored.input_digest == judged.cases[0].input_digest
    assert len(stored.raw["restarts"]) == 3 and stored.verdict is Verdict.PASS
    assert stored.fingerprint == baseline.fingerprint(environment.current())


def test_numbers_of_this_machine_warn_and_never_fail(judged: Record, tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    stored = baseline.save(judged, path)
    for median_s in (stored.median_s / 10, stored.median_s):
        found = against(edited(path, path="gone.onnx", median_s=median_s))
        assert found.verdict is Verdict.WARN and "no verdict" in found.reason
        assert any("is gone" in warning for warning in found.warnings)
        assert found.base is None and found.candidate is not None and found.time is None
    assert suite.of(Settings(), (found,), environment.current(), command="").exit_code == 0


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


def test_runs_of_no_time_are_no_baseline(judged: Record, tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    baseline.save(judged, path)
    found = against(edited(path, path="gone.onnx", median_s=0.0))
    assert found.verdict is Verdict.NOT_COMPARABLE and "not a baseline" in found.reason


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
    found = against(edited(path, fingerprint={**stored.fingerprint, "instruction sets": "amx_int8"}))
    assert found.verdict is Verdict.PASS and any("of the kind 'amx'" in warning for warning in found.warnings)


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
