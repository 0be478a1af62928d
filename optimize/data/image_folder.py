"""Image folders: one sub-folder a class, read a batch at a time and never whole."""

from __future__ import annotations

import io
import itertools
import math
import struct
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from optimize.data.conform import Batch, InputSpec, conform, samples_at_once
from optimize.data.preprocessing import ImagePreprocessing
from optimize.data.samples import Samples
from optimize.errors import InputsUnknown, OptimizeError, Refused, UsageError, in_one_line
from optimize.regular import read_bytes, shown

if TYPE_CHECKING:
    from PIL import Image

_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
#: What PIL may take a file for: other formats start programs or read other files.
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_READ, _MOST_CHANNELS = 32, 3
#: Pictures whose size says what a model takes, so many at most and each shorter than the usual size.
_LOOKED_AT, _LARGE = 16, 224
#: Of one file: the largest picture that is read, with four numbers a pixel.
_MOST_BYTES = 1 << 31
#: A JPEG comes in passes over all of its pixels, of which one may take a hundred bytes; people write about ten.
_SCAN, _MOST_SCANS = b"\xff\xda", 16
#: Pictures whose numbers are written out, and their comments: each is cut out of a block of a megabyte.
_WRITTEN_OUT, _MOST_COMMENTS = (b"P1", b"P2", b"P3"), 1000
#: Reads that a decoder needs beyond one for as many bytes, and the bytes that it reads before it knows the picture.
_READS, _BYTES_A_READ, _HEADER_BYTES = 20_000, 64, 32 << 20
#: Bytes of a run-length encoded BMP, which its decoder asks for one by one, in Python.
_MOST_RUNS = 1 << 24
#: How a TIFF begins and writes numbers, what says that it is a large one, its tags for the places of strips and of
#: tiles, and how many of them are read.
_ORDERS, _BIG_TIFF, _PIECES, _MOST_PIECES = {b"II": "<", b"MM": ">"}, b"+", (273, 324), 1 << 16
#: Ways of TIFF to pack a fax: black and white alone, and its decoder prints a line to the terminal for each bad one.
_FAX = ("tiff_ccitt", "group3", "group4")
#: Modes of grey in 16 or 32 bits: PIL would make white of whatever is above 255.
_WIDE = ("I", "F")


class _Watched(io.BytesIO):
    """The content of a picture, for decoders that walk through blanks, markers and empty chunks in Python, for minutes.

    They also make numbers of all that an entry of a header holds, twenty-five times its bytes.
    """

    reads, delivered = 0, 0
    most_bytes: float = _HEADER_BYTES

    def __repr__(self) -> str:  # in messages of decoders; what is said of them names the file
        return ""

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes.

        Raises:
            ValueError: Too few were asked for too often, or too many in all.
        """
        found = super().read(size)
        if size is None or size < 0:
            return found
        self.reads, self.delivered = self.reads + 1, self.delivered + len(found)
        if self.reads > _READS + self.delivered // _BYTES_A_READ or self.delivered > self.most_bytes:
            raise ValueError("it is padded with what is no picture")
        return found


def _decoded(file: Path, mode: str) -> Image.Image:
    """Return an image, its pixels bounded by ``PIL.Image.MAX_IMAGE_PIXELS``.

    Raises:
        Refused: It is none of a kind that is read here, damaged, too large, or one of several pictures.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning):
            content = read_bytes(file, most_bytes=_MOST_BYTES)
            _refuse_pieces(content)
            watched = _Watched(content)
            with Image.open(watched, formats=_FORMATS) as opened:
                watched.most_bytes = math.inf
                if opened.format != "MPO" and getattr(opened, "is_animated", False):
                    raise ValueError("it holds several pictures, and which one is meant is not said")
                if opened.mode.startswith(_WIDE):
                    raise ValueError("its pixels have more than 8 bits, and which number is white is not said")
                if opened.info.get("compression") in _FAX:
                    raise ValueError("it is a fax")
                if any(tile[0] == "bmp_rle" for tile in opened.tile):
                    if len(content) > _MOST_RUNS:
                        raise ValueError(f"it is a run-length encoded BMP of more than {_MOST_RUNS >> 20} MiB")
                    watched.reads -= len(content)
                _refuse_passes(opened, content)
                if content[:2] in _WRITTEN_OUT and content.count(b"#") > _MOST_COMMENTS:
                    raise ValueError("it is full of comments")
                opened.draft("RGB", None)
                return opened.convert(mode)
    except OptimizeError:
        raise
    except Exception as error:  # every decoder has its own
        reason = shown(in_one_line(error))
        raise Refused(f"'{shown(file)}' cannot be read as an image: {reason}.", hint="Leave it out.") from error


