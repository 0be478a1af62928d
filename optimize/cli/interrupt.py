"""Ctrl-C that native code survives and nothing swallows: where it cannot be heard, an interrupt comes again.

An extension written in C++ that meets a Python exception while it is initialised ends the process with
``std::terminate``: nothing would be tidied up, and a traceback would be all that the user sees. And Python ignores what
is raised while an object dies (``__del__``, callbacks of weak references): the run would go on as if nothing was said.
A module of the user's own that works while it is imported is Python, and is interrupted as any other code.
"""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import threading
import time
from types import FrameType

#: When an interrupt that cannot be heard comes again, and how long after the first one it is raised all the same.
_AGAIN_S, _PATIENCE_S = 0.05, 20.0
_LIBRARIES = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
#: When the first interrupt came that has not been raised yet.
_first_s: list[float] = []
_NUMBERS = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))


def install() -> None:
    """Let Ctrl-C, a request to end and a closed terminal raise ``KeyboardInterrupt`` where it can be caught.

    What the shell told this process to ignore (Ctrl-C of a job in the background) stays ignored.
    """
    for number in _NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    if hasattr(signal, "SIGCHLD"):  # where it is ignored, nobody learns how a process ended
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.unraisablehook = _take_up


def ignore() -> None:
    """Let what has been heard be enough: nothing more interrupts this process while it ends."""
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    now_s = time.monotonic()
    _first_s[:] = _first_s or [now_s]
    if not _is_loading(frame) or now_s > _first_s[0] + _PATIENCE_S:
        _first_s.clear()
        raise KeyboardInterrupt
    _send_again(number)


def _take_up(ignored: sys.UnraisableHookArgs) -> None:
    """Send an interrupt again that was ignored; show whatever else was as Python does."""
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        _send_again(signal.SIGINT)
    else:
        sys.__unraisablehook__(ignored)


def _send_again(number: int) -> None:
    # Sent to the main thread, whose system calls it ends: raised in the timer's, it would wait until they do.
    again = threading.Timer(_AGAIN_S, signal.pthread_kill, (threading.main_thread().ident, number))
    again.daemon = True
    again.start()


def _is_loading(frame: FrameType | None) -> bool:
    """Say whether a library is being imported: the innermost import under way is of none of the user's modules."""
    inside = None
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return inside is None or inside.f_code.co_filename.startswith(_LIBRARIES)
        inside, frame = frame, frame.f_back
    return False
