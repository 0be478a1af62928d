"""What a file says of itself: written when it is judged, read when it is opened, and never a reason to run code."""

import json
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from torch import nn

from optimize.data import Samples
from optimize.data.preprocessing import read_words
from optimize.errors import UsageError
from optimize.job import Job
from optimize.measure.feed import Asked
from optimize.measure.openers import open_file
from optimize.recipe import parse
from optimize.registry import find_target
from optimize.targets.base import TensorSpec, file_digest
from optimize.workflow import run_job

PASSES, TARGETS = ["FuseConvBN"], ["onnx", "openvino", "torchscript"]
WORDS = "resize=20 size=16 interpolation=bilinear mean=0.2,0.3,0.4 std=0.5,0.5,0.5 order=bgr"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a model, pictures of two classes, and what a run made of them."""
    folder, generator = tmp_path_factory.mktemp("labels"), np.random.default_rng(0)
    for name in ("ant", "bee"):
        (folder / "pictures" / name).mkdir(parents=True)
        for place in range(4):
            pixels = generator.integers(0, 256, (24, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "pictures" / name / f"{place}.png")
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    torch.save(nn.Sequential(*layers).eval(), folder / "net.pt")
    asked = {"passes": PASSES, "eval": str(folder / "pictures"), "preprocess": WORDS, "targets": TARGETS}
    run_job(Job(source=str(folder / "net.pt"), recipe=parse(asked), out=folder / "out"))
    return folder


def said(path: Path) -> dict[str, str]:
    """Returns what a file says, read without this package."""
    if path.suffix == ".onnx":
        found = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    elif path.suffix == ".xml":
        section = ElementTree.parse(path).getroot().find("rt_info/optimize")
        assert section is not None
        found = {f"optimize.{entry.tag}": entry.get("value", "") for entry in section}
    else:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if "/extra/optimize." in name]
            found = {name.rpartition("/")[2]: archive.read(name).decode() for name in names}
    return {key.removeprefix("optimize."): text for key, text in found.items() if key.startswith("optimize.")}


@pytest.mark.parametrize("place", range(3), ids=["onnx", "openvino", "torchscript"])
def test_a_file_says_what_its_report_does(place: int, made: Path) -> None:
    report = json.loads((made / "out" / "report.json").read_text())
    row = report["rows"][place]
    path = Path(row["path"])
    found = said(path)
    assert found["source_sha256"] == report["model"]["sha256"] == file_digest(made / "net.pt")
    assert found["preprocess"] == report["model"]["preprocess"]
    assert found["sqnr_db"] == f"{row['agreement']['sqnr_db']:.1f}"
    assert found["accuracy"] == f"top1 {row['accuracy']['value']:.4f} of 8"
    assert [name for entry in json.loads(found["passes"]) for name in entry] == PASSES
    target = find_target(row["target"])
    files = target.files(path)
    assert row["sha256"] == file_digest(*files) and row["size_bytes"] == sum(file.stat().st_size for file in files)
    if path.suffix != ".pt":
        subject = open_file(path, trust=False)
        assert subject is not None and subject.artifact.preprocess == found["preprocess"]
    assert target.open(path).preprocess == found["preprocess"]


def opened(folder: Path, **how: object) -> Samples:
    specs = (TensorSpec("x", ("batch", 3, 16, 16), "float32"),)
    return Asked(specs, **how).opened(str(folder / "pictures"))  # type: ignore[arg-type]


def inputs(folder: Path, **how: object) -> np.ndarray:
    return next(opened(folder, **how).batches(8)).inputs[0].numpy()


def test_what_a_file_says_is_followed_where_the_user_says_nothing(made: Path) -> None:
    as_made = inputs(made, preprocessing=read_words(WORDS))
    assert np.array_equal(inputs(made, said=WORDS), as_made)
    assert not np.array_equal(inputs(made), as_made)
    (note,) = opened(made, said=WORDS, doubt="Others say otherwise.").notes
    assert note == "Others say otherwise."
    other = read_words("crop=1")
    assert opened(made, said=WORDS, doubt="Others say otherwise.", preprocessing=other).notes == ()
    assert np.array_equal(inputs(made, said=WORDS, preprocessing=other), inputs(made, preprocessing=other))


@pytest.mark.parametrize("text", ["evil.module:go", "transform=evil.module:go"])
def test_code_that_a_file_names_is_not_run(text: str, made: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "module.py").write_text("open('marker', 'w').close()\ngo = print\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"which 'evil.module:go' prepared when the file was made"):
        inputs(made, said=text)
    assert not (tmp_path / "marker").exists()
    arrays = tmp_path / "x.npy"
    np.save(arrays, np.zeros((8, 3, 16, 16), np.float32))
    Asked((TensorSpec("x", ("batch", 3, 16, 16), "float32"),), said=text).opened(str(arrays))  # it holds no pictures


@pytest.mark.parametrize("text", ["", "no words", "resize", "x" * 100_000, "\0", "rezise=3"])
def test_what_is_no_preprocessing_says_nothing(text: str, made: Path) -> None:
    assert np.array_equal(inputs(made, said=text), inputs(made))
