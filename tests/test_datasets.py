"""What a run learns from and what it is judged on."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnxruntime import InferenceSession
from torch import nn

import optimize
from optimize.data import Batch, Samples
from optimize.datasets import Datasets, open_datasets
from optimize.program import Program
from optimize.progress import silent
from optimize.recipe import Recipe
from tests.nets import sqnr_db

Typed = Callable[..., subprocess.CompletedProcess[str]]


@given(st.lists(st.integers(1, 5), max_size=8), st.integers(2, 5))
def test_what_is_held_back_and_what_is_learned_from_are_all_samples(sizes: list[int], every: int) -> None:
    """Wherever batches end, and each one once."""
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
    assert places[1] == list(range(every - 1, sum(sizes), every))


@pytest.fixture(scope="module")
def program() -> Program:
    return optimize.capture(nn.Linear(4, 3).eval(), (torch.rand(2, 4),))


@pytest.mark.parametrize(
    ("count", "labelled", "taught", "held"),
    [
        (16, False, False, 4),
        (15, False, False, 0),
        (16, True, False, 0),
        (16, False, True, 0),
        (4000, False, False, 250),
    ],
)
def test_a_part_is_held_back_where_nothing_else_is_there_to_judge_on(
    count: int, labelled: bool, taught: bool, held: int, program: Program, tmp_path: Path
) -> None:
    np.savez(tmp_path / "calib.npz", x=np.random.default_rng(0).normal(size=(count, 4)).astype(np.float32))
    evaluate = (torch.rand(8, 4), torch.zeros(8, dtype=torch.int64)) if labelled else None
    recipe = Recipe(calib=str(tmp_path / "calib.npz"))
    found = open_datasets(recipe, program, evaluate=evaluate, taught=taught)
    judged = sum(len(inputs[0]) for inputs, _ in found.judged(program, 3, silent))
    learned = found.learned_from
    assert learned is not None and learned.count == count - held
    assert judged == (8 if labelled else held or min(count, 256))
    told = "".join(found.warnings)
    assert ("nothing learned from" in told) is bool(held)
    assert ("which flatters" in told) is not bool(held or labelled)


def test_a_fixed_batch_gets_what_it_takes(tmp_path: Path) -> None:
    np.savez(tmp_path / "calib.npz", x=np.zeros((16, 4), np.float32))
    recipe = Recipe(calib=str(tmp_path / "calib.npz"))
    for batch, held in ((4, 4), (5, 0)):
        fixed = optimize.capture(nn.Linear(4, 3).eval(), (torch.rand(batch, 4),), dynamic_batch=False)
        assert open_datasets(recipe, fixed).held_back == held


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
