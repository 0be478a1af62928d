"""How far an export is, told by the target that is at it to whoever shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[Callable[[float], None] | None] = ContextVar("listener", default=None)


@contextmanager
def heard_by(listener: Callable[[float], None]) -> Iterator[None]:
    """Pass what targets tell inside the block to ``listener``.

    >>> shares = []
    >>> with heard_by(shares.append):
    ...     tell(0.5)
    >>> shares
    [0.5]
    """
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def tell(share: float) -> None:
    """Say that the export is done to this share, from 0 to 1; without a listener nobody hears it."""
    listener = _listener.get()
    if listener is not None:
        listener(share)
