"""Channels as sets: two channels that must be cut together are one, and a channel that must stay says why."""

from __future__ import annotations

from collections.abc import Iterable

#: The channel at each index along an axis; None for an axis that is never cut (batch, space, a kernel's taps).
Axis = tuple[int, ...] | None
#: One entry an axis of a value.
Axes = tuple[Axis, ...]


def repeat(axis: tuple[int, ...], inner: int, outer: int = 1) -> tuple[int, ...]:
    """Repeat each channel ``inner`` times and the whole ``outer`` times.

    >>> repeat((7, 8), 2, 2)
    (7, 7, 8, 8, 7, 7, 8, 8)
    """
    return tuple(channel for channel in axis for _ in range(inner)) * outer


class Channels:
    """Disjoint sets of channels, each free to be cut or fixed for a reason.

    Laws: tying is symmetric, associative and idempotent, so the sets do not depend on the order of the calls; a set
    with one fixed channel is fixed.

    Example:
        >>> channels = Channels()
        >>> rows, gate, alone = channels.fresh(2), channels.fresh(2), channels.fresh(1)
        >>> channels.tie(rows, gate, "") == rows
        True
        >>> channels.find(rows[1]) == channels.find(gate[1])
        True
        >>> channels.fix(gate[:1], "it is an output")
        >>> [channels.why_fixed(channel) for channel in (*rows, *alone)]
        ['it is an output', '', '']

    Source: the union-find of R. Tarjan, "Efficiency of a Good But Not Linear Set Union Algorithm", 1975.
    """

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._reasons: dict[int, str] = {}

    def fresh(self, count: int) -> tuple[int, ...]:
        """Return new channels, each alone in its set."""
        first = len(self._parents)
        self._parents.extend(range(first, first + count))
        return tuple(range(first, first + count))

    def find(self, channel: int) -> int:
        """Return the channel that stands for the set of ``channel``."""
        while self._parents[channel] != channel:
            self._parents[channel] = self._parents[self._parents[channel]]
            channel = self._parents[channel]
        return channel

    def tie(self, first: Axis, second: Axis, reason: str) -> Axis:
        """Put the channels at equal indices of two axes in one set; return the axis both now are.

        Against None, an axis that is never cut, the other one is fixed for ``reason``.

        Raises:
            ValueError: The axes differ in length.
        """
        if first is None or second is None:
            self.fix(first, reason)
            self.fix(second, reason)
            return first or second
        for one, other in zip(first, second, strict=True):
            self._union(self.find(one), self.find(other))
        return first

    def fix(self, axis: Iterable[int] | None, reason: str) -> None:
        """Forbid cutting the channels of an axis; the first reason given to a set is kept."""
        for channel in axis or ():
            self._reasons.setdefault(self.find(channel), reason)

    def why_fixed(self, channel: int) -> str:
        """Return why the set of ``channel`` must not be cut, or an empty string."""
        return self._reasons.get(self.find(channel), "")

    def _union(self, one: int, other: int) -> None:
        if one == other:
            return
        kept, merged = min(one, other), max(one, other)
        self._parents[merged] = kept
        reason = self._reasons.pop(merged, "")
        if reason:
            self._reasons.setdefault(kept, reason)
