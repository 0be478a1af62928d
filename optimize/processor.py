"""What this processor can: read once, so that everybody who asks is told the same."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from optimize import bounds
from optimize.errors import TargetUnavailable, UsageError, nearest

#: What tells apart machines whose processors share a model name.
_IDENTITY = ("vendor_id", "cpu family", "model", "stepping", "cache size")


@dataclass(frozen=True)
class Processor:
    """The first processor of a machine, as Linux describes it; of others only the name is known.

    Attributes:
        name: Of the model.
        flags: Its instruction sets and other marks, as Linux names them.
        identity: What else tells it from others of the same name.
    """

    name: str = ""
    flags: frozenset[str] = frozenset()
    identity: Mapping[str, str] = field(default_factory=dict)

    @property
    def level(self) -> str:
        """Which of ``CPUS`` it is, by what multiplies and adds bytes; ``any`` where that is not known."""
        known = ({"amx_int8"}, "amx"), (_VNNI, "vnni"), ({"asimddp"}, "arm-dotprod"), ({"avx2"}, "avx2")
        return next((level for flags, level in known if self.flags & flags), "any")

    @property
    def has_avx512_bf16(self) -> bool:
        """Whether it multiplies bfloat16 faster than float32 in the kernels of torch and OpenVINO."""
        return "avx512_bf16" in self.flags

    @property
    def lacks_bfloat16(self) -> bool:
        """Whether it is an x86 that has no instruction for products of bfloat16."""
        return "fpu" in self.flags and not self.has_avx512_bf16


#: Processors that integers can be made for, and whether kernels there add two products of bytes in 16 bits.
CPUS = {"any": True, "avx2": True, "vnni": False, "amx": False, "arm-dotprod": False}
#: The same, and the one that this runs on.
CPU_NAMES = (*CPUS, "host")
#: Processors that ``qemu-x86_64`` runs files on, by its own name of one that has no more than that.
EMULATED = {"avx2": "Haswell", "sse4": "Nehalem"}
#: What one bit more takes from the noise of rounding.
_DB_A_BIT = 6.02
_VNNI = frozenset({"avx512_vnni", "avx_vnni", "avx_vnni_int8"})
#: What is beyond levels of oneDNN's, of all that is asked for here.
_BEYOND = {"AVX512_CORE_VNNI": {"avx512_bf16", "amx_int8"}}
_BEYOND["AVX2"] = _BEYOND["AVX512_CORE"] = {*_BEYOND["AVX512_CORE_VNNI"], *_VNNI}


def named(cpu: str) -> str:
    """Return the processors of a name, one of ``CPUS``; for ``host`` what this machine's is.

    Raises:
        UsageError: There is no such name.
    """
    if cpu not in CPU_NAMES:
        raise UsageError(f"There is no processor '{cpu}' to make integers for.", hint=nearest(cpu, CPU_NAMES))
    return host().level if cpu == "host" else cpu


def known(cpu: str, precision: str) -> str:
    """Return a name as a file says it where it is one of ``CPUS``, and its graph not of floats, else nothing."""
    return cpu if cpu in CPUS and precision == "int8" else ""


def adds_pairs(cpu: str) -> bool:
    """Say whether kernels of such processors add two products of bytes in 16 bits, which saturate.

    ``vpmaddubsw`` does, the instruction of x86 without VNNI.
    """
    return CPUS[cpu]


def promise(cpu: str, runs_on: str, room_bits: float = 0.0) -> str:
    """Return on which processors integers made for some are right, and by what proof, for who reads it on another.

    Args:
        cpu: What they were made for.
        runs_on: Where the runtime has integer kernels for the file, in words.
        room_bits: What room for sums of two took from the weights.
    """
    if adds_pairs(cpu):
        return (
            f"INT8 is right on {runs_on}: where products of two neighbours are added in 16 bits (x86 "
            "without VNNI), their weights add up to 128 at most, and 255 * 128 fits. That took "
            f"{room_bits:.2f} bits from the weights, {_DB_A_BIT * room_bits:.1f} dB of their rounding."
        )
    return (
        f"INT8 was made for {cpu}: x86 without VNNI adds products in 16 bits, which overflow, and would answer "
        "otherwise. Use --cpu any for that."
    )


def misfit(cpu: str, here: Processor) -> str:
    """Return why integers made for some processors are wrong on one, as a clause; empty where they are right.

    >>> misfit("any", described("flags : avx2")), misfit("vnni", described("flags : avx2 avx_vnni"))
    ('', '')
    """
    if not cpu or adds_pairs(cpu) or here.level != "avx2":
        return ""
    return f"INT8 was made for {cpu}, and this processor lacks those instructions: it answers otherwise here than there"


def emulated(names: Iterable[str]) -> tuple[str, ...]:
    """Return names of processors that can be emulated, each once.

    Raises:
        ValueError: There is no such processor.
    """
    for name in names:
        if name not in EMULATED:
            raise ValueError(f"there is no processor '{name}' to emulate ({nearest(name, EMULATED).rstrip('.')})")
    return tuple(dict.fromkeys(names))


def emulator(name: str) -> tuple[str, ...]:
    """Return the words before a command that run it on one of ``EMULATED``.

    Raises:
        TargetUnavailable: This machine has no emulator, or is no x86 itself, so that its programs are not.
    """
    found = shutil.which("qemu-x86_64") if platform.machine() in ("x86_64", "AMD64") else None
    if found is None:
        raise TargetUnavailable(
            f"No processor '{name}' can be emulated here: qemu-x86_64 is not installed, or this is no x86.",
            hint="apt install qemu-user; without --verify-on what a file says of its integers stands alone.",
        )
    # NumPy's OpenBLAS is told the processor, too: on some machines it takes kernels that the emulated one lacks.
    return (found, "-cpu", EMULATED[name], "-E", f"OPENBLAS_CORETYPE={EMULATED[name]}")


@functools.cache
def host() -> Processor:
    """Return the processor that this runs on, without what ``ONEDNN_MAX_CPU_ISA`` keeps from kernels."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = described(text)
    return dataclasses.replace(found, flags=found.flags - _BEYOND.get(os.environ.get("ONEDNN_MAX_CPU_ISA", ""), set()))


def described(cpuinfo: str) -> Processor:
    """Return the first processor in a text like that of ``/proc/cpuinfo``.

    >>> described("model name : Some CPU: fast\\nflags : fpu avx2 avx512_vnni\\n\\nmodel name : Other").name
    'Some CPU: fast'
    """
    pairs = (line.split(":", 1) for line in cpuinfo.split("\n\n")[0].splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in pairs}
    name = fields.get("model name") or platform.processor() or platform.machine()
    flags = (fields.get("flags") or fields.get("Features", "")).split()
    return Processor(name, frozenset(flags), {key: fields[key] for key in _IDENTITY if key in fields})


def numbers_of(text: str) -> tuple[int, ...]:
    """Return the numbers of the processors that ``--cpus`` names, each once.

    Raises:
        UsageError: They are no numbers.

    >>> numbers_of("0-2,5")
    (0, 1, 2, 5)
    """
    try:
        ranges = [[bounds.PROCESSOR.read(end) for end in part.split("-")] for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--cpus '{text}' does not name processors: {error}.", hint="Write 0-3 or 0,2.") from error
    if any(len(ends) > 2 or ends[0] > ends[-1] for ends in ranges):
        raise UsageError(f"--cpus '{text}' names a range that holds none.", hint="Write 0-3 or 0,2.")
    return tuple(dict.fromkeys(number for ends in ranges for number in range(ends[0], ends[-1] + 1)))
