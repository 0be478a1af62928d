"""What a worker answers, asked in this process: modules, callers, clocks."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import optimize
from optimize.bench.worker import BenchWorker, clock_step_s
from optimize.errors import TargetUnavailable
from optimize.measure import modules
from optimize.measure.modules import ModuleRunner, open_module
from optimize.measure.worker import write_arrays
from optimize.targets.base import Artifact, TensorSpec

SPEC = (TensorSpec("x", ("N", 4), "float32"),)
LOADING = {"source": "torch.nn:Identity", "factory": None, "trust": False, "device": "cpu"}
MODULE = {"artifact": {"target": "module", "path": "torch.nn:Identity"}, "loading": LOADING, "threads": 1}


class Failing(torch.nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 6:
            raise ValueError("out of luck")
        return x


def opened(tmp_path: Path, source: str = "torch.nn:Identity", streams: int = 1) -> BenchWorker:
    worker = BenchWorker()
    artifact = {"target": "module", "path": source, "precision": "", "sha256": "", "size_bytes": 0, "out_spec": ""}
    specs = [{"name": "x", "shape": ["N", 4], "dtype": "float32"}]
    fields = {**artifact, "inputs": specs, "outputs": [], "versions": {}}
    request = {"do": "open", "artifact": fields, "module": "", "threads": 1, "affinity": []}
    reply = worker.answer({**request, "loading": {**LOADING, "source": source}})
    assert reply["ok"] and reply["ran_on"] == ["cpu"] and reply["load_s"] > 0 and reply["clock_step_s"] > 0
    write_arrays(tmp_path / "x.npz", [np.ones((2, 4), np.float32)])
    prepare = {"do": "prepare", "scenario": "s", "path": str(tmp_path / "x.npz"), "streams": streams}
    assert worker.answer(prepare)["ok"]
    return worker


def test_blocks_tell_every_run(tmp_path: Path) -> None:
    worker = opened(tmp_path)
    warm = worker.answer({"do": "warm_up", "scenario": "s", "streams": 1, "runs": 4, "seconds": 0.0, "cap_s": 1.0})
    assert len(warm["samples_s"]) == 4 and warm["run_s"] > 0
    block = {"do": "block", "scenario": "s", "runs": 7, "streams": 1, "group": 3, "settle": True}
    reply = worker.answer(block)
    assert len(reply["samples_s"]) == len(reply["cpu_s"]) == 7 and reply["settling_s"] > 0
    assert reply["device_s"] == [] and reply["span_s"] >= sum(reply["samples_s"])
    assert worker.answer({**block, "settle": False})["settling_s"] is None


def test_callers_share_one_module(tmp_path: Path) -> None:
    worker = opened(tmp_path, streams=3)
    assert len(worker.runners) == 3 and len(set(map(id, worker.runners))) == 1
    block = {"do": "block", "scenario": "s", "runs": 11, "streams": 3, "group": 1, "settle": False}
    reply = worker.answer(block)
    assert len(reply["samples_s"]) == 11 and len(reply["cpu_s"]) == 1


def test_what_a_caller_raises_is_the_answer(tmp_path: Path) -> None:
    worker = opened(tmp_path, f"{__name__}:Failing", streams=2)
    block = {"do": "block", "scenario": "s", "runs": 20, "streams": 2, "group": 1, "settle": False}
    assert worker.answer(block) == {"ok": False, "error": "ValueError: out of luck"}


def test_a_runtime_whose_model_cannot_be_shared_is_opened_for_each_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModuleRunner, "shared", False)
    assert len(set(map(id, opened(tmp_path, streams=3).runners))) == 3


def test_the_clocks_step() -> None:
    ticks = iter([0.0, 0.0, 0.0, 0.25] * 1000)
    readings: list[float] = []

    def clock() -> float:
        readings.append(next(ticks))
        return readings[-1] + 0.25 * (len(readings) // 4)

    assert clock_step_s(clock) in (0.25, 0.5)


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


def test_worker_needs_no_torch_for_files_of_other_runtimes(tmp_path: Path) -> None:
    import subprocess
    import sys

    program = "import sys, optimize.bench.worker; print('torch' in sys.modules, 'onnx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.split() == ["False", "False"] and optimize.__name__ == "optimize"
