"""The machine as it is read, and flags as they are picked."""

import os
import sys

from optimize.measure.environment import current, matching_flags
from optimize.processor import described


def test_this_machine() -> None:
    found = current()
    assert found.cpu and found.cores == os.cpu_count() and found.memory_bytes and found.memory_bytes > 1e8
    assert found.python.startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert {"torch", "numpy"} <= set(found.versions)


def test_flags_that_matter() -> None:
    flags = "fpu sse2 avx2 avx512f avx512vl avx512_vnni avx_vnni avx512_bf16 amx_int8 amx_tile"
    wanted = ("amx_int8", "amx_tile", "avx2", "avx512_bf16", "avx512_vnni", "avx512f", "avx_vnni")
    assert matching_flags(flags.split()) == wanted


def test_only_the_first_processor_is_read() -> None:
    text = "processor\t: 0\nmodel name\t: Some CPU: fast\n\nprocessor\t: 1\nmodel name\t: Other\n"
    assert described(text).name == "Some CPU: fast"
