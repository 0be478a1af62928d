"""What this processor can: read once, so that everybody who asks is told the same."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from optimize.errors import UsageError, nearest

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


#: Processors that integers can be made for, and whether kernels there add two products of bytes in 16 bits.
CPUS = {"any": True, "avx2": True, "vnni": False, "amx": False, "arm-dotprod": False}
#: The same, and the one that this runs on.
CPU_NAMES = (*CPUS, "host")
_VNNI = frozenset({"avx512_vnni", "avx_vnni", "avx_vnni_int8"})


def named(cpu: str) -> str:
    """Return the processors of a name, one of ``CPUS``; for ``host`` what this machine's is.

    Raises:
        UsageError: There is no such name.
    """
    if cpu not in CPU_NAMES:
        raise UsageError(f"There is no processor '{cpu}' to make integers for.", hint=nearest(cpu, CPU_NAMES))
    return host().level if cpu == "host" else cpu


def adds_pairs(cpu: str) -> bool:
    """Say whether kernels of such processors add two products of bytes in 16 bits, which saturate.

    ``vpmaddubsw`` does, the instruction of x86 without VNNI.
    """
    return CPUS[cpu]


def promise(cpu: str, here: Processor) -> str:
    """Return on which processors integers made for some are right, and by what proof, for who reads it on another."""
    if adds_pairs(cpu):
        return (
            "INT8 is right on every x86 and ARM processor: where products of two neighbours are added in 16 bits (x86 "
            "without VNNI), their weights add up to 128 at most, and 255 * 128 fits."
        )
    wrong = " This processor does: what was measured here is not what it answers there." if here.level == "avx2" else ""
    return (
        f"INT8 was made for {cpu}: x86 without VNNI adds products in 16 bits, which overflow, and would answer "
        f"otherwise. Use --cpu any for that.{wrong}"
    )


@functools.cache
def host() -> Processor:
    """Return the processor that this runs on."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return described(text)


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
