"""How long the expressions are that a graph's sizes become, counted before anybody multiplies them out.

A graph may compute a size from sizes, and every shape is compared with others: torch and `misfits` write sums of
products for that, of which a power of a sum has more than memory holds. Their terms are counted on the expression as it
stands: those of a sum added, those of a product multiplied, and whole numbers by the words they take.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
from torch import fx

from optimize import graph
from optimize.load.description import Malformed

#: Terms of one value's sizes multiplied together, of all that one call takes, and of all calls. A network with free
#: height and width has 16, 256 and some thousands.
_MOST_TERMS, _MOST_TOGETHER, _MOST_IN_ALL = 1 << 12, 1 << 16, 1 << 20
#: Calls that put tensors beside one another, so that their terms add up.
_BESIDE = ("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack")
_POWERS = (operator.pow, math.pow)
_WORD = 64


class Terms:
    """Counts the terms of a graph's calls, in the order in which they are computed."""

    def __init__(self) -> None:
        self._in_all = 0.0

    def refuse_many(self, node: fx.Node) -> None:
        """Count those of a call, the shapes of what it takes being known.

        Raises:
            Malformed: They are more than any network has.
        """
        found = [_of_value(value.meta.get("val")) for value in node.all_input_nodes]
        self._in_all += sum(found)
        together = sum(found) if graph.op_name(node) in _BESIDE else math.prod(found) ** _exponent(node)
        if max(found, default=0) > _MOST_TERMS or together > _MOST_TOGETHER or self._in_all > _MOST_IN_ALL:
            raise Malformed(f"'{node.name}' computes with sizes of more terms than any network has")


def _exponent(node: fx.Node) -> int:
    """Return how often a function of sizes multiplies what it is given with itself; `description` bounds that."""
    exponent: Any = node.args[1] if node.target in _POWERS else 1
    return max(1, math.ceil(abs(exponent)))


def _of_value(value: Any) -> int:
    """Return the terms of a size, or of all sizes of a tensor multiplied."""
    if isinstance(value, list | tuple):
        return max(map(_of_value, value), default=1)
    return math.prod(map(_of_size, value.shape)) if isinstance(value, torch.Tensor) else _of_size(value)


def _of_size(size: Any) -> int:
    return _count(size.node.expr) if isinstance(size, torch.SymInt | torch.SymFloat) else 1


@functools.lru_cache(maxsize=1 << 12)
def _count(expression: Any) -> int:
    """Return how many terms an expression has when it is multiplied out, or more."""
    if not expression.args:
        return 1 + int(expression).bit_length() // _WORD if expression.is_Integer else 1
    parts = list(map(_count, expression.args))
    if expression.is_Pow:
        exponent = expression.args[1]
        return parts[0] ** min(math.ceil(abs(exponent)), _WORD) if exponent.is_number else _MOST_IN_ALL
    return math.prod(parts) if expression.is_Mul else sum(parts)
