"""Terms: the summands a value of the graph is made of, and adding them up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, cast

import torch
from torch import fx

from optimize.algebra import affine
from optimize.algebra.affine import Affine
from optimize.program import tensor_value

#: A merged kernel has at most so many times the weights of its parts: beyond, reading them takes what was saved.
MOST_GROWTH = 2


class Layout(Enum):
    """Where a value's channels lie."""

    FIRST = "first"
    LAST = "last"

    def axis(self, value: torch.Tensor) -> int:
        """Return the channel axis of a value."""
        return 1 if self is Layout.FIRST else value.dim() - 1

    def holds(self, value: torch.Tensor | None) -> bool:
        """Say whether a value can be read in this layout: images of 1 to 3 axes, or any matrix of rows."""
        if value is None or not value.is_floating_point():
            return False
        ranks = range(3, 6) if self is Layout.FIRST else range(2, 9)
        return value.dim() in ranks and isinstance(value.shape[self.axis(value)], int)

    def positions(self, value: torch.Tensor) -> int:
        """Return how often an operator is applied to make a value of the example's size; sizes of data count as 1."""
        others = value.shape[2:] if self is Layout.FIRST else value.shape[:-1]
        return math.prod(size if isinstance(size, int) else size.node.hint or 1 for size in others)

    def sizes(self, value: torch.Tensor) -> tuple[affine.Size, ...]:
        """Return the spatial sizes, None for a free one."""
        spatial = value.shape[2:] if self is Layout.FIRST else ()
        return tuple(size if isinstance(size, int) else None for size in spatial)


@dataclass(frozen=True)
class Term:
    """One summand of a value: an affine operator on another value.

    Attributes:
        source: The value it reads.
        value: The call that computes it, up to ``sign``.
        sign: 1 or -1: how ``value`` enters the sum; the operator has it already.
        nodes: The calls it stands for.
        leaves: Convolutions, linear layers, pools and parallel identities it was built from.
        weighted: How many of the leaves have weights.
        spent: Multiply-accumulates of one sample that computing it takes now.
        held: Weights of the calls it stands for.
        positions: Positions of its value: what an operator's cost is multiplied with.
        parts: The parallel operators that were added up to it.
    """

    source: fx.Node
    operator: Affine
    value: fx.Node
    sign: int = 1
    nodes: frozenset[fx.Node] = frozenset()
    leaves: int = 0
    weighted: int = 0
    spent: int = 0
    held: int = 0
    positions: int = 1
    parts: tuple[Affine, ...] = ()

    @property
    def pays(self) -> bool:
        """Whether one operator costs no more than what computes the term now, and has not many more weights."""
        return self.cost <= self.spent and self.operator.cost <= MOST_GROWTH * self.held

    @property
    def cost(self) -> int:
        """Multiply-accumulates of one sample when it is one operator."""
        return self.operator.cost * self.positions

    @property
    def why_not(self) -> str:
        """Why it does not pay."""
        if self.cost > self.spent:
            return f"one operator would cost {self.cost / max(self.spent, 1):.1f}x the parts"
        return f"one operator would have {self.operator.cost / max(self.held, 1):.1f}x the weights"

    def then(self, node: fx.Node, operator: Affine, *, parts: tuple[Affine, ...] = (), **changes: Any) -> Term:
        """Return the term one call further on."""
        nodes = self.nodes | {node}
        return replace(self, operator=operator, value=node, sign=1, nodes=nodes, parts=parts or (operator,), **changes)


@dataclass(frozen=True)
class Joined:
    """Terms that became one.

    Attributes:
        term: Their sum.
    """

    term: Term
    members: tuple[Term, ...]


def join(terms: Iterable[Term], layout: Layout) -> tuple[list[Joined], list[tuple[Term, str]]]:
    """Add up the terms of each source as far as one convolution costs no more than its parts.

    Args:
        terms: Summands of one value.
        layout: Where the channels lie.

    Returns:
        What is left to add, and each term that stayed apart from another of its source with the reason.
    """
    groups: list[Joined] = []
    apart: list[tuple[Term, str]] = []
    for term in sorted(terms, key=lambda term: (not term.pays and term.leaves > 0, -term.operator.cost)):
        reason = ""
        for index, group in enumerate(groups):
            total = _try_add(group.term, term, layout)
            if isinstance(total, Term):
                groups[index] = Joined(total, (*group.members, term))
                break
            reason = total or reason
        else:
            groups.append(Joined(term, (term,)))
            if reason:
                apart.append((term, reason))
    settled: list[Joined] = []
    for group in groups:
        if len(group.members) > 1 and not group.term.pays:
            if group.term.weighted:
                apart.append((group.members[0], group.term.why_not))
            settled += [Joined(term, (term,)) for term in group.members]
        else:
            settled.append(group)
    return settled, apart


def _try_add(group: Term, term: Term, layout: Layout) -> Term | str:
    """Add a term to a group of the same source, or say why not; an empty reason for another source."""
    if group.source is not term.source or group.operator.channels != term.operator.channels:
        return ""
    source = layout.sizes(cast(torch.Tensor, tensor_value(term.source)))
    total = affine.add(group.operator, term.operator, source)
    if isinstance(total, str):
        return total
    merged = together([group, term], total)
    alone = replace(merged, spent=group.cost + merged.spent - group.spent)
    grows = total.cost > group.operator.cost
    return alone.why_not if grows and not alone.pays else merged


def together(terms: Sequence[Term], total: Affine) -> Term:
    """Return one term that stands for several of one source in parallel.

    Args:
        terms: The terms; the first gives its value.
        total: Their operators joined.
    """
    return replace(
        terms[0],
        operator=total,
        sign=1,
        nodes=frozenset().union(*(term.nodes for term in terms)),
        leaves=sum(max(1, term.leaves) for term in terms),
        weighted=sum(term.weighted for term in terms),
        held=sum(term.held for term in terms),
        spent=sum(term.spent for term in terms) + total.channels * (len(terms) - 1) * terms[0].positions,
        parts=tuple(part for term in terms for part in term.parts),
    )


def signed(term: Term, sign: int) -> Term:
    """Return ``sign * term``."""
    if sign == 1:
        return term
    minus = torch.full((term.operator.channels,), -1.0, dtype=torch.float64)
    zero = torch.zeros_like(minus)
    parts = tuple(part.scaled(minus, zero) for part in term.parts)
    return replace(term, operator=term.operator.scaled(minus, zero), sign=-term.sign, parts=parts)
