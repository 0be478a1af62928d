"""What may happen between any two steps of a transaction: the end, an error, Ctrl-C, another run, the user."""

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from optimize.errors import Refused
from optimize.sealing import seal
from optimize.transaction import commit, staging, system
from tests.slow import but_slowly
from tests.transaction.steps import (
    CALLS,
    LOOKS,
    NAMES,
    RESULTS,
    WAYS,
    before_step,
    check_belongings,
    fail,
    found,
    go,
    hidden,
    prepare,
    run,
    write,
)

Killed = Callable[..., bool]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX")


@pytest.fixture(params=but_slowly(WAYS, {"no links"}))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How commits go; none waits for another, so that one may happen within another."""
    monkeypatch.setattr(system, "PATIENCE_S", 0.0)
    monkeypatch.setattr(system, "UNDER_WAY_S", 0.0)
    seal("")  # the user's secret is made with links
    go(request.param, monkeypatch)
    return request.param


def steps(
    tmp_path: Path, happens: Callable[[Path], None], *, old: bool = True, calls: Sequence[str] = CALLS
) -> Iterator[tuple[Path, object]]:
    """Run generation 2 into a fresh folder for each step that something may happen before; yield it with the error."""
    for number in itertools.count():
        out = tmp_path / str(number) / "made" / "out"
        if old:
            prepare(out)
        error: object = None
        with before_step(number, lambda out=out: happens(out), calls) as seen:
            try:
                run(out, "2")
            except (Refused, KeyboardInterrupt) as caught:
                error = caught
        yield out, error
        if len(seen) <= number:
            break
    assert number > 10


@pytest.fixture(scope="module")
def dying() -> Iterator[subprocess.Popen[str]]:
    """A process whose children are killed before a step: without torch, it forks in a moment."""
    command = [sys.executable, "-m", "tests.transaction.steps"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], text=True, **pipes) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def killed(way: str, dying: subprocess.Popen[str]) -> Killed:
    """Returns a function that does something in a process that is killed before a step: whether it got that far."""

    def end(number: int, *words: object) -> bool:
        dying.stdin.write(json.dumps([way, number, *map(str, words)]) + "\n")
        dying.stdin.flush()
        return int(dying.stdout.readline()) == signal.SIGKILL

    return end


@pytest.mark.parametrize("end", ["fails", "commits"])
@pytest.mark.parametrize("within", ["within", "data/deep/within"])
def test_a_run_into_a_folder_of_another_ends_before_any_of_its_steps(
    way: str, within: str, end: str, tmp_path: Path
) -> None:
    """Its hidden folder is doubled with all else of the other's: the double goes with it."""
    for number in itertools.count():
        out = tmp_path / str(number) / "out"
        prepare(out)
        inner = commit.begin(out / within, NAMES)
        write(inner.new, "1")

        def happens(inner: commit.Transaction = inner) -> None:
            try:
                if end == "commits":
                    inner.commit()
            except Refused:
                pass
            finally:
                inner.close()

        with before_step(number, happens) as seen:
            run(out, "2")
        if len(seen) <= number:
            inner.close()
            break
        assert found(out) == "2" and found(out / within) in ("", "1")
        assert not list(out.parent.rglob(".*")), number
        check_belongings(out)
    assert number > 10


def test_a_run_into_a_folder_of_a_killed_ones_gets_its_result_whole(way: str, tmp_path: Path, killed: Killed) -> None:
    """The killed one may have left a double of that folder in its place: the original goes back first."""
    for number in itertools.count():
        out, names = tmp_path / str(number) / "out", (*NAMES, "*.onnx")
        prepare(out)
        inner = out / "data" / "deep" / "within"
        with staging(inner, names) as new:
            write(new, "1")
            (new / "gone.onnx").touch()
        was_killed = killed(number, "run", out, "2")
        with staging(inner, names) as new:
            write(new, "2")
        fail(out)
        assert found(out) in ("1", "2") and sorted(os.listdir(inner)) == sorted(RESULTS) and found(inner) == "2"
        check_belongings(out)
        if not was_killed:
            break
    assert number > 10


