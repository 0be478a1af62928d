"""Data of every kind, read as batches that fit; and what is said of data that does not."""

import itertools
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from optimize import bounds
from optimize.data import ImagePreprocessing, InputSpec, Samples, open_data
from optimize.data.array_files import open_arrays
from optimize.errors import OptimizeError, Refused, UsageError
from optimize.measure.feed import Asked, draw
from optimize.targets.base import TensorSpec

ONE = (InputSpec("x", (3, 4, 4)),)
TWO = (InputSpec("ids", (None,), "int64"), InputSpec("mask", (5,)))
RAW = InputSpec("pixels", (3, 8, 8), "uint8")
X = np.random.default_rng(0).normal(size=(10, 3, 4, 4)).astype(np.float32)
Y = np.arange(10) % 4


def generated() -> Iterator[Any]:
    """Give the data in uneven batches."""
    for part in (slice(0, 3), slice(3, 9), slice(9, 10)):
        yield torch.from_numpy(X[part]), torch.from_numpy(Y[part])


def refilled() -> Iterator[Any]:
    """Give the data a sample at a time in the same two tensors."""
    x, y = torch.empty(1, 3, 4, 4), torch.empty(1, dtype=torch.int64)
    for place in range(10):
        yield x.copy_(torch.from_numpy(X[place])), y.fill_(int(Y[place]))


def failing() -> Any:
    raise RuntimeError("disk on fire")


def whole(data: Samples, batch_size: int = 4) -> tuple[torch.Tensor, torch.Tensor | None]:
    batches = list(data.batches(batch_size))
    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    labels = [batch.labels for batch in batches if batch.labels is not None]
    return torch.cat([batch.inputs[0] for batch in batches]), torch.cat(labels) if labels else None


def save(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: save(folder / "d.npz", x=X, y=Y),
        lambda folder: save(folder / "d.npz", images=X, labels=Y[:, None]),
        lambda folder: save(folder / "d.npz", anything=X, targets=Y.astype(np.uint8)),
        lambda folder: "tests.test_data:generated",
        lambda folder: generated,
        lambda folder: refilled,
        lambda folder: list(generated()),
        lambda folder: (X, Y),
        lambda folder: {"x": torch.from_numpy(X), "labels": Y},
        lambda folder: [((X[:6],), Y[:6]), {"x": X[6:], "y": Y[6:]}],
        lambda folder: DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=3),
        lambda folder: lambda: (X, Y),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 4, 10, 64])
def test_labelled_data_reads_the_same_twice(tmp_path: Path, make: Any, batch_size: int) -> None:
    data = open_data(make(tmp_path), inputs=ONE, labelled=True)
    assert data.labelled and data.count in (10, None)
    for _ in range(2):
        inputs, labels = whole(data, batch_size)
        assert torch.equal(inputs, torch.from_numpy(X))
        assert labels is not None and labels.dtype == torch.int64 and torch.equal(labels, torch.from_numpy(Y))


def test_npy_tensor_and_list_of_tensors_have_no_labels(tmp_path: Path) -> None:
    np.save(tmp_path / "d.npy", X.astype(">f8"))
    for spec in (str(tmp_path / "d.npy"), torch.from_numpy(X), X, [torch.from_numpy(X[:7]), X[7:]]):
        data = open_data(spec, inputs=ONE)
        assert not data.labelled
        torch.testing.assert_close(whole(data)[0], torch.from_numpy(X))
        with pytest.raises(UsageError, match="has no labels"):
            open_data(spec, inputs=ONE, labelled=True)


def test_an_array_that_is_nearly_called_labels_is_named(tmp_path: Path) -> None:
    told = rf"Nothing takes the array 'lables' of '{tmp_path}/d.npz'. Did you mean 'labels'?"
    save(tmp_path / "d.npz", x=X, lables=Y, order=Y)
    assert open_data(tmp_path / "d.npz", inputs=ONE).notes == (told,)
    with pytest.raises(UsageError, match="has no labels") as refused:
        open_data(tmp_path / "d.npz", inputs=ONE, labelled=True)
    assert refused.value.hint.startswith(told)
    save(tmp_path / "d.npz", x=X, lables=Y, y=Y)
    assert open_data(tmp_path / "d.npz", inputs=ONE).notes == ()


