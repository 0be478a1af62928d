"""The child's side: a process takes its own rights away, for good.

Four layers, each of the kernel's own: capabilities (none but that of reading), Landlock (no file is opened for writing,
made, moved or removed outside one folder, and there nothing but plain files; no terminal is read), a seccomp filter
(`system_calls`: no network, no other process, no change of modes, owners or limits), and hard resource limits. Nothing
of it can be undone from inside. Where the kernel or the system lacks a layer, that is returned, and the user is told.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimize.bounds import free_bytes
from optimize.errors import first_line
from optimize.sandbox.system_calls import filter_calls

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


#: Devices that a runtime opens for writing, of which none keeps anything, and those that it reads; terminals are none.
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full")
_READ_DEVICES = ("/dev/random", "/dev/urandom", "/dev/shm", "/dev/cpu")  # noqa: S108
_GPU_DEVICES = ("nvidia*", "nvidia-caps", "dri", "kfd", "dxg")
#: What of /proc is the whole system's: the superuser writes there without any capability. The list is Docker's.
_SYSTEM_WIDE = ("acpi", "bus", "fs", "irq", "scsi", "sys", "sysrq-trigger")
_CLONE_NEWNS = 0x20000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
_PR_SET_CHILD_SUBREAPER = 36
_PR_CAPBSET_DROP, _CAPABILITY_VERSION, _CAPABILITIES = 24, 0x20080522, 64
#: CAP_DAC_READ_SEARCH: files that only the superuser may read can be opened as they were.
_READ_SEARCH = 2
#: Of 1000: what the system ends first when it runs out of memory.
_FIRST_TO_GO = "500"
#: What this system lacked when this process confined itself, in words.
missing_layers: list[str] = []
_confined = False
_write_protected = False


def is_confined() -> bool:
    """Say whether this process has confined itself."""
    return _confined


def is_write_protected() -> bool:
    """Say whether this process cannot write outside its folder."""
    return _write_protected


def confine_files(folder: Path) -> None:
    """Let this process write in one folder and nowhere else; to be called while it has one thread."""
    global _write_protected
    _drop_capabilities()
    with _reported("writing files"):
        import landlock

        access = landlock.FSAccess
        reading = access.READ_FILE
        rules = landlock.Ruleset(restrict_rules=_writing(access) | reading)
        readable = [found for found in Path("/").iterdir() if found.name != "dev"]
        for found in filter(Path.exists, [*readable, *map(Path, _READ_DEVICES)]):
            rules.allow(str(found), rules=reading)
        rules.allow(str(folder), rules=_contents(access) | access.REMOVE_FILE | access.MAKE_REG)
        _allow_devices(rules)
        if has_gpu_device():
            rules.allow("/proc/self/task", rules=_contents(access))
        rules.apply()
        _write_protected = True


def confine_command(folders: Iterable[Path]) -> None:
    """Let this process, and whatever it starts, write in some folders alone and reach no network; while it has one
    thread. It may start processes, which `confine` denies, and has no limits. Under it memory is freed first.
    """
    with contextlib.suppress(OSError):  # where there is none, nothing else is ended for it either
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO, encoding="ascii")
    names_threads = has_gpu_device() and _protect_system()
    _drop_capabilities()
    with _reported("writing files"):
        import landlock

        access = landlock.FSAccess
        special = access.MAKE_CHAR | access.MAKE_BLOCK | access.MAKE_SOCK | access.MAKE_FIFO
        rules = landlock.Ruleset(restrict_rules=_writing(access))
        for folder in folders:
            rules.allow(str(folder), rules=rules.restrict_rules & ~special)
        _allow_devices(rules)
        if names_threads:
            rules.allow("/proc", rules=_contents(access))
        rules.apply()
    missing_layers.extend(filter_calls(starts_processes=True, uses_gpu=has_gpu_device()))


def confine(limits: ChildLimits) -> list[str]:
    """Take the rest away: network, other processes, memory, time; to be called when the libraries are imported.

    Returns:
        What is missing of this and of `confine_files`, nothing where all of it holds.
    """
    global _confined
    missing_layers.extend([*_limit(limits), *filter_calls(uses_gpu=has_gpu_device())])
    _confined = True
    return list(missing_layers)


def can_confine() -> bool:
    """Say whether this system lets a process give up writing files, and another one watch over it."""
    try:
        import landlock

        return landlock.landlock_abi_version() > 0 and hasattr(os, "pidfd_open")
    except Exception:  # no package, or no Linux that has it
        return False


def has_gpu_device() -> bool:
    """Say whether there is a GPU of NVIDIA's, whose driver wants more than a confined process has (``cuInit``: 304).

    It names its threads, which is writing ``/proc/PID/task/TID/comm``: of other processes than this one's, no rule can
    name it but one for all of /proc. What it asks of the kernel stands in ``system_calls``.
    """
    return any(Path("/dev", name).exists() for name in ("nvidiactl", "dxg"))


def adopt_orphans() -> None:
    """Let processes that those of this one leave behind become its own (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Let the kernel end this process when its parent is gone, killed included (Linux)."""
    import signal

    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _protect_system() -> bool:
    """Make the settings of the whole system in /proc read-only for this process and its children, as containers do.

    Returns:
        Whether they are: nobody but the superuser may write them, and he needs the right to mount for it.
    """
    if os.geteuid() != 0:
        return True
    device = os.stat("/proc").st_dev
    mounted = f" {os.major(device)}:{os.minor(device)} / ".encode()
    if Path("/proc/self/mountinfo").read_bytes().count(mounted) > 1:  # for another name of /proc its rule holds too
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    writable = [place for place in map(Path("/proc").joinpath, _SYSTEM_WIDE) if _is_writable(place)]
    if writable and not (libc.unshare(_CLONE_NEWNS) or libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)):
        for place in (str(place).encode() for place in writable):
            libc.mount(place, place, None, _MS_BIND, None)
            libc.mount(None, place, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY, None)
    ctypes.set_errno(0)
    return not any(map(_is_writable, writable))


def _is_writable(place: Path) -> bool:
    return place.exists() and not os.statvfs(place).f_flag & os.ST_RDONLY


def _allow_devices(rules: Any) -> None:
    import landlock

    devices = [*map(Path, _DEVICES), *(found for name in _GPU_DEVICES for found in Path("/dev").glob(name))]
    on_device = rules.restrict_rules & landlock.FSAccess.all_file()
    for device in filter(Path.exists, devices):
        rules.allow(str(device), rules=rules.restrict_rules if device.is_dir() else on_device)


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    """Note a layer that cannot be had: no package, no kernel support, or rights that this container does not give."""
    try:
        yield
    except Exception as error:
        missing_layers.append(f"no protection against {what} ({first_line(error)[:120]})")


def _writing(access: type) -> int:
    """Return every right that changes files; reading and running stay free."""
    everything = access.all()  # type: ignore[attr-defined]
    reading = access.EXECUTE | access.READ_FILE | access.READ_DIR  # type: ignore[attr-defined]
    return everything & ~reading


def _contents(access: type) -> int:
    """Return the rights that writing files which are there takes."""
    return access.WRITE_FILE | (access.all() & access.TRUNCATE)  # type: ignore[attr-defined]


def _drop_capabilities() -> None:
    """Give up what a superuser may beyond others, but for reading files; nothing to do for anybody else (Linux)."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(_CAPABILITIES):
        if number != _READ_SEARCH:
            libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    held = (ctypes.c_uint32 * 6)()
    libc.capget(header, held)
    keeps = 1 << _READ_SEARCH
    libc.capset(header, (ctypes.c_uint32 * 6)(held[0] & keeps, held[1] & keeps, 0, 0, 0, 0))
    ctypes.set_errno(0)  # of capabilities this kernel does not know: landlock takes an error that is left for its own


def _limit(limits: ChildLimits) -> list[str]:
    """Set hard limits; what the system already limits harder stays."""
    try:
        import resource
    except ImportError:
        return ["no limits of memory and time (this system has none)"]
    wanted = {resource.RLIMIT_FSIZE: limits.file_bytes, resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 1024}
    if limits.cpu_s is not None:
        wanted[resource.RLIMIT_CPU] = int(limits.cpu_s) + 1
    present = _address_space_bytes()
    if limits.memory_bytes is not None and present is not None:
        wanted[resource.RLIMIT_AS] = present + limits.memory_bytes
    for name, value in wanted.items():
        _, hard = resource.getrlimit(name)
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        soft = max(0, allowed - 1) if name == resource.RLIMIT_CPU else allowed  # SIGXCPU first, then SIGKILL
        resource.setrlimit(name, (soft, allowed))
    return [] if present is not None or limits.memory_bytes is None else ["no limit of memory (there is no /proc)"]


def _address_space_bytes() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
