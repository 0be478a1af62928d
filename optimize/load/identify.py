"""What a file is, told by its bytes and never by its name."""

from __future__ import annotations

import enum
import zipfile
from pathlib import Path

from optimize.errors import Refused
from optimize.regular import open_zip, read_bytes, require_file


class Kind(enum.Enum):
    """The files that hold a model that a run starts from; the value is what to call one."""

    CHECKPOINT = "torch.save file"
    LEGACY = "torch.save file in the format before 1.6"
    EXPORTED = "torch.export program"
    TORCHSCRIPT = "TorchScript file"
    SAFETENSORS = "safetensors file"
    ONNX = "ONNX model"


_LEGACY_MAGIC = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_GIVE_ORIGINAL = (
    "Give the PyTorch model it was made from: optimize starts from the trained model, not from an artifact."
)
_NOT_A_MODEL = "Give a file written by torch.save, torch.export.save, torch.jit.save or safetensors."
_LFS_HINT = "Fetch the real file with 'git lfs pull'."

#: Of a safetensors file: 10,000 tensors have 2 MB of names.
_HEADER_BYTES = 25_000_000

#: Of an ONNX file, behind the version of its format: from the producer's name to the graph and what it imports.
_SECOND_FIELDS = (b"\x12", b"\x1a", b"\x22", b"\x28", b"\x32", b"\x3a", b"\x42")

_ARTIFACTS = (
    (b"vtrt", "a TensorRT-RTX engine"),
    (b"ftrt", "a TensorRT engine"),
    (b"ptrt", "a TensorRT engine"),
    (b"GGUF", "a GGUF (llama.cpp) model"),
    (b"\x89HDF\r\n", "an HDF5 file (Keras)"),
)
_OTHERS = (
    (b"\x89PNG\r\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"BM", "a BMP image"),
    (b"%PDF", "a PDF document"),
    (b"\x1f\x8b", "a gzip archive; unpack it first"),
    (b"7z\xbc\xaf", "a 7-zip archive; unpack it first"),
    (b"\x93NUMPY", "a NumPy array (data for --calib or --eval, not a model)"),
    (b"\x7fELF", "a native program or library"),
    (b"RIFF", "a media file"),
)


def identify(path: Path) -> Kind:
    """Return what kind of model file ``path`` is.

    Raises:
        Refused: It is missing, unreadable, empty, damaged, or not a PyTorch model; the message says what it is instead.
    """
    head = read_bytes(path, first=1024)
    size = require_file(path)
    if not size:
        raise Refused(f"'{path}' is empty (0 bytes).", hint="Save or download the model again.")
    if head.startswith(b"PK"):
        return _zip_kind(path, size)
    if _LEGACY_MAGIC in head[:32]:
        return Kind.LEGACY
    if head[8:9] == b"{" and (length := int.from_bytes(head[:8], "little")) < _HEADER_BYTES:
        if 8 + length > size:
            raise Refused(f"'{path}' is a safetensors file that is cut off.", hint="Download the file again.")
        return Kind.SAFETENSORS
    if head[:1] == b"\x08" and head[2:3] in _SECOND_FIELDS:
        return Kind.ONNX
    raise _foreign(path, head)


def _zip_kind(path: Path, size: int) -> Kind:
    try:
        with open_zip(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise Refused(
            f"'{path}' starts as a zip archive (as torch.save writes) but is cut off or damaged after {size} bytes.",
            hint="Save or download the file again.",
        ) from error
    inner = {name.partition("/")[2] or name for name in names}
    if any("aotinductor/" in name for name in inner):
        raise Refused(
            f"'{path}' is an AOTInductor package: native code compiled for one machine, which is never loaded.",
            hint=_GIVE_ORIGINAL,
        )
    if "archive_format" in inner or any(name.startswith("models/") for name in inner):
        return Kind.EXPORTED
    if "constants.pkl" in inner:
        return Kind.TORCHSCRIPT
    if "data.pkl" in inner:
        return Kind.CHECKPOINT
    raise _foreign_zip(path, names)


def _foreign_zip(path: Path, names: list[str]) -> Refused:
    if "serialized_exported_program.json" in names:
        return Refused(
            f"'{path}' is a torch.export program in the format of torch 2.7 and before.",
            hint="Load it with the torch that wrote it, and save it again with torch 2.8 or later.",
        )
    if names and all(name.endswith(".npy") for name in names):
        return Refused(
            f"'{path}' is an .npz of NumPy arrays (data for --calib or --eval, not a model).", hint=_NOT_A_MODEL
        )
    listed = ", ".join(names[:3]) or "nothing"
    return Refused(f"'{path}' is a zip archive without a PyTorch model in it (it holds {listed}).", hint=_NOT_A_MODEL)


def _foreign(path: Path, head: bytes) -> Refused:
    """Say what a file that is no PyTorch model looks like."""
    if head.startswith(b"version https://git-lfs"):
        return Refused(f"'{path}' is a Git LFS pointer: the model itself was not downloaded.", hint=_LFS_HINT)
    for magic, noun in _ARTIFACTS:
        if head.startswith(magic):
            return Refused(f"'{path}' is {noun}, not a PyTorch model.", hint=_GIVE_ORIGINAL)
    if head[4:8] == b"TFL3":
        return Refused(f"'{path}' is a TensorFlow Lite model, not a PyTorch model.", hint=_GIVE_ORIGINAL)
    if head[257:262] == b"ustar":
        return Refused(f"'{path}' is a tar archive.", hint="Unpack it first; a tar from torch 0.1 must be saved again.")
    for magic, noun in _OTHERS:
        if head.startswith(magic):
            return Refused(f"'{path}' is {noun}, not a PyTorch model.", hint=_NOT_A_MODEL)
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return Refused(
            f"'{path}' is a plain pickle, not a file of torch.save; it is not opened, because a pickle runs code.",
            hint="Load it where you trust it and save the model with torch.save.",
        )
    return _foreign_text(path, head)


def _foreign_text(path: Path, head: bytes) -> Refused:
    try:
        text = head.decode("utf-8", errors="strict" if len(head) < 1024 else "ignore").lstrip("\ufeff \t\r\n")
    except UnicodeDecodeError:
        text = "\0"
    start = text[:200].lower()
    if "<net" in start or (start.startswith("<?xml") and "<net" in text):
        return Refused(f"'{path}' is an OpenVINO model description, not a PyTorch model.", hint=_GIVE_ORIGINAL)
    if start.startswith(("<!doctype html", "<html")):
        return Refused(
            f"'{path}' is an HTML page, not a model: the download link led to a web page.", hint=_NOT_A_MODEL
        )
    if "\0" in text or any(ord(letter) < 9 for letter in text):
        return Refused(f"'{path}' is not a PyTorch model: it is binary, of no kind known here.", hint=_NOT_A_MODEL)
    noun = "a JSON file" if text[:1] in ("{", "[") else "a text file"  # what it says may be secret, and logs public
    return Refused(f"'{path}' is {noun}, not a PyTorch model.", hint=_NOT_A_MODEL)