def test_several_inputs(tmp_path: Path) -> None:
    ids, mask = np.arange(24).reshape(4, 6), np.ones((4, 5), np.float32)
    save(tmp_path / "d.npz", mask=mask, ids=ids.astype(np.int32), y=np.arange(4))
    for spec in (tmp_path / "d.npz", [(ids, mask, np.arange(4))], [((ids, mask), np.arange(4))]):
        (batch,) = open_data(spec, inputs=TWO, labelled=True).batches(8)
        assert torch.equal(batch.inputs[0], torch.from_numpy(ids)) and batch.inputs[0].dtype == torch.int64
        assert torch.equal(batch.inputs[1], torch.from_numpy(mask))
    assert not open_data([(ids, mask)], inputs=TWO).labelled
    save(tmp_path / "d.npz", x=mask, ids=ids)
    with pytest.raises(UsageError, match=r"arrays 'x', 'ids'; the model takes 'ids', 'mask'"):
        open_data(tmp_path / "d.npz", inputs=TWO)


def test_batches_of_another_length_are_not_joined() -> None:
    batches = [(np.zeros((3, length), np.int64), np.zeros((3, 5), np.float32)) for length in (4, 4, 7)]
    read = list(open_data(batches, inputs=TWO).batches(4))
    assert [tuple(batch.inputs[0].shape) for batch in read] == [(4, 4), (2, 4), (3, 7)]


def test_values_are_kept_or_refused() -> None:
    def first(values: np.ndarray, dtype: str) -> torch.Tensor:
        return next(iter(open_data(values, inputs=(InputSpec("x", (2,), dtype),)).batches(1))).inputs[0]

    assert torch.equal(first(np.array([[0, 255]], np.uint8), "float32"), torch.tensor([[0.0, 1.0]]))
    assert first(np.array([[0, 255]], np.uint8), "uint8").dtype == torch.uint8
    assert torch.equal(first(np.array([[1, 7]]), "float32"), torch.tensor([[1.0, 7.0]]))
    assert first(np.array([[1.5, 2]]), "float16").dtype == torch.float16
    assert first(np.array([[1, 7]], np.uint16), "int64").dtype == torch.int64
    assert first(np.array([[True, False]]), "bool").dtype == torch.bool
    with pytest.raises(Refused, match=r"2\^63 and more"):
        first(np.array([[1, 2**64 - 1]], np.uint64), "float32")
    with pytest.raises(UsageError, match="holds float32 for input 'x', which takes int64"):
        first(np.zeros((1, 2), np.float32), "int64")
    with pytest.raises(UsageError, match="that float32 cannot hold"):
        first(np.array([[2**24 + 1, 0]]), "float32")
    with pytest.raises(UsageError, match="that int8 cannot hold"):
        first(np.array([[300, 0]]), "int8")
    with pytest.raises(Refused, match=r"an infinity in sample 0 .* \(as float16\)"):
        first(np.array([[1e6, 0]]), "float16")
    for odd in (np.array([["a", "b"]]), np.array([[1j, 0]]), np.array([[None, {}]], dtype=object)):
        with pytest.raises(Refused, match="not numbers a model takes"):
            first(odd, "float32")


def test_bad_sample_is_named_when_it_is_reached(tmp_path: Path) -> None:
    broken = np.tile(X, (40, 1, 1, 1))
    broken[371, 1, 2, 3] = np.nan
    data = open_data(save(tmp_path / "d.npz", x=broken), inputs=ONE)
    with pytest.raises(Refused, match="NaN in sample 371 of input 'x'"):
        list(data.batches(7))
    broken[371] = -np.inf
    with pytest.raises(Refused, match="an infinity in sample 371"):
        list(open_data([broken[:300], broken[300:]], inputs=ONE).batches(7))