def test_what_is_called_as_hidden_folders_are_and_is_none_stays(way: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(out)
    places = [
        out / ".theirs.optimize-abcdefgh",
        out / "data" / ".theirs.optimize-abcdefgh",
        out / ".a.optimize-00000000",
    ]
    for place in places:
        (place / "new").mkdir(parents=True)
        (place / "new" / "kept").write_text("theirs")
    (places[-1] / "transaction.json").write_text('{"home": 1, "seal": "none"}')
    commit.write_note(places[0], {"mark": [0, 0]})  # as of a killed run that was copied with all else, to another inode
    copied = out / "data" / ".copied.optimize-00000000"
    shutil.copytree(places[0], copied)
    (out / ".linked.optimize-00000000").mkdir()
    (out / ".linked.optimize-00000000" / "new").symlink_to("..")
    places.append(copied)
    run(out, "2")
    assert found(out) == "2" and all((place / "new" / "kept").read_text() == "theirs" for place in places)
    assert os.readlink(out / ".linked.optimize-00000000" / "new") == ".." and not list(out.rglob(".double"))
    check_belongings(out)


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_killed_at_any_step(way: str, old: bool, tmp_path: Path, killed: Killed) -> None:
    for number in itertools.count():
        out = tmp_path / str(number) / "made" / "for" / "it" / "out"
        if old:
            prepare(out)
        was_killed = killed(number, "run", out, "2")
        if way in ("exchange", "no links") or not old:  # the other ways need the next run to put the old result back
            assert found(out) in ("1" if old else "", "2")
            there = out.exists()
            assert there or not old
        fail(out)
        assert found(out) in ("1" if old else "", "2") and not hidden(out)
        assert old or out.exists() == there
        run(out, "3")
        assert found(out) == "3" and not hidden(out)
        if old:
            check_belongings(out)
        if not was_killed:
            break
    assert number > (10 if old else 5)


@pytest.mark.parametrize("way", ["two renames", "in place"], indirect=True)
def test_killed_again_at_any_step_of_tidying_up(way: str, tmp_path: Path, killed: Killed) -> None:
    """The first is killed where only the next run can put the old result back, and so is that one."""
    torn = next(number for number in itertools.count() if tear(tmp_path / f"torn{number}" / "out", number, killed))
    for number in itertools.count():
        out = tmp_path / str(number) / "out"
        assert tear(out, torn, killed)
        was_killed = killed(number, "fail", out)
        fail(out)
        assert found(out) == "1" and not hidden(out)
        check_belongings(out)
        if not was_killed:
            break
    assert number > 5


def tear(out: Path, number: int, killed: Killed) -> bool:
    """Kill a run into the folder of an old result before a step; return whether neither result is whole."""
    prepare(out)
    killed(number, "run", out, "2")
    return not out.exists() or len({(out / name).read_text() for name in RESULTS}) > 1


@pytest.mark.parametrize(
    ("error", "old"),
    [
        *[(OSError(code, os.strerror(code)), True) for code in (errno.ENOSPC, errno.EACCES, errno.EXDEV)],
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), False),
        (KeyboardInterrupt(), True),
    ],
    ids=repr,
)
def test_an_error_at_any_step(way: str, error: BaseException, old: bool, tmp_path: Path) -> None:
    def throw(out: Path) -> None:
        raise error

    for out, caught in steps(tmp_path, throw, old=old):
        before = "1" if old else ""
        expected = ("2",) if not caught else (before,) if isinstance(caught, Refused) else (before, "2")
        assert found(out) in expected
        if old:
            check_belongings(out)
        fail(out)
        assert found(out) in expected and not hidden(out)
        if old:
            check_belongings(out)


@pytest.mark.parametrize("old", [True, False])
def test_another_run_that_finishes_at_any_step(way: str, old: bool, tmp_path: Path) -> None:
    if way == "in place":
        pytest.skip("moves one by one need the lock that this test takes away")
    for out, error in steps(tmp_path, lambda out: run(out, "3"), old=old):
        assert found(out) in ("2", "3") and not error
        run(out, "4")
        assert found(out) == "4" and not hidden(out)
        if old:
            check_belongings(out)


def test_another_run_that_fails_at_any_step(way: str, tmp_path: Path) -> None:
    for out, error in steps(tmp_path, fail):
        assert found(out) == "2" and not error and not hidden(out)
        check_belongings(out)


def make_late(out: Path) -> None:
    (out / "late.txt").write_text("late")


def replace_notes(out: Path) -> None:
    """Replace a file by another that was changed long before."""
    (out.parent / "other").write_text("late")
    os.utime(out.parent / "other", (1, 1))
    (out.parent / "other").rename(out / "notes.txt")


def append_notes(out: Path) -> None:
    with (out / "notes.txt").open("a") as file:
        file.write("late")


def make_late_below(out: Path) -> None:
    (out / "data" / "deep" / "late.txt").write_text("late")


