"""Where a model binds a size that was to stay free: heard from torch while it captures, with the line of user code."""

from __future__ import annotations

import contextlib
import linecache
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

_LOGGER = logging.getLogger("torch.fx.experimental.symbolic_shapes")
_MADE = re.compile(r"create_symbol (\w+) = \d+ for (\S+)\.size\(\)\[(\d+)\]")
_BOUND = re.compile(r"set_replacement (\w+) = (\d+) ")
_WORD = re.compile(r"\['?(\w+)'?\]")
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Binding:
    """A size that became a constant.

    Attributes:
        name: Of the input.
        dim: The dimension.
        size: The constant.
        where: The line of the module's code that needs it, as the end of a sentence; empty where it is not known.
    """

    name: str
    dim: int
    size: int
    where: str


class _Listener(logging.Handler):
    """Notes what torch says of sizes; it says so at the moment of it, so that the line is found on the stack."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.owners: dict[str, tuple[str, int]] = {}
        self.bindings: list[Binding] = []

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        if made := _MADE.match(said):
            self.owners[made[1]] = ("_".join(_WORD.findall(made[2])), int(made[3]))
        elif (bound := _BOUND.match(said)) and bound[1] in self.owners:
            self.bindings.append(Binding(*self.owners[bound[1]], int(bound[2]), _find_line()))


@contextlib.contextmanager
def heard_bindings() -> Iterator[list[Binding]]:
    """Yield the sizes that become constants while torch captures; the list grows as it does."""
    listener, kept = _Listener(), (_LOGGER.level, _LOGGER.propagate)
    _LOGGER.addHandler(listener)
    _LOGGER.setLevel(logging.INFO)
    _LOGGER.propagate = False  # nobody else asked
    others = [handler for handler in _LOGGER.handlers if handler is not listener]
    for handler in others:
        _LOGGER.removeHandler(handler)
    try:
        yield listener.bindings
    finally:
        _LOGGER.removeHandler(listener)
        for handler in others:
            _LOGGER.addHandler(handler)
        _LOGGER.propagate = kept[1]
        _LOGGER.setLevel(kept[0])


def _find_line() -> str:
    """Return the innermost line of a module's own code that is being run: outside of torch, in a method of a module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, torch.nn.Module) and not code.co_filename.startswith((_TORCH, "<")):
            line = linecache.getline(code.co_filename, frame.f_lineno).strip()
            return f" in {Path(code.co_filename).name}:{frame.f_lineno}" + (f" ({line})" if line else "")
        frame = frame.f_back
    return ""
