"""Files run in a process that does not know this package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SCRIPT = """
import json, sys
import numpy as np
for path, x, y in json.load(sys.stdin):
    if path.endswith(".onnx"):
        import onnxruntime
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        got = session.run(None, {session.get_inputs()[0].name: np.load(x)})[0]
    elif path.endswith(".xml"):
        import openvino
        got = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([np.load(x)])[0]
    else:
        import torch
        torch.set_num_threads(1)
        with torch.inference_mode():
            got = torch.jit.load(path)(torch.from_numpy(np.load(x))).numpy()
    np.save(y, got)
assert "optimize" not in sys.modules
"""


def answers(folder: Path, asked: list[tuple[Path, Tensor]], **environment: str) -> list[Tensor]:
    """Return what ONNX, OpenVINO and TorchScript files answer first, each to its input."""
    work = []
    for number, (path, x) in enumerate(asked):
        given, answer = folder / f"{number}.x.npy", folder / f"{number}.y.npy"
        np.save(given, x.numpy())
        work.append((str(path), str(given), str(answer)))
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", SCRIPT],
        input=json.dumps(work), text=True, cwd="/", env={**variables, **environment}, check=True,
    )  # fmt: skip
    return [torch.from_numpy(np.load(answer)) for _, _, answer in work]
