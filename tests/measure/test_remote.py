"""Another machine behind a real sshd: what its workers answer, how they end, and that nothing of them is left."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from optimize.bench.rounds import run
from optimize.errors import Refused, TargetUnavailable, UsageError
from optimize.measure import remote as machine
from optimize.measure.feed import Asked
from optimize.measure.fleet import Fleet, WorkerFailed
from optimize.measure.lockstep import Plan
from optimize.measure.openers import Opening
from optimize.measure.remote import Address, Remote, connected
from optimize.measure.subjects import MODULE, Subject
from optimize.registry import find_target
from optimize.targets.base import Artifact
from tests import sshd
from tests.sshd import Board

pytestmark = sshd.NEEDS_SSHD
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
X = np.arange(6, dtype=np.float32).reshape(2, 3)
Make = Callable[..., Artifact]


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    with pytest.MonkeyPatch.context() as patch, sshd.board(tmp_path_factory.mktemp("board")) as found:
        patch.setenv("PATH", found.path)
        yield found


@pytest.fixture(scope="module")
def remote(board: Board) -> Iterator[Remote]:
    """A connection to a Python that finds the target for tests, too."""
    script = f'PYTHONPATH="$PYTHONPATH:{HERE}" exec {sys.executable} "$@"'
    with connected(board.url(sshd.python(board, "python", script)), trust=True) as found:
        assert found is not None
        yield found
    assert not board.left()


def test_outputs_come_from_the_other_machine(make: Make, remote: Remote, board: Board) -> None:
    with Fleet([make(), make(factor=3.0, talks=True)], threads=2, remote=remote) as fleet:
        once, thrice = (session.outputs([X]) for session in fleet)
        assert all(session.load_s > 0 and session.failure is None for session in fleet)
        peak = fleet.sessions[0].peak_memory_bytes()
        (there,) = board.scratch.iterdir()
        assert len(list(there.glob("*/pid"))) == 2 and there.stat().st_mode & 0o777 == 0o700
    np.testing.assert_array_equal(once[0], X)
    np.testing.assert_array_equal(thrice[0], 3 * X)
    assert peak is not None and 1e6 < peak < 200e6


def test_a_file_is_sent_once_and_its_processes_end_with_the_fleet(make: Make, remote: Remote, board: Board) -> None:
    artifact = make(factor=7.0)
    for _ in range(2):
        with Fleet([artifact, artifact], remote=remote):
            (there,) = board.scratch.iterdir()
            processes = [int(path.read_text()) for path in there.glob("*/pid")]
            assert len(processes) == 2
        _wait(lambda ids=tuple(processes): not any(map(_runs, ids)))  # type: ignore[misc]
        assert not any(map(_runs, processes))
    assert len([path for path in there.rglob("*.json") if "7.0" in path.read_text()]) == 1


def test_a_crash_is_a_row_and_the_others_go_on(make: Make, remote: Remote) -> None:
    subjects = [
        Subject(name, "arithmetic", artifact, places=(0,), remote=remote)
        for name, artifact in (("well", make()), ("dying", make(dies_at=20)), ("refusing", make(refuses=True)))
    ]
    found = run(subjects, Plan(restarts=1, runs=30), Asked(subjects[0].artifact.inputs))
    well, dying, refusing = found.tracks
    assert well.failure is None and sum(len(block.samples_s) for block in well.blocks[Plan().scenarios[0]]) >= 30
    assert dying.failure is not None and re.search("the worker ended with exit code 134: .*Abort", dying.failure)
    assert refusing.failure == "load: The file is not of this version."


def test_a_hang_is_recorded_and_ended(make: Make, remote: Remote, board: Board) -> None:
    with Fleet([make(hangs_at=1)], remote=remote) as fleet:
        session = fleet.sessions[0]
        (place,) = next(board.scratch.iterdir()).glob("*/pid")
        process = int(place.read_text())
        session._patience_s = 0.2
        with pytest.raises(WorkerFailed, match=r"no answer within 0\.2 s"):
            session.outputs([X])
        _wait(lambda: not _runs(process))


def test_answers_are_bounded_like_those_of_this_machine(
    make: Make, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Fleet([make()], remote=remote) as fleet:
        monkeypatch.setattr("optimize.measure.remote.free_bytes", lambda: 64)
        monkeypatch.setattr("optimize.measure.worker.free_bytes", lambda: 64)
        with pytest.raises(WorkerFailed, match="left an answer that is not read"):
            fleet.sessions[0].outputs([X])


def test_a_pipe_in_place_of_an_answer_holds_nobody_up(remote: Remote, board: Board, tmp_path: Path) -> None:
    (there,) = board.scratch.iterdir()
    os.mkfifo(there / "pipe")
    remote.fetch("pipe", tmp_path / "answer")
    assert (tmp_path / "answer").read_bytes() == b""


def test_the_environment_is_that_of_the_other_machine(remote: Remote) -> None:
    found, here = remote.environment, Opening(Path()).machine
    assert (found.cpu, found.cores, found.identity) == (here.cpu, here.cores, here.identity)
    assert found.host.level == here.host.level and found.load_average is not None
    assert Opening(Path(), remote=remote).machine is found and {"numpy", "optimize"} <= set(found.versions)


def test_what_cannot_run_there(make: Make, remote: Remote) -> None:
    with pytest.raises(Refused, match="needs --trust to run on another machine: no process is confined there"):
        Fleet([dataclasses.replace(make(), untrusted=True)], remote=remote).__enter__()
    module = Artifact(MODULE, Path("package:factory"), (), (), "", "", 0, "")
    with pytest.raises(Refused, match="'net' is run as a Python module"):
        Opening(Path(), remote=remote).placed(Subject("net", "eager module", module))
    with pytest.raises(Refused, match="lies outside its file's folder"):
        remote.send("1", {"../weights.bin": Path(__file__)})
    assert "package" in remote.lacks("nowhere", None) or "nowhere" in remote.lacks("nowhere", None)


def test_a_machine_without_the_runtime_says_how_to_get_it(board: Board, tmp_path: Path) -> None:
    with connected(board.url(sshd.having(board, tmp_path, "numpy")), trust=True) as found:
        assert found is not None and found.environment.versions["numpy"] == np.__version__
        artifact = Artifact("onnx", Path("net.onnx"), (), (), "", "", 0, "")
        missing = Opening(Path(), remote=found).placed(Subject("net.onnx", "ONNX", artifact)).missing
        assert missing.startswith(f"on {found.address.url}: ") and "onnxruntime" in missing and "pip install" in missing
        assert found.lacks("torchscript", None) == "torch is not installed (pip install torch)"


def test_a_machine_that_cannot_run_a_worker(board: Board, tmp_path: Path) -> None:
    known, old = board.folders, sshd.python(board, "old", "echo it is 3.9 >&2; exit 1")
    for python, told in (
        ("/nowhere/python", "with NumPy at '/nowhere/python': .*not found"),
        (old, "it is 3.9"),
        (sshd.bare(tmp_path), "with NumPy at .*No module named 'numpy'"),
    ):
        with pytest.raises(TargetUnavailable, match=told) as raised:
            Remote(Address.of(board.url(python))).__enter__()
        assert "nstall" in raised.value.hint
    assert not board.left(known)


def test_a_machine_that_is_not_reached(board: Board, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = board.folders
    (tmp_path / "nobody").touch()
    monkeypatch.setattr("optimize.measure.remote._PATIENCE_S", 60.0)
    for configured, told in (
        ({"key": "stranger"}, r"Permission denied \(publickey"),
        ({"known_hosts": "nobody"}, "Host key verification failed"),
    ):
        sshd.configure(board, **configured)
        with pytest.raises(TargetUnavailable, match=f"is not reached: .*{told}") as raised:
            Remote(Address.of(board.url())).__enter__()
        assert f"-p {board.port} -- 127.0.0.1 true" in raised.value.hint
    sshd.configure(board)
    with pytest.raises(TargetUnavailable, match="Connection refused"):
        Remote(Address.of("ssh://127.0.0.1:1")).__enter__()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TargetUnavailable, match="ssh is not installed") as raised:
        Remote(Address.of(board.url())).__enter__()
    assert "openssh-client" in raised.value.hint and not board.left(known)


@pytest.mark.parametrize(
    "url",
    [
        "board", "ssh://", "ssh://-oProxyCommand=x", "ssh://a;b", "ssh://a b", "ssh://$(id)", "ssh://-l@host", "ssh://@host",
        "ssh://host:22x", "ssh://host:٢٢", "ssh://host\n", "ssh://host/a b", "ssh://host/$(id)", "ssh://ho'st", "ssh://host:-1",
        "ssh://user:secret@host",
    ],
)  # fmt: skip
def test_what_is_no_machine_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="names no machine"):
        Address.of(url)


def test_addresses() -> None:
    assert Address.of("ssh://board").words == ("--", "board") and Address.of("ssh://board").python == "python3"
    assert Address.of("ssh://pi@board.lan:2222/opt/v-1/bin/python3.12") == Address(
        "ssh://pi@board.lan:2222/opt/v-1/bin/python3.12", "board.lan", "pi", "2222", "/opt/v-1/bin/python3.12"
    )
    assert Address.of("ssh://[::1]:22").words == ("-p", "22", "--", "::1")


def test_files_need_trust_and_nobody_is_asked() -> None:
    with pytest.raises(Refused, match="A file needs --trust"), connected("ssh://board", trust=False):
        pass
    with connected(None, trust=False) as found:
        assert found is None


def test_a_file_is_known_by_all_that_it_consists_of(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    weight = onnx.numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    specs = [onnx.helper.make_tensor_value_info(name, 1, ["batch", 4]) for name in "xy"]
    graph = onnx.helper.make_graph([node], "g", specs[:1], specs[1:], [weight])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    told = {"save_as_external_data": True, "location": "odd name;x.bin", "size_threshold": 0}
    onnx.save_model(model, str(tmp_path / "net.onnx"), **told)
    assert find_target("onnx").open(tmp_path / "net.onnx", trust=True).beside == ("odd name;x.bin",)


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Address]:
    """An ``ssh`` that does what a machine of somebody else's might."""

    def made(script: str) -> Address:
        keeps = 'case "$*" in *"echo ready"*) echo ready; exec cat >/dev/null;; '
        path = tmp_path / "bin" / "ssh"
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\n{keeps}{script} esac\n")
        path.chmod(0o700)
        monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
        return Address.of("ssh://host")

    return made


