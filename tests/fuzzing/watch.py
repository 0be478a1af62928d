"""What a process does while it opens a file, told by Python's own audit events."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path
from typing import Any

from tests.fuzzing.hostile import CALLED, SIGN

_NEVER = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.startfile", "subprocess.Popen",
    "pty.spawn", "socket.", "urllib.Request", "webbrowser.open", "smtplib.", "ftplib.", "os.kill", "os.putenv",
    "os.chmod", "os.chown", "os.link", "os.symlink", "pickle.find_class", "shutil.chown", "code.__new__",
)  # fmt: skip
_MOVES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "shutil.")
#: What `ast.parse` calls source that is read, and not run.
_PARSED = "<unknown>"
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Watch:
    """Notes what no opening of a file may do.

    Args:
        folder: Where files may be written.
        own: Events that the process itself has reason for.
    """

    def __init__(self, folder: Path, own: tuple[str, ...] = ()) -> None:
        self._folder, self._own = str(folder.resolve()), own
        self._armed = False
        self.seen: list[str] = []
        sys.addaudithook(self._note)

    def begin(self) -> None:
        """Start to look."""
        self.seen, self._armed = [], True

    def end(self) -> list[str]:
        """Stop looking; return what was seen."""
        self._armed = False
        return self.seen

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._armed:
            return
        self._armed = False  # looking makes events of its own
        try:
            if self._is_wrong(event, arguments):
                self.seen.append(f"{event} {ascii(arguments)[:200]}")
        finally:
            self._armed = True

    def _is_wrong(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event in self._own:
            return False
        if event == "open":
            return self._is_outside(arguments[0]) and (SIGN in str(arguments[0]) or bool((arguments[2] or 0) & _WRITES))
        if event == "compile":
            return arguments[1] != _PARSED and _is_written(arguments[0])
        if event == "import":
            return SIGN in str(arguments[0]) or str(arguments[0]) in ("antigravity", "this")
        return event.startswith(_NEVER) or (event.startswith(_MOVES) and self._is_outside(arguments[0]))

    def _is_outside(self, path: Any) -> bool:
        if isinstance(path, int) or path is None:
            return False
        name = os.path.abspath(os.fsdecode(path))
        return not name.startswith((self._folder, "/dev/null"))


def _is_written(source: Any) -> bool:
    """Say whether source that is compiled was written by a mutated file: its sign is in a call."""
    text = source.decode("utf-8", "replace") if isinstance(source, bytes) else source
    if not isinstance(text, str) or SIGN not in text:
        return False
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return True
    return any(isinstance(node, ast.Name) and node.id in CALLED for node in ast.walk(tree))
