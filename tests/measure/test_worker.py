"""The worker's answers, asked in this process."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from optimize.measure.worker import Worker, artifact_from, read_arrays, write_arrays
from optimize.targets.base import Artifact

Make = Callable[..., Artifact]


class Clocks:
    """Both clocks of a process, which stand still but while a run works for a little and waits for longer."""

    wall_s = cpu_s = 1.0

    def perf_counter(self) -> float:
        return self.wall_s

    def process_time(self) -> float:
        return self.cpu_s

    def run(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        self.wall_s += 0.5
        self.cpu_s += 0.125
        return inputs


def as_json(artifact: Artifact) -> dict[str, object]:
    fields: dict[str, object] = json.loads(json.dumps(dataclasses.asdict(artifact), default=str))
    return fields


def test_artifact_survives_json(make: Make) -> None:
    artifact = make()
    assert artifact_from(as_json(artifact)) == artifact


def test_load_warm_time_and_run(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    worker, given, answered = Worker(), tmp_path / "given.npz", tmp_path / "answered.npz"
    write_arrays(given, [np.ones((2, 3), np.float32)])
    fields = as_json(make(factor=2.0))
    loaded = worker.answer({"do": "load", "module": "arithmetic_target", "artifact": fields, "threads": 1})
    assert loaded["ok"] and loaded["load_s"] > 0
    assert worker.answer({"do": "inputs", "path": str(given)}) == {"ok": True}
    warm = worker.answer({"do": "warm", "runs": 4, "seconds": 0.0, "cap_s": 9.0})
    assert warm["ok"] and warm["first_call_s"] > 0 and warm["run_s"] > 0
    assert len(worker.answer({"do": "time", "runs": 7})["samples_s"]) == 7
    assert worker.runner is not None and vars(worker.runner)["calls"] == 4 + 1 + 7  # one untimed run before a block
    assert worker.answer({"do": "run", "inputs": str(given), "outputs": str(answered)}) == {"ok": True}
    np.testing.assert_array_equal(read_arrays(answered)[0], np.full((2, 3), 2.0))


def test_errors_are_answers() -> None:
    answer = Worker().answer({"do": "time", "runs": 1})
    assert not answer["ok"] and "before it was asked to load" in answer["error"]


def test_pickled_arrays_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "planted.npz"
    np.savez(path, arr_0=np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        read_arrays(path)


def test_blocks_are_timed_on_both_clocks(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    worker, given = Worker(), tmp_path / "given.npz"
    write_arrays(given, [np.ones((2, 3), np.float32)])
    fields = as_json(make(sleep_s=0.002))
    worker.answer({"do": "load", "module": "arithmetic_target", "artifact": fields, "threads": 1})
    worker.answer({"do": "inputs", "path": str(given)})
    reply = worker.answer({"do": "time", "runs": 5, "untimed": 0})
    assert len(reply["samples_s"]) == len(reply["cpu_s"]) == 5 and min(reply["samples_s"]) >= 0.002
    assert reply["waited"] >= 5 and reply["preempted"] >= 0  # a sleeper gives the processor up by itself
    assert worker.runner is not None and vars(worker.runner)["calls"] == 5  # none untimed
    clocks = Clocks()
    monkeypatch.setattr("optimize.measure.worker.time", clocks)
    monkeypatch.setattr(worker.runner, "run", clocks.run)
    reply = worker.answer({"do": "time", "runs": 3, "untimed": 1})
    assert reply["samples_s"] == [0.5] * 3 and reply["cpu_s"] == [0.125] * 3
