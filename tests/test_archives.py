"""The list of members of an archive: its length is known before anybody reads it."""

import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from optimize import registry, regular
from optimize.data.array_files import Members, open_arrays
from optimize.errors import Refused
from optimize.load.archive import Archive
from optimize.load.identify import identify
from optimize.registry import target_of
from optimize.regular import open_zip
from optimize.targets.packaging import said_in_archive
from tests.fuzzing import zips

ENTRY, END = "<4sHHHHHHIIIHHHHHII", "<4sHHHHIIH"


def entries(count: int, at: int) -> tuple[bytes, int]:
    """Returns a list of so many members, and its length."""
    one = struct.pack(ENTRY, b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, at) + b"%08x"
    listed = b"".join(one % place for place in range(count))
    return listed, len(listed)


def archive(path: Path, count: int, *, at: int = 64, comment: bytes = b"") -> Path:
    """Writes an archive that is nothing but a list of members; holes of the file take no room on the disk."""
    listed, length = entries(count, 0)
    with path.open("wb") as file:
        file.write(b"PK\3\4" + b"\0" * 26)
        file.seek(at)
        file.write(listed + struct.pack(END, b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, length, at, len(comment)) + comment)
    return path


LONG = 700_000  # members; their list has 38 MB
#: Its bytes are those that the end of an archive begins with.
DISGUISED = 0x06054B50


@pytest.mark.parametrize("at", [64, DISGUISED], ids=["plain", "an end within the end"])
def test_a_list_of_a_million_members_is_not_read(at: int, tmp_path: Path) -> None:
    path = archive(tmp_path / "net.pt", LONG, at=at)
    with pytest.raises(Refused, match="whose list of members has 3"):
        open_zip(path)
    with pytest.raises(Refused, match="whose list of members has 3"):
        identify(path)
    with pytest.raises(Refused, match="whose list of members has 3"):
        open_arrays(path)
    with path.open("rb") as file, pytest.raises(Refused, match="'left' is an archive whose list"):
        Members(file, "left")


def test_an_end_in_the_comment_hides_none(tmp_path: Path) -> None:
    hidden = struct.pack(END, b"PK\5\6", 0, 0, 0, 0, 0, 0, 30) + b"x" * 30
    with pytest.raises(Refused, match="whose list of members has 3"):
        open_zip(archive(tmp_path / "net.pt", LONG, comment=hidden))


@pytest.mark.parametrize("name", ["net.pt", "net.pt2", "net.engine"])
def test_asking_what_a_file_is_reads_no_long_list_and_waits_for_no_pipe(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked of every path that a command is given, before its kind is known."""
    read = SimpleNamespace(ZipFile=lambda _: pytest.fail("its list of members was read"))
    monkeypatch.setattr(regular, "zipfile", read)
    os.mkfifo(tmp_path / "fifo.pt2")
    for path in (archive(tmp_path / name, LONG), tmp_path / "fifo.pt2", Path("/dev/zero")):
        assert said_in_archive(path, "cpu") == ""
        assert target_of(path) in (None, registry.find_target("tensorrt"))


def test_honest_archives_are_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(3), y=np.arange(4))
    assert sorted(open_arrays(tmp_path / "a.npz")) == ["x", "y"]
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive_inside:
        archive_inside.writestr("a", "b")
    with zipfile.ZipFile(tmp_path / "nested.zip", "w") as outer:  # the end of the inner one lies in its tail
        outer.writestr("inner.zip", inner.getvalue())
    with open_zip(tmp_path / "nested.zip") as outer:
        assert outer.namelist() == ["inner.zip"]
    (tmp_path / "no.zip").write_bytes(b"PK")
    with pytest.raises(zipfile.BadZipFile):
        open_zip(tmp_path / "no.zip")


def again(data: bytes, method: int = zipfile.ZIP_STORED, *, force_zip64: bool = False, folder: bool = False) -> bytes:
    """Returns an archive that Python has packed again."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", method) as new:
        if folder:
            new.mkdir("archive")
        for member in zips.read(data):
            with new.open(member.name.decode(), "w", force_zip64=force_zip64) as file:
                file.write(member.data)
    return packed.getvalue()


WRITERS: dict[str, Callable[[torch.nn.Module, io.BytesIO], object]] = {
    **{
        f"protocol {n}": lambda net, file, n=n: torch.save(net.state_dict(), file, pickle_protocol=n)
        for n in (2, 3, 4, 5)
    },
    "jit": lambda net, file: torch.jit.save(torch.jit.script(net), file, _extra_files={"READ.md": "x"}),
    "export": lambda net, file: torch.export.save(
        torch.export.export(net, (torch.ones(1, 2),)), file, extra_files={"READ.md": "x"}
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_what_torch_writes_is_read_in_one_way(write: Callable[..., object], tmp_path: Path) -> None:
    file = io.BytesIO()
    write(torch.nn.Linear(2, 2), file)
    data, deflated = file.getvalue(), zipfile.ZIP_DEFLATED
    for written in (data, again(data), again(data, deflated, folder=True), again(data, force_zip64=True)):
        (tmp_path / "m.pt").write_bytes(written)
        with Archive(tmp_path / "m.pt", "m.pt") as opened:
            assert "byteorder" in opened and "archive/byteorder" not in opened


def changed(count: int = 0, **fields: int | bytes) -> Callable[[bytes], bytes]:
    """Returns what writes an archive with a directory or end that say something else."""

    def change(data: bytes) -> bytes:
        members = zips.read(data)
        members[-1].central |= fields
        return zips.write(members, {"count": len(members) + count})

    return change


FIELD = struct.pack("<HHQQ", 1, 16, 5, 5)
ENDS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "before it": (lambda data: data[:30] + zips.write(zips.read(data)), "read in two ways"),
    "comment": (lambda data: zips.write(zips.read(data), {"comment": b"PK"}), "read in two ways"),
    "fewer": (changed(-1), "read in two ways"),
    "no record": (
        lambda data: zips.write([zips.Member(b"a/b", b"", central={"comment": b"PK\6\7" + bytes(16)})]),
        "read in two ways",
    ),
    "two records": (lambda data: data[:-42] + data[int.from_bytes(data[-6:-2], "little") :], "read in two ways"),
    "two sizes": (changed(size=2**32 - 1, packed=2**32 - 1, extra=FIELD * 2), "has two sizes"),
}


@pytest.mark.parametrize(("change", "message"), ENDS.values(), ids=ENDS)
def test_what_two_readers_would_read_in_two_ways(
    change: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    torch.save({}, tmp_path / "m.pt")
    (tmp_path / "m.pt").write_bytes(change((tmp_path / "m.pt").read_bytes()))
    with pytest.raises(Refused, match=message):
        Archive(tmp_path / "m.pt", "m.pt")
