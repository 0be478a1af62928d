"""Array files and images that are not what they claim: one clear refusal each, and nothing large is made of them."""

import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from optimize.data import InputSpec, open_data
from optimize.data.array_files import Members
from optimize.errors import OptimizeError, Refused
from optimize.regular import require_file

ONE = [InputSpec("x", (3,))]
IMAGE = [InputSpec("x", (3, 8, 8))]
BODY = np.zeros((2, 3), np.float32).tobytes()


def array_file(shape: str, dtype: str = "'<f4'", body: bytes = BODY, order: bool = False) -> bytes:
    """Returns an ``.npy`` with this header."""
    return with_header(f"{{'descr': {dtype}, 'fortran_order': {order}, 'shape': {shape}, }}\n", body)


def with_header(text: str, body: bytes = BODY) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode("latin-1") + body


BAD = {
    "16 TiB": (array_file("(1466015503701, 3)"), "claims 17592186044412 bytes"),
    "2^63": (array_file("(9223372036854775808, 3)"), "is no shape"),
    "2^62 twice": (array_file("(4611686018427387904, 4611686018427387904)"), "claims"),
    "negative": (array_file("(-2, 3)"), "is no shape"),
    "negative twice": (array_file("(-1, -6)"), "is no shape"),
    "bool": (array_file("(True, 3)"), "is no shape"),
    "axes": (array_file("(" + "1, " * 100 + ")", body=bytes(4)), "is no shape"),
    "nothing of much": (array_file("(0, 9223372036854775807)"), "."),
    "objects": (array_file("(2, 3)", "'|O'"), "Python objects"),
    "fields": (array_file("(2,)", "[('a', '<f4', (3,))]"), "."),
    "nothing each": (array_file("(9223372036854775807, 3)", "'|V0'"), "."),
    "deep": (with_header("(" * 9000 + "\n"), "cannot be read"),
    "digits": (array_file("(" + "9" * 5000 + ",)"), "cannot be read"),
    "code": (with_header("__import__('os').abort()\n"), "cannot be read"),
    "version": (b"\x93NUMPY\x09\x00" + BODY, "cannot be read"),
    "cut off": (b"\x93NUMPY", "cannot be read"),
    "short": (array_file("(3, 3)"), "claims 36 bytes, 24 are there"),
    "samples of nothing": (array_file("(288230376151711744, 0, 4)"), "288230376151711744 rows hold nothing"),
}