@pytest.mark.parametrize(
    ("array", "match", "hint"),
    [
        (np.zeros((2, 4, 4, 3)), r"\[2, 4, 4, 3\] for input 'x', which takes \[N, 3, 4, 4\]", "channels-last"),
        (np.zeros((3, 4, 4)), "has the shape", "without the batch dimension"),
        (np.zeros((2, 3, 5, 5)), r"has the shape \[2, 3, 5, 5\]", ""),
        (np.zeros(()), r"has the shape \[\]", ""),
        (np.zeros((0, 3, 4, 4)), "is empty", ""),
    ],
)
def test_wrong_shapes(tmp_path: Path, array: np.ndarray, match: str, hint: str) -> None:
    for spec in (save(tmp_path / "d.npz", x=array), array):
        with pytest.raises(Refused, match=match) as caught:
            open_data(spec, inputs=ONE)
        assert hint in caught.value.hint


def test_normalised_pictures_for_a_file_that_normalises_are_told_what_it_takes(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"which takes \[N, 4, 4, 3\]") as caught:
        open_data(np.zeros((2, 3, 4, 4)), inputs=[InputSpec("x", (4, 4, 3), "uint8")])
    assert "uint8, not normalised, channels last" in caught.value.hint


@pytest.mark.parametrize(
    ("labels", "match"),
    [
        (Y.astype(np.float32), "are float32; they must be class numbers"),
        (np.eye(10) > 0, "are bool"),
        (Y - 1, "negative label for sample 0"),
        (Y[:9], r"10 of 'x', 9 of 'y'\.\nRow n of each array is of sample n: give all"),
        (np.array(3), "different numbers of samples"),
        (np.array(list("abcdefghij")), "labels of .* not numbers"),
    ],
)
def test_wrong_labels(tmp_path: Path, labels: np.ndarray, match: str) -> None:
    with pytest.raises(OptimizeError, match=match):
        open_data(save(tmp_path / "d.npz", x=X, y=labels), inputs=ONE, labelled=True)


@pytest.mark.parametrize("made", [lambda boxes: torch.zeros(boxes, 5), lambda boxes: {"boxes": torch.zeros(boxes, 4)}])
def test_boxes_that_are_not_padded_are_told_how_to_be(made: Any) -> None:
    with pytest.raises(Refused, match=r"of different sizes(.|\n)*boxes to \[N, G, 5\].* negative for padding"):
        list(open_data([(X[:2], [made(1), made(2)])], inputs=ONE).batches(2))


def test_label_maps_keep_their_shape() -> None:
    data = open_data([(X, np.zeros((10, 4, 4), int))], inputs=ONE)
    assert next(data.batches(3)).labels.shape == (3, 4, 4)
    with pytest.raises(Refused, match=r"3 of 'x', 2 of 'labels'\.\nRow n of each"):
        open_data([(X[:3], Y[:2])], inputs=ONE)
    with pytest.raises(Refused, match="Some batches have labels"):
        list(open_data([(X, Y), X], inputs=ONE).batches(64))


