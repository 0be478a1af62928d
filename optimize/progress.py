"""How far something is, told from inside passes and targets to whoever shows it; what libraries say is kept apart."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

#: Told the phase and the share of it that is done, from 0 to 1.
Progress = Callable[[str, float], None]


def silent(phase: str, share: float) -> None:
    """Show no progress: a ``Progress`` for callers that gave none."""


_listener: ContextVar[Progress] = ContextVar("listener", default=silent)
_reader: ContextVar[Callable[[str], object]] = ContextVar("reader", default=lambda sentence: None)


@contextmanager
def heard_by(listener: Progress, reader: Callable[[str], object] | None = None) -> Iterator[None]:
    """Pass what is told inside the block to ``listener``, and what is said to ``reader``, where there is a new one.

    >>> told = []
    >>> with heard_by(lambda *entry: told.append(entry)):
    ...     tell("build", 0.5)
    >>> told
    [('build', 0.5)]
    """
    token, before = _listener.set(listener), _reader.set(reader or _reader.get())
    try:
        yield
    finally:
        _listener.reset(token)
        _reader.reset(before)


@contextmanager
def quiet(*loggers: str, level: int = logging.CRITICAL) -> Iterator[None]:
    """Keep the warnings of libraries, and what some loggers say below a level, off the user's terminal."""
    found = [logging.getLogger(name) for name in loggers]
    levels = [logger.level for logger in found]
    try:
        for logger in found:
            logger.setLevel(level)
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for logger, before in zip(found, levels, strict=True):
            logger.setLevel(before)


def tell(phase: str, share: float) -> None:
    """Say that a phase is done to this share; without a listener nobody hears it."""
    _listener.get()(phase, share)


def say(sentence: str) -> None:
    """Say at once what a report says in the end, and what may be reason to stop; without a reader nobody sees it."""
    _reader.get()(sentence)
