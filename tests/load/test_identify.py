"""What a file is, and what is said of one that is no model."""

import re
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from PIL import Image

from optimize.errors import Refused
from optimize.load.identify import Kind, identify


def test_kinds(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "a")
    torch.save({}, tmp_path / "b", _use_new_zipfile_serialization=False)
    torch.save({}, tmp_path / "c", _use_new_zipfile_serialization=False, pickle_protocol=4)
    assert identify(tmp_path / "a") is Kind.CHECKPOINT
    assert identify(tmp_path / "b") is identify(tmp_path / "c") is Kind.LEGACY


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "is empty"),
        (b"%PDF-1.7", "a PDF"),
        (b"\x89PNG\r\n\x1a\n", "a PNG image"),
        (b"\xff\xd8\xff\xe0", "a JPEG"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"<!DOCTYPE html><html>", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"-----BEGIN PRIVATE KEY-----\nMC4CAQ", r"model\.pt' is a text file, not a PyTorch model\.$"),
        (b'{"token": "MC4CAQ"' + b" " * 2000 + b"}", r"model\.pt' is a JSON file, not a PyTorch model\.$"),
        (b"\x00\x01\x02\x03\xfe\xff", r"it is binary, of no kind known here\.$"),
        (b"vtrt\x01\x00", "TensorRT-RTX engine"),
        (b"ftrt\x01\x00", "TensorRT engine"),
        (b"<?xml version='1.0'?>\n<net name='m' version='11'>", "OpenVINO"),
        (b"\x1c\x00\x00\x00TFL3", "TensorFlow Lite"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"\x80\x04\x95\x05", "plain pickle"),
        (b"PK\x03\x04 and then nothing", "cut off or damaged"),
        ((100).to_bytes(8, "little") + b'{"a":1}', "safetensors file that is cut off"),
    ],
)
def test_other_files_are_named(tmp_path: Path, data: bytes, match: str) -> None:
    (tmp_path / "model.pt").write_bytes(data)
    with pytest.raises(Refused) as caught:
        identify(tmp_path / "model.pt")
    assert re.search(match, caught.value.what)
    assert "MC4CAQ" not in str(caught.value)  # a file that was named by mistake ends in a public log


def test_real_files_of_other_programs(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    Image.new("RGB", (2, 2)).save(path, "PNG")
    with pytest.raises(Refused, match="PNG"):
        identify(path)
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [value], [value])
    for told in ({}, {"model_version": 3}, {"doc_string": "of an export without a producer"}):
        path.write_bytes(onnx.helper.make_model(graph, **told).SerializeToString())
        assert identify(path) is Kind.ONNX
    with path.open("wb") as file:
        np.savez(file, x=np.zeros(2))
    with pytest.raises(Refused, match="npz of NumPy arrays"):
        identify(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "")
    with pytest.raises(Refused, match="without a PyTorch model"):
        identify(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("serialized_exported_program.json", "{}")
    with pytest.raises(Refused, match=r"torch 2\.7 and before"):
        identify(path)


def test_directory_device_and_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="is a directory"):
        identify(tmp_path)
    with pytest.raises(Refused, match="not a regular file"):
        identify(Path("/dev/null"))
    (tmp_path / "m.pt").write_bytes(b"x")

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(Refused, match="Permission denied"):
        identify(tmp_path / "m.pt")


def test_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "m.pt").symlink_to(tmp_path / "gone")
    with pytest.raises(Refused, match="cannot be read: No such file"):
        identify(tmp_path / "m.pt")
