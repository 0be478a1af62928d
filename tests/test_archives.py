"""The list of members of an archive: its length is known before anybody reads it."""

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from optimize.data.array_files import Members, open_arrays
from optimize.errors import Refused
from optimize.load.identify import identify
from optimize.regular import refuse_directory

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
        refuse_directory(path)
    with pytest.raises(Refused, match="whose list of members has 3"):
        identify(path)
    with pytest.raises(Refused, match="whose list of members has 3"):
        open_arrays(path)
    with path.open("rb") as file, pytest.raises(Refused, match="'left' is an archive whose list"):
        Members(file, "left")


def test_an_end_in_the_comment_hides_none(tmp_path: Path) -> None:
    hidden = struct.pack(END, b"PK\5\6", 0, 0, 0, 0, 0, 0, 30) + b"x" * 30
    with pytest.raises(Refused, match="whose list of members has 3"):
        refuse_directory(archive(tmp_path / "net.pt", LONG, comment=hidden))


def test_honest_archives_are_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(3), y=np.arange(4))
    assert sorted(open_arrays(tmp_path / "a.npz")) == ["x", "y"]
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive_inside:
        archive_inside.writestr("a", "b")
    with zipfile.ZipFile(tmp_path / "nested.zip", "w") as outer:  # the end of the inner one lies in its tail
        outer.writestr("inner.zip", inner.getvalue())
    refuse_directory(tmp_path / "nested.zip")
    (tmp_path / "no.zip").write_bytes(b"PK")
    refuse_directory(tmp_path / "no.zip")
