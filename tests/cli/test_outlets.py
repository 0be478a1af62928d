"""Standard output that is closed, full, left by its reader or narrow: no traceback, and the command's exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from optimize.cli import outlets

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "optimize", "run", "--help"]


def ended(*, shell: str = "", **given: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = ["sh", "-c", f'"$@" {shell}', "sh", *COMMAND]
    return subprocess.run(words, env=env, stderr=subprocess.PIPE, text=True, timeout=100, **given)  # type: ignore[call-overload]


def test_a_reader_who_has_gone_is_not_missed() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = ended(stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&-"])
def test_a_closed_descriptor_is_nothing(closed: str) -> None:
    done = ended(shell=closed, stdout=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_a_full_disk_is_told_once() -> None:
    done = ended(shell="> /dev/full")
    assert done.returncode == 1 and done.stderr.startswith("optimize: There is no space left to write.")
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_signs_that_an_encoding_lacks_have_plainer_ones() -> None:
    outlets.install()  # registers them; the streams are captured, and stay
    assert "a – b → 2.0× ┬│ \u202e".encode("ascii", "optimize.plainer") == rb"a - b -> 2.0x +| \u202e"
    assert "2 × ½".encode("latin-1", "optimize.plainer") == "2 × ½".encode("latin-1")
