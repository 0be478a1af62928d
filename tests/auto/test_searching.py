"""The search: whatever ends it, ``--out`` holds whole files of the best so far, and it goes on from there."""

from __future__ import annotations

import importlib
import math
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import optimize
from optimize.auto import searching
from optimize.auto.choices import FileChoice
from optimize.auto.searching import Goal, TimeIsUp
from optimize.cli import cli
from optimize.errors import Refused, UsageError
from optimize.job import Job
from optimize.measure import latency
from optimize.passes import CastFP16
from optimize.recipe import read
from optimize.registry import find_target
from optimize.report.files import read as read_report
from optimize.search import Search
from optimize.workflow import run_job
from tests.auto.test_choices import judged

pytestmark = pytest.mark.usefixtures("files_run_here")

CHOICES = [
    FileChoice("onnx", "float32"),
    FileChoice("onnx", "int8"),
    FileChoice("onnx", "int8", regain_db=3.0),
    FileChoice("onnx", "int8-weights"),  # of which there is nothing in this network
]


def model_in(folder: Path) -> Path:
    """Write a network and its data; return the file of the network."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 32, 3), torch.nn.BatchNorm2d(32), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3)]
    net = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(32 * 9, 4)).eval()
    torch.save(net, folder / "net.pt")
    np.savez(folder / "data.npz", x=np.random.default_rng(0).random((32, 3, 7, 7), np.float32))
    return folder / "net.pt"


def try_few(patch: pytest.MonkeyPatch) -> list[FileChoice]:
    """Let a search try a few choices alone, and return those that it makes."""
    made: list[FileChoice] = []
    make = searching.Workshop.make

    def noted(self: Any, choice: FileChoice, path: Path) -> Any:
        made.append(choice)
        return make(self, choice, path)

    patch.setattr(searching, "first_choices", lambda names: iter(CHOICES))
    patch.setattr(searching.Sampler, "propose", lambda self, known: iter(()))
    patch.setattr(searching.Workshop, "make", noted)
    patch.setattr(searching, "_BUDGET_S", 0.1)
    patch.setattr(latency, "default_budget_s", lambda artifacts: 0.1)
    patch.setattr(Search, "give_back_slow", lambda self, export, plain: export)  # which takes its time
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_in(tmp_path)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[FileChoice]:
    return try_few(monkeypatch)


@pytest.fixture(scope="module")
def ended(files_run_here: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model of a search that has tried all choices; a copy of its folder lies beside it."""
    found = model_in(tmp_path_factory.mktemp("ended"))
    with pytest.MonkeyPatch.context() as patch:
        tried, done = try_few(patch), search(found)
        assert done.exit_code == 0 and tried == CHOICES, done.output
    found.with_name("out").rename(found.with_name("kept"))
    return found


@pytest.fixture
def searched(ended: Path) -> Path:
    """Return the model of a search that has ended: a search is known by the names of its files, which stay."""
    shutil.rmtree(ended.with_name("out"), ignore_errors=True)
    shutil.copytree(ended.with_name("kept"), ended.with_name("out"))
    return ended


def search(model: Path, *words: str, trust: bool = True) -> Any:
    data = str(model.with_name("data.npz"))
    out = str(model.with_name("out"))
    given = ["auto", str(model), "--calib", data, "--to", "onnx", "--out", out, "--quiet", *words]
    given += ["--trust"] if trust else []
    return CliRunner().invoke(cli, given)


def files(model: Path) -> set[str]:
    return {path.name for path in model.with_name("out").iterdir()}


def test_a_search_ends_with_files_recipes_and_a_report_of_all_it_tried(
    searched: Path, tried: list[FileChoice], tmp_path: Path
) -> None:
    out = searched.with_name("out")
    report = read_report(out / "report.json")
    assert report.search is not None
    assert [trial.number for trial in report.search.trials] == [1, 2, 3, 4]
    assert "No layer of this model becomes int8-weights." in report.search.trials[3].outcome
    assert report.search.ended == "nothing was left to try" and report.search.best == report.rows[0].name
    assert {row.precision for row in report.rows} <= {"float32", "int8"} and len(report.rows) >= 2
    for row in report.rows:
        assert row.path is not None and Path(row.path).is_file() and row.speedup is not None
        recipe = Path(row.path).with_name(Path(row.path).name.split(".")[0] + ".yaml")
        given = Job(str(searched), read(recipe, trust=True), out=tmp_path, trust=True)
        made = {one.precision: one for one in run_job(given).rows}
        assert made[row.precision].sha256 == row.sha256
    best = next(row for row in report.rows if row.name == report.search.best)
    assert read(out / "recipe.yaml", trust=True).targets == (best.target,)
    assert "Everything that was tried" in (out / "report.md").read_text()
    assert "The fastest file found so far" in (out / "report.html").read_text()


