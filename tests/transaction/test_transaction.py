"""What the user finds where ``--out`` was refused, replaced, shared or left behind; nothing here takes time."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from optimize import files, sealing
from optimize.errors import Refused
from optimize.report import POINTS
from optimize.transaction import check, check_own, commit, doubles, staging, system
from tests.transaction.steps import NAMES, check_belongings, fail, found, go, hidden, prepare, run, write

ROOT = os.name == "posix" and os.geteuid() == 0


@contextmanager
def mounting(*words: str | Path) -> Iterator[None]:
    """Mount something for as long as this lasts; the last word is where."""
    if not ROOT or subprocess.run(["mount", *words], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", words[-1]], check=True)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A folder that is a small file system of its own."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    with mounting("-t", "tmpfs", "-o", "size=64k", "none", folder):
        yield folder


def test_what_fails_takes_nothing_of_a_run_that_finished_meanwhile(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), staging(out, NAMES):
        run(out, "2")
        (out / "notes.txt").write_text("notes")
        raise KeyboardInterrupt
    assert found(out) == "2" and (out / "notes.txt").exists() and not hidden(out)


@pytest.mark.parametrize("way", ["exchange", "in place"])
def test_a_file_that_cannot_be_replaced_leaves_all_as_it_was(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a mount point on the file or an immutable one does: it can neither be linked nor replaced."""
    out, linked, replaced = tmp_path / "out", os.link, os.replace
    prepare(out)
    go(way, monkeypatch)

    def refuse(source: Path, target: Path, **options: bool) -> None:
        if any(path.name == "report.json" and path.parent.samefile(out) for path in map(Path, (source, target))):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(source), None, str(target))
        (linked if options else replaced)(source, target, **options)

    for name in ("link", "replace"):
        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(Refused, match=r"report\.json' cannot be written: Device or resource busy"):
        run(out, "2")
    assert found(out) == "1" and not hidden(out)
    check_belongings(out)


