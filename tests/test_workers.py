"""Tasks done by several processes: the same bits, whoever is lost meanwhile."""

import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import optimize
from models import REFERENCES
from optimize import workers
from optimize.errors import Refused, UsageError
from optimize.program import Program
from optimize.quantization.calibrate import HALVED
from optimize.quantization.sensitivity import LayerError, layer_errors
from optimize.transport import dumps
from optimize.workers import Cluster, Local, map_tasks, working
from tests import references, tasks

HAS_RAY = importlib.util.find_spec("ray") is not None
NEEDS_RAY = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")
#: Where Ray takes seconds.
SLOW_RAY = pytest.param("ray", marks=[NEEDS_RAY, pytest.mark.slow])


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def local() -> Iterator[Local]:
    with Local(2, threads=1) as crew:
        yield crew


@pytest.fixture(scope="module")
def ray() -> Iterator[Cluster]:
    with Cluster(None, 2, threads=1) as crew:
        yield crew


@pytest.fixture
def crew(request: pytest.FixtureRequest) -> Iterator[Local | Cluster | None]:
    """Let the workers of that name do the tasks of a test; started once for all of them."""
    opened = request.getfixturevalue(request.param) if request.param else None
    token = workers._crew.set(opened)
    yield opened
    workers._crew.reset(token)


BY_ALL = pytest.mark.parametrize("crew", ["local", pytest.param("ray", marks=NEEDS_RAY)], indirect=True)
BY_ALL_SLOWLY = pytest.mark.parametrize("crew", ["local", SLOW_RAY], indirect=True)
BY_LOCAL = pytest.mark.parametrize("crew", ["local"], indirect=True)


#: A plan, weights, errors.
Found = tuple[str, dict[str, bytes], tuple[LayerError, ...]]


def found(name: str) -> Found:
    """Return what static INT8 makes of a network: the plan, its weights, the error of each layer."""
    reference = REFERENCES[name]
    given = reference.inputs(HALVED + 70)  # so that samples are watched by several tasks
    program = optimize.Pipeline([optimize.FuseConvBN()]).run(references.captured(name, None)).program
    quantized, _ = optimize.QuantizeStatic(calibration=[given]).apply(program)
    batch = given if isinstance(given, tuple) else (given,)
    return repr(sorted(quantized.plan.ranges.items())), weights(quantized), layer_errors(quantized, [batch])


def weights(program: Program) -> dict[str, bytes]:
    return {name: value.detach().numpy().tobytes() for name, value in program.graph_module.state_dict().items()}


@pytest.fixture(scope="module")
def by_one() -> dict[str, Found]:
    return {net: found(net) for net in ("resnet", "vit")}


@BY_ALL_SLOWLY
def test_all_of_static_int8_has_the_same_bits_whoever_does_it(by_one: dict[str, Found], crew: Local | Cluster) -> None:
    for net in by_one if isinstance(crew, Local) else ("resnet",):  # both crews are given the same tasks
        assert found(net) == by_one[net]
    assert by_one["resnet"][2]


@BY_LOCAL
def test_a_worker_that_is_killed_in_the_middle_changes_nothing(crew: Local) -> None:
    reference = REFERENCES["resnet"]
    program, given = references.captured("resnet", None), reference.inputs(16)
    quantized, _ = optimize.QuantizeStatic(calibration=[given]).apply(program)
    wanted, killed = layer_errors(quantized, [(given,)]), list[int]()

    def kill(share: float) -> None:
        if not killed:
            process = crew._children[0]._process
            assert process is not None
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)

    assert layer_errors(quantized, [(given,)], progress=kill) == wanted
    assert killed


@BY_ALL_SLOWLY
def test_a_task_whose_worker_is_lost_is_done_again(crew: Local | Cluster, tmp_path: Path) -> None:
    assert list(map_tasks(tasks.killed_once, (tmp_path,), range(8))) == list(range(8))
    assert (tmp_path / "killed").exists()


@BY_ALL_SLOWLY
def test_a_task_that_ends_every_worker_is_refused(crew: Local | Cluster) -> None:
    with pytest.raises(Refused, match="A worker was lost 3 times over one task"):
        list(map_tasks(tasks.killed_always, (), [0]))


