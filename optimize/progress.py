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
def heard_by(listener: Progress) -> Iterator[None]:
    """Pass what is told inside the block to ``listener``.

    >>> told = []
    >>> with heard_by(lambda *entry: told.append(entry)):
    ...     tell("build", 0.5)
    >>> told
    [('build', 0.5)]
    """
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def read_by(reader: Callable[[str], object]) -> Iterator[None]:
    """Pass what is said inside the block to ``reader``."""
    token = _reader.set(reader)
    try:
        yield
    finally:
        _reader.reset(token)


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
