"""Joules, where the machine counts them: RAPL's counters of the processor packages, or the power a GPU reports."""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from optimize.measure.environment import ask_gpus

POWERCAP = Path("/sys/class/powercap")


class EnergyMeter(ABC):
    """A counter of the energy that the whole device takes, other work on it included.

    Attributes:
        source: What counts, as a phrase.
    """

    source: str

    @abstractmethod
    def joules(self) -> float:
        """Return the energy taken since some moment in the past."""


@dataclass
class Rapl(EnergyMeter):
    """Intel's and AMD's running average power limit: a counter a package in microjoules, that starts again when full.

    Attributes:
        counters: The files that hold them.
    """

    counters: tuple[Path, ...]
    source: str = "RAPL, all processor packages"
    _total_uj: float = 0.0
    _last_uj: dict[Path, int] = field(default_factory=dict)

    def joules(self) -> float:
        """Return the energy of all packages since the first reading."""
        for counter in self.counters:
            now = int(counter.read_text(encoding="ascii"))
            before = self._last_uj.get(counter, now)
            full = 0 if now >= before else int((counter.parent / "max_energy_range_uj").read_text(encoding="ascii"))
            self._total_uj += now - before + full
            self._last_uj[counter] = now
        return self._total_uj / 1e6


@dataclass
class GpuPower(EnergyMeter):
    """The power of the first GPU, read at the end of each block and multiplied by the time since the last reading.

    Attributes:
        command: ``nvidia-smi``.
    """

    command: str
    source: str = "nvidia-smi, power of the first GPU"
    _total_j: float = 0.0
    _last_s: float | None = None

    def joules(self) -> float:
        """Return the energy since the first reading."""
        watts, now_s = gpu_watts(self.command) or 0.0, time.monotonic()
        self._total_j += watts * (now_s - self._last_s) if self._last_s is not None else 0.0
        self._last_s = now_s
        return self._total_j


def find_meter(device: str, folder: Path = POWERCAP) -> tuple[EnergyMeter | None, str]:
    """Return the meter of a device and what counts, or None and why there is none.

    Args:
        device: ``cpu`` or ``cuda``.
        folder: Where the system keeps RAPL's counters.
    """
    if device == "cuda":
        command = shutil.which("nvidia-smi")
        if command is None or gpu_watts(command) is None:
            return None, "not offered: nvidia-smi reports no power"
        meter: EnergyMeter = GpuPower(command)
        return meter, meter.source
    found = tuple(path for path in sorted(folder.glob("*-rapl:*/energy_uj")) if path.parent.name.count(":") == 1)
    if not found:
        return None, f"not offered: no RAPL counter under {folder}"
    if not all(map(_is_readable, found)):
        return None, f"not offered: the RAPL counters under {folder} may be read by root alone"
    meter = Rapl(found)
    return meter, meter.source


def gpu_watts(command: str) -> float | None:
    """Return the power of the first GPU in watts, None where it reports none."""
    with suppress(ValueError):
        return next(map(float, ask_gpus(command, "power.draw", "--format=csv,noheader,nounits", "--id=0")), None)
    return None


def _is_readable(path: Path) -> bool:
    try:
        return path.read_text(encoding="ascii").strip().isdigit()
    except OSError:
        return False
