"""Which processors integers are made for, and what a machine's own is."""

import pytest

from optimize import processor
from optimize.errors import UsageError
from optimize.processor import Processor, described


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("processor: 0\nflags : fpu avx2 avx512_vnni\n", "vnni"),
        ("flags : fpu avx2 avx_vnni", "vnni"),
        ("flags : fpu avx2 avx512_vnni amx_int8", "amx"),
        ("flags : fpu avx2 avx512f", "avx2"),
        ("flags : fpu sse4_2", "any"),
        ("Features : fp asimd asimddp", "arm-dotprod"),
        ("", "any"),
    ],
)
def test_a_processor_is_told_by_what_multiplies_bytes(text: str, level: str) -> None:
    assert described(text).level == level
    assert processor.adds_pairs(level) is (level in ("any", "avx2"))


def test_this_machine_is_read_where_it_is_named_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "host", lambda: Processor(flags=frozenset({"fpu", "avx2", "avx_vnni"})))
    assert [processor.named(cpu) for cpu in ("any", "avx2", "host")] == ["any", "avx2", "vnni"]
    with pytest.raises(UsageError, match="no processor 'avx'") as raised:
        processor.named("avx")
    assert "avx2" in str(raised.value)


@pytest.mark.parametrize(
    ("cpu", "here", "told", "warned"),
    [
        ("any", "fpu avx2", "right on every x86", False),
        ("vnni", "fpu avx2", "Use --cpu any", True),
        ("vnni", "fpu avx2 avx_vnni", "Use --cpu any", False),
    ],
)
def test_a_file_says_where_it_is_right(cpu: str, here: str, told: str, warned: bool) -> None:
    found = processor.promise(cpu, described(f"flags : {here}"))
    assert told in found and ("not what it answers there" in found) is warned
