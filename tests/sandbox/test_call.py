"""The sandbox: nothing outside its folder is touched, its ends are sentences, honest work goes on."""

import ctypes
import functools
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from optimize.errors import Defect, Refused, UsageError
from optimize.sandbox import ChildLimits, call
from optimize.sandbox.confine import has_gpu_device

LIMITS = ChildLimits(2 << 30, 60.0, 120.0, 1 << 20)
TASKS = "tests.sandbox.tasks"


def ask(name: str, folder: Path, limits: ChildLimits = LIMITS, progress: Any = None, **arguments: Any) -> Any:
    return call(
        name if ":" in name else f"{TASKS}:{name}", arguments, folder, about="'m.pt'", limits=limits, progress=progress
    )


def test_nothing_outside_the_folder_is_reached(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (outside / "kept").write_text("kept")
    before = (outside / "kept").stat()
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ends = os.openpty()
    service = socket.socket(socket.AF_UNIX)
    service.bind(name := f"\0optimize-{os.getpid()}")
    service.listen()
    permitted = {"hidden memory"} if has_gpu_device() else set()  # NVIDIA's driver
    try:
        beside = {"victim": victim.pid, "terminal": os.ttyname(ends[1]), "service": name}
        answer = ask("escape", inside, outside=str(outside), **beside)
        if not _has_landlock():
            pytest.skip("this kernel has no Landlock")
        assert answer.missing == ()
        assert {name for name, end in answer.value.items() if end.startswith("done")} == permitted
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()
        service.close()
        for end in ends:
            os.close(end)
    after = (outside / "kept").stat()
    assert [entry.name for entry in outside.iterdir()] == ["kept"] and (outside / "kept").read_text() == "kept"
    assert (before.st_mode, before.st_mtime_ns, before.st_uid) == (after.st_mode, after.st_mtime_ns, after.st_uid)


def test_honest_work_goes_on_and_sees_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_TOKEN", "secret")
    told: list[tuple[str, float]] = []
    answer = ask("tests.sandbox.honest:work", tmp_path, progress=lambda phase, share: told.append((phase, share)))
    assert answer.value == {"sum": 300.0**3, "read": True, "secrets": None} and told == [("half", 0.5)]
    assert (tmp_path / "result").read_text() == "x"


def test_errors_arrive_as_they_were_raised(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Not like this") as caught:
        ask("refuse", tmp_path)
    assert caught.value.hint == "Like that."
    with pytest.raises(Refused, match="KeyError: 'dim'"):
        ask("fail", tmp_path)


def test_a_child_blames_nobody_but_its_file(tmp_path: Path) -> None:
    told: list[float] = []
    with pytest.raises(Refused, match="This is a defect") as caught:
        ask("forge", tmp_path, progress=lambda phase, share: told.append(share))
    assert not isinstance(caught.value, Defect) and not told


@pytest.mark.parametrize(
    ("task", "match"),
    [
        ("swell", "asks for more memory"),
        ("abort", r"killed the process that opened it \(signal SIGABRT"),
        ("throw", r"asks for more memory than it may have here \(.*bad_alloc"),
        ("be_killed", r"was killed \(signal SIGKILL"),
        ("babble", "is no answer|killed the process"),
        ("overflow", "say something that is no answer"),
        ("chatter", "say something that is no answer"),
    ],
)
def test_bad_ends_are_refusals(tmp_path: Path, task: str, match: str) -> None:
    with pytest.raises(Refused, match=f"'m.pt' {match}|{match}"):
        ask(task, tmp_path)


def test_time_ends_on_both_clocks(tmp_path: Path) -> None:
    pids: list[int] = []
    with pytest.raises(Refused, match="still not open after 3 s"):
        ask(
            "spin", tmp_path, ChildLimits(2 << 30, 3.0, 120.0, 1), progress=lambda phase, share: pids.append(int(share))
        )
    assert not _is_alive(pids[0])
    with pytest.raises(Refused, match="still not open"):
        ask("sleep", tmp_path, ChildLimits(2 << 30, None, 0.5, 1))


def _interrupt(pids: list[int], phase: str, share: float) -> None:
    pids.append(int(share))
    raise KeyboardInterrupt


def test_ctrl_c_ends_the_child(tmp_path: Path) -> None:
    pids: list[int] = []
    interrupt = functools.partial(_interrupt, pids)
    with pytest.raises(KeyboardInterrupt):
        ask("spin", tmp_path, progress=interrupt)
    assert not _is_alive(pids[0])


def test_what_a_trusted_child_has_started_ends_with_it(tmp_path: Path) -> None:
    pids: list[int] = []
    interrupt = functools.partial(_interrupt, pids)
    with pytest.raises(KeyboardInterrupt):
        call(f"{TASKS}:start_another", {}, tmp_path, about="", limits=LIMITS, confined=False, progress=interrupt)
    for _ in range(100):  # its new parent waits for it
        if not _is_alive(pids[0]) or Path(f"/proc/{pids[0]}/stat").read_text().split(") ")[1].startswith("Z"):
            return
        time.sleep(0.05)
    pytest.fail("it goes on")


def _has_landlock() -> bool:
    """Ask the kernel itself (landlock_create_ruleset, for its version)."""
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, 0, 1) > 0


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_texts_of_an_answer_can_be_written(tmp_path: Path) -> None:
    """Half a character is no text: the file of a report could not hold it."""
    assert ask("say", tmp_path, told={"\ud800": ["\udcff", 1, None, "é"]}).value == {
        "\\ud800": ["\\udcff", 1, None, "é"]
    }