def packed(path: Path, *members: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def refused(path: Path, message: str, specs: list[InputSpec] = ONE) -> None:
    with pytest.raises(OptimizeError, match=message) as caught:
        list(open_data(path, inputs=specs).batches(2))
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_headers_that_lie(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    refused(tmp_path / "x.npy", message)
    refused(packed(tmp_path / "x.npz", ("x.npy", content)), message)


def claiming(path: Path, size: int) -> Path:
    """Writes an archive whose directory claims another size of its member."""
    packed(path, ("x.npy", array_file("(2, 3)")), method=zipfile.ZIP_STORED)
    content, at = bytearray(path.read_bytes()), path.read_bytes().index(b"PK\x01\x02")
    content[at + 24 : at + 28] = size.to_bytes(4, "little")
    path.write_bytes(bytes(content))
    return path


def test_members_that_are_not_what_the_archive_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = array_file("(2, 3)")
    refused(claiming(tmp_path / "a.npz", 2**31), "claims 2147483648 bytes")
    with pytest.warns(UserWarning, match="Duplicate"):
        path = packed(tmp_path / "b.npz", ("x.npy", good), ("x.npy", good))
    refused(path, "holds two arrays 'x'")
    refused(packed(tmp_path / "c.npz", ("x.npy", b"hello")), "cannot be read")
    refused(packed(tmp_path / "d.npz", ("x.npy", good), method=zipfile.ZIP_LZMA), "does not write")
    monkeypatch.setattr("optimize.data.array_files.free_bytes", lambda: 10)
    refused(packed(tmp_path / "e.npz", ("x.npy", good)), "needs .* bytes of memory; 5 are there for it")


def test_an_archive_that_inflates_is_read_only_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = packed(
        tmp_path / "x.npz", ("x.npy", array_file("(2, 3)")), ("z.npy", array_file("(99999, 3)", body=bytes(1199988)))
    )
    assert path.stat().st_size < 3000
    monkeypatch.setattr("optimize.data.array_files.free_bytes", lambda: 1000)
    assert open_data(path, inputs=ONE).count == 2
    members = Members(path)
    assert "z" in members and list(members) == ["x", "z"] and len(members) == 2
    with pytest.raises(Refused, match="bytes of memory"):
        members["z"]


def test_members_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty that each inflate to just what one may took 7 GB."""
    monkeypatch.setattr("optimize.data.array_files._INFLATED_BYTES", 2_000_000)
    blank = array_file("(99999, 3)", body=bytes(1199988))
    path = packed(tmp_path / "x.npz", *((f"{name}.npy", blank) for name in "xz"))
    members = Members(path)
    assert all(members["x"].shape == (99999, 3) for _ in range(3))
    refused(path, "2 of its arrays claim [0-9]* bytes together", [replace(ONE[0], name=name) for name in "xz"])
    refused(packed(tmp_path / "y.npz", ("x.npy", blank), ("y.npy", blank)), "2 of its arrays")


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_honest_files_open(save: Callable[..., None], order: str, tmp_path: Path) -> None:
    values = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    save(tmp_path / "x.npz", x=np.asarray(values, order=order), y=np.arange(4))
    np.save(tmp_path / "x.npy", np.asarray(values, order=order))
    for name in ("x.npz", "x.npy"):
        (batch,) = open_data(tmp_path / name, inputs=ONE).batches(4)
        assert batch.inputs[0].tolist() == values.tolist()


def test_a_model_without_inputs_takes_no_data(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    refused(tmp_path / "x.npy", "takes no inputs", [])


def test_names_that_lead_to_no_data(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, message in {"fifo": "is a fifo", "/dev/zero": "is a device", "a" * 5000: "too long"}.items():
        refused(tmp_path / name, message)
    for name, message in {"a\0b": "NUL", "a\udc80": "not UTF-8", "/proc/kmsg": "neither an"}.items():
        refused(Path(name), message)


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, is_array: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes((b"\x93NUMPY\x01\x00" if is_array else b"PK\x03\x04") + content)
    with pytest.raises(OptimizeError):
        open_data(path, inputs=ONE)


def png(width: int, height: int) -> bytes:
    """Returns the head of a PNG that claims these sizes."""
    import struct
    import zlib

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def animated(path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    frames[0].save(path, save_all=True, append_images=frames[1:])


def test_images_that_are_refused(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jpg"
    Image.effect_noise((64, 64), 50).convert("RGB").save(whole)
    cut = whole.read_bytes()[:600]
    whole.unlink()
    bad = {
        "1e5 x 1e5.png": (png(100_000, 100_000), "decompression bomb"),
        "1e4 x 1e4.png": (png(10_000, 10_000), "decompression bomb"),
        "cut.jpg": (cut, "(?i)truncated"),
        "missing.png": (png(64, 64), "cannot be read as an image"),
        "script.png": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "cannot identify"),
        "empty.png": (b"", "cannot identify"),
    }
    for name, (content, message) in bad.items():
        (tmp_path / name).write_bytes(content)
        refused(tmp_path, message, IMAGE)
        with pytest.raises(Refused) as caught:
            open_data(tmp_path, inputs=IMAGE)
        assert " object at " not in str(caught.value) and "_" not in caught.value.what.rpartition("'")[2]
        (tmp_path / name).unlink()
    for name in ("a.gif", "a.webp"):
        animated(tmp_path / name)
        refused(tmp_path, "several pictures", IMAGE)
        (tmp_path / name).unlink()


def test_a_file_that_is_large_by_holes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """Memory and time are granted by size: a hole would buy them."""
    hollow, empty, small = (tmp_path / f"{name}.npy" for name in ("hollow", "empty", "small"))
    for path, size in ((hollow, 1 << 40), (empty, 1 << 40), (small, 1 << 20)):
        path.touch() if path is empty else np.save(path, np.zeros(4, np.float32))
        os.truncate(path, size)
    for path in (hollow, empty):
        with pytest.raises(Refused, match="nearly all of them are holes"):
            require_file(path)
    assert require_file(small) == 1 << 20