def test_a_file_that_is_mounted_leaves_all_as_it_was(mounted: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(out)
    (mounted / "file").write_text("1")
    report = out / "report.json"
    with mounting("--bind", mounted / "file", report), pytest.raises(Refused, match=r"report\.json' cannot be written"):
        run(out, "2")
    assert found(out) == "1" and not hidden(out)
    check_belongings(out)


def test_a_mount_point_is_written_in_place(mounted: Path) -> None:
    run(mounted, "1")
    (mounted / "notes.txt").write_text("notes")
    run(mounted, "2")
    assert found(mounted) == "2" and (mounted / "notes.txt").exists() and not hidden(mounted)


def test_a_full_disk_is_said_and_the_old_result_stays(mounted: Path) -> None:
    out = mounted / "out"
    prepare(out)
    with pytest.raises(Refused, match=r"No space is left on the disk to write '.*big\.bin'"), staging(out) as folder:
        write(folder, "2")
        files.write_text(folder / "big.bin", "x" * 100_000)
    assert found(out) == "1" and not hidden(out)
    check_belongings(out)


def test_a_folder_bound_within_one_file_system_is_a_mount_point(tmp_path: Path) -> None:
    bound, out = tmp_path / "bound", tmp_path / "a b"
    bound.mkdir()
    out.mkdir()
    with mounting("--bind", bound, out):
        assert system.is_mounted(out) and not system.is_mounted(bound)
        run(out, "2")
    assert found(bound) == "2" and not hidden(bound)


def test_a_shell_in_the_folder_finds_the_result(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(out)
    shell = subprocess.Popen(["sh", "-c", "read line; cat report.json"], cwd=out, stdin=-1, stdout=-1, text=True)
    run(out, "2")
    assert shell.communicate("\n")[0] == "2"


def test_original_folders_stay(tmp_path: Path) -> None:
    """Who works inside one, or holds it open, never notices."""
    out = tmp_path / "out"
    prepare(out)
    before = [os.stat(path).st_ino for path in (out / "data", out / "data" / "deep", out / "notes.txt")]
    os.chmod(out, 0o750)
    run(out, "2")
    assert before == [os.stat(path).st_ino for path in (out / "data", out / "data" / "deep", out / "notes.txt")]
    assert os.stat(out).st_mode & 0o777 == 0o750


@pytest.mark.parametrize("levels", [150, 600])
def test_folders_deep_within_each_other_stay(levels: int, tmp_path: Path) -> None:
    out, deep = tmp_path / "out", "data/" + "d/" * levels
    prepare(out)
    os.makedirs(out / deep)
    (out / deep / "mine").write_text("mine")
    for number in ("2", "3"):
        run(out, number)
        assert found(out) == number and not hidden(out)
        assert (out / deep / "mine").read_text() == "mine"
    subprocess.run(["rm", "-r", out], check=True)  # pytest would not get through


def test_what_is_too_deep_to_be_moved_is_told(tmp_path: Path) -> None:
    for name in ("one", "other"):
        os.makedirs(tmp_path / name / ("d/" * 600))
    with pytest.raises(OSError) as told:
        doubles.merge(tmp_path / "one", tmp_path / "other")
    assert told.value.errno in (errno.ELOOP, errno.EMFILE)  # or so many may not be open
    subprocess.run(["rm", "-r", tmp_path / "one", tmp_path / "other"], check=True)


def test_a_new_folder_has_the_permissions_of_new_folders(tmp_path: Path) -> None:
    run(tmp_path / "out", "1")
    (tmp_path / "other").mkdir()
    assert os.stat(tmp_path / "out").st_mode == os.stat(tmp_path / "other").st_mode


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    prepare(tmp_path / "real")
    (tmp_path / "out").symlink_to("real")
    run(tmp_path / "out", "2")
    assert (tmp_path / "out").is_symlink() and found(tmp_path / "real") == "2"


@pytest.mark.parametrize("way", ["exchange", "in place"])
def test_a_result_that_does_without_one_of_its_files_removes_the_old_one(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile has a roofline only where a kernel multiplies: that of another model shall not lie beside it."""
    go(way, monkeypatch)
    out, names = tmp_path / "out", ("profile.json", "roofline.svg")
    for written in (names, names[:1]):
        with staging(out, names) as folder:
            for name in written:
                (folder / name).write_text("")
    assert os.listdir(out) == ["profile.json"]


@pytest.mark.parametrize("name", ["report.md", "report.json", "net.int8.onnx", "point-01.float32.bin"])
def test_a_folder_without_a_record_of_ours_holds_nothing_that_is_replaced(name: str, tmp_path: Path) -> None:
    names = ("report.json", "report.md", "net.int8.onnx", *POINTS)
    (own := tmp_path / name).write_text("mine")
    (tmp_path / "point-01.left.bin").write_text("of a laser, and of no name that a result gets")
    with pytest.raises(Refused, match=f"{name}' is of no run, and would be written over"):
        check_own(tmp_path, names)
    own.unlink()
    check_own(tmp_path, names)
    own.write_text("made")
    (tmp_path / "report.json").write_text('{\n "schema_version": 1,\n "created": ""\n}\n')
    check_own(tmp_path, names)


@pytest.mark.parametrize("way", ["exchange", "in place"])
def test_files_of_a_result_are_known_by_patterns_of_their_names(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search keeps other files from time to time; what the user keeps beside them stays."""
    go(way, monkeypatch)
    out, names = tmp_path / "out", ("report.json", "point-[0-9]*.onnx")
    for written in (("report.json", "point-1.onnx", "point-2.onnx"), ("report.json", "point-3.onnx")):
        with staging(out, names) as folder:
            for name in written:
                (folder / name).write_text("")
        for own in ("point-of-view.onnx", "point-1.txt"):
            (out / own).touch()
    assert sorted(os.listdir(out)) == ["point-1.txt", "point-3.onnx", "point-of-view.onnx", "report.json"]


def test_what_no_file_of_a_pattern_can_replace_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "point-1.onnx").mkdir()
    with pytest.raises(Refused, match=r"point-1\.onnx' is a folder"):
        check(tmp_path, ["point-[0-9]*.onnx"])


def test_what_a_living_run_makes_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staging(out) as living:
        write(living, "3")
        run(out, "2")
        fail(out)
        assert living.exists()
    assert found(out) == "3" and not hidden(out)


def test_what_only_looks_like_a_left_over_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    alike = [".out-abcdefgh", ".out.optimize-backup", ".out.optimize-abcdefgh", ".other.optimize-abcdefgh"]
    for name in alike:
        (tmp_path / name / "new").mkdir(parents=True)
        (tmp_path / name / "new" / "mine").write_text("")
        (tmp_path / name / "mine").write_text("")
    run(out, "2")
    assert all((tmp_path / name / "new" / "mine").exists() for name in alike)
    assert all((tmp_path / name / "mine").exists() for name in alike)


def test_a_folder_that_replaced_the_new_one_keeps_what_the_old_one_held(tmp_path: Path) -> None:
    """Killed between two renames; somebody then made the folder anew, before the next run put the old one back."""
    out = tmp_path / "out"
    prepare(out)
    transaction = commit.begin(out)
    doubles.double(out, transaction.new, links=True)
    transaction.doubles = {name: doubles.stamp(transaction.new / name) for name in os.listdir(transaction.new)}
    transaction.write()
    os.rename(out, transaction.old)
    out.mkdir()
    transaction.close()
    assert found(out) == "1" and not hidden(out)
    check_belongings(out)


def test_a_stranger_that_holds_the_folder_does_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``flock FOLDER optimize ... --out FOLDER/out`` does, for as long as the run lasts."""
    monkeypatch.setattr(system, "PATIENCE_S", 0.0)
    stranger = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(stranger, fcntl.LOCK_EX)
    prepare(tmp_path / "out")
    run(tmp_path / "out", "2")
    os.close(stranger)
    assert found(tmp_path / "out") == "2" and not hidden(tmp_path / "out")


def test_a_commit_keeps_others_from_its_folder_and_from_those_above(tmp_path: Path) -> None:
    """Into two folders of one at once, but not into a folder and one within it."""
    inner = tmp_path / "out" / "a" / "b"
    inner.mkdir(parents=True)

    def can_hold(folder: Path, shared: bool) -> bool:
        try:
            os.close(system.hold(folder, shared=shared) or 0)
        except BlockingIOError:
            return False
        return True

    with commit._alone(inner) as alone:
        assert alone
        found = [
            (can_hold(folder, True), can_hold(folder, False)) for folder in (inner, inner.parent, tmp_path / "out")
        ]
    assert found == [(False, False), (False, False), (True, False)]
    assert all(can_hold(folder, False) for folder in (inner, *inner.parents[:2]))


@pytest.mark.skipif(not ROOT, reason="needs root")
def test_a_folder_that_takes_new_names_alone_is_as_it_was(tmp_path: Path) -> None:
    """As ``chattr +a`` makes one: what is put there can be neither replaced nor taken away again."""
    out = tmp_path / "out"
    run(out, "1")
    (out / "a.onnx").unlink()
    if subprocess.run(["chattr", "+a", out], capture_output=True).returncode:
        pytest.skip("this file system has no such attribute")
    try:
        with pytest.raises(Refused, match="not permitted"):
            run(out, "2")
        assert os.listdir(out) == ["report.json"] and (out / "report.json").read_text() == "1"
    finally:
        subprocess.run(["chattr", "-a", out], check=True)
    fail(out)
    assert not hidden(out)


@pytest.mark.skipif(not ROOT, reason="needs root")
def test_a_folder_that_cannot_be_put_back_stays(tmp_path: Path) -> None:
    """Moving a folder takes permission to write to it, as its way up changes; root has it, but not of a locked one."""
    out = tmp_path / "out"
    prepare(out)
    if subprocess.run(["chattr", "+i", out / "data"], capture_output=True).returncode:
        pytest.skip("this file system has no such attribute")
    try:
        before = os.stat(out / "data").st_ino
        for number in ("2", "3"):
            run(out, number)
            assert found(out) == number and not hidden(out) and os.stat(out / "data").st_ino == before
    finally:
        subprocess.run(["chattr", "-i", out / "data"], check=True)


def test_moves_that_were_all_made_are_not_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    run(out, "1")
    go("in place", monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(commit.Transaction, "settle", lambda transaction: None)  # as if it were killed just before
        run(out, "2")
    assert hidden(out)
    fail(out)
    assert found(out) == "2" and not hidden(out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("file", "'.*file' is a file, not a folder"),
        ("file/below/out", "file' is a file, not a folder"),
        ("x" * 300, "too long"),
        ("absent/" + "x" * 300 + "/out", "too long"),
        ("a\0b", "cannot be the name of a file"),
        ("loop", "cannot be written"),
        ("taken", "report.json' is a folder"),
    ],
)
def test_what_no_result_can_be_written_to_is_refused_before_the_work(words: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "taken" / "report.json").mkdir(parents=True)
    before = sorted(os.walk(tmp_path))
    with pytest.raises(Refused, match=message):
        check(tmp_path / words, NAMES)
    with pytest.raises(Refused, match=message), staging(tmp_path / words, NAMES):
        pytest.fail("the work began")
    assert sorted(os.walk(tmp_path)) == before


def test_what_is_not_writable_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    (tmp_path / "out").mkdir()
    run(tmp_path / "out", "2")  # in place: the folder itself is writable
    assert found(tmp_path / "out") == "2" and not hidden(tmp_path / "out")
    with pytest.raises(Refused, match=f"cannot be made: '{tmp_path}' cannot be written"):
        check(tmp_path / "other" / "out")


def test_a_long_name_that_a_folder_can_have(tmp_path: Path) -> None:
    run(tmp_path / ("x" * 250), "2")
    assert found(tmp_path / ("x" * 250)) == "2"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folder", "folder' is a folder, and a file is to be written there"),
        ("file/below.json", "below.json' cannot be written: a part of its path is not a folder"),
        ("x" * 300, "x' is too long"),
        ("a\0b.json", "b.json' cannot be the name of a file: embedded null byte"),
        ("loop/below.json", "loop/below.json' cannot be written: a part of its path is not a folder"),
    ],
)
def test_one_file_that_cannot_be_written_is_named(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(Refused, match=message):
        files.write_text(tmp_path / name, "text")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "loop"]


@pytest.mark.parametrize("there", [False, True], ids=["made-meanwhile", "swapped"])
@pytest.mark.parametrize(
    "swap",
    [
        pytest.param(lambda out: out.symlink_to("other"), id="link"),
        pytest.param(lambda out: out.symlink_to("gone"), id="dangling"),
        pytest.param(lambda out: out.write_text("file"), id="file"),
        pytest.param(os.mkfifo, id="fifo"),
    ],
)
def test_what_takes_the_folders_place_is_not_followed(
    swap: Callable[[Path], None], there: bool, tmp_path: Path
) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    other.mkdir()
    (other / "report.json").write_text("mine")
    if there:
        out.mkdir()
    with pytest.raises(Refused, match="no folder any more"), staging(out, ["report.json"]) as new:
        (new / "report.json").write_text("2")
        if there:
            out.rename(tmp_path / "moved")
        swap(out)
    assert os.listdir(other) == ["report.json"] and (other / "report.json").read_text() == "mine"
    assert not list(tmp_path.glob(".*"))


def _make_link(path: Path) -> None:
    (path.parent / "kept").write_text("mine")
    path.symlink_to("kept")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(_make_link, "is a link to 'kept', which writing the file would replace", id="link"),
        pytest.param(lambda path: path.symlink_to("/dev/null"), "is a link to '/dev/null'", id="link-to-device"),
        pytest.param(lambda path: path.symlink_to("gone"), "is a link to 'gone'", id="dangling"),
        pytest.param(os.mkfifo, "is no regular file", id="fifo"),
    ],
)
@pytest.mark.parametrize("late", [False, True], ids=["there-before", "put-there-meanwhile"])
def test_one_file_replaces_nothing_but_a_file(
    make: Callable[[Path], None], message: str, late: bool, tmp_path: Path
) -> None:
    path = tmp_path / "x.md"
    if not late:
        make(path)
    with pytest.raises(Refused, match=message), files.whole(path) as temporary:
        assert late
        temporary.write_text("text")
        make(path)
    assert path.is_symlink() or path.is_fifo()
    assert not list(tmp_path.glob(".x-*"))


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_name_that_is_a_link_stays_one(when: str, tmp_path: Path) -> None:
    """The user keeps it: neither it nor what it leads to is replaced."""
    out, other = tmp_path / "out", tmp_path / "other"
    out.mkdir()
    other.write_text("other")
    link = out / NAMES[0]

    def attempt() -> None:
        with staging(out, NAMES) as new:
            if when == "meanwhile":
                link.symlink_to(other)
            write(new, "1")

    if when == "before":
        link.symlink_to(other)
    with pytest.raises(Refused, match="is a link to"):
        attempt()
    assert os.listdir(out) == [NAMES[0]] and link.is_symlink() and other.read_text() == "other" and not hidden(out)


def _swap(here: Path, there: Path) -> None:
    aside = here.with_name("aside")
    for source, target in ((here, aside), (there, here), (aside, there)):
        source.rename(target)


def _relink(here: Path, there: Path) -> None:
    here.rename(here.with_name("aside"))
    here.symlink_to(there)


@pytest.mark.parametrize("change", [_swap, _relink, lambda here, there: here.rename(here.with_name("aside"))])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_folder_above_that_is_swapped_is_refused(
    change: Callable[[Path, Path], None], is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of ours lies in either of them afterwards, and all of theirs does."""
    monkeypatch.setattr(system, "PATIENCE_S", 0.0)
    here, there = tmp_path / "here", tmp_path / "there"
    for place in (here, there):
        (place / "out").mkdir(parents=True)
        (place / "out" / "kept").write_text(place.name)
    out = here / ("out" if is_there else "new/out")

    def attempt() -> None:
        with staging(out, NAMES) as new:
            write(new, "1")
            change(here, there)
            fake = out.parent / new.parent.name / "new"  # what has its name by now is somebody else's
            fake.mkdir(parents=True, exist_ok=True)
            (fake / "theirs").write_text("theirs")

    with pytest.raises(Refused, match="a folder above it was moved or replaced meanwhile"):
        attempt()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(file.read_text() for file in files) == ["here", "theirs", "there"]


def test_without_locks_nothing_is_taken_for_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows: what a killed run has left stays, and results are as whole as ever."""
    monkeypatch.setattr(system, "fcntl", None)
    commit.begin(tmp_path / "out")
    prepare(tmp_path / "out")
    run(tmp_path / "out", "2")
    assert found(tmp_path / "out") == "2" and len(hidden(tmp_path / "out")) == 1


def test_the_package_is_imported_where_there_is_no_fcntl() -> None:
    code = "import sys; sys.modules['fcntl'] = None; import optimize.transaction; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("trick", ["linked folder", "name outside", "folder made outside"])
def test_a_hidden_folder_that_came_with_other_files_moves_and_removes_nothing(
    trick: str, is_sealed: bool, tmp_path: Path
) -> None:
    """A repository may hold one: whoever clones it owns it."""
    victim, out = tmp_path / "victim", tmp_path / "repository" / "optimized"
    (victim / "empty").mkdir(parents=True)
    (victim / "key").write_text("secret")
    out.mkdir(parents=True)
    hidden = out.parent / ".optimized.optimize-aaaaaaaa"
    hidden.mkdir()
    if trick == "linked folder":
        (hidden / "replaced").symlink_to(victim)
    else:
        (hidden / "replaced").mkdir()
    moving = [str(victim / "key")] if trick == "name outside" else ["absent"]
    made = [str(victim / "empty")] if trick == "folder made outside" else []
    (hidden / "new").mkdir()
    said = {"mark": [1, 0], "made": made, "doubles": {}, "stale": [], "moving": dict.fromkeys(moving)}
    if is_sealed:
        commit.write_note(hidden, said)
    else:
        (hidden / "transaction.json").write_text(json.dumps({**said, "home": os.lstat(hidden).st_ino}))
    with staging(out) as folder:
        (folder / "result").write_text("new")
    assert sorted(os.listdir(victim)) == ["empty", "key"] and (victim / "key").read_text() == "secret"
    assert os.listdir(out) == ["result"] and hidden.is_dir()


@pytest.mark.parametrize("kind", ["device", "fifo", "large"])
@pytest.mark.parametrize("place", ["beside", "inside"])
def test_a_note_that_never_ends_is_not_read(
    place: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "optimized"
    hidden = (out if place == "inside" else tmp_path) / ".optimized.optimize-aaaaaaaa"
    hidden.mkdir(parents=True)
    note = hidden / "transaction.json"
    if kind == "device":
        note.symlink_to("/dev/zero")
    elif kind == "fifo":
        os.mkfifo(note)
    else:
        note.write_text(" " * 2000)
        monkeypatch.setattr(commit, "_LONGEST_NOTE", 1000)
    with staging(out) as folder:
        (folder / "result").write_text("new")
    assert (out / "result").read_text() == "new" and os.path.lexists(note)


@pytest.mark.parametrize("secret", ["none", "another's", "the user's"])
def test_a_note_that_names_its_own_folder_loses_nothing(
    secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a new file system everybody knows which inodes folders will get; what is not sealed stays as it came."""
    out, hidden = tmp_path / "optimized", tmp_path / ".optimized.optimize-aaaaaaaa"
    for folder in (out / "data", hidden / "new", hidden / "replaced"):
        folder.mkdir(parents=True)
    (hidden / "new" / "keep").touch()
    (out / "mine.txt").write_text("mine")
    (out / "data" / "a").write_text("mine")
    inodes = {name: os.stat(out / name).st_ino for name in ("mine.txt", "data")}
    moving = {"mine.txt": [inodes["mine.txt"], 0], "data": [inodes["data"], 0], "keep": None}
    said = {"mark": doubles.stamp(hidden / "new"), "made": [], "doubles": {}, "stale": [], "moving": moving}
    with monkeypatch.context() as patch:
        if secret != "the user's":
            patch.setattr(sealing, "_secret", lambda: bytes(32) if secret == "another's" else None)
        commit.write_note(hidden, said)
    if secret == "none":
        monkeypatch.setattr(sealing, "_secret", lambda: None)
    with staging(out) as folder:
        (folder / "result").write_text("new")
    assert (out / "mine.txt").read_text() == (out / "data" / "a").read_text() == "mine"
    assert (out / "result").read_text() == "new" and hidden.exists() == (secret != "the user's")


def test_without_a_secret_results_are_whole_and_what_a_killed_run_has_left_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "_secret", lambda: None)
    dead = commit.begin(tmp_path / "out")
    os.close(dead.lock or 0)
    for generation in ("1", "2"):
        run(tmp_path / "out", generation)
    assert found(tmp_path / "out") == "2" and hidden(tmp_path / "out") == [str(dead.path)]