def test_files_that_are_no_data(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    with pytest.raises(Refused, match=r"no data 'nowhere\.npz'"):
        open_data("nowhere.npz", inputs=ONE)
    path.write_text("x,y\n1,2\n")
    with pytest.raises(Refused, match=r"neither an \.npz nor an \.npy"):
        open_data(path, inputs=ONE)
    np.savez(path, x=np.array([{}, None], dtype=object))
    with pytest.raises(Refused, match="holds Python objects"):
        open_data(path, inputs=ONE)
    np.save(tmp_path / "o.npy", np.array([{}, None], dtype=object))
    with pytest.raises(Refused, match="holds Python objects"):
        open_data(tmp_path / "o.npy", inputs=ONE)
    np.savez(path, x=X)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(Refused, match="cannot be read"):
        open_data(path, inputs=ONE)
    np.savez(path, y=Y)
    with pytest.raises(UsageError, match="has the arrays 'y'"):
        open_data(path, inputs=ONE)


def test_of_many_arrays_a_few_are_named() -> None:
    with pytest.raises(UsageError, match=r"has the arrays 'a{160}\.\.\. .*, 'n6', 59993 more; the model") as caught:
        open_data({"a" * 65_000: X, **{f"n{place}": X for place in range(60_000)}}, inputs=TWO)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("spec", "error", "match"),
    [
        (iter([X]), UsageError, "read only once"),
        ([], Refused, "is empty"),
        (lambda: iter(()), Refused, "is empty"),
        (7, UsageError, "cannot be read as data"),
        ([(X, Y, Y)], UsageError, "a batch of 3 parts"),
        (["text"], UsageError, "a batch of type str"),
        (TensorDataset(torch.from_numpy(X)), UsageError, "Dataset gives samples"),
        (failing, Refused, "raised RuntimeError: disk on fire"),
        (lambda: sys.exit(0), Refused, "raised SystemExit: 0"),
        (lambda: iter([(X, torch.zeros(10).to_sparse())]), Refused, "is a sparse tensor"),
        (torch.from_numpy(X).to("meta"), Refused, "is a tensor that is without values"),
        (torch.quantize_per_tensor(torch.from_numpy(X), 0.1, 0, torch.qint8), Refused, "is a tensor that is quantized"),
        (np.ma.masked_array(X, X > 0), Refused, "is masked"),
        ((X, [[1], *[[1, 2]] * 9]), Refused, "Reading <tuple> raised ValueError"),
        ("tests.test_data:failing", Refused, r"on fire\.\nIt is called without arguments, and .* A batch is \(x\) or"),
        (lambda one: one, Refused, r"raised TypeError: .*'one'\.\nIt is called without arguments"),
        ("tests.test_data:no_such_name", Refused, "there is no 'no_such_name'"),
        ("no_such_package:data", Refused, "no module 'no_such_package'"),
    ],
)
def test_python_data_that_is_refused(spec: Any, error: type[OptimizeError], match: str) -> None:
    with pytest.raises(error, match=match):
        open_data(spec, inputs=ONE)


def test_labels_of_two_kinds_are_refused() -> None:
    data = open_data([(X, torch.zeros(len(X))), (X, np.array(["a"] * len(X)))], inputs=ONE)
    with pytest.raises(Refused, match="texts for labels and some have numbers"):
        list(data.batches(len(X) + 1))


def test_batch_size_must_be_positive() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        open_data(X, inputs=ONE).batches(0)


def picture(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (20, 10), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path)


def test_image_folder_normalizes_and_takes_classes_in_turn(tmp_path: Path) -> None:
    for index in range(3):
        picture(tmp_path / "ant" / f"{index}.png", (255, 0, 0))
    picture(tmp_path / "bee" / "deep" / "b.PNG", (0, 51, 0), mode="P")
    picture(tmp_path / "cat" / "c.png", (0, 0, 255), size=(7, 30), mode="RGBA")
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    data = open_data(tmp_path, inputs=(InputSpec("x", (3, 8, 8)),), labelled=True)
    inputs, labels = whole(data, 2)
    assert data.count == 5 and labels is not None and labels.tolist() == [0, 1, 2, 0, 0]
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    colours = torch.tensor([[1.0, 0, 0], [0, 0.2, 0], [0, 0, 1.0], [1.0, 0, 0], [1.0, 0, 0]])
    expected = ((colours - mean) / std)[:, :, None, None].expand(-1, -1, 8, 8)
    torch.testing.assert_close(inputs, expected, rtol=0, atol=1e-5)


def test_image_is_resized_and_cropped_in_the_centre(tmp_path: Path) -> None:
    ramp = np.broadcast_to(np.arange(256, dtype=np.uint8)[None, :, None], (64, 256, 3))
    (tmp_path / "only").mkdir()
    Image.fromarray(np.ascontiguousarray(ramp)).save(tmp_path / "only" / "r.png")
    inputs, _ = whole(open_data(tmp_path, inputs=(InputSpec("x", (3, 56, 56), "uint8"),)))
    assert inputs.dtype == torch.uint8
    # The shorter side is 64 = 56 / 0.875 already, so the crop keeps columns 100 to 155.
    assert torch.equal(inputs[0, 0, 0], torch.arange(100, 156, dtype=torch.uint8))


