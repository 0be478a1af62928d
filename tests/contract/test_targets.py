"""Laws over every registered target: its file runs in a fresh process that does not know this package."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import optimize
from models import REFERENCES, randomize_batch_norm
from optimize import registry
from optimize.targets.base import Runner

#: A file of this target is compiled for some twenty seconds: convolutions with shortcuts, and attention, stand for all.
FEWER = {("pt2", "float32"): ("vit",), ("pt2", "int8"): ("resnet",)}
FRESH = """
import json, sys
import numpy as np
for path, inputs, outputs in json.load(sys.stdin):
    {loader}
    for x, y in zip(inputs, outputs):
        np.save(y, f(np.load(x)))
assert 'optimize' not in sys.modules
"""


@functools.cache
def program(name: str, precision: str) -> optimize.Program:
    net = REFERENCES[name].build()
    randomize_batch_norm(net, 0)
    captured = optimize.capture(net.eval(), (REFERENCES[name].inputs(2),))
    base = optimize.Pipeline([optimize.FuseConvBN(), optimize.Reparameterize()]).run(captured).program
    if precision == "float32":
        return base
    dynamic = name == "lstm"
    calibration = [REFERENCES[name].inputs(8, seed=seed) for seed in range(4)]
    entry = optimize.QuantizeDynamic() if dynamic else optimize.QuantizeStatic(calibration=calibration)
    return optimize.Pipeline([entry]).run(base).program


def files() -> list[tuple[str, str]]:
    """Every target whose files run without this package, in float and in INT8 where it calibrates."""
    found = [(name, target) for name, target in registry.targets().items() if target.alone]
    return [(name, "float32") for name, _ in found] + [
        (name, "int8") for name, target in found if "static" in target.support.int8
    ]


@pytest.mark.parametrize("target, precision", files())
def test_files_agree_in_a_fresh_process_at_two_batch_sizes(target: str, precision: str, tmp_path: Path) -> None:
    backend = registry.find_target(target)
    if not (backend.available().export and backend.available().run):
        pytest.skip(backend.available().install)
    work, expected = [], {}
    for name in FEWER.get((target, precision), REFERENCES):
        if name == "lstm" and precision == "int8" and "dynamic" not in backend.support.int8:
            continue  # its INT8 is dynamic
        reference, subject = REFERENCES[name], program(name, precision)
        artifact = optimize.export(subject, target, tmp_path / f"{name}{backend.suffix}")
        runner, inputs, outputs = artifact.load(threads=1), [], []
        for batch in (1, 5):
            x = reference.inputs(batch, seed=batch)
            inputs.append(str(tmp_path / f"{name}.{batch}.x.npy"))
            outputs.append(str(tmp_path / f"{name}.{batch}.y.npy"))
            np.save(inputs[-1], x.numpy())
            expected[outputs[-1]] = subject(x).numpy()
            assert_agree(runner, x, expected[outputs[-1]], precision)
        work.append((str(artifact.path), inputs, outputs))
    script = FRESH.format(loader=backend.alone)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # no trial builds when a package is loaded
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", script],
        input=json.dumps(work), text=True, capture_output=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for path, want in expected.items():
        assert sqnr_db(want, np.load(path)) > (20 if precision == "int8" else 80), path


def assert_agree(runner: Runner, x: torch.Tensor, want: np.ndarray, precision: str) -> None:
    got = runner(x)
    assert isinstance(got, torch.Tensor)
    assert sqnr_db(want, got.numpy()) > (20 if precision == "int8" else 80)


def sqnr_db(want: np.ndarray, got: np.ndarray) -> float:
    noise = float(((want - got) ** 2).sum())
    return 200.0 if noise == 0 else 10 * float(np.log10((want**2).sum() / noise))


@pytest.mark.parametrize("name", sorted(registry.targets()))
def test_a_target_says_what_it_is_and_what_it_lacks(name: str) -> None:
    target = registry.find_target(name)
    found = target.available()
    assert target.suffix.startswith(".") and target.summary
    if not (found.export and found.run):
        assert found.reason
    if found.export and found.run:
        assert found.version
