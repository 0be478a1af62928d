"""Modules run in Python: devices, events, types."""

from pathlib import Path

import numpy as np
import pytest
import torch

from optimize.errors import TargetUnavailable
from optimize.measure import modules
from optimize.measure.modules import ModuleRunner, open_module
from optimize.targets.base import Artifact, TensorSpec

SPEC = (TensorSpec("x", ("N", 4), "float32"),)
LOADING = {"source": "torch.nn:Identity", "device": "cpu"}


def test_a_module_without_a_gpu_has_no_events_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = Artifact("module", Path("m"), SPEC, (), "", "", 0, "")
    runner = open_module(artifact, LOADING, threads=1)
    assert runner.device_seconds([np.ones((1, 4), np.float32)], 3) == [] and runner.providers == ("cpu",)
    monkeypatch.setattr(modules.torch.cuda, "is_available", lambda: False)
    with pytest.raises(TargetUnavailable, match="no GPU"):
        open_module(artifact, {**LOADING, "device": "cuda"}, threads=1)


class Event:
    """Stands for a CUDA event: each records one millisecond after the one before."""

    now_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.at_ms = 0.0

    def record(self) -> None:
        Event.now_ms += 1.0
        self.at_ms = Event.now_ms

    def elapsed_time(self, end: "Event") -> float:
        return end.at_ms - self.at_ms


def test_events_surround_each_run_and_are_awaited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    monkeypatch.setattr(modules.torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(modules.torch.cuda, "Event", Event)
    monkeypatch.setattr(modules.torch.cuda, "synchronize", waits.append)
    runner = ModuleRunner(Artifact("module", Path("m"), SPEC, (), "", "", 0, ""), torch.nn.Identity(), "cuda")
    monkeypatch.setattr(runner, "_tensors", lambda inputs: [torch.ones(1, 4)])
    assert runner.device_seconds([np.ones((1, 4), np.float32)], 3) == [0.001] * 3
    assert len(waits) == 1 and runner.providers == ("cuda (Some GPU)",)


def test_bfloat16_outputs_keep_their_type(tmp_path: Path) -> None:
    class Narrow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.bfloat16)

    runner = ModuleRunner(Artifact("module", Path("m"), SPEC, (), "", "", 0, ""), Narrow(), "cpu")
    (output,) = runner.run([np.ones((1, 4), np.float32)])
    assert output.dtype.name == "bfloat16" and (output.astype(np.float32) == 1).all()
