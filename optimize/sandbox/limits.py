"""What a confined process may use of the machine, as numbers that travel to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from optimize.bounds import free_bytes

#: What opening a file may take beside a few times its own size: the values of a network, copies while it is captured.
_ROOM_BYTES = 4 << 30
_TIMES_FILES = 6
#: torch takes a minute of a slow processor to capture TorchScript of a MobileNetV2 again.
_BASE_S = 300.0
_BYTES_PER_S = 20_000_000


@dataclass(frozen=True)
class ChildLimits:
    """Bounds of one child process.

    Attributes:
        memory_bytes: Address space beyond what it has after importing its libraries; None leaves it free (CUDA
            reserves more than any machine has).
        cpu_s: Processor time of all its threads; None leaves it free.
        clock_s: On the clock, from its start to its answer; None leaves it free.
        file_bytes: The largest file it may write.
    """

    memory_bytes: int | None
    cpu_s: float | None
    clock_s: float | None
    file_bytes: int

    @classmethod
    def until(cls, seconds: float | None) -> ChildLimits:
        """Return bounds of work that the user vouches for: the clock's, where there are any."""
        return cls(None, None, seconds, _ROOM_BYTES)

    @classmethod
    def of(cls, paths: Iterable[Path], *, seconds: float | None = _BASE_S, on_clock: bool = False) -> ChildLimits:
        """Return bounds that suit what is opened: they grow with the files.

        Args:
            paths: The files.
            seconds: Processor time allowed beside a second for each 20 MB, twice that on the clock; None leaves time
                free, for work whose length the user chose.
            on_clock: Limit the time on the clock alone: under a limit of processor time Linux reads that clock in
                steps of milliseconds, too coarse for who measures with it.
        """
        size = sum(path.stat().st_size for path in paths if path.is_file())
        memory = min(_TIMES_FILES * size + _ROOM_BYTES, free_bytes())
        cpu_s = None if seconds is None else seconds + size / _BYTES_PER_S
        clock_s = None if cpu_s is None else 2 * cpu_s
        return cls(memory, None if on_clock else cpu_s, clock_s, _TIMES_FILES * size + _ROOM_BYTES)
