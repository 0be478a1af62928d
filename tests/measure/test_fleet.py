"""Sessions in fresh processes: what they answer, and how their deaths are told."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimize.measure.fleet import Fleet, WorkerFailed, read_reply
from optimize.measure.subjects import MODULE
from optimize.targets.base import Artifact

X = np.arange(6, dtype=np.float32).reshape(2, 3)
Make = Callable[..., Artifact]


def test_outputs_come_from_the_file_in_another_process(make: Make) -> None:
    with Fleet([make(), make(factor=3.0)]) as fleet:
        once, thrice = (session.outputs([X]) for session in fleet)
    np.testing.assert_array_equal(once[0], X)
    np.testing.assert_array_equal(thrice[0], 3 * X)


def test_native_output_does_not_disturb_the_replies(make: Make) -> None:
    with Fleet([make(talks=True)]) as fleet:
        np.testing.assert_array_equal(fleet.sessions[0].outputs([X])[0], X)


def test_crash_is_recorded_with_its_signal_and_the_others_go_on(make: Make) -> None:
    with Fleet([make(dies_at=1), make(factor=2.0)]) as fleet:
        with pytest.raises(WorkerFailed, match="killed by SIGABRT"):
            fleet.sessions[0].outputs([X])
        assert fleet.sessions[0].failure == "run: the worker was killed by SIGABRT"
        np.testing.assert_array_equal(fleet.sessions[1].outputs([X])[0], 2 * X)


def test_hang_is_recorded(make: Make) -> None:
    with Fleet([make(hangs_at=1)]) as fleet:
        session = fleet.sessions[0]
        session._patience_s = 0.2
        with pytest.raises(WorkerFailed, match=r"no answer within 0\.2 s"):
            session.outputs([X])
        with pytest.raises(WorkerFailed, match="no answer"):
            session.outputs([X])


def test_refusal_while_loading_is_the_recorded_reason(make: Make) -> None:
    with Fleet([make(refuses=True)]) as fleet:
        assert fleet.sessions[0].failure == "load: The file is not of this version."


def test_missing_file_is_recorded(make: Make, tmp_path: Path) -> None:
    lost = dataclasses.replace(make(), path=tmp_path / "lost.json")
    with Fleet([lost]) as fleet:
        assert "FileNotFoundError" in str(fleet.sessions[0].failure)


def test_wrong_input_is_told_in_the_artifacts_words(make: Make) -> None:
    with Fleet([make()]) as fleet, pytest.raises(WorkerFailed, match=r"Input 'x' must be float32; got float64\."):
        fleet.sessions[0].outputs([X.astype(np.float64)])


def test_threads_reach_the_process_and_the_runtime(make: Make) -> None:
    with Fleet([make()], threads=2) as fleet:
        assert fleet.sessions[0].failure is None


def test_processes_end_with_the_fleet(make: Make) -> None:
    with Fleet([make()]) as fleet:
        process = fleet.sessions[0]._process
        assert process.poll() is None
    assert process.poll() is not None


def test_peak_memory_is_that_of_a_process_without_torch(make: Make) -> None:
    with Fleet([make()]) as fleet:
        peak = fleet.sessions[0].peak_memory_bytes()
    assert peak is not None
    assert 5e6 < peak < 120e6  # torch alone takes more than 150 MB


def test_progress_is_told(make: Make) -> None:
    told: list[tuple[str, float]] = []
    with Fleet([make(), make()], progress=lambda phase, share: told.append((phase, share))):
        pass
    assert told == [("load artifacts", 0.5), ("load artifacts", 1.0)]


def test_affinity_reaches_the_process(make: Make) -> None:
    core = min(os.sched_getaffinity(0))
    with Fleet([make()], affinity=[core]) as fleet:
        assert os.sched_getaffinity(fleet.sessions[0]._process.pid) == {core}


def test_another_interpreter_sees_this_package_and_its_own_environment(tmp_path: Path) -> None:
    """The worker's own ``sys.path`` is printed by an interpreter that is a script around this one."""
    seen, script = tmp_path / "seen", tmp_path / "python"
    script.write_text(f'#!/bin/sh\necho "$PYTHONPATH" > {seen}\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    lost = Artifact("onnx", tmp_path / "lost.onnx", (), (), "", "", 0, "")
    with Fleet([lost], interpreters=[script]) as fleet:
        folder = Path(seen.read_text().strip())
        assert [entry.name for entry in folder.iterdir()] == ["optimize"]
        assert (folder / "optimize" / "measure" / "worker.py").is_file()
        assert str(fleet.sessions[0].failure).startswith("load: ")  # it ran, and the file is not there


@pytest.mark.parametrize(
    ("module", "content", "told"),
    [
        (
            "numpy",
            "raise ModuleNotFoundError(\"No module named 'numpy'\")",
            "'numpy' (in {0}, {1}: {0} -m pip install numpy)",
        ),
        ("onnxruntime", "raise RuntimeError('Unsupported model IR version: 10')", "version: 10 (in {0}, {1})"),
    ],
    ids=["without NumPy", "older runtime"],
)
def test_what_another_interpreter_lacks_is_told_with_its_name(
    module: str, content: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / f"{module}.py").write_text(content)
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    with Fleet([Artifact("onnx", tmp_path / "net.onnx", (), (), "", "", 0, "")], interpreters=[script]) as fleet:
        failure = str(fleet.sessions[0].failure)
    assert failure.endswith(told.format(script, "which needs NumPy and the runtime of the file")), failure


def test_untrusted_files_on_a_gpu_are_not_limited_in_addresses(make: Make) -> None:
    limits = {}
    for device in ("cpu", "cuda"):
        program = dataclasses.replace(make(), target=MODULE, untrusted=True, settings={"device": device})
        with Fleet([program]) as fleet:
            limits[device] = fleet.sessions[0].limits
    assert limits["cpu"]["memory_bytes"] is not None and limits["cuda"]["memory_bytes"] is None


TOLD = {
    "load": {"load_s": 0.1, "clock_step_s": 1e-7, "ran_on": ["CPU"], "missing": [], "notes": []},
    "warm_up": {"runs": 3, "first_s": [0.1], "run_s": 0.1},
    "block": {"samples_s": [0.1], "cpu_s": [0.0], "span_s": 0.1, "settling_s": None, "device_s": [], "preempted": 0}
    | {"waited": 0},
    "run": {},
}
ASKED = {command: {"do": command, "runs": 1, "streams": 1} for command in TOLD}
BAD = [None, "soon", [], {}, [[]], 10**400, -1, 1.5, True, [0], [0, 0], ["x", 1], [1e300]]


@pytest.mark.parametrize("command", TOLD)
def test_a_reply_that_lacks_or_garbles_what_was_asked_is_none(command: str) -> None:
    """A worker that runs an untrusted file may be made to say anything."""

    def read(fields: dict[str, object]) -> dict[str, object] | None:
        return read_reply(json.dumps({"ok": True, "number": 7, **fields}).encode(), 7, ASKED[command], on_gpu=True)

    told = TOLD[command]
    assert read(told) is not None
    for key, good in told.items():
        assert read({name: value for name, value in told.items() if name != key}) is None
        kept = [bad for bad in BAD if read({**told, key: bad}) is not None]
        # None of a settling run that was left out, no processor time, and whatever a text or a plain number may be.
        assert all(type(value) in {type(good), float, int, type(None), list} for value in kept)
        assert 10**400 not in kept and -1 not in kept and "soon" not in kept and {} not in kept and [[]] not in kept
    empty = {"warm_up": "first_s", "block": "samples_s"}.get(command)
    assert empty is None or read({**told, empty: []}) is None


@pytest.mark.parametrize(
    ("asked", "held"),
    [
        ({"do": "load"}, {"ran_on": ["x"] * 100_000}),
        ({"do": "load"}, {"missing": ["x" * 10_000]}),
        ({"do": "load"}, {"load_s": 5e-324}),
        ({"do": "warm_up"}, {"first_s": [0.1] * 51}),
        ({"do": "warm_up"}, {"run_s": 5e-324}),  # what follows divides by it
        ({"do": "block", "runs": 5, "streams": 1}, {"samples_s": [0.1] * 6}),
        ({"do": "block", "runs": 5, "streams": 1}, {"samples_s": [0.1] * 4}),
        ({"do": "block", "runs": 5, "streams": 1}, {"samples_s": [5e-324] * 5}),
        ({"do": "block", "runs": 5, "streams": 1}, {"cpu_s": [0.0]}),
        ({"do": "block", "runs": 5, "streams": 2}, {"cpu_s": [0.0] * 5}),
        ({"do": "block", "runs": 5, "streams": 1}, {"device_s": [0.0] * 6}),
    ],
)
def test_a_reply_holds_as_much_as_was_asked(asked: dict[str, Any], held: dict[str, object]) -> None:
    """Fifteen million samples of five runs were taken."""
    told = dict(TOLD[asked["do"]])
    if asked["do"] == "block":
        told |= {"samples_s": [0.1] * 5, "cpu_s": [0.0] * (5 if asked["streams"] == 1 else 1), "device_s": [0.0] * 5}
    read = [json.dumps({"ok": True, "number": 7, **told, **more}).encode() for more in ({}, held)]
    assert [read_reply(line, 7, asked, on_gpu=True) is not None for line in read] == [True, False]


def test_times_of_a_gpu_are_told_where_there_is_one() -> None:
    line = json.dumps({"ok": True, "number": 7, **TOLD["block"], "device_s": [0.1]}).encode()
    assert [read_reply(line, 7, ASKED["block"], on_gpu=place) is not None for place in (True, False)] == [True, False]


def test_an_error_is_told_short_and_escaped(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with Fleet([make()]) as fleet:
        session = fleet.sessions[0]
        monkeypatch.setattr(session, "_exchange", lambda request: {"ok": False, "error": "\x1b[31m" + "a" * 50_000_000})
        with pytest.raises(WorkerFailed, match=r"^block: \\x1b\[31ma{1900,2000}$"):
            session.ask("block")