def test_an_image_too_narrow_to_be_resized_is_refused_by_name(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "thin.png", (0, 0, 0), size=(30000, 1))
    with pytest.raises(
        Refused, match=r"thin.png' cannot be prepared: An image of 30000 x 1 would become one of 7680000 x 256"
    ):
        open_data(tmp_path, inputs=(InputSpec("x", (3, 224, 224)),))


def test_a_class_that_leads_to_all_of_the_disk_is_refused(tmp_path: Path) -> None:
    picture(tmp_path / "images" / "a" / "0.png", (0, 0, 0))
    for target in (Path("/"), tmp_path, tmp_path / "images"):
        (tmp_path / "images" / "b").symlink_to(target)
        with pytest.raises(Refused, match="is a link to a folder that holds"):
            open_data(tmp_path / "images", inputs=(InputSpec("x", (3, 8, 8)),))
        (tmp_path / "images" / "b").unlink()


def test_a_link_to_a_folder_inside_a_class_is_not_left_out_silently(tmp_path: Path) -> None:
    picture(tmp_path / "other" / "0.png", (0, 0, 0))
    picture(tmp_path / "images" / "a" / "0.png", (0, 0, 0))
    (tmp_path / "images" / "b").symlink_to(tmp_path / "other")  # a class may be one, and a picture
    (tmp_path / "images" / "a" / "1.png").symlink_to(tmp_path / "other" / "0.png")
    specs = (InputSpec("x", (3, 8, 8)),)
    assert len(whole(open_data(tmp_path / "images", inputs=specs))[0]) == 3
    (tmp_path / "images" / "a" / "more").symlink_to(tmp_path / "other")
    with pytest.raises(Refused, match="a/more' is a link to a folder: only a class may be one"):
        open_data(tmp_path / "images", inputs=specs)


def test_integer_class_names_sort_by_value_and_grey_inputs(tmp_path: Path) -> None:
    for name, grey in (("10", 200), ("2", 100), ("0", 0)):
        picture(tmp_path / name / "a.png", (grey, grey, grey))
    specs = (InputSpec("x", (1, 8, 8)),)
    with pytest.raises(UsageError, match="has 1 channels, the image preprocessing 3 means"):
        open_data(tmp_path, inputs=specs)
    inputs, labels = whole(open_data(tmp_path, inputs=specs, image=ImagePreprocessing(mean=(0.0,), std=(1.0,))))
    assert labels is not None and labels.tolist() == [0, 1, 2]
    torch.testing.assert_close(inputs[:, 0, 4, 4] * 255, torch.tensor([0.0, 100, 200]))


