"""What a run learns from and what it is judged on."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnxruntime import InferenceSession
from torch import nn

import optimize
from optimize.data import Batch, Samples, open_data
from optimize.datasets import Datasets, open_datasets
from optimize.measure.accuracy import Accuracy
from optimize.measure.metrics import find
from optimize.program import Program
from optimize.progress import silent
from optimize.quantization.batches import sample_specs
from optimize.recipe import Recipe
from tests.nets import sqnr_db

Typed = Callable[..., subprocess.CompletedProcess[str]]


@given(st.lists(st.integers(1, 5), max_size=8), st.integers(2, 5))
def test_what_is_held_back_and_what_is_learned_from_are_all_samples(sizes: list[int], every: int) -> None:
    """Wherever batches end, each sample once, and one of each run is held back."""
    parts = torch.arange(sum(sizes)).split(sizes)
    data = Samples("data", lambda: iter([Batch((part,), part) for part in parts]), count=sum(sizes))
    found = Datasets(data, None, held_back=every)
    learned, judged = found.learned_from, found.judged_on
    assert learned is not None and judged is not None
    for samples in (learned, judged):
        batches = list(samples.chunks())
        assert all(torch.equal(batch.inputs[0], batch.labels) for batch in batches)  # type: ignore[arg-type]
        assert sum(map(len, batches)) == samples.count
    places = [[int(place) for batch in samples.chunks() for place in batch.inputs[0]] for samples in (learned, judged)]
    assert sorted(places[0] + places[1]) == list(range(sum(sizes)))
    whole = sum(sizes) // every
    assert [place // every for place in places[1] if place // every < whole] == list(range(whole))


def test_classes_that_come_in_turns_are_all_judged_on() -> None:
    data = Samples("data", lambda: iter([Batch((torch.arange(64) % 4,))]), count=64)
    for samples in (Datasets(data, None, held_back=4).learned_from, Datasets(data, None, held_back=4).judged_on):
        assert samples is not None
        counted = torch.cat([batch.inputs[0] for batch in samples.chunks()]).bincount(minlength=4)
        assert counted.min() >= counted.max() / 3


@pytest.fixture(scope="module")
def program() -> Program:
    return optimize.capture(nn.Linear(4, 3).eval(), (torch.rand(2, 4),))


def saved(count: int, folder: Path) -> str:
    x = np.random.default_rng(0).normal(size=(count, 4)).astype(np.float32)
    np.savez(folder / "calib.npz", x=x)
    return str(folder / "calib.npz")


@pytest.mark.parametrize(
    ("count", "labelled", "taught", "asked", "held"),
    [
        (16, False, False, None, 4),
        (15, False, False, None, 0),
        (16, True, False, None, 0),
        (16, True, False, 4, 4),  # by a recipe: the same files again
        (16, False, True, None, 0),
        (4000, False, False, None, 256),
    ],
)
def test_a_part_is_held_back_where_nothing_else_is_there_to_judge_on(
    count: int, labelled: bool, taught: bool, asked: int | None, held: int, program: Program, tmp_path: Path
) -> None:
    evaluate = (torch.rand(8, 4), torch.zeros(8, dtype=torch.int64)) if labelled else None
    recipe = Recipe(calib=saved(count, tmp_path), held_back=asked)
    found = open_datasets(recipe, program, evaluate=evaluate, taught=taught)
    judged = sum(len(inputs[0]) for inputs, _ in found.judged(program, 4, silent))
    learned = found.learned_from
    assert learned is not None and learned.count == count - held
    assert judged == (8 if labelled else held or min(count, 256))
    told = "".join(found.warnings)
    assert ("no pass learned from" in told) is bool(held and not labelled)
    assert ("which flatters" in told) is not bool(held or labelled)


def test_labelled_data_that_calibrates_too_is_told(program: Program, tmp_path: Path) -> None:
    path, told = tmp_path / "both.npz", "judged on the samples that calibrate them, which flatters"
    np.savez(path, x=np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32), labels=np.arange(16) % 3)
    same = open_datasets(Recipe(calib=str(path), eval=str(path)), program)
    others = open_datasets(Recipe(calib=saved(16, tmp_path), eval=str(path)), program)
    assert told in "".join(same.warnings) and told not in "".join(others.warnings)
    arrays = open_datasets(
        Recipe(calib=str(path)), program, evaluate=np.ones((8, 4), np.float32), metric=find("cosine")
    )
    assert told not in "".join(arrays.warnings)


def test_what_may_come_in_another_order_is_not_held_back(program: Program, tmp_path: Path) -> None:
    """Nor what a fixed batch, or an input without samples, would not be given whole."""
    loader = torch.utils.data.DataLoader(torch.rand(64, 4), batch_size=8, shuffle=True)  # type: ignore[arg-type]
    found = open_datasets(Recipe(), program, calibrate=loader)
    assert not found.held_back and sum(len(inputs[0]) for inputs, _ in found.judged(program, 4, silent)) == 64
    fixed = optimize.capture(nn.Linear(4, 3).eval(), (torch.rand(2, 4),), dynamic_batch=False)
    assert not open_datasets(Recipe(calib=saved(64, tmp_path)), fixed).held_back


def test_samples_that_fill_no_batch_are_left_out_alone_and_told() -> None:
    """Those of another length in the middle end no judging, and what was not judged is not counted."""
    net = optimize.capture(
        nn.Linear(4, 3).eval(), (torch.rand(2, 5, 4),), dynamic_batch=False, dynamic={"input": {1: "n"}}
    )
    lengths = [3, 3, 5, 3, 3, 7, 7, 7]
    batches = [(torch.rand(1, length, 4), torch.zeros(1, length, 3)) for length in lengths]
    counted = replace(open_data(batches, inputs=sample_specs(net), labelled=True, classes=False), count=8)
    data = Datasets(None, counted, metric=find("mae"))
    judged = [len(inputs[0]) for inputs, _ in data.judged(net, 64, silent)]
    assert judged == [2, 2, 2]
    found = Accuracy("mae", 0.0, 0.0, sum(judged))
    assert data.left_out(found, net).startswith("6 of 8 labelled samples were judged: the model takes batches of 2, ")
    assert not data.left_out(replace(found, samples=8), net)


def test_a_recipe_makes_the_same_files_with_labels(tmp_path: Path, typed: Typed) -> None:
    torch.manual_seed(0)
    torch.save(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), tmp_path / "net.pt")
    saved(64, tmp_path)
    np.savez(tmp_path / "eval.npz", x=np.zeros((8, 4), np.float32), y=np.arange(8) % 3)
    asked = ("--input-shape", "4", "--int8", "--calib", "calib.npz", "--to", "onnx", "--out", "out")
    again = ("--recipe", "out/recipe.yaml", "--eval", "eval.npz", "--out", "again")
    for words in (asked, again):
        done = typed("run", "net.pt", "--no-layer-timing", "--quiet", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert "held_back: 4\n" in (tmp_path / "out/recipe.yaml").read_text()
    one, two = (onnx.load(tmp_path / name / "net.int8.onnx").graph for name in ("out", "again"))
    assert one.SerializeToString(deterministic=True) == two.SerializeToString(deterministic=True)


def test_few_samples_do_not_flatter(tmp_path: Path, typed: Typed) -> None:
    """Layers that are fitted to 48 samples come within 47 dB on them, and within 14 on others."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64), nn.Tanh()]
    net, calib = nn.Sequential(*layers, nn.Linear(64, 6)).eval(), np.random.default_rng(0).normal(size=(48, 32))
    torch.save(net, tmp_path / "net.pt")
    np.savez(tmp_path / "calib.npz", x=calib.astype(np.float32))
    words = ("--depth", "0.3", "--calib", "calib.npz", "--to", "onnx", "--no-layer-timing", "--out", "out", "--quiet")
    done = typed("run", "net.pt", "--input-shape", "32", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "out/report.json").read_text())["rows"]
    others = torch.randn(2000, 32)
    (answers,) = InferenceSession(tmp_path / "out/net.float32.onnx").run(None, {"input_1": others.numpy()})
    with torch.no_grad():
        assert abs(row["agreement"]["sqnr_db"] - sqnr_db(net(others).numpy(), answers)) < 3
