"""What may happen between any two steps of a transaction: the end, an error, Ctrl-C, another run, the user."""

import errno
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from optimize.errors import Refused
from optimize.transaction import commit, locks
from tests.transaction.steps import WAYS, before_step, check_belongings, fail, found, go, hidden, prepare, run, write

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How commits go; none waits for another, so that one may happen within another."""
    monkeypatch.setattr(locks, "PATIENCE_S", 0.0)
    go(request.param, monkeypatch)
    return request.param


def steps(tmp_path: Path, happens: Callable[[Path], None], *, old: bool = True) -> Iterator[tuple[Path, object]]:
    """Run generation 2 into a fresh folder for each step that something may happen before; yield it with the error."""
    for number in itertools.count():
        out = tmp_path / str(number) / "made" / "out"
        if old:
            prepare(out)
        error: object = None
        with before_step(number, lambda out=out: happens(out)) as seen:
            try:
                run(out, "2")
            except (Refused, KeyboardInterrupt) as caught:
                error = caught
        yield out, error
        if len(seen) <= number:
            break
    assert number > 10


def killed(out: Path, number: int) -> bool:
    """Run generation 2 in a process that is killed before a step; return whether it got that far."""
    child = os.fork()
    if not child:
        with before_step(number, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            run(out, "2")
        os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


def test_killed_at_any_step(way: str, tmp_path: Path) -> None:
    for number in itertools.count():
        out = tmp_path / str(number) / "out"
        prepare(out)
        was_killed = killed(out, number)
        if way in ("exchange", "no links"):  # the other ways need the next run to put the old result back
            assert found(out) in ("1", "2")
            check_belongings(out)
        fail(out)
        assert found(out) in ("1", "2") and not hidden(out)
        check_belongings(out)
        run(out, "3")
        assert found(out) == "3" and not hidden(out)
        check_belongings(out)
        if not was_killed:
            break
    assert number > 10


def test_killed_at_any_step_where_nothing_was(tmp_path: Path) -> None:
    for number in itertools.count():
        out = tmp_path / str(number) / "made" / "for" / "it" / "out"
        was_killed = killed(out, number)
        assert found(out) in ("", "2")
        there = out.exists()
        fail(out)
        assert out.exists() == there and (there or not hidden(out))
        if not was_killed:
            break
    assert number > 5


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EXDEV])
def test_an_error_at_any_step(way: str, code: int, tmp_path: Path) -> None:
    def refuse(out: Path) -> None:
        raise OSError(code, os.strerror(code))

    for out, error in steps(tmp_path, refuse):
        assert found(out) == ("1" if error else "2")
        check_belongings(out)
        fail(out)
        assert found(out) == ("1" if error else "2") and not hidden(out)
        check_belongings(out)


def test_an_error_at_any_step_where_nothing_was(tmp_path: Path) -> None:
    def refuse(out: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for out, error in steps(tmp_path, refuse, old=False):
        assert found(out) == ("" if error else "2")


def test_ctrl_c_at_any_step(way: str, tmp_path: Path) -> None:
    def interrupt(out: Path) -> None:
        raise KeyboardInterrupt

    for out, _ in steps(tmp_path, interrupt):
        assert found(out) in ("1", "2")
        check_belongings(out)
        fail(out)
        assert found(out) in ("1", "2") and not hidden(out)
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


def test_a_folder_that_appears_meanwhile_is_kept(way: str, tmp_path: Path) -> None:
    def make(out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "late.txt").write_text("late")

    for out, error in steps(tmp_path, make, old=False):
        assert found(out) == "2" and not error and not hidden(out)
        assert (out / "late.txt").exists() or not any(out.glob("late*"))


@pytest.mark.parametrize("way", ["exchange", "in place"], indirect=True)
@pytest.mark.parametrize("old", [True, False])
def test_two_runs_in_every_order_of_their_steps(way: str, old: bool, tmp_path: Path) -> None:
    """Each begins, writes, commits and ends: 70 orders. The one that commits last is found, whole."""
    for index, first in enumerate(itertools.combinations(range(8), 4)):
        out = tmp_path / str(index) / "out"
        if old:
            prepare(out)
        transactions = [parts(out, "2"), parts(out, "3")]
        last = [next(transactions[position not in first]) for position in range(8)]
        committed = [said for said in last if said]
        assert found(out) == committed[-1] and not hidden(out)
        if old:
            check_belongings(out)


@pytest.mark.parametrize("fails", [True, False])
def test_a_run_that_fails_beside_another_takes_nothing_of_it(fails: bool, tmp_path: Path) -> None:
    for index, first in enumerate(itertools.combinations(range(8), 4)):
        out = tmp_path / str(index) / "made" / "out"
        transactions = [parts(out, "2", fails=fails), parts(out, "3")]
        for position in range(8):
            next(transactions[position not in first])
        assert found(out) in (("3",) if fails else ("2", "3")) and not hidden(out)


def parts(out: Path, generation: str, *, fails: bool = False) -> Iterator[str]:
    """Do the parts of a transaction one by one; yield the generation where it was committed."""
    transaction = commit.begin(out)
    yield ""
    write(transaction.hidden.new, generation)
    yield ""
    if not fails:
        transaction.commit()
    yield "" if fails else generation
    transaction.close()
    yield ""
