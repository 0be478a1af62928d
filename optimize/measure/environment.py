"""What a figure was measured on: the machine, its load and the versions, read without importing any of them."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from optimize import processor
from optimize.registry import targets
from optimize.targets.packaging import versions_of

CPUFREQ = Path("/sys/devices/system/cpu")
#: Runnable processes for each core from which a machine counts as busy.
BUSY_LOAD = 0.5
#: The instruction sets that decide which kernels a runtime picks, and the mark of a virtual machine.
FLAGS = re.compile(r"(avx2|avx512f|avx(512)?_vnni|avx512_(bf16|fp16)|amx_\w+|asimddp|i8mm|bf16|sve2?|hypervisor)")


@dataclass(frozen=True)
class Environment:
    """The machine and its state when measuring began.

    Attributes:
        cpu: Model name of the processor.
        cpu_flags: Its instruction sets that matter for inference; ``hypervisor`` marks a virtual machine.
        cores: Logical processors that are online.
        affinity: The processors this process may run on; empty where the system does not say.
        governor: Frequency governor of the first processor, None where it is not readable.
        frequency_mhz: Its present frequency in MHz, None where it is not readable.
        memory_bytes: Physical memory.
        system: Operating system and kernel release.
        python: Version of the interpreter.
        load_average: Runnable processes over 1, 5 and 15 minutes, None where the system does not say.
        gpus: A line a GPU: name, driver, compute capability.
        versions: Installed packages, by name.
        identity: What else tells its processor from others of that name.
    """

    cpu: str
    cores: int
    memory_bytes: int | None
    system: str
    python: str
    cpu_flags: tuple[str, ...] = ()
    affinity: tuple[int, ...] = ()
    governor: str | None = None
    frequency_mhz: float | None = None
    load_average: tuple[float, float, float] | None = None
    gpus: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    identity: dict[str, str] = field(default_factory=dict)

    @property
    def host(self) -> processor.Processor:
        """Its processor, with the instruction sets that are kept of it."""
        return processor.Processor(self.cpu, frozenset(self.cpu_flags), self.identity)

    @property
    def machine(self) -> dict[str, str]:
        """What must be the same for seconds to be comparable, by name."""
        return {
            "processor": self.cpu,
            "instruction sets": " ".join(self.cpu_flags),
            "cores": str(self.cores),
            "memory": "unknown" if self.memory_bytes is None else f"{self.memory_bytes / 2**30:.0f} GiB",
            "GPUs": "; ".join(self.gpus) or "none",
        }


def current() -> Environment:
    """Read the machine this process runs on."""
    cpu, frequencies = processor.host(), frequency_mhz()
    return Environment(
        cpu=cpu.name,
        cpu_flags=matching_flags(cpu.flags),
        cores=os.cpu_count() or 1,
        affinity=tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (),
        governor=_text(CPUFREQ / "cpu0/cpufreq/scaling_governor") or None,
        frequency_mhz=frequencies[0] if frequencies else None,
        memory_bytes=_memory_bytes(),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        load_average=_load_average(),
        gpus=ask_gpus(shutil.which("nvidia-smi") or "", "name,driver_version,compute_cap", "--format=csv,noheader"),
        versions=_versions(),
        identity=dict(cpu.identity),
    )


def busy(load: float, cores: int | None = None) -> str:
    """Return that the machine was busy as a sentence, empty where it was not.

    Args:
        load: Runnable processes over the last minute, before measuring began.
        cores: Logical processors; this machine's where None.

    >>> busy(3.0, cores=4), busy(2.0, cores=4)
    ('The machine was busy before measuring began: load 3.0 on 4 cores.', '')
    """
    cores = cores or os.cpu_count() or 1
    if load <= BUSY_LOAD * cores:
        return ""
    return f"The machine was busy before measuring began: load {load:.1f} on {cores} cores."


def frequency_mhz(folder: Path = CPUFREQ) -> list[float]:
    """Return the present frequency of the first processor in MHz; empty where it is not readable."""
    kilohertz = _text(folder / "cpu0/cpufreq/scaling_cur_freq")
    return [int(kilohertz) / 1000] if kilohertz else []


def matching_flags(flags: Iterable[str]) -> tuple[str, ...]:
    """Return the processor flags that matter for inference, sorted.

    >>> matching_flags({"fpu", "avx2", "sse4_2", "avx512_vnni", "hypervisor"})
    ('avx2', 'avx512_vnni', 'hypervisor')
    """
    return tuple(sorted(filter(FLAGS.fullmatch, flags)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _load_average() -> tuple[float, float, float] | None:
    try:
        return os.getloadavg()
    except (AttributeError, OSError):
        return None


def ask_gpus(command: str, fields: str, *options: str) -> tuple[str, ...]:
    """Return what ``nvidia-smi`` says of some fields, a line a GPU; nothing where it does not answer."""
    question = [command, f"--query-gpu={fields}", *options]
    try:
        answer = subprocess.run(question, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip())


def _versions() -> dict[str, str]:
    runtimes = (name for target in targets().values() for name in target.packages)
    return versions_of(*dict.fromkeys(("optimize", "torch", "numpy", *runtimes)))