@pytest.mark.parametrize("crew", [None, "local", SLOW_RAY], indirect=True)
def test_what_a_task_raises_is_raised_after_the_answers_before_it(crew: Local | Cluster | None) -> None:
    answers = []
    with pytest.raises(Refused) as raised:
        for answer in map_tasks(tasks.refusing, (), range(5)):
            answers.append(answer)
    assert answers == [0, 1] and (raised.value.what, raised.value.hint) == ("The second cannot be.", "Leave it out.")


@BY_LOCAL
def test_answers_come_in_order_and_tasks_are_read_when_somebody_is_free(crew: Local, tmp_path: Path) -> None:
    """However long the first worker takes to begin, while the other one does what it can."""
    waiting = list[int]()

    def numbers() -> Iterator[int]:
        for number in range(40):
            waiting.append(number - len(os.listdir(tmp_path)))
            yield number

    assert list(map_tasks(tasks.noting, (tmp_path,), numbers())) == [number**2 for number in range(40)]
    assert len(waiting) == 40 and max(waiting) <= workers._AHEAD * crew.count


@BY_ALL
def test_no_task_runs_any_more_when_the_answers_are_let_go_of(crew: Local | Cluster, tmp_path: Path) -> None:
    answers = map_tasks(tasks.waiting, (tmp_path,), range(20))
    assert next(answers) == 0
    answers.close()
    assert not list(tmp_path.iterdir())


@BY_LOCAL
def test_who_lets_go_of_answers_does_not_wait_for_long_tasks(crew: Local) -> None:
    """Ctrl-C between two answers closed the generator, which waited for the tasks under way, however long."""
    answers, began_s = map_tasks(tasks.sleeping, (), [0, 600, 600, 600]), time.monotonic()
    assert next(answers) == 0
    answers.close()
    assert time.monotonic() - began_s < 300
    assert list(map_tasks(tasks.squaring, (1,), range(3))) == [1, 2, 5]


@BY_LOCAL
def test_a_worker_of_another_kind_is_refused(crew: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_kind", lambda: "torch 1.0 on a board")
    with pytest.raises(Refused, match=r"A worker has torch 2.* on .*, and this process torch 1.0 on a board"):
        list(map_tasks(tasks.squaring, (1,), [1]))


def test_a_confined_command_has_workers(tmp_path: Path) -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
    given = torch.rand(4, 3, 16, 16)
    torch.export.save(torch.export.export(nn.Sequential(*layers).eval(), (given[:2],)), tmp_path / "net.pt2")
    np.savez(tmp_path / "calib.npz", x=given.numpy())
    words = ["sensitivity", "net.pt2", "--calib", "calib.npz", "--to", "torchscript", "--on", "local:1", "--json", "-"]
    command = [sys.executable, "-m", "optimize", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert not done.returncode, done.stderr
    assert len(json.loads(done.stdout)["layers"]) == 2


def test_workers_have_as_many_threads_as_this_process() -> None:
    with working("local:1", threads=1):
        assert torch.get_num_threads() == 1 == workers.count_workers()
        assert list(map_tasks(tasks.counting_threads, (), [0])) == [1]


@pytest.mark.parametrize("on", ["processes", "local:0", "local:x", "ray://", "ssh://host", "ray:2:3"])
def test_a_word_for_no_workers_is_told(on: str) -> None:
    with (
        pytest.raises(UsageError, match=r"names no workers(.|\n)*ray://HOST:10001; run and auto .* ssh://HOST"),
        working(on, trust=True),
    ):
        pass


def test_ray_needs_trust() -> None:
    with pytest.raises(Refused, match="needs --trust"), working("ray:2"):
        pass


@pytest.mark.parametrize("name", references.each("resnet", "vit", "lstm"))
def test_a_program_is_the_same_in_another_process(name: str) -> None:
    program = references.captured(name, None)
    carried: Program = pickle.loads(dumps(program))
    assert carried.text() == program.text()
    for one, two in zip(carried.run(program.sample(3)), program.run(program.sample(3)), strict=True):
        assert torch.equal(one, two)


def test_a_tensor_goes_alone_and_keeps_its_order_in_memory() -> None:
    many = torch.randn(1000, 3, 8, 8).to(memory_format=torch.channels_last)
    for value in (many[:2], torch.tensor(3), torch.arange(4, dtype=torch.bfloat16), torch.empty(0, 3)):
        content = dumps(value)
        back = pickle.loads(content)
        assert torch.equal(back, value) and back.dtype == value.dtype and len(content) < 4000
        assert back.stride() == value.stride()
