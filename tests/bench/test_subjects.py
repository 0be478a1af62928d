"""What is named becomes a subject: by its ending or its bytes, with what it takes, or why it cannot run here."""

import dataclasses
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import optimize
from optimize.errors import Refused, TargetUnavailable, UsageError
from optimize.measure.openers import Opening
from optimize.measure.subjects import MODULE, Subject, agreed_inputs, agreed_pair, preparation
from optimize.targets.base import Artifact, TensorSpec
from optimize.targets.tensorrt import packages


class Doubling(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * torch.nn.functional.relu(x)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small network in every form."""
    place = tmp_path_factory.mktemp("files")
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
    program = optimize.capture(net, (torch.rand(2, 4),))
    optimize.export(program, "onnx", place / "net.onnx")
    optimize.export(program, "torchscript", place / "net.ts")
    torch.export.save(program.export(), place / "net.pt2")
    torch.save(net, place / "net.pt")
    (place / "net.engine").write_bytes(b"vtrt" + bytes(64))
    return place


@pytest.fixture
def opening(tmp_path: Path) -> Opening:
    return Opening(tmp_path)


def test_every_form_is_told_apart(folder: Path, opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "has_gpu", lambda: False)
    names = ["net.onnx", "net.ts", "net.pt2", "net.pt", "net.engine"]
    subjects = opening.open_all([str(folder / name) for name in names])
    assert [subject.artifact.target for subject in subjects] == ["onnx", "torchscript", "eager", MODULE, "tensorrt"]
    assert [subject.name for subject in subjects] == names
    for subject, name in zip(subjects, names, strict=True):
        assert subject.artifact.size_bytes == (folder / name).stat().st_size and len(subject.artifact.sha256) == 64
    assert subjects[4].missing == "no GPU" and not any(subject.missing for subject in subjects[:4])
    filled = agreed_inputs(subjects, None)
    assert [subject.artifact.inputs[0].shape[1:] for subject in filled[:4]] == [(4,)] * 4
    assert filled[3].places == (0,) and filled[4].places == ()
    with pytest.raises(TargetUnavailable, match=r"net\.engine' cannot run on this machine: no GPU\."):
        agreed_inputs(subjects[4:], None)


def test_a_factory_is_named_as_it_is_written(opening: Opening) -> None:
    subject = opening.open("tests.bench.test_subjects:Doubling")
    assert subject.name == "tests.bench.test_subjects:Doubling" and subject.artifact.target == MODULE
    assert subject.artifact.sha256 == "" and subject.loading["source"] == subject.name
    (filled,) = agreed_inputs([subject], "3,8,8")
    assert filled.artifact.inputs[0].shape[1:] == (3, 8, 8) and filled.fixed_batch is None
    with pytest.raises(UsageError, match="No file says what it takes"):
        agreed_inputs([subject], None)


def test_on_a_gpu_torchscript_is_a_module(folder: Path, opening: Opening) -> None:
    subject = dataclasses.replace(opening, device="cuda").open(str(folder / "net.ts"))
    assert subject.artifact.target == MODULE and subject.kind == "TorchScript" and subject.loading["device"] == "cuda"


def test_equal_names_get_their_folders(folder: Path, opening: Opening, tmp_path: Path) -> None:
    other = tmp_path / "other" / "net.onnx"
    other.parent.mkdir()
    other.write_bytes((folder / "net.onnx").read_bytes())
    sources = [str(folder / "net.onnx"), str(other), str(other)]
    names = [subject.name for subject in opening.open_all(sources)]
    assert names == [f"{folder.name}/net.onnx", "other/net.onnx #1", "other/net.onnx #2"]


def test_native_code_needs_trust(opening: Opening, tmp_path: Path) -> None:
    import zipfile

    path = tmp_path / "net.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("net/data/aotinductor/model/x.so", b"")
    with pytest.raises(Refused, match="native code"):
        opening.open(str(path))
    subject = dataclasses.replace(opening, trust=True).open(str(path))
    assert subject.artifact.target == "pt2" and subject.artifact.inputs == ()


@pytest.mark.parametrize("name", ["none.onnx", "none.xml", "none.engine", "none.pt"])
def test_a_missing_file_is_refused(name: str, opening: Opening) -> None:
    with pytest.raises(Refused, match=f"There is no file '{name}'"):
        opening.open(name)


def test_a_broken_onnx_file_is_refused(opening: Opening, tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"not protobuf at all")
    with pytest.raises(Refused, match="is not an ONNX file"):
        opening.open(str(tmp_path / "bad.onnx"))


def embedding(path: Path, *, outside: bool = False) -> Path:
    table = numpy_helper.from_array(np.ones((11, 4), np.float32), "table")
    nodes = [helper.make_node("Gather", ["table", "ids"], ["y"])]
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", 6])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 6, 4])
    model = helper.make_model(helper.make_graph(nodes, "g", [ids], [y], [table]))
    place = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0} if outside else {}
    onnx.save(model, path, **place)
    return path


def test_tokens_lie_inside_the_table(opening: Opening, tmp_path: Path) -> None:
    (subject,) = agreed_inputs([opening.open(str(embedding(tmp_path / "e.onnx")))], None)
    assert subject.places == (0,) and subject.artifact.inputs == (TensorSpec("ids", ("N", 6), "int64", tokens=11),)


def test_weights_beside_the_file_count(opening: Opening, tmp_path: Path) -> None:
    path = embedding(tmp_path / "e.onnx", outside=True)
    weights = (tmp_path / "weights.bin").stat().st_size
    assert opening.open(str(path)).artifact.size_bytes == path.stat().st_size + weights


def taking(*specs: TensorSpec) -> Subject:
    return Subject("s", "", Artifact("onnx", Path("s"), specs, (), "", "", 0, ""))


def test_tokens_are_those_of_the_first_table() -> None:
    """A file of one row would be compared on token 0 alone."""
    large, small, none = (taking(TensorSpec("ids", ("N", 6), "int64", tokens=count)) for count in (11, 1, None))
    for subjects, wanted in (((large, small), 11), ((none, large), 11), ((large, none), 11), ((small, large), 1)):
        assert {entry.artifact.inputs[0].tokens for entry in agreed_inputs(subjects, None)} == {wanted}


OURS, OTHERS = "size=8 mean=0.5,0.5,0.5", "size=8 mean=0,0,0 std=0.00001,0.00001,0.00001"
PICTURE, PLANES = TensorSpec("x", ("N", 8, 8, 3), "uint8"), TensorSpec("x", ("N", 3, 8, 8), "float32")


@pytest.mark.parametrize(
    "base, candidate, said, told",
    [
        (
            {"preprocess": OURS},
            {"preprocess": OTHERS},
            OURS,
            f"{OTHERS}', 'base' by '{OURS}': the latter was followed.",
        ),
        ({}, {"preprocess": OTHERS}, "", "'base' does not say how: the latter was followed."),
        ({"preprocess": OURS}, {}, OURS, ""),
        ({"preprocess": OURS}, {"preprocess": OURS}, OURS, ""),
        ({}, {}, "", ""),
        ({}, {"included": "mean=0.1"}, "", "'base' does not say how pictures become its inputs: they were prepared as"),
        ({"preprocess": OURS}, {"included": "mean=0.1"}, "", "by 'mean=0.1', 'base' by 'mean=0.5,0.5,0.5': the latter"),
        ({"preprocess": OURS}, {"included": "mean=0.5,0.5,0.5", "preprocess": "size=8"}, "size=8", ""),
        ({"included": "mean=0.5"}, {"preprocess": OTHERS}, "", ""),
    ],
)
def test_the_first_file_says_how_pictures_become_inputs(
    base: dict[str, str], candidate: dict[str, str], said: str, told: str
) -> None:
    """A candidate that chose what both take would be right on that alone."""
    sides = [
        replace(taking(PICTURE if "included" in words else PLANES), name=name)
        for name, words in (("base", base), ("cand", candidate))
    ]
    sides = [
        replace(side, artifact=replace(side.artifact, **words))
        for side, words in zip(sides, (base, candidate), strict=True)
    ]
    found, doubt = preparation(agreed_inputs(sides, None))
    assert found == said and told in doubt and bool(told) == bool(doubt)


@pytest.mark.parametrize(
    ("user", "base", "by", "is_told"),
    [
        ({"mean": "0.25", "size": "8"}, OURS, "mean=0.25", False),
        ({"size": "8"}, OURS, "mean=0.5,0.5,0.5", False),
        ({"size": "8"}, "", "mean=0.1", True),
        ({}, "", "mean=0.1", True),
    ],
)
def test_the_user_says_before_any_file_how_pictures_become_inputs(
    user: dict[str, str], base: str, by: str, is_told: bool
) -> None:
    """A candidate that prepares pictures itself would choose what the base is given."""
    first, second = taking(PLANES), taking(PICTURE)
    first = replace(first, artifact=replace(first.artifact, preprocess=base))
    second = replace(second, artifact=replace(second.artifact, included="mean=0.1"))
    pair = agreed_pair(first, second, None, user)
    assert (pair.base.outside, pair.candidate.outside, pair.is_told) == (by, "", is_told)
    assert not agreed_pair(first, first, None, user).is_told


@pytest.mark.parametrize(
    ("base", "candidate", "said", "chosen"),
    [
        (("N", "n", 3), ("N", 1, 3), None, [("N", 1, 3)]),
        (("N", "n", 3), (4, 1, 3), None, [(4, 1, 3)]),
        ((4, "n", 3), (4, 1, 3), None, [(4, 1, 3)]),
        (("N", "n", 3), ("N", 1, 3), "1,3", []),
        (("N", "n", 3), ("N", "m", 3), None, []),
        (("N", 5, 3), ("N", 5, "n"), None, []),
        (("N", 3), (1, 3), None, []),
        (None, ("N", 3), None, [("batch", 3)]),
    ],
)
def test_a_size_that_only_the_second_file_says_is_told(
    base: tuple[int | str, ...] | None, candidate: tuple[int | str, ...], said: str | None, chosen: list[object]
) -> None:
    sides = [taking(*([TensorSpec("x", shape, "float32")] if shape else [])) for shape in (base, candidate)]
    assert [spec.shape for spec in agreed_pair(*sides, said).chosen] == chosen


def test_inputs_are_joined_by_name_and_by_place() -> None:
    a, b = TensorSpec("a", ("N", 3), "float32"), TensorSpec("b", ("N", "?"), "float32")
    known = TensorSpec("b", (4, 7), "float16")
    first, swapped, other = agreed_inputs(
        [
            taking(a, b),
            taking(known, a),
            taking(TensorSpec("p", (1, 3), "float32"), TensorSpec("q", (1, 7), "float32")),
        ],
        None,
    )
    assert [spec.shape for spec in first.artifact.inputs] == [("N", 3), ("N", 7)]
    assert swapped.places == (1, 0) and other.places == (0, 1)
    assert first.fixed_batch is None and swapped.fixed_batch == 4 and other.fixed_batch == 1
    with pytest.raises(Refused, match="do not take the same inputs"):
        agreed_inputs([taking(a), taking(a, b)], None)