def test_a_picture_that_is_written_over_and_over_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over 9,000 x 9,000 pixels takes a hundred bytes of a file and a third of a second to read."""
    Image.new("L", (64, 64), 128).save(tmp_path / "a.jpg", progressive=True)
    content = (tmp_path / "a.jpg").read_bytes()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64 * 64)
    assert whole(open_data(tmp_path, inputs=(RAW,)))[0].shape == (1, 3, 8, 8)
    (tmp_path / "a.jpg").write_bytes(content[:-2] + 20 * content[content.rindex(b"\xff\xda") : -2] + content[-2:])
    with pytest.raises(Refused, match=r"writes its 64 x 64 pixels \d\d times"):
        open_data(tmp_path, inputs=(RAW,))


def _tiff_of_one_long_entry() -> bytes:
    """Returns a TIFF that says for each of 20 million samples of a pixel how many bits it has."""
    count = 20_000_000
    entries = [(256, 4, 1, 2), (257, 4, 1, 2), (258, 3, count, 200), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8)]
    table = b"".join(struct.pack("<HHLL", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<LH", 8, len(entries)) + table + bytes(4) + bytes(2 * count + 200)


def _tiff_of_pieces(order: str, magic: int, tag: int, count: int) -> bytes:
    """Returns a TIFF of 16 x 16 grey pixels in so many strips of a row, or tiles of a pixel, all at one place."""
    short, long = 3, 4
    entries = [(256, short, 1, 16), (257, short, 1, 16), (258, short, 1, 8), (259, short, 1, 1), (262, short, 1, 1)]
    strips = [(273, long, count, 0), (278, short, 1, 1)]
    entries += strips if tag == 273 else [(322, short, 1, 1), (323, short, 1, 1), (324, long, count, 0)]
    big = magic == 43
    head, word, form = ("HHHQ", "Q", "HHQ") if big else ("HL", "H", "HHL")
    end = struct.calcsize(order + head) + 2 + struct.calcsize(order + word)
    end += len(entries) * struct.calcsize(order + form + ("Q" if big else "L")) + struct.calcsize("Q" if big else "L")
    table = b""
    for name, kind, many, value in entries:
        where = struct.pack(order + "H", value).ljust(8 if big else 4, b"\0")
        if many > 1:
            where = struct.pack(order + ("Q" if big else "L"), end)
        table += struct.pack(order + form, name, kind, many) + where
    first = (8, 0, 16) if big else (8,)
    start = {"<": b"II", ">": b"MM"}[order] + struct.pack(order + head, magic, *first)
    body = struct.pack(order + word, len(entries)) + table + bytes(8 if big else 4)
    return start + body + struct.pack(order + "L", end) * count + bytes(256)


@pytest.mark.parametrize("tag", [273, 324], ids=["strips", "tiles"])
@pytest.mark.parametrize(("order", "magic"), [("<", 42), (">", 42), ("<", 43)])
def test_a_tiff_in_more_pieces_than_pictures_have_is_refused_early(
    order: str, magic: int, tag: int, tmp_path: Path
) -> None:
    """Each is listed and read in Python: eight million of them, in 16 MB, took nine minutes and 2 GB."""
    (tmp_path / "a.tif").write_bytes(_tiff_of_pieces(order, magic, tag, 16 if tag == 273 else 256))
    assert whole(open_data(tmp_path, inputs=(RAW,)))[0].shape[0] == 1
    (tmp_path / "a.tif").write_bytes(_tiff_of_pieces(order, magic, tag, 2_000_000))
    with pytest.raises(Refused, match="it is in 2000000 pieces, and read are 65536"):
        open_data(tmp_path, inputs=(RAW,))


@pytest.mark.parametrize("content", [b"II", b"II*\0\xff\xff\xff\xff", b"II+\0\x08\0\0\0" + b"\xff" * 8, b"MM\0*\0\0"])
def test_a_tiff_that_is_cut_off_is_called_so(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.tif").write_bytes(content)
    with pytest.raises(Refused, match=r"a\.tif' cannot be read as an image: it is cut off"):
        whole(open_data(tmp_path, inputs=(RAW,)))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("blanks.ppm", b"P6 " + b" " * 10**6 + b"2 2 255 " + bytes(12)),
        ("remark.ppm", b"P6 #" + b"x" * 10**6 + b"\n2 2 255 " + bytes(12)),
        ("remarks.ppm", b"P3 4 1 255 " + b"#\n" * 2000 + b"1 " * 12),
        ("markers.jpg", b"\xff\xd8" + b"\xff\xe5\x00\x02" * 10**5),
        ("chunks.png", b"\x89PNG\r\n\x1a\n" + struct.pack(">L4sL", 0, b"teSt", zlib.crc32(b"teSt")) * 10**5),
        ("long.tif", _tiff_of_one_long_entry()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_picture_that_is_padded_is_refused_early(name: str, content: bytes, tmp_path: Path) -> None:
    """Decoders read blanks and empty chunks one by one in Python: a file of 2 GB took 13 minutes."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refused, match=r"padded|comments"):
        whole(open_data(tmp_path, inputs=(RAW,)))


