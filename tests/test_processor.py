"""Which processors integers are made for, and what a machine's own is."""

import pytest

from optimize import processor
from optimize.errors import TargetUnavailable, UsageError
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


def test_what_is_kept_from_kernels_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor.Path, "read_text", lambda *_, **__: "flags : avx2 avx512_vnni avx512_bf16 amx_int8")
    for most, level in (("", "amx"), ("AVX512_CORE_VNNI", "vnni"), ("AVX2", "avx2")):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", most)
        found = processor.host.__wrapped__()
        assert (found.level, found.has_avx512_bf16) == (level, most == "")


@pytest.mark.parametrize(
    ("cpu", "here", "told", "wrong"),
    [
        ("any", "fpu avx2", "right on every x86", False),
        ("vnni", "fpu avx2", "Use --cpu any", True),
        ("vnni", "fpu avx2 avx_vnni", "Use --cpu any", False),
        ("arm-dotprod", "fpu avx2", "Use --cpu any", True),
        ("vnni", "fpu sse4_2", "Use --cpu any", False),
    ],
)
def test_a_file_says_where_it_is_right(cpu: str, here: str, told: str, wrong: bool) -> None:
    promise = processor.promise(cpu, "every x86 there is", room_bits=0.25)
    assert told in promise and ("0.25 bits from the weights, 1.5 dB" in promise) is (cpu == "any")
    assert bool(processor.misfit(cpu, described(f"flags : {here}"))) is wrong


def test_a_processor_is_emulated_where_there_is_something_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processor.emulated(["sse4", "avx2", "sse4"]) == ("sse4", "avx2")
    with pytest.raises(ValueError, match="no processor 'vnni' to emulate"):
        processor.emulated(["vnni"])
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    words = ("-cpu", "Haswell", "-E", "OPENBLAS_CORETYPE=Haswell")
    assert processor.emulator("avx2") == ("/bin/qemu-x86_64", *words)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(TargetUnavailable, match="qemu-x86_64 is not installed") as raised:
        processor.emulator("avx2")
    assert "apt install qemu-user" in str(raised.value)


def test_an_x86_without_the_instruction_lacks_bfloat16() -> None:
    kinds = ("fpu avx2", "fpu avx2 avx512_bf16", "fp asimd bf16")
    assert [described(f"flags : {flags}").lacks_bfloat16 for flags in kinds] == [True, False, False]