def test_a_machine_that_takes_nothing_keeps_nobody_from_ctrl_c(
    hostile: Callable[[str], Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent is longer than a pipe holds; one that owes an answer is not waited for."""
    waited, leave = list[float](), machine._leave
    monkeypatch.setattr(machine, "_leave", lambda keeper, patience_s: (waited.append(patience_s), leave(keeper, 0.1)))
    address, began_s = hostile("*) exec sleep 600;;"), time.monotonic()
    timers = [threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)) for after_s in (1, 20)]
    for timer in timers:
        timer.start()
    try:
        with pytest.raises(KeyboardInterrupt), Remote(address):
            pass
    finally:
        for timer in timers:
            timer.cancel()
    assert time.monotonic() - began_s < 15 and waited == [machine._MUTE_S]


#: What a machine says of itself, and counts that none has.
PLAIN = {"cpu": "x", "cores": 4, "memory_bytes": 1, "system": "", "python": ""}
ODD: list[dict[str, object]] = [
    {"cores": 0}, {"cores": 10**9}, {"load_average": [-1, 0, 0]}, {"affinity": [-1]}, {"memory_bytes": -1},
    {"frequency_mhz": -1.0},
]  # fmt: skip


def test_what_a_machine_says_of_itself_is_no_longer_than_is_shown() -> None:
    found = machine._plain({"cpu": "A" * 900_000, "gpus": ["g" * 1000] * 15_000, "affinity": list(range(100_000))})
    assert (len(found["cpu"]), len(found["gpus"]), len(found["gpus"][0]), len(found["affinity"])) == (
        300,
        64,
        300,
        4096,
    )
    assert len(machine._plain({str(number): "1" for number in range(60_000)})) == 64


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('{"environment": {"gpus": ' + "[" * 600 + "]" * 600 + "}}", "does not say what it is"),
        ('{"environment": {"memory_bytes": 1' + "0" * 400 + "}}", "does not run a worker"),
        *((json.dumps({"environment": {**PLAIN, **odd}}), "does not say what it is") for odd in ODD),
    ],
    ids=["nested", "digits", *("-".join(odd) for odd in ODD)],
)
def test_a_machine_that_says_of_itself_what_none_is(
    said: str, told: str, hostile: Callable[[str], Address], tmp_path: Path
) -> None:
    (tmp_path / "said").write_text(said)
    address = hostile(f'*"-m optimize.measure.remote"*) exec cat {tmp_path}/said;; *) exec cat >/dev/null;;')
    with pytest.raises(TargetUnavailable, match=told), Remote(address):
        pass


@pytest.mark.parametrize(("descriptor", "told"), [(1, "does not answer within 3 s"), (2, "does not run a worker")])
def test_a_machine_that_talks_without_end_fills_no_disk(
    descriptor: int, told: str, hostile: Callable[[str], Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, kept, temporary = (
        hostile(f'*"-m optimize.measure.remote"*) exec cat /dev/zero >&{descriptor};; *) cat >/dev/null;;'),
        list[int](),
        tempfile.TemporaryFile,
    )

    def noted() -> IO[bytes]:
        made = temporary()
        kept.append(os.dup(made.fileno()))
        return made

    monkeypatch.setattr("optimize.measure.remote._PATIENCE_S", 3.0)
    monkeypatch.setattr("optimize.measure.remote._MOST_WRITTEN_BYTES", 1 << 20)
    monkeypatch.setattr("optimize.measure.remote.tempfile.TemporaryFile", noted)
    with pytest.raises(TargetUnavailable, match=told), Remote(address):
        pass
    # What is written before the bound is set comes on top; without one there were gigabytes.
    assert kept and max(os.fstat(number).st_size for number in kept) <= 1 << 27
    for number in kept:
        os.close(number)


@pytest.mark.parametrize("said", ["exec cat /dev/zero", "exec yes", "echo taken; exec sleep 600"])
def test_a_machine_that_talks_while_files_are_sent_is_not_waited_for(
    said: str, hostile: Callable[[str], Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = hostile(f"*tar*) {said};;")
    monkeypatch.setattr("optimize.measure.remote._PATIENCE_S", 1.0)
    with pytest.raises(TargetUnavailable, match="does not answer within 1 s"), Remote(address):
        pass


def test_a_file_that_is_gone_is_not_sent(remote: Remote, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"gone\.onnx' cannot be sent to another machine: No such file"):
        remote.send("gone", {"gone.onnx": tmp_path / "gone.onnx"})


def test_nothing_is_left_when_this_process_is_killed(board: Board, tmp_path: Path) -> None:
    """While a worker hangs in a run, which hears nothing of it."""
    script = f'PYTHONPATH="$PYTHONPATH:{HERE}" exec {sys.executable} "$@"'
    url = board.url(sshd.python(board, "python-killed", script))
    program = f"""if True:
        import sys
        sys.path[:0] = [{str(HERE)!r}]
        import arithmetic_target, numpy
        from pathlib import Path
        from optimize.measure.fleet import Fleet
        from optimize.measure.remote import connected
        with connected({url!r}, trust=True) as remote:
            artifact = arithmetic_target.artifact(Path({str(tmp_path / "file.json")!r}), hangs_at=1)
            with Fleet([artifact], remote=remote) as fleet:
                print("runs", flush=True)
                fleet.sessions[0].outputs([numpy.zeros((2, 3), numpy.float32)])
    """
    known = board.folders
    for number in (signal.SIGKILL, signal.SIGINT):
        command = [sys.executable, "-c", program]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"runs\n", process.stderr and process.stderr.read().decode()
            (place,) = board.scratch.glob(f"{(board.folders - known).pop()}/*/pid")
            worker = int(place.read_text())
            time.sleep(0.5)
            process.send_signal(number)
        assert not board.left(known)
        _wait(lambda worker=worker: not _runs(worker))


def _runs(process: int) -> bool:
    """Say whether a process runs; one that has ended and is not waited for yet does not."""
    try:
        return " Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


def _wait(done: Callable[[], bool], within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while not done() and time.monotonic() < end:
        time.sleep(0.05)
    assert done()


def test_who_is_interrupted_again_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE)

    def interrupted(patience_s: float | None = None) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as changed:
        changed.setattr(keeper, "wait", interrupted)
        ended = machine.end
        changed.setattr(machine, "end", lambda process: (changed.undo(), ended(process)))
        with pytest.raises(KeyboardInterrupt):
            machine._leave(keeper, 1.0)
    assert keeper.poll() == -signal.SIGKILL
