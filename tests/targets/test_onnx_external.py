"""Weights in a second file: above what one ONNX file holds, here a limit lowered for the test."""

import hashlib
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

import optimize
from optimize.registry import find_target
from optimize.targets.base import file_digest
from optimize.targets.onnx_graph.external import weights_path
from tests import fresh


class Words(nn.Module):
    """A table and a product, both larger than the lowered limit."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 48)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> optimize.Program:
    torch.manual_seed(0)
    monkeypatch.setattr("optimize.targets.onnx_graph.external.LARGEST_BYTES", 4096)
    return optimize.capture(Words().eval(), (torch.randint(0, 64, (2, 5)),))


def test_bytes_that_go_from_one_file_to_the_next_are_another_hash(tmp_path: Path) -> None:
    files = [tmp_path / "a.bin", tmp_path / "b.bin"]
    found = set()
    for parts in ((b"12", b"345"), (b"123", b"45"), (b"2 123", b"45")):
        for file, part in zip(files, parts, strict=True):
            file.write_bytes(part)
        found.add(file_digest(*files))
    assert len(found) == 3 and file_digest(files[1]) == hashlib.sha256(b"45").hexdigest()


def test_large_weights_lie_in_a_second_file_and_run_in_a_fresh_process(
    program: optimize.Program, tmp_path: Path
) -> None:
    artifact = optimize.export(program, "onnx", tmp_path / "words.onnx")
    files = find_target("onnx").files(artifact.path)
    assert files == (tmp_path / "words.onnx", tmp_path / "words.onnx.data")
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert artifact.size_bytes == sum(file.stat().st_size for file in files) and files[1].stat().st_size > 12_000
    assert artifact.sha256 == file_digest(*files)
    tokens = torch.randint(0, 64, (3, 5))
    (found,) = fresh.answers(tmp_path, [(artifact.path, tokens)])
    assert torch.allclose(found, program(tokens), atol=1e-5)


def test_the_two_files_move_together(program: optimize.Program, tmp_path: Path) -> None:
    optimize.export(program, "onnx", tmp_path / "words.onnx")
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for file in find_target("onnx").files(tmp_path / "words.onnx"):
        file.rename(moved / file.name)
    locations = {
        entry.value
        for tensor in onnx.load(moved / "words.onnx", load_external_data=False).graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    assert locations == {"words.onnx.data"}
    onnx.checker.check_model(str(moved / "words.onnx"), full_check=True)


def test_a_smaller_model_takes_the_place_of_both_files(
    program: optimize.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "words.onnx"
    optimize.export(program, "onnx", path)
    monkeypatch.undo()
    artifact = optimize.export(program, "onnx", path)
    assert list(tmp_path.iterdir()) == [path] and not weights_path(path).exists()
    assert artifact.size_bytes == path.stat().st_size


def test_an_invalid_model_leaves_no_file(
    program: optimize.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def invalid(*_: object, **__: object) -> None:
        raise onnx.checker.ValidationError("a node is wrong")

    monkeypatch.setattr("onnx.checker.check_model", invalid)
    with pytest.raises(optimize.errors.Refused, match="not valid: a node is wrong"):
        optimize.export(program, "onnx", tmp_path / "words.onnx")
    assert not list(tmp_path.iterdir())


def test_integer_weights_and_a_run_with_both_files(program: optimize.Program, tmp_path: Path) -> None:
    report = optimize.optimize(
        Words().eval(), (torch.randint(0, 64, (2, 5)),), passes=[optimize.QuantizeWeights()], out=tmp_path / "out"
    )
    plain = next(row for row in report.rows if row.precision == "float32")
    assert plain.status == "measured" and plain.path is not None
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"words.float32.onnx", "words.float32.onnx.data"} <= names
