"""Files that take the pictures themselves: they answer as the original does to pictures that are prepared outside."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import optimize
from optimize.data import ImagePreprocessing
from optimize.data.preprocessing import included, read_words
from optimize.distances import output_error
from optimize.errors import Refused
from optimize.graph import aten, calls
from optimize.passes import FuseConvBN, IncludePreprocess, QuantizeStatic
from optimize.pipeline import Pipeline
from optimize.registry import find_target
from tests.test_cli import Typed

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OUTSIDE = "resize=20 size=16 interpolation=bilinear"
WORDS = f"{OUTSIDE} mean=0.485,0.456,0.406 std=0.229,0.224,0.225 order=bgr"


def prepared(pictures: np.ndarray, order: str = "rgb") -> torch.Tensor:
    """What a trainer's own code does to decoded pictures ``[N, H, W, 3]``, written out."""
    channels = pictures.astype(np.float32).transpose(0, 3, 1, 2)[:, :: -1 if order == "bgr" else 1] / 255
    mean, std = (np.array(numbers, np.float32)[:, None, None] for numbers in (MEAN, STD))
    return torch.from_numpy((channels - mean) / std)


def small(padding: int = 1, channels: int = 3) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(channels, 8, 3, padding=padding), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 4)).eval()


def pixels(count: int = 4, size: int = 16) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


@pytest.mark.parametrize("order", ["rgb", "bgr"])
@pytest.mark.parametrize("padding", [0, 1])
def test_it_answers_as_the_original_to_what_is_prepared_outside(padding: int, order: str) -> None:
    net = small(padding)
    program = optimize.capture(net, (torch.randn(2, 3, 16, 16),))
    trace = Pipeline([IncludePreprocess(MEAN, STD, order), FuseConvBN()]).run(program)
    with torch.no_grad():
        error, scale = output_error(net(prepared(pixels(), order)), trace.program(torch.from_numpy(pixels())))
    assert error / scale < 2e-6
    assert trace.steps[0].max_error is not None, "nothing was compared"
    left = [len(list(calls(trace.program.graph, target))) for target in (aten.mul.Tensor, aten.sub.Tensor)]
    assert left == [0, padding], "the scale folds into every first layer, the shift where no border is of zeros"


def test_pictures_of_one_channel_have_one_too() -> None:
    net = small(channels=1)
    program = Pipeline([IncludePreprocess((0.5,), (0.25,))]).run(optimize.capture(net, (torch.randn(2, 1, 8, 8),)))
    grey = pixels(size=8)[..., :1]
    with torch.no_grad():
        want = net((torch.from_numpy(grey).permute(0, 3, 1, 2) / 255 - 0.5) / 0.25)
    torch.testing.assert_close(program.program(torch.from_numpy(grey)), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "dynamic_size", "reason"),
    [
        ((2, 8), False, r"takes \[2, 8\], and pictures are \[N, C, H, W\]"),
        ((2, 1, 8, 8), False, "takes 1 channel, and there are numbers for 3"),
        ((2, 3, 8, 8), True, "height and width are free"),
    ],
)
def test_what_takes_no_pictures_is_left_with_the_reason(
    shape: tuple[int, ...], dynamic_size: bool, reason: str
) -> None:
    net = nn.ReLU() if len(shape) < 4 else nn.Conv2d(shape[1], 4, 3)
    program = optimize.capture(net.eval(), (torch.randn(shape),), dynamic_size=dynamic_size)
    changed, outcome = IncludePreprocess(MEAN, STD).apply(program)
    assert changed is program
    (skip,) = outcome.skips
    assert re.search(reason, skip.reason)


def test_a_run_that_cannot_include_it_says_why(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"IncludePreprocess cannot be: the model takes \[2, 8\]"):
        optimize.optimize(
            nn.Linear(8, 2).eval(), (torch.randn(2, 8),), passes=[IncludePreprocess(MEAN, STD)], out=tmp_path / "out"
        )


@pytest.fixture(scope="module")
def made(files_run_here: None, tmp_path_factory: pytest.TempPathFactory, typed: Typed) -> Path:
    """Returns a folder with a model, pictures, and the files of a run that took the preprocessing into them."""
    folder, generator = tmp_path_factory.mktemp("included"), np.random.default_rng(1)
    for name in ("ant", "bee"):
        (folder / "pictures" / name).mkdir(parents=True)
        for place in range(4):
            few = Image.fromarray(generator.integers(0, 256, (6, 8, 3), dtype=np.uint8))
            few.resize((30, 24), Image.Resampling.BICUBIC).save(folder / "pictures" / name / f"{place}.png")
    torch.save(small(), folder / "net.pt")
    words = [folder / "net.pt", "--fuse", "--int8", "--no-layer-timing", "--to", "onnx,openvino,torchscript", "-q"]
    words += ["--eval", folder / "pictures", "--calib", folder / "pictures", "--preprocess", WORDS]
    done = typed(*words, "--include-preprocess", "--out", folder / "out")
    assert done.returncode == 0, done.stderr
    return folder


