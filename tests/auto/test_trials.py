"""The front of what was tried, and the journal that a later search goes on from."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimize import sealing
from optimize.auto.choices import FileChoice
from optimize.auto.trials import FileTrial, Journal, Standing, front, near_front, outcomes
from optimize.measure.bound import BoundCheck
from tests.auto.test_choices import judged

CHOICE = FileChoice("onnx", "int8")
ROOM = [FileChoice("onnx", "float32"), CHOICE, FileChoice("openvino", "float16")]
FIGURES = st.tuples(st.floats(0.5, 20), st.floats(10, 60), st.integers(100, 10_000))


def tried(*figures: tuple[float, float, int]) -> list[FileTrial]:
    return [judged(CHOICE, number, *entry) for number, entry in enumerate(figures, 1)]


def standings_of(trials: list[FileTrial]) -> list[Standing]:
    return [found for trial in trials if (found := trial.standing) is not None]


@given(st.lists(FIGURES, min_size=1, max_size=12))
def test_none_of_the_front_is_beaten_and_all_others_are(entries: list[tuple[float, float, int]]) -> None:
    trials = tried(*entries)
    kept = front(trials)
    found = standings_of(kept)
    assert kept and found == sorted(found, key=lambda one: one.took)
    assert not any(a.is_no_worse(b) for a in found for b in found if a is not b)
    strictly = [
        trial
        for trial in trials
        if not any(
            other.took <= one.took and other.sqnr_db >= one.sqnr_db and other.size_bytes <= one.size_bytes
            for one in standings_of([trial])
            for other in standings_of(trials)
            if other != one
        )
    ]
    for best in standings_of(strictly):  # what nothing beats is on the front, or something equal to it is
        assert any(one.is_no_worse(best) for one in found)


def test_of_equals_the_first_stays() -> None:
    assert [trial.number for trial in front(tried((10.0, 40.0, 500), (10.05, 40.1, 505)))] == [1]
    assert [trial.number for trial in front(tried((10.0, 40.0, 500), (10.5, 40.0, 500)))] == [2]


def test_what_was_not_seen_side_by_side_may_be_on_the_front_within_a_tenth() -> None:
    trials = tried((10.0, 40.0, 500), (9.5, 40.0, 500), (8.0, 40.0, 500), (9.5, 35.0, 500), (3.0, 80.0, 900))
    assert [trial.number for trial in front(trials)] == [1, 5]
    assert [trial.number for trial in near_front(trials)] == [1, 5, 2, 4]


def test_answers_beyond_what_float_can_tell_are_equal() -> None:
    assert [trial.number for trial in front(tried((3.0, 120.0, 500), (2.0, 135.0, 500)))] == [1]


def test_what_misses_the_bound_or_was_not_judged_is_not_on_it() -> None:
    good, missing, unjudged = tried((5.0, 30.0, 500), (10.0, 20.0, 400), (20.0, 50.0, 300))
    assert missing.row is not None and unjudged.row is not None
    missed = BoundCheck("at least 25 dB", "20 dB", met=False)
    missing = missing.model_copy(update={"row": missing.row.model_copy(update={"bound": missed})})
    unjudged = unjudged.model_copy(update={"row": unjudged.row.model_copy(update={"agreement": None})})
    nothing = FileTrial(number=4, choice=CHOICE, at_s=4.0, took_s=0.1, why="no kernel.")
    trials = [good, missing, unjudged, nothing]
    assert front(trials) == [good]
    assert list(outcomes(trials, [good]).values()) == [
        "on the front",
        "misses at least 25 dB",
        "not judged",
        "no kernel.",
    ]


def journal_of(asked: object) -> Journal:
    return Journal(asked, ROOM)


def judged_and_kept(count: int) -> Journal:
    journal = journal_of("model")
    for trial, choice in zip(tried(*[(5.0, 30.0, 500)] * count), ROOM, strict=False):
        assert trial.row is not None
        row = trial.row.model_copy(update={"target": choice.target})
        journal.trials.append(trial.model_copy(update={"choice": choice, "row": row, "eager": row}))
    return journal


def test_a_journal_is_gone_on_from(tmp_path: Path) -> None:
    path, journal = tmp_path / "journal.jsonl", judged_and_kept(2)
    journal.write(path)
    again = journal_of("model")
    assert again.read(path) and again.trials == journal.trials and again.spent_s == 2.0
    other = journal_of("another")
    assert not other.read(path) and not other.trials
    assert not journal_of("model").read(tmp_path / "none")


def test_a_journal_that_came_with_a_folder_is_not(tmp_path: Path) -> None:
    """Its figures were measured by nobody here: the user has not sealed them, or for another file."""
    path = tmp_path / "journal.jsonl"
    judged_and_kept(2).write(path)
    shutil.copy(path, tmp_path / "packed")
    assert not journal_of("model").read(tmp_path / "packed")
    assert journal_of("model").read(tmp_path / "packed", trust=True)
    assert not journal_of("another").read(tmp_path / "packed", trust=True)
    os.rename(path, tmp_path / "moved")  # the folder was given another name
    assert journal_of("model").read(tmp_path / "moved")


@pytest.mark.parametrize("change", ["another's secret", "no secret", "other figures", "a line less"])
def test_a_journal_that_names_its_own_file_and_is_not_sealed_is_not(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a new file system everybody knows which inode a file will get."""
    path = tmp_path / "journal.jsonl"
    with monkeypatch.context() as patch:
        if change.endswith("secret"):
            patch.setattr(sealing, "_secret", lambda: bytes(32) if change == "another's secret" else None)
        judged_and_kept(2).write(path)
        assert journal_of("model").read(path) == (change != "no secret")
    text, inode = path.read_text(), path.stat().st_ino
    if change == "other figures":
        path.write_text(text.replace('"at_s":2.0', '"at_s":1.0'))
    elif change == "a line less":
        path.write_text("".join(text.splitlines(keepends=True)[:-1]))
    assert (path.read_text() == text) == change.endswith("secret") and path.stat().st_ino == inode
    assert json.loads(path.read_text().split("\n")[0])["file"] == inode
    assert not journal_of("model").read(path) and journal_of("model").read(path, trust=True)


