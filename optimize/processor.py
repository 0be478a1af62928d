"""What this processor can: read once, so that everybody who asks is told the same."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
    def sums_in_32_bits(self) -> bool:
        """Whether products of bytes are summed in 32 bits: VNNI on x86, any other architecture, or not known.

        Without it, ``vpmaddubsw`` saturates: two products of an unsigned and a signed byte exceed 16 bits.
        """
        is_x86 = bool(self.flags & {"fpu", "sse", "sse2", "avx", "avx2"})
        return not is_x86 or bool(self.flags & {"avx512_vnni", "avx_vnni", "avx_vnni_int8", "amx_int8"})

    @property
    def has_avx512_vnni(self) -> bool:
        """Whether it adds four products of bytes at once in 32 bits, which torch's own integer kernels ask for."""
        return "avx512_vnni" in self.flags

    @property
    def has_avx512_bf16(self) -> bool:
        """Whether it multiplies bfloat16 faster than float32 in the kernels of torch and OpenVINO."""
        return "avx512_bf16" in self.flags


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
