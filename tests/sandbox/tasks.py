"""What a confined child is asked to try: each returns what came of it."""

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optimize.errors import Defect, UsageError

Tell = Callable[[str, float], None]


def _tried(action: Callable[[], Any]) -> str:
    try:
        return f"done: {action()}"
    except (OSError, MemoryError, ValueError, RuntimeError) as error:
        return type(error).__name__


def _on_terminal(request: int) -> None:
    """Ask for something that a pipe has not, but a filter denies before that is seen."""
    try:
        fcntl.ioctl(os.pipe()[0], request, bytes(64))
    except OSError as error:
        if error.errno == errno.EPERM:
            raise


def escape(folder: Path, tell: Tell, outside: str, victim: int, terminal: str, service: str) -> dict[str, str]:
    """Try everything that must not be possible."""
    there = Path(outside)
    actions: dict[str, Callable[[], Any]] = {
        "write": lambda: (there / "new").write_text("x"),
        "overwrite": lambda: (there / "kept").write_text("x"),
        "truncate": lambda: os.truncate(there / "kept", 0),
        "remove": lambda: (there / "kept").unlink(),
        "rename": lambda: (there / "kept").rename(there / "moved"),
        "link": lambda: os.link(there / "kept", folder / "link"),
        "make folder": lambda: (there / "sub").mkdir(),
        "mode": lambda: (there / "kept").chmod(0o777),
        "times": lambda: os.utime(there / "kept"),
        "owner": lambda: os.chown(there / "kept", 1, 1),
        "attribute": lambda: os.setxattr(there / "kept", "user.a", b"b"),
        "network": lambda: socket.socket(),
        "unix socket": lambda: socket.socket(socket.AF_UNIX).connect(service),
        "run": lambda: subprocess.run(["/bin/true"], check=True),
        "fork": os.fork,
        "spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
        "kill": lambda: os.kill(victim, signal.SIGTERM),
        "trace": lambda: _call(101, 16, victim, 0, 0),
        "raise a limit": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1)),
        "raise a limit of the parent": lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1)),
        "namespace": lambda: _call(272, 0x10000000),
        "folder": lambda: (folder / "sub").mkdir(),
        "symlink": lambda: (folder / "link").symlink_to(there / "kept"),
        "fifo": lambda: os.mkfifo(folder / "fifo"),
        "device": lambda: os.mknod(folder / "device", 0o600 | stat.S_IFBLK, os.makedev(7, 0)),
        "signal by the kernel": lambda: fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, victim),
        "outlive the parent": lambda: _prctl(1, 0),
        "pin the parent": lambda: os.sched_setaffinity(os.getppid(), {0}),
        "pin the parent in disguise": lambda: _call(
            203, ctypes.c_long(os.getppid() | 1 << 32), 8, ctypes.byref(ctypes.c_long(1))
        ),
        "pin another": lambda: os.sched_setaffinity(victim, {0}),
        "schedule": lambda: os.sched_setparam(victim, os.sched_param(0)),
        "acl": lambda: _call(463, -100, 0, 0, 0, 0, 0),
        "flags": lambda: fcntl.ioctl(os.open(there / "kept", os.O_RDONLY), 0x40086602, b"\0" * 8),
        "terminal": lambda: _on_terminal(0x5402),
        "terminal in another size": lambda: _on_terminal(0x402C542B),
        "read a terminal": lambda: os.open(terminal, os.O_RDONLY | os.O_NOCTTY),
        "type": lambda: fcntl.ioctl(0, 0x5412, b"Z"),
        "type in other words": lambda: _call(16, 0, 0x100005412, 0),
        "hidden memory": lambda: os.memfd_create("m"),
        "capability": lambda: _held_capabilities(),
        "io_uring": lambda: _call(425, 1, 0),
        "mount": lambda: _call(165, 0, 0, 0, 0, 0),
        "memory": lambda: len(bytearray(64 << 30)),
        "large file": lambda: _large(folder / "large"),
    }
    return {name: _tried(action) for name, action in actions.items()}


def _call(*arguments: Any) -> int:
    found = ctypes.CDLL(None, use_errno=True).syscall(*arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return found


def _prctl(*arguments: int) -> int:
    if ctypes.CDLL(None, use_errno=True).prctl(*arguments, 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return 0


def _held_capabilities() -> str:
    """Return what is held beyond reading.

    Raises:
        OSError: Nothing is.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    held = int(next(line for line in lines if line.startswith("CapEff")).split()[1], 16) & ~(1 << 2)
    if not held:
        raise OSError("none")
    return hex(held)


def _large(path: Path) -> int:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with path.open("wb") as file:
        return os.truncate(file.fileno(), 1 << 40) or 1


def refuse(folder: Path, tell: Tell) -> None:
    """Raise what reaches the user."""
    raise UsageError("Not like this.", hint="Like that.")


def fail(folder: Path, tell: Tell) -> None:
    """Raise what nobody foresaw."""
    raise KeyError("dim")


def throw(folder: Path, tell: Tell) -> None:
    """End as native code does that gets no memory and catches nothing."""
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n")
    os.abort()


def be_killed(folder: Path, tell: Tell) -> None:
    """End as by the system's hand when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def swell(folder: Path, tell: Tell) -> None:
    """Ask for more memory than there is."""
    bytearray(64 << 30)


def abort(folder: Path, tell: Tell, **asked: Any) -> None:
    """End as native code ends."""
    os.abort()


def start_another(folder: Path, tell: Tell) -> None:
    """Start a program, as a compiler does, and wait for it."""
    import subprocess
    import sys

    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    tell("started", program.pid)
    program.wait()


def spin(folder: Path, tell: Tell) -> None:
    """Compute for ever, deaf to signals."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    tell("spin", float(os.getpid()))
    while True:
        sum(range(1000))


def sleep(folder: Path, tell: Tell) -> None:
    """Wait for ever."""
    time.sleep(3600)


def babble(folder: Path, tell: Tell) -> None:
    """Say what is no answer."""
    for number in range(3, 20):
        try:
            os.write(number, b"[" * 100_000 + b"\n")
        except OSError:
            continue


def chatter(folder: Path, tell: Tell) -> None:
    """Tell more in one line than progress takes."""
    tell("x" * (1 << 21), 0.5)


def overflow(folder: Path, tell: Tell) -> None:
    """Say a number by digits that no float holds."""
    for number in range(3, 20):
        with contextlib.suppress(OSError):
            os.write(number, b'{"answer": [1e999, 0, 0, 0]}\n')


def forge(folder: Path, tell: Tell) -> None:
    """Say progress that is no share, then raise what only this package's own code does."""
    tell("on", 10**60)
    tell("on", -1)
    raise Defect("This is a defect.")


def say(folder: Path, tell: Tell, told: Any) -> Any:
    """Answer what was asked."""
    return told
