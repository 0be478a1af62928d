"""What mutated files once did beside being refused, and honest ones beside opening."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from optimize.errors import Refused
from optimize.load import stored
from optimize.load.archive import Archive
from optimize.load.identify import Kind
from optimize.load.taking import take_over
from optimize.measure.openers import Opening
from optimize.regular import read_bytes
from optimize.targets.onnx.reading import read_checked
from optimize.targets.openvino.reading import ends_here
from tests.fuzzing import honest, networks, zips


def taken(tmp_path: Path, name: str, old: bytes, new: bytes) -> Path:
    """Return what a confined process might leave, one text of one file replaced."""
    for file, data in honest.make("taken", tmp_path)[0].items():
        (tmp_path / file).write_bytes(data.replace(old, new) if file == name else data)
        assert file != name or old in data
    return tmp_path


def test_exported_program_that_takes_a_dict(tmp_path: Path) -> None:
    module, inputs, _ = networks.exportable()[1]
    torch.export.save(torch.export.export(module, inputs), tmp_path / "m.pt2")
    program = take_over(tmp_path / "m.pt2", Kind.EXPORTED, tuple).program
    assert program is not None
    found, wanted = program(*inputs), module(*inputs)
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(found["top"], wanted["top"])


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("program.safetensors", b"F32", b"F99"),
        ("program.json", b'"aten.linear.default"', b'"aten.bmm.default"'),
        ("program.json", b'"tuple"', b'"\\ud800"'),
    ],
)
def test_answer_that_makes_no_program_is_refused(tmp_path: Path, name: str, old: bytes, new: bytes) -> None:
    with pytest.raises(Refused):
        stored.restore(taken(tmp_path, name, old, new))


def test_a_read_takes_no_more_memory_than_the_file_has(tmp_path: Path) -> None:
    import tracemalloc

    (tmp_path / "small").write_bytes(b"x" * 10)
    tracemalloc.start()
    try:
        assert read_bytes(tmp_path / "small", most_bytes=2**31) == b"x" * 10
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_description_that_crashes_the_reader_of_openvino(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant that is said to be another layer has no inputs, and the reader looks at them."""
    pytest.importorskip("openvino")
    monkeypatch.setattr("optimize.sandbox.is_confined", lambda: False)  # so that a child reads it
    files = honest.make("openvino", tmp_path)[0]
    text = files["model.xml"].decode()
    at = text.index('type="Const"')
    changed = text[:at] + 'type="Broadcast"' + text[at + len('type="Const"') :]
    (tmp_path / "m.xml").write_text(changed)
    (tmp_path / "m.bin").write_bytes(files["model.bin"])
    subject = Opening(tmp_path).open(str(tmp_path / "m.xml"))
    assert "killed the process" in str(subject.missing)


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"method": 8, "packed": 2**31}, "take 21474"),
        ({"packed": 1, "size": 2}, "has two sizes"),
    ],
)
def test_member_that_says_two_sizes(tmp_path: Path, header: dict[str, int], match: str) -> None:
    """zipfile asks for the memory that a header states, and two readers of one header may read two things."""
    members = zips.read(honest.make("pt2", tmp_path)[0]["model.pt2"])
    members[-1].central |= header
    (tmp_path / "m.pt2").write_bytes(zips.write(members))
    with pytest.raises(Refused, match=match):
        Archive(tmp_path / "m.pt2", "m.pt2")


@pytest.mark.parametrize("name", ["epoch=3-step=100.ckpt", "model (1).pt", "net@224.pt", "modèle.pt", "it's [1].pt"])
def test_archives_are_opened_whatever_their_files_are_called(name: str, tmp_path: Path) -> None:
    """torch calls the folder inside by the file's name, which stays when the file is renamed."""
    net = nn.Sequential(nn.Linear(4, 4)).eval()
    torch.save(net.state_dict(), tmp_path / name)
    torch.jit.script(net).save(str(tmp_path / f"script {name}"))
    for file in tmp_path.iterdir():
        with Archive(file, name) as archive:
            assert "data.pkl" in archive


@pytest.mark.parametrize("name", [b"weights.bin", b"place", b"turns"])
def test_name_in_an_onnx_file_that_is_no_text(tmp_path: Path, name: bytes) -> None:
    """Protobuf hands it on as bytes, where a path or a name is expected."""
    for file, data in honest.make("onnx", tmp_path)[1].items():
        (tmp_path / file).write_bytes(data.replace(name, b"\xff" + name[1:]))
    with pytest.raises(Refused, match="is not UTF-8"):
        read_checked(tmp_path / "model.onnx")


def test_description_whose_input_has_no_name(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    files = honest.make("openvino", tmp_path)[0]
    text = re.sub(r' names="[^"]*"', "", files["model.xml"].decode())
    (tmp_path / "m.xml").write_text(text)
    (tmp_path / "m.bin").write_bytes(files["model.bin"])
    with pytest.raises(Refused, match="OpenVINO cannot tell what"):
        ends_here(tmp_path / "m.xml")