def _refuse_pieces(content: bytes) -> None:
    """Refuse a TIFF in more strips or tiles than pictures have: a decoder lists all, and reads a block for each.

    Raises:
        ValueError: It is such a file.
    """
    if content[:2] not in _ORDERS:
        return
    order, big = _ORDERS[content[:2]], content[2:3] == _BIG_TIFF
    address, number, entry = (order + form for form in (("Q", "Q", "HHQ8x") if big else ("L", "H", "HHL4x")))
    try:
        (start,) = struct.unpack_from(address, content, 8 if big else 4)
        (count,) = struct.unpack_from(number, content, start)
    except (struct.error, OverflowError):
        raise ValueError("it is cut off") from None
    start, size = start + struct.calcsize(number), struct.calcsize(entry)
    table = content[start : start + size * min(count, (len(content) - start) // size)]
    pieces = max((many for tag, _, many in struct.iter_unpack(entry, table) if tag in _PIECES), default=0)
    if pieces > _MOST_PIECES:
        raise ValueError(f"it is in {pieces} pieces, and read are {_MOST_PIECES}")


def _refuse_passes(opened: Image.Image, content: bytes) -> None:
    """Refuse a JPEG that would be decoded over and over: its pixels are bounded, how often they are written is not.

    Raises:
        ValueError: It is such a file.
    """
    from PIL import Image

    scans = content.count(_SCAN) if opened.format in ("JPEG", "MPO") else 1
    if scans * opened.width * opened.height > _MOST_SCANS * (Image.MAX_IMAGE_PIXELS or math.inf):
        raise ValueError(f"it writes its {opened.width} x {opened.height} pixels {scans} times")


def open_folder(folder: Path, specs: Sequence[InputSpec], image: ImagePreprocessing) -> Samples:
    """Return the images of a folder, in an order that visits the classes in turn, so that a few samples cover them all.

    Classes are numbered in the order of their names, or by value where every name is an integer; a folder without
    sub-folders has none. Reading them says ``Refused`` of a file that is no image, which it names.

    Raises:
        UsageError: The model does not take one image, or ``image`` does not fit its channels.
        Refused: There are no images.
    """
    size, spec = _crop_size(folder, specs, image), specs[0]
    groups = [_images(entry) for entry in _classes(folder)]
    numbered = [[(file, label) for file in files] for label, files in enumerate(groups)]
    turns = [entry for turn in itertools.zip_longest(*numbered) for entry in turn if entry is not None]
    files = [file for file, _ in turns] or _images(folder)
    if not files:
        raise Refused(f"'{folder}' holds no images.", hint=f"Looked for {', '.join(sorted(_SUFFIXES))}.")
    step = samples_at_once(_MOST_CHANNELS * size[0] * size[1], _READ)

    def chunks() -> Iterator[Batch]:
        for start in range(0, len(files), step):
            images = torch.stack([_prepared(file, size, spec, image) for file in files[start : start + step]])
            yield Batch((images,), torch.tensor([label for _, label in turns[start : start + step]]) if turns else None)

    prepared = image.text(size, pixels=spec.is_picture)
    return Samples(str(folder), chunks, len(files), prepared=prepared, classes=len(groups) if turns else 0)


def _prepared(file: Path, size: tuple[int, int], spec: InputSpec, image: ImagePreprocessing) -> torch.Tensor:
    """Return an image as the model takes it: a uint8 input takes the pixels as they are, without mean and std."""
    picture = _decoded(file, "L" if _sizes(spec)[0] == 1 else "RGB")
    try:
        prepared = image.prepared(picture, size, spec)
    except Refused as error:
        hint = error.hint or "Leave it out."
        raise Refused(f"'{shown(file)}' cannot be prepared: {error.what}", hint=hint) from error
    if image.transform is None:
        return prepared
    return conform([prepared[None]], None, [spec], f"{image.name} of {shown(file)}", 0).inputs[0][0]


def _classes(folder: Path) -> list[Path]:
    entries = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    if ring := next(
        (entry for entry in entries if entry.resolve() in (folder.resolve(), *folder.resolve().parents)), None
    ):
        raise Refused(f"'{shown(ring)}' is a link to a folder that holds '{shown(folder)}' itself.")
    if all(entry.name.isdecimal() for entry in entries):
        return sorted(entries, key=lambda entry: int(entry.name))
    return sorted(entries)


def _images(folder: Path) -> list[Path]:
    found = [*folder.rglob("*")]
    if linked := next((entry for entry in found if entry.is_symlink() and entry.is_dir()), None):
        hint = "Put its pictures, or links to them, into the class's folder."
        raise Refused(f"'{shown(linked)}' is a link to a folder: only a class may be one.", hint=hint)
    pictures = (file for file in found if file.suffix.lower() in _SUFFIXES and not file.name.startswith("."))
    return sorted(file for file in pictures if file.is_file())


def _own_size(folder: Path) -> tuple[int, ...]:
    """Return height and width of pictures that are all alike, by the first, and small: of a size that somebody chose
    for a model, which nobody would have it enlarged to. Empty for others.

    Raises:
        Refused: A file is not an image; it is named.
    """
    files = next(filter(None, map(_images, [*_classes(folder), folder])), [])  # of one class: there may be millions
    found = {_decoded(file, "L").size for file in files[:_LOOKED_AT]}
    width, height = found.pop() if len(found) == 1 else (_LARGE, _LARGE)
    return (height, width) if max(width, height) < _LARGE else ()


def _sizes(spec: InputSpec) -> tuple[int | None, ...]:
    """Return channels, height and width of an input; None for what is free."""
    return (spec.shape[-1], *spec.shape[:-1]) if spec.is_picture else spec.shape


def _flattened(shape: Sequence[int | None]) -> str:
    """Return the square images that have as many numbers as a sample; the usual ones where none have."""
    count = math.prod(size or 0 for size in shape)
    sides = ((channels, math.isqrt(count // channels)) for channels in (3, 1))
    fitting = (f"{channels},{side},{side}" for channels, side in sides if channels * side * side == count > 0)
    return next(fitting, "3,224,224")


def _crop_size(folder: Path, specs: Sequence[InputSpec], image: ImagePreprocessing) -> tuple[int, int]:
    """Return height and width of the crop after checking that the model takes such images."""
    shape = specs[0].shape
    if len(specs) != 1 or len(shape) != 3:
        shapes = ", ".join(str(list(spec.shape)) for spec in specs)
        raise UsageError(
            f"'{folder}' is a folder of images, but the model takes {shapes} and not one image [C, H, W].",
            hint=f"If it flattens images, say so: --input-shape {_flattened(shape)}. Else give the data as an .npz or "
            "as package.module:callable.",
        )
    channels, height, width = _sizes(specs[0])
    if image.transform is not None:  # what it returns is looked at, picture by picture
        return height or 0, width or 0
    if channels is None and image.size and (counted := max(len(image.mean), len(image.std))) > 1:
        channels = counted
    if channels is None:
        raise InputsUnknown(
            f"'{folder}' is a folder of images, and nothing says what size and channels the model takes.",
            hint=f"Give --input-shape, such as 3,224,224{'' if image.size else ', or --preprocess size=224'}.",
            sides=image.size or _own_size(folder),
        )
    if channels not in (1, 3) or not (specs[0].is_picture or image.fits(channels)):
        raise UsageError(
            f"Input '{specs[0].name}' has {channels} channels, the image preprocessing {len(image.mean)} means and "
            f"{len(image.std)} standard deviations.",
            hint="Give one of each, or one a channel (--preprocess 'mean=0.5 std=0.5'); images have 1 or 3 channels.",
        )
    wanted = image.size or (height, width)
    if wanted[0] is None or wanted[1] is None:
        raise UsageError(
            "The model leaves height and width free: say which size its images have.",
            hint="Give --preprocess size=224, or --input-shape.",
        )
    if (height or wanted[0], width or wanted[1]) != wanted:
        raise UsageError(f"Images cropped to {wanted} do not fit input '{specs[0].name}' of {list(shape)}.")
    image.check((wanted[0], wanted[1]))
    return wanted[0], wanted[1]