@pytest.mark.parametrize("kind", ["gif", "png", "jpg", "tif", "webp", "ppm", "bmp"])
def test_an_honest_picture_of_some_size_is_not_padded(kind: str, tmp_path: Path) -> None:
    noise = torch.randint(0, 256, (750, 1000, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    Image.fromarray(noise.numpy()).save(tmp_path / f"a.{kind}")
    assert whole(open_data(tmp_path, inputs=(RAW,)))[0].shape[0] == 1


def test_a_bmp_in_runs_is_read_or_called_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its decoder asks for each byte by itself."""
    line = bytes(value for column in range(240) for value in (1, column)) + b"\0\0"
    table, body = bytes(value for grey in range(256) for value in (grey, grey, grey, 0)), line * 240 + b"\0\1"
    sizes = struct.pack("<IiiHHIIiiII", 40, 240, 240, 1, 8, 1, len(body), 0, 0, 256, 0)
    start = 14 + len(sizes + table)
    content = struct.pack("<2sIHHI", b"BM", start + len(body), 0, 0, start) + sizes + table + body
    (tmp_path / "runs.bmp").write_bytes(content)
    assert whole(open_data(tmp_path, inputs=(RAW,)))[0].max() > 100
    monkeypatch.setattr("optimize.data.image_folder._MOST_RUNS", 100_000)
    with pytest.raises(Refused, match="run-length encoded BMP"):
        open_data(tmp_path, inputs=(RAW,))


def test_flat_folder_has_no_labels_and_reads_lazily(tmp_path: Path) -> None:
    for index in range(40):
        picture(tmp_path / f"{index:02}.jpg", (index, 0, 0))
    data = open_data(tmp_path, inputs=(RAW,))
    assert data.count == 40 and not data.labelled
    (tmp_path / "35.jpg").write_text("broken")
    reading = data.batches(16)
    assert len(next(reading)) == 16 and len(next(reading)) == 16
    with pytest.raises(Refused, match=r"35\.jpg' cannot be read as an image"):
        next(reading)
    with pytest.raises(UsageError, match="has no labels"):
        open_data(tmp_path, inputs=(RAW,), labelled=True)


@pytest.mark.parametrize("kind", ["rows", "turned", "bytes swapped", "no axes", "wide", "nothing"])
def test_rows_of_a_file_are_those_of_its_array(kind: str, tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).normal(size=(300, 4))
    array = {
        "rows": numbers.astype(np.float32),
        "turned": np.asfortranarray(numbers),
        "bytes swapped": numbers.astype(">f4"),
        "no axes": np.float32(1),
        "wide": numbers.reshape(300, 2, 1, 2),
        "nothing": numbers[:0],
    }[kind]
    np.save(tmp_path / "x.npy", array)
    found = open_arrays(tmp_path / "x.npy")
    assert np.shape(found) == np.shape(array) and found.dtype == array.dtype  # type: ignore[union-attr]
    for part in (slice(0, 7), slice(7, 256), slice(250, 999)) if np.ndim(array) else ((),):
        assert np.array_equal(found[part], array[part])  # type: ignore[index]


def test_a_file_that_is_written_anew_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """Mapped, it ended the process by SIGBUS."""
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((1000, 3, 4, 4), np.float32))
    reading = open_data(path, inputs=ONE).chunks()
    next(reading)
    np.save(path, np.zeros((10, 3, 4, 4), np.float32))
    with pytest.raises(Refused, match=r"x\.npy' became shorter while it was read"):
        next(reading)


def test_large_samples_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    """256 of 12 MB took 3 GB and as much again to look through, of a file that takes nothing on the disk."""
    shape = (40, 3, 1000, 1000)
    large = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=shape)
    del large
    free = (InputSpec("x", (3, None, None)),)
    data = open_data(tmp_path / "x.npy", inputs=free)
    assert data.count == 40 and [len(chunk) for chunk in itertools.islice(data.chunks(), 2)] == [5, 5]
    assert [len(chunk) for chunk in open_data(X, inputs=ONE).chunks()] == [10]
    for name in ("a", "b", "c"):
        picture(tmp_path / "pictures" / f"{name}.png", (0, 0, 0))
    pictures = open_data(tmp_path / "pictures", inputs=free, image=ImagePreprocessing(size=(1800, 1800)))
    assert [len(chunk) for chunk in pictures.chunks()] == [1, 1, 1]


def test_image_folders_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="holds no images"):
        open_data(tmp_path, inputs=(RAW,))
    picture(tmp_path / "a" / "a.png", (0, 0, 0))
    with pytest.raises(UsageError, match="not one image"):
        open_data(tmp_path, inputs=TWO)
    for numbers, shape in ((12288, "3,64,64"), (784, "1,28,28"), (10, "3,224,224"), (None, "3,224,224")):
        with pytest.raises(UsageError, match=rf"not one image .*\n.* say so: --input-shape {shape}\."):
            open_data(tmp_path, inputs=(InputSpec("x", (numbers,)),))
    free = (InputSpec("x", (3, None, None)),)
    with pytest.raises(UsageError, match="say which size"):
        open_data(tmp_path, inputs=free)
    inputs, _ = whole(open_data(tmp_path, inputs=free, image=ImagePreprocessing(size=(6, 6))))
    assert inputs.shape == (1, 3, 6, 6)
    with pytest.raises(UsageError, match="do not fit input"):
        open_data(tmp_path, inputs=(RAW,), image=ImagePreprocessing(size=(6, 6)))


def test_pictures_without_a_size_ask_for_one_option(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(UsageError, match="nothing says what size") as refused:
        open_data(tmp_path, inputs=[InputSpec("x", (None, None, None))])
    assert refused.value.hint == "Give --input-shape, such as 3,224,224, or --preprocess size=224."


@pytest.mark.parametrize(
    "given",
    [
        {"mean": "nan"},
        {"mean": "0.5,-inf"},
        {"mean": "127.5"},
        {"std": "58.4,57.1,57.4"},
        {"std": "1,0,1"},
        {"std": "nan"},
        {"std": "1e-40"},
    ],
    ids=lambda given: "-".join(*given.items()),
)
def test_pictures_are_not_moved_or_stretched_by_what_none_have(given: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"their pixels are in \[0, 1\]"):
        ImagePreprocessing.read(given)
    with pytest.raises(UsageError, match=r"their pixels are in \[0, 1\]"):
        Asked((), preprocessing=given).opened(None)  # on noise, too, which nobody prepares


def test_noise_for_many_inputs_is_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was bounded on its own: a file of 700 bytes states as many as it likes."""
    monkeypatch.setattr(bounds, "free_bytes", lambda: 8 << 20)
    specs = [TensorSpec(f"x{place}", ("batch", 1 << 16), "float32") for place in range(5)]
    assert len(draw(specs[:4], 1, np.random.default_rng(0))) == 4
    with pytest.raises(Refused, match="5 inputs are larger together than an eighth of the free memory"):
        draw(specs, 1, np.random.default_rng(0))


@pytest.mark.parametrize("kind, ending", [("uint16", "png"), ("uint16", "tif"), ("int32", "tif"), ("float32", "tif")])
def test_pixels_of_more_than_eight_bits_are_not_made_white(kind: str, ending: str, tmp_path: Path) -> None:
    Image.fromarray(np.full((16, 16), 300, kind)).save(tmp_path / f"scan.{ending}")
    with pytest.raises(Refused, match="more than 8 bits"):
        open_data(tmp_path, inputs=(RAW,))


def test_a_fax_is_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its decoder writes to the terminal, a line for each line of pixels that a hostile file spoils."""
    Image.new("1", (16, 5000), 1).save(tmp_path / "fax.tif", compression="tiff_ccitt")
    content = (tmp_path / "fax.tif").read_bytes()
    (tmp_path / "fax.tif").write_bytes(content[:8] + bytes(200) + content[208:])
    with pytest.raises(Refused, match=r"fax.tif' cannot be read as an image: it is a fax"):
        whole(open_data(tmp_path, inputs=(RAW,)))
    assert not capfd.readouterr().err
