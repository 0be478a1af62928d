"""How a picture becomes an input: the words of ``--preprocess`` against Pillow's own calls, and a trainer's code."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from optimize.data import ImagePreprocessing, InputSpec, open_data
from optimize.data.preprocessing import INTERPOLATIONS, read_words
from optimize.datasets import Datasets, example_inputs, open_datasets
from optimize.errors import InputsUnknown, Refused, UsageError
from optimize.frontend import capture
from optimize.job import Job
from optimize.load.capturing import AS_USUAL, capture_model
from optimize.measure.accuracy import Accuracy
from optimize.recipe import parse, read
from optimize.replay import recipe_of

SPEC = InputSpec("x", (3, 32, 32))
COUNTED = "resize=36 size=32 interpolation=bilinear mean=0.2,0.3,0.4 std=0.5,0.6,0.7"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder of two classes, its pictures of noise in several sizes."""
    folder, generator = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for name, sizes in {"ant": [(40, 61), (90, 47)], "bee": [(36, 36), (50, 37)]}.items():
        (folder / name).mkdir()
        for place, size in enumerate(sizes):
            pixels = generator.integers(0, 256, (*size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{place}.png")
    return folder


def files(folder: Path) -> list[Path]:
    """Returns the pictures in the order they are read: the classes in turn."""
    return [folder / name / f"{place}.png" for place in (0, 1) for name in ("ant", "bee")]


def trained_with(picture: Image.Image) -> torch.Tensor:
    """What a trainer's own code does: torchvision's Resize(36), CenterCrop(32), ToTensor, Normalize, written out."""
    width, height = picture.size
    wanted = (36, int(36 * height / width)) if width <= height else (int(36 * width / height), 36)
    resized = picture.resize(wanted, Image.Resampling.BILINEAR)
    left, top = round((wanted[0] - 32) / 2), round((wanted[1] - 32) / 2)
    pixels = np.asarray(resized.crop((left, top, left + 32, top + 32)), np.float32).transpose(2, 0, 1) / 255
    mean, std = (np.array(numbers, np.float32)[:, None, None] for numbers in ((0.2, 0.3, 0.4), (0.5, 0.6, 0.7)))
    return torch.from_numpy((pixels - mean) / std)


class Preparing:
    """A class whose instances prepare pictures, as most transforms are."""

    def __call__(self, picture: Image.Image) -> torch.Tensor:
        return trained_with(picture)


def of_another_size(picture: Image.Image) -> torch.Tensor:
    return torch.zeros(3, 8, 8)


def of_a_path(path: Path) -> torch.Tensor:
    return trained_with(Image.open(path))


def of_two(picture: Image.Image, size: int) -> torch.Tensor:
    return trained_with(picture)


def no_tensor(picture: Image.Image) -> Image.Image:
    return picture


def opened(folder: Path, said: str, spec: InputSpec = SPEC) -> torch.Tensor:
    image = ImagePreprocessing.read(read_words(said))
    return torch.cat([batch.inputs[0] for batch in open_data(folder, inputs=[spec], image=image).batches(3)])


HERE = "tests.test_preprocessing"


@pytest.mark.parametrize("said", [COUNTED, f"{HERE}:trained_with", f"{HERE}:Preparing"])
def test_words_and_code_give_what_the_trainer_had(pictures: Path, said: str) -> None:
    expected = torch.stack([trained_with(Image.open(file)) for file in files(pictures)])
    torch.testing.assert_close(opened(pictures, said), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_a_picture_is_squashed_by_every_interpolation(pictures: Path, interpolation: str) -> None:
    raw = InputSpec("x", (3, 32, 32), "uint8")
    found = opened(pictures, f"resize=32x32 interpolation={interpolation}", raw)
    method = Image.Resampling[interpolation.upper()]
    expected = [np.asarray(Image.open(file).resize((32, 32), method)).transpose(2, 0, 1) for file in files(pictures)]
    assert np.array_equal(found.numpy(), np.stack(expected))
    assert np.array_equal(opened(pictures, f"resize=32x32 interpolation={interpolation} order=bgr", raw), found.flip(1))


def test_an_empty_folder_counts_as_a_class(pictures: Path, tmp_path: Path) -> None:
    for name in ("ant", "bee"):
        (tmp_path / name).symlink_to(pictures / name)
    (tmp_path / "aphid").mkdir()
    data = open_data(tmp_path, inputs=[SPEC], labelled=True)
    assert data.classes == 3
    assert sorted({label for batch in data.batches(4) for label in batch.labels.tolist()}) == [0, 2]


def test_what_stands_in_the_report_is_what_was_done(pictures: Path) -> None:
    for said in (COUNTED, "crop=1", "crop=0.9 order=bgr", "resize=40x50 size=32", ""):
        image = ImagePreprocessing.read(read_words(said))
        data = open_data(pictures, inputs=[SPEC], image=image)
        assert torch.equal(opened(pictures, data.prepared), opened(pictures, said))
    assert open_data(pictures, inputs=[SPEC]).prepared == (
        "resize=36 size=32 interpolation=bicubic mean=0.485,0.456,0.406 std=0.229,0.224,0.225 order=rgb"
    )


def test_what_nobody_said_of_pictures_is_warned_of_and_stands_in_the_recipe(pictures: Path) -> None:
    said = {"size": "32", "resize": "40", "std": "1,1,1"}
    recipe, data = parse({"preprocess": said}), open_data(pictures, inputs=[SPEC], image=ImagePreprocessing.read(said))
    partly, wholly = Datasets(data, None, said=said), Datasets(data, None, said=read_words(data.prepared))
    assert any("ImageNet's way in interpolation, mean, because" in text for text in partly.warnings)
    assert "way in size (32, guessed), interpolation, mean, because" in replace(partly, size_guessed=True).guessed
    assert not any("ImageNet" in text for text in (*wholly.warnings, *Datasets(None, None).warnings))
    at_chance, better = (Accuracy("top1", share, share, 500, guessed=0.204) for share in (0.2, 0.3))
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 32), torch.nn.Flatten()).eval()
    of_five = capture(net, (torch.zeros(2, 3, 32, 32),))
    unlikely, told = partly.doubt(at_chance, of_five), wholly.doubt(at_chance, of_five)
    assert "has 20.40 %" in unlikely and "labels are the model's classes," in unlikely and partly.guessed in unlikely
    assert "labels are the model's classes," in told and data.prepared in told
    named = replace(partly, evaluation=data).doubt(at_chance, of_five)
    assert f"the sub-folders of '{pictures}', counted from 0, are the model's classes, in" in named
    assert partly.guessed in named, "either may be what is wrong"
    two, five = (replace(partly, evaluation=replace(data, classes=count)) for count in (2, 5))
    assert two.miscounted(at_chance, of_five) in two.doubt(at_chance, of_five)
    assert two.miscounted(better, of_five).startswith(f"'{pictures}' has 2 sub-folders, the model 5 outputs: ")
    assert not five.miscounted(better, of_five) and not partly.miscounted(better, of_five)
    assert not two.miscounted(replace(better, guessed=None), of_five), "an embedding's size is no number of classes"
    arrays = replace(partly, calibration=None, evaluation=replace(data, prepared="", name="x.npz"))
    assert "std of --preprocess were not used: 'x.npz' is no folder" in arrays.unused in arrays.warnings
    assert (
        arrays.unused in arrays.doubt(at_chance, of_five)
        and not partly.unused
        and not replace(arrays, included=True).unused
    )
    assert not partly.doubt(better, of_five) and not partly.doubt(None, of_five)
    found = recipe_of(Job(torch.nn.Identity(), recipe), [], [], partly)
    assert found.preprocess == {**said, "interpolation": "bicubic", "mean": "0.485,0.456,0.406", "order": "rgb"}
    assert recipe_of(Job(torch.nn.Identity(), recipe), [], [], Datasets(None, None)) == recipe


def test_the_size_may_be_said_where_the_model_leaves_it_free(pictures: Path) -> None:
    free = InputSpec("x", (3, None, None))
    assert opened(pictures, "size=24x16 crop=1", free).shape == (4, 3, 24, 16)
    with pytest.raises(UsageError, match="which size") as refused:
        opened(pictures, "crop=1", free)
    assert "--preprocess size=224" in refused.value.hint


@pytest.mark.parametrize("said", [COUNTED, f"{HERE}:trained_with"])
def test_what_is_said_of_pictures_says_what_the_model_takes(pictures: Path, said: str) -> None:
    recipe = parse({"preprocess": said, "calib": str(pictures)})
    assert [tuple(tensor.shape) for tensor in example_inputs(recipe)] == [(2, 3, 32, 32)]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("resize=256 size", "write words such as"),
        ("rezise=256", r"there is no 'rezise'. Did you mean 'resize'\? Known: .*, transform\.?$"),
        ("transform=a:b mean=0.5", "a transform does all of it"),
    ],
)
def test_words_that_are_none(said: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_words(said)
    with pytest.raises(UsageError, match=message):
        parse({"preprocess": said})


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("interpolation=bilineer", "Did you mean 'bilinear'"),
        ("order=gbr", "there is no 'gbr'"),
        ("crop=2", "is not a share"),
        ("crop=nan", "is not a share"),
        ("resize=0", "it is one side or height and width"),
        ("resize=1x2x3", "it is one side or height and width"),
        ("size=99999999", "it is one side or height and width"),
        ("resize=big", "Write resize=256"),
        ("mean=127.5", r"their pixels are in \[0, 1\]"),
        ("mean=a", "Write one number for all channels, 0.5, or one for each"),
        ("resize=16", "Pictures are resized to 16, and 32x32 is to be cut out of them"),
        ("size=16", "do not fit input"),
        ("mean=0.5,0.5 std=0.5", "has 3 channels, the image preprocessing 2 means"),
        (f"{HERE}:HERE", "cannot be called"),
        (f"{HERE}:files", "raised TypeError|cannot be prepared"),
        (f"{HERE}:of_a_path", r"raised AttributeError.*\n.*given a picture of Pillow and returns \[C, H, W\]"),
        (f"{HERE}:of_two", r"called with one picture alone, .* is \(picture: .*size: .*\n.*takes a picture of Pillow"),
        (f"{HERE}:of_another_size", r"has the shape \[1, 3, 8, 8\] for input 'x'"),
        (f"{HERE}:no_tensor", "End it with ToTensor"),
        (f"{HERE}:nowhere", "there is no 'nowhere'"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(pictures: Path, said: str, message: str) -> None:
    with pytest.raises((UsageError, Refused)) as refused:
        opened(pictures, said)
    assert re.search(message, str(refused.value)), refused.value


def test_one_number_is_of_every_channel(pictures: Path) -> None:
    """Also where nobody says how many the model takes: its first layer does, and the size is what was said."""
    one, three = "size=32 mean=0.45 std=0.2", "size=32 mean=0.45,0.45,0.45 std=0.2,0.2,0.2"
    assert torch.equal(opened(pictures, one), opened(pictures, three))
    recipe = parse({"eval": str(pictures), "preprocess": "size=20 mean=0.45"})
    assert example_inputs(recipe)[0].shape == (2, 3, 20, 20), "of the std, which is ImageNet's, there are three"
    recipe = parse({"eval": str(pictures), "preprocess": "size=20 mean=0.45 std=0.2"})
    for channels in (1, 3):
        net = torch.nn.Sequential(torch.nn.Conv2d(channels, 2, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        program = capture_model(net.eval(), lambda takes: example_inputs(recipe, takes), AS_USUAL)
        assert program.inputs[0].shape == (2, channels, 20, 20)
        assert open_datasets(recipe, program).evaluation is not None
    with pytest.raises(InputsUnknown, match=r"--input-shape, such as 3,224,224\.$"):
        capture_model(torch.nn.ReLU(), lambda takes: example_inputs(recipe, takes), AS_USUAL)


def test_a_recipe_holds_it_as_text_or_by_its_words(tmp_path: Path) -> None:
    words = {"resize": "36", "size": "32", "mean": "0.5,0.5,0.5"}
    assert parse({"preprocess": "resize=36 size=32 mean=0.5,0.5,0.5"}).preprocessing == words
    assert parse({"preprocess": {"resize": 36, "size": 32, "mean": [0.5, 0.5, 0.5]}}).preprocessing == words
    recipe = parse({"preprocess": "a.b:c"})
    (tmp_path / "recipe.yaml").write_text(recipe.yaml())
    with pytest.raises(Refused, match=r"names Python code: a\.b:c\.\n.*the command line \(--preprocess a\.b:c\)"):
        read(tmp_path / "recipe.yaml")
    assert read(tmp_path / "recipe.yaml", trust=True) == recipe
