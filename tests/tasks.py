"""Tasks for workers, in a module that they find too."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from optimize.errors import Refused


def squaring(offset: int) -> Callable[[int], int]:
    return lambda number: number**2 + offset


def noting(folder: Path) -> Callable[[int], int]:
    """Return what leaves a file when a task is done."""

    def perform(number: int) -> int:
        (folder / str(number)).touch()
        return number**2

    return perform


def killed_once(marks: Path) -> Callable[[int], int]:
    """Return what ends its own process at the first try of the task 3, and does it at the second."""

    def perform(number: int) -> int:
        if number == 3:
            try:
                (marks / "killed").touch(exist_ok=False)
            except FileExistsError:
                return number
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    return perform


def killed_always() -> Callable[[int], int]:
    def perform(number: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return number

    return perform


def refusing() -> Callable[[int], int]:
    def perform(number: int) -> int:
        if number == 2:
            raise Refused("The second cannot be.", hint="Leave it out.")
        return number

    return perform


def waiting(folder: Path) -> Callable[[int], int]:
    """Return what leaves a file while a task runs."""

    def perform(number: int) -> int:
        running = folder / f"running-{number}"
        running.touch()
        time.sleep(0.3)
        running.unlink()
        return number

    return perform


def sleeping() -> Callable[[float], float]:
    def perform(seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    return perform


def counting_threads() -> Callable[[int], int]:
    import torch

    return lambda _: torch.get_num_threads()