def make_folder(out: Path) -> None:
    (out / "late").mkdir()
    (out / "late" / "late.txt").write_text("late")


@pytest.mark.parametrize(
    ("happens", "file"),
    [
        (make_late, "late.txt"),
        (replace_notes, "notes.txt"),
        (append_notes, "notes.txt"),
        (make_late_below, "data/deep/late.txt"),
        (make_folder, "late/late.txt"),
    ],
)
def test_nothing_that_the_user_does_at_any_step_is_lost(
    way: str, happens: Callable[[Path], None], file: str, tmp_path: Path
) -> None:
    done: set[Path] = set()

    def act(out: Path) -> None:
        if out.exists():  # between two renames it is not
            happens(out)
            done.add(out)

    for out, error in steps(tmp_path, act):
        assert found(out) == "2" and not error and not hidden(out)
        assert out not in done or (out / file).read_text().endswith("late")
    assert len(done) > 10


@pytest.mark.parametrize("name", but_slowly([".", "data", "../hidden"], {"data"}))
def test_a_link_that_takes_a_folders_place_at_any_step_is_not_followed(way: str, name: str, tmp_path: Path) -> None:
    """Nothing of what it leads to is changed, taken or added to, and nothing of the user's is gone."""
    victim = tmp_path / "victim"
    for path in (
        *RESULTS,
        "notes.txt",
        "deep/x",
        "data/deep/x",
        "transaction.json",
        "new/a.onnx",
        "replaced/notes.txt",
    ):
        (victim / path).parent.mkdir(parents=True, exist_ok=True)
        (victim / path).write_text("precious")
        os.utime(victim / path, (1, 1))  # older than all of the user's
    before = tree(victim)
    swapped: set[Path] = set()

    def swap(out: Path) -> None:
        begun = [*out.parent.glob(".*/replaced"), *out.parent.glob(".*/new/report.json")]
        if not begun:  # before a commit, a link in the place of --out is what the user has named
            return
        hidden_one = out.parent / begun[0].relative_to(out.parent).parts[0]
        place = hidden_one if name == "../hidden" else out / name
        if place.is_dir() and not place.is_symlink():  # between two renames it is not
            place.rename(out.parent / "moved")
            place.symlink_to(victim)
            (out.parent / "moved" / "late").write_text("late")
            swapped.add(out)

    for out, error in steps(tmp_path, swap, calls=(*CALLS, *LOOKS)):
        assert tree(victim) == before
        assert not error or isinstance(error, Refused)
        if out in swapped:
            kept = {path.name for path in out.parent.rglob("*")}
            assert kept >= {"notes.txt", "x"} and ("late" in kept or name == "../hidden")
    assert len(swapped) > 20


def tree(folder: Path) -> list[tuple[object, ...]]:
    """Return what is in a folder: names, contents, permissions and names elsewhere."""
    found = [(path, os.lstat(path)) for path in sorted(folder.rglob("*"))]
    texts = [path.read_text() if path.is_file() else "" for path, _ in found]
    return [(path, text, it.st_mode, it.st_nlink, it.st_ino) for (path, it), text in zip(found, texts, strict=True)]


def test_a_folder_that_appears_meanwhile_is_kept(way: str, tmp_path: Path) -> None:
    def make(out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "late.txt").write_text("late")

    for out, error in steps(tmp_path, make, old=False):
        assert found(out) == "2" and not error and not hidden(out)
        assert (out / "late.txt").exists() or not any(out.glob("late*"))


@pytest.mark.parametrize("way", ["exchange", "in place"], indirect=True)
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_two_runs_in_every_order_of_their_steps(way: str, old: bool, fails: bool, tmp_path: Path) -> None:
    """Each begins, writes, commits and ends: 70 orders. The one that commits last is found, whole."""
    for index, first in enumerate(itertools.combinations(range(8), 4)):
        out = tmp_path / str(index) / "made" / "out"
        if old:
            prepare(out)
        transactions = [parts(out, "2", fails=fails), parts(out, "3")]
        last = [next(transactions[position not in first]) for position in range(8)]
        committed = [said for said in last if said]
        assert found(out) == committed[-1] and not hidden(out)
        if old:
            check_belongings(out)


def parts(out: Path, generation: str, *, fails: bool = False) -> Iterator[str]:
    """Do the parts of a transaction one by one; yield the generation where it was committed."""
    transaction = commit.begin(out)
    yield ""
    write(transaction.new, generation)
    yield ""
    if not fails:
        transaction.commit()
    yield "" if fails else generation
    transaction.close()
    yield ""
