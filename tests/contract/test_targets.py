"""Laws over every registered target: its file runs in a fresh process that does not know this package."""

import functools
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import optimize
from models import REFERENCES
from optimize import registry
from optimize.targets.base import Runner
from tests import references
from tests.cpus import HAS_VNNI

#: A file of this target is compiled for some twenty seconds: convolutions with shortcuts, and attention, stand for all.
FEWER = {("pt2", "float32"): ("vit",), ("pt2", "int8"): ("resnet",)}
#: Decibels between a file and the float32 program; what computes operator by operator as that does, answers exactly.
LEAST_DB = {"float32": 80.0, "int8": 20.0}
EXACT_DB = 200.0
LEAST_DB_OF = {
    ("eager", "float32"): EXACT_DB,
    ("torchscript", "float32"): EXACT_DB,
    ("torchscript", "int8"): 25.0 if HAS_VNNI else 24.0,
    ("openvino", "float32"): 100.0,
}
FRESH = """
import contextlib, json, sys
import numpy as np
for path, inputs, outputs in json.load(sys.stdin):
{loader}
    with sys.modules["torch"].inference_mode() if "torch" in sys.modules else contextlib.nullcontext():
        for x, y in zip(inputs, outputs):
            np.save(y, f(np.load(x))[0])
assert 'optimize' not in sys.modules and ('torch' in sys.modules) is {needs_torch}
"""


@functools.cache
def program(name: str, precision: str) -> optimize.Program:
    """Return a network as it is captured, BatchNorm and branches in it, or folded and quantized."""
    if precision == "float32":
        return references.captured(name)
    calibration = [REFERENCES[name].inputs(16, seed=seed) for seed in (10, 11)]
    entry = optimize.QuantizeDynamic() if name == "lstm" else optimize.QuantizeStatic(calibration=calibration)
    return optimize.Pipeline([entry]).run(references.folded(name)).program


def files() -> list[Any]:
    """Every target whose files run without this package, in float and in INT8 where it calibrates."""
    found = [(name, target) for name, target in registry.targets().items() if target.alone]
    cases = [(name, "float32") for name, _ in found]
    cases += [(name, "int8") for name, target in found if "static" in target.support.int8]
    return [pytest.param(*case, marks=[pytest.mark.slow] * (case in FEWER)) for case in cases]


@pytest.mark.parametrize("target, precision", files())
def test_files_agree_in_a_fresh_process_at_two_batch_sizes(target: str, precision: str, tmp_path: Path) -> None:
    backend = registry.find_target(target)
    if not (backend.available().export and backend.available().run):
        pytest.skip(backend.available().install)
    least_db = LEAST_DB_OF.get((target, precision), LEAST_DB[precision])
    work, expected = [], {}
    for name in FEWER.get((target, precision), [name for name in REFERENCES if name not in references.SAME]):
        if name == "lstm" and precision == "int8" and "dynamic" not in backend.support.int8:
            continue  # its INT8 is dynamic
        subject = program(name, precision)
        wanted = subject if precision == "float32" else references.folded(name)
        artifact = optimize.export(subject, target, tmp_path / f"{name}{backend.suffix}")
        assert artifact.precision.partition("-")[0] == precision
        if precision == "float32":
            assert artifact.coverage is None
        else:
            assert artifact.coverage is not None and artifact.coverage.quantized
        runner, inputs, outputs = artifact.load(threads=1), [], []
        for batch in (1, 5):
            x = REFERENCES[name].inputs(batch, seed=batch + 20)
            inputs.append(str(tmp_path / f"{name}.{batch}.x.npy"))
            outputs.append(str(tmp_path / f"{name}.{batch}.y.npy"))
            np.save(inputs[-1], x.numpy())
            expected[outputs[-1]] = wanted(x).numpy()
            assert_agree(runner, x, expected[outputs[-1]], least_db)
        work.append((str(artifact.path), inputs, outputs))
    script = FRESH.format(loader=textwrap.indent(backend.alone, "    "), needs_torch="torch" in backend.alone)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", script],
        input=json.dumps(work), text=True, capture_output=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for path, want in expected.items():
        assert sqnr_db(want, np.load(path)) >= least_db, path


def assert_agree(runner: Runner, x: torch.Tensor, want: np.ndarray, least_db: float) -> None:
    got = runner(x)
    assert isinstance(got, torch.Tensor)
    assert sqnr_db(want, got.numpy()) >= least_db


def sqnr_db(want: np.ndarray, got: np.ndarray) -> float:
    noise = float(((want - got) ** 2).sum())
    return EXACT_DB if noise == 0 else 10 * float(np.log10((want**2).sum() / noise))


@pytest.mark.parametrize("name", sorted(registry.targets()))
def test_a_target_says_what_it_is_and_what_it_lacks(name: str) -> None:
    target = registry.find_target(name)
    found = target.available()
    assert target.suffix.startswith(".") and target.summary
    if not (found.export and found.run):
        assert found.reason
    if found.export and found.run:
        assert found.version
