"""The worker's answers, asked in this process: files and modules, callers, clocks."""

import dataclasses
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optimize import regular
from optimize.errors import Refused
from optimize.measure import worker
from optimize.measure.modules import ModuleRunner
from optimize.measure.worker import (
    MODULE,
    UNSTEADY,
    Worker,
    artifact_from,
    clock_step_s,
    read_answer,
    read_arrays,
    write_arrays,
)
from optimize.targets.base import Artifact, TensorSpec

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


class Failing(torch.nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 6:
            raise ValueError("out of luck")
        return x


class Honest(torch.nn.Module):
    """Writes into what it makes itself, beside what it keeps in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)
        self.rnn = torch.nn.LSTM(2, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.drop(self.norm(x)).chunk(2, 1)
        return second.relu_() + self.rnn(first[:, None])[0][:, 0]


class Drawing(Honest):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x + torch.rand_like(x), 0.5, True)


class Remembering(torch.nn.Module):
    """Asked the same again, it answers at once."""

    last: torch.Tensor
    answer: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.last = self.answer = torch.zeros(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.last.size(0) == x.size(0) and torch.equal(self.last, x):
            return self.answer
        self.last, self.answer = x.clone(), x.tanh()
        return self.answer


class Listing(torch.nn.Module):
    known: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.known = [torch.zeros(1)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.known.append(x)
        return x


class Counting(torch.nn.Module):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count[1:].detach().add_(1.0)
        return x


class Flagging(Counting):
    """Counts where no number tells: in whether gradients are asked for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.requires_grad_(not self.count.requires_grad)
        return x


class Hiding(Counting):
    """Counts in the storage beyond what its buffer shows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3)[:2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.as_strided([1], [1], 2).add_(1.0)
        return x


class Rounding(Counting):
    """Counts in the scale of integers that stay 0."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.count.q_scale() + 1.0
        self.count.copy_(torch.quantize_per_tensor(torch.zeros([2]), scale, 0, torch.qint8))
        return x


BLOCK: dict[str, Any] = {"do": "block", "scenario": "s", "streams": 1, "group": 1, "settle": False}


def as_json(artifact: Artifact) -> dict[str, object]:
    fields: dict[str, object] = json.loads(json.dumps(dataclasses.asdict(artifact), default=str))
    return fields


def test_artifact_survives_json(make: Make) -> None:
    artifact = make()
    assert artifact_from(as_json(artifact)) == artifact


def opened(artifact: Artifact, folder: Path, streams: int = 1) -> Worker:
    """Returns a worker that loaded a file and holds inputs of two samples for the scenario ``s``."""
    worker, fields = Worker(), as_json(artifact)
    module = "" if artifact.target == MODULE else "arithmetic_target"
    request = {"do": "load", "artifact": fields, "module": module, "threads": 1, "affinity": []}
    reply = worker.answer(request)
    assert reply["ok"] and reply["load_s"] > 0 and reply["clock_step_s"] > 0 and reply["missing"] == []
    assert reply["ran_on"] == (["cpu"] if artifact.target == MODULE else [])
    shape = (2, *artifact.inputs[0].shape[1:])
    write_arrays(folder / "x.npz", [np.ones(shape, np.float32)])
    prepare = {"do": "prepare", "scenario": "s", "path": str(folder / "x.npz"), "streams": streams}
    assert worker.answer(prepare) == {"ok": True}
    return worker


def module(source: str = "torch.nn:Identity") -> Artifact:
    spec = (TensorSpec("x", ("N", 4), "float32"),)
    return Artifact(MODULE, Path(source), spec, (), "", "", 0, "", settings={"source": source, "device": "cpu"})


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_load_warm_time_and_run(make: Make, tmp_path: Path, one_thread: None) -> None:
    worker, answered = opened(make(factor=2.0), tmp_path), tmp_path / "answered.npz"
    warm = worker.answer({"do": "warm_up", "scenario": "s", "streams": 1, "runs": 4, "seconds": 0.0, "cap_s": 9.0})
    assert warm["ok"] and warm["runs"] == len(warm["first_s"]) == 4 and min(*warm["first_s"], warm["run_s"]) > 0
    reply = worker.answer({**BLOCK, "runs": 7, "settle": True})
    assert len(reply["samples_s"]) == len(reply["cpu_s"]) == 7 and reply["settling_s"] > 0
    assert reply["device_s"] == [] and reply["span_s"] >= sum(reply["samples_s"])
    assert vars(worker.runners[0])["calls"] == 4 + 1 + 7  # one run before a block pays for the switch
    assert worker.answer({"do": "run", "inputs": str(tmp_path / "x.npz"), "outputs": str(answered)}) == {"ok": True}
    np.testing.assert_array_equal(read_arrays(answered)[0], np.full((2, 3), 2.0))


@pytest.mark.parametrize("behaviour", [{"forgets_at": 7}, {"forgets_at": 2}, {"marks_at": 7}, {"marks_at": 1}])
def test_the_last_answer_of_a_block_is_the_first_of_all(
    behaviour: dict[str, int], make: Make, tmp_path: Path, one_thread: None
) -> None:
    """Where it is asked: who compares files of a network that draws numbers asks for their time alone.

    A file answered right once, wrote into what it was given, and answered nonsense to that: the first block came later.
    """
    worker, (begins,) = opened(make(**behaviour), tmp_path), behaviour.values()
    floor = {"do": "warm_up", "scenario": "s", "streams": 1, "runs": 1, "seconds": 0, "cap_s": 0, "steady": True}
    asked, failed = {**BLOCK, "runs": 3, "steady": True}, {"ok": False, "error": UNSTEADY}
    if begins > 1:
        assert worker.answer(floor)["ok"]
    if begins == 7:
        assert worker.answer({**asked, "runs": 1, "group": 3})["ok"]
    assert worker.answer(floor if begins == 1 else asked) == failed
    assert worker.answer({**asked, "steady": False})["ok"]


@pytest.mark.parametrize(
    ("network", "named", "changes"),
    [
        (Honest, (), False),
        (Drawing, ("aten::dropout, aten::rand_like",), False),
        (Remembering, ("prim::SetAttr",), True),
        (Listing, ("prim::GetAttr",), True),
        *((network, (), True) for network in (Counting, Flagging, Hiding, Rounding)),
    ],
)
def test_a_torchscript_file_that_remembers_is_no_faster_one(
    network: type[torch.nn.Module], named: tuple[str, ...], changes: bool, tmp_path: Path
) -> None:
    """Asked the same again and again it answered at once, rightly: only what it keeps tells."""
    torch.jit.script(network().eval()).save(str(tmp_path / "net.pt"))
    spec = (TensorSpec("x", ("N", 4), "float32"),)
    artifact = Artifact("torchscript", tmp_path / "net.pt", spec, (), "", "", 0, "", untrusted=False)
    worker, floor = Worker(), {"do": "warm_up", "scenario": "s", "streams": 1, "runs": 1, "seconds": 0, "cap_s": 0}
    where = {"module": "optimize.targets.torchscript", "threads": 1, "affinity": []}
    assert worker.answer({"do": "load", "artifact": as_json(artifact), **where})["notes"] == [
        f"It draws numbers, or keeps a state, by {names}: asked twice, it may answer otherwise." for names in named
    ]
    write_arrays(tmp_path / "x.npz", [np.ones((2, 4), np.float32)])
    worker.answer({"do": "prepare", "scenario": "s", "path": str(tmp_path / "x.npz"), "streams": 1})
    found = worker.answer({**floor, "steady": True})
    assert found == {"ok": False, "error": UNSTEADY} if changes else found["ok"]


def test_what_a_file_is_timed_on_takes_turns(
    make: Make, tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked the same again and again, whatever remembers is fast."""
    worker, asked = opened(make(), tmp_path), list[float]()
    write_arrays(tmp_path / "x.npz", [np.full((2, 3), value, np.float32) for value in (1.0, 2.0)])
    worker.answer({"do": "prepare", "scenario": "s", "path": str(tmp_path / "x.npz"), "streams": 1})
    run = worker.runners[0].run
    monkeypatch.setattr(worker.runners[0], "run", lambda inputs: asked.append(inputs[0][0, 0]) or run(inputs))
    floor = {"do": "warm_up", "scenario": "s", "streams": 1, "runs": 3, "seconds": 0, "cap_s": 0, "steady": True}
    assert worker.answer(floor)["ok"] and asked == [1.0, 2.0, 1.0]
    for runs, wanted in ((3, [2.0, 1.0, 2.0]), (2, [2.0, 1.0])):
        asked.clear()
        assert worker.answer({**BLOCK, "runs": runs, "steady": True})["ok"] and asked == wanted


def test_no_file_knows_which_of_its_runs_is_looked_at(
    make: Make, tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, asked = opened(make(), tmp_path), {**BLOCK, "runs": 3, "settle": True, "steady": True}
    for byte, runs in ((b"\x02", 4), (b"\x03", 5)):
        monkeypatch.setattr("os.urandom", lambda _, byte=byte: byte)
        before = vars(worker.runners[0])["calls"]
        assert worker.answer(asked)["ok"] and vars(worker.runners[0])["calls"] - before == runs


def test_errors_are_answers() -> None:
    answer = Worker().answer({**BLOCK, "runs": 1})
    assert not answer["ok"] and "before it was asked to load" in answer["error"]


def test_a_token_that_a_table_lacks_is_told_as_the_data_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = opened(module(), tmp_path)
    monkeypatch.setattr(worker.runners[0], "module", lambda x: torch.nn.functional.embedding(x.long() + 9, x))
    answer = worker.answer({"do": "run", "inputs": str(tmp_path / "x.npz"), "outputs": str(tmp_path / "y.npz")})
    assert not answer["ok"] and answer["error"].endswith("a token or class of the data is too large.")


def test_pickled_arrays_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "planted.npz"
    np.savez(path, arr_0=np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        read_arrays(path)


def test_blocks_are_timed_on_both_clocks(
    make: Make, tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = opened(make(sleep_s=0.002), tmp_path)
    reply = worker.answer({**BLOCK, "runs": 5})
    assert len(reply["samples_s"]) == len(reply["cpu_s"]) == 5 and min(reply["samples_s"]) >= 0.002
    assert reply["waited"] >= 5 and reply["preempted"] >= 0  # a sleeper gives the processor up by itself
    assert vars(worker.runners[0])["calls"] == 5 and reply["settling_s"] is None  # none untimed
    clocks = Clocks()
    monkeypatch.setattr("optimize.measure.worker.time", clocks)
    monkeypatch.setattr(worker.runners[0], "run", clocks.run)
    reply = worker.answer({**BLOCK, "runs": 3, "settle": True})
    assert reply["samples_s"] == [0.5] * 3 and reply["cpu_s"] == [0.125] * 3
    began_s = clocks.wall_s
    reply = worker.answer({**BLOCK, "runs": 3, "group": 4})
    assert reply["samples_s"] == [0.5] * 3 and reply["cpu_s"] == [0.125] * 3 and clocks.wall_s - began_s == 12 * 0.5


def test_callers_share_one_module(tmp_path: Path) -> None:
    worker = opened(module(), tmp_path, streams=3)
    assert len(worker.runners) == 3 and len(set(map(id, worker.runners))) == 1
    reply = worker.answer({**BLOCK, "runs": 11, "streams": 3})
    assert len(reply["samples_s"]) == 11 and len(reply["cpu_s"]) == 1


def test_what_a_caller_raises_is_the_answer(tmp_path: Path) -> None:
    worker = opened(module(f"{__name__}:Failing"), tmp_path, streams=2)
    assert worker.answer({**BLOCK, "runs": 20, "streams": 2}) == {"ok": False, "error": "ValueError: out of luck"}


def test_a_runtime_whose_model_cannot_be_shared_is_opened_for_each_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModuleRunner, "shared", False)
    assert len(set(map(id, opened(module(), tmp_path, streams=3).runners))) == 3


def test_the_clocks_step() -> None:
    ticks = iter([0.0, 0.0, 0.0, 0.25] * 1000)
    readings: list[float] = []

    def clock() -> float:
        readings.append(next(ticks))
        return readings[-1] + 0.25 * (len(readings) // 4)

    assert clock_step_s(clock) in (0.25, 0.5)


def test_a_failure_in_torchscript_is_told_by_its_cause() -> None:
    text = "The following operation failed in the TorchScript interpreter.\nTraceback\nRuntimeError: no such kernel"
    assert worker._describe(RuntimeError(text)) == "RuntimeError: no such kernel"
    assert worker._describe(RuntimeError("one\ntwo")) == "RuntimeError: one"


def test_an_answer_of_many_outputs_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of members was read anew for each of them: their square."""
    opened = []
    archive = zipfile.ZipFile
    monkeypatch.setattr(zipfile, "ZipFile", lambda *given: opened.append(given) or archive(*given))
    with (tmp_path / "x.npz").open("wb") as file, archive(file, "w") as made:
        for place in range(60):
            with made.open(f"arr_{place}.npy", "w") as member:
                np.save(member, np.full(1, place))
    assert read_answer(tmp_path, "x.npz") == [[place] for place in range(60)] and len(opened) == 1
    monkeypatch.setattr("optimize.measure.worker._MOST_OUTPUTS", 59)
    with pytest.raises(Refused, match="left 60 outputs; a file has 59 at most"):
        read_answer(tmp_path, "x.npz")


def test_an_answer_far_larger_than_the_other_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of six kilobytes answered gigabytes, which were read before their shapes were looked at."""
    monkeypatch.setattr("optimize.measure.worker._SMALL_BYTES", 0)
    write_arrays(tmp_path / "x.npz", [np.ones(2**20)])
    assert read_answer(tmp_path, "x.npz", 2**20)[0].sum() == 2**20
    with pytest.raises(Refused, match="answers 8 MiB where the other file answers 262,144 numbers"):
        read_answer(tmp_path, "x.npz", 2**18)


def test_an_answer_is_not_changed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What looked at the list of members and what read it saw one file, which its writer held open."""
    look, path = regular._directory_bytes, tmp_path / "x.npz"
    write_arrays(path, [np.ones(3, np.float32)])

    def change(file: Any) -> int:
        found = look(file)
        path.write_bytes(b"something else")
        return found

    monkeypatch.setattr(regular, "_directory_bytes", change)
    assert [values.tolist() for values in read_answer(tmp_path, "x.npz")] == [[1.0] * 3]