def test_what_somebody_made_of_a_journal_is_left_from_there_on(tmp_path: Path) -> None:
    path, journal = tmp_path / "journal.jsonl", judged_and_kept(3)
    journal.write(path)
    head, first, second, third, _ = path.read_text().split("\n")
    path.write_text("\n".join([head, first, second[:-20], third]))
    again = journal_of("model")
    assert again.read(path, trust=True) and again.trials == journal.trials[:1]
    path.write_bytes(b"\xff\xfe\0" * 100)
    assert not journal_of("model").read(path, trust=True)


@pytest.mark.parametrize(
    "said",
    [
        {"number": 1},
        {"number": -5},
        {"number": 10**300},
        {"at_s": -1e300},
        {"took_s": 1e300},
        {"eager": None},
        {"choice": {"target": "onnx", "precision": "int8", "regain_db": 1e300}},
        {"choice": {"target": "onnx", "precision": "\x1b[31m"}},
        {"choice": {"target": ROOM[0].target, "precision": ROOM[0].precision}},
        {"choice": {"target": "torchscript", "precision": "float32"}},
    ],
)
def test_a_trial_that_no_search_has_is_none(said: dict[str, Any], tmp_path: Path) -> None:
    path, journal = tmp_path / "journal.jsonl", judged_and_kept(2)
    journal.write(path)
    head, first, second, _ = path.read_text().split("\n")
    path.write_text("\n".join([head, first, json.dumps({**json.loads(second), **said})]))
    again = journal_of("model")
    assert again.read(path, trust=True) and again.trials == journal.trials[:1]


def test_a_file_that_took_no_time_stands_nowhere() -> None:
    assert standings_of(tried((0.0, 30.0, 500), (-1.0, 30.0, 500))) == []