def test_what_is_known_is_not_made_again(searched: Path, tried: list[FileChoice]) -> None:
    out = searched.with_name("out")
    before = {name: (out / name).read_bytes() for name in files(searched) if name.startswith("point-")}
    assert search(searched).exit_code == 0 and not tried
    assert before and {name: (out / name).read_bytes() for name in before} == before


def test_what_ends_a_search_leaves_the_best_so_far_and_it_goes_on(
    model: Path, tried: list[FileChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = searching.measure_files
    calls = iter([False, True])

    def interrupted(*given: Any) -> Any:
        if next(calls, False):
            raise KeyboardInterrupt
        return measured(*given)

    monkeypatch.setattr(searching, "first_choices", lambda names: iter(CHOICES[:2]))
    monkeypatch.setattr(searching, "measure_files", interrupted)
    (model.with_name("out")).mkdir()
    clouds = [f"point-001.{end}" for end in ("bin", "data")]
    own = ("point-of-view.txt", "point-1.yaml", "point-2d.onnx", *clouds)
    for name in own:
        (model.with_name("out") / name).write_text("the user's")
    assert search(model).exit_code != 0
    assert {"point-01.float32.onnx", "point-01.yaml", "journal.jsonl", "report.html", "recipe.yaml"} <= files(model)
    assert read_report(model.with_name("out") / "report.json").rows[0].precision == "float32"
    tried.clear()
    assert search(model).exit_code == 0 and tried == CHOICES[1:2]
    assert {(model.with_name("out") / name).read_text() for name in own} == {"the user's"}


def test_shards_are_gathered_as_one_search(
    model: Path, tried: list[FileChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = CHOICES[:2]
    monkeypatch.setattr(searching, "first_choices", lambda names: iter(choices))
    places = [model.with_name(f"part-{number}") for number in (1, 2)]
    for number, place in enumerate(places, 1):
        assert search(model, "--shard", f"{number}/2", "--out", str(place)).exit_code == 0
    assert sorted(map(str, tried)) == sorted(map(str, choices)) and tried[: len(tried) // 2] != tried[len(tried) // 2 :]
    tried.clear()
    given = [word for place in places for word in ("--gather", str(place))]
    found = search(model, *given)
    assert found.exit_code == 0 and not tried, found.output
    report = read_report(model.with_name("out") / "report.json")
    assert report.search is not None and {trial.number % 2 for trial in report.search.trials} == {0, 1}
    assert len(report.search.trials) == len(choices)
    assert all(row.path is not None and Path(row.path).parent == model.with_name("out") for row in report.rows)
    assert {Path(str(row.path)).name for row in report.rows} <= files(model)
    assert search(model, *given).exit_code == 0 and not tried  # they are known by then


def test_a_search_ends_where_no_number_is_left(
    model: Path, tried: list[FileChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "MOST_TRIALS", 1)
    found = search(model)
    assert found.exit_code == 0 and tried == CHOICES[:1], found.output
    report = read_report(model.with_name("out") / "report.json").search
    assert report is not None and report.ended == "no number was left for a trial"


def test_what_is_no_shard_of_this_search_is_not_gathered(
    model: Path, tried: list[FileChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "first_choices", lambda names: iter(CHOICES[:1]))
    assert search(model, "--out", str(model.with_name("other")), "--keep", "6").exit_code == 0
    for name in ("other", "nothing"):
        refused = search(model, "--gather", str(model.with_name(name))).exception
        assert isinstance(refused, UsageError) and f"{name}' holds no trials of this search" in refused.what


def test_two_searches_that_number_alike_are_not_mixed(
    model: Path, tried: list[FileChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, choice in (("first", CHOICES[0]), ("second", CHOICES[1])):
        monkeypatch.setattr(searching, "first_choices", lambda names, one=choice: iter([one]))
        assert search(model, "--out", str(model.with_name(name))).exit_code == 0
    given = [word for name in ("first", "second") for word in ("--gather", str(model.with_name(name)))]
    refused = search(model, *given).exception
    assert isinstance(refused, UsageError) and refused.hint == "Give each search its own --shard K/N."


def test_a_file_that_somebody_changed_is_made_again(searched: Path, tried: list[FileChoice]) -> None:
    changed = next(name for name in files(searched) if name.endswith("int8.onnx"))
    (searched.with_name("out") / changed).write_bytes(b"another")
    assert search(searched).exit_code == 0
    assert tried and all(choice.precision == "int8" for choice in tried)
    assert changed not in files(searched) or (searched.with_name("out") / changed).stat().st_size > 100


@pytest.mark.parametrize("trust", [True, False])
def test_a_folder_that_somebody_packed_is_not_gone_on_from_without_trust(
    searched: Path, tried: list[FileChoice], monkeypatch: pytest.MonkeyPatch, *, trust: bool
) -> None:
    """Its journal can say anything of its files, and its files be any: it is a copy."""
    monkeypatch.setattr(searching, "first_choices", lambda names: iter(CHOICES[:1]))
    assert search(searched, trust=trust).exit_code == 0 and tried == ([] if trust else CHOICES[:1])


@pytest.mark.parametrize("trust", [True, False])
def test_files_that_lie_there_are_opened_as_any_other(
    model: Path, tried: list[FileChoice], monkeypatch: pytest.MonkeyPatch, *, trust: bool
) -> None:
    onnx, trusted = type(find_target("onnx")), list[bool]()
    opened = onnx.open

    def noted(self: Any, path: Path, *, trust: bool = False) -> Any:
        trusted.append(trust)
        return opened(self, path, trust=trust)

    monkeypatch.setattr(searching, "first_choices", lambda names: iter(CHOICES[:1]))
    monkeypatch.setattr(onnx, "open", noted)
    assert search(model, trust=trust).exit_code == 0 and not trusted
    tried.clear()
    assert search(model, trust=trust).exit_code == 0 and not tried
    assert trusted and set(trusted) == {trust}


def test_what_lies_in_a_files_place_and_is_none_is_not_read(searched: Path, tried: list[FileChoice]) -> None:
    """A link to what never ends would fill the disk."""
    changed = searched.with_name("out") / next(name for name in files(searched) if name.endswith("int8.onnx"))
    changed.write_bytes(b"")
    os.truncate(changed, 1 << 40)  # a terabyte that takes no room before it is copied
    assert search(searched).exit_code == 0
    assert tried and all(choice.precision == "int8" for choice in tried)


def test_a_front_whose_files_are_lost_is_made_again_with_what_it_kept_off(
    model: Path, tried: list[FileChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another was better than has no file any more when that other one is lost."""
    monkeypatch.setattr(searching, "first_choices", lambda names: iter(CHOICES[:2]))
    monkeypatch.setattr("optimize.auto.trials._DECIBELS", 1000.0)  # INT8 is no worse in error, and a quarter in bytes
    monkeypatch.setattr("optimize.auto.trials._TIME", 1000.0)
    assert search(model).exit_code == 0
    assert {"point-02.int8.onnx"} == {name for name in files(model) if name.endswith(".onnx")}
    (model.with_name("out") / "point-02.int8.onnx").unlink()
    tried.clear()
    assert search(model).exit_code == 0 and tried == CHOICES[:2]


def test_a_float_file_with_fewer_channels_keeps_what_is_asked_too(
    model: Path, tried: list[FileChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = FileChoice("onnx", "float32", cut=0.5)
    monkeypatch.setattr(searching, "first_choices", lambda names: iter([CHOICES[0], cut]))
    assert search(model, "--min-sqnr", "90").exit_code == 0 and tried == [CHOICES[0], cut]
    report = read_report(model.with_name("out") / "report.json")
    assert report.search is not None
    assert report.search.trials[1].outcome.startswith("misses") and len(report.rows) == 1


def test_another_metric_of_the_same_name_is_another_search(
    model: Path, tried: list[FileChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "first_choices", lambda names: iter(CHOICES[:1]))
    monkeypatch.chdir(model.parent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    images = np.load(model.with_name("data.npz"))["x"]
    np.savez("scored.npz", x=images, y=np.zeros(len(images), np.int64))
    for made, text in enumerate(("labels == 0", "labels == 0", "labels > 0")):
        tried.clear()
        Path("scored_by.py").write_text(f"def score(outputs, labels):\n    return {text}\n")
        sys.modules.pop("scored_by", None)
        importlib.invalidate_caches()
        assert search(model, "--eval", "scored.npz", "--metric", "scored_by:score").exit_code == 0
        assert tried == ([] if made == 1 else CHOICES[:1])


def test_other_labels_are_another_search(model: Path, tried: list[FileChoice], monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were judged by other answers say nothing of these."""
    monkeypatch.setattr(searching, "first_choices", lambda names: iter(CHOICES[:1]))
    labels, images = model.with_name("labels.npz"), np.load(model.with_name("data.npz"))["x"]
    for label in (0, 1):
        tried.clear()
        np.savez(labels, x=images, y=np.full(len(images), label))
        assert search(model, "--eval", str(labels)).exit_code == 0 and tried == CHOICES[:1]


def test_the_time_ends_whatever_goes_on(model: Path, tried: list[FileChoice], monkeypatch: pytest.MonkeyPatch) -> None:
    def late(self: Any) -> float:
        return math.inf if len(self.journal.trials) < 1 else time.monotonic() + 0.01

    monkeypatch.setattr(searching._Searching, "_until_s", late)
    monkeypatch.setattr(searching._Searching, "_guess_s", lambda self, choice: 0.0)
    found = search(model)
    assert found.exit_code == 0 and "The time was up." in found.output
    report = read_report(model.with_name("out") / "report.json")
    assert report.search is not None and [trial.number for trial in report.search.trials] == [1]


def test_what_is_told_is_passed_on_until_the_time_is_up() -> None:
    told: list[tuple[str, float]] = []
    state: Any = SimpleNamespace(until_s=math.inf, listener=lambda *entry: told.append(entry))
    searching._Searching._tell(state, "judge", 0.5)
    assert told == [("judge", 0.5)]
    state.until_s = 0.0
    with pytest.raises(TimeIsUp):
        searching._Searching._tell(state, "judge", 0.6)


def test_a_search_that_finds_nothing_says_why(
    model: Path, tried: list[FileChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "first_choices", lambda names: iter(CHOICES[3:]))
    found = search(model)
    assert isinstance(found.exception, Refused) and "No layer of this model becomes int8-weights." in str(
        found.exception
    )
    assert not model.with_name("out").exists()


def test_where_all_miss_what_was_asked_the_nearest_is_kept_and_said(
    model: Path, tried: list[FileChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "first_choices", lambda names: iter(CHOICES[1:2]))
    found = search(model, "--min-sqnr", "99")
    report = read_report(model.with_name("out") / "report.json")
    assert found.exit_code == 1 and report.search is not None and not report.search.met
    assert report.search.trials[0].outcome.startswith("misses") and "Nearest to what was asked" in found.output
    assert {"journal.jsonl", "point-01.int8.onnx", "point-01.yaml"} <= files(model)


def test_what_is_known_is_not_timed_again_when_the_time_is_over(
    searched: Path, tried: list[FileChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_report(searched.with_name("out") / "report.json").rows
    monkeypatch.setattr(searching, "measure", lambda *given, **more: pytest.fail("it was timed again"))
    found = search(searched, "--budget", "1s")
    assert found.exit_code == 0, found.output
    after = read_report(searched.with_name("out") / "report.json").rows
    assert [row.latency for row in after[1:]] == [row.latency for row in before[1:]]


def test_python_searches_as_the_command_does(
    model: Path, tried: list[FileChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "first_choices", lambda names: iter(CHOICES[:1]))
    net = torch.load(model, weights_only=False)
    data = torch.from_numpy(np.load(model.with_name("data.npz"))["x"])
    out = model.with_name("out")
    report = optimize.find_best(net, (data[:2],), calibrate=[data], targets="onnx", size="1GB", out=out, keep=("6",))
    assert tried == CHOICES[:1] and report.search is not None and report.search.met
    assert {"journal.jsonl", "report.html", "recipe.yaml"} <= files(model)
    for wrong in ({"budget": "soon"}, {"latency": "fast"}, {"calibrate": None}):
        with pytest.raises(UsageError):
            optimize.find_best(net, (data[:2],), **{"calibrate": [data], "targets": "onnx", "out": out, **wrong})


def test_a_kind_that_cannot_be_made_takes_no_other_along(
    model: Path, tried: list[FileChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a pass raises, it is what became of that one choice."""

    def raising(self: Any, program: Any) -> Any:
        raise ValueError("no such half")

    monkeypatch.setattr(CastFP16, "rewrite", raising)
    choices = [FileChoice("onnx", "float16"), FileChoice("onnx", "float32")]
    monkeypatch.setattr(searching, "first_choices", lambda names: iter(choices))
    assert search(model).exit_code == 0
    report = read_report(model.with_name("out") / "report.json")
    assert report.search is not None and [row.precision for row in report.rows] == ["float32"]
    assert "no such half" in report.search.trials[0].outcome


def test_of_equals_the_one_whose_file_is_there_is_on_the_front() -> None:
    """Times of a file that is timed again move a little: one that was let go of for it must not take its place."""
    trials = [judged(CHOICES[1], 1, 10.1, 40.0), judged(CHOICES[2], 2, 10.0, 40.0)]
    held = SimpleNamespace(journal=SimpleNamespace(trials=trials), files={2: "its file"})
    assert [trial.number for trial in searching._Searching._front(held)] == [2]  # type: ignore[arg-type]


def test_the_best_is_what_is_asked_for() -> None:
    trials = [
        judged(FileChoice("onnx", "int8"), 1, 10.0, 30.0, 500),
        judged(FileChoice("onnx", "int8", regain_db=3.0), 2, 8.0, 33.0, 600),
        judged(FileChoice("onnx", "float32"), 3, 3.0, 80.0, 2000),
    ]

    def best(**goal: Any) -> int | None:
        found = Goal(60.0, **goal).best(trials)
        return found and found.number

    assert best() == 1
    assert best(latency=(0.15, True)) == 2  # the most accurate of those that are fast enough
    assert best(latency=(0.5, True)) == 3
    assert best(size_bytes=550) == 1
    assert best(latency=(0.05, True)) is None


def test_a_time_that_no_kernel_reaches_is_cut_for() -> None:
    """More and more goes, of the fastest INT8 file, until one is fast enough; what cannot be enough is not tried."""
    trials = [judged(FileChoice("onnx", "int8"), 1, 5.0, 30.0), judged(FileChoice("openvino", "int8"), 2, 4.0, 33.0)]
    held = SimpleNamespace(journal=SimpleNamespace(trials=trials), goal=Goal(60.0, latency=(0.14, True)))
    found = []
    for choice in searching._Searching._cuts(held):  # type: ignore[arg-type]
        found.append(choice)
        trials.append(judged(choice, len(trials) + 1, 6.0 if choice.cut < 0.5 else 8.0, 25.0))
    assert found == [FileChoice("onnx", "int8", cut=0.3), FileChoice("onnx", "int8", cut=0.5)]
    held.goal = Goal(60.0, latency=(0.3, True))
    assert not list(searching._Searching._cuts(held))  # type: ignore[arg-type]
    del trials[2:]
    held.goal = Goal(60.0, latency=(0.01, True))  # out of reach: the most that may go is tried all the same
    assert [choice.cut for choice in searching._Searching._cuts(held)] == [0.5]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "judges files on data, and there is none"),
        (["--calib", "data.npz", "--budget", "soon"], "needs a unit: s, min, h"),
        (["--calib", "data.npz", "--budget", "0min"], "is nothing; write 20min"),
        (["--calib", "data.npz", "--size", "2"], "needs a unit"),
        (["--calib", "data.npz", "--latency", "1.5x"], "nor a share of the time below one"),
        (["--calib", "data.npz", "--to", "onyx"], "onyx"),
    ],
)
def test_what_cannot_be_searched_for_is_a_sentence(
    words: list[str], told: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    found = CliRunner().invoke(cli, ["auto", "net.pt", *words])
    assert found.exit_code != 0 and told in f"{found.output}{found.exception}"


def test_a_search_of_one_of_its_own_files_takes_another_folder(model: Path) -> None:
    point = model.with_name("out") / "point-01.float32.onnx"
    point.parent.mkdir()
    point.write_bytes(b"whatever")
    words = [
        "auto",
        str(point),
        "--calib",
        str(model.with_name("data.npz")),
        "--to",
        "onnx",
        "--out",
        str(point.parent),
    ]
    found = CliRunner().invoke(cli, words)
    assert isinstance(found.exception, UsageError) and "where a result gets its name" in str(found.exception)
    assert point.read_bytes() == b"whatever"
    point.unlink()
    for name in ("point-03.yaml", "journal.jsonl", "recipe.yaml"):
        own = point.with_name(name)
        own.write_text('{"text": "mine"}\n')
        found = search(model)
        assert isinstance(found.exception, Refused) and "is of no run" in str(found.exception), name
        assert own.read_text() == '{"text": "mine"}\n'
        own.unlink()


def test_nothing_is_made_that_cannot_run_where_it_is_measured(
    model: Path, tried: list[FileChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "why_barred", lambda target, remote: f"{target} is not there")
    done = search(model)
    assert "onnx is not there" in str(done.exception) and not tried
