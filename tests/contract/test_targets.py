"""Laws over every registered target: its file runs in a fresh process that does not know this package."""

import functools
import importlib.util
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

_OPENVINO = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="pip install openvino to write IR")
_COMPILER = pytest.mark.skipif(not registry.find_target("pt2").available().export, reason="apt install g++ for pt2")
#: The eager baseline is float by definition; TensorRT files need a GPU to run.
FILES = [
    ("eager", "float32"),
    ("torchscript", "float32"),
    ("torchscript", "int8"),
    ("onnx", "float32"),
    ("onnx", "int8"),
    *(pytest.param("pt2", precision, marks=_COMPILER) for precision in ("float32", "int8")),
    *(pytest.param("openvino", precision, marks=_OPENVINO) for precision in ("float32", "int8")),
]
#: A file of this target is compiled for some twenty seconds: convolutions with shortcuts, and attention, stand for all.
FEWER = {
    ("pt2", "float32"): ("vit",),
    ("pt2", "int8"): ("resnet",),
    ("openvino", "int8"): tuple(name for name in REFERENCES if name != "lstm"),  # dynamic INT8 has no form there
}
LOADERS = {
    "torchscript": "m = torch.jit.load(path); f = lambda x: m(torch.from_numpy(x)).detach().numpy()",
    "eager": "m = torch.export.load(path).module(); f = lambda x: m(torch.from_numpy(x))[0].detach().numpy()",
    "pt2": "m = torch._inductor.aoti_load_package(path); f = lambda x: m(torch.from_numpy(x))[0].numpy()",
    "onnx": "s = onnxruntime.InferenceSession(path, providers=['CPUExecutionProvider']); n = s.get_inputs()[0].name; "
    "f = lambda x: s.run(None, {n: x})[0]",
    "openvino": "m = openvino.Core().compile_model(path, 'CPU', {'INFERENCE_PRECISION_HINT': 'f32'}); "
    "f = lambda x: m([x])[0]",
}
FRESH = """
import json, sys
import numpy as np
for path, kind, inputs, outputs in json.load(sys.stdin):
    import {module}
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


@pytest.mark.parametrize("target, precision", FILES)
def test_files_agree_in_a_fresh_process_at_two_batch_sizes(target: str, precision: str, tmp_path: Path) -> None:
    work, expected = [], {}
    for name in FEWER.get((target, precision), REFERENCES):
        reference, subject = REFERENCES[name], program(name, precision)
        artifact = optimize.export(subject, target, tmp_path / f"{name}{registry.find_target(target).suffix}")
        runner, inputs, outputs = artifact.load(threads=1), [], []
        for batch in (1, 5):
            x = reference.inputs(batch, seed=batch)
            inputs.append(str(tmp_path / f"{name}.{batch}.x.npy"))
            outputs.append(str(tmp_path / f"{name}.{batch}.y.npy"))
            np.save(inputs[-1], x.numpy())
            expected[outputs[-1]] = subject(x).numpy()
            assert_agree(runner, x, expected[outputs[-1]], precision)
        work.append((str(artifact.path), target, inputs, outputs))
    module = {"onnx": "onnxruntime", "openvino": "openvino"}.get(target, "torch")
    script = FRESH.format(module=module, loader=LOADERS[target])
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