def decoded(folder: Path) -> np.ndarray:
    """Returns the pictures as somebody prepares them who does what the report leaves to be done outside."""
    found = []
    for file in sorted((folder / "pictures").rglob("*.png")):
        resized = Image.open(file).convert("RGB").resize((25, 20), Image.Resampling.BILINEAR)
        left, top = round((25 - 16) / 2), 2
        found.append(np.asarray(resized.crop((left, top, left + 16, top + 16))))
    return np.stack(found)


@pytest.mark.parametrize("place", range(6))
def test_the_files_take_decoded_pictures(place: int, made: Path) -> None:
    report = json.loads((made / "out" / "report.json").read_text())
    row = report["rows"][place]
    net, shown = torch.load(made / "net.pt", weights_only=False), decoded(made)
    runner = find_target(row["target"]).open(Path(row["path"]), trust=True)
    with torch.no_grad():
        want = net(prepared(shown, "bgr"))
    found = torch.as_tensor(np.asarray(runner.load().run([shown])[0]))
    level = 10 * np.log10(float(want.square().sum() / (want - found).square().sum()))
    assert level > (110 if row["precision"] == "float32" else 35)
    assert runner.included == report["model"]["included"] == WORDS.removeprefix(f"{OUTSIDE} ")
    assert runner.preprocess == report["model"]["preprocess"] == OUTSIDE
    assert report["model"]["inputs"] == ["input_1 uint8[batch, 16, 16, 3]"]


def test_a_replay_makes_the_same_files(made: Path, typed: Typed) -> None:
    recipe = made / "out" / "recipe.yaml"
    done = typed(made / "net.pt", "--recipe", recipe, "--to", "onnx", "--out", made / "again", "-q")
    assert done.returncode == 0, done.stderr
    for name in ("net.float32.onnx", "net.int8.onnx"):
        assert (made / "again" / name).read_bytes() == (made / "out" / name).read_bytes()


@pytest.mark.parametrize("turned", [False, True])
def test_the_original_is_prepared_outside_where_it_is_compared(
    turned: bool, made: Path, tmp_path: Path, typed: Typed
) -> None:
    files = [made / "net.pt", made / "out" / "net.float32.onnx"]
    words = [*(reversed(files) if turned else files), "--data", made / "pictures", "--trust"]
    done = typed("compare", *words, "--out", tmp_path / "compare.json")
    assert done.returncode == 0, done.stderr
    (output,) = json.loads((tmp_path / "compare.json").read_text())["found"]["outputs"]
    assert output["distance"]["sqnr_db"] > 110


def test_the_gate_prepares_the_original_outside_and_nothing_twice(made: Path, typed: Typed) -> None:
    pair = [made / "net.pt", made / "out" / "net.int8.onnx", "--input-shape", "3,16,16", "--trust"]
    done = typed("check", *pair, "--data", made / "pictures", "--max-seconds", 20, "--min-sqnr", 35)
    assert done.returncode in (0, 3), done.stdout + done.stderr  # 1 where answers differ; of the time nothing is asked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mean", "0.5,0.5,0.5"], "nothing says the std"),
        ([], "nothing says the mean"),
        (["--preprocess", "package.module:prepare"], "it is code"),
    ],
)
def test_what_is_baked_into_a_file_is_never_guessed(
    options: list[str], message: str, typed: Typed, tmp_path: Path
) -> None:
    (tmp_path / "net.pt").touch()
    done = typed(tmp_path / "net.pt", "--to", "onnx", "--include-preprocess", *options)
    assert done.returncode == 2 and message in done.stderr


@pytest.mark.parametrize("text", ["evil.module:go", "transform=evil.module:go", "mean=7", "size=3", "\0", "std=0"])
def test_what_a_file_says_is_numbers_or_refused(text: str) -> None:
    with pytest.raises(Refused, match="which nobody can follow"):
        included(text)
    assert included("mean=0.5 std=0.25 order=bgr").mean == (0.5,)


def test_pixels_come_back_from_what_they_were_prepared_to() -> None:
    image = ImagePreprocessing.read(read_words(WORDS))
    shown = torch.from_numpy(pixels())
    assert torch.equal(image.pixels(image.normalized(shown)), shown)


def test_one_number_is_of_every_channel() -> None:
    program = optimize.capture(small(), (torch.randn(2, 3, 16, 16),))
    one, three = (
        Pipeline([IncludePreprocess(*each), FuseConvBN()]).run(program).program
        for each in (((0.5,), (0.25,)), ((0.5,) * 3, (0.25,) * 3))
    )
    assert torch.equal(one(torch.from_numpy(pixels())), three(torch.from_numpy(pixels())))


def test_ranges_of_the_first_layer_are_learned_on_pictures() -> None:
    program = optimize.capture(small(), (torch.randn(2, 3, 16, 16),))
    shown = torch.from_numpy(pixels(16))
    trace = Pipeline([IncludePreprocess(MEAN, STD), FuseConvBN(), QuantizeStatic(calibration=[(shown,)])]).run(program)
    plan = trace.program.quantization
    assert plan is not None
    (first,) = (node.args[0].name for node in calls(trace.program.graph, aten.conv2d.default))
    assert plan.ranges[first].low == pytest.approx(-255 * max(MEAN), abs=1)
